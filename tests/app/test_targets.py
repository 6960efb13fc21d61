"""Metric, prediction and names of columns follow the loss and the targets, in every command."""

from __future__ import annotations

import csv
import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.app.cli import main
from herta_gpu.app.metrics import label_scores
from tests.conftest import dense_H, random_graph

N, D, LAM = 160, 5, 2.0
GRAPH = random_graph(N, 500)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, D))
Z = np.linalg.solve(dense_H(GRAPH, LAM), X) @ RNG.standard_normal((D, 3))
PARTS = dict(zip(("train", "valid", "test"), np.split(RNG.permutation(N), [80, 120])))
LABELS = (Z + 0.1 > 0).astype(int)
LABELS[::7, 1] = -1  # not known
Y = {
    "classes": Z.argmax(axis=1),
    "several labels": LABELS,
    "one label": LABELS[:, 0],
    "one number": Z[:, 0],
    "several numbers": Z,
}
METRIC = {
    "classes": "accuracy",
    "several labels": "micro F1",
    "one label": "accuracy",
    "one number": "r2",
    "several numbers": "r2",
}
KINDS = tuple(Y)


def loss_of(kind: str) -> str:
    return "bce" if "label" in kind else "mse"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    u, v, _ = GRAPH.edges()
    for kind, y in Y.items():
        arrays = {"edge_index": np.stack([u, v]), "num_nodes": N, "features": X, "labels": y}
        np.savez(folder / f"{kind}.npz", **arrays, **PARTS)
    return folder


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for kind in KINDS:
        argv = ["--loss", loss_of(kind), "--lam", str(LAM), "--ridge", "0.1", "--quiet"]
        source = str(data / f"{kind}.npz")
        assert main(["train", source, *argv, "--out", str(folder / kind)]) == 0
    return folder


def outputs(run: Path) -> np.ndarray:
    model = HERTA.load(run / "model.npz")
    return np.linalg.solve(dense_H(GRAPH, LAM), X @ model.W_) + model.intercept_


def count(y: np.ndarray, guess: np.ndarray) -> dict[str, float]:
    """Every known entry, counted one by one."""
    tp, fp, fn, right, known = np.zeros(3), np.zeros(3), np.zeros(3), 0, 0
    for (i, j), truth in np.ndenumerate(y):
        if truth in (0, 1):
            tp[j] += truth == 1 and guess[i, j] == 1
            fp[j] += truth == 0 and guess[i, j] == 1
            fn[j] += truth == 1 and guess[i, j] == 0
            right, known = right + (truth == guess[i, j]), known + 1
    return {
        "micro F1": 2 * tp.sum() / (2 * tp + fp + fn).sum(),
        "macro F1": np.mean(2 * tp / (2 * tp + fp + fn)),
        "label accuracy": right / known,
    }


def expected(kind: str, F: np.ndarray, at: np.ndarray) -> float:
    y = Y[kind][at]
    if kind == "classes":
        return float(np.mean(F[at].argmax(axis=1) == y))
    if kind == "one label":
        return float(np.mean((F[at, 0] > 0) == y))
    if kind == "several labels":
        return count(y, F[at] > 0)["micro F1"]
    y = y.reshape(len(at), -1)
    return float(np.mean(1 - ((y - F[at]) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)))


@pytest.mark.parametrize("kind", KINDS)
def test_train_and_its_page_tell_the_metric_of_the_targets(kind, runs):
    result = json.loads((runs / kind / "result.json").read_text())
    F = outputs(runs / kind)
    assert result["metric"] == METRIC[kind]
    for part, at in PARTS.items():
        assert result["scores"][part] == pytest.approx(expected(kind, F, at), abs=1e-5)
    page = re.sub('base64,[^"]*', "", (runs / kind / "report.html").read_text())
    assert f"test {METRIC[kind]}" in page
    assert ("r2" in page) == ("number" in kind)
    assert ("accuracy" in page) == ("number" not in kind)
    if kind == "several labels":
        for name in ("macro F1", "label accuracy"):
            there = {part: count(LABELS[at], F[at] > 0)[name] for part, at in PARTS.items()}
            assert result["more_scores"][name] == pytest.approx(there)
            assert f"<td>{name}</td>" in page


@pytest.fixture
def narrow(monkeypatch):
    """Two outputs at a time, and never all of them in an array of the host."""
    monkeypatch.setattr("herta_gpu.herta.outputs_at_once", lambda *sizes: 2)
    monkeypatch.setattr("herta_gpu.prediction.Outputs.of", None)


@pytest.mark.parametrize("ending", ["npz", "npy", "csv", "parquet"])
@pytest.mark.parametrize("kind", KINDS)
def test_predictions_in_every_format(kind, ending, runs, data, narrow, tmp_path, capsys):
    """Labels where labels were given, numbers where numbers were; nothing is left beside them."""
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    target = tmp_path / "new" / f"p.{ending}"
    source = str(data / f"{kind}.npz")
    assert main(["predict", str(runs / kind), source, "--to", str(target), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    F = outputs(runs / kind)
    assert told["metric"] == METRIC[kind]
    assert told["score"] == pytest.approx(expected(kind, F, np.arange(N)), abs=1e-5)
    wanted = F.argmax(axis=1) if kind == "classes" else (F > 0) * 1 if "label" in kind else F
    wanted = wanted[:, 0] if kind == "one label" else wanted
    if ending in ("csv", "parquet"):
        if ending == "csv":
            head, *rows = csv.reader(target.read_text().splitlines())
        else:
            table = importlib.import_module("pyarrow.parquet").read_table(target)
            head, rows = table.column_names, list(zip(*(c.to_pylist() for c in table.columns)))
        names = {"several labels": "label", "several numbers": "target"}.get(kind)
        several = [f"{names}_{j}" for j in range(3)]
        assert head == ["node", *(several if names else ["prediction"])]
        found = np.array(rows, dtype=float)[:, 1:].reshape(wanted.shape)
    elif ending == "npz":
        with np.load(target) as archive:
            found = archive["predictions"]
            assert np.abs(archive["scores"] - F).max() < 1e-4
    else:
        found = np.load(target)
    found = found.reshape(wanted.shape)
    assert np.abs(found - wanted).max() < 1e-4
    if "label" in kind:
        assert set(np.unique(found)) == {0, 1}
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert told.get("undecided") == (0 if kind == "classes" else None)


def test_the_columns_have_the_names_of_the_labels(tmp_path, monkeypatch):
    """Also for a dataset that has no labels itself: the run keeps their names.

    A folder here is found by its bare name, too.
    """
    monkeypatch.chdir(tmp_path)
    folder, run = tmp_path / "tables", "run"
    folder.mkdir()
    u, v, _ = GRAPH.edges()
    np.savetxt(folder / "edges.csv", np.stack([u, v]).T, "%d", ",")
    np.savetxt(folder / "features.csv", X, delimiter=",")
    np.savetxt(folder / "labels.csv", LABELS, "%d", ",", header="red,green,blue", comments="")
    np.savetxt(folder / "train.csv", PARTS["train"], "%d")
    argv = ["train", "tables", "--loss", "bce", "--ridge", "1", "--quiet", "--out", run]
    assert main(argv) == 0
    assert json.loads((tmp_path / "run/config.json").read_text())["dataset"] == str(folder)
    (folder / "labels.csv").unlink()
    assert main(["predict", run, f"{folder}/", "--to", str(tmp_path / "p.csv"), "--quiet"]) == 0
    assert (tmp_path / "p.csv").read_text().splitlines()[0] == "node,red,green,blue"


@pytest.mark.parametrize("kind", KINDS)
def test_tune_chooses_by_the_metric_of_the_targets(kind, data, tmp_path, capsys):
    source, run = str(data / f"{kind}.npz"), tmp_path / "run"
    argv = ["tune", source, "--lam", "1,2", "--ridge", "0.1,1", "--quiet", "--out", str(run)]
    argv += ["--loss", "bce"] if kind == "one label" else []
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert f"valid {METRIC[kind]}" in shown
    assert ("r2" in shown) == ("number" in kind)
    assert ("accuracy" in shown) == ("number" not in kind)
    found = json.loads((run / "tune.json").read_text())["candidates"]
    losses = {"classes": {"mse", "ce"}}.get(kind, {loss_of(kind)})
    assert {c["loss"] for c in found} == losses
    if kind == "several labels":
        best = found[0]
        model = HERTA(lam=best["lam"], ridge=best["ridge"], loss="bce", dtype="float64")
        model.fit(GRAPH, X, LABELS, PARTS["train"])
        guess = model.predict(GRAPH, X, PARTS["valid"])
        truth = count(LABELS[PARTS["valid"]], guess)["micro F1"]
        assert best["valid"] == pytest.approx(truth, abs=0.03)


@pytest.mark.parametrize("more", [["--label-features", "3"], ["--several", "0,2"]])
def test_tune_tries_more_features_for_several_labels(more, data, capsys):
    source = str(data / "several labels.npz")
    argv = ["tune", source, "--lam", "2", "--ridge", "0.1", "--loss", "bce", *more, "--json"]
    assert main(argv) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["metric"] == "micro F1"
    assert len(answer["candidates"]) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--loss", "bce,mse"], "bce stands alone"),
        (["--loss", "bce", "--by", "loo"], 'closed form for "mse"'),
        (["--loss", "bce", "--correct-and-smooth"], "not for loss bce"),
    ],
)
def test_what_tune_cannot_do_for_several_labels(argv, words, data, capsys):
    assert main(["tune", str(data / "several labels.npz"), *argv, "--quiet"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["several labels", "one label", "several numbers"])
def test_compare_tells_the_metric_of_the_targets(kind, data, capsys):
    argv = ["compare", str(data / f"{kind}.npz"), "--loss", loss_of(kind), "--ridge", "0.1"]
    argv += ["--devices", "cpu"]
    assert main([*argv, "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert f"test {METRIC[kind]}" in shown
    assert ("same predictions" in shown) == ("label" in kind)
    assert ("accuracy" in shown) == (kind == "one label")


def test_scores_of_labels_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(1)
    y, F = rng.integers(0, 2, (80, 4)), rng.standard_normal((80, 4))
    y[:, 3], F[:, 3] = 0, -1.0  # neither there nor predicted
    found = label_scores(y, F)
    for average in ("micro", "macro"):
        theirs = metrics.f1_score(y, F > 0, average=average, zero_division=0)
        assert found[f"{average} F1"] == pytest.approx(theirs)
    assert found["label accuracy"] == pytest.approx(np.mean(y == (F > 0)))
    assert np.isnan(list(label_scores(y[:0], F[:0]).values())).all()


def test_numbers_that_are_not_known_are_not_scored(data, runs, tmp_path, capsys):
    """Rows of several targets, one of which is missing outside the training nodes."""
    y = Z.copy()
    y[PARTS["test"][::2], 1] = np.nan
    with np.load(data / "several numbers.npz") as stored:
        np.savez(tmp_path / "holes.npz", **{**stored, "labels": y})
    argv = ["predict", str(runs / "several numbers"), str(tmp_path / "holes.npz")]
    assert main([*argv, "--to", str(tmp_path / "p.npy"), "--json"]) == 0
    F = outputs(runs / "several numbers")
    each = []
    for j in range(3):
        known = np.isfinite(y[:, j])
        truth, guess = y[known, j], F[known, j]
        each.append(1 - ((truth - guess) ** 2).sum() / ((truth - truth.mean()) ** 2).sum())
    assert json.loads(capsys.readouterr().out)["score"] == pytest.approx(np.mean(each), abs=1e-5)
