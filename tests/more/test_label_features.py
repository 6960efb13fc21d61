"""Cross-fitted label features: what they are, and that no label leaks."""

from __future__ import annotations

import numpy as np
import pytest

from herta_gpu import HERTA, Graph, LabelPropagation
from herta_gpu.more.label_features import label_features
from herta_gpu.planning.settings import LABEL_LAMS
from tests.conftest import dense_H, least_squares, minimum, problem


def found_for(g, y, train, **changes):
    return label_features(g, y, train, **{"lams": (1.0, 20.0), **changes})


@pytest.mark.parametrize("weighted", [False, True])
def test_columns_are_those_of_dense_algebra(weighted):
    g, _, y, train = problem(n=150, weighted=weighted)
    for graph in (g, g.reordered()):
        found = found_for(graph, y, train)
        for b, lam in enumerate((1.0, 20.0)):
            inverse, total = np.linalg.inv(dense_H(g, lam)), np.zeros((150, 3))
            total[train, y[train]] = 1.0
            expected = 0.8 * inverse @ total  # outside: (k - 1)/k of what all labels give
            for j in range(5):
                others = total.copy()
                others[found.folds == j] = 0.0
                expected[found.folds == j] = (inverse @ others)[found.folds == j]
            off = np.abs(found.columns[:, 3 * b : 3 * b + 3] - expected)
            assert np.linalg.norm(off, axis=0).max() <= found.error
            assert off.max() < 1e-5


def test_rows_of_a_fold_keep_their_bits_when_its_labels_are_shuffled():
    g, _, y, train = problem(n=300, c=4)
    first = found_for(g, y, train)
    for j in range(5):
        own = np.flatnonzero(first.folds == j)
        other = y.copy()
        other[own] = np.random.default_rng(j).permutation(y[own])
        assert (other != y).any()
        second = found_for(g, other, train)
        assert (second.folds == first.folds).all()
        assert (second.columns[own] == first.columns[own]).all()
        assert (second.columns != first.columns).any()


def test_everything_keeps_its_bits_when_other_labels_are_shuffled():
    g, _, y, train = problem(n=300, c=4)
    rest, other = np.setdiff1d(np.arange(300), train), y.copy()
    other[rest] = np.random.default_rng(1).permutation(y[rest])
    other[rest[:5]] = 9  # a class that no training node has
    first, second = (found_for(g, labels, train) for labels in (y, other))
    assert (first.columns == second.columns).all()
    assert (first.folds == second.folds).all()


def test_folds_are_even_and_change_with_the_seed():
    g, _, y, train = problem(n=203)
    folds = found_for(g, y, train, folds=7).folds
    counts = np.bincount(folds[train])
    assert len(counts) == 7
    assert counts.max() - counts.min() <= 1
    assert (found_for(g, y, train, folds=7, random_state=1).folds != folds).any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"folds": 1}, "folds must be an integer of at least 2"),
        ({"folds": 50}, "20 training nodes but 50 folds"),
        ({"lams": ()}, "lams is empty"),
        ({"lams": (0.0,)}, "lam must be a positive number"),
    ],
)
def test_bad_wishes_are_one_sentence(changes, words):
    g, _, y, train = problem(n=40)
    with pytest.raises(ValueError, match=words):
        found_for(g, y, train, **changes)


# ---- in a fit -------------------------------------------------------------------------------
def exact_columns(g, y, train, folds=5):
    """The columns that labels make, by dense algebra; the folds alone are the package's."""
    fold, Y = label_features(g, y, train, folds=folds).folds, np.eye(3)[y]
    blocks = []
    for lam in LABEL_LAMS:
        inverse, seen = np.linalg.inv(dense_H(g, lam)), fold >= 0
        each = [inverse @ np.where((seen & (fold != j))[:, None], Y, 0.0) for j in range(folds)]
        own = np.stack(each)[np.maximum(fold, 0), np.arange(g.num_nodes)]
        blocks.append(np.where(seen[:, None], own, np.mean(each, axis=0)))
    return np.hstack(blocks)


def features_of(g, X, y, train, lams, folds=5):
    """[H^-1 X for each lam, the labels' columns], by dense algebra."""
    blocks = [X if lam == 0 else np.linalg.solve(dense_H(g, lam), X) for lam in lams]
    return np.hstack([*blocks, exact_columns(g, y, train, folds)])


@pytest.mark.parametrize("lam", [5.0, [0, 1, 20]])
@pytest.mark.parametrize(("n", "d", "ridge"), [(200, 6, 0.1), (200, 6, 0.0), (60, 80, 0.01)])
def test_a_fit_with_label_features_reaches_the_optimum_it_certifies(lam, n, d, ridge):
    g, X, y, train = problem(n=n, d=d)
    model = HERTA(lam=lam, ridge=ridge, label_features=5).fit(g, X, y, train)
    A = features_of(g, X, y, train, lam if isinstance(lam, list) else [lam])
    Y = np.eye(3)[y[train]]
    _, best = least_squares(A[train], Y, ridge)
    W = model.W_
    reached = 0.5 * float(((A[train] @ W - Y) ** 2).sum() + ridge * (W**2).sum())
    assert model.status_ == "certified"
    assert W.shape == (A.shape[1], 3)
    assert reached / best - 1 <= model.certificate_.value + 1e-9
    assert np.allclose(model.transform(g, X), A @ W, atol=1e-4)


def test_cross_entropy_with_label_features():
    g, X, y, train = problem(n=150, d=5)
    model = HERTA(lam=[0, 3], ridge=0.1, loss="ce", optimizer="lbfgs", label_features=3)
    model.fit(g, X, y, train)
    A = features_of(g, X, y, train, [0, 3.0], folds=3)
    best = minimum(A[train], np.eye(3)[y[train]], "ce", 0.1)
    assert model.status_ == "certified"
    assert model.history_[-1]["loss"] / best - 1 < 2e-6


def test_a_fit_keeps_its_bits_when_other_labels_are_shuffled():
    g, X, y, train = problem(n=200)
    rest, other = np.setdiff1d(np.arange(200), train), y.copy()
    other[rest] = np.random.default_rng(1).permutation(y[rest])
    first, second = (
        HERTA(lam=3.0, ridge=0.1, label_features=5).fit(g, X, labels, train)
        for labels in (y, other)
    )
    assert (first.W_ == second.W_).all()
    assert (first.transform(g, X) == second.transform(g, X)).all()


def test_labels_that_say_nothing_gain_nothing():
    """Random labels: a leak would fit the training nodes far better than the others (seeded)."""
    g, X, y, train = problem(n=600, d=2, c=2, seed=4)
    plain = HERTA(lam=1.0, ridge=1.0).fit(g, X, y, train)
    more = HERTA(lam=1.0, ridge=1.0, label_features=5).fit(g, X, y, train)
    gained = more.score(g, X, y, train) - plain.score(g, X, y, train)
    assert gained < 0.12  # 8 columns on 300 rows; H^-1 M^T Y with its own label gives 0.4
    F = LabelPropagation(lam=1.0).fit(g, y, train).Z_.astype(float)
    leaking = HERTA(lam=[0], ridge=0.001).fit(g, F, y, train)
    assert leaking.score(g, F, y, train) - plain.score(g, X, y, train) > 0.3


def test_it_is_saved_and_predicts_on_a_grown_graph(tmp_path):
    g, X, y, train = problem(n=100)
    model = HERTA(lam=[0, 2], ridge=0.1, label_features=4).fit(g, X, y, train)
    model.save(tmp_path / "model.npz")
    again = HERTA.load(tmp_path / "model.npz")
    assert (again.transform(g, X) == model.transform(g, X)).all()
    u, v, _ = g.edges()
    more = Graph.from_edges([np.append(u, 100), np.append(v, 3)], num_nodes=101)
    assert again.transform(more, np.vstack([X, X[:1]])).shape == (101, 3)
    few = Graph.from_edges([[0], [1]], num_nodes=2)
    with pytest.raises(ValueError, match="belong to nodes that are not in this graph"):
        again.transform(few, X[:2])


@pytest.mark.parametrize(
    ("params", "fit", "words"),
    [
        ({"label_features": 1}, {}, "at least 2, or 0"),
        ({"label_features": -3}, {}, "integer of at least 0"),
        ({"label_features": 5, "strategy": "herta"}, {}, "trained on stored rows"),
        ({"label_features": 5}, {"loo": True}, "not valid with label features"),
    ],
)
def test_what_makes_no_sense_in_a_fit_is_one_sentence(params, fit, words):
    g, X, y, train = problem(n=60)
    with pytest.raises(ValueError, match=words):
        HERTA(ridge=0.1, **params).fit(g, X, y, train, **fit)
