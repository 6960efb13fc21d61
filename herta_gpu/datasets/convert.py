"""From what people already hold in memory: SciPy, networkx, PyG, DGL, cuGraph.

None of these packages is imported here: an object is recognised by what it offers.
Directed edges become undirected ones, repeated ones count once unless weighted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.datasets.dataset import Dataset
from herta_gpu.datasets.edges import simple_graph
from herta_gpu.graph import Graph, check_edges

_MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}


def from_scipy(adjacency: Any) -> Graph:
    """The graph of a symmetric sparse matrix; a triangular one is completed.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> from herta_gpu.datasets import from_scipy
    >>> from_scipy(sp.csr_array([[0, 2.0], [2.0, 0]]))
    Graph(2 nodes, 1 edges, weighted)
    """
    if not sp.issparse(adjacency) or adjacency.shape[0] != adjacency.shape[1]:
        raise TypeError("from_scipy needs a square SciPy sparse matrix.")
    A = sp.coo_array(adjacency)
    A.sum_duplicates()
    A.eliminate_zeros()
    edges = np.stack([A.row, A.col])
    return Graph.from_edges(edges, num_nodes=A.shape[0], edge_weight=A.data)


def from_networkx(graph: Any, x: str = "x", y: str = "y", weight: str = "weight") -> Dataset:
    """Nodes in the order of `graph.nodes`; node attributes `x`, `y`, edge attribute `weight`."""
    nodes = list(graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    edges = np.array([(at[u], at[v]) for u, v in graph.edges()], dtype=np.int64).reshape(-1, 2).T
    weights = np.array([w for _, _, w in graph.edges(data=weight, default=1.0)], dtype=np.float64)
    if (weights == 1).all():
        made = simple_graph(edges, len(nodes))
    else:
        made = Graph.from_edges(edges, num_nodes=len(nodes), edge_weight=weights)
    attributes = [graph.nodes[node] for node in nodes]
    X = np.array([a[x] for a in attributes]) if all(x in a for a in attributes) else None
    has_y = any(y in a for a in attributes)
    labels = np.array([a.get(y, -1) for a in attributes]) if has_y else None
    return Dataset(str(graph.name or "networkx"), made, X, labels, {}, {"source": "networkx"})


def from_pyg(data: Any) -> Dataset:
    """A `torch_geometric.data.Data` with edge_index, x, y and the usual masks."""
    edge_index = _numpy(data.edge_index)
    n = int(data.num_nodes)
    weight = getattr(data, "edge_weight", None)
    if weight is None:
        check_edges(edge_index, n)
        graph = simple_graph(edge_index, n)
    else:
        graph = Graph.from_edges(edge_index, num_nodes=n, edge_weight=_numpy(weight))
    found = {key: getattr(data, key, None) for key in ("x", "y", *_MASKS.values())}
    return _assembled("pyg", graph, found)


def from_dgl(graph: Any) -> Dataset:
    """A homogeneous DGL graph with ndata "feat", "label" and the usual masks."""
    u, v = graph.edges()
    edges, n = np.stack([_numpy(u), _numpy(v)]), int(graph.num_nodes())
    check_edges(edges, n)
    made = simple_graph(edges, n)
    found = {mask: graph.ndata.get(mask) for mask in _MASKS.values()}
    found |= {"x": graph.ndata.get("feat"), "y": graph.ndata.get("label")}
    return _assembled("dgl", made, found)


def from_cugraph(graph: Any) -> Graph:
    """The edges of a cuGraph graph whose vertices are 0..n-1."""
    table = graph.view_edge_list()
    table = table.to_pandas() if hasattr(table, "to_pandas") else table
    columns = list(table.columns)
    edges = np.stack([np.asarray(table[c], dtype=np.int64) for c in columns[:2]])
    n = max(int(graph.number_of_vertices()), int(edges.max(initial=-1)) + 1)
    if len(columns) > 2:
        return Graph.from_edges(edges, num_nodes=n, edge_weight=np.asarray(table[columns[2]]))
    return simple_graph(edges, n)


def _assembled(name: str, graph: Graph, found: dict[str, Any]) -> Dataset:
    X = None if found["x"] is None else _numpy(found["x"])
    y = None if found["y"] is None else _numpy(found["y"])
    if y is not None and y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    split = {}
    for part, mask in _MASKS.items():
        given = found.get(mask)
        if given is not None and _numpy(given).ndim == 1:
            split[part] = np.flatnonzero(_numpy(given))
    return Dataset(name, graph, X, y, split, {"source": name})


def _numpy(array: Any) -> Any:
    """A torch tensor on any device, or anything NumPy understands."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
    return np.asarray(array)
