"""Bugs put in on purpose, which must be found (``python -m tests.backends.ranks.mutants``).

Each is tried in the debug mode, in which ranks that went different ways notice it at once.  Prints
a line of JSON for each: its name, and how it was found, or nothing.
"""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import numpy as np
import scipy.sparse as sp

from herta_gpu import HERTA, Checkpoint, Graph, Sparsifier
from herta_gpu.backends import backend_for
from herta_gpu.backends.ranks import GraphPart, Ranks, ranks_of
from herta_gpu.backends.ranks.nodes import NodesBackend
from herta_gpu.backends.ranks.parts import Halo
from herta_gpu.backends.ranks.teams import Rows
from herta_gpu.laplacian import RegularizedLaplacian, block_cg
from herta_gpu.problem import UnfoldedMap
from tests.backends.ranks.checks import COMM, RANK, N, data, parts
from tests.backends.ranks.node_checks import shared_folder


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


def samples() -> None:
    """Edges drawn by all ranks, against those of one process."""
    edges = data(5)[0]
    part, whole = parts(edges), Graph.from_edges(edges, N)
    for replace in (True, False):
        how = {"lam": 5.0, "n_samples": 200, "replace": replace, "dtype": "float64"}
        found, one = (Sparsifier(**how).fit(graph).graph_ for graph in (part, whole))
        at, wanted = np.arange(N)[part.nodes], one.to_csr()[part.nodes]
        here = sp.csr_array((found.weights, found.ids[found.indices], found.indptr), (at.size, N))
        root = np.sqrt(whole.degree)
        L = sp.diags_array(1 / root[at]) @ here @ sp.diags_array(1 / root)
        off = wanted + L  # the diagonal is left, and nothing else
        assert np.abs(off.sum(axis=1) - wanted[np.arange(at.size), at]).max() < 1e-6
        assert np.abs(off.toarray()).sum() - np.abs(wanted[np.arange(at.size), at]).sum() < 1e-4


def left_out() -> None:
    """Leave-one-out of nodes that are dealt like cards, against one process."""
    edges, X, y, _ = data(5)
    part, whole = parts(edges, None, np.arange(N) * 7 % 2), Graph.from_edges(edges, N)
    at, model = part.nodes, HERTA(lam=5.0, ridge=0.1)
    found = model.fit(part, X[at], y[at], loo=True).loo_
    assert np.abs(found - model.fit(whole, X, y, loo=True).loo_).max() < 1e-4


def resumed() -> None:
    """A block of Q that one rank has lost is solved for by all."""
    edges, X, y, _ = data(30)
    part = parts(edges)
    at, folder = part.nodes, shared_folder()
    W = []
    for _ in range(2):
        state = Checkpoint(folder, worth=0.0)
        W.append(HERTA(lam=5.0).fit(part, X[at], y[at], checkpoint=state).W_)
        for path in folder.glob("part-0-*/*.npz"):
            path.unlink(missing_ok=True)
        ranks_of(COMM).arrive()
    assert (W[0] == W[1]).all()


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
    step, total = NodesBackend.cg_step, Rows.total

    def mutant(self: NodesBackend, *args: Any) -> None:
        calls: list[Any] = []

        def counted(x: Any) -> Any:
            calls.append(x)
            return x if len(calls) == which else total(self.team, x)

        with patch.object(self.team, "total", counted):
            step(self, *args)

    return mutant


def local_size(self: UnfoldedMap, R: Any) -> float:
    """A norm of the rows that are here decides what is solved for again."""
    here = float((np.asarray(R, dtype=np.float64) ** 2).sum()) ** 0.5
    return here * (1 + 1e-3 * RANK)


_with_edges = GraphPart.with_edges


def one_end_alone(self: GraphPart, keep: Any, factor: Any) -> Any:
    """Edges between ranks lose their weight at the end that did not draw them."""
    exchange_rows = Ranks.exchange_rows

    def silent(team: Ranks, told: Any) -> Any:
        found = exchange_rows(team, told)
        return [x if r == team.rank else x * 0 for r, x in enumerate(found)]

    with patch.object(Ranks, "exchange_rows", silent):
        return _with_edges(self, keep, factor)


def own_numbers(self: GraphPart, x: Any) -> Any:
    """Each rank numbers its edges from 0."""
    return np.cumsum(x) - x


def in_order_of_ranks(self: Rows, rows: Any) -> Any:
    """Training rows one rank after the other, whatever their ids."""
    ids, self._mine = self.ranks.gather(self.graph.ids[rows])
    return ids


def alone_from_disk(self: Rows, x: Any) -> Any:
    """A rank that has a stored block does not ask the others whether they do."""
    return x


MUTANTS = {
    "the other end is not told": (samples, (GraphPart, "with_edges", one_end_alone)),
    "edges numbered by each rank": (samples, (GraphPart, "sums_before", own_numbers)),
    "rows in the order of ranks": (left_out, (Rows, "train_on", in_order_of_ranks)),
    "a block read alone": (resumed, (Rows, "largest", alone_from_disk)),
    "no halo": (solves, (Halo, "extended", no_halo)),
    "stale halo": (solves, (Halo, "extended", stale_halo)),
    "local pHp": (solves, (NodesBackend, "cg_step", local(1))),
    "local rho": (solves, (NodesBackend, "cg_step", local(2))),
    "a branch on a local number": (fits, (UnfoldedMap, "size", local_size)),
}


def main() -> None:
    team = ranks_of(COMM)
    team.debug = True
    unharmed = {
        check.__name__: (check, None) for check in (solves, fits, samples, left_out, resumed)
    }
    for name, (check, mutant) in (unharmed | MUTANTS).items():
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
