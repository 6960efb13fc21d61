"""How each kernel is launched, on NumPy arrays: the launch contract in code.

`Emulated` runs the primitives of a backend through the emulator.  It allocates freely and copies
nothing; a real backend keeps the scratch arrays (partials, tickets) for the length of a solve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from herta_gpu.backends.cuda.device import (
    MAX_BLOCKS,
    SEGMENT,
    column_shape,
    hadamard_passes,
    segments,
    suffix,
    vector_width,
)
from tests.cuda_emulator import EmulatorError, Module, load

I32, I64, U32, U64 = np.int32, np.int64, np.uint32, np.uint64


def long_rows(indptr: Any, segment: int) -> tuple[Any, Any]:
    """(row, rank) of each segment of the rows longer than `segment`."""
    length = np.diff(indptr)
    rows = np.flatnonzero(length > segment)
    _, row, rank = segments(rows, length[rows], segment)
    return row.astype(I64), rank.astype(I32)


def by_precision(x: Any) -> tuple[Any, Any]:
    """(x, None) in float32, (None, x) in float64: what a kernel takes that knows both."""
    return (x, None) if x.dtype == np.float32 else (None, x)


@dataclass
class Emulated:
    """The primitives through emulated kernels; `modules` maps a file to a mutant of it."""

    variant: str = "plain"
    order: str = "forward"
    segment: int = SEGMENT
    max_blocks: int = MAX_BLOCKS
    modules: dict[str, Module] | None = None

    def launch(self, file: str, kernel: str, grid: Any, block: Any, *args: Any) -> None:
        module = (self.modules or {}).get(file) or load(file, self.variant)
        module.launch(kernel, grid, block, args, self.order)
        for array in args:  # tickets, the only uint32 arrays, must be ready for the next launch
            if isinstance(array, np.ndarray) and array.dtype == U32 and array.any():
                raise EmulatorError(f"{kernel} left its tickets at {array}")

    def row_blocks(self, n: int, rows: int) -> int:
        return max(1, min(-(-n // rows), self.max_blocks))

    # ---- laplacian.cu --------------------------------------------------------------------
    def _laplacian(
        self, L: Any, lam: Any, X: Any, scales: Any = None, start: int = 0, stop: int | None = None
    ) -> tuple[str, Any, Any, tuple[Any, ...]]:
        (n, k), stop = X.shape, X.shape[0] if stop is None else stop
        width = vector_width(k, X.dtype)
        x, y, tiles = column_shape(k, width, least=8)
        row, rank = long_rows(L.indptr, self.segment)
        here = slice(*np.searchsorted(row, (start, stop)).tolist())
        row, rank, segments = row[here], rank[here], here.stop - here.start
        taken = min(segments, self.max_blocks)
        name = f"{suffix(X.dtype)}_{suffix(L.indices.dtype)}_v{width}"
        s, diagonal, weights = scales or (L.inv_sqrt_degree, L.diagonal, L.weights)
        args = (
            *(I64(n), I64(k), L.indptr, L.indices, weights, s, diagonal),
            *(s.dtype.type(lam), I32(self.segment), I32(segments), I32(taken), row, rank),
            *(np.full((segments, k), np.nan), np.zeros((tiles, segments + 1), U32)),
        )
        return name, (taken + self.row_blocks(stop - start, y), tiles), (x, y), args

    def apply_H(self, L: Any, lam: float, X: Any, dots: bool = False, active: Any = None) -> Any:
        name, grid, block, args = self._laplacian(L, lam, X)
        Y = np.full_like(X, np.nan)
        partials, total = np.full((grid[0], X.shape[1]), np.nan), np.full(X.shape[1], np.nan)
        tail = (active, partials, total) if dots else (None, None, None)
        self.launch("laplacian.cu", f"apply_H_{name}", grid, block, *args, X, Y, *tail)
        return (Y, total) if dots else Y

    def residual_rows(self, L: Any, lam: float, Z: Any, B: Any, start: int) -> Any:
        return self._residual(L, lam, Z, B, start, "float64", None, dots=False)[0]

    def residual(self, L: Any, lam: float, Z: Any, B: Any, dtype: str, unit: Any) -> Any:
        return self._residual(L, lam, Z, B, 0, dtype, 1 / unit, dots=True)

    def _residual(
        self, L: Any, lam: float, Z: Any, B: Any, start: int, dtype: str, scale: Any, dots: bool
    ) -> Any:
        stop, k = start + B.shape[0], B.shape[1]
        name, grid, block, args = self._laplacian(L, lam, Z, L.exact, start, stop)
        taken = int(args[10])
        if taken:
            shape = ((taken, grid[1]), block)
            self.launch("laplacian.cu", f"hub_sums_{name}", *shape, *args, Z)
        grid = (grid[0] - taken, grid[1])
        R, found = np.full(B.shape, np.nan, dtype), np.full((2, k), np.nan) if dots else None
        partials = np.full((2 * grid[0], k), np.nan) if dots else None
        tail = (*by_precision(B), I64(start), I64(stop), scale, *by_precision(R), partials, found)
        self.launch("laplacian.cu", f"residual_{name}", grid, block, *args, Z, *tail)
        return R, found

    def chebyshev_step(
        self, L: Any, lam: float, Z: Any, Z_prev: Any, B: Any, c1: float, c2: float
    ) -> None:
        name, grid, block, args = self._laplacian(L, lam, Z)
        c = (Z.dtype.type(c1), Z.dtype.type(c2))
        self.launch("laplacian.cu", f"chebyshev_{name}", grid, block, *args, Z, Z_prev, B, *c)

    def chebyshev_half(
        self, L: Any, lam: float, Z: Any, Z_prev: Any, B: Any, c1: float, c2: float, halves: Any
    ) -> None:
        name, grid, block, size, _ = self._columns(Z)
        tail = (Z, L.inv_sqrt_degree, halves.up, halves.G)
        self.launch("laplacian.cu", f"halve_{name}", grid, block, *size, *tail)
        name, grid, block, args = self._laplacian(L, lam, Z)
        tail = (halves.G, halves.down, Z, Z_prev, B, np.float32(c1), np.float32(c2))
        self.launch("laplacian.cu", f"chebyshev_half_{name}", grid, block, *args, *tail)

    # ---- cg.cu ---------------------------------------------------------------------------
    def _columns(self, X: Any) -> tuple[str, Any, Any, tuple[Any, ...], tuple[Any, ...]]:
        n, k = X.shape
        width = vector_width(k, X.dtype)
        x, y, tiles = column_shape(k, width)
        blocks = self.row_blocks(n, y)
        scratch = (np.full((blocks, k), np.nan), np.zeros(tiles, U32))
        return f"{suffix(X.dtype)}_v{width}", (blocks, tiles), (x, y), (I64(n), I64(k)), scratch

    def column_dots(self, X: Any, Y: Any) -> Any:
        name, grid, block, size, scratch = self._columns(X)
        out = np.full(X.shape[1], np.nan)
        self.launch("cg.cu", f"column_dots_{name}", grid, block, *size, X, Y, *scratch, out)
        return out

    def cg_step(self, L: Any, lam: float, state: Any) -> None:
        HP, pHp = self.apply_H(L, lam, state.P, True, state.active)
        state.HP = HP
        name, grid, block, size, scratch = self._columns(state.R)
        alpha, beta = (np.full_like(state.rho, np.nan) for _ in range(2))
        scalars = (pHp, state.rho, state.energy, np.float64(state.tol), state.floor, state.active)
        self.launch(
            *("cg.cu", f"cg_residual_{name}", grid, block, *size, state.HP, state.R, *scalars),
            *(state.iterations, alpha, beta, *scratch),
        )
        self.launch(
            *("cg.cu", f"cg_direction_{name}", grid, block, *size, state.R, state.P, state.Z),
            *(alpha, beta),
        )

    def cg_step_of_ranks(self, L: Any, lam: float, state: Any, pHp: Any, dots: Any) -> None:
        """A step of one of several ranks; `pHp` and `dots` give the numbers of all from its own."""
        HP, mine = self.apply_H(L, lam, state.P, True, state.active)
        name, grid, block, size, scratch = self._columns(state.R)
        k, all_pHp, own = I64(state.R.shape[1]), pHp(mine), np.full_like(state.rho, np.nan)
        ranks = I32(all_pHp.shape[0])
        self.launch(
            *("cg.cu", f"cg_descend_{name}", grid, block, *size, HP, state.R, ranks, all_pHp),
            *(state.rho, state.active, *scratch, own),
        )
        alpha, beta = (np.full_like(state.rho, np.nan) for _ in range(2))
        scalars = (state.rho, state.energy, np.float64(state.tol), state.floor, state.active)
        self.launch(
            *("cg.cu", "cg_turn", (2,), (32,), k, ranks, all_pHp, dots(own), *scalars),
            *(state.iterations, alpha, beta),
        )
        self.launch(
            *("cg.cu", f"cg_direction_{name}", grid, block, *size, state.R, state.P, state.Z),
            *(alpha, beta),
        )

    # ---- ranks.cu ------------------------------------------------------------------------
    def pack_rows(self, X: Any, rows: Any) -> Any:
        out = np.full((rows.shape[0], X.shape[1]), np.nan, X.dtype)
        name, grid, block, size, _ = self._columns(out)
        self.launch("ranks.cu", f"pack_rows_{name}", grid, block, *size, X, rows, out)
        return out

    # ---- sketch.cu -----------------------------------------------------------------------
    def sketch_incidence(self, L: Any, k: int, seed: int) -> Any:
        dtype = L.inv_sqrt_degree.dtype
        x, y, tiles = column_shape(-(-k // 4) * 4, 4)
        longs = np.flatnonzero(np.diff(L.indptr) > self.segment).astype(I64)
        grid = (longs.shape[0] + self.row_blocks(L.n, y), tiles)
        out = np.full((L.n, k), np.nan, dtype)
        self.launch(
            *("sketch.cu", f"sketch_incidence_{suffix(dtype)}_{suffix(L.indices.dtype)}"),
            *(grid, (x, y), I64(L.n), I64(k), L.indptr, L.indices, L.weights, L.inv_sqrt_degree),
            *(L.order, I32(self.segment), I32(longs.shape[0]), longs),
            *(dtype.type(k**-0.5), U64(seed), out),
        )
        return out

    def sketch_identity(self, L: Any, k: int, seed: int) -> Any:
        dtype = L.inv_sqrt_degree.dtype
        x, y, tiles = column_shape(-(-k // 4) * 4, 4)
        out = np.full((L.n, k), np.nan, dtype)
        self.launch(
            *("sketch.cu", f"sketch_identity_{suffix(dtype)}"),
            *((self.row_blocks(L.n, y), tiles), (x, y)),
            *(I64(L.n), I64(k), dtype.type(k**-0.5), U64(seed), out),
        )
        return out if L.order is None else out[L.order]

    # ---- sampling.cu ---------------------------------------------------------------------
    def _flat(self, kernel: str, size: int, *args: Any) -> None:
        self.launch("sampling.cu", kernel, (self.row_blocks(size, 256),), (256,), *args)

    def _rows(self, kernel: str, n: int, *args: Any) -> None:
        """A warp per row."""
        self.launch("sampling.cu", kernel, (self.row_blocks(n, 8),), (32, 8), *args)

    def prefix_sum(self, x: Any) -> Any:
        """Inclusive, int64, in three launches."""
        n, out = x.shape[0], np.empty_like(x)
        tiles = -(-n // 2048)
        totals = np.empty(tiles, I64)
        self.launch("sampling.cu", "scan_tiles", (tiles,), (256,), I64(n), x, out, totals)
        self.launch("sampling.cu", "scan_totals", (1,), (256,), I64(tiles), totals)
        self._flat("scan_add", n, I64(n), totals, out)
        return out

    def first_edges(self, L: Any) -> Any:
        """(n + 1,) the number of each row's first edge."""
        counts = np.empty(L.n, I64)
        name = f"upper_counts_{suffix(L.indices.dtype)}"
        self._flat(name, L.n, I64(L.n), L.indptr, L.indices, counts)
        return np.concatenate([np.zeros(1, I64), self.prefix_sum(counts)])

    def edge_list(self, L: Any) -> tuple[Any, Any, Any]:
        dtype, index = L.inv_sqrt_degree.dtype, L.indices.dtype
        first = self.first_edges(L)
        m = int(first[-1])
        lo, hi = np.empty(m, index), np.empty(m, index)
        weights = None if L.weights is None else np.empty(m, dtype)
        self._rows(
            *(f"edge_list_{suffix(dtype)}_{suffix(index)}", L.n, I64(L.n), L.indptr, L.indices),
            *(first, L.weights, lo, hi, weights),
        )
        return lo, hi, weights

    def edge_scores(self, L: Any, B_S: Any, Pi_S: Any, lam: float) -> Any:
        lo, hi, weights = self.edge_list(L)
        m, k = lo.shape[0], B_S.shape[1]
        scores = np.full(m, np.nan)
        name = f"{suffix(B_S.dtype)}_{suffix(lo.dtype)}_v{vector_width(k, B_S.dtype)}"
        self.launch(
            *("sampling.cu", f"edge_scores_{name}", (self.row_blocks(m, 32),), (8, 32)),
            *(I64(m), I64(k), lo, hi, weights, L.inv_sqrt_degree, B_S, Pi_S, np.float64(lam)),
            scores,
        )
        return scores

    def with_replacement(self, scores: Any, s: int, seed: int, exponent: int) -> Any:
        m = scores.shape[0]
        q, counts = np.empty(m, I64), np.zeros(m, I64)
        self._flat("integer_scores", m, I64(m), scores, I32(exponent), q)
        prefix = self.prefix_sum(q)
        self._flat("draw_edges", s, I64(s), I64(m), prefix, U64(seed), counts)
        factors = np.full(m, np.nan)
        self._flat("replacement_factors", m, I64(s), I64(m), counts, q, prefix, factors)
        return factors

    def bernoulli(self, p: Any, seed: int) -> Any:
        factors = np.full(p.shape[0], np.nan)
        self._flat("bernoulli_factors", p.shape[0], I64(p.shape[0]), p, U64(seed), factors)
        return factors

    def sampled_graph(self, L: Any, factors: Any) -> tuple[Any, Any, Any, Any]:
        """(indptr, indices, weights, row sums) of the A of L_tilde."""
        dtype, index = L.inv_sqrt_degree.dtype, L.indices.dtype
        edges = (I64(L.n), L.indptr, L.indices, self.first_edges(L))
        counts, sums = np.empty(L.n, I64), np.full(L.n, np.nan)
        self._rows(f"kept_counts_{suffix(index)}", L.n, *edges, factors, counts)
        indptr = np.concatenate([np.zeros(1, I64), self.prefix_sum(counts)])
        indices, weights = np.empty(indptr[-1], index), np.empty(indptr[-1], dtype)
        self._rows(
            *(f"kept_fill_{suffix(dtype)}_{suffix(index)}", L.n, *edges, L.weights, factors),
            *(indptr, indices, weights, sums),
        )
        return indptr, indices, weights, sums

    def pair_bounds(self, L: Any, ratio: Any) -> Any:
        bounds = np.full(L.n, np.nan)
        name = f"pair_bounds_{suffix(L.indices.dtype)}"
        self._rows(name, L.n, I64(L.n), L.indptr, L.indices, ratio, bounds)
        return bounds

    # ---- hadamard.cu ---------------------------------------------------------------------
    def random_words(self, count: int, stream: int, seed: int) -> Any:
        out = np.zeros(count, U64)
        self.launch(
            *("hadamard.cu", "random_words", (self.row_blocks(count, 256),), (256,)),
            *(I64(count), U32(stream), U64(seed), out),
        )
        return out

    def srht(self, Q: Any, s: int, seed: int) -> Any:
        n, k = Q.shape
        log_n = max(0, n - 1).bit_length()
        keys = self.random_words(1 << log_n, 4, seed)
        place = np.full(1 << log_n, -1, I64)
        place[np.sort(np.argsort(keys, kind="stable")[:s])] = np.arange(s)
        out, work = np.full((s, k), np.nan, Q.dtype), None
        done, passes = 0, hadamard_passes(log_n)
        if len(passes) > 1:
            work = np.full((1 << log_n, k), np.nan, Q.dtype)
        for number, log_rows in enumerate(passes):
            first, last = number == 0, number == len(passes) - 1
            self.launch(
                *("hadamard.cu", f"hadamard_{suffix(Q.dtype)}"),
                *((1 << (log_n - log_rows), -(-k * Q.itemsize // 64)), (512,)),
                *(I64(n if first else 1 << log_n), I64(k), I32(log_rows), I32(done), I32(first)),
                *(U64(seed), Q if first else work, out if last else work),
                *(place if last else None, Q.dtype.type(s**-0.5 if last else 1)),
            )
            done += log_rows
        return out
