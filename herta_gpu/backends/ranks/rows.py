"""What any backend becomes on ranks that each have the rows of their own nodes.

Sums over rows are added up over the ranks.  Training rows, n_train x d numbers, are put together on
all of them: from there on everything is d x d or n_train x c, and the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Backend, Laplacian
from herta_gpu.backends.ranks.communicator import Ranks
from herta_gpu.backends.ranks.parts import GraphPart
from herta_gpu.plumbing.checkpoint import nodes_key


class Rows(Backend):
    """The part of a backend that speaks with other ranks, for arrays of the host."""

    whole = False
    reorders = False
    team: Ranks
    graph: GraphPart
    _mine: Any = slice(0, 0)  # where the training rows of this rank are among all
    _order: Any = None  # and those of all ranks, by id; None: one rank after the other

    def join(self, graph: GraphPart) -> None:
        """Work on this part of a graph, with the ranks that have the others."""
        assert graph.team is not None
        self.graph, self.team, self.first_row = graph, graph.team, graph.first_row
        self.rank, self.ranks = self.team.rank, self.team.size
        self.rows_key = nodes_key(graph.ids[: graph.num_nodes])

    @contextmanager
    def working(self) -> Iterator[None]:
        with self.team.together(), super().working():
            yield

    def total(self, x: Any) -> Any:
        return self.team.total(x)

    def largest(self, x: Any) -> Any:
        return self.team.largest(x)

    def agreed(self, x: Any) -> Any:
        return self.team.agreed(x)

    def same(self, x: Any, what: str, always: bool = False) -> Any:
        self.team.same(x, what, always)
        return x

    def train_on(self, rows: Any) -> Any:
        ids, self._mine = self.team.gathered(self.graph.ids[rows])
        self._order, order = None, np.argsort(ids)
        if (np.diff(ids) > 0).all():
            return ids
        place = np.empty_like(order)
        place[order] = np.arange(order.shape[0])
        self._order, self._mine = order, place[self._mine]
        return ids[order]

    def gathered(self, x: Array) -> Array:
        found = self.joined(x)
        return found if self._order is None else self._taken(found, self._order)

    def joined(self, x: Array) -> Array:
        return self.team.gathered(x)[0]

    def own(self, x: Array) -> Array:
        return self._taken(x, self._mine)

    def _taken(self, x: Array, rows: Any) -> Array:
        return x[rows]

    def memory_everywhere(self) -> int:
        return min(self.team.each(self.memory_available()))

    def sums_up_to(self, q: Array) -> tuple[Array, int]:
        return self.graph.sums_before(q) + q, int(self.team.total(int(q.sum())))

    def half_pays(self, L: Laplacian, k: int) -> bool:
        return False  # rows of neighbours are sent as they are
