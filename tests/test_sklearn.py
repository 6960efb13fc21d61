"""Nodes as samples: scikit-learn's own checks, its searches, and what `HERTA` says of scores."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import herta_gpu
from herta_gpu import HERTA, NodeClassifier, NodeRegressor
from herta_gpu.plumbing.targets import warn_unfinished
from tests.conftest import closed_form, dense_H, problem

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from sklearn.base import clone, is_classifier, is_regressor
from sklearn.ensemble import BaggingClassifier
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.utils.estimator_checks import check_estimator

# What does not apply, and why.
NOT_FOR_US = {
    "check_sparsify_coefficients": "the parameter `sparsify` is Algorithm 2's; scikit-learn's "
    "linear models have a method of that name, which turns their weights into a sparse matrix",
}
EXACT = {"dtype": "float64", "tol": 1e-13, "ridge": 1e-3}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model",
    [NodeClassifier(fit_intercept=True, **EXACT), NodeRegressor(fit_intercept=True, **EXACT)],
    ids=["classifier", "regressor"],
)
def test_scikit_learns_own_checks_without_a_graph(model):
    found = check_estimator(model, expected_failed_checks=NOT_FOR_US, on_skip=None)
    failed = {row["check_name"] for row in found if row["status"] not in ("passed", "skipped")}
    assert failed == NOT_FOR_US.keys()
    assert len(found) > 50


# ---- with a graph ------------------------------------------------------------------------------


def test_a_classifier_is_herta_on_these_nodes():
    g, X, y, train = problem()
    names = np.array(["b", "a", "c"])[y]
    model = NodeClassifier(g, X, lam=5.0, ridge=0.1).fit(train, names[train])
    plain = HERTA(lam=5.0, ridge=0.1).fit(g, X, names, train)
    np.testing.assert_array_equal(model.model_.W_, plain.W_)
    np.testing.assert_array_equal(model.classes_, ["a", "b", "c"])
    others = np.arange(1, 200, 2)
    np.testing.assert_array_equal(model.predict(others), plain.predict(g, X, others))
    np.testing.assert_array_equal(model.decision_function(others), plain.transform(g, X, others))
    assert model.score(others, names[others]) == plain.score(g, X, names, others)
    assert (is_classifier(model), is_regressor(model)) == (True, False)
    assert model.n_features_in_ == 8


def test_a_regressor_reaches_the_closed_form():
    g, X, _, train = problem()
    Y = np.random.default_rng(1).standard_normal((200, 2))
    model = NodeRegressor(g, X, lam=5.0, **EXACT).fit(train[:, None], Y[train])
    W, _ = closed_form(g, X, Y[train], train, 5.0, 1e-3)
    np.testing.assert_allclose(model.model_.W_, W, atol=1e-8)
    exact = np.linalg.solve(dense_H(g, 5.0), X)[:3] @ W
    np.testing.assert_allclose(model.predict([0, 1, 2]), exact, atol=1e-5)
    assert NodeRegressor(g, X).fit(train, Y[train, 0]).predict([7]).shape == (1,)
    assert (is_classifier(model), is_regressor(model)) == (False, True)


def test_searches_share_graph_and_features():
    g, X, y, train = problem()
    model = NodeClassifier(g, X, lam=5.0)
    twin = clone(model)
    assert twin.graph is g
    assert twin.X is X
    assert (twin.lam, twin is model) == (5.0, False)
    search = GridSearchCV(model, {"lam": [0.1, 1e3], "ridge": [0.1]}, cv=3).fit(train, y[train])
    assert search.best_estimator_.X is X
    assert search.cv_results_["params"][0] == {"lam": 0.1, "ridge": 0.1}
    scores = cross_val_score(clone(model), train, y[train], cv=3)
    by_hand = []
    folds = np.zeros(train.size, dtype=int)
    from sklearn.model_selection import StratifiedKFold

    for k, (_, rows) in enumerate(StratifiedKFold(3).split(train, y[train])):
        folds[rows] = k
    for k in range(3):
        plain = HERTA(lam=5.0).fit(g, X, y, train[folds != k])
        by_hand.append(plain.score(g, X, y, train[folds == k]))
    np.testing.assert_allclose(scores, by_hand)
    again = pickle.loads(pickle.dumps(model.fit(train, y[train])))
    np.testing.assert_array_equal(again.predict(train), model.predict(train))


def test_labels_of_any_kind_and_two_classes():
    g, X, _, train = problem()
    for labels in (np.array([-1, 1]), np.array([2.0, 7.0]), np.array([False, True])):
        y = labels[(X[:, 0] > 0).astype(int)]
        model = NodeClassifier(g, X, lam=0.1, ridge=0.1).fit(train, y[train])
        np.testing.assert_array_equal(model.classes_, labels)
        scores = model.decision_function(np.arange(200))
        assert scores.shape == (200,)
        np.testing.assert_array_equal(model.predict(np.arange(200)) == labels[1], scores > 0)
        assert model.score(np.arange(200), y) > 0.8


def test_weights_of_samples_and_of_classes_by_their_names():
    g, X, y, train = problem()
    names, weight = np.array(["b", "a", "c"])[y], np.random.default_rng(1).random(100)
    by_class = {"b": 2.0, "c": 0.5}  # "a" has 1
    model = NodeClassifier(g, X, lam=2.0, class_weight=by_class, **EXACT)
    model.fit(train[::-1], names[train[::-1]], sample_weight=weight[::-1])
    root = np.sqrt(weight * np.array([2.0, 1.0, 0.5])[y[train]])[:, None]
    A = np.linalg.solve(dense_H(g, 2.0), X)[train] * root
    Y = (names[train][:, None] == ["a", "b", "c"]) * root
    W = np.linalg.solve(A.T @ A + 1e-3 * np.eye(8), A.T @ Y)
    np.testing.assert_allclose(model.model_.W_, W, atol=1e-7)


def test_few_nodes_are_ids_and_not_a_mask():
    g, X, y, _ = problem()
    model = NodeClassifier(g, X).fit(np.arange(100), y[:100])
    ids = np.zeros(200, dtype=int)  # one 0 per node: the node 0, 200 times
    np.testing.assert_array_equal(model.predict(ids), np.repeat(model.predict([0]), 200))
    X3 = X[:3]
    few = NodeRegressor(None, X3, ridge=1.0).fit([0, 1, 0], [1.0, 2.0, 1.0])  # a mask, by its looks
    assert few.model_.classes_ is None


def test_probabilities_for_cross_entropy_only():
    g, X, y, train = problem()
    model = NodeClassifier(g, X, loss="ce", ridge=0.1).fit(train, y[train])
    P = model.predict_proba(np.arange(200))
    Z = model.decision_function(np.arange(200)).astype(float)
    np.testing.assert_allclose(P, np.exp(Z) / np.exp(Z).sum(axis=1, keepdims=True), rtol=1e-4)
    np.testing.assert_array_equal(P.argmax(axis=1), model.predict(np.arange(200)))
    assert cross_val_predict(model, train, y[train], method="predict_proba", cv=3).shape == (100, 3)
    half = [(np.arange(50), np.arange(50, 100))]
    told = cross_val_score(model, train, y[train], cv=half, scoring="neg_log_loss")
    P = clone(model).fit(train[:50], y[train[:50]]).predict_proba(train[50:])
    assert told[0] == pytest.approx(np.log(P[np.arange(50), y[train[50:]]]).mean(), rel=1e-6)
    squared = NodeClassifier(g, X).fit(train, y[train])
    assert not hasattr(squared, "predict_proba")
    with pytest.raises(AttributeError, match="no probabilities: use decision_function"):
        squared.predict_proba([0])


def test_scores_of_herta_itself():
    g, X, y, train = problem(c=2)
    model = HERTA(lam=2.0, loss="ce", ridge=0.1).fit(g, X, y, train)
    Z = model.transform(g, X).astype(float)
    np.testing.assert_allclose(model.decision_function(g, X), Z[:, 1] - Z[:, 0], atol=1e-5)
    np.testing.assert_allclose(
        model.predict_proba(g, X)[:, 1], 1 / (1 + np.exp(Z[:, 0] - Z[:, 1])), atol=1e-5
    )
    far = HERTA(lam=2.0, loss="ce", ridge=1e-9).fit(g, 1e6 * X, np.arange(200) % 2)
    assert np.isfinite(far.predict_proba(g, 1e6 * X)).all()
    squared = HERTA().fit(g, X, y, train)
    with pytest.raises(ValueError, match='The scores of loss="mse" are no probabilities'):
        squared.predict_proba(g, X)
    assert HERTA().fit(g, X, X[:, :2]).decision_function(g, X).shape == (200, 2)
    with pytest.raises(NotFittedError, match="This HERTA is not fitted yet"):
        HERTA().decision_function(g, X)
    assert not is_classifier(model)  # what y is, is known with `fit` only


def test_a_fit_that_ends_early_warns_as_scikit_learn_does(monkeypatch):
    g, X, y, train = problem(c=3)
    early = HERTA(lam=2.0, loss="ce", ridge=1e-3, optimizer="gd", strategy="herta", max_iter=1)
    with pytest.warns(ConvergenceWarning, match="after max_iter=1 steps") as told:
        early.fit(g, X, y, train)
    assert early.status_ == "max_iter"
    assert issubclass(told[0].category, herta_gpu.ConvergenceWarning)
    assert told[0].filename == __file__  # it names the line of the caller
    monkeypatch.delitem(sys.modules, "sklearn.exceptions")  # it is not in use
    with pytest.warns(match="rounding forbids more") as told:
        warn_unfinished("stagnated", 1e-6, 9)
    assert told[0].category is herta_gpu.ConvergenceWarning
    warn_unfinished("certified", 1e-6, 9)
    assert len(told) == 1


def test_without_scikit_learn_a_sentence_names_the_extra(monkeypatch):
    g, X, y, train = problem(c=2)
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'NodeClassifier needs .*"herta_gpu\[sklearn\]"'):
        NodeClassifier(g, X).fit(train, y[train])


def test_a_bootstrap_counts_nodes_as_often_as_it_draws_them():
    g, X, y, train = problem(c=2)
    nodes = np.concatenate([train, train[:30], train[:30]])
    model = NodeClassifier(g, X, lam=2.0, **EXACT).fit(nodes, y[nodes])
    times = np.where(np.arange(train.size) < 30, 3.0, 1.0)
    root = np.sqrt(times)[:, None]
    A = np.linalg.solve(dense_H(g, 2.0), X)[train] * root
    W = np.linalg.solve(A.T @ A + 1e-3 * np.eye(8), A.T @ (np.eye(2)[y[train]] * root))
    np.testing.assert_allclose(model.model_.W_, W, atol=1e-7)
    bag = BaggingClassifier(NodeClassifier(g, X, lam=2.0, ridge=0.1), n_estimators=3)
    assert bag.fit(train[:, None], y[train]).predict(train[:, None]).shape == (100,)
    with pytest.raises(ValueError, match="given twice, with different targets"):
        model.fit([0, 0, 1], [0, 1, 1])


# ---- sentences ---------------------------------------------------------------------------------


def test_what_is_wrong_is_said():
    g, X, y, train = problem()
    model = NodeClassifier(g, X)
    for samples, sentence in (
        (X[train], "Samples must be node ids"),
        (train + 0.5, "Samples must be node ids"),
        (train + 150, "holds node id"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model.fit(samples, y[train])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.fit(train, y)
    with pytest.raises(ValueError, match="There is a graph but no X"):
        NodeClassifier(g).fit(train, y[train])
    with pytest.raises(TypeError, match="There is no parameter 'lamb'"):
        NodeClassifier(g, X, lamb=1.0)
    with pytest.raises(ValueError, match="There is no parameter 'lamb'"):
        model.set_params(lamb=1.0)
    with pytest.raises(ValueError, match='loss must be one of "mse"'):
        NodeRegressor(g, X, loss="ce").fit(train, X[train, 0])
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        model.fit(train, X[train, 0])
    with pytest.raises(TypeError, match=r"graph must be a herta_gpu\.Graph"):
        NodeClassifier(np.eye(3), X).fit(train, y[train])
    with pytest.raises(NotFittedError, match="This NodeClassifier is not fitted yet"):
        NodeClassifier(g, X).predict(train)


def test_it_shows_what_it_holds(capsys: Any):
    g, X, _, _ = problem()
    assert repr(NodeClassifier(g, sp.csr_array(X), lam=2.0)) == (
        f"NodeClassifier({g!r}, X 200 x 8, lam=2.0)"
    )
    assert repr(NodeRegressor()) == "NodeRegressor()"
    help(NodeClassifier)
    assert "memory_budget" in capsys.readouterr().out
