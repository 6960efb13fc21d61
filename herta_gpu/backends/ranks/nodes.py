"""split="nodes" on CPUs: the compiled backend on the rows of this rank's own nodes."""

from __future__ import annotations

from typing import Any

from herta_gpu.backends.base import Array, Laplacian
from herta_gpu.backends.cpu.compiled import CompiledBackend, CompiledLaplacian
from herta_gpu.backends.ranks.parts import GraphPart
from herta_gpu.backends.ranks.rows import Rows


class NodesBackend(Rows, CompiledBackend):
    """The compiled CPU backend on a `GraphPart`."""

    def __init__(self, graph: GraphPart) -> None:
        self.join(graph)

    def laplacian(self, graph: Any, dtype: str) -> CompiledLaplacian:  # type: ignore[override]
        assert isinstance(graph, GraphPart)
        L = super().laplacian(graph, dtype)
        L.halo, L.unrounded, L.order = graph.halo, graph.exact, graph.ids
        vars(L)["exact"] = graph.exact()
        return L

    def with_neighbours(self, L: Laplacian, Z: Array) -> Array:
        assert isinstance(L, CompiledLaplacian)
        return L.halo.extended(self.asarray(Z))


def nodes_backend(backend: Any, graph: GraphPart) -> NodesBackend:
    """The backend of a part of a graph, in place of the one that was asked for."""
    if type(backend) is not CompiledBackend:
        raise ValueError(
            'split="nodes" works on GPUs and on the compiled CPU backend: install numba and use '
            'device="cpu".'
        )
    return NodesBackend(graph)
