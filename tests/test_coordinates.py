"""Coordinates of X: every bound that they give, against dense algebra in extended precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu.backends import get_backend
from herta_gpu.coordinates import DEPENDENT, Blocks, Columns, whiten
from herta_gpu.factors import Composed, DenseGram, Factor
from herta_gpu.features import Features

LD = np.longdouble
CPU = get_backend("cpu")
RNG = np.random.default_rng(0)


def gaussian(n: int = 120, d: int = 9) -> Any:
    return np.random.default_rng(1).standard_normal((n, d))


def spoiled(kind: str) -> Any:
    X = gaussian()
    if kind == "units":
        X *= 10.0 ** np.linspace(-9, 9, 9)
    elif kind == "offset":
        X += 1e6
    elif kind == "nearly dependent":
        X[:, 3] = X[:, 1] + 1e-9 * X[:, 3]
    elif kind == "correlated":
        X = X @ np.vander(np.linspace(0.5, 1, 9), 9)
    elif kind == "zero column":
        X[:, 4] = 0.0
    elif kind == "sparse":
        X *= np.random.default_rng(2).random(X.shape) < 0.2
        return sp.csr_array(X)
    elif kind == "one column":
        X = X[:, :1]
    elif kind == "dependent":
        X[:, 3] = X[:, 1] + X[:, 2]
    elif kind == "few rows":
        X = X[:6]
    return X


FULL = ["plain", "units", "offset", "nearly dependent", "correlated", "sparse", "one column"]
SHORT = ["zero column", "dependent", "few rows"]  # of less than d directions


def dense(X: Any) -> Any:
    return (X.toarray() if sp.issparse(X) else X).astype(LD)


def features(X: Any) -> Features:
    return Features(X, CPU)


def dense_map(basis: Any) -> Any:
    """C0 as it is stored."""
    return basis.C if basis.C.ndim == 2 else np.diag(basis.C)


def columns(basis: Any, X: Any) -> Any:
    """X C0 in extended precision."""
    return dense(X) @ dense_map(basis).astype(LD)


def bases(kind: str) -> list[tuple[Any, Any]]:
    X = spoiled(kind)
    made = [whiten(features(X), cut) for cut in (False, True)]
    return [(X, basis) for basis in (Columns.unit(features(X)), Columns.plain(features(X)), *made)]


def two_norm(A: Any) -> float:
    return float(np.linalg.norm(np.asarray(A, dtype=float), 2))


# ---- what X C0 is ---------------------------------------------------------------------------
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("kind", FULL)
def test_whitened_columns_are_orthonormal(kind, cut):
    X = spoiled(kind)
    basis = whiten(features(X), cut)
    assert basis.rank == X.shape[1]
    G = columns(basis, X).T @ columns(basis, X)
    off = two_norm(G - np.eye(basis.rank))
    assert off <= basis.norm**2 - 1 + 1e-15  # what is said of it ...
    assert off <= 1e-4  # ... and what it is worth
    scale = Columns.unit(features(X)).C
    inverse = np.linalg.inv(basis.C / scale[:, None]) / scale
    assert two_norm(inverse) <= basis.inverse
    assert basis.inverse < 40 * two_norm(inverse) or kind in ("offset", "nearly dependent")


@pytest.mark.parametrize("kind", SHORT)
def test_a_cut_leaves_the_directions_that_there_are(kind):
    X = spoiled(kind)
    basis = whiten(features(X), cut=True)
    true = np.linalg.matrix_rank(X, tol=1e-9 * np.linalg.norm(X, 2))
    empty = int((abs(X).sum(axis=0) == 0).sum())  # a direction of size 0: it costs nothing
    assert basis.rank == true + empty
    B = columns(basis, X).astype(float)
    sizes = np.linalg.svd(B, compute_uv=False)
    assert np.allclose(sizes[:true], 1, atol=1e-3)
    assert sizes[true:].max(initial=0) <= 1e-15
    # Nothing of X is lost: its columns are combinations of those of X C0.
    left = X - B @ np.linalg.lstsq(B, X, rcond=None)[0]
    assert np.linalg.norm(left, axis=0).max() <= 1e-7 * np.linalg.norm(X, axis=0).max()


@pytest.mark.parametrize("kind", SHORT)
def test_without_a_cut_no_direction_of_W_is_lost(kind):
    X = spoiled(kind)
    basis = whiten(features(X), cut=False)
    assert basis.C.shape == (X.shape[1], X.shape[1])
    assert np.linalg.matrix_rank(basis.C * Columns.unit(features(X)).C[:, None] ** -1) == 9
    assert two_norm(columns(basis, X)) <= basis.norm
    if kind != "zero column":
        assert basis.inverse == math.inf  # X says less of C0 than C0 does
        assert basis.dual_bound(np.ones(basis.rank)) == math.inf


def test_how_little_counts_as_a_direction():
    X = gaussian(400, 5)
    X /= np.linalg.norm(X, axis=0)
    for size, kept in ((30 * DEPENDENT, 5), (0.03 * DEPENDENT, 4)):
        Y = X.copy()
        Y[:, 4] = X[:, 0] + size * X[:, 4]
        assert whiten(features(Y), cut=True).rank == kept


# ---- bounds ---------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [*FULL, *SHORT])
def test_norms_are_bounds(kind):
    for X, basis in bases(kind):
        B = columns(basis, X)
        assert two_norm(B) <= basis.norm * (1 + 1e-15)
        assert (np.sqrt((B * B).sum(axis=0)) <= basis.sizes * (1 + 1e-15)).all()


@pytest.mark.parametrize("kind", [*FULL, *SHORT])
def test_rounding_is_a_bound_of_what_chunks_are_off_by(kind):
    for X, basis in bases(kind):
        basis.X._chunk_bytes = 8 * X.shape[1] * 25  # 25 rows at a time
        for J in (slice(0, basis.rank), slice(basis.rank // 2, basis.rank)):
            chunks = [(rows, part.copy()) for rows, part in basis.chunks(J)]
            ends = [0, *(rows.stop for rows, _ in chunks)]
            assert [rows.start for rows, _ in chunks] == ends[:-1]
            assert ends[-1] == X.shape[0]
            made = np.vstack([part for _, part in chunks])
            off = made.astype(LD) - columns(basis, X)[:, J]
            found = np.sqrt((off * off).sum(axis=0))
            assert (found <= basis.rounding[J]).all()
            # A worst case, but of the right unit: 1e4 times more would hide real digits.
            assert (basis.rounding[J] <= 1e-13 * spread(basis, X)[J] + 1e-300).all()


def spread(basis: Any, X: Any) -> Any:
    C = abs(dense_map(basis))
    return np.sqrt((dense(X) ** 2).sum(axis=0)).astype(float) @ C


@pytest.mark.parametrize("kind", [*FULL, *SHORT])
def test_a_ridge_in_these_coordinates(kind):
    u = RNG.standard_normal((9, 3))
    for X, basis in bases(kind):
        v = u[: basis.rank]
        W = basis.to_weights(v)
        G = basis.ridge
        Gv = G[:, None] * v if G.ndim == 1 else G @ v
        C = dense_map(basis)
        assert np.allclose(Gv, C.T @ W, rtol=1e-9, atol=1e-12 * abs(C.T @ W).max())
        size = abs(C).T @ (abs(C) @ np.linalg.norm(v, axis=1))
        assert np.allclose(basis.ridge_size(np.linalg.norm(v, axis=1)), size)
        assert (np.linalg.norm(Gv, axis=1) <= size * (1 + 1e-12)).all()
        # The metric is the same quadratic form.
        assert np.allclose(basis.times_ridge(v), Gv, rtol=1e-9, atol=1e-12 * abs(Gv).max())
        assert basis.weights_rounding(v) >= off_weights(basis, X, v, W)


def off_weights(basis: Any, X: Any, u: Any, W: Any) -> float:
    """||X (computed C0 u - C0 u)||_F in extended precision."""
    C = dense_map(basis)
    off = dense(X) @ (W.astype(LD) - C.astype(LD) @ u.astype(LD))
    return float(np.sqrt((off * off).sum()))


# ---- there and back -------------------------------------------------------------------------
@pytest.mark.parametrize("kind", FULL)
def test_coordinates_rows_and_gradients_come_back(kind):
    for X, basis in bases(kind):
        r, d = basis.rank, X.shape[1]
        u, Q = RNG.standard_normal((r, 3)), RNG.standard_normal((20, d))
        C = dense_map(basis)
        tol = 1e-5 if kind == "nearly dependent" else 1e-6
        assert np.allclose(basis.from_weights(basis.to_weights(u)), u, rtol=0, atol=tol)
        back = basis.rows(Q @ C)  # in the units of each column of X
        units = np.abs(Q @ C).max() / np.abs(C).max(axis=1)
        assert (abs(back - Q) <= tol * np.maximum(units, 1)).all()
        g = RNG.standard_normal((d, 3)) / np.abs(C).max(axis=1)[:, None]
        assert np.allclose(C.T @ basis.gradient(C.T @ g), C.T @ g, rtol=0, atol=tol)


@pytest.mark.parametrize("kind", ["plain", "units", "offset", "nearly dependent", "correlated"])
def test_dual_norms_are_bounds(kind):
    """||C0^-T g|| of gradients in every direction, the shortest of C0 among them."""
    for _, basis in bases(kind):
        d = basis.rank
        C = dense_map(basis)
        U = np.linalg.svd(C)[0]
        for g in (RNG.standard_normal((d, 2)), C.T @ U[:, :1], C.T @ U[:, -1:]):
            exact = inverse_times(C.T, g)
            assert float(np.sqrt((exact * exact).sum())) <= basis.dual_norm(g) * (1 + 1e-12)
        sizes = RNG.random(d)
        G = sizes[:, None] * directions(d)
        exact = inverse_times(C.T, G)
        assert float(np.sqrt((exact * exact).sum())) <= basis.dual_bound(sizes) * (1 + 1e-6)


def directions(d: int) -> Any:
    V = RNG.standard_normal((d, 4))
    return V / np.linalg.norm(V, axis=1, keepdims=True)


def inverse_times(A: Any, B: Any) -> Any:
    """A^-1 B by Gaussian elimination with rows scaled and pivoted, in extended precision."""
    units = np.abs(A).max(axis=1, keepdims=True)
    M = np.hstack([A / units, B / units]).astype(LD)
    columns_ = np.abs(M[:, : A.shape[1]]).max(axis=0)
    M[:, : A.shape[1]] /= columns_
    d = A.shape[0]
    for k in range(d):
        p = k + int(np.abs(M[k:, k]).argmax())
        M[[k, p]] = M[[p, k]]
        M[k] /= M[k, k]
        for i in range(d):
            if i != k:
                M[i] -= M[i, k] * M[k]
    return M[:, d:] / columns_[:, None]


def test_a_basis_with_fewer_columns_says_nothing_of_a_ridge():
    basis = whiten(features(spoiled("dependent")), cut=True)
    assert basis.dual_norm(np.ones((basis.rank, 1))) == math.inf
    assert basis.dual_bound(np.ones(basis.rank)) == math.inf


@pytest.mark.parametrize("kind", ["plain", "units", "correlated"])
def test_a_factor_seen_from_W_is_that_of_P(kind):
    """(C0 C) (C0 C)^T = (X^T X)^-1 for the P of all rows of X itself."""
    for X, basis in bases(kind)[2:] if kind == "correlated" else bases(kind)[::2]:
        B = columns(basis, X).astype(float)
        inner = DenseGram(CPU, B.T @ B, basis.ridge, False).factor(1.0, 0.0, False)
        factor = Composed(basis, inner)
        C = factor.to_weights(np.eye(X.shape[1]))
        R = np.linalg.qr(X)[1]
        scaled = R @ C  # orthogonal, as C C^T = R^-1 R^-T
        assert np.allclose(scaled.T @ scaled, np.eye(X.shape[1]), rtol=0, atol=1e-5)
        W = RNG.standard_normal((X.shape[1], 2)) / np.linalg.norm(X, axis=0)[:, None]
        back = factor.to_weights(factor.from_weights(W))
        assert np.allclose(X @ back, X @ W, rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [Columns.unit, lambda X: whiten(X, cut=False)])
def test_blocks_of_features_have_a_block_diagonal_map(make):
    X = gaussian(160, 6) + 0.5
    inner = make(features(X))
    basis, eye = Blocks([inner, inner]), np.eye(6)
    C0 = inner.to_weights(eye)
    whole = np.block([[C0, 0 * C0], [0 * C0, C0]])
    u = RNG.standard_normal((12, 3))
    np.testing.assert_allclose(basis.to_weights(u), whole @ u, rtol=1e-12)
    np.testing.assert_allclose(basis.from_weights(whole @ u), u, rtol=1e-9)
    np.testing.assert_allclose(basis.rows(u.T @ whole.T), u.T @ whole.T @ np.linalg.inv(whole))
    np.testing.assert_allclose(basis.gradient(u), np.linalg.solve(whole.T, u), rtol=1e-9)
    G = basis.ridge if basis.ridge.ndim == 2 else np.diag(basis.ridge)
    np.testing.assert_allclose(G, whole.T @ whole, atol=1e-12)
    np.testing.assert_allclose(basis.times_ridge(u), whole.T @ whole @ u, atol=1e-12)
    assert basis.dual_norm(u) >= np.linalg.norm(np.linalg.solve(whole.T, u)) * (1 - 1e-12)
    assert basis.norm >= np.linalg.norm(np.hstack([X, X]) @ whole, 2) * (1 - 1e-12)
    factor, E = Composed(basis, Factor(12)), RNG.standard_normal((5, 12))
    np.testing.assert_allclose(factor.to_gradient(u), whole.T @ u, atol=1e-12)
    np.testing.assert_allclose(factor.from_weights(factor.to_weights(u)), u, rtol=1e-9)
    assert factor.size >= np.linalg.norm(whole, 2) * (1 - 1e-12)
    assert factor.product_bound(np.linalg.norm(E, axis=0)) >= np.linalg.norm(E @ whole, 2)


# ---- with a ridge ---------------------------------------------------------------------------
def tiny_unit() -> Any:
    """A column in a tiny unit, beside others that are alike."""
    X = gaussian() + 1e6
    X[:, 0] = 1e-20 * gaussian()[:, 0]
    return X


@pytest.mark.parametrize("ridge", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("kind", [*FULL, *SHORT, "tiny unit"])
def test_a_ridge_belongs_to_the_columns_that_are_orthonormal(kind, ridge):
    X = tiny_unit() if kind == "tiny unit" else spoiled(kind)
    basis = whiten(features(X), False, ridge)
    C = basis.C.astype(LD)
    G = columns(basis, X).T @ columns(basis, X) + LD(ridge) * (C.T @ C)
    off = two_norm(G - np.eye(basis.rank))
    assert two_norm(columns(basis, X)) <= basis.norm * (1 + 1e-15)
    if basis.inverse < math.inf:
        assert off <= basis.norm**2 - 1 + 1e-15
        scale = np.sqrt((C * C).sum(axis=1)).astype(float)
        inverse = np.linalg.inv(basis.C / scale[:, None]) / scale
        assert two_norm(inverse) <= basis.inverse < 40 * two_norm(inverse)
    if kind == "tiny unit" and ridge == 1:
        assert basis.inverse < math.inf
    # No weight of norm 1 in u is larger than the ridge lets it be.
    assert two_norm(C) <= 1.1 / math.sqrt(ridge) or basis.inverse == math.inf
