"""From what people already hold in memory: SciPy, networkx, PyG, DGL.

None of these packages is imported here: an object is recognised by what it offers.
Directed and repeated edges are merged by the rule of `Graph.from_edges`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.datasets.dataset import Dataset
from herta_gpu.graph import Graph
from herta_gpu.plumbing.bundles import column_of, features_of, on_host, pyg_graph

_MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}


def from_scipy(adjacency: Any) -> Graph:
    """`Graph.from_sparse`.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> from herta_gpu.datasets import from_scipy
    >>> from_scipy(sp.csr_array([[0, 2.0], [2.0, 0]]))
    Graph(2 nodes, 1 edges, weighted)
    """
    return Graph.from_sparse(adjacency)


def from_networkx(graph: Any, x: str = "x", y: str = "y", weight: str = "weight") -> Dataset:
    """Nodes in the order of `graph.nodes`; node attributes `x`, `y`, edge attribute `weight`.

    Where some edges have a weight, those without one have weight 1.
    """
    nodes = list(graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    listed = [(at[u], at[v], w) for u, v, w in graph.edges(data=weight)]
    edges = np.array([(u, v) for u, v, _ in listed], dtype=np.int64).reshape(-1, 2).T
    weights = None
    if any(w is not None for *_, w in listed):
        weights = np.array([1.0 if w is None else w for *_, w in listed], dtype=np.float64)
    attributes = [graph.nodes[node] for node in nodes]
    X = np.array([a[x] for a in attributes]) if all(x in a for a in attributes) else None
    has_y = any(y in a for a in attributes)
    labels = np.array([a.get(y, -1) for a in attributes]) if has_y else None
    made, metadata = Graph.from_edges(edges, len(nodes), weights), {"source": "networkx"}
    return Dataset(str(graph.name or "networkx"), made, X, labels, {}, metadata)


def from_pyg(data: Any) -> Dataset:
    """A `torch_geometric.data.Data` with edge_index (or adj_t), x, y and the usual masks.

    Its `edge_weight` is used if there is one, or an `edge_attr` of one real number per edge.  PyG's
    `to_undirected` adds up the weights of the two directions, so an edge that was listed in both
    has twice its weight afterwards.  `HERTA().fit(data)` takes such an object as it is.
    """
    masks = {part: getattr(data, mask, None) for part, mask in _MASKS.items()}
    return _dataset("pyg", pyg_graph(data), features_of(data), getattr(data, "y", None), masks)


def from_dgl(graph: Any) -> Dataset:
    """A homogeneous DGL graph with ndata "feat", "label" and the usual masks."""
    edges = np.stack([on_host(ends) for ends in graph.edges()])
    made, get = Graph.from_edges(edges, int(graph.num_nodes())), graph.ndata.get
    masks = {part: get(mask) for part, mask in _MASKS.items()}
    return _dataset("dgl", made, get("feat"), get("label"), masks)


def _dataset(name: str, graph: Graph, X: Any, y: Any, masks: dict[str, Any]) -> Dataset:
    """Tensors become arrays of the host; masks of several splits are left out."""
    X = X if X is None or sp.issparse(X) else on_host(X)
    known = {part: on_host(mask) for part, mask in masks.items() if mask is not None}
    split = {part: np.flatnonzero(mask) for part, mask in known.items() if mask.ndim == 1}
    return Dataset(name, graph, X, column_of(y), split, {"source": name})
