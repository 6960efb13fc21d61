"""The edges that ranks have, put together; graphs that they have, compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from herta_gpu.backends.ranks.communicator import Ranks, ranks_of
from herta_gpu.plumbing.edge_checks import check_edges, check_weights

_GATHERED = tuple[Any, int, Any]


def gathered_edges(
    comm: Any, edge_index: Any, num_nodes: Any, edge_weight: Any
) -> tuple[Ranks, _GATHERED]:
    """The shares of all ranks as one list: (edges, number of nodes, weights or None)."""
    team = ranks_of(comm)
    with team.together():
        edges, n = _share(edge_index, num_nodes)
        weights = check_weights(edge_weight, edges.shape[1])
        given = team.each((num_nodes, weights is None, edges.shape[1] == 0))
        if len({n for n, _, _ in given}) > 1:
            raise ValueError("The ranks give different num_nodes: it is that of the whole graph.")
        # A rank without edges has no weights to give.
        plain = {no_weights for _, no_weights, empty in given if not empty}
        if len(plain) > 1:
            raise ValueError("Some ranks give edge_weight and some do not: give it on all or none.")
        ends = team.gathered(np.ascontiguousarray(edges.T, dtype=np.int64))[0].T
        n = int(team.largest(n))
        if plain == {True} or not plain:
            return team, (ends, n, None)
        own = np.zeros(0) if weights is None else np.ascontiguousarray(weights, dtype=np.float64)
        return team, (ends, n, team.gathered(own)[0])


def _share(edge_index: Any, num_nodes: Any) -> tuple[Any, int]:
    """This rank's edges, which may be none, and the number of nodes as far as it knows."""
    if num_nodes is None and np.size(edge_index) == 0:
        return np.zeros((2, 0), dtype=np.int64), 0
    edges, n, _ = check_edges(edge_index, num_nodes)
    return edges, n


def check_alike(comm: Any, graph: Any) -> Ranks:
    """The ranks of `comm`, if all of them have this graph."""
    team = ranks_of(comm)
    with team.together():
        sizes = team.each((graph.num_nodes, graph.num_edges, graph.weights is None))
        if len(set(sizes)) > 1:
            raise ValueError(
                "The ranks have different graphs: give each the whole one, or its share of the "
                "edges to Graph.from_edges(..., comm=comm)."
            )
        team.same(graph.indices, "graph")
    return team
