"""Graphs of cuGraph, in and out: the only module that knows its names.

cuGraph and cuDF are large and optional; nothing here is imported before it is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from herta_gpu.graph import Graph


def from_cugraph(G: Any, num_nodes: int | None = None) -> Graph:
    """The undirected cuGraph graph `G`, whose vertex ids must be 0..num_nodes-1."""
    if G.is_directed():
        raise ValueError("The cuGraph graph is directed: use its to_undirected() first.")
    frame = G.view_edge_list()  # each edge once, with the caller's ids
    u = _column(frame, getattr(G, "source_columns", None), "src")
    v = _column(frame, getattr(G, "destination_columns", None), "dst")
    weight = getattr(G, "weight_column", None)
    w = _column(frame, weight, "weights", "weight", "wgt") if G.is_weighted() else None
    return Graph.from_edges(np.stack([u, v]), num_nodes, w)


def _column(frame: Any, *names: Any) -> Any:
    """The first of `names` that `frame` has, on the host; they changed between versions."""
    for name in names:
        name = name[0] if isinstance(name, (list, tuple)) and len(name) == 1 else name
        if isinstance(name, str) and name in frame.columns:
            return frame[name].to_numpy()
    raise ValueError(f"The edge list has no column of ids or weights among {list(frame.columns)}.")


def to_cugraph(graph: Graph) -> Any:
    """`graph` as a cuGraph graph, in the caller's ids; nodes without an edge are not in it.

    Self-loops of weight 1, which every node has by default, are left out.
    """
    try:
        import cudf
        import cugraph
    except ImportError as error:
        raise RuntimeError("to_cugraph needs the packages cugraph and cudf of RAPIDS.") from error
    u, v, w = graph.edges()
    loops = graph.degree - graph.sampled_degree
    looped = np.flatnonzero(np.abs(loops - 1) > 1e-9)
    ids = looped if graph.order is None else graph.order[looped]
    columns = {"src": np.concatenate([u, ids]), "dst": np.concatenate([v, ids])}
    weighted = w is not None or looped.size > 0
    if weighted:
        weights = np.ones(u.shape[0]) if w is None else w
        columns["weights"] = np.concatenate([weights, loops[looped]])
    G = cugraph.Graph(directed=False)
    edge_attr = "weights" if weighted else None
    frame = cudf.DataFrame(columns)
    G.from_cudf_edgelist(frame, source="src", destination="dst", edge_attr=edge_attr)
    return G
