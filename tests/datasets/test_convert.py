"""From what people already hold: objects of other packages, tables in files."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from herta_gpu import Graph
from herta_gpu.datasets import (
    from_cugraph,
    from_dgl,
    from_networkx,
    from_pyg,
    from_scipy,
    from_tables,
    load,
    read_edges,
    sizes,
)
from herta_gpu.plumbing.files import DataError


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


def test_pyg_and_dgl_objects_by_what_they_offer():
    rng = np.random.default_rng(0)
    edges, X, y = rng.integers(0, 12, (2, 30)), rng.random((12, 3)), rng.integers(0, 2, 12)
    mask = rng.random(12) < 0.5
    pyg = SimpleNamespace(edge_index=edges, x=X, y=y, num_nodes=12, train_mask=mask)
    dgl = SimpleNamespace(
        edges=lambda: (edges[0], edges[1]), num_nodes=lambda: 12,
        ndata={"feat": X, "label": y[:, None], "train_mask": mask},
    )  # fmt: skip
    for data in (from_pyg(pyg), from_dgl(dgl)):
        assert (data.graph.adjacency() != Graph.from_edges(edges, 12).adjacency()).nnz == 0
        assert (data.X == X).all()
        assert (data.y == y).all()
        assert (data.split["train"] == np.flatnonzero(mask)).all()


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


def test_torch_tensors_in_a_pyg_object():
    torch = pytest.importorskip("torch")
    edges = torch.tensor([[0, 1], [1, 2]])
    x = torch.ones(3, 2, requires_grad=True)
    data = from_pyg(SimpleNamespace(edge_index=edges, x=x, y=None, num_nodes=3))
    assert data.X.tolist() == [[1.0, 1.0]] * 3


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
    for read in (from_cugraph, Graph.from_cugraph):
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
    yield read_edges(folder / "e.csv")
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


@pytest.mark.parametrize(
    "text", ["0,1\n1,2\n", "src,dst\n0,1\n1,2\n", "0\t1\n1\t2\n", "0 1\n1 2\n"]
)
def test_edge_lists_as_text(tmp_path, text):
    (tmp_path / "e.csv").write_text(text)
    graph = read_edges(tmp_path / "e.csv")
    assert (graph.num_nodes, graph.num_edges) == (3, 2)


def test_edge_lists_as_parquet_and_wrong_ones(tmp_path):
    (tmp_path / "e.csv").write_text("0,1.5\n")
    with pytest.raises(ValueError, match=r"e\.csv must hold integer node ids"):
        read_edges(tmp_path / "e.csv")
    (tmp_path / "e.csv").write_text("0,1\n1,x\n")
    with pytest.raises(ValueError, match=r"e\.csv is not a table of numbers"):
        read_edges(tmp_path / "e.csv")
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pd.DataFrame({"u": [0, 1], "v": [1, 2], "w": [1.0, 2.0]}).to_parquet(tmp_path / "e.parquet")
    assert read_edges(tmp_path / "e.parquet").adjacency().toarray()[2, 1] == 2.0
    (tmp_path / "e.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"e\.parquet is not a whole"):
        read_edges(tmp_path / "e.parquet")


def test_importing_loads_none_of_the_extras():
    code = (
        "import sys, herta_gpu, herta_gpu.datasets;"
        "bad = {'torch', 'ogb', 'matplotlib', 'cupy', 'pandas', 'networkx'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def write_tables(folder, ending: str):
    """Six nodes in a path, their features, classes and split; the truth as arrays."""
    pd = pytest.importorskip("pandas")
    X = np.array([[-1.5, 2e-3, i] for i in range(6)])
    truth = {
        "edges": [(i, i + 1) for i in range(5)], "features": X, "labels": [0, 1, 0, 1, -1, 1],
        "train": [0, 1, 2], "valid": [3], "test": [5],
    }  # fmt: skip
    folder.mkdir()
    for name, content in truth.items():
        frame = pd.DataFrame(np.asarray(content))
        frame.columns = [f"{name}{j}" for j in range(frame.shape[1])]
        path = folder / f"{name}{ending}"
        if ending == ".parquet":
            pytest.importorskip("pyarrow")
            frame.to_parquet(path)
        else:
            frame.to_csv(path, index=False, sep="\t" if ending == ".tsv" else ",")
    return truth


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".csv.gz", ".parquet"])
def test_a_folder_of_tables_is_a_dataset(tmp_path, ending, capsys):
    from herta_gpu.app.cli import main

    truth = write_tables(tmp_path / "mine", ending)
    found = {p.name.partition(".")[0]: p for p in (tmp_path / "mine").iterdir()}
    split = {part: found[part] for part in ("train", "valid", "test")}
    by_files = from_tables(found["edges"], found["features"], found["labels"], split)
    for data in (load(str(tmp_path / "mine")), load("mine", tmp_path), by_files):
        assert (data.graph.num_nodes, data.graph.num_edges) == (6, 5)
        assert np.allclose(data.X, truth["features"])
        assert data.y.tolist() == truth["labels"]
        assert {part: ids.tolist() for part, ids in data.split.items()} == {
            part: truth[part] for part in ("train", "valid", "test")
        }
    assert load("mine", tmp_path, features=False).X is None
    assert sizes("mine", tmp_path).d == 3
    assert main(["train", str(tmp_path / "mine"), "--ridge", "0.1", "--quiet"]) == 0
    assert "mine: 6 nodes, 5 edges, 3 features, 2 outputs" in capsys.readouterr().out


def test_arrays_beside_a_table_of_edges(tmp_path):
    import scipy.sparse as sp

    (tmp_path / "e.txt").write_text("0 1 0.5\n1 2 2.0\n")
    sp.save_npz(tmp_path / "x.npz", sp.csr_array(np.eye(4)))
    np.save(tmp_path / "y.npy", np.arange(8.0).reshape(4, 2))
    data = from_tables(tmp_path / "e.txt", tmp_path / "x.npz", tmp_path / "y.npy")
    assert data.graph.adjacency().toarray()[1].tolist() == [0.5, 1.0, 2.0, 0.0]
    assert (data.X.toarray() == np.eye(4)).all()
    assert data.y.tolist() == np.arange(8.0).reshape(4, 2).tolist()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("edges.csv", "0,9\n", "names node 9 but there are 3 nodes"),
        ("edges.csv", "0\n1\n", "must have two columns"),
        ("edges.csv", "", "edges.csv is empty"),
        ("labels.csv", "0\n1\n", "one row per node"),
        ("labels.csv", "0\n1\n0.5\n", "classes from 0 on"),
        ("train.csv", "7\n", "names node 7 but there are 3 nodes"),
        ("features.csv", "1\n2\nthree\n", "features.csv is not a table of numbers"),
        ("features.npz", "PK", "features.npz is not a whole SciPy sparse matrix"),
        ("features.npy", "x", "features.npy is not a whole"),
        ("edges.csv.gz", "no gzip", "edges.csv.gz is not a table"),
        ("edges.parquet", "PAR1", "edges.parquet is not a whole Parquet"),
    ],
)
def test_wrong_tables_are_named(tmp_path, file, content, words):
    if file.endswith("parquet"):
        pytest.importorskip("pyarrow")
    whole = {"edges": "0,1\n", "features": "1\n2\n3\n"}
    whole.pop(file.partition(".")[0], None)
    for name, text in whole.items():
        (tmp_path / f"{name}.csv").write_text(text)
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=words.replace(".", r"\.")):
        load(f"{tmp_path}/")


def test_a_folder_without_edges_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no edges\.csv"):
        load(f"{tmp_path}/")
