"""split="columns": every rank has all rows, and blocks of columns are dealt out.

Rank r works on the blocks r, r + size, ...; what it makes of them is sent to all.  The same blocks
give the same bits as in one process, for whoever computes a block computes it alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Backend
from herta_gpu.backends.ranks.communicator import Ranks
from herta_gpu.backends.ranks.nccl import Nccl, nccl_of


class Columns(Backend):
    """What a backend becomes on ranks that each have the whole graph."""

    team: Ranks
    nccl: Nccl | None = None  # between GPUs, if it can be loaded

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
            theirs = self._shared(made)[: len(items) - first]
            for rank, found in enumerate(theirs):
                yield made if rank == self.rank else found

    def _shared(self, made: dict[str, Array]) -> list[dict[str, Array]]:
        """What each rank has made, on all of them: by NCCL what is on a GPU."""
        there = {name: a for name, a in made.items() if isinstance(a, self.xp.ndarray)}
        if self.xp is np or self.nccl is None:  # by way of the host, and then where it was
            host = {(name, name in there): self.to_numpy(a) if name in there else np.asarray(a)
                    for name, a in made.items()}  # fmt: skip
            return [{name: self.asarray(a) if back else a for (name, back), a in found.items()}
                    for found in self.team.shared(host)]  # fmt: skip
        rest = {name: np.asarray(a) for name, a in made.items() if name not in there}
        return [{**a, **b} for a, b in zip(self.nccl.shared(there), self.team.shared(rest))]


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
    if backend.name == "cuda":
        made.nccl = _between_gpus(team, backend.xp)
    return made


def _between_gpus(team: Ranks, xp: Any) -> Nccl | None:
    """NCCL, or a notice: without it the graph is on every GPU all the same."""
    try:
        return nccl_of(team, xp)
    except ValueError as error:
        if team.rank == 0:
            warnings.warn(f"Blocks go through the host: {error}", RuntimeWarning, stacklevel=4)
        return None
