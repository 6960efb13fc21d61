"""The edges that ranks have, put together; graphs that they have, compared."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from herta_gpu.backends.ranks.communicator import Ranks, ranks_of
from herta_gpu.backends.ranks.parts import part_of_graph
from herta_gpu.graph import Graph
from herta_gpu.plumbing.edge_checks import check_edges, check_weights


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
            if isinstance(partition, str) and partition == "metis":
                partition = _by_metis(team, listed, n)
            elif isinstance(partition, (str, os.PathLike)) and str(partition) != "blocks":
                partition = np.load(partition, mmap_mode="r")
            return part_of_graph(team, listed, n, weights, duplicates, partition)
        ends = team.gathered(np.ascontiguousarray(edges.T, dtype=np.int64))[0].T
        if False in plain:
            own = np.zeros(0) if weights is None else weights
            weights = team.gathered(np.ascontiguousarray(own, dtype=np.float64))[0]
        return Graph.from_edges(ends, n, weights, duplicates, folder)._with(team)


def _by_metis(team: Ranks, edges: Any, n: int) -> Any:
    """The rank of each node so that few edges are cut, found by rank 0, which holds all edges."""
    ends: Any = team.gathered(np.ascontiguousarray(edges.T))[0].T
    found: Any = None
    if team.rank == 0:
        try:
            import pymetis
        except ImportError as error:
            raise ImportError(
                f'partition="metis" needs pymetis ({error}): pip install pymetis.'
            ) from None
        whole = Graph.from_edges(ends, n)
        # The work of a row: its neighbours, and what it costs without any.
        work = (np.diff(whole.indptr) + 4).tolist()
        rows = pymetis.CSRAdjacency(whole.indptr, whole.indices)
        found = np.asarray(pymetis.part_graph(team.size, rows, vweights=work)[1], dtype=np.int32)
    return team.agreed(found)


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
