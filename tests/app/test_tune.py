"""`herta tune`: its candidates are what a fit gives, and it looks at no node that it must not."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from herta_gpu import HERTA, CorrectAndSmooth
from herta_gpu.app.cli import main
from herta_gpu.app.tune import Directions, Grid, rows_for_each, tune
from herta_gpu.datasets import Dataset, load
from tests.conftest import dense_H, problem, random_graph

SHARED = os.environ.get("HERTA_DATA", "")
needs_shared = pytest.mark.skipif(not SHARED, reason="set HERTA_DATA to the shared datasets")


def small(n=240, seed=0):
    """A dataset whose labels depend on the graph and on X, with all three parts."""
    g, X, _, _ = problem(n=n, d=6, seed=seed)
    Z = np.linalg.solve(dense_H(g, 3.0), X) @ np.random.default_rng(seed).standard_normal((6, 3))
    parts = np.split(np.random.default_rng(1).permutation(n), [n // 2, 3 * n // 4])
    split = {name: np.sort(ids) for name, ids in zip(("train", "valid", "test"), parts)}
    return Dataset("small", g, X, Z.argmax(axis=1), split)


def test_candidates_agree_with_a_fit():
    data = load("digits")
    found = tune(data, Grid([5.0], [0.01, 1.0], ["mse", "ce"], intercepts=(False, True)))
    assert len(found) == 6  # cross entropy has no candidates with an intercept
    for c in found:
        model = HERTA(
            lam=c.lam, ridge=c.ridge, loss=c.loss, optimizer="lbfgs", tol=1e-8,
            fit_intercept=c.fit_intercept,
        ).fit(data.graph, data.X, data.y, data.split["train"])  # fmt: skip
        for part, ours in (("train", c.train), ("valid", c.valid)):
            theirs = model.score(data.graph, data.X, data.y, data.split[part])
            assert abs(ours - theirs) <= 2 / len(data.split[part])  # nodes on the border


def test_a_grid_of_arrays_is_one_of_lists():
    lams, ridges = [1.0, 20.0], [0.01, 1.0]
    of_arrays = tune(load("digits"), Grid(np.array(lams), np.array(ridges), ["mse"]))
    assert of_arrays == tune(load("digits"), Grid(lams, ridges, ["mse"]))


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("several", "folds"), [(((0.0, 2.0),), 0), ((), 3), (((0.0, 2.0),), 3)])
def test_candidates_of_more_features_agree_with_a_fit(several, folds, smooth):
    data = small()
    lams = [] if several else [3.0]
    more = {"several": several, "label_folds": folds, "smooth": smooth}
    found = tune(data, Grid(lams, [0.1, 1.0], ["mse"], **more))
    c = next(c for c in found if bool(c.smooth) == smooth and c.label_features == folds)
    lam = list(c.lam) if isinstance(c.lam, tuple) else c.lam
    train, valid = data.split["train"], data.split["valid"]
    model = HERTA(lam=lam, ridge=c.ridge, label_features=folds).fit(
        data.graph, data.X, data.y, train
    )
    score = model.score(data.graph, data.X, data.y, valid)
    if smooth:
        smoother = CorrectAndSmooth(*c.smooth).fit(data.graph, model, data.y, train, X=data.X)
        score = smoother.score(data.y, valid)
    assert abs(score - c.valid) <= 1 / len(valid)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("count", [5, 190])  # fewer and more than the 20 columns
def test_rows_are_those_of_the_inverse(count, sparse):
    import scipy.sparse as sp

    data = load("synthetic:n=300,m=900,d=20,c=3")
    X = np.where(np.abs(data.X) > 1, data.X, 0.0)
    rows = np.random.default_rng(0).permutation(300)[:count]
    for graph in (data.graph, data.graph.reordered()):
        made = rows_for_each(graph, sp.csr_array(X) if sparse else X, rows, [0.5, 7.0], tol=1e-7)
        for lam, Q in zip((0.5, 7.0), made):
            truth = np.linalg.solve(dense_H(data.graph, lam), X)
            assert np.abs(Q - truth[rows]).max() < 1e-5 * np.abs(truth).max()


# ---- leave-one-out --------------------------------------------------------------------------
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize(("n", "p"), [(30, 7), (12, 25), (12, 12)])
@pytest.mark.parametrize("ridge", [1e-6, 0.1])
def test_leave_one_out_is_that_of_refits(n, p, intercept, ridge):
    rng = np.random.default_rng(n + p)
    A, Y = rng.standard_normal((n, p)), rng.standard_normal((n, 2))
    found = Directions(A, A[:0], Y, intercept).leave_one_out(ridge)
    for i in range(n):
        rest = np.arange(n) != i
        mean = A[rest].mean(axis=0) * intercept
        middle = Y[rest].mean(axis=0) * intercept
        B = A[rest] - mean
        # As many unknowns as rows or fewer, whichever is better conditioned.
        G = B @ B.T + ridge * np.eye(n - 1)
        W = B.T @ np.linalg.solve(G, Y[rest] - middle) if p >= n else np.linalg.solve(
            B.T @ B + ridge * np.eye(p), B.T @ (Y[rest] - middle)
        )  # fmt: skip
        assert np.allclose(found[i], (A[i] - mean) @ W + middle, rtol=1e-6, atol=1e-6)


def test_leave_one_out_is_that_of_the_estimator():
    data = small()
    c = tune(data, Grid([3.0], [0.1], ["mse"], by="loo", intercepts=(True,)))[0]
    model = HERTA(lam=3.0, ridge=0.1, fit_intercept=True)
    model.fit(data.graph, data.X, data.y, data.split["train"], loo=True)
    right = model.classes_[model.loo_.argmax(axis=1)] == data.y[model.train_]
    assert abs(right.mean() - c.loo) <= 1 / right.size


def test_leave_one_out_looks_at_no_validation_node():
    data = small()
    other = data.y.copy()
    for part in ("valid", "test"):
        other[data.split[part]] = 0
    split = {"train": data.split["train"]}
    grid = Grid([1.0, 5.0], [0.01, 1.0], ["mse"], by="loo")
    first = tune(data, grid)
    second = tune(Dataset("other", data.graph, data.X, other, split), grid)
    assert [(c.lam, c.ridge, c.loo) for c in first] == [(c.lam, c.ridge, c.loo) for c in second]
    assert all(np.isnan(c.valid) for c in first)
    assert [c.loo for c in first] == sorted((c.loo for c in first), reverse=True)


def test_test_labels_change_no_candidate():
    data, other = small(), small()
    test = data.split["test"]
    other.y[test] = np.random.default_rng(3).permutation(data.y[test])
    grid = Grid([2.0], [0.1], ["mse"], several=[(0.0, 2.0)], label_folds=4, smooth=True)
    assert tune(data, grid) == tune(other, grid)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"by": "loo", "several": [(0.0, 1.0)], "losses": ["mse"]}, "for one lam"),
        ({"by": "loo", "label_folds": 5, "losses": ["mse"]}, "for one lam"),
        ({"by": "loo", "smooth": True, "losses": ["mse"]}, "for one lam"),
        ({"by": "loo", "losses": ["mse", "ce"]}, 'closed form for "mse"'),
        ({"by": "loo", "losses": ["mse"], "ridges": [0.0]}, "ridges above 0"),
        ({"by": "luck"}, "by must be one of"),
        ({"lams": []}, "grid is empty"),
    ],
)
def test_what_cannot_be_chosen_by_is_one_sentence(wish, words):
    with pytest.raises(ValueError, match=words):
        tune(small(), Grid(**wish))


def test_without_validation_nodes_leave_one_out_is_the_advice():
    data = small()
    split = {"train": data.split["train"]}
    with pytest.raises(ValueError, match="or --by loo"):
        tune(Dataset("none", data.graph, data.X, data.y, split))


# ---- the command ----------------------------------------------------------------------------
def ran(capsys, *argv):
    assert main([*argv, "--quiet", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_tries_everything_and_trains_the_winner(tmp_path, capsys):
    grid = ["--lam", "5", "--ridge", "0.1,1", "--loss", "mse", "--several", "0,5"]
    argv = [*grid, "--label-features", "3", "--correct-and-smooth", "--out", str(tmp_path / "run")]
    answer = ran(capsys, "tune", "digits", *argv)
    best = answer["candidates"][0]
    assert answer["status"] == "certified"
    assert answer["label_features"] == best["label_features"]
    assert answer["correct_and_smooth"] == best["smooth"]
    assert answer["scores"]["valid"] == pytest.approx(best["valid"], abs=0.006)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "What was chosen from" in page
    kinds = {(c["label_features"], c["smooth"] is not None) for c in answer["candidates"]}
    assert kinds == {(0, False), (3, False), (0, True), (3, True)}
    ran(capsys, "predict", str(tmp_path / "run"), "digits")


def test_the_command_by_leave_one_out(capsys):
    answer = ran(capsys, "tune", "digits", "--lam", "5,20", "--ridge", "0.1,1", "--by", "loo")
    assert answer["status"] == "certified"
    assert len(answer["candidates"]) == 8  # with and without an intercept
    assert answer["candidates"][0]["loo"] > 0.9


@needs_shared
def test_it_reaches_the_published_accuracy_on_cora(capsys):
    grid = ["--lam", "20,50", "--ridge", "1e-4,1e-3"]
    answer = ran(capsys, "tune", "cora", "--data-dir", SHARED, *grid)
    assert answer["scores"]["test"] >= 0.805
    assert answer["certificate"]["value"] <= 1e-6
    valid = [c["valid"] for c in answer["candidates"]]
    assert valid == sorted(valid, reverse=True)
    assert answer["scores"]["valid"] == pytest.approx(valid[0], abs=0.0041)


@needs_shared
@pytest.mark.parametrize(("name", "least"), [("cora", 0.81), ("citeseer", 0.71)])
def test_leave_one_out_needs_no_validation_node_on_real_data(capsys, name, least):
    answer = ran(capsys, "tune", name, "--by", "loo", "--data-dir", SHARED, "--lam", "5,10,20")
    assert answer["scores"]["test"] >= least
    assert answer["status"] == "certified"


def test_train_smooths_and_compares(tmp_path, capsys):
    argv = ["--lam", "0,1,20", "--ridge", "0.1", "--label-features", "--correct-and-smooth"]
    run = str(tmp_path / "run")
    answer = ran(capsys, "train", "digits", *argv, "--out", run)
    assert answer["lam"] == [0, 1, 20]
    assert answer["label_features"] == 5
    assert answer["correct_and_smooth"] == [20, 20]
    assert answer["status"] == "certified"
    assert answer["output_error"] < 1e-3
    assert set(answer["base_scores"]) == {"train", "valid", "test"}
    assert "smoothed outputs" in (tmp_path / "run" / "report.html").read_text()
    again = ran(capsys, "predict", run, "digits")
    data = load("digits")
    with np.load(tmp_path / "run" / "predictions.npz") as f:
        right = f["predictions"][data.split["test"]] == data.y[data.split["test"]]
    assert right.mean() == pytest.approx(answer["scores"]["test"])
    assert again["score"] > 0.9
    both = ran(capsys, "compare", "digits", *argv, "--devices", "cpu,cpu-scipy")
    assert both["agreement"]["output_relative_difference"] < 1e-4
    resumed = ran(capsys, "train", "--resume", run)
    assert resumed["scores"] == answer["scores"]


def test_a_graph_of_its_own_order_is_tuned_on_alike():
    g = random_graph(120, 300, 2)
    data = small(120)
    grid = Grid([2.0], [0.1], ["mse"], label_folds=3, smooth=True)
    found = []
    for graph in (g, g.reordered()):
        made = tune(Dataset("own", graph, data.X, data.y, data.split), grid)
        found.append(sorted((c.label_features, c.smooth or (), c.valid) for c in made))
    assert np.abs(np.array([a[2] - b[2] for a, b in zip(*found)])).max() <= 1.01 / 30


@pytest.mark.parametrize("several", [((0.0,),), ((0.0,), (0.0, 1.0)), (2.0,), ((3.0,),)])
def test_every_candidate_can_be_fitted(several):
    """A block of X itself, a set of one lam, a set that is in the grid as well."""
    data = small(120)
    found = tune(data, Grid([3.0], [0.1], ["mse"], several=several))
    assert len({(c.lam if isinstance(c.lam, tuple) else (c.lam,)) for c in found}) == len(found)
    for c in found:
        model = HERTA(lam=c.lam, ridge=c.ridge, loss=c.loss)
        model.fit(data.graph, data.X, data.y, data.split["train"])
        score = model.score(data.graph, data.X, data.y, data.split["valid"])
        assert abs(score - c.valid) <= 1 / len(data.split["valid"])
