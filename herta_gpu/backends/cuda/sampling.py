"""Algorithm 2 on the device: the launches of sampling.cu."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, keep_probabilities, score_exponent
from herta_gpu.backends.cuda.device import (
    THREADS,
    DeviceLaplacian,
    blocks,
    pointer,
    suffix,
    vector_width,
)

I32, I64, U64 = np.int32, np.int64, np.uint64
_SCAN_TILE = 2048  # kThreads * kItems of sampling.cu


class EdgeSampler:
    """Scores, draws and filters edges, numbered as in `Graph.edges`."""

    def __init__(self, xp: Any, launch: Any) -> None:
        self.xp, self._launch = xp, launch

    def _flat(self, kernel: str, size: int, *args: Any) -> None:
        """A thread per item."""
        shape = {"grid": (blocks(size, THREADS),), "block": (THREADS,)}
        self._launch("sampling.cu", kernel, **shape, args=args)

    def _rows(self, kernel: str, n: int, *args: Any) -> None:
        """A warp per row."""
        self._launch("sampling.cu", kernel, grid=(blocks(n, 8),), block=(32, 8), args=args)

    def _prefix_sum(self, x: Array, out: Array) -> None:
        """Inclusive, int64, in three launches."""
        n = x.shape[0]
        tiles = -(-n // _SCAN_TILE)
        totals = self.xp.empty(tiles, dtype=I64)
        scan = partial(self._launch, "sampling.cu", block=(THREADS,))
        scan("scan_tiles", grid=(tiles,), args=(I64(n), x, out, totals))
        scan("scan_totals", grid=(1,), args=(I64(tiles), totals))
        self._flat("scan_add", n, I64(n), totals, out)

    def _offsets(self, kernel: str, by_rows: bool, n: int, *args: Any) -> Array:
        """(n + 1,) where each row begins, from a kernel that counts its entries."""
        counts, first = self.xp.empty(n, dtype=I64), self.xp.zeros(n + 1, dtype=I64)
        (self._rows if by_rows else self._flat)(kernel, n, *args, counts)
        self._prefix_sum(counts, first[1:])
        return first

    def edges(self, L: DeviceLaplacian) -> tuple[Array, Array, Array, Array | None]:
        """(number of each row's first edge, lo, hi, weights), listed once per Laplacian."""
        if L.edges is None:
            xp, m, index = self.xp, L.nnz // 2, L.indices.dtype
            first = self._offsets(f"upper_counts_{suffix(index)}", False, L.n, *L.csr)
            lo, hi = xp.empty(m, dtype=index), xp.empty(m, dtype=index)
            weights = None if L.weights is None else xp.empty(m, dtype=L.weights.dtype)
            outputs = (pointer(L.weights), lo, hi, pointer(weights))
            self._rows(f"edge_list_{L.suffix}", L.n, *L.csr, first, *outputs)
            # They are kept for whoever asks next, and that may be work on another stream.
            xp.cuda.get_current_stream().synchronize()  # synchronize!
            L.edges = first, lo, hi, weights
        return L.edges

    def pair_bounds(self, indptr: Array, indices: Array, ratio: Array) -> Array:
        """(n,) the largest ratio[u] + ratio[v] over the neighbours v of each u, 0 without any."""
        n = ratio.shape[0]
        bounds = self.xp.empty(n)
        name = f"pair_bounds_{suffix(indices.dtype)}"
        self._rows(name, n, I64(n), indptr, indices, ratio, bounds)
        return bounds

    def scores(self, L: DeviceLaplacian, B_S: Array, Pi_S: Array, lam: float) -> Array:
        """(m,) ||B_S^T b_e||^2 + ||Pi_S^T b_e||^2 / lam."""
        m, k = L.nnz // 2, B_S.shape[1]
        scores = self.xp.zeros(m)
        if m and k:
            _, lo, hi, weights = self.edges(L)
            name = f"edge_scores_{L.suffix}_v{vector_width(k, B_S.dtype)}"
            arguments = (I64(m), I64(k), lo, hi, pointer(weights), L.inv_sqrt_degree, B_S, Pi_S)
            shape = {"grid": (blocks(m, 32),), "block": (8, 32)}
            self._launch("sampling.cu", name, **shape, args=(*arguments, np.float64(lam), scores))
        return scores

    def bernoulli(self, scores: Array, s: int, seed: int) -> Array:
        """(m,) 1 / p of the edges kept with probability p."""
        m = scores.shape[0]
        factors = self.xp.zeros(m)
        if m:
            p = keep_probabilities(self.xp, scores, s)
            self._flat("bernoulli_factors", m, I64(m), p, U64(seed), factors)
        return factors

    def with_replacement(self, scores: Array, s: int, seed: int) -> Array:
        """(m,) times drawn / (s p)."""
        m = scores.shape[0]
        factors = self.xp.zeros(m)
        if m and s:
            exponent = score_exponent(m, float(scores.max()))  # synchronize!
            q, counts, prefix = (self.xp.zeros(m, dtype=I64) for _ in range(3))
            self._flat("integer_scores", m, I64(m), scores, I32(exponent), q)
            self._prefix_sum(q, prefix)
            self._flat("draw_edges", s, I64(s), I64(m), prefix, U64(seed), counts)
            arguments = (I64(s), I64(m), counts, q, prefix, factors)
            self._flat("replacement_factors", m, *arguments)
        return factors

    def filtered(self, L: DeviceLaplacian, factors: Array) -> tuple[Array, Array, Array, Array]:
        """(indptr, indices, weights, row sums) of the A of L_tilde: edges with a factor above 0."""
        xp, index = self.xp, L.indices.dtype
        edges = (*L.csr, self.edges(L)[0])
        indptr = self._offsets(f"kept_counts_{suffix(index)}", True, L.n, *edges, factors)
        kept = int(indptr[-1])  # synchronize!
        indices, weights = xp.empty(kept, dtype=index), xp.empty(kept, dtype=L.diagonal.dtype)
        sums = xp.empty(L.n)
        outputs = (pointer(L.weights), factors, indptr, indices, weights, sums)
        self._rows(f"kept_fill_{L.suffix}", L.n, *edges, *outputs)
        return indptr, indices, weights, sums
