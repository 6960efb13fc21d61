"""The edges that ranks have, put together; graphs that they have, compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from herta_gpu.backends.ranks.communicator import Ranks, ranks_of
from herta_gpu.backends.ranks.owners import owners
from herta_gpu.backends.ranks.parts import part_of_edges, part_of_graph
from herta_gpu.graph import Graph
from herta_gpu.plumbing.checks import check_edges, check_weights


def shared_graph(
    comm: Any,
    edge_index: Any,
    num_nodes: Any,
    edge_weight: Any,
    duplicates: str | None,
    folder: Any,
    split: str,
    partition: Any,
) -> Graph:
    """`Graph.from_edges` of the shares of all ranks."""
    team = ranks_of(comm)
    with team.together():
        edges, n = _share(edge_index, num_nodes)
        weights = check_weights(edge_weight, edges.shape[1])
        team.same((num_nodes, split), "num_nodes and split", always=True)
        # A rank without edges has no weights to give.
        plain = team.each(None if not edges.shape[1] else weights is None)
        if {True, False} <= set(plain):
            raise ValueError("Some ranks give edge_weight and some do not: give it on all or none.")
        n, weights = int(team.largest(n)), None if False not in plain else weights
        if split == "nodes" and team.size > 1:
            if folder is not None:
                raise ValueError('folder= needs split="columns".')
            listed = np.ascontiguousarray(edges, dtype=np.int64)
            held = owners(team, n, partition, lambda: _collected(team, listed, n))
            return part_of_edges(team, held, listed, n, weights, duplicates)
        ends = team.gather(np.ascontiguousarray(edges.T, dtype=np.int64))[0].T
        if False in plain:
            own = np.zeros(0) if weights is None else weights
            weights = team.gather(np.ascontiguousarray(own, dtype=np.float64))[0]
        return Graph.from_edges(ends, n, weights, duplicates, folder).with_team(team)


def _collected(team: Ranks, edges: Any, n: int) -> Graph | None:
    """The whole graph, without weights, on rank 0 alone."""
    none = np.zeros((0, 2), dtype=np.int64)
    parts = team.exchange_rows([edges.T if r == 0 else none for r in range(team.size)])
    return Graph.from_edges(np.concatenate(parts).T, n) if team.rank == 0 else None


def _share(edge_index: Any, num_nodes: Any) -> tuple[Any, int]:
    """This rank's edges, which may be none, and the number of nodes as far as it knows."""
    if num_nodes is None and np.size(edge_index) == 0:
        return np.zeros((2, 0), dtype=np.int64), 0
    edges, n, _ = check_edges(edge_index, num_nodes)
    return edges, n


def on_all_ranks(comm: Any, graph: Any, split: str, partition: Any) -> Any:
    """A graph that every rank of `comm` has, for all of them; or, by nodes, this rank's part."""
    team = ranks_of(comm)
    with team.together():
        sizes = team.each((graph.num_nodes, graph.num_edges, graph.weights is None))
        if len(set(sizes)) > 1:
            raise ValueError(
                "The ranks have different graphs: give each the whole one, or its share of the "
                "edges to Graph.from_edges(..., comm=comm)."
            )
        team.same(graph.indices, "graph")
        if split == "columns" or team.size == 1:
            return graph.with_team(team)
        held = owners(team, graph.num_nodes, partition, lambda: graph)
        return part_of_graph(team, held, graph)
