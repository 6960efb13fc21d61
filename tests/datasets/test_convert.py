"""From what people already hold: objects of other packages, tables in files."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from herta_gpu import Graph
from herta_gpu.datasets import (
    from_dgl,
    from_networkx,
    from_pyg,
    from_scipy,
    from_tables,
    load,
)


def test_scipy_and_networkx_give_the_same_laplacian():
    nx = pytest.importorskip("networkx")
    G = nx.gnm_random_graph(25, 60, seed=1)
    for i, (u, v) in enumerate(G.edges):
        G.edges[u, v]["weight"] = 1.0 + i % 3
    for node in G.nodes:
        G.nodes[node].update(x=[float(node), 1.0], y=node % 2)
    data = from_networkx(G)
    truth = nx.normalized_laplacian_matrix(
        nx.Graph(list(G.edges(data=True)) + [(i, i, {"weight": 1.0}) for i in G.nodes]),
        nodelist=list(G.nodes),
    ).toarray()
    # networkx counts a self-loop once in A and once in the degree: the same L_hat.
    assert np.allclose(data.graph.to_csr().toarray(), truth)
    assert np.allclose(from_scipy(nx.to_scipy_sparse_array(G)).to_csr().toarray(), truth)
    assert data.X[3].tolist() == [3.0, 1.0]
    assert data.y[3] == 1


def held(seed: int = 0):
    rng = np.random.default_rng(seed)
    mask = rng.random((3, 12)) < 0.5
    return rng.integers(0, 12, (2, 30)), rng.random((12, 3)), rng.integers(0, 2, 12), mask


def assert_same(data, edges, X, y, mask):
    assert (data.graph.adjacency() != Graph.from_edges(edges, 12).adjacency()).nnz == 0
    assert (data.X == X).all()
    assert (data.y == y).all()
    for part, row in zip(("train", "valid", "test"), mask, strict=True):
        assert (data.split[part] == np.flatnonzero(row)).all()


def test_pyg_and_dgl_objects_by_what_they_offer():
    edges, X, y, mask = held()
    masks = dict(zip(("train_mask", "val_mask", "test_mask"), mask, strict=True))
    pyg = SimpleNamespace(edge_index=edges, x=X, y=y, num_nodes=12, **masks)
    dgl = SimpleNamespace(
        edges=lambda: (edges[0], edges[1]), num_nodes=lambda: 12,
        ndata={"feat": X, "label": y[:, None], **masks},
    )  # fmt: skip
    for data in (from_pyg(pyg), from_dgl(dgl)):
        assert_same(data, edges, X, y, mask)


def test_a_real_pyg_data_object():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    reason = "torch_geometric is not installed"
    pyg = pytest.importorskip("torch_geometric.data", reason=reason)
    edges, X, y, mask = held()
    made = pyg.Data(x=torch.tensor(X), edge_index=torch.tensor(edges), y=torch.tensor(y)[:, None])
    made.train_mask, made.val_mask, made.test_mask = torch.tensor(mask)
    assert_same(from_pyg(made), edges, X, y, mask)
    weighted = pyg.Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    weighted.edge_weight = torch.tensor([2.0, 0.5])
    assert from_pyg(weighted).graph.adjacency().toarray()[1].tolist() == [2.0, 1.0, 0.5]


def test_a_real_dgl_graph():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    try:
        import dgl
    except Exception as error:  # its library refuses other versions of torch in many ways
        pytest.skip(f"dgl cannot be imported here ({type(error).__name__})")
    edges, X, y, mask = held(1)
    made = dgl.graph((torch.tensor(edges[0]), torch.tensor(edges[1])), num_nodes=12)
    made.ndata["feat"], made.ndata["label"] = torch.tensor(X), torch.tensor(y)
    for name, row in zip(("train_mask", "val_mask", "test_mask"), mask, strict=True):
        made.ndata[name] = torch.tensor(row)
    assert_same(from_dgl(made), edges, X, y, mask)


def test_networkx_with_names_directions_and_repeats():
    nx = pytest.importorskip("networkx")
    G = nx.MultiDiGraph(name="club")
    G.add_edges_from([("b", "a"), ("a", "b"), ("a", "b"), ("c", "c")])
    G.nodes["a"]["y"] = 1
    data = from_networkx(G)
    assert (data.name, data.graph.num_nodes, data.graph.num_edges) == ("club", 3, 1)
    assert data.X is None
    assert data.y.tolist() == [-1, 1, -1]  # nodes in the order b, a, c


def test_networkx_weights_add_up_where_there_are_any():
    nx = pytest.importorskip("networkx")
    G = nx.MultiGraph([(0, 1, {"weight": 2.0}), (0, 1), (1, 2)])
    assert from_networkx(G).graph.adjacency().toarray()[1].tolist() == [3.0, 1.0, 1.0]
    assert from_networkx(nx.MultiGraph(list(G.edges()))).graph.weights is None


def cugraph_of(table, directed: bool = False):
    """What is read of a cuGraph graph, with the columns in an order of its own."""
    return SimpleNamespace(
        view_edge_list=lambda: table, number_of_vertices=lambda: 4, is_directed=lambda: directed,
        is_weighted=lambda: "weights" in table.columns,
    )  # fmt: skip


def test_a_cugraph_graph_is_read_by_the_names_of_its_columns():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame({"weights": [1.0, 2.5], "dst": [1, 2], "src": [0, 1]})
    read = Graph.from_cugraph
    graph = read(cugraph_of(table))
    assert graph.adjacency().toarray()[1].tolist() == [1.0, 1.0, 2.5, 0.0]
    assert read(cugraph_of(table[["dst", "src"]])).weights is None
    completed = read(cugraph_of(table, directed=True))
    assert (completed.adjacency() != graph.adjacency()).nnz == 0


def loaded_everywhere(folder, edges):
    """The graph of an edge list without weights, from every loader of such lists."""
    n = int(edges.max()) + 1
    yield Graph.from_edges(edges)
    np.savez(folder / "e.npz", edge_index=edges, num_nodes=n)
    yield load(str(folder / "e.npz")).graph
    np.savetxt(folder / "e.csv", edges.T, fmt="%d", delimiter=",")
    yield from_tables(folder / "e.csv").graph
    yield from_pyg(SimpleNamespace(edge_index=edges, num_nodes=n)).graph
    dgl = SimpleNamespace(edges=lambda: tuple(edges), num_nodes=lambda: n, ndata={})
    yield from_dgl(dgl).graph
    try:
        import networkx as nx
    except ImportError:
        return
    G = nx.MultiDiGraph()
    G.add_nodes_from(range(n))
    G.add_edges_from(edges.T.tolist())
    yield from_networkx(G).graph


@pytest.mark.parametrize(
    "edges", [[[0, 0, 1], [1, 1, 2]], [[0, 0, 1], [1, 1, 0]], [[0, 2, 2, 1, 0], [1, 2, 2, 0, 1]]]
)
def test_every_loader_merges_edges_by_one_rule(tmp_path, edges):
    pairs = {(min(u, v), max(u, v)) for u, v in zip(*edges, strict=True) if u != v}
    for graph in loaded_everywhere(tmp_path, np.array(edges)):
        u, v, w = graph.edges()
        assert set(zip(u.tolist(), v.tolist(), strict=True)) == pairs
        assert w is None
        assert (graph.degree == graph.loopless_degree + 1).all()  # a repeated self-loop counts once


def test_importing_loads_none_of_the_extras():
    code = (
        "import sys, herta_gpu, herta_gpu.datasets;"
        "bad = {'torch', 'ogb', 'matplotlib', 'cupy', 'pandas', 'networkx'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
