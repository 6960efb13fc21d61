"""OGB's datasets through the real ogb package, from files in OGB's own format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu.datasets import load, load_ogb, ogb, sizes
from tests.datasets.test_ogb_files import M, N, contents, write_split, write_table


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

    rng, edges, X, split = arrays()
    graph = {"edge_index": edges, "node_feat": X, "num_nodes": 30}
    meta = saved_by_ogb("ogbn-tiny", graph, rng.integers(0, 3, (30, 1)), split)
    NodePropPredDataset("ogbn-tiny", meta_dict=meta)
    assert np.allclose(load_ogb("ogbn-tiny", meta_dict=meta).X, X, atol=1e-6)
    shutil.rmtree(ogb_cache / "cache")
    assert np.allclose(load_ogb("ogbn-tiny", meta_dict=meta).X, X, atol=1e-6)


def test_proteins_takes_the_mean_of_edge_features(ogb_cache):
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


def write_arxiv(root, arrays):
    """OGB's files, as after a download."""
    at = root / "ogbn_arxiv"
    write_table(at / "raw" / "edge.csv.gz", arrays["edge_index"].T, "%d")
    write_table(at / "raw" / "node-feat.csv.gz", arrays["node_feat"])
    write_table(at / "raw" / "node-label.csv.gz", np.arange(N)[:, None] % 5, "%d")
    write_table(at / "raw" / "num-node-list.csv.gz", [[N]], "%d")
    write_table(at / "raw" / "num-edge-list.csv.gz", [[M]], "%d")
    write_table(at / "raw" / "node_year.csv.gz", arrays["node_year"], "%d")
    write_split(at / "split" / "time", arrays)
    (at / "RELEASE_v1.txt").write_text("")
    (at / "processed").mkdir()
    return at


def test_arxiv_by_name_through_ogb(ogb_cache):
    """Read by the real package under the real name, as after a download."""
    arrays = contents()
    X = arrays["node_feat"]
    write_arxiv(ogb_cache, arrays)
    assert np.allclose(load("ogbn-arxiv", ogb_cache).X, X, atol=1e-6)
    # The size of what is in the cache, not of the real thing.
    assert sizes("ogbn-arxiv", ogb_cache).n == X.shape[0]
    assert load("ogbn-arxiv", ogb_cache, features=False).X is None


def test_a_truncated_download_is_named_and_leaves_no_cache(ogb_cache):
    arrays = contents()
    X, at = arrays["node_feat"], write_arxiv(ogb_cache, arrays)
    path = at / "raw" / "node-feat.csv.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RuntimeError, match=r"is damaged, delete the folder .*ogbn_arxiv and load"):
        load("ogbn-arxiv", ogb_cache)
    assert not list((ogb_cache / "cache").rglob("*"))
    path.write_bytes(whole)
    assert np.allclose(load("ogbn-arxiv", ogb_cache).X, X, atol=1e-6)


def test_proteins_from_the_name_to_the_table(ogb_cache, capsys, monkeypatch):
    """112 tasks, no node features: ROC-AUC as OGB's own evaluator computes it."""
    from ogb.nodeproppred import Evaluator

    from herta_gpu.app.cli import main

    rng, edges, _, split = arrays(n=60, m=300)
    split = {"train": np.arange(30), "valid": np.arange(30, 45), "test": np.arange(45, 60)}
    graph = {"edge_index": edges, "edge_feat": rng.random((300, 8)), "num_nodes": 60}
    labels = rng.integers(0, 2, (60, 112))
    meta = saved_by_ogb("ogbn-protein-like", graph, labels, split, metric="rocauc", classes=2)
    data = load_ogb("ogbn-protein-like", meta_dict=meta)  # from now on in the cache
    monkeypatch.setitem(ogb.SHAPES, "ogbn-protein-like", (60, 300, 8, 112, 30))
    argv = ["train", "ogbn-protein-like", "--ridge", "0.1", "--quiet"]
    capsys.readouterr()  # ogb's saver talks
    assert main([*argv, "--out", "run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["metric"], answer["features"], answer["outputs"]) == ("rocauc", 8, 112)
    assert main(["predict", "run", "ogbn-protein-like", "--quiet"]) == 0
    Z = np.load("run/predictions.npz")["scores"]
    for part, ids in split.items():
        both = {"y_true": labels[ids], "y_pred": Z[ids]}
        theirs = Evaluator("ogbn-proteins").eval(both)["rocauc"]
        assert answer["scores"][part] == pytest.approx(theirs, abs=1e-6)
    assert data.num_classes == 112


def test_ogb_missing_names_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.setenv("HERTA_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(ImportError, match=r'pip install "herta_gpu\[ogb\]"'):
        load("ogbn-products", tmp_path)
