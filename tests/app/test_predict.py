"""`herta predict`: what it writes, in every format, without all outputs in memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.app import predict
from herta_gpu.app.cli import main
from herta_gpu.app.metrics import evaluate
from herta_gpu.app.runs import load_model
from herta_gpu.datasets import load
from herta_gpu.datasets.dataset import Dataset
from tests.conftest import random_graph


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    assert main(["train", "digits", "--lam", "20", "--quiet", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def narrow(monkeypatch):
    """Three outputs at a time, and never all of them in an array of the host."""
    monkeypatch.setattr("herta_gpu.model.outputs_at_once", lambda *sizes: 3)
    monkeypatch.setattr("herta_gpu.prediction.Outputs.of", None)


@pytest.mark.parametrize("ending", ["npz", "npy", "csv"])
def test_labels_in_every_format(run, narrow, ending, tmp_path, capsys):
    data, model = load("digits"), load_model(run / "model.npz")
    target = tmp_path / "new" / f"p.{ending}"
    assert main(["predict", str(run), "digits", "--to", str(target), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    labels = model.predict(data.graph, data.X)
    if ending == "npz":
        with np.load(target) as found:
            assert (found["predictions"] == labels).all()
            Z = found["scores"]
        assert (model.classes_[Z.argmax(axis=1)] == labels).all()
        A = np.eye(data.graph.num_nodes) + 20.0 * data.graph.to_csr().toarray()
        assert np.abs(Z - np.linalg.solve(A, data.X @ model.W_)).max() <= 1e-4
    elif ending == "npy":
        assert (np.load(target) == labels).all()
    else:
        table = np.loadtxt(target, delimiter=",", skiprows=1)
        assert (table == np.column_stack([np.arange(len(labels)), labels])).all()
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert told["score"] == pytest.approx(np.mean(labels == data.y))
    assert told["undecided"] == model.undecided_


@pytest.mark.parametrize("ending", ["npz", "npy", "csv"])
def test_numbers_in_every_format(ending, narrow, tmp_path):
    rng, n = np.random.default_rng(0), 90
    graph, X, y = random_graph(n, 300), rng.standard_normal((n, 4)), rng.standard_normal((n, 7))
    model = HERTA(lam=2.0).fit(graph, X, y)
    data, target = Dataset("numbers", graph, X, y, {}), tmp_path / f"p.{ending}"
    with predict._predict(model, data, None, target) as (found, outputs):
        predict._write(target, found, outputs, list("abcdefg"))
        score = evaluate("r2", data.y, outputs, None)
    Z = np.linalg.solve(np.eye(n) + 2.0 * graph.to_csr().toarray(), X @ model.W_)
    if ending == "csv":
        written = np.loadtxt(target, delimiter=",", skiprows=1)[:, 1:]
    else:
        written = np.load(target)
        written = written["predictions"] if ending == "npz" else written
    assert np.abs(written - Z).max() <= 1e-5
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    r2 = 1 - ((y - Z) ** 2).sum(axis=0) / ((y - y.mean(axis=0)) ** 2).sum(axis=0)
    assert score == pytest.approx(r2.mean(), abs=1e-5)
