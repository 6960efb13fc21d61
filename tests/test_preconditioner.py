"""P against dense algebra: curvature Q^T Q + ridge I, on the rows and with the Q that it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from herta_gpu.backends import get_backend
from herta_gpu.coordinates import Columns, whiten
from herta_gpu.diffusion import residual_norms
from herta_gpu.factors import Cholesky, Composed, Eigen, products
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian, chebyshev, chebyshev_degree
from herta_gpu.preconditioner import Preconditioner, build, no_preconditioner
from herta_gpu.problem import UnfoldedMap
from tests.conftest import RECIPE, dense_H, random_graph

LAM, N = 5.0, 80
BACKEND = get_backend("cpu")


def problem(d: int = 7, n_train: int = 50) -> tuple[UnfoldedMap, Any, Any, Any]:
    """(the map, A = M H^-1 X by dense algebra, X, Y)."""
    graph, rng = random_graph(N, 240), np.random.default_rng(0)
    X, train = rng.standard_normal((N, d)), np.sort(rng.permutation(N)[:n_train])
    H = RegularizedLaplacian(graph, LAM, BACKEND, "float64")
    A = np.linalg.solve(dense_H(graph, LAM), X)[train]
    Y = rng.standard_normal((n_train, 2))
    return UnfoldedMap(H, Features(X, BACKEND), train, 8), A, X, Y


def inverse(P: Preconditioner) -> Any:
    """C C^T."""
    C = P.factor.to_weights(np.eye(P.factor.rank))
    return C @ C.T


@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("curvature", [1.0, 0.2])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("all_rows", [False, True])
def test_P_is_the_hessian(ridge: float, curvature: float, symmetric: bool, all_rows: bool) -> None:
    map_, A, _, Y = problem()
    recipe = replace(RECIPE, curvature=curvature, symmetric=symmetric, all_rows=all_rows)
    P = build(recipe, map_.H, map_, Y, ridge)
    expected = curvature * A.T @ A + ridge * np.eye(7)
    np.testing.assert_allclose(inverse(P) @ expected, np.eye(7), atol=1e-8)
    assert (P.kept, P.features, P.damped, P.note) == (7, 7, False, "")
    # W at the start solves least squares on Q; with the curvature of MSE that is the optimum.
    start = P.factor.to_weights(P.w_start)
    np.testing.assert_allclose(expected @ start, A.T @ Y, atol=1e-8)
    inner = P.inner.inner if isinstance(P.inner, Composed) else P.inner  # with a ridge it is scaled
    assert isinstance(inner, Eigen if symmetric else Cholesky)


@pytest.mark.parametrize("degree", [1, 3, 10])
def test_a_rough_Q_is_the_polynomial_and_within_its_proven_error(degree: int) -> None:
    map_, _, X, Y = problem(n_train=N)
    P = build(replace(RECIPE, degree=degree, keep_rows=True), map_.H, map_, Y, 0.0)
    units = np.linalg.norm(X, axis=0)  # Q belongs to columns of norm 1
    Q, exact = P.rows, np.linalg.solve(dense_H(map_.H.graph, LAM), X / units)
    np.testing.assert_allclose(Q, chebyshev(map_.H, X / units, degree), atol=1e-12)
    error = np.linalg.norm(Q - exact, axis=0) / np.linalg.norm(exact, axis=0)
    assert (error <= P.Q_error + P.Q_rounding).all()
    assert P.Q_rounding < 1e-10
    A = Q * units
    np.testing.assert_allclose(inverse(P) @ (A.T @ A), np.eye(7), atol=1e-7)


def test_the_degree_that_a_tolerance_asks_for_keeps_it() -> None:
    map_, _, _, Y = problem()
    errors = []
    for tol in (0.1, 1e-4):
        degree = chebyshev_degree(map_.H, tol)
        errors.append(build(replace(RECIPE, degree=degree), map_.H, map_, Y, 0.0).Q_error)
        assert errors[-1] <= tol
    assert errors[1] < errors[0]


def test_nothing_is_proven_of_Q_on_a_sampled_graph_or_in_a_sketch() -> None:
    map_, _, _, Y = problem()
    other = map_.H.on(random_graph(N, 240, seed=1))
    for H, recipe in ((other, RECIPE), (map_.H, replace(RECIPE, sketch_rows=64))):
        P = build(recipe, H, map_, Y, 0.0)
        assert (P.Q_error, P.Q_rounding) == (np.inf, np.inf)


def test_a_sketch_of_every_row_is_no_sketch() -> None:
    map_, A, _, Y = problem()
    P = build(replace(RECIPE, sketch_rows=64), map_.H, map_, Y, 0.0)  # 50 rows padded to 64
    np.testing.assert_allclose(inverse(P) @ (A.T @ A), np.eye(7), atol=1e-8)
    fewer = build(replace(RECIPE, sketch_rows=40), map_.H, map_, Y, 0.0)
    values = np.linalg.eigvals(inverse(fewer) @ (A.T @ A)).real
    assert 0.3 < values.min() < values.max() < 3
    assert np.abs(values - 1).max() > 1e-3


# ---- fewer rows than features


def test_by_rows_P_lives_on_the_span_of_the_rows() -> None:
    map_, A, _, Y = problem(d=30, n_train=9)
    P = build(replace(RECIPE, by_rows=True, keep_rows=True), map_.H, map_, Y, 0.0)
    np.testing.assert_allclose(P.rows, A, atol=1e-8)
    C = P.factor.to_weights(np.eye(P.factor.rank))
    assert P.factor.rank == 9
    np.testing.assert_allclose(C.T @ A.T @ A @ C, np.eye(9), atol=1e-7)
    # In units of the columns no weight leaves the span of the rows.
    units = map_.X.column_norms
    rows = np.linalg.svd(A / units, full_matrices=False)[2]
    W = C * units[:, None]
    np.testing.assert_allclose(rows.T @ (rows @ W), W, atol=1e-7 * np.abs(W).max())
    np.testing.assert_allclose(A @ P.factor.to_weights(P.w_start), Y, atol=1e-6)  # it interpolates
    assert P.fragile
    assert not P.damped


def test_by_rows_with_a_ridge_P_is_the_hessian() -> None:
    map_, A, _, Y = problem(d=30, n_train=9)
    P = build(replace(RECIPE, by_rows=True), map_.H, map_, Y, 0.4)
    np.testing.assert_allclose(inverse(P) @ (A.T @ A + 0.4 * np.eye(30)), np.eye(30), atol=1e-7)
    assert not P.fragile


def test_by_columns_and_without_a_ridge_P_is_damped_and_says_so() -> None:
    map_, _, _, Y = problem(d=30, n_train=9)
    P = build(RECIPE, map_.H, map_, Y, 0.0)
    assert P.damped
    assert P.fragile
    assert "damped" in P.note
    assert P.factor.slack == np.inf  # P is not Q^T Q


# ---- features that go


def test_kept_counts_repeated_columns_and_not_dependent_ones() -> None:
    map_, _, X, Y = problem()
    mixed = X @ np.random.default_rng(1).standard_normal((7, 2))
    for more, kept in ((X[:, :2], 9), (np.zeros((N, 2)), 9), (mixed, 7)):
        wide = UnfoldedMap(map_.H, Features(np.hstack([X, more]), BACKEND), map_.train, 8)
        P = build(RECIPE, map_.H, wide, Y, 0.0)
        assert P.factor.rank == 7
        assert (P.kept, P.features) == (kept, 9)
        assert ("2 features add less than" in P.note) == (kept == 7)


def test_rescaling_changes_the_curvature_only() -> None:
    map_, A, _, Y = problem()
    P = build(RECIPE, map_.H, map_, Y, 0.3).rescale(0.05, 0.3, False)
    np.testing.assert_allclose(
        inverse(P) @ (0.05 * A.T @ A + 0.3 * np.eye(7)), np.eye(7), atol=1e-8
    )
    none = no_preconditioner(BACKEND, 7, 2)
    assert none.rescale(0.05, 0.3, False) is none
    assert not none.w_start.any()


def test_for_training_Q_is_dropped_and_its_Z_kept() -> None:
    map_, _, X, Y = problem()
    P = build(replace(RECIPE, all_rows=True), map_.H, map_, Y, 0.0)
    lean = P.for_training(BACKEND)
    assert P.Q_all is not None
    assert lean.Q_all is None
    W = P.factor.to_weights(P.w_start)
    Z = np.linalg.solve(dense_H(map_.H.graph, LAM), X @ W)
    np.testing.assert_allclose(lean.Z_start, Z, atol=1e-8)
    assert lean.for_training(BACKEND) is lean


# ---- the products


def test_products_are_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("herta_gpu.factors._GRAM_BYTES", 8 * 5 * 7)  # seven rows of five
    rng = np.random.default_rng(2)
    Q, Y, at = rng.standard_normal((40, 5)), rng.standard_normal((23, 2)), rng.permutation(40)[:23]
    QtQ, QtY = products(BACKEND, Q.astype(np.float32), Y, at)
    rows = Q.astype(np.float32)[at].astype(float)
    assert QtQ.dtype == np.float64
    np.testing.assert_allclose(QtQ, rows.T @ rows, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(QtY, rows.T @ Y, rtol=1e-12, atol=1e-12)
    whole = products(BACKEND, Q, None)[0]
    np.testing.assert_allclose(whole, Q.T @ Q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("basis", [Columns.unit, Columns.plain, lambda X: whiten(X, cut=True)])
def test_the_residual_of_Q_is_measured_against_X(basis: Any) -> None:
    map_, _, X, _ = problem()
    C0 = basis(map_.X).to_weights(np.eye(7))
    Q = chebyshev(map_.H, X @ C0, 2)
    R = X @ C0 - dense_H(map_.H.graph, LAM) @ Q
    found = residual_norms(map_.H, basis(map_.X), Q, 3)
    np.testing.assert_allclose(found, np.linalg.norm(R, axis=0), rtol=1e-10)
    assert (found >= np.linalg.norm(R, axis=0)).all()
