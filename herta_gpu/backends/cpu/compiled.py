"""The CPU backend, compiled: the same numbers as `CPUBackend` to rounding, several times faster.

numba compiles the kernels of `kernels/` on first use and keeps the machine
code on disk.  Threads are Python's own around kernels that release the interpreter lock: they sleep
between two calls, so they do not compete with those of BLAS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, CGState, Halves, Laplacian, keep_probabilities
from herta_gpu.backends.cpu.kernels import (
    cg,
    hadamard,
    laplacian,
    products,
    sampling,
    sketch,
)
from herta_gpu.backends.cpu.kernels.simd import HALF, VECTOR_BYTES
from herta_gpu.backends.cpu.philox import seed_key
from herta_gpu.backends.cpu.reference import (
    CPUBackend,
    _integer_scores,
    _pool,
    fields,
)
from herta_gpu.graph import read_only
from herta_gpu.plumbing.machine import num_threads

_CHUNK_WORK = 1 << 15  # non-zeros plus four per row that one thread takes at a time
_FLAT_CHUNK = 1 << 16  # numbers of a block that one thread takes at a time
_HALF_COLUMNS = 64  # from here on float16 was always faster
_SMALL = 1 << 15  # multiply-adds below which a second thread costs more than it brings


@dataclass
class CompiledLaplacian(Laplacian):
    """A Laplacian with its rows cut into chunks of equal work."""

    cuts: Array = None
    halo: Any = None  # where other processes have some of the neighbours: `backends.ranks.parts`
    around: Array = None  # D^-1/2 of the halo's rows behind that of the own ones

    @property
    def far(self) -> bool:
        """D^-1/2 is not in the caches: a neighbour's scale would be a second read from afar."""
        return self.n * self.inv_sqrt_degree.itemsize > laplacian.FAR

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array, Array]:
        """What the kernels take; a single weight stands for all."""
        one = np.ones(1, dtype=self.inv_sqrt_degree.dtype)
        weights = read_only(one) if self.weights is None else self.weights
        return self.indptr, self.indices, weights, self.inv_sqrt_degree, self.diagonal


class CompiledBackend(CPUBackend):
    """`CPUBackend` with compiled primitives."""

    name = "cpu"
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

    def laplacian(self, graph: Any, dtype: str) -> CompiledLaplacian:  # type: ignore[override]
        work = graph.indptr + 4 * np.arange(graph.num_nodes + 1)
        inner = np.searchsorted(work, np.arange(_CHUNK_WORK, work[-1], _CHUNK_WORK))
        cuts = np.unique(np.concatenate([[0], inner, [graph.num_nodes]]))
        return CompiledLaplacian(**fields(graph, dtype), cuts=cuts)

    def matmul(self, A: Array, B: Array) -> Array:
        fit = A.shape[1] == B.shape[0] and A.dtype == B.dtype == np.float64
        if not fit or not 1 < B.shape[1] <= products.NARROW or A.size < products.LEAST:
            return super().matmul(A, B)
        if A.flags.c_contiguous:
            F, Bt = aligned_empty((A.shape[0], B.shape[1]), A.dtype), np.ascontiguousarray(B.T)
            _run(partial(products.times, A, Bt, F, _tall_chunk(A.shape[0])), A.size)
            return F
        if A.T.flags.c_contiguous:
            n, rows = A.shape[1], _tall_chunk(A.shape[1])
            sums = self.zeros((-(-n // rows), B.shape[1], A.shape[0]), "float64")
            B = np.ascontiguousarray(B)
            _run(partial(products.transposed_times, A.T, B, sums, rows), A.size)
            return np.ascontiguousarray(sums.sum(axis=0).T)
        return super().matmul(A, B)

    # ---- H = I + lam L -------------------------------------------------------------------
    def apply_H(self, L: Laplacian, lam: float, X: Array, out: Array | None = None) -> Array:
        X = self.asarray(X, str(L.inv_sqrt_degree.dtype))
        Y = out if out is not None and _usable(out, X) else aligned_empty(X.shape, X.dtype)
        _apply(L, lam, X, Y)
        if out is None or out is Y:
            return Y
        out[...] = Y
        return out

    def residual_rows(
        self, L: Laplacian, lam: float, Z: Array, B: Array, start: int, out: Array | None = None
    ) -> Array:
        Z, B = self.asarray(Z), self.asarray(B, "float64")
        usable = out is not None and out.dtype == np.float64 and out.flags.c_contiguous
        R = out if usable else aligned_empty(B.shape, "float64")
        _residual(L, lam, Z, B, R, start)
        if out is None or out is R:
            return R
        out[...] = R
        return out

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
            _run(partial(cg.column_dots, x, y, dots, rows), x.size)
            total += dots.sum(axis=0).reshape(g, -1).sum(axis=0)
        return total

    def cg_step(self, L: Laplacian, lam: float, state: CGState) -> None:
        assert isinstance(L, CompiledLaplacian)
        Z, R, P, HP = state.Z, state.R, state.P, state.HP
        dots = np.zeros((L.cuts.shape[0] - 1, R.shape[1]))
        if L.far and state.scratch is None:
            state.scratch = self.empty(P.shape, str(P.dtype))
        _apply(L, lam, P, HP, dots=dots, scratch=state.scratch)
        pHp = self.total(dots.sum(axis=0))
        alpha = state.step_length(pHp)
        rho = np.zeros(R.shape[1])
        for (r, hp), g in _side_by_side(R, HP):
            a, (rows, dots) = np.tile(alpha.astype(R.dtype), g), _flat(*r.shape)
            _run(partial(cg.cg_residual, r, hp, a, dots, rows), r.size)
            rho += dots.sum(axis=0).reshape(g, -1).sum(axis=0)
        beta = state.turn(alpha, self.total(rho))
        for (z, p, r), g in _side_by_side(Z, P, R):
            a, b = (np.tile(c.astype(R.dtype), g) for c in (alpha, beta))
            rows = _flat_rows(z.shape[1])
            _run(partial(cg.cg_direction, z, p, r, a, b, rows), 2 * z.size)

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
        if halves is not None:
            rows, s = _flat_rows(Z.shape[1]), L.inv_sqrt_degree
            scaling = (Z, s, Z.dtype.type(1), halves.up, halves.G, False, rows)
            _run(partial(laplacian.scale_rows, *scaling), Z.size)
        _apply(L, lam, Z, Z_prev, B=B, c1=c1, c2=c2, halves=halves)

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
        assert isinstance(L, CompiledLaplacian)
        # A row shorter than half a cache line is read no faster in float16.
        half = half and HALF and B.shape[1] > VECTOR_BYTES // 8 and B.dtype == np.float32
        if half or L.halo is not None or (not L.far and B.shape[1] != 1):
            return super().chebyshev(L, lam, B, first, steps, work, half)
        # On D^-1/2 Z throughout: what a step reads from afar is then the iterate itself.
        B, s = self.asarray(B, str(L.inv_sqrt_degree.dtype)), L.inv_sqrt_degree
        Z, Z_prev = self.iterates(B, work)
        _scaled(B, s, first, out=Z)
        Z_prev.fill(0)
        for c1, c2 in steps:
            _apply(L, lam, Z, Z_prev, B=B, c1=c1, c2=c2, scaled=True)
            Z, Z_prev = Z_prev, Z
        return _scaled(Z, s, 1.0, out=Z, inverse=True)

    def largest_entries(self, L: Laplacian, B: Array) -> Array:
        rows = _flat_rows(B.shape[1])
        largest = np.zeros((-(-B.shape[0] // rows), B.shape[1]), dtype=B.dtype)
        _run(partial(laplacian.largest_entries, B, L.inv_sqrt_degree, largest, rows), B.size)
        return largest.max(axis=0)

    def half_pays(self, L: Laplacian, k: int) -> bool:
        # Measured in random order, 7e7 non-zeros: 0.91 of a step's time at 64 columns, 0.93 to 1.02
        # at 32 and 48; a random read costs more than its bytes here.  Nothing is sure to be saved
        # where the caches hold most of the block; rows of other processes are sent as they are.
        assert isinstance(L, CompiledLaplacian)
        return HALF and L.far and L.halo is None and k >= _HALF_COLUMNS

    # ---- Algorithm 2 ---------------------------------------------------------------------
    def sketch_incidence(self, L: Laplacian, k: int, seed: int) -> Array:
        return self._sketch(L, k, seed, incidence=True)

    def sketch_identity(self, L: Laplacian, k: int, seed: int) -> Array:
        return self._sketch(L, k, seed, incidence=False)

    def _sketch(self, L: Laplacian, k: int, seed: int, incidence: bool) -> Array:
        assert isinstance(L, CompiledLaplacian)
        out = aligned_empty((L.n, k), L.inv_sqrt_degree.dtype)
        key = tuple(np.uint64(word) for word in seed_key(seed))
        kernel = sketch.incidence_rows if incidence else sketch.identity_rows
        work = 16 * k * (L.nnz if incidence else L.n)
        _run(partial(kernel, out, L.arrays, L.order, key, L.cuts), work)
        return out

    def edge_scores(self, L: Laplacian, B_S: Array, Pi_S: Array, lam: float) -> Array:
        assert isinstance(L, CompiledLaplacian)
        ids, arrays = None, L.arrays
        if L.halo is not None:  # the other end may be another process's
            B_S, Pi_S = L.halo.extended(self.asarray(B_S)), L.halo.extended(self.asarray(Pi_S))
            ids, s = L.order, L.exact[0].astype(L.inv_sqrt_degree.dtype)
            arrays = (*arrays[:3], s, arrays[4])
        B_S, Pi_S = self.asarray(B_S), self.asarray(Pi_S)
        first = sampling.first_edges(L.indptr, L.indices, ids)
        scores = np.empty(int(first[-1]))
        _run(
            partial(sampling.edge_scores, scores, first, B_S, Pi_S, lam, arrays, ids, L.cuts),
            L.nnz * (B_S.shape[1] + Pi_S.shape[1]),
        )
        return scores

    def sample_edges(self, scores: Array, s: int, seed: int, replace: bool) -> Array:
        key = tuple(np.uint64(word) for word in seed_key(seed))
        if not replace:
            p = keep_probabilities(np, scores, s, self.total)
            factors, numbers = np.empty(p.shape[0]), None
            if not self.whole:
                numbers = self.sums_up_to(np.ones(p.shape[0], dtype=np.int64))[0] - 1
            _run(partial(sampling.bernoulli, p, factors, numbers, key), 20 * p.shape[0])
            return factors
        m, most = int(self.total(scores.shape[0])), float(scores.max(initial=0.0))
        q = _integer_scores(scores, m, float(self.largest(most)))
        prefix, total = self.sums_up_to(q)
        counts = np.zeros(scores.shape[0], dtype=np.int64)
        shift = max(0, total.bit_length() - scores.shape[0].bit_length())
        guide = np.searchsorted(prefix, np.arange((total >> shift) + 1) << shift, "right")
        draws = (q, prefix, total, guide, shift, s, counts, key)
        _run(partial(sampling.draw, *draws), 40 * s)
        factors, hit = np.zeros(scores.shape[0]), counts > 0
        factors[hit] = counts[hit] / (s * (q[hit] / total))
        return factors

    def sums_up_to(self, q: Array) -> tuple[Array, int]:
        """For each edge the sum of q up to it, itself included, and that of all edges.

        The order is that of the caller's ids, whichever process has an edge.
        """
        prefix = np.cumsum(q)
        return prefix, int(prefix[-1])

    # ---- SRHT ----------------------------------------------------------------------------
    def srht(self, Q: Array, s: int, seed: int) -> Array:
        n, k = Q.shape
        padded = 1 << max(0, n - 1).bit_length()
        key = tuple(np.uint64(word) for word in seed_key(seed))
        Y = aligned_empty((padded, k), Q.dtype)
        keys = np.empty(padded, dtype=np.uint64)
        _run(partial(sampling.signed_rows, self.asarray(Q), Y, keys, key), 2 * Y.size)
        walsh_hadamard_inplace(Y)
        return Y[_smallest(keys, s)] * Q.dtype.type(np.sqrt(padded / s))


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array that starts on a cache line, which NumPy's own need not."""
    return _aligned(np.empty, shape, dtype)


def _aligned(make: Callable[..., Array], shape: tuple[int, ...], dtype: Any) -> Array:
    size, line = math.prod(shape) * np.dtype(dtype).itemsize, VECTOR_BYTES
    raw = make(size + line, dtype=np.uint8)
    start = -raw.ctypes.data % line
    return raw[start : start + size].view(dtype).reshape(shape)


def walsh_hadamard_inplace(Y: Array) -> None:
    """Y <- (1/sqrt(n)) H_n Y for n a power of two."""
    n, k = Y.shape
    flat, run, left = Y.reshape(-1), k, n.bit_length() - 1
    while left and k:
        passes = -(-left // hadamard.HADAMARD_BITS)
        bits = -(-left // passes)  # equal shares: a pass costs about the same whatever its bits
        scale = 1.0 / math.sqrt(n) if passes == 1 else 1.0
        _run(partial(hadamard.hadamard_pass, flat, run, bits, scale), Y.size * bits)
        run, left = run << bits, left - bits


def _run(job: Callable[[Array], None], work: int) -> None:
    """`job` on all threads, with one counter from which they take their chunks."""
    counter = np.zeros(8, dtype=np.int64)
    threads = 1 if work < _SMALL else num_threads()
    others = [_pool(threads).submit(job, counter) for _ in range(threads - 1)]
    job(counter)
    for other in others:
        if not other.cancel():  # not even started: the work is done
            other.result()


def _apply(
    L: Laplacian,
    lam: float,
    X: Array,
    Y: Array,
    B: Array | None = None,
    dots: Array | None = None,
    c1: float = 0.0,
    c2: float = 0.0,
    scaled: bool = False,
    scratch: Array | None = None,
    halves: Halves | None = None,
) -> None:
    """`laplacian.apply`; when `scaled`, X and Y hold D^-1/2 times the iterates of Chebyshev."""
    assert isinstance(L, CompiledLaplacian)
    s, number = L.inv_sqrt_degree, X.dtype.type
    G, factors = X, (s, s, None)
    if halves is not None:
        G, factors = halves.G, (None, s, None)
    elif scaled:
        factors = (None, s, s)
    elif L.halo is not None and not L.far and X.shape[1] > 1:
        G, factors = L.halo.extended(X, to="product"), (L.around, s, None)
    elif L.halo is not None:
        G = L.halo.extended(X, partial(_scaled, X, s, 1.0), to="product")
        factors = (None, s, None)
    elif L.far or X.shape[1] == 1:
        G, factors = _scaled(X, s, 1.0, scratch), (None, s, None)
    unit = None if halves is None else halves.down
    job = partial(laplacian.apply, G, unit, X)
    if X.shape[1] == 1:
        job = partial(laplacian.apply_column, G, X)
    arrays = (L.indptr, L.indices, L.weights, *factors, L.diagonal)
    rest = (Y, B, dots, arrays, number(lam), number(c1), number(c2), L.cuts)
    _run(partial(job, *rest), (L.nnz + 4 * L.n) * X.shape[1])


def _residual(
    L: Laplacian, lam: float, Z: Array, B: Array, R: Array, start: int, up: Array | None = None
) -> Array | None:
    """`laplacian.residual` on all threads; with `up`, the column dots of the chunks added up."""
    assert isinstance(L, CompiledLaplacian)
    (b, k), (s, diagonal, weights) = B.shape, L.exact
    first, last = np.searchsorted(L.cuts, (start + 1, start + b))
    cuts = np.concatenate([[start], L.cuts[first:last], [start + b]])
    work = (int(L.indptr[start + b] - L.indptr[start]) + 4 * b) * k
    kernel = laplacian.residual_column if k == 1 else laplacian.residual
    dots = None if up is None else np.zeros((cuts.shape[0] - 1, 2, k))
    arrays = (L.indptr, L.indices, weights, s, s, None, diagonal)
    _run(partial(kernel, Z, B, R, start, up, dots, arrays, float(lam), cuts), work)
    return None if dots is None else dots.sum(axis=0)


def _scaled(X: Array, s: Array, f: float, out: Array | None = None, inverse: bool = False) -> Array:
    """diag(f s) X, or diag(f / s) X if `inverse`."""
    out, f = aligned_empty(X.shape, X.dtype) if out is None else out, X.dtype.type(f)
    if X.shape[1] == 1:
        (np.divide if inverse else np.multiply)(X[:, 0], s, out=out[:, 0])
        out *= f
        return out
    rows = _flat_rows(X.shape[1])
    _run(partial(laplacian.scale_rows, X, s, f, None, out, inverse, rows), X.size)
    return out


def _usable(out: Array, X: Array) -> bool:
    return out.dtype == X.dtype and out.flags.c_contiguous and not np.may_share_memory(out, X)


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


def _smallest(keys: Array, s: int) -> Array:
    """Where the s smallest keys are, in order; among equals the first."""
    limit = np.partition(keys, s - 1)[s - 1]
    rows = np.flatnonzero(keys <= limit)
    return rows if rows.shape[0] == s else np.sort(np.argsort(keys, kind="stable")[:s])
