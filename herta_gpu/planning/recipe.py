"""How P is built: what the plan hands to the preconditioner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Every decision that the bits of P depend on."""

    degree: int  # degree of the Chebyshev polynomial
    width: int  # columns of X at once
    exact: bool  # solve and keep Q in float64
    sketch_rows: int | None  # SRHT rows; None: the exact Gram matrix
    by_rows: bool  # solve for H^-1 M^T instead of H^-1 X
    row_tol: float  # tolerance of those solves
    all_rows: bool  # keep Q on all rows, for a certificate that does not depend on chance
    keep_rows: bool  # keep Q's training rows
    whiten: bool  # orthonormal columns X C0 instead of columns of norm 1
    goal: float | None  # residuals of Q's columns, relative to those of X C0; None: not measured
    keep_residual: bool  # n x d numbers, so that a later pass can go on from them
    curvature: float  # where training starts: P = curvature Q^T Q + ridge I
    symmetric: bool  # the optimizer depends on the coordinates: P^-1/2 itself
    seed: int
    narrow: bool = False  # keep measured training rows in float32

    @property
    def name(self) -> str:
        """The name of Q in a checkpoint; it tells what depends on how much memory is free."""
        rows = "all" if self.all_rows else self.sketch_rows or "train"
        how = f"{self.degree}" if self.goal is None else f"{self.goal:.6e}"
        how = f"{self.row_tol:.6e}" if self.by_rows else how
        kind = f"{'W' if self.whiten else ''}Q{'64' if self.exact else ''}"
        return f"{kind}-{how}-{rows}-{self.width}"

    def dtype(self, working: str) -> str:
        """The precision of Q where the fit works in `working`."""
        return "float64" if self.exact else working

    def blocks(self, d: int) -> list[slice]:
        """The columns of X in blocks of about the same size: none is narrow without need.

        In multiples of four columns, which a GPU reads at once: 100 are 52 + 48, not 50 + 50.  The
        CPU takes 0.86 of the time for those, too (ogbn-arxiv): one whole vector less in each row.
        """
        step = -(-d // -(-d // self.width))
        step = min(-(-step // 4) * 4, self.width)
        return [slice(j, min(j + step, d)) for j in range(0, d, step)]
