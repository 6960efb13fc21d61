"""Several lam at once: the features are blocks [H_1^-1 X, H_2^-1 X, ...], 0 standing for X itself.

The model is linear in W as before, which now has a block of rows per lam.  One basis C0 of X serves
all blocks, and each block of Q is solved for with its own H, in passes of its own: what is left of
its columns is measured, so all that is proven from Q and the norms of those columns stays proven.
(All lam from one Chebyshev sequence would share the first pass only: what that leaves differs.)

Further features may stand beside these blocks as they are, such as those that labels make.
"""

from __future__ import annotations

from collections.abc import Sequence

from herta_gpu.backends.base import Array
from herta_gpu.coordinates import Blocks, Columns, Units
from herta_gpu.diffusion import Cache, Diffusion
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.plumbing.progress import Tell

_WIDTH = 64  # columns of further features at a time


class SeveralDiffusions:
    """Rows of all blocks of Q, and what is left of their columns."""

    def __init__(
        self,
        systems: Sequence[RegularizedLaplacian],
        basis: Columns,
        at: Array,
        beside: Array,
        blocks: Sequence[slice],
        dtype: str,
        kept: bool,
        tell: Tell,
        stored: str,
        extra: Units | None = None,
    ) -> None:
        """`extra` is the basis of further features: their rows as they are, and their error."""
        inners = [basis] * len(systems)
        self.basis = Blocks(inners if extra is None else [*inners, extra])
        self.at, self.beside, self.tell = at, beside, tell
        self.H, self.dtype, self.done = systems[0], dtype, 0
        self.parts: list[Diffusion | _Itself] = []
        for i, H in enumerate(systems):
            first = i * basis.rank

            def told(done: int, of: int, first: int = first) -> None:
                tell(first + done, self.basis.rank)

            if H.lam == 0:
                self.parts.append(_Itself(H, basis, at, beside, blocks, dtype))  # in float64
            else:
                self.parts.append(
                    Diffusion(H, basis, at, beside, blocks, dtype, kept, told, stored)
                )
        if extra is not None:
            cuts = [slice(a, min(a + _WIDTH, extra.rank)) for a in range(0, extra.rank, _WIDTH)]
            itself = _Itself(systems[0], extra, at, beside, cuts, dtype)
            itself.left = itself.left + extra.X.off * extra.scale
            self.parts.append(itself)
        self.rows, self.others = self._shared("rows"), self._shared("others")

    def _shared(self, name: str) -> Array:
        """One array of all blocks, of which each part has its own columns from now on."""
        xp, parts, first = self.H.backend.xp, [getattr(part, name) for part in self.parts], 0
        kind = max((part.dtype for part in parts), key=lambda kind: kind.itemsize)
        whole = xp.zeros((parts[0].shape[0], self.basis.rank), dtype=kind)
        for part, own in zip(self.parts, parts, strict=True):
            mine = whole[:, first : first + own.shape[1]]
            if isinstance(part, _Itself):
                mine[...] = own  # those of other blocks are still to be solved for
            setattr(part, name, mine)
            first += own.shape[1]
        return whole

    @property
    def left(self) -> Array:
        return self._joined("left")

    @property
    def lost(self) -> Array:
        return self._joined("lost")

    @property
    def worst(self) -> float:
        return max((part.worst for part in self.parts if isinstance(part, Diffusion)), default=0.0)

    @property
    def products(self) -> int:
        return sum(part.products for part in self.parts)

    def lower(self, goal: float, cache: Cache, name: str) -> None:
        """Solve until no column of any block leaves more than `goal` times its size."""
        for part in self.parts:
            if isinstance(part, Diffusion):
                part.lower(goal, cache, f"{name}-lam-{part.H.lam!r}")

    def _joined(self, name: str) -> Array:
        xp = self.H.backend.xp
        return xp.concatenate([getattr(part, name) for part in self.parts], axis=-1)


class _Itself:
    """lam = 0: rows of X C0, which nothing has to be solved for."""

    products = 0

    def __init__(
        self,
        H: RegularizedLaplacian,
        basis: Columns,
        at: Array,
        beside: Array,
        blocks: Sequence[slice],
        dtype: str,
    ) -> None:
        xp = H.backend.xp
        self.rows = xp.zeros((at.shape[0], basis.rank))
        self.others = xp.zeros((beside.shape[0], basis.rank), dtype=dtype)
        for J in blocks:
            for rows, part in basis.chunks(J):
                for nodes, kept in ((at, self.rows), (beside, self.others)):
                    here = xp.flatnonzero((nodes >= rows.start) & (nodes < rows.stop))
                    kept[here, J] = part[nodes[here] - rows.start]
        self.rows = H.backend.gathered(self.rows)
        self.left, self.lost = basis.rounding.copy(), xp.zeros(basis.rank)
