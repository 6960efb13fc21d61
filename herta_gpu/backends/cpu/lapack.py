"""Dense products and factors of the CPU backend, by the BLAS and LAPACK that SciPy brings.

NumPy brings a second BLAS, with threads of its own.  The threads of either go on spinning for some
25 ms after a call.  A factorisation by SciPy that follows a product by NumPy therefore has half of
the cores: that of a matrix of Cora's size took two to five times as long.

LAPACK stores by columns, NumPy by rows.  A row-major matrix is the transpose of what LAPACK sees.
Products and factors are written for the transpose and need no copy; right-hand sides of solves do.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from scipy.linalg import _fblas, blas, lapack, qr, svd

from herta_gpu.plumbing.machine import num_threads

_PRODUCTS = {
    np.dtype(np.float32): (blas.sgemm, blas.sgemv),
    np.dtype(np.float64): (blas.dgemm, blas.dgemv),
}
_PER_THREAD = 2048  # columns of a factor for each thread of BLAS
_SQUARE = 512  # rows and columns of a triangle that are worked on at a time: they fit a cache


@cache
def _threads_of_blas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """How SciPy's BLAS tells and takes its number of threads; None: it is not OpenBLAS."""
    try:
        library = ctypes.CDLL(_fblas.__file__)
        names = ("scipy_openblas_{}_num_threads", "openblas_{}_num_threads")
        name = next(name for name in names if hasattr(library, name.format("set")))
    except (OSError, StopIteration):
        return None
    return getattr(library, name.format("get")), getattr(library, name.format("set"))


def blas_threads(columns: int) -> int:
    """Threads for products and factors of so many columns: HERTA_NUM_THREADS, or few.

    OpenBLAS's threads spin while they wait for each other.  With any other process beside them, a
    factor of 1,433 columns took 3.6 times as long on two threads as on one, one of 5,000 1.3 times.
    """
    given, most = "HERTA_NUM_THREADS" in os.environ, num_threads()
    return most if given else max(1, min(most, columns // _PER_THREAD))


@contextmanager
def limited(columns: int) -> Iterator[None]:
    """SciPy's BLAS on `blas_threads`, and not on more than it was told to take."""
    known = _threads_of_blas()
    before = 0 if known is None else known[0]()
    wanted = blas_threads(columns)
    wanted = wanted if "HERTA_NUM_THREADS" in os.environ else min(before, wanted)
    if known is None or wanted == before:
        yield
        return
    known[1](wanted)
    try:
        yield
    finally:
        known[1](before)


def matmul(A: Any, B: Any) -> Any:
    """A B, row-major: (A B)^T = B^T A^T is what BLAS computes."""
    if A.dtype != B.dtype or A.dtype not in _PRODUCTS or A.shape[1] != B.shape[0]:
        return A @ B  # NumPy converts the types, or says what does not fit
    if not (A.size and B.size):
        return np.zeros((A.shape[0], B.shape[1]), dtype=A.dtype)
    gemm, gemv = _PRODUCTS[A.dtype]
    right, turn_right = _by_columns(A.T)
    if B.shape[1] == 1:  # for a vector gemv is faster: gemm would first copy A into its own layout
        return gemv(1.0, right, B[:, 0], trans=1 - turn_right)[:, None]
    left, turn_left = _by_columns(B.T)
    return gemm(1.0, left, right, trans_a=turn_left, trans_b=turn_right).T


def add_gram(G: Any, A: Any) -> None:
    """G += A^T A; one half is computed, the other one is its mirror image."""
    if A.size == 0:
        return
    A = np.ascontiguousarray(A)
    half = blas.dsyrk(1.0, A.T, beta=1.0, c=G.T, lower=1, overwrite_c=1)
    assert np.shares_memory(half, G)  # G was contiguous: BLAS has written its upper triangle
    for J in _squares(G.shape[0]):
        G[J, : J.start] = G[: J.start, J].T
        square = G[J, J]
        square[...] = np.triu(square) + np.triu(square, 1).T


def cholesky(P: Any) -> Any | None:
    """L of P = L L^T, or None where LAPACK says that there is none; NaN gives NaN."""
    U, failed = lapack.dpotrf(P.T, lower=0, clean=1)
    return None if failed else U.T


def pivoted_cholesky(P: Any, cut: float) -> tuple[Any, Any]:
    """(L, J): L L^T = P[J, J] for the columns J that are independent, r of d.

    The next column is always the one with the largest remaining diagonal; what is left when that
    falls below `cut` depends on the columns before.
    """
    U, pivots, r, _ = lapack.dpstrf(P.T, tol=cut, lower=0)
    L = U.T[:r, :r].copy()
    for J in _squares(r):  # LAPACK leaves the other half as it was
        L[: J.start, J] = 0
        L[J, J] = np.tril(L[J, J])
    return L, pivots[:r].astype(np.int64) - 1


def thin_svd(Q: Any) -> tuple[Any, Any]:
    """(U, s) as in `Backend.thin_svd`; a QR comes first and leaves a small square matrix."""
    V, R = qr(Q.T, mode="economic", check_finite=False)
    T, s, _ = svd(R, check_finite=False)
    return matmul(np.ascontiguousarray(V), np.ascontiguousarray(T)), s


def row_space(A: Any, cut: float) -> tuple[Any, Any]:
    """(V, R) as in `Backend.row_space`, by QR with pivoting: three times faster than by an SVD."""
    V, R, order = qr(A.T, mode="economic", pivoting=True, check_finite=False)
    size = np.abs(np.diagonal(R))
    r = int(np.count_nonzero(size > cut * size[0]))
    # A = (R with its columns put back)^T V^T, so that A V = R[:r]^T: one more QR makes it square.
    rows = np.empty((A.shape[0], r))
    rows[order] = R[:r].T
    return np.ascontiguousarray(V[:, :r]), qr(rows, mode="r", check_finite=False)[0][:r]


def solve_triangular(C: Any, B: Any, trans: bool = False) -> Any:
    """C^-1 B, or C^-T B, for a lower triangular C."""
    if B.size == 0:
        return np.zeros(B.shape)
    turned, turn = _by_columns(C.T)  # upper triangular, or its transpose
    solved, failed = lapack.dtrtrs(turned, B, lower=turn, trans=int(trans) == turn)
    if failed:
        raise np.linalg.LinAlgError("A triangular factor is singular.")
    return np.ascontiguousarray(solved)


def _squares(d: int) -> list[slice]:
    """The squares along the diagonal of a d x d matrix."""
    return [slice(j, min(j + _SQUARE, d)) for j in range(0, d, _SQUARE)]


def _by_columns(M: Any) -> tuple[Any, int]:
    """(F, 0) if M = F, (F, 1) if M = F^T, with F stored by columns; a copy only if M is neither."""
    if M.flags.f_contiguous:
        return M, 0
    return (M.T, 1) if M.flags.c_contiguous else (np.asfortranarray(M), 0)
