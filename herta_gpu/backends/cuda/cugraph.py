"""Graphs of cuGraph, in and out: the only module that knows its names.

cuGraph and cuDF are large and optional; nothing here is imported before it is needed.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from herta_gpu.graph import Graph

MOST_ROWS = 2_147_483_100  # a longer edge list is refused by cuGraph


def available() -> bool:
    """Whether cuGraph and cuDF are installed."""
    return all(find_spec(name) is not None for name in ("cudf", "cugraph"))


def by_leiden(graph: Graph, worth: float) -> Any | None:
    """Nodes by community; None if less than `worth` of the edges lie within one.

    What `herta_gpu.plumbing.building.by_community` does on the host, by cuGraph's Leiden.
    """
    import cugraph

    u, v, w = graph.edges()
    # Its documentation asks for weights.
    weights = np.ones(u.shape[0], np.float32) if w is None else w
    G = _filled({"src": u, "dst": v, "weights": weights}, edge_attr="weights")
    parts, _ = cugraph.leiden(G, random_state=0)
    labels = np.full(graph.num_nodes, -1, dtype=np.int64)  # nodes without an edge come first
    labels[parts["vertex"].to_numpy()] = parts["partition"].to_numpy()
    within = float((labels[u] == labels[v]).mean()) if u.shape[0] else 0.0
    return np.argsort(labels, kind="stable") if within >= worth else None


def _filled(columns: dict[str, Any], **names: Any) -> Any:
    """A cuGraph graph of these edges; a list that is too long is refused."""
    import cudf
    import cugraph

    rows = columns["src"].shape[0]
    if rows > MOST_ROWS:
        raise ValueError(
            f"The edge list has {rows:,} rows, but RAPIDS takes {MOST_ROWS:,} at most."
        )
    G, frame = cugraph.Graph(directed=False), cudf.DataFrame(columns)
    G.from_cudf_edgelist(frame, source="src", destination="dst", **names)
    return G


def from_cugraph(G: Any, num_nodes: int | None = None) -> Graph:
    """The cuGraph graph `G`, whose vertex ids must be 0..num_nodes-1.

    Its edges are those that it was made from, merged by the rule of `Graph.from_edges`: what
    cuGraph itself keeps of repeated edges and of two directions is not promised.  By default
    there are as many nodes as `G` knows vertices, and at least as its ids need.
    """
    if not hasattr(G, "view_edge_list"):  # cuGraph has the method once there are edges
        raise ValueError("The cuGraph graph is empty: fill it by from_cudf_edgelist first.")
    if getattr(G, "is_multi_gpu", bool)():
        raise ValueError("The cuGraph graph is spread over several GPUs: give one on a single GPU.")
    u, v, *w = (column.values for column in _columns(G))  # of CuPy: nothing comes to the host
    edges = np.stack([u, v])
    if num_nodes is None:
        num_nodes = max(int(G.number_of_vertices()), int(edges.max()) + 1 if edges.size else 0)
    return Graph.from_edges(edges, num_nodes, *w)


def _columns(G: Any) -> list[Any]:
    """Sources, destinations and, if there are any, weights: the caller's edges and ids."""
    given = getattr(G, "input_df", None)
    frame = G.view_edge_list() if given is None else given
    found = [
        _column(frame, getattr(G, "source_columns", None), "src"),
        _column(frame, getattr(G, "destination_columns", None), "dst"),
    ]
    named, weighted = getattr(G, "weight_column", None), G.is_weighted()
    if given is None and not weighted and "weight" in frame.columns:
        # Only a copy forgets that it is weighted.  Where to_undirected() has put the two directions
        # together, its weights are still in the order of the old list.
        raise ValueError(
            "The cuGraph graph is a copy by to_undirected() or to_directed(), which may mix up "
            "weights: give the graph that was copied; a directed one is taken as well."
        )
    if weighted and given is not None and named is None:
        raise ValueError(
            "The cuGraph graph is weighted, but by no column: "
            'give from_cudf_edgelist the name of one, as edge_attr="weights", and no list.'
        )
    if weighted:
        found.append(_column(frame, named, "weight", "weights"))
    return found


def _column(frame: Any, *names: Any) -> Any:
    """The first of `names` that `frame` has; they changed between versions."""
    for name in names:
        name = name[0] if isinstance(name, (list, tuple)) and len(name) == 1 else name
        if isinstance(name, str) and name in frame.columns:
            return frame[name]
    raise ValueError(f"The edge list has no column of ids or weights among {list(frame.columns)}.")


def to_cugraph(graph: Graph) -> Any:
    """`graph` as a cuGraph graph, in the caller's ids; nodes without an edge are not in it.

    Self-loops of weight 1, which every node has by default, are left out.
    """
    if not available():
        raise RuntimeError(
            "to_cugraph needs the packages cugraph and cudf of RAPIDS: install "
            "herta_gpu[cugraph-cu13] (or [cugraph-cu12])."
        )
    u, v, w = graph.edges()
    loops = graph.degree - graph.loopless_degree
    looped = np.flatnonzero(np.abs(loops - 1) > 1e-9)
    ids = looped if graph.order is None else graph.order[looped]
    columns = {"src": np.concatenate([u, ids]), "dst": np.concatenate([v, ids])}
    weighted = w is not None or looped.size > 0
    if weighted:
        weights = np.ones(u.shape[0]) if w is None else w
        columns["weights"] = np.concatenate([weights, loops[looped]])
    return _filled(columns, edge_attr="weights" if weighted else None)
