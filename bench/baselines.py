"""What a user has without this package: plain and adaptive gradient descent, and direct solves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse as sp
import scipy.sparse.linalg as spla
from common import Data, race

from herta_gpu import HERTA, SDDSolver

RATES = (0.001, 0.01, 0.1, 1.0, 10.0)
LEVELS = (1e-2, 1e-4, 1e-6)


def operator(data: Data, lam: float) -> Any:
    return sp.csc_array(sp.eye_array(data.graph.num_nodes) + lam * data.graph.to_csr())


def solved_rows(data: Data, lam: float) -> Any:
    """A = M H^-1 X, the training rows of the model, in float64."""
    X = data.X.toarray() if sp.issparse(data.X) else data.X
    solver = SDDSolver(data.graph, lam, tol=1e-9, dtype="float64")
    return solver.solve(np.asarray(X, dtype=np.float64))[data.train]


class Objective:
    """Loss over the training rows plus ridge/2 ||W||^2, as `HERTA` defines it, on a stored A."""

    def __init__(self, A: Any, Y: Any, loss: str, ridge: float = 0.0) -> None:
        self.A, self.Y, self.loss, self.ridge = A, Y, loss, ridge
        # Least squares needs only these: thousands of steps become affordable.
        self.gram, self.AtY, self.YtY = A.T @ A, A.T @ Y, float((Y * Y).sum())

    def __call__(self, W: Any) -> tuple[float, Any]:
        if self.loss == "mse":
            G = self.gram @ W
            value = 0.5 * (float((W * (G - 2 * self.AtY)).sum()) + self.YtY)
            G -= self.AtY
        else:
            F = self.A @ W
            F -= F.max(axis=1, keepdims=True)
            of_label = float((F * self.Y).sum())
            np.exp(F, out=F)
            total = F.sum(axis=1, keepdims=True)
            value = float(np.log(total).sum()) - of_label
            F /= total
            F -= self.Y
            G = self.A.T @ F
        return value + 0.5 * self.ridge * float((W * W).sum()), G + self.ridge * W


def optimum(data: Data, objective: Objective, lam: float) -> float:
    """The least value: by least squares, or from a fit that is certified to 1e-9."""
    if objective.ridge == 0:
        A, Y = objective.A, objective.Y
        W = scipy.linalg.lstsq(A, Y, cond=1e-10, lapack_driver="gelsd")[0]
    else:
        model = HERTA(
            lam=lam, loss=objective.loss, ridge=objective.ridge, tol=1e-9, optimizer="lbfgs",
            strategy="direct", max_iter=1000, dtype="float64",
        ).fit(data.graph, data.X, data.y, data.train)  # fmt: skip
        W = model.W_
    return objective(W)[0]


def descend(objective: Objective, method: str, rate: float, steps: int, best: float) -> list[float]:
    """Relative gaps by step of gradient descent or Adam on the mean loss, from W = 0.

    Steps are those of the unrolled model, whose gradient is this one; a stored A is only faster.
    """
    n, d, c = *objective.A.shape, objective.Y.shape[1]
    W, m, v = (np.zeros((d, c)) for _ in range(3))
    gaps: list[float] = []
    for t in range(1, steps + 1):
        value, G = objective(W)
        gaps.append((value - best) / best)
        if not np.isfinite(value) or value > 1e6 * (1 + best) or gaps[-1] <= min(LEVELS):
            break
        G = G / n
        if method == "gd":
            W = W - rate * G
            continue
        m, v = 0.9 * m + 0.1 * G, 0.999 * v + 0.001 * G * G
        W = W - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return gaps


def steps_to(gaps: list[float], level: float) -> int | None:
    return next((i for i, gap in enumerate(gaps) if gap <= level), None)


def best_rate(
    objective: Objective, method: str, steps: int, best: float
) -> tuple[float, list[float]]:
    """The learning rate with the least loss, and its gaps.

    After a tenth of the steps only the two best rates go on.
    """

    def rank(gaps: list[float]) -> tuple[bool, float, int]:
        diverged = not (np.isfinite(gaps[-1]) and gaps[-1] < 1e3)
        return diverged, min(gaps), len(gaps)

    tried = {rate: descend(objective, method, rate, steps // 10, best) for rate in RATES}
    two = sorted(RATES, key=lambda rate: rank(tried[rate]))[:2]
    runs = {rate: descend(objective, method, rate, steps, best) for rate in two}
    rate = min(runs, key=lambda r: rank(runs[r]))
    return rate, runs[rate]


def herta_gaps(data: Data, lam: float, loss: str, ridge: float, best: float, optimizer: str) -> Any:
    model = HERTA(
        lam=lam, loss=loss, ridge=ridge, tol=1e-7, optimizer=optimizer, strategy="herta",
        max_iter=200,
    ).fit(data.graph, data.X, data.y, data.train)  # fmt: skip
    return [(h["loss"] - best) / best for h in model.history_], model


def unrolled_step_seconds(data: Data, lam: float, loss: str) -> float:
    """Seconds of one Adam step of a plain PyTorch TWIRLS, unrolled to a relative error of 1e-6."""
    import torch

    warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
    H = sp.csr_array(operator(data, lam)).astype(np.float32)
    parts = (torch.from_numpy(a) for a in (H.indptr, H.indices, H.data))
    Ht = torch.sparse_csr_tensor(*parts, size=H.shape)
    X = data.X.toarray() if sp.issparse(data.X) else data.X
    Xt, rows = torch.from_numpy(X.astype(np.float32)), torch.from_numpy(data.train.astype(np.int64))
    Y = torch.from_numpy(data.one_hot.astype(np.float32))
    top = 1 + 2 * lam  # each layer: Z - 2/(1 + top) (H Z - X W), which contracts by this factor
    layers = int(np.ceil(np.log(1e-6) / np.log((top - 1) / (top + 1))))
    W = torch.zeros(X.shape[1], Y.shape[1], requires_grad=True)
    adam = torch.optim.Adam([W], lr=0.01)

    def step() -> None:
        U = Xt @ W
        Z = U * (2 / (1 + top))
        for _ in range(layers):
            Z = Z - (2 / (1 + top)) * (Ht @ Z - U)
        F = Z[rows]
        if loss == "mse":
            error = 0.5 * ((F - Y) ** 2).sum()
        else:
            error = torch.nn.functional.cross_entropy(F, Y, reduction="sum")
        adam.zero_grad()
        (error / len(rows)).backward()
        adam.step()

    all_cores, best = torch.get_num_threads(), float("inf")
    for threads in {1, all_cores}:  # on a busy machine fewer can be faster: take the better
        torch.set_num_threads(threads)
        best = min(best, race({"step": step}, 3)["step"]["seconds"])
    torch.set_num_threads(all_cores)
    return best


def _superlu(H: Any) -> Callable[[Any], Any]:
    # The best of SuperLU's orders for a symmetric matrix: 5 times faster than its default.
    return spla.splu(
        H, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
    ).solve


def sparse_factors() -> dict[str, Callable[[Any], Callable[[Any], Any]]]:
    """By name: from H to a function that solves with it."""
    found: dict[str, Any] = {"splu": _superlu}
    try:
        from sksparse.cholmod import cholesky
    except ImportError:
        return found
    return {**found, "CHOLMOD": lambda H: cholesky(sp.csc_matrix(H))}


def direct_cholesky(data: Data, lam: float, factored: Any) -> Callable[[], Any]:
    """Factor H, solve for Q = H^-1 X, then the normal equations."""
    Y = data.one_hot

    def run() -> Any:
        X = data.X.toarray() if sp.issparse(data.X) else np.asarray(data.X, dtype=np.float64)
        A = factored(operator(data, lam))(X)[data.train]
        P = A.T @ A
        # A jitter that costs about 1e-9 of accuracy: X need not have full rank.
        P[np.diag_indices_from(P)] += 1e-11 * np.trace(P)
        return scipy.linalg.cho_solve(scipy.linalg.cho_factor(P), A.T @ Y)

    return run


def cgls(objective: Objective, best: float, steps: int) -> list[float]:
    """Relative gaps by step of unpreconditioned CGLS, all classes together."""
    A, Y = objective.A, objective.Y
    W = np.zeros((A.shape[1], Y.shape[1]))
    R = Y.copy()
    S = A.T @ R
    P, gamma, gaps = S.copy(), (S * S).sum(axis=0), []
    for _ in range(steps):
        gaps.append((0.5 * float((R * R).sum()) - best) / best)
        if gaps[-1] <= min(LEVELS):
            break
        Q = A @ P
        alpha = gamma / np.maximum((Q * Q).sum(axis=0), 1e-300)
        W += alpha * P
        R -= alpha * Q
        S = A.T @ R
        gamma_new = (S * S).sum(axis=0)
        P, gamma = S + (gamma_new / np.maximum(gamma, 1e-300)) * P, gamma_new
    return gaps
