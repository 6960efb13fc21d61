"""The primitives in NumPy and SciPy: the readable reference that every other backend must match.

A graph is cut once into chunks of rows with about equal work.  Chunks run on a thread pool
(SciPy's sparse products and NumPy's loops release the interpreter lock) and each row is computed
by one thread in one fixed order, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse as sp
import scipy.sparse.linalg as sla

from herta_gpu.backends.base import (
    STREAM_IDENTITY,
    STREAM_INCIDENCE,
    STREAM_ROWS,
    STREAM_SAMPLE,
    STREAM_SIGNS,
    Array,
    Backend,
    CGState,
    Exact,
    Halves,
    Laplacian,
    keep_probabilities,
    score_exponent,
)
from herta_gpu.backends.cpu import lapack, philox
from herta_gpu.graph import read_only
from herta_gpu.plumbing.machine import host_memory, num_threads

_CHUNK_WORK = 1 << 16  # non-zeros plus four per row: a block of 64 columns stays in the L2 cache
_FLAT = 1 << 18  # numbers of a block that one thread takes at a time
_ROWS = 1 << 12  # rows of a residual that one thread takes at a time
_ENTRY_CHUNK = 1 << 16  # neighbours whose rows are widened to float64 at once
_EDGE_CHUNK = 1 << 15  # edges handled at once by the sketch and the scores
_FACTOR_DEGREE = 5  # neighbours of a node, on average, with which a sparse factor may stay sparse
_DRAW_CHUNK = 1 << 20  # draws handled at once by the sampler
_HADAMARD_FACTOR = 32  # rows mixed by one matrix product of the Walsh-Hadamard transform


@lru_cache(maxsize=2)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="herta")


def _each(function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """[function(item) for item in items], on the thread pool when that can help."""
    threads = num_threads()
    if threads == 1 or len(items) == 1:
        return [function(item) for item in items]
    return list(_pool(threads).map(function, items))


def _exact(graph: Any) -> Exact:
    """`Laplacian.exact` from the graph's own arrays."""
    return 1.0 / np.sqrt(graph.degree), graph.loopless_degree / graph.degree, graph.weights


def fields(graph: Any, dtype: str) -> dict[str, Any]:
    """The fields of a graph's `Laplacian` on the host."""
    s, diagonal, weights = _exact(graph)
    return {
        "n": graph.num_nodes,
        "indptr": graph.indptr,
        "indices": graph.indices,
        # Read-only as the graph's own are: numba compiles for either kind anew.
        "weights": None if weights is None else read_only(weights.astype(dtype)),
        "inv_sqrt_degree": s.astype(dtype),
        "diagonal": diagonal.astype(dtype),
        "lambda_max": graph.lambda_max_bound,
        "order": graph.order,
        "unrounded": partial(_exact, graph),
    }


def cut_rows(indptr: Array, size: int) -> Array:
    """Where chunks of rows begin and end that are work of about `size`."""
    n = indptr.shape[0] - 1
    work = indptr + 4 * np.arange(n + 1)
    inner = np.searchsorted(work, np.arange(size, work[-1], size))
    return np.unique(np.concatenate([[0], inner, [n]]))


def _chunks(L: Laplacian) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(L.cuts.tolist())]


def _pieces(start: int, stop: int, size: int) -> list[slice]:
    """start..stop in pieces of `size`, at least one."""
    return [slice(a, min(a + size, stop)) for a in range(start, stop, size)] or [slice(0, 0)]


def _flat_chunks(n: int, k: int) -> list[slice]:
    """Rows of an n x k block in pieces that stay in the cache."""
    return _pieces(0, n, max(1, _FLAT // max(k, 1)))


class CPUBackend(Backend):
    """NumPy and SciPy on the host."""

    name = "cpu"
    xp = np
    slowness = 5.0

    _compiled: Callable[[], Backend] | None = None

    def __init__(self, compiled: Callable[[], Backend] | None = None) -> None:
        """`compiled`: the backend that many steps are worth compiling for, if there is one."""
        if compiled is not None:
            self._compiled = compiled

    def for_steps(self) -> Backend:
        return self if self._compiled is None else self._compiled()

    def asarray(self, x: Any, dtype: str | None = None) -> Array:
        """`x` as a C-contiguous array of this device."""
        return np.ascontiguousarray(x, dtype=dtype)

    def to_numpy(self, x: Array) -> Any:
        """`x` as a NumPy array on the host."""
        return np.asarray(x)

    matmul = staticmethod(lapack.matmul)
    add_gram = staticmethod(lapack.add_gram)
    solve_triangular = staticmethod(lapack.solve_triangular)
    _triangle = staticmethod(lapack.cholesky)
    pivoted_cholesky = staticmethod(lapack.pivoted_cholesky)
    thin_svd = staticmethod(lapack.thin_svd)
    row_space = staticmethod(lapack.row_space)

    def memory_available(self) -> int:
        """Bytes that can still be allocated on this device, in arrays that come and go."""
        return host_memory()

    def laplacian(self, graph: Any, dtype: str) -> Laplacian:
        """The Laplacian of `graph` on this device."""
        return Laplacian(**fields(graph, dtype), cuts=cut_rows(graph.indptr, _CHUNK_WORK))

    # ---- H = I + lam L -------------------------------------------------------------------
    def apply_H(self, L: Laplacian, lam: float, X: Array, out: Array | None = None) -> Array:
        """Y = (I + lam L) X = (1 + lam diag(L)) X - lam D^-1/2 A D^-1/2 X for an n x k block."""
        Y = np.empty_like(X) if out is None else out
        X = X.copy() if np.may_share_memory(X, Y) else X

        def rows(at: slice) -> None:
            Y[at] = _H_rows(L, lam, X, at)

        _each(rows, _chunks(L))
        return Y

    def residual_rows(
        self, L: Laplacian, lam: float, Z: Array, B: Array, start: int, out: Array | None = None
    ) -> Array:
        """Rows start, start + 1, ... of B - (I + lam L) Z, in float64 whatever Z's precision is.

        B is a chunk of rows, float64, and so is the result, which may be B itself (`out`).  Z is
        the whole n x k block, `with_neighbours`; its numbers are widened on their way, and no array
        of n x k or of nnz numbers is made.  With s, l and w the float64 arrays of
        `Laplacian.exact`, row i is

            B_i - (1 + lam l_i) Z_i + lam s_i sum_j w_ij s_j Z_j,

        and a term of it is rounded at most (`roundings` + 8) times by 2^-53, beside s and l, which
        are rounded themselves (sqrt(D) and its inverse, A 1 and a quotient).  Neither the number
        of threads nor the way in which rows are cut into chunks changes a bit of it.
        """
        out, stop = np.empty(B.shape) if out is None else out, start + B.shape[0]
        s, diagonal, weights = L.exact

        def rows(at: slice) -> None:
            here = slice(at.start - start, at.stop - start)
            HZ = (1 + lam * diagonal[at])[:, None] * Z[at].astype(np.float64)
            HZ -= (lam * s[at])[:, None] * _neighbour_sums(L, Z, at, s, weights)
            np.subtract(B[here], HZ, out=out[here])

        _each(rows, _pieces(start, stop, _ROWS) if stop > start else [])
        return out

    def column_dots(self, X: Array, Y: Array) -> Array:
        """(k,) column dot products of two n x k blocks, accumulated in float64.

        Of the rows that are here: whoever wants those of all processes asks for their `total`.
        """

        def dots(at: slice) -> Array:
            return np.einsum("ij,ij->j", X[at], Y[at], dtype=np.float64)

        return np.sum(_each(dots, _flat_chunks(*X.shape)), axis=0)

    def cg_step(self, L: Laplacian, lam: float, state: CGState) -> None:
        """One CG step for all active columns together; frozen columns do not change."""
        Z, R, P = state.Z, state.R, state.P
        HP = self.apply_H(L, lam, P, out=state.HP)
        alpha = state.step_length(self.total(self.column_dots(P, HP)))
        blocks, a = _flat_chunks(*R.shape), alpha.astype(R.dtype)

        def advance(at: slice) -> None:
            Z[at] += a * P[at]
            R[at] -= a * HP[at]

        _each(advance, blocks)
        b = state.turn(alpha, self.total(self.column_dots(R, R))).astype(R.dtype)
        _each(lambda at: np.add(b * P[at], R[at], out=P[at]), blocks)

    def cg_active(self, state: CGState) -> int:
        """How many columns are still active.  The only call of CG that waits for the device."""
        return int(np.count_nonzero(state.active))

    def chebyshev_step(
        self,
        L: Laplacian,
        lam: float,
        Z: Array,
        Z_prev: Array,
        B: Array,
        c1: float,
        c2: float,
        halves: Halves | None = None,
    ) -> None:
        """Z_prev <- Z + c1 (Z - Z_prev) + c2 (B - H Z), in place: the next iterate.

        With `halves`, the neighbours' rows of D^-1/2 Z are first rounded to float16 there.
        """
        dtype = Z.dtype.type

        def advance(at: slice) -> None:
            HZ = _H_rows(L, lam, Z, at) if halves is None else _half_rows(L, lam, Z, at, halves)
            Z_prev[at] *= dtype(-c1)
            Z_prev[at] += dtype(1 + c1) * Z[at]
            Z_prev[at] += dtype(c2) * (B[at] - HZ)

        if halves is not None:
            _each(partial(_halve, L, Z, halves), _flat_chunks(*Z.shape))
        _each(advance, _chunks(L))

    def factor(self, L: Laplacian, lam: float) -> Any:
        if not self.whole or L.nnz > _FACTOR_DEGREE * L.n:
            return None
        (s, diagonal, weights), rows = L.exact, np.repeat(np.arange(L.n), np.diff(L.indptr))
        values = -lam * s[rows] * s[L.indices] * (1.0 if weights is None else weights)
        H = sp.csr_array((values, L.indices, L.indptr), shape=(L.n, L.n)).tocsc()
        H += sp.dia_array((1 + lam * diagonal[None], [0]), shape=H.shape)
        # H is positive definite: it needs no pivots.
        how = {"diag_pivot_thresh": 0.0, "options": {"SymmetricMode": True}}
        return sla.splu(H, "MMD_AT_PLUS_A", **how)

    # ---- Algorithm 2 ---------------------------------------------------------------------
    def sketch_incidence(self, L: Laplacian, k: int, seed: int) -> Array:
        """(Pi_1 B_hat)^T, n x k, with Pi_1 ~ N(0, 1/k); neither factor is stored.

        The numbers of an edge are keyed by its ends as the caller names them (`Laplacian.order`):
        the order in which a graph is stored does not change them.
        """
        lo, hi, rows = _incidence(L)
        first, second, sign = lo, hi, np.ones(lo.shape[0])  # the ends, by the ids that were given
        if L.order is not None:
            first, second = L.order[lo], L.order[hi]
            sign = np.where(first > second, -1.0, 1.0)
            first, second = np.minimum(first, second), np.maximum(first, second)
        out = np.zeros((L.n, k))
        for at in _pieces(0, lo.shape[0], _EDGE_CHUNK):
            G = philox.gaussians(first[at], second[at], k, seed, STREAM_INCIDENCE)
            out += rows(at).T @ (sign[at, None] * G)
        return (out / np.sqrt(k)).astype(L.inv_sqrt_degree.dtype)

    def sketch_identity(self, L: Laplacian, k: int, seed: int) -> Array:
        """Pi_2^T, n x k, with Pi_2 ~ N(0, 1/k), keyed by the caller's node as well."""
        out = np.empty((L.n, k), dtype=L.inv_sqrt_degree.dtype)

        def rows(at: slice) -> None:
            node = np.arange(at.start, at.stop) if L.order is None else L.order[at]
            node = node.astype(np.uint64)
            out[at] = philox.gaussians(
                node & np.uint64(0xFFFFFFFF), node >> np.uint64(32), k, seed, STREAM_IDENTITY
            ) / np.sqrt(k)

        _each(rows, _flat_chunks(L.n, k))
        return out

    def edge_scores(self, L: Laplacian, B_S: Array, Pi_S: Array, lam: float) -> Array:
        """(m,) float64 l_i = ||B_S b_i||^2 + ||Pi_S b_i||^2 / lam, edges as in `Graph.edges`."""
        lo, _, rows = _incidence(L)
        scores = np.empty(lo.shape[0])

        def edges(at: slice) -> None:
            b = rows(at)
            from_B, from_Pi = b @ B_S, b @ Pi_S
            scores[at] = (from_B**2).sum(axis=1) + (from_Pi**2).sum(axis=1) / lam

        _each(edges, _pieces(0, lo.shape[0], _EDGE_CHUNK))
        return scores

    def sample_edges(self, scores: Array, s: int, seed: int, replace: bool) -> Array:
        """(m,) float64 factors c_i with E[c_i] = 1; an edge that was not drawn has 0.

        With replacement, s draws with probability p_i = l_i / sum(l): c_i = (times drawn) /
        (s p_i).  Otherwise each edge is kept with p_i = min(1, tau l_i), sum(p) = s: c_i = 1/p_i.
        """
        if not replace:
            return self._kept(keep_probabilities(np, scores, s, self.total), seed)
        m, most = int(self.total(scores.shape[0])), float(scores.max(initial=0.0))
        exponent = score_exponent(m, float(self.largest(most)))
        q = np.maximum(np.ldexp(scores, exponent).astype(np.int64), scores > 0)
        prefix, total = self.sums_up_to(q)
        counts = self._draws(q, prefix, total, s, seed)
        factors, hit = np.zeros(q.shape[0]), counts > 0
        factors[hit] = counts[hit] / (s * (q[hit] / total))
        return factors

    def sums_up_to(self, q: Array) -> tuple[Array, int]:
        """For each edge the sum of q up to it, itself included, and that of all edges.

        The order is that of the caller's ids, whichever process has an edge.
        """
        prefix = np.cumsum(q)
        return prefix, int(prefix[-1])

    def _kept(self, p: Array, seed: int) -> Array:
        """1 / p_i of each edge that is kept with probability p_i, 0 of the others."""
        words = philox.words64(0, p.shape[0], seed, STREAM_SAMPLE)
        uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.where(uniform < p, 1.0 / np.where(p > 0, p, 1.0), 0.0)

    def _draws(self, q: Array, prefix: Array, total: int, s: int, seed: int) -> Array:
        """How often each edge is drawn in s draws with probabilities q / total."""
        counts = np.zeros(q.shape[0], dtype=np.int64)
        for start in range(0, s, _DRAW_CHUNK):
            words = philox.words64(start, min(start + _DRAW_CHUNK, s), seed, STREAM_SAMPLE)
            target = philox.multiply_high(words, np.uint64(total)).astype(np.int64)
            np.add.at(counts, np.searchsorted(prefix, target, side="right"), 1)
        return counts

    # ---- SRHT ----------------------------------------------------------------------------
    def srht(self, Q: Array, s: int, seed: int) -> Array:
        """S Hadamard(R Q): signs, Walsh-Hadamard along the rows padded to n', s rows (s x k).

        The rows are drawn without replacement and scaled by sqrt(n'/s); s = n' loses nothing.
        """
        n, k = Q.shape
        padded = 1 << max(0, n - 1).bit_length()
        negative = (philox.words64(0, n, seed, STREAM_SIGNS) & np.uint64(1)).astype(bool)
        Y = np.zeros((padded, k), dtype=Q.dtype)
        np.multiply(Q, np.where(negative, -1, 1).astype(Q.dtype)[:, None], out=Y[:n])
        Y = walsh_hadamard(Y)
        keys = philox.words64(0, padded, seed, STREAM_ROWS)
        rows = np.sort(np.argsort(keys, kind="stable")[:s])
        return Y[rows] * Q.dtype.type(np.sqrt(padded / s))


def _H_rows(L: Laplacian, lam: float, X: Array, at: slice) -> Array:
    """Rows `at` of H X."""
    indptr, s = L.indptr[at.start : at.stop + 1], L.inv_sqrt_degree
    first, last = int(indptr[0]), int(indptr[-1])
    nodes = L.indices[first:last]
    values = s[nodes] if L.weights is None else L.weights[first:last] * s[nodes]
    local = (indptr - first).astype(nodes.dtype, copy=False)
    A = sp.csr_array((values, nodes, local), shape=(local.shape[0] - 1, L.n))
    return _combined(L, lam, X, at, A @ X)


def _combined(L: Laplacian, lam: float, X: Array, at: slice, sums: Array) -> Array:
    """Rows `at` of H X from those of A D^-1/2 X."""
    Y = (1 + lam * L.diagonal[at]).astype(X.dtype)[:, None] * X[at]
    Y -= (lam * L.inv_sqrt_degree[at]).astype(X.dtype)[:, None] * sums
    return Y


def _halve(L: Laplacian, Z: Array, halves: Halves, at: slice) -> None:
    """Rows `at` of D^-1/2 Z into halves.G."""
    scaled = L.inv_sqrt_degree[at, None] * Z[at] * halves.up
    halves.G[at] = np.clip(scaled, -65504, 65504).astype(np.float16).view(np.uint16)


def _half_rows(L: Laplacian, lam: float, Z: Array, at: slice, halves: Halves) -> Array:
    """Rows `at` of H Z, the neighbours' from halves.G."""
    s, one = L.inv_sqrt_degree, np.ones(1, dtype=Z.dtype)
    ones, G = np.broadcast_to(one, s.shape), halves.G.view(np.float16)
    return _combined(L, lam, Z, at, _neighbour_sums(L, G, at, ones, L.weights) * halves.down)


def _neighbour_sums(L: Laplacian, Z: Array, at: slice, s: Array, weights: Array | None) -> Array:
    """Rows `at` of A diag(s) Z in the precision of s, a bounded number of neighbours at a time.

    Pieces end at multiples of `_ENTRY_CHUNK` of the whole graph: a row is always summed alike.
    """
    indptr, k = L.indptr[at.start : at.stop + 1], Z.shape[1]
    first, last = int(indptr[0]), int(indptr[-1])
    total = np.zeros((at.stop - at.start, k), dtype=s.dtype)
    inner = range(first // _ENTRY_CHUNK * _ENTRY_CHUNK + _ENTRY_CHUNK, last, _ENTRY_CHUNK)
    for a, b in pairwise([first, *inner, last]):
        # SciPy would widen all of Z: it gets the rows that these neighbours name.
        nodes, place = np.unique(L.indices[a:b], return_inverse=True)
        values = s[L.indices[a:b]] if weights is None else weights[a:b] * s[L.indices[a:b]]
        local = np.clip(indptr, a, b) - a
        A = sp.csr_array((values, place, local), shape=(total.shape[0], nodes.shape[0]))
        total += A @ Z[nodes].astype(s.dtype)
    return total


def walsh_hadamard(Y: Array) -> Array:
    """(1/sqrt(n)) H_n Y for n a power of two, as a chain of small matrix products."""
    n, k = Y.shape
    left = 1
    while left < n:
        factor = min(_HADAMARD_FACTOR, n // left)
        H = scipy.linalg.hadamard(factor).astype(Y.dtype)  # its products are exact
        Y = np.matmul(H, Y.reshape(left, factor, n // (left * factor) * k)).reshape(n, k)
        left *= factor
    return Y * Y.dtype.type(1 / np.sqrt(n))


def _incidence(L: Laplacian) -> tuple[Array, Array, Callable[[slice], Any]]:
    """The ends lo < hi of each edge, in the order of `Graph.edges`, and rows of B_hat.

    Row e is sqrt(w) (delta_lo / sqrt(d_lo) - delta_hi / sqrt(d_hi)).
    """
    row = np.repeat(np.arange(L.n), np.diff(L.indptr))
    upper = L.indices > row
    lo, hi = row[upper], L.indices[upper].astype(np.int64)
    s = L.inv_sqrt_degree.astype(np.float64)
    root_w = 1.0 if L.weights is None else np.sqrt(L.weights[upper].astype(np.float64))
    ends, values = np.stack([lo, hi], 1), np.stack([root_w * s[lo], -root_w * s[hi]], 1)

    def rows(at: slice) -> Any:
        e = ends[at].shape[0]
        starts = np.arange(0, 2 * e + 1, 2)
        return sp.csr_array((values[at].ravel(), ends[at].ravel(), starts), shape=(e, L.n))

    return lo, hi, rows
