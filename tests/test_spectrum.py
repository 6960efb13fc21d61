"""Bounds of the preconditioned Hessian, against its eigenvalues by dense algebra."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from herta_gpu import HERTA, Graph
from herta_gpu.backends import get_backend
from herta_gpu.certificate import (
    Missed,
    Spectrum,
    _norm_bound,
    choose_spectrum,
    lanczos,
    measured_spectrum,
    probabilistic_spectrum,
    ritz_interval,
)
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian, chebyshev_degree
from herta_gpu.planning.plan import Recipe
from herta_gpu.preconditioner import Preconditioner, build, no_preconditioner
from herta_gpu.problem import UnfoldedMap
from tests.conftest import dense_H, random_graph

N, D = 90, 6
BACKEND = get_backend("cpu")
RECIPE = Recipe(
    degree=10, width=4, exact=False, sketch_rows=None, by_rows=False, row_tol=1e-10,
    all_rows=True, keep_rows=False, whiten=False, goal=None, keep_residual=False, curvature=1.0,
    symmetric=False, seed=0,
)  # fmt: skip


class Case:
    """P of some recipe, and the dense Hessian behind it."""

    def __init__(
        self, lam: float = 5.0, ridge: float = 0.0, n_train: int = 60, dtype: str = "float32",
        **recipe: Any,
    ) -> None:  # fmt: skip
        graph, rng = random_graph(N, 250), np.random.default_rng(0)
        X, train = rng.standard_normal((N, D)), np.sort(rng.permutation(N)[:n_train])
        self.H = RegularizedLaplacian(graph, lam, BACKEND, dtype)
        self.map = UnfoldedMap(self.H, Features(X, BACKEND), train, 8)
        self.whole = np.linalg.solve(dense_H(graph, lam), X)
        self.A, self.ridge = self.whole[train], ridge
        Y = rng.standard_normal((n_train, 2))
        self.P = build(replace(RECIPE, **recipe), self.H, self.map, Y, ridge)

    def eigenvalues(self) -> Any:
        C = self.P.factor.to_weights(np.eye(self.P.factor.rank))
        T = self.A.T @ self.A + self.ridge * np.eye(D)
        return np.linalg.eigvalsh(C.T @ T @ C)

    def norm(self) -> float:
        """||H^-1 X P^-1/2||."""
        return float(np.linalg.norm(self.whole @ self.P.factor.to_weights(np.eye(D)), 2))

    def holds(self, found: Spectrum) -> bool:
        values = self.eigenvalues()
        inside = found.a <= values[0] and values[-1] <= found.b
        return bool(inside) and self.norm() <= found.norm


@pytest.mark.parametrize("kind", ["spectral-proven", "spectral-deterministic"])
@pytest.mark.parametrize("ridge", [0.0, 0.5])
@pytest.mark.parametrize("lam", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("eps", [1e-1, 1e-2, 1e-4])
def test_what_the_polynomial_proves(kind, ridge, lam, eps):
    case = Case(lam, ridge)
    degree = chebyshev_degree(case.H, eps)
    case = Case(lam, ridge, degree=degree)
    found = choose_spectrum(kind, case.P, case.map, ridge, 0)
    assert found is not None
    if found.kind != "estimate":
        assert case.holds(found)
    if eps == 1e-4:
        assert found.kind in ("spectral-proven", "spectral-deterministic")
        assert found.probability == 0.0
        assert found.kappa < 1.5


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("ridge", [0.0, 0.5])
@pytest.mark.parametrize("goal", [1e-2, 1e-4, 1e-7])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_residuals_prove(whiten, ridge, goal, dtype):
    made = {"all_rows": False, "keep_rows": True, "goal": goal, "whiten": whiten}
    case = Case(5.0, ridge, dtype=dtype, **made)
    found = measured_spectrum(case.P, case.P.column_error)
    if found is not None:
        assert case.holds(found)
        assert found.kind == "spectral-deterministic"
    if goal == 1e-7:
        assert found is not None
        assert found.kappa == pytest.approx(1, abs=1e-4)
        again = choose_spectrum("residual", case.P, case.map, ridge, 0)
        assert again == found


def test_residuals_that_are_too_large_prove_nothing():
    case = Case(all_rows=False, goal=1e-3)
    assert measured_spectrum(case.P, np.full(D, 10.0)) is None


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_lanczos_brackets_the_spectrum(ridge):
    """Six directions are all that there are: Ritz values are eigenvalues, up to the solves."""
    case = Case(5.0, ridge, degree=2, all_rows=False)
    found = probabilistic_spectrum(case.P, case.map, ridge, 0)
    assert found is not None
    assert case.holds(found)
    assert found.a >= 0.5 * case.eigenvalues()[0]
    low, high = ritz_interval(case.P, case.map, ridge, 0)
    values = case.eigenvalues()
    assert low == pytest.approx(values[0], rel=1e-2)
    assert high == pytest.approx(values[-1], rel=1e-2)


def test_nothing_is_known_without_a_preconditioner_or_of_the_other_kinds():
    case = Case()
    none = no_preconditioner(BACKEND, D, 2)
    assert choose_spectrum("duality", none, case.map, 1.0, 0) is None
    assert choose_spectrum("none", none, case.map, 0.0, 0) is None


def test_a_P_that_is_another_matrix_is_refused():
    case = Case(degree=chebyshev_degree(Case().H, 1e-6))
    shifted = replace(case.P.inner, slack=math.inf)
    P = replace(case.P, inner=shifted)
    assert isinstance(P, Preconditioner)
    found = choose_spectrum("spectral-deterministic", P, case.map, 0.0, 0)
    assert found is None or found.kind in ("spectral-probabilistic", "estimate")


def test_the_norm_bound_is_one():
    rng = np.random.default_rng(0)
    for r in (1, 3, 30):
        B = rng.standard_normal((40, r))
        S = B.T @ B
        true = np.linalg.eigvalsh(S)[-1]
        assert true <= _norm_bound(S, BACKEND) <= true * r ** (1 / 16) * (1 + 1e-5)
        assert true <= _norm_bound(S, BACKEND, enough=10 * np.trace(S))
    assert _norm_bound(np.zeros((3, 3)), BACKEND) == 0.0


# ---- runs of Lanczos that end ----------------------------------------------------------------
def pairs(n: int) -> Graph:
    return Graph.from_edges(np.arange(n).reshape(2, -1), num_nodes=n)


def complete(n: int) -> Graph:
    return Graph.from_edges(np.stack(np.triu_indices(n, 1)), num_nodes=n)


def half_isolated(n: int) -> Graph:
    return Graph.from_edges(np.arange(n // 2).reshape(2, -1), num_nodes=n)


def squares(graph: Graph, lam: float) -> Any:
    """H^-2, whose distinct eigenvalues are as many as those of the graph."""
    inverse = np.linalg.inv(dense_H(graph, lam))
    return inverse @ inverse


R = 60
MAPS = {
    "matching": squares(pairs(R), 5.0),
    "complete": squares(complete(R), 5.0),
    "half isolated": squares(half_isolated(R), 5.0),
    "identity": np.eye(R),
    "spread": np.diag(np.linspace(0.1, 3.0, R)),
    "one above": np.diag([50.0] + [1.0] * (R - 1)),
}


def runs_of(maps, steps, seed, noise=0.0):
    """Lanczos with dense matrices, whose products are off by `noise` in a random direction."""
    rng = np.random.default_rng(seed)

    def multiply(v, at):
        made = np.stack([maps[i] @ v[:, k] for k, i in enumerate(at)], axis=1)
        off = rng.standard_normal(made.shape)
        off *= noise / np.linalg.norm(off, axis=0)
        return made + off, np.stack([np.zeros(len(at)), np.zeros(len(at)), np.full(len(at), noise)])

    return lanczos(BACKEND, multiply, rng.standard_normal((R, len(maps))), steps, lambda v: v)


@pytest.mark.parametrize("first", MAPS)
@pytest.mark.parametrize("second", MAPS)
def test_each_run_has_its_own_end(first, second):
    """A run ends after as many steps as its matrix has eigenvalues, whatever the other does."""
    for name, run in zip((first, second), runs_of([MAPS[first], MAPS[second]], 20, 0)):
        distinct = np.unique(np.linalg.eigvalsh(MAPS[name]).round(9))
        assert run.ended == (name != "spread")
        assert run.ritz.shape[0] == min(20, distinct.size)
        if run.ended:
            np.testing.assert_allclose(run.ritz, distinct, atol=1e-8)


@pytest.mark.parametrize("noise", [0.0, 1e-13, 1e-9, 1e-5])
@pytest.mark.parametrize("name", MAPS)
def test_what_a_run_missed_is_bounded(name, noise):
    """40 starts, each bound of which fails with probability at most 3 / (4 * 1000)."""
    values, outside = np.linalg.eigvalsh(MAPS[name]), 0
    for seed in range(40):
        (run,) = runs_of([MAPS[name]], 20, seed, noise)
        missed = Missed.of(run, R, 1000)
        slip = missed.gain * (missed.left + run.off[2])
        top = missed.largest_root(0.0, run.off[2]) ** 2
        low = top - (top - (run.ritz[0] - slip)) / (1 - missed.share)
        outside += top < values[-1] or low > values[0]
        if noise <= 1e-13:
            assert top <= 1.2 * values[-1] + 1e-5
    assert outside <= 2  # three or more by chance: below 5e-5


def test_a_run_that_ends_by_rounding_alone_claims_no_more_than_it_saw():
    """An eigenvalue that the start hardly sees: the space is invariant to 1e-12, and misses it."""
    S = np.diag([1.0] * (R - 1) + [1.5])
    start = np.ones((R, 1))
    start[-1] = 1e-12

    def multiply(v, at):
        return S @ v, np.zeros((3, 1))

    (run,) = lanczos(BACKEND, multiply, start, 20, lambda v: v)
    assert run.ended
    assert run.ritz.shape == (1,)
    missed = Missed.of(run, R, 2 * 10**11)  # at this probability such a start is to be expected
    assert missed.largest_root(0.0, 0.0) ** 2 >= 1.5


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("more", [{}, {"fit_intercept": True}, {"sparsify": True}, {"tol": 1e-6}])
@pytest.mark.parametrize(
    ("graph", "d", "n_train"),
    [(pairs(1200), 400, 420), (half_isolated(1200), 400, 420), (complete(200), 60, 70)],
)
def test_bounds_of_graphs_with_few_eigenvalues(graph, d, n_train, more, start):
    """The Hessian of one run has one eigenvalue, that of the other many."""
    n, rng = graph.num_nodes, np.random.default_rng(1)
    X, y = rng.standard_normal((n, d)), rng.standard_normal((n, 2))
    train = np.sort(rng.permutation(n)[:n_train])
    params = {"lam": 5.0, "dtype": "float64", "tol": 1e-2, "strategy": "herta", **more}
    params["max_iter"] = 20
    first = HERTA(**params).fit(graph, X, y) if start else None
    model = HERTA(**params).fit(graph, X, y, train, warm_start=first)
    A, Y = np.linalg.solve(dense_H(graph, 5.0), X)[train], y[train]
    if "fit_intercept" in more:
        A, Y = A - A.mean(axis=0), Y - Y.mean(axis=0)
    W = np.linalg.lstsq(A, Y, rcond=None)[0]
    best, here = (np.sum((A @ V - Y) ** 2) for V in (W, model.W_))
    assert here - best <= (model.certificate_.value + 1e-12) * best
    if not more.get("sparsify"):
        assert model.status_ == "certified"


@pytest.mark.parametrize("graph", [pairs(1200), half_isolated(1200)])
@pytest.mark.parametrize("seed", range(3))
def test_the_spectrum_of_graphs_with_few_eigenvalues(graph, seed):
    """P is rough, so that both runs have eigenvalues to find."""
    rng, n, d = np.random.default_rng(seed), 1200, 400
    X, train = rng.standard_normal((n, d)), np.sort(rng.permutation(n)[:420])
    H = RegularizedLaplacian(graph, 5.0, BACKEND, "float64")
    A = UnfoldedMap(H, Features(X, BACKEND), train, 8)
    P = build(replace(RECIPE, degree=8, all_rows=False), H, A, np.zeros((420, 1)), 0.0)
    Z = np.linalg.solve(dense_H(graph, 5.0), X) @ P.factor.to_weights(np.eye(d))
    values = np.linalg.svd(Z[train], compute_uv=False) ** 2
    found = probabilistic_spectrum(P, A, 0.0, seed)
    assert found.kind == "spectral-probabilistic"
    assert found.a <= values[-1] * (1 + 1e-9)
    assert values[0] <= found.b * (1 + 1e-9)
    assert np.linalg.norm(Z, 2) <= found.norm * (1 + 1e-9)
    assert found.norm <= 1.5 * np.linalg.norm(Z, 2)
