"""split="nodes" on CPUs: the compiled backend on the rows of this rank's own nodes."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Laplacian
from herta_gpu.backends.cpu.compiled import CompiledBackend, CompiledLaplacian
from herta_gpu.backends.ranks.parts import LINE, GraphPart, rooms
from herta_gpu.backends.ranks.teams import Rows


class NodesBackend(CompiledBackend):
    """The compiled CPU backend on a `GraphPart`."""

    def __init__(self, graph: GraphPart) -> None:
        self.graph, self.team = graph, Rows(graph, self)

    def working(self) -> AbstractContextManager[Any]:
        return self.graph.halo.team.together()

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Blocks with a row for each node have room behind them for those of other ranks.

        A product then reads them where they are.  A list of n k numbers is a block, too.
        """
        n, more = self.graph.halo.n, self.graph.halo.size
        size = math.prod(shape)
        if not more or not n or size % n or (shape[0] != n and len(shape) > 1):
            return super().empty(shape, dtype)
        memory = np.empty((size + size // n * more) * np.dtype(dtype).itemsize + LINE, np.uint8)
        start = -memory.ctypes.data % LINE
        rooms[id(memory)] = memory
        end = start + size * np.dtype(dtype).itemsize
        return memory[start:end].view(dtype).reshape(shape)

    def laplacian(self, graph: Any, dtype: str) -> CompiledLaplacian:  # type: ignore[override]
        assert isinstance(graph, GraphPart)
        L = super().laplacian(graph, dtype)
        L.halo, L.unrounded, L.order = graph.halo, graph.exact, graph.ids
        vars(L)["exact"] = graph.exact()
        L.around = L.exact[0].astype(dtype)
        return L

    def with_neighbours(self, L: Laplacian, Z: Array) -> Array:
        assert isinstance(L, CompiledLaplacian)
        return L.halo.extended(self.asarray(Z))

    def sums_up_to(self, q: Array) -> tuple[Array, int]:
        return self.graph.sums_before(q) + q, int(self.team.total(int(q.sum())))
