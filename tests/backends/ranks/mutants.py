"""Bugs put in on purpose, which must be found (``python -m tests.backends.ranks.mutants``).

Each is tried in the debug mode, in which ranks that went different ways notice it at once.  Prints
a line of JSON for each: its name, and how it was found, or nothing.
"""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import numpy as np

from herta_gpu import HERTA, Graph
from herta_gpu.backends import backend_for
from herta_gpu.backends.ranks import ranks_of
from herta_gpu.backends.ranks.nodes import NodesBackend
from herta_gpu.backends.ranks.parts import Halo
from herta_gpu.solver import RegularizedLaplacian, block_cg
from herta_gpu.unfolded import UnfoldedMap
from tests.backends.ranks.checks import COMM, RANK, N, data, parts


def solves() -> None:
    """CG on a part, against dense algebra."""
    edges, X, *_ = data(5)
    part, whole = parts(edges), Graph.from_edges(edges, N)
    H = RegularizedLaplacian(part, 5.0, backend_for("cpu", part, None), "float64")
    Z, info = block_cg(H, X[part.nodes], 1e-10)
    exact = np.linalg.solve(np.eye(N) + 5.0 * whole.to_csr().toarray(), X)
    assert info.status == "converged"
    assert np.abs(Z - exact[part.nodes]).max() < 1e-8


def fits() -> None:
    """A fit by true gradients, certified on all ranks."""
    edges, X, y, _ = data(5)
    part = parts(edges)
    at = part.nodes
    model = HERTA(lam=5.0, ridge=0.1, strategy="herta").fit(part, X[at], y[at])
    assert model.status_ == "certified"


def no_halo(self: Halo, X: Any, fill: Any = None, to: str = "") -> Any:
    G = np.zeros((self.ends[-1], X.shape[1]), dtype=X.dtype)
    G[: self.n] = X
    if fill is not None:
        fill(G[: self.n])
    return G


_extended = Halo.extended
_before: dict[Any, Any] = {}


def stale_halo(self: Halo, X: Any, fill: Any = None, to: str = "") -> Any:
    """The rows of neighbours are those of the product before."""
    G = _extended(self, X, fill, to).copy()
    key, now = (id(self), to, X.shape, X.dtype), G[self.n :].copy()
    if to and key in _before:
        G[self.n :] = _before[key]
    _before[key] = now
    return G


def local(which: int) -> Any:
    """A step of CG that does not add up its first (pHp) or second (rho) sum over the ranks."""
    step, total = NodesBackend.cg_step, NodesBackend.total

    def mutant(self: NodesBackend, *args: Any) -> None:
        calls: list[Any] = []

        def counted(x: Any) -> Any:
            calls.append(x)
            return x if len(calls) == which else total(self, x)

        with patch.object(self, "total", counted):
            step(self, *args)

    return mutant


def local_size(self: UnfoldedMap, R: Any) -> float:
    """A norm of the rows that are here decides what is solved for again."""
    here = float((np.asarray(R, dtype=np.float64) ** 2).sum()) ** 0.5
    return here * (1 + 1e-3 * RANK)


MUTANTS = {
    "no halo": (solves, (Halo, "extended", no_halo)),
    "stale halo": (solves, (Halo, "extended", stale_halo)),
    "local pHp": (solves, (NodesBackend, "cg_step", local(1))),
    "local rho": (solves, (NodesBackend, "cg_step", local(2))),
    "a branch on a local number": (fits, (UnfoldedMap, "size", local_size)),
}


def main() -> None:
    team = ranks_of(COMM)
    team.debug = True
    for name, (check, mutant) in [("nothing", (solves, None)), ("none", (fits, None)),
                                  *MUTANTS.items()]:  # fmt: skip
        found = ""
        try:
            with team.together():
                if mutant is None:
                    check()
                else:
                    with patch.object(*mutant):
                        check()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if RANK == 0:
            print(json.dumps({"mutant": name, "found": found}), flush=True)


if __name__ == "__main__":
    main()
