"""Bad files of data, as Python and every command read them, each with its sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.app.cli import main
from herta_gpu.datasets import DataError, load_npz, load_tables
from tests.plumbing.bad_input import (
    EDGES,
    HTML,
    NAMES,
    SPARSE,
    D,
    N,
    X,
    Y,
    absurd,
    check_text,
    cut,
    listing,
    npz,
    raw,
    refused,
    rows,
    sparse_npz,
    tables,
)

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
    ("sparse 2-d", lambda f: sparse_npz(f, feature_data=X), "must have one dimension, not"),
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


@pytest.mark.parametrize(("make", "words"), rows(FILES))
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


ONLY_LOADED = [  # `herta plan` does not see these: it reads neither edges nor features
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


@pytest.mark.parametrize(("make", "code", "words"), rows(ONLY_LOADED))
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


@pytest.mark.parametrize(("content", "words"), rows(TABLES))
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
