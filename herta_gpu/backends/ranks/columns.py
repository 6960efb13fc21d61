"""split="columns": every rank has all rows, and blocks of columns are dealt out.

Rank r works on the blocks r, r + size, ...; what it makes of them is sent to all.  The same blocks
give the same bits as in one process, for whoever computes a block computes it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from herta_gpu.backends.base import Array, Backend

if TYPE_CHECKING:
    from herta_gpu.backends.ranks.communicator import Ranks


class Columns(Backend):
    """What a backend becomes on ranks that each have the whole graph."""

    team: Ranks

    def agreed(self, x: Any) -> Any:
        return self.team.agreed(x)

    def same(self, x: Any, what: str, always: bool = False) -> Any:
        self.team.same(self.to_numpy(x) if hasattr(x, "dtype") else x, what, always)
        return x

    def memory_everywhere(self) -> int:
        return min(self.team.each(self.memory_available()))

    def dealt(
        self, items: Sequence[Any], work: Callable[[Any], dict[str, Array]]
    ) -> Iterator[dict[str, Array]]:
        for first in range(0, len(items), self.ranks):
            mine = first + self.rank
            with self.team.alone():
                made = work(items[mine]) if mine < len(items) else {}
            theirs = self.team.shared(dict(self._on_host(name, a) for name, a in made.items()))
            for rank, found in enumerate(theirs[: len(items) - first]):
                yield made if rank == self.rank else self._placed(found)

    def _on_host(self, name: str, a: Any) -> tuple[tuple[str, bool], Any]:
        """An array to send, under its name and whether it goes to the device again."""
        there = isinstance(a, self.xp.ndarray)
        return (name, there), self.to_numpy(a) if there else np.asarray(a)

    def _placed(self, found: dict[tuple[str, bool], Any]) -> dict[str, Array]:
        return {name: self.asarray(a) if there else a for (name, there), a in found.items()}


@cache
def _columns_of(kind: type[Backend]) -> type[Columns]:
    # The name stays: a checkpoint of one process is read by several, and the other way round.
    return type(kind.__name__, (Columns, kind), {})


def columns_backend(backend: Backend, team: Ranks) -> Backend:
    """The same backend, which shares columns out to the ranks of `team`."""
    if team.size == 1:
        return backend
    made = object.__new__(_columns_of(type(backend)))
    vars(made).update(vars(backend), team=team, rank=team.rank, ranks=team.size)
    return made
