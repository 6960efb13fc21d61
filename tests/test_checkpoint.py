"""A checkpoint goes on with its own fit and with no other, and believes nothing it can measure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph
from herta_gpu.checkpoint import Checkpoint
from herta_gpu.cli import main
from herta_gpu.datasets import load
from herta_gpu.fingerprint import differences, fingerprint
from herta_gpu.runs import load_model

PARAMS = {"lam": 5.0, "loss": "ce", "ridge": 0.1, "strategy": "herta", "tol": 1e-9}
WAY_OUT = r"choose another folder, or begin anew with checkpoint\.delete\(\) \(--overwrite on"


def given() -> dict:
    data = load("synthetic:n=400,m=2000,d=12,c=3")
    return {"graph": data.graph, "X": data.X, "y": data.y, "train": data.split["train"]}


def killed(folder: Path, data: dict, at: int = 3, **params) -> None:
    """The state of a fit that stopped when it had recorded step `at`."""

    def stop(entry: dict) -> None:
        if entry["step"] == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(folder, data, stop, **params)
    assert (folder / "step.npz").is_file()
    assert list(folder.glob("Q*.npz"))


def fit(folder: Path, data: dict, callback=None, **params) -> HERTA:
    checkpoint = Checkpoint(folder, worth=0.0, share=1.0)
    return HERTA(**{**PARAMS, **params}).fit(**data, callback=callback, checkpoint=checkpoint)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def other_entry(data: dict) -> None:
    data["X"] = data["X"].copy()
    data["X"][391, 7] += 1e-6


def other_dtype(data: dict) -> None:
    data["X"] = data["X"].astype("float16" if data["X"].dtype == "float32" else "float32")


def other_label(data: dict) -> None:
    data["y"] = data["y"].copy()
    node = data["train"][5]
    data["y"][node] = (data["y"][node] + 1) % 3


def other_train(data: dict) -> None:
    outside = np.setdiff1d(np.arange(400), data["train"])[0]
    data["train"] = np.append(data["train"][1:], outside)


def other_edges(data: dict, weight: float | None = None, drop: bool = False) -> None:
    u, v, _ = data["graph"].edges()
    weights = np.ones(u.shape[0])
    if weight is not None:
        weights[17] = weight
    keep = np.arange(u.shape[0]) != (17 if drop else -1)
    data["graph"] = Graph.from_edges(np.stack([u, v])[:, keep], 400, weights[keep])


CHANGES = {
    "an entry of X": (other_entry, "the features X changed"),
    "the type of X": (other_dtype, "the features X changed"),
    "a label": (other_label, "the labels y changed"),
    "a training node": (other_train, "the training nodes changed"),
    "an edge": (lambda data: other_edges(data, drop=True), "the graph changed"),
    "a weight": (lambda data: other_edges(data, weight=1.001), "the graph changed"),
    "the order": (lambda data: data.update(graph=data["graph"].reordered()), "the graph changed"),
    "two": (lambda data: (other_entry(data), other_label(data)), "the features X and the labels y"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_is_refused_and_nothing_is_lost(tmp_path, change):
    data, folder = given(), tmp_path / "state"
    W = HERTA(**PARAMS).fit(**data).W_
    killed(folder, data)
    before, (apply, words) = files(folder), CHANGES[change]
    changed = dict(data)
    apply(changed)
    with pytest.raises(ValueError, match=rf"made from something else: {words}.*{WAY_OUT}") as said:
        fit(folder, changed)
    assert "\n" not in str(said.value)
    assert files(folder) == before
    assert (fit(folder, data).W_ == W).all()  # as if nobody had asked


def test_an_entry_of_a_sparse_X_is_seen(tmp_path):
    data = given()
    data["X"] = sp.random(400, 12, 0.3, random_state=0, format="csr")
    killed(tmp_path, data)
    before, changed = files(tmp_path), dict(data, X=data["X"].copy())
    changed["X"].data[600] *= 1.001
    with pytest.raises(ValueError, match="the features X changed"):
        fit(tmp_path, changed)
    with pytest.raises(ValueError, match="the features X changed"):
        fit(tmp_path, dict(data, X=data["X"].toarray()))
    assert files(tmp_path) == before
    assert (fit(tmp_path, data).W_ == HERTA(**PARAMS).fit(**data).W_).all()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"lam": 6.0}, r"lam \(5.0 then, 6.0 now\)"),
        ({"ridge": 0.2}, r"ridge \(0.1 then, 0.2 now\)"),
        ({"lam": 6.0, "ridge": 1.0}, r"lam \(5.0 then, 6.0 now\) and ridge \(0.1 then, 1.0 now\)"),
        ({"loss": "mse"}, r"loss \(ce then, mse now\)"),
        ({"dtype": "float64"}, r"dtype \(float32 then, float64 now\)"),
        ({"random_state": 1}, r"random_state \(0 then, 1 now\)"),
        ({"tol": 1e-3}, r"tol \(1e-09 then, 0.001 now\)"),
        ({"optimizer": "lbfgs"}, r"optimizer \(cg then, lbfgs now\)"),
        ({"strategy": "direct"}, r"strategy \(herta then, direct now\)"),
        ({"sketch": True}, r"sketch \(auto then, True now\)"),
        ({"precondition": False}, r"precondition \(True then, False now\)"),
    ],
)
def test_another_model_is_refused(tmp_path, params, words):
    data = given()
    killed(tmp_path, data)
    before = files(tmp_path)
    with pytest.raises(ValueError, match=rf"{words} changed; .*{WAY_OUT}"):
        fit(tmp_path, data, **params)
    assert files(tmp_path) == before


def test_one_row_is_not_yes(tmp_path):
    data = given()
    killed(tmp_path, data, sketch=True)
    with pytest.raises(ValueError, match=r"sketch \(True then, 1 now\)"):
        fit(tmp_path, data, sketch=1)


def test_the_same_said_otherwise_is_the_same(tmp_path):
    """Ids or a mask, another layout, NumPy's numbers, a name for the device."""
    data = given()
    killed(tmp_path, data)
    mask = np.zeros(400, dtype=bool)
    mask[data["train"]] = True
    same = {**data, "train": mask, "X": np.asfortranarray(data["X"])}
    again = fit(tmp_path, same, lam=np.float64(5), dtype=np.dtype("float32"), device="cpu")
    assert (again.W_ == HERTA(**PARAMS).fit(**data).W_).all()


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize("strategy", ["herta", "direct"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("tol", [1e-6, 1e-13])  # 1e-13: solves that are tightened, or stagnate
def test_a_measured_point_has_the_bits_of_the_stored_one(tmp_path, loss, strategy, dtype, tol):
    data = given()
    if loss == "mse":  # an optimum that takes a few steps
        data["X"] = data["X"] * np.logspace(-2, 2, 12).astype("float32")
    params = {"loss": loss, "strategy": strategy, "dtype": dtype, "tol": tol, "ridge": 1e-3}
    whole = HERTA(**{**PARAMS, **params}).fit(**data)
    for at in range(1, len(whole.history_)):
        folder, seen = tmp_path / str(at), []
        killed(folder, data, at=at, **params)
        again = fit(folder, data, seen.append, **params)
        assert seen[0]["step"] == at
        assert (again.W_ == whole.W_).all()
        for ours, theirs in zip(again.history_, whole.history_, strict=True):
            assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
        assert again.certificate_ == whole.certificate_


# ---- what may differ ------------------------------------------------------------------------
def test_more_steps_go_on_from_the_last_one(tmp_path):
    data = given()
    short = fit(tmp_path, data, max_iter=5)
    assert short.status_ == "max_iter"
    seen = []
    longer = fit(tmp_path, data, seen.append, max_iter=100, verbose=True)
    assert seen[0]["step"] == 5
    assert longer.status_ == "certified"
    assert (longer.W_ == HERTA(**PARAMS).fit(**data).W_).all()


def test_fewer_steps_than_there_were_end_where_they_are(tmp_path):
    data = given()
    killed(tmp_path, data, at=6)
    again = fit(tmp_path, data, max_iter=2)
    assert again.status_ == "max_iter"
    assert len(again.history_) == 7
    assert again.certificate_.value == again.history_[-1]["certificate"] < np.inf
    assert again.history_[-1]["loss"] < again.history_[-2]["loss"]


@pytest.mark.parametrize(
    ("loss", "strategy"), [("mse", "herta"), ("ce", "herta"), ("ce", "direct")]
)
@pytest.mark.parametrize("budgets", [("1GB", "2.2MB"), ("2.2MB", "1GB")])
def test_another_budget_goes_on_from_the_weights(tmp_path, loss, strategy, budgets):
    data = load("synthetic:n=2000,m=8000,d=40,c=3")
    X = data.X * np.logspace(-1, 1, 40).astype("float32")
    data = {"graph": data.graph, "X": X, "y": data.y, "train": np.arange(0, 2000, 2)}
    params = {"loss": loss, "strategy": strategy, "tol": 1e-8, "ridge": 0.01, "max_iter": 200}
    optimum = HERTA(**{**PARAMS, **params, "tol": 1e-12, "dtype": "float64"}).fit(**data)
    before = HERTA(**{**PARAMS, **params, "memory_budget": budgets[0]}).fit(**data)
    killed(tmp_path, data, at=len(before.history_) - 1, memory_budget=budgets[0], **params)
    seen = []
    after = fit(tmp_path, data, seen.append, memory_budget=budgets[1], **params)
    assert after.plan_.identity != before.plan_.identity
    assert seen[0]["step"] == len(before.history_) - 1
    assert seen[0]["loss"] == pytest.approx(before.history_[-1]["loss"], rel=1e-3)
    true = (after.history_[-1]["loss"] - optimum.history_[-1]["loss"]) / after.history_[-1]["loss"]
    assert after.status_ == "certified"
    assert true <= after.certificate_.value <= 1e-8
