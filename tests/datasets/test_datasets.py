"""Named datasets and their files against independent truth: SciPy and files the tests write."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph
from herta_gpu.datasets import (
    Dataset,
    load,
    load_planetoid,
    names,
    sizes,
)
from herta_gpu.datasets.ogb import read_dataset, write_dataset
from herta_gpu.plumbing.files import new_file

SHARED = os.environ.get("HERTA_DATA", "")
needs_shared = pytest.mark.skipif(
    not (SHARED and Path(SHARED, "cora.npz").is_file()), reason="HERTA_DATA has no cora.npz"
)


def small(n: int = 40, d: int = 5, c: int = 3, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    graph = Graph.from_edges(rng.integers(0, n, (2, 3 * n)), n)
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


def test_flipped_byte_in_npz_is_named(tmp_path):
    data = bytearray(save_npz(tmp_path / "mine.npz", small()).read_bytes())
    at = data.find(small().X.tobytes()[:16])
    assert at > 0
    data[at] ^= 0xFF
    (tmp_path / "bad.npz").write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"bad\.npz is damaged: its entry features"):
        load("bad", tmp_path)


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
@pytest.mark.parametrize("name", ["digits", "synthetic:n=50,m=99,d=3,c=2", "mine", "cora"])
def test_edges_can_be_had_alone(name, tmp_path):
    save_npz(tmp_path / "mine.npz", small())
    write_planetoid(tmp_path)
    whole, edges = load(name, tmp_path), load(name, tmp_path, features=False)
    assert edges.X is None
    assert (edges.graph.indices == whole.graph.indices).all()
    assert (edges.y == whole.y).all()
    assert "no features" in repr(edges)
    assert f"x {whole.X.shape[1]}" in repr(whole)


def test_a_wrong_name_lists_close_ones(monkeypatch):
    monkeypatch.delenv("HERTA_DATA", raising=False)
    with pytest.raises(ValueError, match="did you mean ogbn-products"):
        load("ogb-products")
    with pytest.raises(
        ValueError,
        match=r"there are citeseer, cora, digits.*; qqqqqqqq\.npz there, with edge_index",
    ):
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


def test_half_precision_features_train_like_the_same_numbers_in_single(tmp_path):
    data = small()
    half = data.X.astype(np.float16)
    data.X = half
    stored = load("half", save_npz(tmp_path / "half.npz", data).parent)
    assert stored.X.dtype == np.float16
    model = [
        HERTA(ridge=0.1).fit(data.graph, X, data.y, data.split["train"])
        for X in (stored.X, half.astype(np.float32))
    ]
    assert np.allclose(model[0].W_, model[1].W_, rtol=1e-6, atol=1e-9)
    for how in ("row", "standard"):
        assert stored.normalized(how).X.dtype == np.float32


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
    for name, cut in (("node_feat", "is not a whole array"), ("train", "is not a whole array")):
        path = tmp_path / "c" / f"{name}.npy"
        whole = path.read_bytes()
        path.write_bytes(whole[:-8])
        with pytest.raises(ValueError, match=rf"{name}\.npy {cut} .*: delete the folder"):
            read_dataset(tmp_path / "c")
        path.write_bytes(whole)
    y = np.load(tmp_path / "c" / "node_label.npy")
    np.save(tmp_path / "c" / "node_label.npy", np.roll(y, 1))
    with pytest.raises(ValueError, match=r"node_label\.npy was altered"):
        read_dataset(tmp_path / "c")
    (tmp_path / "c" / "meta.json").write_text("{")
    with pytest.raises(ValueError, match="holds no dataset: delete the folder"):
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


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    """kill -9 leaves no chance to clean up: half a dataset may be tens of gigabytes."""
    code = (
        "import sys; from pathlib import Path\n"
        "from herta_gpu.plumbing.files import new_file, new_folder\n"
        "at = Path(sys.argv[1])\n"
        "with new_folder(at / 'c') as folder, new_file(at / 'a.npy') as file:\n"
        "    (folder / 'X.npy').write_bytes(b'half'); file.write_bytes(b'half')\n"
        "    print('writing', flush=True); sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as writer:
        assert writer.stdout.readline() == b"writing\n"
        for left in tmp_path.iterdir():
            os.utime(left, (0, 0))  # old enough to be looked at
        write_dataset(tmp_path / "c", small())
        assert len(list(tmp_path.glob(".*"))) == 2  # the writer lives: its files are not touched
        writer.kill()
    assert len(list(tmp_path.glob(".*"))) == 2
    with new_file(tmp_path / "a.npy") as file:
        file.write_bytes(b"whole")
    write_dataset(tmp_path / "c", small())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npy", "c"]
    assert (read_dataset(tmp_path / "c").y == small().y).all()
