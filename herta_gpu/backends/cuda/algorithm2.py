"""What is random, on the device: the launches of sampling.cu and sketch.cu (Algorithm 2) and of
hadamard.cu (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from herta_gpu.backends.base import (
    STREAM_ROWS,
    Array,
    Backend,
    Laplacian,
    keep_probabilities,
    score_exponent,
)
from herta_gpu.backends.cuda.device import (
    THREADS,
    DeviceLaplacian,
    blocks,
    column_shape,
    hadamard_passes,
    suffix,
    vector_width,
)

I32, I64, U32, U64 = np.int32, np.int64, np.uint32, np.uint64
_SCAN_TILE = 2048  # kThreads * kItems of sampling.cu


class Algorithm2(Backend):
    """The part of the CUDA backend that sketches, scores, draws and filters edges.

    Edges are numbered as in `Graph.edges`.
    """

    launch: Callable[..., None]

    def _items(self, file: str, kernel: str, size: int, *args: Any) -> None:
        """A thread per item."""
        self.launch(file, kernel, (blocks(size, THREADS),), (THREADS,), *args)

    def _by_row(self, kernel: str, n: int, *args: Any) -> None:
        """A warp per row."""
        self.launch("sampling.cu", kernel, (blocks(n, 8),), (32, 8), *args)

    # ---- sketches -------------------------------------------------------------------------
    def sketch_incidence(self, L: Laplacian, k: int, seed: int) -> Array:
        assert isinstance(L, DeviceLaplacian)
        longs = L.long_rows.shape[0]
        graph = (L.indptr, L.indices, L.weights, L.inv_sqrt_degree, L.order)
        rows = (*graph, I32(L.segment), I32(longs), L.long_rows)
        return self._sketch(f"sketch_incidence_{L.suffix}", L, k, seed, longs, *rows)

    def sketch_identity(self, L: Laplacian, k: int, seed: int) -> Array:
        out = self._sketch(f"sketch_identity_{suffix(L.inv_sqrt_degree.dtype)}", L, k, seed, 0)
        return out if L.order is None else out[L.order]

    def _sketch(
        self, kernel: str, L: Laplacian, k: int, seed: int, longs: int, *rows: Any
    ) -> Array:
        """n x k normal numbers, by `longs` blocks more than the rows need."""
        dtype = L.inv_sqrt_degree.dtype
        x, y, tiles = column_shape(-(-k // 4) * 4, 4)
        out = self.xp.empty((L.n, k), dtype=dtype)
        args = (L.n, k, *rows, dtype.type(k**-0.5), U64(seed), out)
        self.launch("sketch.cu", kernel, (longs + blocks(L.n, y), tiles), (x, y), *args)
        return out

    def srht(self, Q: Array, s: int, seed: int) -> Array:
        """A few butterfly levels a pass."""
        xp, Q, (n, k) = self.xp, self.asarray(Q), Q.shape
        out = self.xp.zeros((s, k), dtype=Q.dtype)
        if not Q.size:
            return out
        log_n = max(0, n - 1).bit_length()
        padded, passes = 1 << log_n, hadamard_passes(log_n)
        keys, place = xp.empty(padded, dtype=U64), xp.full(padded, -1, dtype=I64)
        words = (padded, U32(STREAM_ROWS), U64(seed), keys)
        self._items("hadamard.cu", "random_words", padded, *words)
        # The place of each chosen row among them; CuPy's sorts are stable.
        place[xp.sort(xp.argsort(keys)[:s])] = xp.arange(s)
        work = self.xp.empty((padded, k), dtype=Q.dtype) if len(passes) > 1 else out
        done = 0
        for number, levels in enumerate(passes):
            first, last = number == 0, number == len(passes) - 1
            grid = (1 << (log_n - levels), -(-k * Q.itemsize // 64))
            sizes = (n if first else padded, k, I32(levels), I32(done), I32(first), U64(seed))
            ends = (Q if first else work, out if last else work, place if last else None)
            name, scale = f"hadamard_{suffix(Q.dtype)}", Q.dtype.type(s**-0.5 if last else 1)
            self.launch("hadamard.cu", name, grid, (512,), *sizes, *ends, scale)
            done += levels
        return out

    # ---- edges ----------------------------------------------------------------------------
    def edge_scores(self, L: Laplacian, B_S: Array, Pi_S: Array, lam: float) -> Array:
        assert isinstance(L, DeviceLaplacian)
        dtype = str(L.inv_sqrt_degree.dtype)  # a solve that was refined comes in float64
        B_S, Pi_S = self.asarray(B_S, dtype), self.asarray(Pi_S, dtype)
        m, k = L.nnz // 2, B_S.shape[1]
        scores = self.xp.zeros(m)
        if m and k:
            _, lo, hi, weights = self.list_edges(L)
            name = f"edge_scores_{L.suffix}_v{vector_width(k, B_S.dtype)}"
            edges = (m, k, lo, hi, weights, L.inv_sqrt_degree)
            grid, block = (blocks(m, 32),), (8, 32)
            self.launch("sampling.cu", name, grid, block, *edges, B_S, Pi_S, float(lam), scores)
        return scores

    def sample_edges(self, scores: Array, s: int, seed: int, replace: bool) -> Array:
        scores, m = self.asarray(scores, "float64"), scores.shape[0]
        factors = self.xp.zeros(m)
        run = partial(self._items, "sampling.cu")
        if m and not replace:
            p = keep_probabilities(self.xp, scores, s)
            run("bernoulli_factors", m, m, p, U64(seed), factors)
        elif m and s:
            exponent = score_exponent(m, float(scores.max()))  # synchronize!
            q, counts, prefix = (self.xp.zeros(m, dtype=I64) for _ in range(3))
            run("integer_scores", m, m, scores, I32(exponent), q)
            self._prefix_sum(q, prefix)
            run("draw_edges", s, s, m, prefix, U64(seed), counts)
            run("replacement_factors", m, s, m, counts, q, prefix, factors)
        return factors

    def list_edges(self, L: DeviceLaplacian) -> tuple[Array, Array, Array, Array | None]:
        """(number of each row's first edge, lo, hi, weights), listed once per Laplacian."""
        if L.edges is None:
            xp, m, index = self.xp, L.nnz // 2, L.indices.dtype
            count = partial(self._items, "sampling.cu")
            first = self._offsets(count, f"upper_counts_{suffix(index)}", L.n, *L.csr)
            lo, hi = xp.empty(m, dtype=index), xp.empty(m, dtype=index)
            weights = None if L.weights is None else xp.empty(m, dtype=L.weights.dtype)
            outputs = (L.weights, lo, hi, weights)
            self._by_row(f"edge_list_{L.suffix}", L.n, *L.csr, first, *outputs)
            # They are kept for whoever asks next, and that may be work on another stream.
            xp.cuda.get_current_stream().synchronize()  # synchronize!
            L.edges = first, lo, hi, weights
        return L.edges

    def filter_edges(self, L: DeviceLaplacian, factors: Array) -> tuple[Array, Array, Array, Array]:
        """(indptr, indices, weights, row sums) of the A of L_tilde: edges with a factor above 0."""
        xp, index = self.xp, L.indices.dtype
        edges = (*L.csr, self.list_edges(L)[0])
        name = f"kept_counts_{suffix(index)}"
        indptr = self._offsets(self._by_row, name, L.n, *edges, factors)
        kept = int(indptr[-1])  # synchronize!
        indices, weights = xp.empty(kept, dtype=index), xp.empty(kept, dtype=L.diagonal.dtype)
        sums = xp.empty(L.n)
        outputs = (L.weights, factors, indptr, indices, weights, sums)
        self._by_row(f"kept_fill_{L.suffix}", L.n, *edges, *outputs)
        return indptr, indices, weights, sums

    def pair_bounds(self, indptr: Array, indices: Array, ratio: Array) -> Array:
        """(n,) the largest ratio[u] + ratio[v] over the neighbours v of each u, 0 without any."""
        n = ratio.shape[0]
        bounds = self.xp.empty(n)
        name = f"pair_bounds_{suffix(indices.dtype)}"
        self._by_row(name, n, n, indptr, indices, ratio, bounds)
        return bounds

    def _offsets(self, run: Callable[..., None], kernel: str, n: int, *args: Any) -> Array:
        """(n + 1,) where each row begins, from a kernel that counts its entries."""
        counts, first = self.xp.empty(n, dtype=I64), self.xp.zeros(n + 1, dtype=I64)
        run(kernel, n, *args, counts)
        self._prefix_sum(counts, first[1:])
        return first

    def _prefix_sum(self, x: Array, out: Array) -> None:
        """Inclusive, int64, in three launches."""
        n = x.shape[0]
        tiles = -(-n // _SCAN_TILE)
        totals = self.xp.empty(tiles, dtype=I64)
        self.launch("sampling.cu", "scan_tiles", (tiles,), (THREADS,), n, x, out, totals)
        self.launch("sampling.cu", "scan_totals", (1,), (THREADS,), tiles, totals)
        self._items("sampling.cu", "scan_add", n, n, totals, out)
