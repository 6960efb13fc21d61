"""What any backend becomes on ranks that each have the rows of their own nodes.

Sums over rows are added up over the ranks.  Training rows, n_train x d numbers, are put together on
all of them: from there on everything is d x d or n_train x c, and the same everywhere.
"""

from __future__ import annotations

from typing import Any

from herta_gpu.backends.base import Array, Backend, Laplacian
from herta_gpu.backends.ranks.communicator import Ranks


class Rows(Backend):
    """The part of a backend that speaks with other ranks, for arrays of the host."""

    whole = False
    reorders = False
    team: Ranks
    _mine = slice(0, 0)

    def total(self, x: Any) -> Any:
        return self.team.total(x)

    def largest(self, x: Any) -> Any:
        return self.team.largest(x)

    def agreed(self, x: Any) -> Any:
        return self.team.agreed(x)

    def same(self, x: Any, what: str, always: bool = False) -> Any:
        self.team.same(x, what, always)
        return x

    def gathered(self, x: Array) -> Array:
        if x.dtype.kind == "U":  # text is as wide as the longest that a rank has
            x = x.astype(f"U{self.team.largest(max(1, x.dtype.itemsize // 4))}")
        found, self._mine = self.team.gathered(x)
        return found

    def own(self, x: Array) -> Array:
        return x[self._mine]

    def memory_everywhere(self) -> int:
        return min(self.team.each(self.memory_available()))

    def half_pays(self, L: Laplacian, k: int) -> bool:
        return False  # rows of neighbours are sent as they are
