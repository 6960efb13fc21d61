"""Every bad input has its sentence: one row each, in one of the tables below.

A row says what is done, how it ends, and words of the sentence.  Whatever is done, nothing is left
behind on disk, nothing that was there is lost, and nobody is told to load a pickle.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph, SDDSolver, Sparsifier
from herta_gpu.app import train as train_command
from herta_gpu.app.cli import main
from herta_gpu.app.runs import Run, load_model, read_config, save_model
from herta_gpu.app.tune import tune
from herta_gpu.datasets import DataError, Dataset, load, load_npz, load_tables
from herta_gpu.datasets.dataset import checked_split

N, D = 30, 4
RNG = np.random.default_rng(0)
EDGES = np.stack([np.arange(N), (np.arange(N) + 1) % N])
G = Graph.from_edges(EDGES)
X = RNG.standard_normal((N, D))
Y = np.arange(N) % 3
NAMES = np.array(["red", "green", "blue"])[Y]
SPARSE = sp.csr_array(X)
MODEL = HERTA(ridge=0.1).fit(G, X, Y)
HTML = b"<!DOCTYPE html><html><body>404: not found</body></html>"


# ---- small files ----------------------------------------------------------------------------
def npz(folder: Path, drop: tuple[str, ...] = (), **change: Any) -> Path:
    """A dataset that can be trained on, but for what is changed or dropped."""
    arrays: dict[str, Any] = {"edge_index": EDGES, "num_nodes": N, "features": X, "labels": Y}
    arrays |= {"train": np.arange(15), "valid": np.arange(15, 20), "test": np.arange(20, N)}
    arrays |= change
    path = folder / "data.npz"
    np.savez(path, **{key: value for key, value in arrays.items() if key not in drop})
    return path


def sparse_npz(folder: Path, **change: Any) -> Path:
    parts = {"data": SPARSE.data, "indices": SPARSE.indices, "indptr": SPARSE.indptr}
    keys = {f"feature_{key}": value for key, value in parts.items()}
    return npz(folder, drop=("features",), **{**keys, "feature_shape": (N, D), **change})


def tables(folder: Path, **content: Any) -> Path:
    """A folder of tables; text as it is, arrays as .npy, None: no such file."""
    place = folder / "tables"
    place.mkdir()
    rows = {"edges": "\n".join(f"{u},{v}" for u, v in EDGES.T) + "\n"}
    rows |= {"features": X, "labels": Y, "train": np.arange(15), "test": np.arange(20, N)}
    for name, value in {**rows, **content}.items():
        if isinstance(value, str):
            (place / f"{name}.csv").write_text(value)
        elif isinstance(value, bytes):
            (place / f"{name}.npy").write_bytes(value)
        elif value is not None:
            np.save(place / f"{name}.npy", value)
    return place


def raw(folder: Path, content: bytes, name: str = "data.npz") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def cut(path: Path, share: float) -> Path:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    return path


def absurd(folder: Path) -> Path:
    """The header of the features says 10^12 rows, and there are none."""
    import io
    import zipfile

    path, header = npz(folder, drop=("features",)), io.BytesIO()
    about = {"descr": "<f8", "fortran_order": False, "shape": (10**12, 4)}
    np.lib.format.write_array_header_1_0(header, about)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("features.npy", header.getvalue())
    return path


def a_run(folder: Path) -> Path:
    """A run as the command line leaves it."""
    place = folder / "run"
    code = main(["train", str(npz(folder)), "--ridge", "0.1", "--quiet", "--out", str(place)])
    assert code == 0
    return place


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("finished"))


def with_config(run: Path, **change: Any) -> Path:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, **change}))
    return run


def model_file(folder: Path, drop: tuple[str, ...] = (), about: Any = None, **change: Any) -> Path:
    """A stored model, but for what is changed; `about` may be text or entries to change."""
    path = folder / "model.npz"
    save_model(MODEL, path)
    with np.load(path) as stored:
        arrays = dict(stored)
    if isinstance(about, dict):
        about = json.dumps({**json.loads(str(arrays["about"])), **about})
    arrays |= {} if about is None else {"about": about}
    np.savez(path, **{k: v for k, v in {**arrays, **change}.items() if k not in drop})
    return path


# ---- what must be true of every row ---------------------------------------------------------
def listing(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder, hidden ones, too, with what is in it."""
    found = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in found}


def check_text(text: str, words: str) -> None:
    assert words.lower() in text.lower(), text
    assert "pickle" not in text.lower()
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) == 1, text


def refused(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as found:
        call()
    check_text(str(found.value), words)


# ---- Python: arrays -------------------------------------------------------------------------
def masked(array: Any) -> Any:
    return np.ma.masked_array(array, mask=np.zeros(array.shape, dtype=bool))


def fit(**change: Any) -> Any:
    params = change.pop("params", {})
    given = {"graph": G, "X": X, "y": Y, "train": None, **change}
    return HERTA(**params).fit(**given)


def search(X: Any = X, split: Any = None, **grid: Any) -> Any:
    split = {"train": np.arange(9), "valid": np.arange(9, 15)} if split is None else split
    return tune(Dataset("mine", G, X, Y, split), **grid)


def broken() -> Any:
    """A sparse matrix with an entry outside."""
    made = sp.csr_array(X)
    made.indices[0] = 99
    return made


OBJECTS = np.array([["a", 1]] * N, dtype=object)
ARRAYS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("X masked", lambda: fit(X=masked(X)), ValueError, "X is a masked array"),
    ("X complex", lambda: fit(X=X + 0j), ValueError, "real numbers, not complex"),
    ("X sparse complex", lambda: fit(X=SPARSE.astype(complex)), ValueError, "real numbers"),
    ("X text", lambda: fit(X=X.astype(str)), ValueError, "real numbers"),
    ("X dates", lambda: fit(X=X.astype("datetime64[s]")), ValueError, "real numbers"),
    ("X objects", lambda: fit(X=OBJECTS), ValueError, "real numbers, not object"),
    ("X 0-d", lambda: fit(X=np.array(1.0)), ValueError, "one or two dimensions, not 0"),
    ("X 3-d", lambda: fit(X=X[:, :, None]), ValueError, "one or two dimensions, not 3"),
    ("X None", lambda: fit(X=None), ValueError, "X is None"),
    ("X ragged", lambda: fit(X=[[1.0], [1.0, 2.0]]), ValueError, "differ in length"),
    ("X without columns", lambda: fit(X=X[:, :0]), ValueError, "X has no columns"),
    ("y masked", lambda: fit(y=masked(Y)), ValueError, "y is a masked array"),
    ("y None", lambda: fit(y=None), ValueError, "y is None"),
    ("y 0-d", lambda: fit(y=np.array(1)), ValueError, "one row per node"),
    ("y 3-d", lambda: fit(y=np.zeros((N, 1, 1))), ValueError, "one row per node"),
    ("y complex", lambda: fit(y=Y + 0j), ValueError, "whole numbers, text or floats"),
    ("y dates", lambda: fit(y=Y.astype("datetime64[s]")), ValueError, "text or floats"),
    ("y of two kinds", lambda: fit(y=np.array(["a", 1] * 15, dtype=object)), ValueError, "kinds"),
    ("y below -1", lambda: fit(y=Y - 2), ValueError, "the label -2"),
    ("y beyond int64", lambda: fit(y=Y.astype("u8") + 2**63), ValueError, "from 0 on"),
    ("y text without any", lambda: fit(y=np.full(N, "")), ValueError, "no training node"),
    ("y text in columns", lambda: fit(y=np.full((N, 2), "a")), ValueError, "one text label"),
    ("train masked", lambda: fit(train=masked(np.arange(5))), ValueError, "masked array"),
    ("train 1.5", lambda: fit(train=[0.0, 1.5]), ValueError, "node ids or a mask"),
    ("train text", lambda: fit(train=["a"]), ValueError, "node ids or a mask"),
    ("train 0-d", lambda: fit(train=3), ValueError, "one-dimensional"),
    ("train 2-d", lambda: fit(train=[[1, 2]]), ValueError, "one-dimensional"),
    ("train huge", lambda: fit(train=np.array([2**63], "u8")), ValueError, "ids must lie in"),
    ("train short mask", lambda: fit(train=np.ones(3, bool)), ValueError, "must have shape (30,)"),
    ("precondition", lambda: fit(params={"precondition": "x"}), ValueError, "precondition must"),
    ("dtype None", lambda: fit(params={"dtype": None}), ValueError, "dtype must be one of"),
    ("dtype int", lambda: fit(params={"dtype": int}), ValueError, "dtype must be one of"),
    ("dtype object", lambda: fit(params={"dtype": object()}), ValueError, "dtype must be one of"),
    ("seed", lambda: fit(params={"random_state": 10**30}), ValueError, "must be at most"),
    ("rate", lambda: fit(params={"learning_rate": "fast"}), ValueError, "learning_rate must be"),
    ("y huge", lambda: fit(y=Y * 1e100), ValueError, "divide y by that"),
    ("ridge huge", lambda: fit(params={"ridge": 1e300}), ValueError, "ridge must be at most"),
    ("X sparse 1-d", lambda: fit(X=sp.coo_array(X[:, 0])), ValueError, "must have two dimensions"),
    ("X sparse broken", lambda: fit(X=broken()), ValueError, "X is no whole sparse matrix"),
    ("callback", lambda: fit(callback=3), TypeError, "callback must be a function"),
    ("checkpoint", lambda: fit(checkpoint="x"), TypeError, "checkpoint must be a Checkpoint"),
    ("tune ridge", lambda: search(ridges=[-1]), ValueError, "ridge must not be negative"),
    ("tune loss", lambda: search(losses=["x"]), ValueError, "loss must be one of"),
    ("tune train", lambda: search(split={"valid": [3]}), DataError, "no train"),
    ("tune features", lambda: search(X=X + 0j), ValueError, "real numbers"),
    ("tune overlap", lambda: search(split={"train": [3], "valid": [3]}), DataError, "overlap"),
    ("split 3", lambda: Dataset("d", G, X, Y, {}).with_split(3), ValueError, "random:0.8"),
    ("name 3", lambda: load(3), TypeError, "a name or a path, not int"),
    ("plan of 0 nodes", lambda: HERTA().plan(0, 1, 1, 1, 1), ValueError, "n must be an integer"),
    ("plan of 1.5", lambda: HERTA().plan(9, 1.5, 1, 1, 1), ValueError, "m must be an integer"),
    ("plan of more", lambda: HERTA().plan(9, 9, 1, 1, 10), ValueError, "n_train is 10"),
    ("predict None", lambda: MODEL.predict(G, None), ValueError, "X is None"),
    ("predict NaN", lambda: MODEL.predict(G, X * np.nan), ValueError, "NaN or infinity"),
    ("overflow", lambda: MODEL.transform(G, X * 1e38), ValueError, "overflows"),
    ("overflow, ints", lambda: MODEL.predict(G, np.full((N, D), 2**60)), ValueError, "overflows"),
    ("overflow, sparse", lambda: MODEL.transform(G, SPARSE * 1e300), ValueError, "overflows"),
    ("score None", lambda: MODEL.score(G, X, None), ValueError, "y is None"),
    ("score 0-d", lambda: MODEL.score(G, X, np.array(3)), ValueError, "one row per node"),
    ("score 2-d", lambda: MODEL.score(G, X, np.eye(N)), ValueError, "one number per node"),
    ("score text", lambda: MODEL.score(G, X, NAMES), ValueError, "one number per node"),
    ("score length", lambda: MODEL.score(G, X, Y[:5]), ValueError, "y has shape (5,)"),
    ("B masked", lambda: SDDSolver(G).solve(masked(X)), ValueError, "B is a masked array"),
    ("B complex", lambda: SDDSolver(G).solve(X + 0j), ValueError, "B must hold real numbers"),
    ("B None", lambda: SDDSolver(G).solve(None), ValueError, "B is None"),
    ("solver dtype", lambda: SDDSolver(G, dtype=None), ValueError, "dtype must be one of"),
    ("sparsifier dtype", lambda: Sparsifier(dtype=None).fit(G), ValueError, "dtype must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), [row[1:] for row in ARRAYS],
                         ids=[row[0] for row in ARRAYS])  # fmt: skip
def test_arrays(call, kind, words):
    refused(kind, words, call)


def edges(edge_index: Any, **options: Any) -> Any:
    return lambda: Graph.from_edges(edge_index, **options)


GRAPHS: list[tuple[str, Callable[[], Any], str]] = [
    ("huge id", edges([[0, 2**31], [1, 2]]), "ids must be 0..n-1"),
    ("huge id names it", edges([[0, 2**40], [1, 2]]), "node id 1,099,511,627,776"),
    ("beyond int64", edges(np.array([[0], [2**63 + 5]], dtype="u8")), "ids must be 0..n-1"),
    ("huge num_nodes", edges([[0], [1]], num_nodes=10**13), "num_nodes is 10,000,000,000,000"),
    ("num_nodes 300.7", edges(EDGES, num_nodes=300.7), "num_nodes must be"),
    ("num_nodes True", edges(EDGES, num_nodes=True), "num_nodes must be"),
    ("masked ids", edges(masked(EDGES)), "edge_index is a masked array"),
    ("masked weights", edges(EDGES, edge_weight=masked(np.ones(N))), "edge_weight is a masked"),
    ("ragged weights", edges(EDGES, edge_weight=[[1], [1, 2]]), "edge_weight must have shape"),
    ("complex weights", edges(EDGES, edge_weight=np.ones(N) + 0j), "real numbers"),
    ("objects", edges(EDGES.astype(object)), "must hold integers, not object"),
    ("None", edges(None), "shape (2, m)"),
    ("3-d", edges(np.zeros((2, 3, 4), int)), "shape (2, m)"),
    ("bool", edges(EDGES > 3), "must hold integers, not bool"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), [row[1:] for row in GRAPHS],
                         ids=[row[0] for row in GRAPHS])  # fmt: skip
def test_graphs(call, words):
    refused(ValueError, words, call)


# ---- files of data, read by Python, by `herta train` and by `herta plan` ---------------------
FILES: list[tuple[str, Callable[[Path], Path], str]] = [
    ("features 0-d", lambda f: npz(f, features=1.0), "features must have one row per node"),
    ("features 1-d", lambda f: npz(f, features=X[:, 0]), "features must have one row per node"),
    ("features 3-d", lambda f: npz(f, features=X[None]), "features must have one row per node"),
    ("features complex", lambda f: npz(f, features=X + 0j), "real numbers, not complex128"),
    ("features text", lambda f: npz(f, features=X.astype(str)), "real numbers"),
    ("features dates", lambda f: npz(f, features=X.astype("M8[s]")), "real numbers"),
    ("features objects", lambda f: npz(f, features=X.astype(object)), "holds Python objects"),
    ("features short", lambda f: npz(f, features=X[:7]), "features has 7 rows"),
    ("features absurd", absurd, "its entry features cannot be read (it is cut short)"),
    ("sparse complex", lambda f: sparse_npz(f, feature_data=SPARSE.data + 0j), "real numbers"),
    ("sparse shape", lambda f: sparse_npz(f, feature_shape=(N,)), "feature_shape must be"),
    ("sparse short", lambda f: sparse_npz(f, feature_shape=(7, D)), "features has 7 rows"),
    ("sparse 2-d", lambda f: sparse_npz(f, feature_data=X), "one dimension, not 2"),
    ("sparse in part", lambda f: npz(f, drop=("features",), feature_data=X), "features lack"),
    ("labels 0-d", lambda f: npz(f, labels=1), "labels must have one row per node"),
    ("labels 3-d", lambda f: npz(f, labels=np.zeros((N, 1, 1))), "labels must have one row"),
    ("labels none", lambda f: npz(f, labels=np.zeros(0, int)), "labels has 0 rows"),
    ("labels short", lambda f: npz(f, labels=Y[:5]), "labels has 5 rows"),
    ("labels below -1", lambda f: npz(f, labels=Y - 3), "the label -3"),
    ("labels complex", lambda f: npz(f, labels=Y + 0j), "text or floats"),
    ("labels objects", lambda f: npz(f, labels=NAMES.astype(object)), "holds Python objects"),
    ("no_label_nodes", lambda f: npz(f, no_label_nodes=[999]), "no_label_nodes holds node id 999"),
    ("no_label_nodes -1", lambda f: npz(f, no_label_nodes=[-1]), "no_label_nodes holds node id -1"),
    ("no_label_nodes 0.5", lambda f: npz(f, no_label_nodes=[0.5]), "no_label_nodes must be"),
    ("valid only", lambda f: npz(f, drop=("train", "test")), "has valid but no train"),
    ("no train", lambda f: npz(f, drop=("train",)), "has valid and test but no train"),
    ("train empty", lambda f: npz(f, train=np.zeros(0, int)), "no training node"),
    ("train 1.5", lambda f: npz(f, train=[0.0, 1.5]), "1.5 is no node id"),
    ("train NaN", lambda f: npz(f, train=[0.0, np.nan]), "node ids or a mask"),
    ("train text", lambda f: npz(f, train=["a"]), "node ids or a mask"),
    ("train 0-d", lambda f: npz(f, train=3), "one-dimensional"),
    ("train 2-d", lambda f: npz(f, train=[[1], [2]]), "one-dimensional"),
    ("train twice", lambda f: npz(f, train=[1, 1]), "train names a node more than once"),
    ("train outside", lambda f: npz(f, train=[1, N]), "train holds node id 30"),
    ("train huge", lambda f: npz(f, train=[1e300]), "ids must lie in 0..29"),
    ("test negative", lambda f: npz(f, test=[-1]), "test holds node id -1"),
    ("short mask", lambda f: npz(f, train=np.ones(N - 1, bool)), "mask train must have shape"),
    ("train and test", lambda f: npz(f, test=np.arange(10, 20)), "overlap"),
    ("train is test", lambda f: npz(f, test=np.arange(15)), "train and test overlap, in 15 nodes"),
    ("valid and test", lambda f: npz(f, valid=[25, 26]), "valid and test overlap"),
    ("masks overlap", lambda f: npz(f, test=np.ones(N, bool)), "overlap"),
    ("num_nodes 300.7", lambda f: npz(f, num_nodes=300.7), "whole number, not 300.7"),
    ("num_nodes NaN", lambda f: npz(f, num_nodes=np.nan), "whole number, not nan"),
    ("num_nodes text", lambda f: npz(f, num_nodes="30"), "num_nodes must be"),
    ("num_nodes two", lambda f: npz(f, num_nodes=[30, 30]), "num_nodes must be"),
    ("num_nodes -1", lambda f: npz(f, num_nodes=-1), "whole number, not -1"),
    ("num_nodes 0", lambda f: npz(f, num_nodes=0), "whole number, not 0"),
    ("num_nodes huge", lambda f: npz(f, num_nodes=10**13), "30 rows"),
    ("edges turned", lambda f: npz(f, edge_index=EDGES.T), "transpose it"),
    ("edges float", lambda f: npz(f, edge_index=EDGES * 1.0), "edge_index must hold integers"),
    ("edges 0-d", lambda f: npz(f, edge_index=3), "edge_index must have shape"),
    ("no edges", lambda f: npz(f, drop=("edge_index",)), "it is no graph dataset"),
    ("a web page", lambda f: raw(f, HTML), "it is a web page"),
    ("garbage", lambda f: raw(f, bytes(range(256))), "some other kind of file"),
    ("Python objects", lambda f: raw(f, b"\x80\x04\x95\x05\x00"), "some other kind of file"),
    ("empty", lambda f: raw(f, b""), "it is empty"),
    ("git lfs", lambda f: raw(f, b"version https://git-lfs.github.com/spec/v1"), "Git LFS"),
    ("one array", lambda f: raw(f, tables(f, y=Y).joinpath("y.npy").read_bytes()), "single array"),
    ("cut in half", lambda f: cut(npz(f), 0.5), "cut short"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), [row[1:] for row in FILES],
                         ids=[row[0] for row in FILES])  # fmt: skip
def test_files(make, words, tmp_path, capsys, monkeypatch):
    path = make(tmp_path)
    monkeypatch.setattr(HERTA, "fit", lambda *args, **more: pytest.fail("the fit has begun"))
    before = listing(tmp_path)
    run = str(tmp_path / "new" / "run")
    for argv in (["train", "--out", run], ["tune"], ["plan"], ["compare"], ["profile"]):
        assert main([argv[0], str(path), *argv[1:], "--quiet"]) == 1
        shown = capsys.readouterr()
        check_text(shown.err, words)
        assert shown.out == ""
    refused(DataError, words, lambda: load_npz(path).with_split(None))
    assert listing(tmp_path) == before


ONLY_LOADED = [  # what a plan, which reads no edges and no features, does not see
    ("edge outside", lambda f: npz(f, edge_index=[[0], [30]]), 1, "node id 30, but ids must lie"),
    ("edge negative", lambda f: npz(f, edge_index=[[0], [-1]]), 1, "node id -1, but ids must lie"),
    ("sparse ids", lambda f: sparse_npz(f, feature_indices=SPARSE.indices + 9), 1, "fit together"),
    ("NaN", lambda f: npz(f, features=X * np.nan), 2, "X holds NaN"),
    ("too large", lambda f: npz(f, features=X * 1e38), 2, "multiply X"),
    ("NaN labels", lambda f: npz(f, labels=np.where(Y > 0, Y, np.nan)), 2, "NaN or infinity in a"),
    ("no features", lambda f: npz(f, drop=("features",)), 2, "has no features"),
    ("no columns", lambda f: npz(f, features=X[:, :0]), 2, "has no features"),
    ("no labels", lambda f: npz(f, drop=("labels",)), 2, "has no labels"),
    ("unlabelled", lambda f: npz(f, labels=Y - 1), 2, "which has no label"),
    ("all unlabelled", lambda f: npz(f, labels=Y * 0 - 1), 2, "which has no label"),
    ("nothing to split", lambda f: npz(f, ("train", "valid", "test"), labels=Y * 0 - 1), 2,
     "no node with a label"),
    ("too little memory", lambda f: npz(f), 1, "raise memory_budget"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "code", "words"), [row[1:] for row in ONLY_LOADED],
                         ids=[row[0] for row in ONLY_LOADED])  # fmt: skip
def test_a_run_that_is_refused_leaves_the_old_one(make, code, words, tmp_path, capsys, finished):
    shutil.copytree(finished, tmp_path / "old")
    path = make(tmp_path)
    budget = ["--memory-budget", "1KB"] if "budget" in words else []
    before = listing(tmp_path)
    for out in (["--out", str(tmp_path / "new")], ["--out", str(tmp_path / "old"), "--overwrite"]):
        assert main(["train", str(path), *out, *budget, "--quiet"]) == code
        check_text(capsys.readouterr().err, words)
        assert listing(tmp_path) == before


TABLES: list[tuple[str, dict[str, Any], str]] = [
    ("features complex", {"features": X + 0j}, "real numbers, not complex"),
    ("features text", {"features": X.astype(str)}, "real numbers"),
    ("features 0-d", {"features": np.array(1.0)}, "not 0 dimensions"),
    ("features 3-d", {"features": X[None]}, "not 3 dimensions"),
    ("features of a web page", {"features": HTML}, "it is a web page"),
    ("features empty", {"features": b""}, "it is empty"),
    ("labels short", {"labels": Y[:5]}, "each needs one row per node"),
    ("labels below -1", {"labels": Y - 3}, "classes from 0 on"),
    ("labels dates", {"labels": Y.astype("M8[s]")}, "real numbers"),
    ("a slip in labels", {"labels": "0\n" * (N - 1) + "1x\n"}, "not a table of numbers"),
    ("train 1.5", {"train": np.array([0.0, 1.5])}, "integer node ids"),
    ("train outside", {"train": np.array([1, N])}, "names node 30"),
    ("train twice", {"train": np.array([1, 1])}, "more than once"),
    ("train in two columns", {"train": np.array([[1, 2]])}, "one column of node ids"),
    ("train and test", {"test": np.arange(5)}, "train and test overlap"),
    ("no train", {"train": None}, "has test but no train"),
    ("edge outside", {"edges": "0,1\n3,30\n"}, "names node 30"),
    ("edge 0.5", {"edges": "0,1\n3,0.5\n"}, "integer node ids"),
    ("edge huge", {"edges": "0,1\n3,1e300\n"}, "integer node ids"),
    ("bad weight", {"edges": "0,1,1\n3,4,-2\n"}, "must not be negative"),
    ("huge id", {"edges": "0,4000000000\n", "features": None, "labels": None}, "relabel them"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "words"), [row[1:] for row in TABLES],
                         ids=[row[0] for row in TABLES])  # fmt: skip
def test_tables(content, words, tmp_path, capsys):
    if content.get("edges"):
        content = {**content, "train": None, "test": None}
    place = tables(tmp_path, **content)
    before = listing(tmp_path)
    refused(DataError, words, lambda: load_tables(place).with_split(None))
    for command in ("train", "plan"):
        assert main([command, f"{place}/", "--quiet"]) == 1
        check_text(capsys.readouterr().err, words)
    assert listing(tmp_path) == before


# ---- stored models and runs -----------------------------------------------------------------
W, CLASSES = MODEL.W_, MODEL.classes_
MODELS: list[tuple[str, Callable[[Path], Path], str]] = [
    ("a web page", lambda f: raw(f, HTML, "model.npz"), "it is a web page"),
    ("garbage", lambda f: raw(f, bytes(range(256)), "model.npz"), "is not a whole model file"),
    ("Python objects", lambda f: raw(f, b"\x80\x04N.", "model.npz"), "is not a whole model file"),
    ("empty", lambda f: raw(f, b"", "model.npz"), "it is empty"),
    ("cut", lambda f: cut(model_file(f), 0.7), "is not a whole model file"),
    ("one array", lambda f: raw(f, tables(f, y=Y).joinpath("y.npy").read_bytes(), "model.npz"),
     "it is a single array"),
    ("NaN", lambda f: model_file(f, W=W * np.nan), "W holds NaN or infinity"),
    ("infinity", lambda f: model_file(f, W=W / 0.0), "W holds NaN or infinity"),
    ("W 1-d", lambda f: model_file(f, W=W[0]), "not a matrix of floats"),
    ("W 0-d", lambda f: model_file(f, W=1.0), "not a matrix of floats"),
    ("W empty", lambda f: model_file(f, W=W[:0]), "not a matrix of floats"),
    ("W complex", lambda f: model_file(f, W=W + 0j), "not a matrix of floats"),
    ("W text", lambda f: model_file(f, W=W.astype(str)), "not a matrix of floats"),
    ("W objects", lambda f: model_file(f, W=W.astype(object)), "holds Python objects"),
    ("no W", lambda f: model_file(f, drop=("W",)), "has no entry W"),
    ("too few classes", lambda f: model_file(f, classes=CLASSES[:2]), "W has 3 columns"),
    ("equal classes", lambda f: model_file(f, classes=CLASSES * 0), "not distinct"),
    ("float classes", lambda f: model_file(f, classes=CLASSES * 1.0), "not distinct"),
    ("no about", lambda f: model_file(f, drop=("about",)), "has no entry about"),
    ("about empty", lambda f: model_file(f, about=""), "is not a whole model file"),
    ("about {}", lambda f: model_file(f, about="{}"), "has no entry params"),
    ("about []", lambda f: model_file(f, about="[]"), "it is a list"),
    ("about null", lambda f: model_file(f, about="null"), "not an object"),
    ("about an array", lambda f: model_file(f, about=np.zeros(0)), "about is no text"),
    ("no params", lambda f: model_file(f, about={"params": []}), "its entry params is []"),
    ("unknown", lambda f: model_file(f, about={"params": {"x": 1}}), "no parameter 'x'"),
    ("wrong", lambda f: model_file(f, about={"params": {"lam": "1"}}), "lam must be a number"),
    ("dtype", lambda f: model_file(f, about={"params": {"dtype": "f"}}), "dtype must be one of"),
    ("flat", lambda f: model_file(f, about={"flat": 7}), "its entry flat is 7"),
    ("bound", lambda f: model_file(f, about={"certificate": {"x": 1}}), "not a whole model file"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), [row[1:] for row in MODELS],
                         ids=[row[0] for row in MODELS])  # fmt: skip
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_models(make, words, tmp_path, capsys, finished):
    path = make(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.copy(path, run / "model.npz")
    before = listing(tmp_path)
    refused(DataError, words, lambda: load_model(path))
    assert main(["predict", str(run), str(finished.parent / "data.npz"), "--quiet"]) == 1
    check_text(capsys.readouterr().err, words)
    assert listing(tmp_path) == before


CONFIGS: list[tuple[str, Any, str]] = [
    ("{}", "{}", "has no entry dataset"),
    ("[]", "[]", "it is a list"),
    ("[1]", "[1]", "it is a list"),
    ("a number", "7", "it is a int"),
    ("empty", "", "is damaged"),
    ("cut", '{"dataset": "di', "is damaged"),
    ("a web page", HTML.decode(), "is damaged"),
    ("no text", b"\xff\xfe\x00", "is damaged"),
    ("dataset", {"dataset": 3}, "its entry dataset is 3"),
    ("split", {"split": []}, "its entry split is []"),
    ("log_degree", {"log_degree": "yes"}, "its entry log_degree is 'yes'"),
    ("normalize", {"normalize": "max"}, "normalize must be one of"),
    ("params", {"params": None}, "its entry params is None"),
    ("params of others", {"params": {"depth": 3}}, "no parameter 'depth'"),
    ("a wrong type", {"params": {"lam": "big"}}, "lam must be a number"),
    ("a wrong value", {"params": {"lam": -1}}, "lam must be a positive number"),
    ("environment", {"environment": []}, "its entry environment is []"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "words"), [row[1:] for row in CONFIGS],
                         ids=[row[0] for row in CONFIGS])  # fmt: skip
def test_configs(content, words, tmp_path, capsys, finished):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    if isinstance(content, dict):
        with_config(run, **content)
    else:
        (run / "config.json").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    before = listing(run)
    refused(DataError, words, lambda: read_config(run))
    for argv in (["predict", str(run), "digits"], ["train", "--resume", str(run)]):
        assert main([*argv, "--quiet"]) == 1
        check_text(capsys.readouterr().err, words)
    assert listing(run) == before


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"dataset": 3}', "nonsense"])
def test_a_damaged_result(content, tmp_path, capsys, finished):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "result.json").write_text(content)
    before = listing(run)
    assert main(["train", "--resume", str(run), "--quiet"]) == 1
    check_text(capsys.readouterr().err, "result.json is damaged")
    assert listing(run) == before


# ---- the command line -----------------------------------------------------------------------
COMMANDS: list[tuple[list[str], int, str]] = [
    (["train", "digits", "--out", ""], 2, "--out is empty"),
    (["tune", "digits", "--out", ""], 2, "--out is empty"),
    (["compare", "digits", "--out", ""], 2, "--out is empty"),
    (["profile", "digits", "--out", ""], 2, "--out is empty"),
    (["predict", "FINISHED", "digits", "--to", ""], 2, "--to is empty"),
    (["predict", "", "digits"], 2, "RUN is empty"),
    (["train", "--resume", ""], 2, "--resume is empty"),
    (["train", "digits", "--data-dir", ""], 2, "--data-dir is empty"),
    (["plan", ""], 2, "DATASET is empty"),
    (["train", "digits", "--memory-budget", ""], 2, "--memory-budget is empty"),
    (["plan", "digits", "--memory-budget", "lots"], 2, "memory_budget must be"),
    (["plan", "digits", "--lam", "-1"], 2, "lam must be a positive number"),
    (["plan", "digits", "--tol", "nan"], 2, "tol must be a positive number"),
    (["train", "digits", "--seed", "99999999999999999999"], 2, "random_state must be at most"),
    (["train", "digits", "--out", "file"], 2, "is a file"),
    (["train", "digits", "--out", "file/run"], 2, "is a file"),
    (["profile", "digits", "--out", "folder"], 2, "is a folder"),
    (["compare", "digits", "--out", "folder"], 2, "is a folder"),
    (["compare", "digits", "--out", "picture.gif"], 2, "must be one of"),
    (["predict", "FINISHED", "digits", "--to", "folder.npz"], 2, "is a folder"),
    (["predict", "FINISHED", "digits", "--to", "file/p.csv"], 2, "is a file"),
    (["predict", "FINISHED", "digits"], 2, "X has 65 features but the model was fitted with 4"),
    (["predict", "folder", "digits"], 1, "is no run"),
    (["train", "--resume", "folder"], 1, "is no run"),
    (["train", "./folder.npz"], 1, "is a folder"),
    (["train", "synthetic:n=1e13,m=1e13"], 2, "GB are free: give a smaller one"),
    (["train", "synthetic:n=inf"], 2, "is not a number"),
    (["train", "synthetic:n=nan"], 2, "is not a number"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "code", "words"), COMMANDS, ids=[" ".join(r[0]) for r in COMMANDS]
)
def test_commands(argv, code, words, tmp_path, capsys, monkeypatch, finished):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.npz").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HERTA, "fit", lambda *args, **more: pytest.fail("the fit has begun"))
    before, of_run = listing(tmp_path), listing(finished)
    assert main([str(finished) if a == "FINISHED" else a for a in argv] + ["--quiet"]) == code
    shown = capsys.readouterr()
    check_text(shown.err, words)
    assert shown.out == ""
    assert listing(tmp_path) == before
    assert listing(finished) == of_run


@pytest.mark.parametrize("command", ["train", "tune"])
def test_a_diverged_run_fails(command, tmp_path, capsys, monkeypatch):
    real = train_command.fit

    def diverged(*args: Any, **more: Any) -> Any:
        return replace(real(*args, **more), status="diverged")

    monkeypatch.setattr(train_command, "fit", diverged)
    assert main([command, str(npz(tmp_path)), "--quiet", "--out", str(tmp_path / "r")]) == 1
    assert "diverged" in capsys.readouterr().out
    if command == "train":
        assert main(["train", "--resume", str(tmp_path / "r"), "--quiet"]) == 1


def test_an_error_of_our_own_is_a_sentence_too(capsys, monkeypatch):
    monkeypatch.setattr("herta_gpu.app.train.load_for", lambda *args: {}["nothing"])
    assert main(["train", "digits", "--quiet"]) == 1
    check_text(capsys.readouterr().err, "An error of herta itself (KeyError: 'nothing')")


def herta(*argv: str, **more: Any) -> Any:
    command = [sys.executable, "-m", "herta_gpu", *argv]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, **more)


needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")


@needs_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("argv", [["info"], ["--help"], ["plan", "digits", "--json"]])
def test_standard_output_on_a_full_device(argv, unbuffered):
    with open("/dev/full", "w") as full:
        done = herta(*argv, stdout=full, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 1
    check_text(done.stderr, "could not be written to standard output (No space left")


@needs_full
def test_progress_that_cannot_be_shown_stops_nothing(tmp_path):
    command = [sys.executable, "-m", "herta_gpu", "train", "digits", "--out", str(tmp_path / "r")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stderr=full, stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0
    assert (tmp_path / "r" / "result.json").is_file()


def test_a_reader_who_leaves_is_no_failure():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        done = herta("info", stdout=pipe)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_while_it_is_imported():
    """As soon as `main` runs, wherever the signal falls among the imports."""
    code = (
        "import sys, threading, os, signal, time\n"
        "from herta_gpu.app.cli import main\n"
        "def stop():\n"
        "    while 'numpy' not in sys.modules: time.sleep(0.001)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=stop, daemon=True).start()\n"
        "sys.exit(main(['info']))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, "herta: Interrupted.\n")


def test_importing_the_command_line_takes_no_numpy():
    code = "import sys, herta_gpu.app.cli; assert not {'numpy', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("at", ["_write_config", "fit"])
def test_ctrl_c_before_a_run_has_begun_leaves_the_old_one(at, tmp_path, monkeypatch, finished):
    def stopped(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    shutil.copytree(finished, tmp_path / "run")
    path, before = npz(tmp_path), listing(tmp_path / "run")
    monkeypatch.setattr(f"herta_gpu.app.train.{at}", stopped)
    out = ["--out", str(tmp_path / "run"), "--overwrite", "--quiet"]
    assert main(["train", str(path), *out]) == 130
    kept = listing(tmp_path / "run")
    if at == "_write_config":
        assert kept == before
    else:  # it has begun: what was asked for is on disk, and can be gone on with
        assert set(kept) == {"config.json", ".lock"}


# ---- writing --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["model", "model.npz", "model.bin", "deep/er/model", ".hidden"])
def test_a_model_is_written_where_it_was_asked_for(name, tmp_path):
    path = tmp_path / name
    save_model(MODEL, path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
    assert (load_model(path).predict(G, X) == MODEL.predict(G, X)).all()
    save_model(MODEL, str(path))  # again, over itself
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


@pytest.mark.parametrize("dtype", [np.float64, np.dtype("float64"), float, "float64", np.float32])
def test_any_way_to_name_a_precision_is_stored(dtype, tmp_path):
    model = HERTA(dtype=dtype, ridge=0.1).fit(G, X, Y)
    save_model(model, tmp_path / "m")
    again = load_model(tmp_path / "m")
    assert again.dtype == np.dtype(dtype).name
    assert (again.transform(G, X) == model.transform(G, X)).all()


SAVES: list[tuple[str, Callable[[Path], Any], type[Exception], str]] = [
    ("not fitted", lambda f: save_model(HERTA(), f / "m"), RuntimeError, "not fitted yet"),
    ("no model", lambda f: save_model({}, f / "m"), TypeError, "save_model takes a fitted HERTA"),
    ("a folder", lambda f: save_model(MODEL, f), ValueError, "is a folder"),
    ("below a file", lambda f: save_model(MODEL, f / "file" / "m"), ValueError, "is a file"),
    ("empty", lambda f: save_model(MODEL, ""), ValueError, "is a folder"),
    ("load nothing", lambda f: load_model(f / "none"), FileNotFoundError, "no trained model"),
    ("load a folder", lambda f: load_model(f), FileNotFoundError, "no trained model"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), [row[1:] for row in SAVES],
                         ids=[row[0] for row in SAVES])  # fmt: skip
def test_saves(call, kind, words, tmp_path):
    (tmp_path / "file").write_text("mine")
    before = listing(tmp_path)
    refused(kind, words, lambda: call(tmp_path))
    assert listing(tmp_path) == before


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize("name", ["p.npz", "p.csv", "new/folder/p.npz"])
def test_a_disk_that_is_full_while_predictions_are_written(name, tmp_path, finished):
    data = str(finished.parent / "data.npz")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
    code = f"import sys; {limit} from herta_gpu.app.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = ["predict", str(finished), data, "--to", str(tmp_path / name), "--quiet"]
    (tmp_path / "p.npz").write_bytes(b"of before")
    before = listing(tmp_path)
    command = [sys.executable, "-B", "-c", code, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    check_text(done.stderr, "File too large")
    assert listing(tmp_path) == before


def test_a_run_that_fails_half_way_can_be_gone_on_with(tmp_path, monkeypatch, capsys):
    record = Run.record
    monkeypatch.setattr(Run, "record", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    argv = ["train", str(npz(tmp_path)), "--out", str(tmp_path / "r"), "--quiet"]
    assert main(argv) == 1
    check_text(capsys.readouterr().err, "disk full")
    monkeypatch.setattr(Run, "record", record)
    assert main(["train", "--resume", str(tmp_path / "r"), "--quiet"]) == 0


# ---- memory ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "params", [{}, {"loss": "ce"}, {"sketch": True}, {"dtype": "float64"}, {"precondition": False}]
)
def test_the_budget_that_is_named_is_enough(params):
    """And it is the same one whatever the budget that did not do."""
    data = load("synthetic:n=20000,m=60000,d=64,c=5")
    given = (data.graph, data.X, data.y, data.split["train"])
    named = set()
    for budget in (1000, 10**6, 3 * 10**6):
        with pytest.raises(MemoryError, match="needs at least") as found:
            HERTA(memory_budget=budget, **params).fit(*given)
        named.add(str(found.value).split("at least ")[1].partition(" MB")[0])
    assert len(named) == 1
    HERTA(memory_budget=f"{named.pop()}MB", max_iter=1, **params).fit(*given)


def test_ids_for_labels_are_refused_before_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr("herta_gpu.plumbing.estimator.host_memory", lambda: 1000)
    refused(ValueError, "give classes, not ids", lambda: fit(y=np.arange(N)))


# ---- what looks bad and is not --------------------------------------------------------------
MASK = np.arange(N) < 15


@pytest.mark.parametrize("mask", [MASK, MASK.astype(int), MASK.astype(float), MASK.astype("u1")])
def test_masks_are_splits(mask, tmp_path, capsys):
    path = npz(tmp_path, drop=("valid",), train=mask, test=1 - mask.astype(mask.dtype))
    data = load_npz(path)
    assert data.split["train"].tolist() == list(range(15))
    assert data.split["test"].tolist() == list(range(15, N))
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_train"] == 15
    if mask.dtype.kind in "biu":
        ours = HERTA(ridge=0.1).fit(G, X, Y, train=mask).W_
        assert (ours == HERTA(ridge=0.1).fit(G, X, Y, train=np.arange(15)).W_).all()


def test_a_mask_is_told_from_ids_where_it_can_be():
    assert checked_split("two", {"train": [0, 1]}, 2)["train"].tolist() == [0, 1]
    assert checked_split("two", {"train": [1, 0]}, 3)["train"].tolist() == [1, 0]
    assert checked_split("three", {"train": [1, 0, 0]}, 3)["train"].tolist() == [0]


def test_a_split_of_ones_own_may_not_overlap():
    data = Dataset("mine", G, X, Y, {"train": np.arange(5), "test": np.arange(4, 9)})
    refused(DataError, "train and test overlap", lambda: data.with_split("public"))
    refused(DataError, "train and test overlap", lambda: data.with_split(None))


def test_one_column_of_classes_is_classes(tmp_path):
    assert load_npz(npz(tmp_path, labels=Y[:, None])).y.tolist() == Y.tolist()


def test_num_nodes_may_be_a_whole_float_or_be_left_out(tmp_path):
    assert load_npz(npz(tmp_path, num_nodes=30.0)).graph.num_nodes == N
    assert load_npz(npz(tmp_path, num_nodes=[30])).graph.num_nodes == N
    assert load_npz(npz(tmp_path, drop=("num_nodes",))).graph.num_nodes == N


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_a_matrix_of_numpy_is_an_array():
    ours = HERTA(ridge=0.1).fit(G, np.matrix(X), Y)
    assert (ours.W_ == MODEL.W_).all()
    assert ours.transform(G, np.matrix(X)).shape == (N, 3)


LABELS = [NAMES, NAMES.astype(object), NAMES.astype("S"), NAMES.tolist()]


@pytest.mark.parametrize("labels", LABELS, ids=["text", "objects", "bytes", "list"])
def test_text_labels_in_python(labels, tmp_path):
    model = HERTA(ridge=0.1).fit(G, X, labels)
    assert model.classes_.tolist() == ["blue", "green", "red"]
    predicted = model.predict(G, X)
    assert (predicted == np.array(["red", "green", "blue"])[MODEL.predict(G, X)]).all()
    assert model.score(G, X, labels) == MODEL.score(G, X, Y)
    save_model(model, tmp_path / "m")
    assert (load_model(tmp_path / "m").predict(G, X) == predicted).all()


@pytest.mark.parametrize("nothing", ["", None, float("nan"), "-1", "  "])
def test_text_that_is_no_label(nothing):
    labels = NAMES.astype(object)
    labels[20:] = nothing
    model = HERTA(ridge=0.1).fit(G, X, labels)
    assert (model.W_ == HERTA(ridge=0.1).fit(G, X, NAMES, train=np.arange(20)).W_).all()
    whole = Y.astype(object)
    whole[20:] = None
    assert HERTA(ridge=0.1).fit(G, X, whole).classes_.tolist() == [0, 1, 2]
    refused(ValueError, "node 25, which has no label", lambda: fit(y=labels, train=[1, 25]))


@pytest.mark.parametrize("kind", ["npz", "csv", "csv with a head", "npy"])
def test_text_labels_on_the_command_line(kind, tmp_path, capsys):
    lines = "\n".join(NAMES) + "\n"
    made = {
        "npz": lambda: npz(tmp_path, labels=NAMES),
        "csv": lambda: tables(tmp_path, labels=lines),
        "csv with a head": lambda: tables(tmp_path, labels="colour\n" + lines),
        "npy": lambda: tables(tmp_path, labels=NAMES),
    }
    data, run = str(made[kind]()), str(tmp_path / "run")
    assert main(["plan", data, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["c"] == 3
    assert main(["train", data, "--ridge", "0.1", "--out", run, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert main(["predict", run, data, "--to", str(tmp_path / "p.csv"), "--json"]) == 0
    assert "score" in json.loads(capsys.readouterr().out)
    model = HERTA(ridge=0.1, dtype="float32").fit(G, load(data).X, NAMES, train=np.arange(15))
    rows = (tmp_path / "p.csv").read_text().splitlines()
    assert rows == ["node,prediction", *(f"{i},{v}" for i, v in enumerate(model.predict(G, X)))]
    assert answer["scores"]["test"] == model.score(G, X, NAMES, np.arange(20, N))
    assert main(["predict", run, data, "--to", str(tmp_path / "p.npz"), "--quiet"]) == 0
    with np.load(tmp_path / "p.npz", allow_pickle=False) as stored:
        assert (stored["predictions"] == model.predict(G, X)).all()


def test_text_labels_are_tuned_on(tmp_path, capsys):
    argv = ["tune", str(npz(tmp_path, labels=NAMES)), "--lam", "1", "--ridge", "0.1", "--json"]
    assert main(argv) == 0
    assert len(json.loads(capsys.readouterr().out)["candidates"]) == 2


def test_predictions_for_labels_of_another_kind_have_no_score(tmp_path, capsys, finished):
    data = npz(tmp_path, labels=NAMES)
    argv = ["predict", str(finished), str(data), "--to", str(tmp_path / "p.csv"), "--json"]
    assert main(argv) == 0
    assert "score" not in json.loads(capsys.readouterr().out)


def test_one_float_per_node_is_scored_as_one_column(tmp_path, capsys):
    data = npz(tmp_path, labels=X @ np.arange(1.0, D + 1))
    assert main(["train", str(data), "--lam", "0.001", "--ridge", "1e-6", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["metric"] == "r2"
    assert answer["outputs"] == 1
    assert answer["scores"]["test"] > 0.99
