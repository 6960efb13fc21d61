"""split="nodes" on CPUs: the compiled backend on the rows of this rank's own nodes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from herta_gpu.backends.base import Array, Laplacian
from herta_gpu.backends.cpu.compiled import CompiledBackend
from herta_gpu.backends.ranks.parts import GraphPart
from herta_gpu.backends.ranks.teams import Rows


class NodesBackend(CompiledBackend):
    """The compiled CPU backend on a `GraphPart`."""

    def __init__(self, graph: GraphPart) -> None:
        self.graph, self.team = graph, Rows(graph, self)

    def working(self) -> AbstractContextManager[Any]:
        return self.graph.halo.team.together()

    def laplacian(self, graph: Any, dtype: str) -> Laplacian:
        assert isinstance(graph, GraphPart)
        L = super().laplacian(graph, dtype)
        L.halo, L.unrounded, L.order = graph.halo, graph.exact, graph.ids
        vars(L)["exact"] = graph.exact()
        L.around = L.exact[0].astype(dtype)
        return L

    def with_neighbours(self, L: Laplacian, Z: Array) -> Array:
        return L.halo.extended(self.asarray(Z))

    def sums_up_to(self, q: Array) -> tuple[Array, int]:
        return self.graph.sums_before(q) + q, int(self.team.total(int(q.sum())))
