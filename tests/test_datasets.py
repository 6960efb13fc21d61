"""Datasets against independent truth: SciPy, networkx, ogb, and files the tests write."""

from __future__ import annotations

import gzip
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA
from herta_gpu.datasets import (
    Dataset,
    blockmodel,
    from_cugraph,
    from_dgl,
    from_networkx,
    from_pyg,
    from_scipy,
    load,
    load_planetoid,
    names,
    read_edges,
    sizes,
)
from herta_gpu.datasets.edges import simple_graph
from herta_gpu.datasets.storage import read_dataset, write_dataset
from herta_gpu.files import new_file

SHARED = os.environ.get("HERTA_DATA", "")
needs_shared = pytest.mark.skipif(
    not (SHARED and Path(SHARED, "cora.npz").is_file()), reason="HERTA_DATA has no cora.npz"
)


def small(n: int = 40, d: int = 5, c: int = 3, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    graph = simple_graph(rng.integers(0, n, (2, 3 * n)), n)
    X = rng.standard_normal((n, d)).astype(np.float32)
    ids = rng.permutation(n)
    split = {"train": ids[:20], "valid": ids[20:30], "test": ids[30:]}
    return Dataset("small", graph, X, rng.integers(0, c, n), split, {"metric": "accuracy"})


def save_npz(path: Path, data: Dataset) -> Path:
    u, v, _ = data.graph.edges()
    np.savez(
        path, edge_index=np.stack([u, v]), num_nodes=data.graph.num_nodes, features=data.X,
        labels=data.y, **data.split,
    )  # fmt: skip
    return path


# ---- graphs ---------------------------------------------------------------------------------
def test_simple_graph_is_scipys_symmetrised_pattern():
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 50, (2, 400))  # repeats, both directions and self-loops
    A = sp.coo_array((np.ones(400), (edges[0], edges[1])), shape=(50, 50)).tocsr()
    pattern = ((A + A.T) > 0).toarray()
    np.fill_diagonal(pattern, True)
    assert (simple_graph(edges, 50).adjacency().toarray() == pattern).all()


def test_a_graph_without_edges_is_possible():
    assert simple_graph(np.zeros((2, 0), dtype=np.int64), 3).num_edges == 0


# ---- npz ------------------------------------------------------------------------------------
def test_npz_round_trip(tmp_path):
    data = small()
    again = load("mine", data_dir=save_npz(tmp_path / "mine.npz", data).parent)
    assert (again.graph.adjacency() != data.graph.adjacency()).nnz == 0
    assert (again.X == data.X).all()
    assert (again.y == data.y).all()
    assert all((again.split[part] == ids).all() for part, ids in data.split.items())
    assert "mine" in names(tmp_path)
    found = sizes("mine", tmp_path)
    assert (found.n, found.m, found.d, found.c) == (40, data.graph.num_edges, 5, 3)
    assert load("mine", tmp_path, features=False).X is None


def test_truncated_npz_is_named(tmp_path):
    whole = save_npz(tmp_path / "mine.npz", small()).read_bytes()
    for share in (0.3, 0.7, 0.99):
        (tmp_path / "cut.npz").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match=r"cut\.npz"):
            load("cut", tmp_path)


def test_flipped_byte_in_npz_is_named(tmp_path):
    data = bytearray(save_npz(tmp_path / "mine.npz", small()).read_bytes())
    at = data.find(small().X.tobytes()[:16])
    assert at > 0
    data[at] ^= 0xFF
    (tmp_path / "bad.npz").write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"bad\.npz is damaged: its entry features"):
        load("bad", tmp_path)


def test_npz_of_something_else(tmp_path):
    np.savez(tmp_path / "other.npz", a=1)
    with pytest.raises(ValueError, match="no edge_index but a"):
        load("other", tmp_path)
    np.savez(tmp_path / "rows.npz", edge_index=[[0], [1]], num_nodes=2, features=np.ones((3, 1)))
    with pytest.raises(ValueError, match="features has 3 rows but there are 2 nodes"):
        load("rows", tmp_path)


@needs_shared
def test_shared_cora_has_its_published_sizes():
    data = load("cora", SHARED)
    assert (data.graph.num_nodes, data.graph.num_edges, *data.X.shape) == (2708, 5278, 2708, 1433)
    assert [len(data.split[part]) for part in ("train", "valid", "test")] == [140, 500, 1000]
    assert sp.issparse(data.X)
    sums = np.asarray(data.normalized().X.sum(axis=1)).ravel()
    assert np.allclose(sums[sums > 0], 1, rtol=1e-6)  # row is the default for bags of words


@needs_shared
def test_citeseer_has_15_nodes_without_a_label():
    data = load("citeseer", SHARED)
    assert (data.y == -1).sum() == 15
    assert len(data.random_split(0.8).split["train"]) == int(0.8 * (3327 - 15))


# ---- names and splits -----------------------------------------------------------------------
def test_a_wrong_name_lists_close_ones(monkeypatch):
    monkeypatch.delenv("HERTA_DATA", raising=False)
    with pytest.raises(ValueError, match="did you mean ogbn-products"):
        load("ogb-products")
    with pytest.raises(ValueError, match="there are citeseer, cora, digits"):
        load("qqqqqqqq")
    with pytest.raises(FileNotFoundError, match="no-such-folder does not exist"):
        load("cora", "no-such-folder")


def test_splits_are_disjoint_and_deterministic():
    data = load("digits").with_split("random:0.6", random_state=3)
    ids = np.concatenate(list(data.split.values()))
    assert np.unique(ids).shape[0] == 1797 == ids.shape[0]
    again = load("digits").random_split(0.6, random_state=3)
    assert (again.split["train"] == data.split["train"]).all()
    other = load("digits").random_split(0.6, random_state=4)
    assert (other.split["train"] != data.split["train"]).any()
    for wrong in ("random:2", "random:x", "half"):
        with pytest.raises(ValueError, match="split"):
            data.with_split(wrong)


def test_standard_normalisation_is_scikit_learns():
    scaler = pytest.importorskip("sklearn.preprocessing").StandardScaler()
    data = small()
    assert np.allclose(data.normalized("standard").X, scaler.fit_transform(data.X), atol=1e-5)
    rng = np.random.default_rng(0)
    wide = sp.csr_array(np.where(rng.random((40, 8)) < 0.3, rng.random((40, 8)), 0.0))
    made = Dataset("s", data.graph, wide, None, {}).normalized("standard").X
    without_mean = type(scaler)(with_mean=False).fit_transform(sp.csr_matrix(wide))
    assert np.allclose(made.toarray(), without_mean.toarray())


def test_log_degree_counts_neighbours_and_the_loop():
    data = small()
    truth = np.log(data.graph.adjacency().toarray().sum(axis=1))
    assert np.allclose(data.with_log_degree().X[:, -1], truth)
    sparse = Dataset("s", data.graph, sp.csr_array(data.X), None, {}).with_log_degree()
    assert np.allclose(sparse.X.toarray()[:, -1], truth)


def test_features_come_in_chunks():
    data = small()
    parts = list(data.feature_rows(chunk=16))
    assert [rows.stop for rows, _ in parts] == [16, 32, 40]
    assert (np.concatenate([block for _, block in parts]) == data.X).all()


# ---- synthetic ------------------------------------------------------------------------------
def test_same_seed_same_graph_whatever_the_threads(monkeypatch):
    text = "n=3000,m=20000,d=7,c=4"
    monkeypatch.setattr(blockmodel, "_EDGE_CHUNK", 1 << 12)
    monkeypatch.setattr(blockmodel, "_ROW_CHUNK", 1 << 8)
    first = load(f"synthetic:{text}", random_state=5)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    again = load(f"synthetic:{text}", random_state=5)
    other = load(f"synthetic:{text}", random_state=6)
    assert (first.graph.indices == again.graph.indices).all()
    assert (first.X == again.X).all()
    assert (first.y == again.y).all()
    assert (first.graph.indices[:100] != other.graph.indices[:100]).any()


def test_synthetic_is_a_power_law_with_classes():
    data = load("synthetic:n=20000,m=100000,d=16,c=5")
    degree = np.diff(data.graph.indptr)
    assert data.graph.num_edges == 100000
    assert degree.max() > 12 * degree.mean()
    # The tail of P(degree > k) ~ k^-1.5: Hill's estimator on the upper tenth, cap aside.
    tail = np.sort(degree)[-2000:-100].astype(float)
    assert 0.9 < 1 / np.mean(np.log(tail / tail[0])) < 2.6
    u, v, _ = data.graph.edges()
    chance = np.sum((np.bincount(data.y) / 20000) ** 2)
    expected = blockmodel.HOMOPHILY + (1 - blockmodel.HOMOPHILY) * chance
    assert abs(np.mean(data.y[u] == data.y[v]) - expected) < 0.02
    means = np.stack([data.X[data.y == k].mean(axis=0) for k in range(5)])
    assert np.linalg.norm(means[0] - means[1]) > 0.5


def test_the_graph_helps_on_synthetic_data():
    data = load("synthetic:n=2000,m=12000,d=16,c=4")
    score = {}
    for lam in (1e-3, 10.0):
        model = HERTA(lam=lam, ridge=1e-2).fit(data.graph, data.X, data.y, data.split["train"])
        score[lam] = model.score(data.graph, data.X, data.y, data.split["test"])
    assert score[10.0] > score[1e-3] + 0.05


def test_a_large_X_is_mapped_from_the_cache(monkeypatch, tmp_path):
    text = "n=500,m=1000,d=9,c=3"
    in_memory = load(f"synthetic:{text}").X
    monkeypatch.setenv("HERTA_CACHE", str(tmp_path))
    monkeypatch.setattr(blockmodel, "_ON_DISK", 0)
    mapped = load(f"synthetic:{text}").X
    assert isinstance(mapped, np.memmap)
    assert (mapped == in_memory).all()
    assert len(list(tmp_path.rglob("*"))) == 2  # the folder and one file: nothing temporary


@pytest.mark.parametrize(
    "text", ["nope", "arxiv@2", "arxiv@x", "n=10,m=99", "k=3", "m=5", "n=a", "n=2,c=3,m=0"]
)
def test_wrong_synthetic_names_are_one_sentence(text):
    with pytest.raises(ValueError, match="synthetic"):
        load(f"synthetic:{text}")


# ---- Planetoid ------------------------------------------------------------------------------
def write_planetoid(folder: Path, name: str = "cora") -> tuple[np.ndarray, np.ndarray, list]:
    """Twelve nodes in Planetoid's format: 10 is a test id that is absent, as in Citeseer."""
    rng = np.random.default_rng(0)
    X = (rng.random((12, 6)) < 0.5).astype(np.float32)
    labels = rng.integers(0, 3, 12)
    X[10] = 0
    test = [11, 8, 9]  # the files' order is not sorted
    one_hot = np.eye(3, dtype=np.int32)[labels]
    ring = {i: [(i + 1) % 12, (i - 1) % 12, (i + 1) % 12, i] for i in range(12)}
    parts = {
        "x": sp.csr_matrix(X[:4]), "y": one_hot[:4], "tx": sp.csr_matrix(X[test]),
        "ty": one_hot[test], "allx": sp.csr_matrix(X[:8]), "ally": one_hot[:8], "graph": ring,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    for part, content in parts.items():
        (folder / f"ind.{name}.{part}").write_bytes(pickle.dumps(content, protocol=2))
    (folder / f"ind.{name}.test.index").write_text("".join(f"{i}\n" for i in test))
    return X, labels, test


def test_planetoid_raw_files_with_a_missing_node(tmp_path):
    X, labels, test = write_planetoid(tmp_path)
    data = load("cora", tmp_path)
    assert (data.X.toarray() == X).all()
    known = np.arange(12) != 10
    assert (data.y[known] == labels[known]).all()
    assert data.y[10] == -1
    assert data.graph.num_edges == 12
    assert data.split["test"].tolist() == sorted(test)
    assert data.split["valid"].tolist() == [4, 5, 6, 7]


def test_planetoid_download_is_kept(tmp_path, monkeypatch):
    write_planetoid(tmp_path / "server")
    monkeypatch.delenv("HERTA_DATA", raising=False)
    monkeypatch.setenv("HERTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HERTA_PLANETOID_URL", (tmp_path / "server").as_uri())
    first = load("cora")
    for file in (tmp_path / "server").iterdir():
        file.unlink()
    assert (load("cora").X != first.X).nnz == 0
    with pytest.raises(FileNotFoundError, match="could not be fetched"):
        load("pubmed")
    assert not list((tmp_path / "cache").rglob(".*"))


def test_damaged_and_hostile_planetoid_files_are_named(tmp_path):
    write_planetoid(tmp_path)
    path = tmp_path / "ind.cora.allx"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"ind\.cora\.allx is not a whole"):
        load_planetoid("cora", tmp_path)
    path.write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(ValueError, match=r"ind\.cora\.allx .*asks for posix\.getcwd"):
        load_planetoid("cora", tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"ind\.cora\.allx is missing"):
        load_planetoid("cora", tmp_path)


# ---- our own cache --------------------------------------------------------------------------
def test_cache_round_trip_trains_to_the_same_weights(tmp_path):
    data = small()
    write_dataset(tmp_path / "c", data)
    again = read_dataset(tmp_path / "c")
    assert (again.graph.adjacency() != data.graph.adjacency()).nnz == 0
    W = [HERTA(ridge=0.1).fit(s.graph, s.X, s.y, s.split["train"]).W_ for s in (data, again)]
    assert (W[0] == W[1]).all()
    assert read_dataset(tmp_path / "c", features=False).X is None


def test_large_cached_features_stay_on_disk(tmp_path):
    data = load("synthetic:n=3000,m=5000,d=20,c=3")
    write_dataset(tmp_path / "c", data)
    again = read_dataset(tmp_path / "c")
    assert isinstance(again.X, np.memmap)
    assert isinstance(again.graph.indices, np.memmap)
    model = HERTA(ridge=0.1).fit(again.graph, again.X, again.y, again.split["train"])
    assert model.status_ == "certified"


def test_damaged_cache_is_named(tmp_path):
    write_dataset(tmp_path / "c", small())
    path = tmp_path / "c" / "X.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"X\.npy has 920 bytes instead of 928: delete"):
        read_dataset(tmp_path / "c")
    (tmp_path / "c" / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"meta\.json is damaged"):
        read_dataset(tmp_path / "c")


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def half() -> None:
        with new_file(tmp_path / "a.npy") as temporary:
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    data = small()
    data.split["valid"] = object()  # np.save refuses it after half of the files are written
    with pytest.raises((ValueError, TypeError, AttributeError)):
        write_dataset(tmp_path / "c", data)
    assert list(tmp_path.iterdir()) == []


# ---- OGB ------------------------------------------------------------------------------------
@pytest.fixture
def ogb_cache(tmp_path, monkeypatch):
    pytest.importorskip("ogb", reason="ogb is not installed")
    monkeypatch.setenv("HERTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved_by_ogb(name, graph, labels, split, metric="acc", classes=3):
    """A dataset in OGB's own format, written by ogb's saver."""
    import torch
    from ogb.io import DatasetSaver

    saver = DatasetSaver(dataset_name=name, is_hetero="edge_index_dict" in graph, version=1)
    saver.save_graph_list([graph])
    saver.save_target_labels(labels)
    saver.save_split(split, split_name="random")
    os.makedirs("mapping", exist_ok=True)
    Path("mapping/README.md").write_text("none")
    saver.copy_mapping_dir("mapping")
    saver.save_task_info(task_type="classification", eval_metric=metric, num_classes=classes)
    meta = saver.get_meta_dict()
    assert torch is not None
    return meta


def arrays(n=30, d=4, m=90, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.permutation(n)
    split = {"train": ids[:15], "valid": ids[15:20], "test": ids[20:]}
    return rng, rng.integers(0, n, (2, m)), rng.standard_normal((n, d)), split


def test_ogb_through_its_own_saver_then_without_torch(ogb_cache):
    from herta_gpu.datasets import load_ogb

    rng, edges, X, split = arrays()
    labels = rng.integers(0, 3, (30, 1)).astype(float)
    labels[7] = np.nan
    graph = {"edge_index": edges, "node_feat": X, "num_nodes": 30}
    meta = saved_by_ogb("ogbn-tiny", graph, labels, split)
    data = load_ogb("ogbn-tiny", meta_dict=meta)
    assert np.allclose(data.X, X, atol=1e-6)
    assert data.y[7] == -1
    assert (np.delete(data.y, 7) == np.delete(labels[:, 0], 7)).all()
    assert (data.split["test"] == np.sort(split["test"])).all()
    A = sp.coo_array((np.ones(90), tuple(edges)), shape=(30, 30)).tocsr()
    truth = ((A + A.T) > 0).toarray()
    np.fill_diagonal(truth, True)
    assert (data.graph.adjacency().toarray() == truth).all()
    code = (
        "import sys; from herta_gpu.datasets import load_ogb; d = load_ogb('ogbn-tiny');"
        "assert d.X.shape == (30, 4); assert not {'torch', 'ogb', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=60)


def test_ogb_data_that_ogb_processed_before(ogb_cache):
    """ogb's second load goes through torch.load, which refuses NumPy arrays since torch 2.6."""
    import shutil

    from ogb.nodeproppred import NodePropPredDataset

    from herta_gpu.datasets import load_ogb

    rng, edges, X, split = arrays()
    graph = {"edge_index": edges, "node_feat": X, "num_nodes": 30}
    meta = saved_by_ogb("ogbn-tiny", graph, rng.integers(0, 3, (30, 1)), split)
    NodePropPredDataset("ogbn-tiny", meta_dict=meta)
    assert np.allclose(load_ogb("ogbn-tiny", meta_dict=meta).X, X, atol=1e-6)
    shutil.rmtree(ogb_cache / "cache")
    assert np.allclose(load_ogb("ogbn-tiny", meta_dict=meta).X, X, atol=1e-6)


def test_proteins_takes_the_mean_of_edge_features(ogb_cache):
    from herta_gpu.datasets import load_ogb

    rng, edges, _, split = arrays()
    features = rng.random((90, 8))
    labels = rng.integers(0, 2, (30, 5))
    graph = {"edge_index": edges, "edge_feat": features, "num_nodes": 30}
    meta = saved_by_ogb("ogbn-tinyproteins", graph, labels, split, metric="rocauc", classes=2)
    data = load_ogb("ogbn-tinyproteins", meta_dict=meta)
    assert data.metric == "rocauc"
    assert data.num_classes == 5
    assert data.y.dtype == np.float32
    for i in range(30):
        mine = [features[j] for j in range(90) for end in (0, 1) if edges[end, j] == i]
        assert np.allclose(data.X[i], np.mean(mine, axis=0) if mine else 0, atol=1e-5)


def test_mag_is_its_paper_graph(ogb_cache):
    from herta_gpu.datasets import load_ogb

    rng, edges, X, split = arrays()
    graph = {
        "edge_index_dict": {
            ("paper", "cites", "paper"): edges,
            ("author", "writes", "paper"): rng.integers(0, 10, (2, 20)),
        },
        "node_feat_dict": {"paper": X},
        "num_nodes_dict": {"paper": 30, "author": 10},
    }
    labels = rng.integers(0, 3, (30, 1))
    by_type = {part: {"paper": ids} for part, ids in split.items()}
    meta = saved_by_ogb("ogbn-tinymag", graph, {"paper": labels}, by_type)
    data = load_ogb("ogbn-tinymag", meta_dict=meta)
    assert data.graph.num_nodes == 30
    assert np.allclose(data.X, X, atol=1e-6)
    assert (data.y == labels[:, 0]).all()


def test_arxiv_by_name_from_ogbs_csv_files(ogb_cache):
    """The layout of the real download, read by the real package under the real name."""
    rng, edges, X, split = arrays()
    root = ogb_cache / "ogbn_arxiv"
    files = {
        "raw/edge": edges.T, "raw/node-feat": X, "raw/node-label": rng.integers(0, 3, (30, 1)),
        "raw/num-node-list": [[30]], "raw/num-edge-list": [[90]],
        "raw/node_year": np.full((30, 1), 2017),
    }  # fmt: skip
    files |= {f"split/time/{part}": ids[:, None] for part, ids in split.items()}
    for name, table in files.items():
        path = root / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as file:
            np.savetxt(file, table, delimiter=",", fmt="%.10g")
    (root / "processed").mkdir()
    (root / "RELEASE_v1.txt").write_text("")
    assert np.allclose(load("ogbn-arxiv", ogb_cache).X, X, atol=1e-6)
    # The size of what is in the cache, not of the real thing.
    assert sizes("ogbn-arxiv", ogb_cache).n == 30
    assert load("ogbn-arxiv", ogb_cache, features=False).X is None


def test_ogb_missing_names_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.setenv("HERTA_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(ImportError, match=r'pip install "herta_gpu\[ogb\]"'):
        load("ogbn-products", tmp_path)


# ---- what people already hold ---------------------------------------------------------------
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
        assert (data.graph.adjacency() != simple_graph(edges, 12).adjacency()).nnz == 0
        assert (data.X == X).all()
        assert (data.y == y).all()
        assert (data.split["train"] == np.flatnonzero(mask)).all()


def test_torch_tensors_in_a_pyg_object():
    torch = pytest.importorskip("torch")
    edges = torch.tensor([[0, 1], [1, 2]])
    x = torch.ones(3, 2, requires_grad=True)
    data = from_pyg(SimpleNamespace(edge_index=edges, x=x, y=None, num_nodes=3))
    assert data.X.tolist() == [[1.0, 1.0]] * 3


def test_cugraph_edge_list():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame({"src": [0, 1], "dst": [1, 2], "weights": [1.0, 2.5]})
    graph = from_cugraph(
        SimpleNamespace(view_edge_list=lambda: table, number_of_vertices=lambda: 3)
    )
    assert graph.adjacency().toarray()[1].tolist() == [1.0, 1.0, 2.5]


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
