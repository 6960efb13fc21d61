"""The CPU backend, compiled: the same numbers as `CPUBackend` to rounding, several times faster.

numba compiles the kernels of `kernels/` on first use and keeps the machine
code on disk.  Threads are Python's own around kernels that release the interpreter lock: they sleep
between two calls, so they do not compete with those of BLAS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, CGState, Halves, Laplacian
from herta_gpu.backends.cpu.kernels import cg, laplacian, products, sampling, sketch
from herta_gpu.backends.cpu.kernels.simd import HALF, VECTOR_BYTES
from herta_gpu.backends.cpu.philox import seed_key
from herta_gpu.backends.cpu.reference import (
    CPUBackend,
    _pool,
    cut_rows,
    fields,
)
from herta_gpu.graph import read_only
from herta_gpu.plumbing.machine import num_threads

_CHUNK_WORK = 1 << 15  # non-zeros plus four per row that one thread takes at a time
_FLAT_CHUNK = 1 << 16  # numbers of a block that one thread takes at a time
_HALF_COLUMNS = 64  # from here on float16 was always faster
_SMALL = 1 << 15  # multiply-adds below which a second thread costs more than it brings


class CompiledBackend(CPUBackend):
    """`CPUBackend` with compiled primitives."""

    name = "cpu"
    slowness = 1.0
    # Finding communities costs about as much as a few hundred columns of H X, and saves up to half.
    order_columns = 1000

    def asarray(self, x: Any, dtype: str | None = None) -> Array:
        """`x` itself if it will do, else a copy that starts on a cache line."""
        x = np.asarray(x)
        wanted = x.dtype if dtype is None else np.dtype(dtype)
        if x.dtype == wanted and x.flags.c_contiguous:
            return x
        out = aligned_empty(x.shape, wanted)
        out[...] = x
        return out

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return aligned_empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        return _aligned(np.zeros, shape, dtype)

    def on_part(self, graph: Any) -> CompiledBackend:
        from herta_gpu.backends.ranks.nodes import NodesBackend

        return NodesBackend(graph)

    def laplacian(self, graph: Any, dtype: str) -> Laplacian:
        return Laplacian(**fields(graph, dtype), cuts=cut_rows(graph.indptr, _CHUNK_WORK))

    def matmul(self, A: Array, B: Array) -> Array:
        fit = A.shape[1] == B.shape[0] and A.dtype == B.dtype == np.float64
        if not fit or not 1 < B.shape[1] <= products.NARROW or A.size < products.LEAST:
            return super().matmul(A, B)
        if A.flags.c_contiguous and A.shape[0] >= 4:
            F, Bt = aligned_empty((A.shape[0], B.shape[1]), A.dtype), np.ascontiguousarray(B.T)
            _run(A.size, products.times, A, Bt, F, _tall_chunk(A.shape[0]))
            return F
        if A.T.flags.c_contiguous:
            n, rows = A.shape[1], _tall_chunk(A.shape[1])
            sums = self.zeros((-(-n // rows), B.shape[1], A.shape[0]), "float64")
            _run(A.size, products.transposed_times, A.T, np.ascontiguousarray(B), sums, rows)
            return np.ascontiguousarray(sums.sum(axis=0).T)
        return super().matmul(A, B)

    # ---- H = I + lam L -------------------------------------------------------------------
    def apply_H(self, L: Laplacian, lam: float, X: Array, out: Array | None = None) -> Array:
        X = self.asarray(X, str(L.inv_sqrt_degree.dtype))
        overlap = out is not None and np.may_share_memory(out, X)
        Y = _like(None if overlap else out, X.shape, X.dtype)
        _apply(L, lam, X, Y, _neighbours(L, X))
        return _given(Y, out)

    def residual_rows(
        self, L: Laplacian, lam: float, Z: Array, B: Array, start: int, out: Array | None = None
    ) -> Array:
        R = _like(out, B.shape, np.float64)
        _residual(L, lam, self.asarray(Z), self.asarray(B, "float64"), R, start)
        return _given(R, out)

    def residual(
        self, L: Laplacian, lam: float, Z: Array, B: Array, dtype: str, unit: Array
    ) -> tuple[Array, Array]:
        Z, B = self.with_neighbours(L, self.asarray(Z)), self.asarray(B)
        if B.dtype not in (np.float32, np.float64):
            B = B.astype("float64")
        R = aligned_empty(B.shape, dtype)
        return R, _residual(L, lam, Z, B, R, 0, 1.0 / unit)

    def roundings(self, neighbours: float, columns: int, rows: bool = False) -> float:
        if rows or columns <= VECTOR_BYTES // 8:  # no runs: they cost a narrow block too much
            return neighbours
        return min(neighbours, laplacian.RUN) + math.ceil(neighbours / laplacian.RUN)

    def column_dots(self, X: Array, Y: Array) -> Array:
        X, Y = self.asarray(X), self.asarray(Y)
        total = np.zeros(X.shape[1])
        for (x, y), g in _side_by_side(X, Y):
            rows, dots = _flat(*x.shape)
            _run(x.size, cg.column_dots, x, y, dots, rows)
            total += dots.sum(axis=0).reshape(g, -1).sum(axis=0)
        return total

    def cg_step(self, L: Laplacian, lam: float, state: CGState) -> None:
        Z, R, P, HP = state.Z, state.R, state.P, state.HP
        dots = np.zeros((L.cuts.shape[0] - 1, R.shape[1]))
        if _far(L) and state.scratch is None:
            state.scratch = self.empty(P.shape, str(P.dtype))
        _apply(L, lam, P, HP, _neighbours(L, P, state.scratch), dots=dots)
        pHp = self.total(dots.sum(axis=0))
        alpha = state.step_length(pHp)
        rho = np.zeros(R.shape[1])
        for (r, hp), g in _side_by_side(R, HP):
            a, (rows, dots) = np.tile(alpha.astype(R.dtype), g), _flat(*r.shape)
            _run(r.size, cg.cg_residual, r, hp, a, dots, rows)
            rho += dots.sum(axis=0).reshape(g, -1).sum(axis=0)
        beta = state.turn(alpha, self.total(rho))
        for (z, p, r), g in _side_by_side(Z, P, R):
            a, b = (np.tile(c.astype(R.dtype), g) for c in (alpha, beta))
            _run(2 * z.size, cg.cg_direction, z, p, r, a, b, _flat_rows(z.shape[1]))

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
        if halves is None:
            _apply(L, lam, Z, Z_prev, _neighbours(L, Z), (B, c1, c2))
            return
        s = L.inv_sqrt_degree
        _scaled(Z, s, 1.0, out=halves.G, up=halves.up)
        _apply(L, lam, Z, Z_prev, (halves.G, (None, s, None)), (B, c1, c2), unit=halves.down)

    def chebyshev(
        self,
        L: Laplacian,
        lam: float,
        B: Array,
        first: float,
        steps: Iterable[tuple[float, float]],
        work: tuple[Array, ...] | None = None,
        half: bool = False,
    ) -> Array:
        # A row shorter than half a cache line is read no faster in float16.
        half = half and HALF and B.shape[1] > VECTOR_BYTES // 8 and B.dtype == np.float32
        if half or L.halo is not None or (not _far(L) and B.shape[1] != 1):
            return super().chebyshev(L, lam, B, first, steps, work, half)
        # On D^-1/2 Z throughout: what a step reads from afar is then the iterate itself.
        B, s = self.asarray(B, str(L.inv_sqrt_degree.dtype)), L.inv_sqrt_degree
        Z, Z_prev = self.iterates(L, B, work)
        _scaled(B, s, first, out=Z)
        Z_prev.fill(0)
        for c1, c2 in steps:
            _apply(L, lam, Z, Z_prev, (Z, (None, s, s)), (B, c1, c2))
            Z, Z_prev = Z_prev, Z
        return _scaled(Z, s, 1.0, out=Z, inverse=True)

    def half_pays(self, L: Laplacian, k: int) -> bool:
        # Measured in random order, 6e7 and 7e7 non-zeros, on two machines: 0.67 and 0.91 of a
        # step at 64 columns, 0.75 and 0.93 at 32.  Nothing is sure to be saved where the caches
        # hold most of the block; rows of other processes are sent as they are.
        return HALF and _far(L) and L.halo is None and k >= _HALF_COLUMNS

    # ---- Algorithm 2 ---------------------------------------------------------------------
    def sketch_incidence(self, L: Laplacian, k: int, seed: int) -> Array:
        return self._sketch(sketch.incidence_rows, L, k, seed, 16 * k * L.nnz)

    def sketch_identity(self, L: Laplacian, k: int, seed: int) -> Array:
        return self._sketch(sketch.identity_rows, L, k, seed, 16 * k * L.n)

    def _sketch(self, kernel: Any, L: Laplacian, k: int, seed: int, work: int) -> Array:
        out = aligned_empty((L.n, k), L.inv_sqrt_degree.dtype)
        _run(work, kernel, out, _arrays(L), L.order, seed_key(seed), L.cuts)
        return out

    def edge_scores(self, L: Laplacian, B_S: Array, Pi_S: Array, lam: float) -> Array:
        ids, arrays = None, _arrays(L)
        if L.halo is not None:  # the other end may be another process's
            B_S, Pi_S = L.halo.extended(self.asarray(B_S)), L.halo.extended(self.asarray(Pi_S))
            ids, s = L.order, L.exact[0].astype(L.inv_sqrt_degree.dtype)
            arrays = (*arrays[:3], s, arrays[4])
        B_S, Pi_S = self.asarray(B_S), self.asarray(Pi_S)
        first = sampling.first_edges(L.indptr, L.indices, ids)
        scores, work = np.empty(int(first[-1])), L.nnz * (B_S.shape[1] + Pi_S.shape[1])
        _run(work, sampling.edge_scores, scores, first, B_S, Pi_S, lam, arrays, ids, L.cuts)
        return scores

    def _kept(self, p: Array, seed: int) -> Array:
        factors, numbers = np.empty(p.shape[0]), None
        if not self.whole:
            numbers = self.sums_up_to(np.ones(p.shape[0], dtype=np.int64))[0] - 1
        _run(20 * p.shape[0], sampling.bernoulli, p, factors, numbers, seed_key(seed))
        return factors

    def _draws(self, q: Array, prefix: Array, total: int, s: int, seed: int) -> Array:
        counts = np.zeros(q.shape[0], dtype=np.int64)
        shift = max(0, total.bit_length() - q.shape[0].bit_length())
        guide = np.searchsorted(prefix, np.arange((total >> shift) + 1) << shift, "right")
        _run(40 * s, sampling.draw, q, prefix, total, guide, shift, s, counts, seed_key(seed))
        return counts


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array that starts on a cache line, which NumPy's own need not."""
    return _aligned(np.empty, shape, dtype)


def _aligned(make: Callable[..., Array], shape: tuple[int, ...], dtype: Any) -> Array:
    size, line = math.prod(shape) * np.dtype(dtype).itemsize, VECTOR_BYTES
    raw = make(size + line, dtype=np.uint8)
    start = -raw.ctypes.data % line
    return raw[start : start + size].view(dtype).reshape(shape)


def _run(work: int, kernel: Callable[..., None], *args: Any) -> None:
    """A kernel on all threads, with one counter from which they take their chunks."""
    job = partial(kernel, *args, np.zeros(8, dtype=np.int64))
    threads = 1 if work < _SMALL else num_threads()
    others = [_pool(threads).submit(job) for _ in range(threads - 1)]
    job()
    for other in others:
        if not other.cancel():  # not even started: the work is done
            other.result()


def _far(L: Laplacian) -> bool:
    """D^-1/2 is not in the caches: a neighbour's scale would be a second read from afar."""
    return L.n * L.inv_sqrt_degree.itemsize > laplacian.FAR


def _arrays(L: Laplacian) -> tuple[Array, Array, Array, Array, Array]:
    """What the kernels of Algorithm 2 take; a single weight stands for all."""
    one = np.ones(1, dtype=L.inv_sqrt_degree.dtype)
    weights = read_only(one) if L.weights is None else L.weights
    return L.indptr, L.indices, weights, L.inv_sqrt_degree, L.diagonal


def _neighbours(L: Laplacian, X: Array, scratch: Array | None = None) -> tuple[Array, Any]:
    """The block from which H X reads the rows of neighbours, and (s, post, own) of `_apply`."""
    s, far = L.inv_sqrt_degree, _far(L) or X.shape[1] == 1
    if L.halo is None:
        return (_scaled(X, s, 1.0, scratch), (None, s, None)) if far else (X, (s, s, None))
    if far:
        return L.halo.extended(X, partial(_scaled, X, s, 1.0), to="product"), (None, s, None)
    return L.halo.extended(X, to="product"), (L.around, s, None)


def _apply(
    L: Laplacian,
    lam: float,
    X: Array,
    Y: Array,
    neighbours: tuple[Array, Any],
    step: tuple[Array | None, float, float] = (None, 0.0, 0.0),
    dots: Array | None = None,
    unit: Array | None = None,
) -> None:
    """`laplacian.apply`; `step` are B, c1 and c2 of Chebyshev."""
    (G, factors), (B, c1, c2), number = neighbours, step, X.dtype.type
    arrays = (L.indptr, L.indices, L.weights, *factors, L.diagonal)
    numbers, work = (number(lam), number(c1), number(c2)), (L.nnz + 4 * L.n) * X.shape[1]
    _run(work, laplacian.apply, G, unit, X, Y, B, dots, arrays, *numbers, L.cuts)


def _residual(
    L: Laplacian, lam: float, Z: Array, B: Array, R: Array, start: int, up: Array | None = None
) -> Array | None:
    """`laplacian.residual` on all threads; with `up`, the column dots of the chunks added up."""
    (b, k), (s, diagonal, weights) = B.shape, L.exact
    first, last = np.searchsorted(L.cuts, (start + 1, start + b))
    cuts = np.concatenate([[start], L.cuts[first:last], [start + b]])
    work = (int(L.indptr[start + b] - L.indptr[start]) + 4 * b) * k
    dots = None if up is None else np.zeros((cuts.shape[0] - 1, 2, k))
    arrays = (L.indptr, L.indices, weights, s, s, None, diagonal)
    _run(work, laplacian.residual, Z, B, R, start, up, dots, arrays, float(lam), cuts)
    return None if dots is None else dots.sum(axis=0)


def _scaled(
    X: Array, s: Array, f: float, out: Any = None, inverse: bool = False, up: Any = None
) -> Array:
    """diag(f s) X diag(up), or diag(f / s) X if `inverse`."""
    out, f = aligned_empty(X.shape, X.dtype) if out is None else out, X.dtype.type(f)
    if X.shape[1] == 1:
        (np.divide if inverse else np.multiply)(X[:, 0], s, out=out[:, 0])
        out *= f
    else:
        _run(X.size, laplacian.scale_rows, X, s, f, up, out, inverse, _flat_rows(X.shape[1]))
    return out


def _like(out: Array | None, shape: Any, dtype: Any) -> Array:
    """`out` if a kernel can write there, else a new block."""
    usable = out is not None and out.dtype == dtype and out.flags.c_contiguous
    return out if usable else aligned_empty(shape, dtype)


def _given(found: Array, out: Array | None) -> Array:
    """What was found, in `out` if there is one."""
    if out is None or out is found:
        return found
    out[...] = found
    return out


def _side_by_side(*blocks: Array) -> Iterator[tuple[list[Array], int]]:
    """The same blocks with g rows in one, so that no vector ends inside a row; then what is left.

    Masked reads and writes of narrow rows would cost more than the memory does.
    """
    n, k = blocks[0].shape
    lanes = VECTOR_BYTES // min(block.itemsize for block in blocks)
    g = lanes // math.gcd(k, lanes)
    whole = n // g * g
    for rows, side in ((slice(0, whole), g), (slice(whole, n), 1)):
        if rows.stop > rows.start:
            wide = ((rows.stop - rows.start) // side, side * k)
            yield [block[rows].reshape(wide) for block in blocks], side


def _flat(n: int, k: int) -> tuple[int, Array]:
    """Rows per chunk of an n x k block, and a zero for each chunk's column sums."""
    rows = _flat_rows(k)
    return rows, np.zeros((-(-n // rows), k))


def _flat_rows(k: int) -> int:
    return max(1, _FLAT_CHUNK // max(k, 1))


def _tall_chunk(n: int) -> int:
    """Rows of a chunk of a dense matrix: few chunks, for each has its own sums."""
    return max(64, -(-n // products.CHUNKS))
