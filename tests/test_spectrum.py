"""Bounds of the preconditioned Hessian, against its eigenvalues by dense algebra."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from herta_gpu.backends import get_backend
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian, chebyshev_degree
from herta_gpu.planning.recipe import Recipe
from herta_gpu.preconditioner import Preconditioner, build, no_preconditioner
from herta_gpu.spectrum import (
    Spectrum,
    _norm_bound,
    choose_spectrum,
    measured_spectrum,
    probabilistic_spectrum,
    ritz_interval,
)
from herta_gpu.unfolded import UnfoldedMap
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
        C = self.P.factor.half(np.eye(self.P.factor.rank))
        T = self.A.T @ self.A + self.ridge * np.eye(D)
        return np.linalg.eigvalsh(C.T @ T @ C)

    def norm(self) -> float:
        """||H^-1 X P^-1/2||."""
        return float(np.linalg.norm(self.whole @ self.P.factor.half(np.eye(D)), 2))

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
    found = measured_spectrum(case.P, case.P.left)
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
