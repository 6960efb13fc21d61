"""Graphs of cuGraph, in and out: the only module that knows its names.

cuGraph and cuDF are large and optional; nothing here is imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from herta_gpu.graph import Graph

Triple = tuple[Any, Any, Any]  # ends and weights


def available() -> bool:
    return all(find_spec(name) is not None for name in ("cudf", "cugraph"))


def merged(
    asarray: Callable[[Any], Any], u: Any, v: Any, w: Any, n: int
) -> tuple[Triple, Triple, int]:
    """(edges of one direction added up, each undirected edge once, connected components).

    Everything stays on the device; `asarray` makes a column an array there.
    """
    if not u.shape[0]:
        return (u, v, w), (u, v, w), n
    import cudf
    import cugraph

    frame = cudf.DataFrame({"src": u, "dst": v, "weights": w})
    frame = frame.groupby(["src", "dst"], as_index=False).sum()
    G = cugraph.Graph(directed=False)
    G.from_cudf_edgelist(frame, source="src", destination="dst", edge_attr="weights")
    once = tuple(asarray(x.to_cupy()) for x in _columns(G))
    directed = tuple(asarray(frame[name].to_cupy()) for name in ("src", "dst", "weights"))
    labels = cugraph.weakly_connected_components(G)["labels"]
    # Nodes without an edge are not in G; each is a component of its own.
    components = int(labels.nunique()) + n - len(labels)
    return directed, once, components


def _columns(G: Any) -> list[Any]:
    """Sources, destinations and, if there are any, weights: each edge once, the caller's ids."""
    frame = G.view_edge_list()
    found = [
        _column(frame, getattr(G, "source_columns", None), "src"),
        _column(frame, getattr(G, "destination_columns", None), "dst"),
    ]
    if G.is_weighted():
        named = getattr(G, "weight_column", None)
        found.append(_column(frame, named, "weights", "weight", "wgt"))
    return found


def from_cugraph(G: Any, num_nodes: int | None = None) -> Graph:
    """The undirected cuGraph graph `G`, whose vertex ids must be 0..num_nodes-1.

    By default there are as many nodes as `G` knows vertices, and at least as its ids need.
    """
    if G.is_directed():
        raise ValueError("The cuGraph graph is directed: use its to_undirected() first.")
    u, v, *w = (column.to_numpy() for column in _columns(G))
    edges = np.stack([u, v])
    if num_nodes is None:
        num_nodes = max(int(G.number_of_vertices()), int(edges.max(initial=-1)) + 1)
    return Graph.from_edges(edges, num_nodes, *w)


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
    try:
        import cudf
        import cugraph
    except ImportError as error:
        raise RuntimeError(
            "to_cugraph needs the packages cugraph and cudf of RAPIDS: install "
            "herta_gpu[cugraph-cu13] (or [cugraph-cu12])."
        ) from error
    u, v, w = graph.edges()
    loops = graph.degree - graph.loopless_degree
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
