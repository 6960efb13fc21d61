"""Dense algebra of the CPU backends against NumPy's, whose BLAS is another one."""

import numpy as np
import pytest

from herta_gpu.backends.cpu.reference import CPUBackend, lapack

fast = pytest.importorskip("herta_gpu.backends.cpu.compiled", reason="numba is not installed")
BACKENDS = [CPUBackend(), fast.CompiledBackend()]


def _layouts(M):
    """M stored by rows, by columns, and as a part of something larger."""
    padded = np.zeros((M.shape[0] + 3, 2 * M.shape[1]))
    padded[1:-2, ::2] = M
    return M, np.asfortranarray(M), padded[1:-2, ::2]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: type(b).__name__)
@pytest.mark.parametrize(
    "shape", [(0, 3, 2), (3, 0, 2), (4, 3, 0), (1, 1, 1), (9, 5, 1), (40, 7, 3)]
)
def test_matmul_of_any_layout(backend, shape):
    n, d, c = shape
    rng = np.random.default_rng(0)
    for A in _layouts(rng.standard_normal((n, d))):
        for B in _layouts(rng.standard_normal((d, c))):
            C = backend.matmul(A, B)
            assert C.shape == (n, c)
            np.testing.assert_allclose(C, np.einsum("ij,jk->ik", A, B), atol=1e-13)


@pytest.mark.parametrize("columns", [1, 3])
def test_matmul_keeps_float32_and_widens_a_mixture(columns):
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((50, 20)), rng.standard_normal((20, columns))
    for backend in BACKENDS:
        C = backend.matmul(A.astype(np.float32), B.astype(np.float32))
        assert C.dtype == np.float32
        np.testing.assert_allclose(C, A @ B, atol=1e-4)
        assert backend.matmul(A.astype(np.float32), B).dtype == np.float64


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: type(b).__name__)
def test_shapes_that_do_not_fit_are_refused(backend):
    A, B = np.ones((3000, 100)), np.ones((99, 3))
    for left, right in ((A, B), (A.T, np.ones((2999, 3)))):
        with pytest.raises(ValueError, match="mismatch"):
            backend.matmul(left, right)


# Widths around whole vectors, heights around groups of four rows and chunks.
# A width of 5 has more rows than chunks of 64, in chunks that are no multiple of four.
@pytest.mark.parametrize("d", [5, 127, 128, 1001])
@pytest.mark.parametrize("c", [2, 3, 10, 11])
@pytest.mark.parametrize("extra", [0, 1, 3])
def test_tall_times_narrow(d, c, extra):
    n = fast.products.LEAST // d + 1 + extra
    rng = np.random.default_rng(d * c)
    A, W, E = (rng.standard_normal(s) for s in ((n, d), (d, c), (n, c)))
    backend = BACKENDS[1]
    # A sum of k products is off by at most k u times the sum of their sizes.
    u = np.finfo(np.float64).eps
    assert (abs(backend.matmul(A, W) - A @ W) <= d * u * (abs(A) @ abs(W))).all()
    assert (abs(backend.matmul(A.T, E) - A.T @ E) <= n * u * (abs(A).T @ abs(E))).all()
    assert backend.matmul(A.T, E).flags.c_contiguous


@pytest.mark.parametrize("d", [1, 7, 511, 512, 513, 1100])
def test_add_gram_adds_a_symmetric_matrix(d):
    rng = np.random.default_rng(d)
    A, G = rng.standard_normal((30, d)), np.eye(d)
    for part in (A[:10], np.asfortranarray(A[10:]), A[:0]):
        lapack.add_gram(G, part)
    np.testing.assert_allclose(G, np.eye(d) + A.T @ A, atol=1e-12)
    assert np.array_equal(G, G.T)


@pytest.mark.parametrize("d", [1, 5, 600])
def test_triangular_solves_of_any_layout(d):
    rng = np.random.default_rng(d)
    L = np.tril(rng.standard_normal((d, d))) / d + np.eye(d)
    B = rng.standard_normal((d, 3))
    for C in _layouts(L):
        np.testing.assert_allclose(L @ lapack.solve_triangular(C, B), B, atol=1e-11)
        np.testing.assert_allclose(L.T @ lapack.solve_triangular(C, B, trans=True), B, atol=1e-11)
    assert lapack.solve_triangular(L, B[:, :0]).shape == (d, 0)


def test_a_singular_factor_is_named():
    with pytest.raises(np.linalg.LinAlgError, match="singular"):
        lapack.solve_triangular(np.zeros((2, 2)), np.ones((2, 1)))


@pytest.mark.parametrize("rank", [3, 600, 700])
def test_pivoted_cholesky_of_a_singular_matrix(rank):
    A = np.random.default_rng(rank).standard_normal((700, rank))
    P = A @ A.T
    L, J = lapack.pivoted_cholesky(P, 1e-10 * np.trace(P))
    assert J.shape == (rank,)
    assert np.array_equal(L, np.tril(L))
    np.testing.assert_allclose(L @ L.T, P[np.ix_(J, J)], atol=1e-9 * np.trace(P))
