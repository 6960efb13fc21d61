"""The two ways in which ranks share a fit.

By columns, every rank has all rows.  Rank r works on the blocks r, r + size, ...; what it makes of
them is sent to all.  The same blocks give the same bits as in one process, for whoever computes a
block computes it alone.

By nodes, every rank has the rows of its nodes.  Sums over rows are added up over the ranks.
Training rows, n_train x d numbers, are put together on all of them: from there on everything is
d x d or n_train x c, and the same everywhere.

Arrays on GPUs travel by NCCL, all else by MPI.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Backend, Team
from herta_gpu.backends.ranks.communicator import Ranks
from herta_gpu.backends.ranks.nccl import Nccl, nccl_of
from herta_gpu.backends.ranks.parts import GraphPart


class _Several(Team):
    """What both kinds of teams do; `device` is the backend whose arrays they have."""

    nccl: Nccl | None = None  # between GPUs

    def __init__(self, ranks: Ranks, device: Backend) -> None:
        self.ranks, self.device = ranks, device
        self.rank, self.size = ranks.rank, ranks.size

    def least(self, x: int) -> int:
        return min(self.ranks.each(x))

    def agree(self, x: Any) -> Any:
        return self._by_host(self.ranks.agree, x)

    def same(self, x: Any, what: str, always: bool = False) -> Any:
        if always or self.ranks.debug:
            self.ranks.same(self.device.to_numpy(x) if self._on_gpu(x) else x, what, always)
        return x

    def _by_host(self, ask: Callable[[Any], Any], x: Any) -> Any:
        """ask(x); what is on a GPU goes by way of the host."""
        if not self._on_gpu(x):
            return ask(x)
        return self.device.asarray(ask(self.device.to_numpy(x)))  # synchronize!

    def _on_gpu(self, x: Any) -> bool:
        return isinstance(x, self.device.xp.ndarray) and not isinstance(x, np.ndarray)


class Columns(_Several):
    """Ranks that each have the whole graph."""

    def __init__(self, ranks: Ranks, device: Backend) -> None:
        super().__init__(ranks, device)
        if device.name == "cuda":
            try:
                self.nccl = nccl_of(ranks, device.xp)
            except ValueError as error:  # the graph is on every GPU all the same
                if ranks.rank == 0:
                    text = f"Blocks go through the host: {error}"
                    warnings.warn(text, RuntimeWarning, stacklevel=4)

    def deal(
        self, items: Sequence[Any], work: Callable[[Any], dict[str, Array]]
    ) -> Iterator[dict[str, Array]]:
        for first in range(0, len(items), self.size):
            mine = first + self.rank
            with self.ranks.alone():
                made = work(items[mine]) if mine < len(items) else {}
            theirs = self._share(made)[: len(items) - first]
            for rank, found in enumerate(theirs):
                yield made if rank == self.rank else found

    def _share(self, made: dict[str, Array]) -> list[dict[str, Array]]:
        """What each rank has made, on all of them, where it was made."""
        if self.nccl is not None:
            there = {name: a for name, a in made.items() if self._on_gpu(a)}
            here = {name: np.asarray(a) for name, a in made.items() if name not in there}
            return [{**a, **b} for a, b in zip(self.nccl.share(there), self.ranks.share(here))]
        device, named = self.device, {(name, self._on_gpu(a)): a for name, a in made.items()}
        named = {key: np.asarray(device.to_numpy(a) if key[1] else a) for key, a in named.items()}
        return [
            {name: device.asarray(a) if on_gpu else a for (name, on_gpu), a in found.items()}
            for found in self.ranks.share(named)  # synchronize!
        ]


class Rows(_Several):
    """Ranks that each have the rows of their own nodes."""

    whole = False

    def __init__(self, graph: GraphPart, device: Backend) -> None:
        super().__init__(graph.halo.team, device)
        self.graph, self.first_row = graph, graph.first_row
        self._mine: Any = slice(0, 0)  # where the training rows of this rank are among all
        self._order: Any = None  # and those of all ranks, by id; None: one rank after the other
        if device.name == "cuda":
            self.nccl = nccl_of(self.ranks, device.xp)

    def total(self, x: Any) -> Any:
        return self._way(x).total(x)

    def largest(self, x: Any) -> Any:
        return self._by_host(self.ranks.largest, x)

    def train_on(self, rows: Any) -> Any:
        ids, self._mine = self.ranks.gather(self.graph.ids[rows])
        self._order, order = None, np.argsort(ids)
        if (np.diff(ids) > 0).all():
            return ids
        place = np.empty_like(order)
        place[order] = np.arange(order.shape[0])
        self._order, self._mine = order, place[self._mine]
        return ids[order]

    def gather(self, x: Array) -> Array:
        found = self.join(x)
        return found if self._order is None else self._take(found, self._order)

    def join(self, x: Array) -> Array:
        return self._way(x).gather(x)[0]

    def own(self, x: Array) -> Array:
        return self._take(x, self._mine)

    def _take(self, x: Array, rows: Any) -> Array:
        there = self._on_gpu(x) and not isinstance(rows, slice)
        return x[self.device.asarray(rows)] if there else x[rows]

    def _way(self, x: Any) -> Any:
        """How x travels."""
        return self.nccl if self._on_gpu(x) else self.ranks
