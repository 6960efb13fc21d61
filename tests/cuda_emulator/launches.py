"""How each kernel is launched, on NumPy arrays: the launch contract in code.

`Emulated` runs the primitives of a backend through the emulator.  It allocates freely and copies
nothing; a real backend keeps the scratch arrays (partials, tickets) for the length of a solve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_emulator import Module, load

I32, I64, U32, U64 = np.int32, np.int64, np.uint32, np.uint64
MAX_BLOCKS = 1024  # along x: bounds the partial sums of a reduction
SEGMENT = 1024  # neighbours a block takes of a long row


def suffix(dtype: Any) -> str:
    return {"float32": "f32", "float64": "f64", "int32": "i32", "int64": "i64"}[np.dtype(dtype).name]


def vector_width(k: int, dtype: Any) -> int:
    """Columns in one load: 16 bytes when k allows it."""
    widest = 16 // np.dtype(dtype).itemsize
    return next(v for v in (4, 2, 1) if v <= widest and k % v == 0)


def column_shape(k: int, width: int, least: int = 1) -> tuple[int, int, int]:
    """(block x, block y, grid y) for k columns, `width` a thread, 256 threads a block."""
    groups = k // width
    tiles = -(-groups // 64)
    x = max(-(-groups // tiles), least)
    return x, 256 // x, tiles


def long_rows(indptr: Any, segment: int) -> tuple[Any, Any]:
    """(row, rank) of each segment of the rows longer than `segment`."""
    length = np.diff(indptr)
    rows = np.flatnonzero(length > segment)
    pieces = -(-length[rows] // segment)
    row = np.repeat(rows, pieces).astype(I64)
    rank = np.arange(row.shape[0]) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return row, rank.astype(I32)


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

    def row_blocks(self, n: int, rows: int) -> int:
        return max(1, min(-(-n // rows), self.max_blocks))

    # ---- laplacian.cu --------------------------------------------------------------------
    def _laplacian(self, L: Any, lam: float, X: Any) -> tuple[str, Any, Any, tuple[Any, ...]]:
        n, k = X.shape
        width = vector_width(k, X.dtype)
        x, y, tiles = column_shape(k, width, least=8)
        row, rank = long_rows(L.indptr, self.segment)
        segments = row.shape[0]
        name = f"{suffix(X.dtype)}_{suffix(L.indices.dtype)}_v{width}"
        args = (
            *(I64(n), I64(k), L.indptr, L.indices, L.weights, L.inv_sqrt_degree, L.diagonal),
            *(X.dtype.type(lam), I32(self.segment), I32(segments), row, rank),
            *(np.full((segments, k), np.nan), np.zeros((tiles, segments + 1), U32)),
        )
        return name, (segments + self.row_blocks(n, y), tiles), (x, y), args

    def apply_H(self, L: Any, lam: float, X: Any, dots: bool = False) -> Any:
        name, grid, block, args = self._laplacian(L, lam, X)
        Y = np.full_like(X, np.nan)
        partials, total = np.full((grid[0], X.shape[1]), np.nan), np.full(X.shape[1], np.nan)
        tail = (partials, total) if dots else (None, None)
        self.launch("laplacian.cu", f"apply_H_{name}", grid, block, *args, X, Y, *tail)
        return (Y, total) if dots else Y

    def chebyshev_step(
        self, L: Any, lam: float, Z: Any, Z_prev: Any, B: Any, c1: float, c2: float
    ) -> None:
        name, grid, block, args = self._laplacian(L, lam, Z)
        c = (Z.dtype.type(c1), Z.dtype.type(c2))
        self.launch("laplacian.cu", f"chebyshev_{name}", grid, block, *args, Z, Z_prev, B, *c)

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
        state.HP, pHp = self.apply_H(L, lam, state.P, dots=True)
        name, grid, block, size, scratch = self._columns(state.R)
        alpha, beta = np.empty_like(state.rho), np.empty_like(state.rho)
        scalars = (pHp, state.rho, state.energy, np.float64(state.tol), state.floor, state.active)
        self.launch(
            *("cg.cu", f"cg_residual_{name}", grid, block, *size, state.HP, state.R, *scalars),
            *(state.iterations, alpha, beta, *scratch),
        )
        self.launch(
            *("cg.cu", f"cg_direction_{name}", grid, block, *size, state.R, state.P, state.Z),
            *(alpha, beta),
        )
