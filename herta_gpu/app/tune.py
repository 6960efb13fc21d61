"""`herta tune`: choose lam, ridge and loss on the validation nodes.

What does not depend on the ridge is done once per lam: the rows of H^-1 X on the training and
validation nodes, and their singular directions.  Each ridge is then a small dense problem, for MSE
in closed form.  The winner is trained again by HERTA, on the true model and with a certificate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from herta_gpu.app.experiment import load_for, make_model
from herta_gpu.app.metrics import evaluate
from herta_gpu.app.results import Candidate, CommandOutput, candidate_rows
from herta_gpu.app.runs import check_free
from herta_gpu.app.text import table
from herta_gpu.app.train import train
from herta_gpu.datasets import Dataset
from herta_gpu.grams import RANK_CUT
from herta_gpu.losses import LOSSES, CrossEntropy
from herta_gpu.plumbing.estimator import Targets, make_targets
from herta_gpu.plumbing.stages import Stages
from herta_gpu.plumbing.validation import check_choice, check_ridge, check_rows
from herta_gpu.preconditioner import rows_of_inverse
from herta_gpu.solver import SDDSolver

LAMS = (1.0, 5.0, 10.0, 20.0, 50.0)
RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_SOLVE_TOL = 1e-5
_COLUMNS = 256  # right-hand sides solved at once
_STEPS = 200  # steps of L-BFGS for one ridge, at most


def run(args: argparse.Namespace) -> CommandOutput:
    """herta tune DATASET"""
    stages = Stages(args.verbose)
    for lam in args.lams:  # each checked before a long load
        for loss in args.losses:
            make_model(args, lam=lam, loss=loss, optimizer="cg")._checked()
    for ridge in args.ridges:
        check_ridge(ridge)
    check_free(args.out, args.overwrite)
    data = load_for(args, stages)
    for loss in args.losses:  # before the search, which takes long
        check = make_model(args, lam=args.lams[0], loss=loss, optimizer="cg")
        check._checked_data(data.graph, data.X, data.y, data.split["train"], check._checked())
    with stages("tune"):
        found = tune(
            data, args.lams, args.ridges, args.losses, args.device, args.memory_budget,
            report=stages.note,
        )  # fmt: skip
    best = found[0]
    optimizer = args.optimizer or ("cg" if best.loss == "mse" else "lbfgs")
    model = make_model(args, lam=best.lam, ridge=best.ridge, loss=best.loss, optimizer=optimizer)
    result = train(args, model, data, stages, found)
    content = {**result.as_json(), "candidates": [asdict(c) for c in found]}
    text = _text(found, data.metric) + "\n\n" + result.text(args.out)
    return CommandOutput(content, text, result.diverged)


def _text(found: list[Candidate], metric: str, shown: int = 12) -> str:
    left = len(found) - shown
    more = f"\n... and {left} more, none better" if left > 0 else ""
    return table(candidate_rows(found[:shown], metric)) + more


def tune(
    data: Dataset,
    lams: Iterable[float] = LAMS,
    ridges: Iterable[float] = RIDGES,
    losses: Iterable[str] = ("mse", "ce"),
    device: str = "auto",
    memory_budget: int | str | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> list[Candidate]:
    """Every candidate, best first; ties go to the larger ridge, then to the smaller lam.

    Examples
    --------
    >>> from herta_gpu.datasets import load
    >>> from herta_gpu.app.tune import tune
    >>> found = tune(load("digits"), lams=[1.0, 20.0], ridges=[0.01, 1.0], losses=["mse"])
    >>> len(found), found[0].lam, found[0].valid > 0.9
    (4, 20.0, True)
    """
    lams, ridges, losses = list(lams), list(ridges), list(losses)
    for ridge in ridges:
        check_ridge(ridge)
    for loss in losses:
        check_choice("loss", loss, tuple(LOSSES))
    check_rows("X", data.X, data.graph)
    data = data.with_split("public")  # masks become ids
    valid = data.split.get("valid")
    if valid is None or len(valid) == 0:
        raise ValueError(f"{data.name} has no validation nodes to choose on: use --split.")
    if not (lams and ridges and losses):
        raise ValueError("The grid is empty: give at least one lam, one ridge and one loss.")
    targets = {
        loss: make_targets(data.y, data.split["train"], data.graph.num_nodes, loss)
        for loss in losses
    }
    rows = np.concatenate([targets[losses[0]].rows, np.asarray(valid)])
    found = []
    for lam in lams:
        solver = SDDSolver(
            data.graph, lam, tol=_SOLVE_TOL, device=device, memory_budget=memory_budget
        )
        report(f"lam {lam:g}: solving for {rows.shape[0]:,} nodes")
        cut = targets[losses[0]].rows.shape[0]
        Q = propagated_rows(solver, data.X, rows)
        basis = _Basis(Q[:cut], Q[cut:])
        for loss in losses:
            found += _along_ridges(data, targets[loss], basis, lam, loss, ridges)
    return sorted(found, key=lambda c: (-c.valid, -c.ridge, c.lam))


def propagated_rows(solver: SDDSolver, X: Any, rows: Any) -> Any:
    """The rows of H^-1 X in float64; by len(rows) solves or by d, whichever are fewer."""
    n, d = X.shape
    out = np.empty((rows.shape[0], d))
    if rows.shape[0] > d:
        for j in range(0, d, _COLUMNS):
            out[:, j : j + _COLUMNS] = solver.solve(X[:, j : j + _COLUMNS])[rows]
        return out

    def solve(unit: Any) -> Any:
        return solver.solve(unit).astype(np.float64)

    for i in range(0, rows.shape[0], _COLUMNS):
        at = rows[i : i + _COLUMNS]
        out[i : i + at.shape[0]] = rows_of_inverse(np, solve, X.T.dot, at, n, solver.dtype)
    return out


class _Basis:
    """The rows in the coordinates w of W = V w, with V from the training rows A = U S V^T.

    Nothing is lost: with a ridge the best W lies in the span of V.
    """

    def __init__(self, train: Any, valid: Any) -> None:
        if train.shape[0] <= train.shape[1]:
            squares, U = np.linalg.eigh(train @ train.T)
            keep = squares > RANK_CUT * squares[-1]
            self.squares = squares[keep]
            V = (train.T @ U[:, keep]) / np.sqrt(self.squares)
        else:
            squares, V = np.linalg.eigh(train.T @ train)
            keep = squares > RANK_CUT * squares[-1]
            self.squares, V = squares[keep], V[:, keep]
        self.train, self.valid = train @ V, valid @ V


def _along_ridges(
    data: Dataset, targets: Targets, basis: _Basis, lam: float, loss: str, ridges: list[float]
) -> list[Candidate]:
    """A candidate per ridge, from the largest, which is the easiest problem, to the smallest.

    Each search starts where the one before it ended.
    """
    found = []
    w = np.zeros((basis.squares.shape[0], targets.Y.shape[1]))
    for ridge in sorted(ridges, reverse=True):
        if loss == "mse":
            w = (basis.train.T @ targets.Y) / (basis.squares + ridge)[:, None]
        else:
            w = _cross_entropy(basis, targets.Y, ridge, w)
        y_train, y_valid = data.y[targets.rows], data.y[data.split["valid"]]
        scores = [
            evaluate(data.metric, y, block @ w, targets.classes)
            for y, block in ((y_train, basis.train), (y_valid, basis.valid))
        ]
        found.append(Candidate(lam, ridge, loss, *scores))
    return found


def _cross_entropy(basis: _Basis, Y: Any, ridge: float, start: Any) -> Any:
    """argmin of the cross entropy plus ridge/2 ||w||^2, in coordinates scaled by its Hessian."""
    from scipy.optimize import minimize  # slow to import, and no other command needs it

    loss, c = CrossEntropy(), Y.shape[1]
    scale = 1 / np.sqrt(basis.squares * (1 - 1 / max(c, 2)) / max(c, 2) + ridge)[:, None]

    def value(flat: Any) -> tuple[float, Any]:
        w = scale * flat.reshape(start.shape)
        F = basis.train @ w
        gradient = basis.train.T @ loss.residual(np, F, Y) + ridge * w
        total = loss.value(np, F, Y) + 0.5 * ridge * float((w * w).sum())
        return total, (scale * gradient).ravel()

    first = (start / scale).ravel()
    found = minimize(value, first, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS})
    return scale * found.x.reshape(start.shape)
