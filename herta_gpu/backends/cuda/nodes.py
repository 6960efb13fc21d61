"""split="nodes" on GPUs: the kernels on a part of a graph, and the rows of others that NCCL brings.

A block that is multiplied with H has the halo, the rows of neighbours that other ranks have, behind
its own rows: the columns of a part are rows of one array, and the kernels need not know of any of
this.  No row is copied for it: P of CG and the iterates of Chebyshev are made with that room.

In a step of CG the halo of R is sent as soon as R is there, and each rank turns it into P as its
owner does, by the same launch on the same numbers.  The messages are under way while rho is added
up, and while Z and P are updated (kernels/README.md has the table).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn, cast

import numpy as np

from herta_gpu.backends.base import Array, CGState, Laplacian
from herta_gpu.backends.cuda.backend import CUDABackend, CUDACGState
from herta_gpu.backends.cuda.device import DeviceLaplacian
from herta_gpu.backends.ranks.nccl import Nccl
from herta_gpu.backends.ranks.parts import GraphPart, Halo
from herta_gpu.backends.ranks.teams import Rows


class DeviceHalo:
    """Rows of other ranks that this one's rows have an edge to, and who wants which of these."""

    def __init__(self, backend: CUDANodesBackend, halo: Halo) -> None:
        self.backend, self.n, self.size = backend, halo.n, halo.size
        self._rows = backend.asarray(np.concatenate(halo.send), "int32")
        self._out = np.cumsum([0, *map(len, halo.send)]).tolist()
        self._into = [end - halo.n for end in halo.ends]

    def extended(self, X: Array) -> Array:
        """X with the halo behind its own rows: a copy."""
        G = self.backend.xp.empty((self.n + self.size, X.shape[1]), dtype=X.dtype)
        G[: self.n] = X
        return self.fetched(G)

    def fetched(self, G: Array) -> Array:
        """G, of which the own rows are there, with the halo behind them."""
        self.start(G[: self.n], G[self.n :])
        self.backend.nccl.finish()
        return G

    def start(self, X: Array, into: Array) -> None:
        """Rows of X for others, and theirs `into` an array of the halo; `finish` waits for them."""
        out = self.backend.xp.empty((self._rows.shape[0], X.shape[1]), dtype=X.dtype)
        if out.size:
            self.backend._columns("ranks.cu", "pack_rows", out, X, self._rows, out)
        ours = [out[i:j] for i, j in pairwise(self._out)]
        theirs = [into[i:j] for i, j in pairwise(self._into)]
        self.backend.nccl.start(ours, theirs, "rows of neighbours")


@dataclass
class PartCGState(CUDACGState):
    """CG on a part: P is the first rows of `G`, which has its halo behind it."""

    G: Array = None
    halo_R: Array = None
    dots: Array = None  # (k,) ||R||^2 of the rows that are here


class CUDANodesBackend(CUDABackend):
    """The CUDA backend on a `GraphPart`: the same device, streams and kernels as `backend`."""

    samples = False

    def __init__(self, backend: Any, graph: GraphPart) -> None:
        super().__init__(backend)
        team = Rows(graph, backend)
        self.team, self.graph, self.nccl = team, graph, cast(Nccl, team.nccl)

    @contextmanager
    def working(self) -> Iterator[None]:
        with self.graph.halo.team.together(), super().working():
            yield

    # ---- the part and its halo ------------------------------------------------------------
    def _uploaded(self, graph: Any, dtype: str, held: dict[str, Any]) -> DeviceLaplacian:
        assert isinstance(graph, GraphPart)
        L = super()._uploaded(graph, dtype, held)
        if "halo" not in held:
            held["halo"] = DeviceHalo(self, graph.halo)
        L.halo = held["halo"]
        return L

    def inverse_roots(self, graph: Any) -> Any:
        return graph.exact()[0]  # those of the halo, too

    def block_rows(self, L: Laplacian) -> int:
        return L.n + L.halo.size

    def with_neighbours(self, L: Laplacian, Z: Array) -> Array:
        return L.halo.extended(self.asarray(Z))

    # ---- H = I + lam L --------------------------------------------------------------------
    def apply_H(self, L: Laplacian, lam: float, X: Array, out: Array | None = None) -> Array:
        return super().apply_H(L, lam, self.with_neighbours(L, X)[: L.n], out)

    def residual(
        self, L: Laplacian, lam: float, Z: Array, B: Array, dtype: str, unit: Array
    ) -> tuple[Array, Array]:
        return super().residual(L, lam, self.with_neighbours(L, Z)[: L.n], B, dtype, unit)

    def cg_start(
        self, L: Laplacian, lam: float, R: Array, energy: Array, tol: float, floor: float
    ) -> PartCGState:
        state = super().cg_start(L, lam, R, energy, tol, floor)
        state.P = None  # its memory comes first
        k, xp = R.shape[1], self.xp
        state.pHp.fill(0)  # what a rank without rows has to say
        G = L.halo.extended(state.R)
        state.P = G[: L.n]
        halo_R = xp.empty((L.halo.size, k), dtype=state.R.dtype)
        return PartCGState(**vars(state), G=G, halo_R=halo_R, dots=xp.zeros(k))

    def cg_step(self, L: Laplacian, lam: float, state: CGState) -> None:
        assert isinstance(state, PartCGState)
        s, k, ranks = state, state.R.shape[1], np.int32(self.ranks)
        if k == 0:
            return
        if L.n:
            partials = self._scratch_of(L, k)[2]
            self._product("apply_H", L, lam, s.P, s.P, s.HP, s.active, partials, s.pHp)
        pHp = self.nccl.of_ranks(s.pHp, "pHp")
        if L.n:
            args = (s.HP, s.R, ranks, pHp, s.rho, s.active, *self._sums_of(k), s.dots)
            self._columns("cg.cu", "cg_descend", s.R, *args)
        dots = self.nccl.of_ranks(s.dots, "rho")
        L.halo.start(s.R, s.halo_R)  # behind that sum: NCCL does one thing after the other
        step = (s.rho, s.energy, float(s.tol), s.floor, s.active, s.iterations)
        scalars = (k, ranks, pHp, dots, *step, s.alpha, s.beta)
        self._items("cg.cu", "cg_turn", k, *scalars)
        if L.n:
            self._columns("cg.cu", "cg_direction", s.R, s.R, s.P, s.Z, s.alpha, s.beta)
        self.nccl.finish()
        if L.halo.size:
            # Nobody needs Z of the halo, nor its R any more: the one is written over the other.
            R = s.halo_R
            self._columns("cg.cu", "cg_direction", R, R, s.G[L.n :], R, s.alpha, s.beta)

    def half_pays(self, L: Laplacian, k: int) -> bool:
        return False  # rows of neighbours are sent as they are

    def _captures(self, L: Laplacian, state: CGState) -> bool:
        return False  # a captured step would have to be one on all ranks

    def chebyshev_step(self, L: Laplacian, lam: float, Z: Array, *rest: Any) -> None:
        L.halo.fetched(Z)
        super().chebyshev_step(L, lam, Z, *rest)

    # ---- Algorithm 2 ----------------------------------------------------------------------
    def _not_here(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            'Algorithm 2 does not work on GPUs with split="nodes" yet: use sparsify=False, '
            'split="columns" or device="cpu".'
        )

    sketch_incidence = sketch_identity = edge_scores = sample_edges = sampled_graph = _not_here
