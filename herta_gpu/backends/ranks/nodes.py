"""split="nodes": every rank has the rows of its own nodes.

Sums over rows are added up over the ranks.  Training rows, n_train x d numbers, are put together on
all of them: from there on everything is d x d or n_train x c, and the same everywhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Laplacian
from herta_gpu.backends.cpu.compiled import CompiledBackend, CompiledLaplacian
from herta_gpu.backends.ranks.communicator import Ranks
from herta_gpu.backends.ranks.parts import GraphPart
from herta_gpu.plumbing.fingerprint import nodes_key


class NodesBackend(CompiledBackend):
    """The compiled CPU backend on a `GraphPart`."""

    whole = False
    reorders = False

    def __init__(self, team: Ranks, graph: GraphPart) -> None:
        self.team, self.rank, self.ranks, self.graph = team, team.rank, team.size, graph
        self.first_row, self.rows_key = graph.first_row, nodes_key(graph.ids[: graph.num_nodes])
        self._mine: Any = slice(0, 0)  # where the training rows of this rank are among all
        self._order: Any = None  # and those of all ranks, by id; None: one rank after the other

    def total(self, x: Any) -> Any:
        return self.team.total(x)

    def largest(self, x: Any) -> Any:
        return self.team.largest(x)

    def agreed(self, x: Any) -> Any:
        return self.team.agreed(x)

    def working(self) -> AbstractContextManager[Any]:
        return self.team.together()

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
        return found if self._order is None else found[self._order]

    def own(self, x: Array) -> Array:
        return x[self._mine]

    def joined(self, x: Array) -> Array:
        if x.dtype.kind == "U":  # text is as wide as the longest that a rank has
            x = x.astype(f"U{self.team.largest(max(1, x.dtype.itemsize // 4))}")
        return self.team.gathered(x)[0]

    def memory_everywhere(self) -> int:
        return min(self.team.each(self.memory_available()))

    def laplacian(self, graph: Any, dtype: str) -> CompiledLaplacian:  # type: ignore[override]
        assert isinstance(graph, GraphPart)
        L = super().laplacian(graph, dtype)
        L.halo, L.unrounded, L.order = graph.halo, graph.exact, graph.ids
        vars(L)["exact"] = graph.exact()
        return L

    def with_neighbours(self, L: Laplacian, Z: Array) -> Array:
        assert isinstance(L, CompiledLaplacian)
        return L.halo.extended(self.asarray(Z))

    def sums_up_to(self, q: Array) -> tuple[Array, int]:
        return self.graph.sums_before(q) + q, int(self.team.total(int(q.sum())))

    def half_pays(self, L: Laplacian, k: int) -> bool:
        return False  # rows of neighbours are sent as they are


def nodes_backend(backend: Any, graph: GraphPart) -> NodesBackend:
    """The backend of a part of a graph, in place of the one that was asked for."""
    if type(backend) is not CompiledBackend:
        raise ValueError(
            'split="nodes" works on the compiled CPU backend: install numba and use device="cpu".'
        )
    assert graph.team is not None
    return NodesBackend(graph.team, graph)
