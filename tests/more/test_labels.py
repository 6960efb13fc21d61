"""Label propagation against dense algebra, and its error bound against the true error."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone

from herta_gpu import HERTA, CorrectAndSmooth, Graph, LabelPropagation, SDDSolver
from herta_gpu.more.label_features import label_features
from herta_gpu.more.labels import propagate
from herta_gpu.plumbing.files import DataError, write_npz
from tests.conftest import dense_H, problem, random_graph, shared
from tests.more import awkward_graph


def one_hot(y, rows, n):
    Y = np.zeros((n, y.max() + 1))
    Y[rows, y[rows]] = 1.0
    return Y


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("order", [None, "rcm"])
def test_F_is_the_dense_product_within_the_bound_of_each_number(weighted, order):
    g, _, y, train = problem(n=300, weighted=weighted)
    stored = g if order is None else g.reordered(order)
    model = LabelPropagation(lam=30.0, tol=1e-4).fit(stored, y, train)
    F = np.linalg.solve(dense_H(g, 30.0), one_hot(y, train, 300))
    off = np.abs(model.Z_ - F)
    assert (off <= model.error_[:, None]).all()
    assert 0 < off.max() < 1e-3
    assert model.error_.max() < 1e-2  # the bound says something
    assert (model.predict() == F.argmax(axis=1))[off.max(axis=1) < 1e-9].all()


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), lam=st.floats(0.01, 1e3), power=st.integers(-9, -1))
def test_the_bound_holds_for_any_graph_and_tolerance(seed, lam, power):
    g = random_graph(40, 60, seed, weighted=seed % 2 == 0)
    B = np.random.default_rng(seed).standard_normal((40, 3)) * 10.0 ** (seed % 7 - 3)
    Z, tau = propagate(SDDSolver(g, lam, tol=10.0**power), B)
    off = np.abs(Z - np.linalg.solve(dense_H(g, lam), B))
    assert (off <= np.sqrt(g.degree)[:, None] * tau * (1 + 1e-6) + 1e-13 * abs(B).max()).all()


def test_a_label_that_is_not_undecided_is_the_true_one():
    g, _, y, train = problem(n=400, c=2, seed=3)
    F = np.linalg.solve(dense_H(g, 50.0), one_hot(y, train, 400))
    model = LabelPropagation(lam=50.0, tol=1e-3).fit(g, y, train)
    best = np.sort(model.Z_, axis=1)
    sure = best[:, 1] - best[:, 0] > 2 * model.error_
    assert np.count_nonzero(~sure) == model.undecided_ + model.unreached_
    assert 0 < model.undecided_ < 400
    assert (model.predict() == F.argmax(axis=1))[sure].all()


def test_nodes_that_no_label_reaches_get_the_most_frequent_class():
    g = Graph.from_edges([[0, 1, 3], [1, 2, 4]], num_nodes=6)
    y = np.array(["b", "b", "a", "", "", ""])
    model = LabelPropagation().fit(g, y)
    assert model.unreached_ == 3
    assert model.undecided_ == 0
    assert model.predict([3, 4, 5]).tolist() == ["b", "b", "b"]
    assert model.predict([2]).tolist() == ["a"] or model.Z_[2, 0] <= model.Z_[2, 1]


def test_labels_outside_the_training_nodes_are_not_looked_at():
    g, _, y, train = problem()
    first = LabelPropagation().fit(g, y, train)
    other = y.copy()
    rest = np.setdiff1d(np.arange(200), train)
    other[rest] = np.random.default_rng(1).permutation(y[rest])
    assert (LabelPropagation().fit(g, other, train).Z_ == first.Z_).all()


def test_alpha_is_one_minus_that_of_the_usual_iteration():
    """The fixed point of F <- a S F + (1 - a) Y, iterated until nothing changes."""
    g, _, y, train = problem(n=60, seed=5)
    Y, a = one_hot(y, train, 60), 0.8
    S = np.eye(60) - g.to_csr().toarray()
    F = Y
    for _ in range(300):
        F = a * S @ F + (1 - a) * Y
    model = LabelPropagation(alpha=1 - a, tol=1e-10).fit(g, y, train)
    assert np.allclose(model.transform(), F, atol=1e-9)


def test_float_targets_and_text():
    g, X, y, train = problem(n=80)
    model = LabelPropagation(lam=2.0, tol=1e-8).fit(g, X[:, :2], train)
    expected = np.zeros((80, 2))
    expected[train] = X[train, :2]
    assert np.allclose(model.predict(), np.linalg.solve(dense_H(g, 2.0), expected), atol=1e-6)
    names = np.array(["x", "y", "z"])
    named = LabelPropagation().fit(g, names[y], train)
    assert (named.predict() == names[LabelPropagation().fit(g, y, train).predict()]).all()
    assert named.score(names[y], train) == np.mean(named.predict(train) == names[y[train]])


def test_a_fitted_one_is_saved_cloned_and_refused_when_damaged(tmp_path):
    g, _, y, train = problem()
    model = LabelPropagation(lam=3.0).fit(g, y, train)
    model.save(tmp_path / "labels.npz")
    again = LabelPropagation.load(tmp_path / "labels.npz")
    assert (again.predict() == model.predict()).all()
    assert repr(again) == repr(model) == "LabelPropagation(lam=3.0)"
    assert again.undecided_ == model.undecided_
    assert not hasattr(clone(model), "Z_")
    bad = {"Z": np.ones(3), "error": np.ones(3), "about": np.array("{}")}
    write_npz(tmp_path / "bad.npz", bad, "labels")
    with pytest.raises(DataError, match="not a whole file of a LabelPropagation"):
        LabelPropagation.load(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    ("params", "words"),
    [({"lam": -1.0}, "lam must be"), ({"tol": 0.0}, "tol must be"), ({"alpha": 1.0}, "alpha must")],
)
def test_wrong_parameters_are_one_sentence(params, words):
    g, _, y, train = problem(n=20)
    with pytest.raises(ValueError, match=words):
        LabelPropagation(**params).fit(g, y, train)
    with pytest.raises(RuntimeError, match="not fitted yet"):
        LabelPropagation().predict()


def test_real_labels_reach_the_published_level():
    """Cora, 20 labels a class: Zhou et al.'s label propagation is published at 68.0."""
    data = shared("cora")
    with np.load(Path(os.environ["HERTA_DATA"], "cora.npz")) as f:
        train, test = f["train"], f["test"]
    model = LabelPropagation(alpha=0.1).fit(data.graph, data.y, train)
    assert model.score(data.y, test) > 0.66


@pytest.mark.gpu
def test_the_device_gives_the_same():
    g, X, y, train = problem(n=120)
    B = np.random.default_rng(0).random((120, 3))

    def found(device):
        fixed = CorrectAndSmooth(correct="fixed", device=device)
        model = HERTA(lam=[0, 3], ridge=0.1, label_features=4, device=device)
        return [
            LabelPropagation(device=device).fit(g, y, train).Z_,
            CorrectAndSmooth(device=device).fit(g, B, y, train).Z_,
            fixed.fit(g, B, y, train).Z_,
            label_features(g, y, train, device=device).columns,
            model.fit(g, X, y, train).transform(g, X),
        ]

    for here, there in zip(found("cpu"), found("cuda"), strict=True):
        assert np.abs(here - there).max() < 1e-5


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_awkward_graphs_and_labels_are_within_the_bound(first):
    """One label or all, as numbers or text; against LAPACK."""
    for seed in range(first, first + 40):
        rng, graph, _, codes, rows = awkward_graph(seed)
        n, lam = graph.num_nodes, float(10.0 ** rng.uniform(-2, 4))
        seen = np.unique(codes[rows])
        y = np.array([f"class {k}" for k in codes]) if rng.integers(0, 2) else codes
        tol, dtype = 10.0 ** rng.integers(-9, -1), str(rng.choice(["float32", "float64"]))
        model = LabelPropagation(lam, tol=float(tol), dtype=dtype).fit(graph, y, rows)
        M = np.zeros((n, len(seen)))
        M[rows, np.searchsorted(seen, codes[rows])] = 1.0
        expected = np.linalg.solve(dense_H(graph, lam), M)
        off = np.abs(model.Z_ - expected).max(axis=1)
        assert (off <= model.error_ + 1e-13 * (1 + 2 * lam)).all(), seed
        reached = expected.max(axis=1) > 0
        assert model.unreached_ == np.count_nonzero(~reached), seed
        common = np.bincount(np.searchsorted(seen, codes[rows])).argmax()
        best = np.where(reached, expected.argmax(axis=1), common)
        top = np.sort(expected, axis=1)
        gap = top[:, -1] - top[:, -2] if len(seen) > 1 else np.ones(n)
        clear = ~reached | (gap > 2 * model.error_ + 1e-12 * (1 + lam))
        assert (model.predict()[clear] == np.unique(y[rows])[best][clear]).all(), seed
        assert model.undecided_ <= np.count_nonzero(gap[reached] <= 4 * model.error_[reached]) + (
            np.count_nonzero(gap[reached] <= 1e-12 * (1 + lam))
        ), seed


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("order", [None, "rcm"])
@pytest.mark.parametrize("tol", [1e-2, 1e-7])
def test_clamped_labels_stay_and_the_others_solve_the_dirichlet_problem(weighted, order, tol):
    g, _, y, train = problem(n=300, weighted=weighted)
    train = train[::4]
    stored = g if order is None else g.reordered(order)
    model = LabelPropagation(lam=30.0, tol=tol, clamp=True).fit(stored, y, train)
    H, Y, free = dense_H(g, 30.0), one_hot(y, train, 300), np.setdiff1d(np.arange(300), train)
    F = Y.copy()
    F[free] = np.linalg.solve(H[np.ix_(free, free)], -H[np.ix_(free, train)] @ Y[train])
    assert (model.Z_[train] == Y[train]).all()
    assert (model.error_[train] == 0).all()
    assert (abs(model.Z_ - F) <= model.error_[:, None] + 1e-13).all()
    assert 0 < model.error_.max() < 100 * tol
    assert (model.predict(train) == y[train]).all()
    assert model.iterations_ > 0
    assert not np.allclose(model.Z_, LabelPropagation(lam=30.0, tol=tol).fit(g, y, train).Z_)


def test_clamped_targets_that_are_numbers_and_files(tmp_path):
    g, X, _, train = problem(n=100)
    model = LabelPropagation(lam=5.0, clamp=True).fit(g, X[:, :2], train)
    assert (model.predict(train) == X[train, :2]).all()
    model.save(tmp_path / "m.npz")
    again = LabelPropagation.load(tmp_path / "m.npz")
    assert again.clamp is True
    assert (again.Z_ == model.Z_).all()
    with pytest.raises(ValueError, match="clamp must be one of"):
        LabelPropagation(clamp="yes").fit(g, X, train)
