"""Targets: weights of rows and classes, labels of 0 or 1, and what they mean for a fit."""

from __future__ import annotations

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.plumbing.targets import make_targets
from tests.conftest import dense_H, random_graph

N = 120
GRAPH = random_graph(N, 300)
RNG = np.random.default_rng(1)
X, Y = RNG.standard_normal((N, 5)) + 1, RNG.integers(0, 3, N)
TRAIN = np.arange(90)
WEIGHT = RNG.uniform(0.1, 9.0, N)
A = np.linalg.solve(dense_H(GRAPH, 4.0), X)


def best(T, w, ridge, intercept):
    """(weights, constants) of weighted least squares, by LAPACK."""
    B = np.hstack([A[TRAIN], np.ones((len(TRAIN), int(intercept)))])
    G = (B.T * w) @ B + ridge * np.diag([1.0] * 5 + [0.0] * intercept)
    found = np.linalg.solve(G, (B.T * w) @ T)
    return found[:5], found[5:].sum(axis=0)


@pytest.mark.parametrize("strategy", ["direct", "herta"])
@pytest.mark.parametrize(("ridge", "intercept"), [(0.0, False), (0.0, True), (0.7, True)])
def test_weights_and_intercept_are_those_of_least_squares(strategy, ridge, intercept):
    model = HERTA(lam=4.0, ridge=ridge, fit_intercept=intercept, strategy=strategy, tol=1e-10,
                  dtype="float64")  # fmt: skip
    model.fit(GRAPH, X, Y, TRAIN, sample_weight=WEIGHT)
    W, b = best(np.eye(3)[Y[TRAIN]], WEIGHT[TRAIN], ridge, intercept)
    assert model.status_ == "certified"
    np.testing.assert_allclose(model.W_, W, atol=1e-4)
    np.testing.assert_allclose(model.intercept_, b, atol=1e-4)
    E = A[TRAIN] @ W + b - np.eye(3)[Y[TRAIN]]
    loss = (WEIGHT[TRAIN, None] * E**2).sum() / 2 + ridge / 2 * (W**2).sum()
    assert model.history_[-1]["loss"] == pytest.approx(loss, rel=1e-9)  # in the caller's units
    assert model.certificate_.gap <= 1e-10 * loss
    np.testing.assert_allclose(
        model.transform(GRAPH, X), A @ model.W_ + model.intercept_, atol=1e-5
    )


def test_a_weight_of_0_is_no_row_and_a_scale_changes_nothing_but_the_ridge():
    some = WEIGHT.copy()
    some[10:40] = 0.0
    kept = np.delete(TRAIN, np.s_[10:40])
    zero = HERTA(lam=4.0, ridge=0.1).fit(GRAPH, X, Y, TRAIN, sample_weight=some)
    without = HERTA(lam=4.0, ridge=0.1).fit(GRAPH, X, Y, kept, sample_weight=WEIGHT)
    np.testing.assert_array_equal(zero.W_, without.W_)
    np.testing.assert_array_equal(zero.train_, kept)
    double = HERTA(lam=4.0, ridge=0.2).fit(GRAPH, X, Y, kept, sample_weight=2 * WEIGHT)
    np.testing.assert_array_equal(double.W_, without.W_)
    assert double.history_[-1]["loss"] == 2 * without.history_[-1]["loss"]


def test_weights_of_classes():
    counts = np.bincount(Y[TRAIN])
    balanced = HERTA(lam=4.0, class_weight="balanced").fit(GRAPH, X, Y, TRAIN)
    by_row = (len(TRAIN) / (3 * counts))[Y]
    as_rows = HERTA(lam=4.0).fit(GRAPH, X, Y, TRAIN, sample_weight=by_row)
    np.testing.assert_array_equal(balanced.W_, as_rows.W_)
    given = HERTA(lam=4.0, class_weight={1: 5.0}).fit(GRAPH, X, Y, TRAIN, sample_weight=WEIGHT)
    as_rows.fit(GRAPH, X, Y, TRAIN, sample_weight=WEIGHT * np.where(Y == 1, 5.0, 1.0))
    np.testing.assert_array_equal(given.W_, as_rows.W_)
    words = np.array(["a", "b", "c"])[Y]
    text = HERTA(lam=4.0, class_weight={"c": 0}).fit(GRAPH, X, words, TRAIN)
    assert text.classes_.tolist() == ["a", "b"]  # a class without weight is none


def test_several_labels_per_node():
    """Each label is a logistic regression of its own; unknown ones are left out."""
    y = (RNG.random((N, 3)) < [0.3, 0.5, 0.7]).astype(float)
    y[20:50, 0] = np.nan
    y[:, 1][60:70] = -1
    model = HERTA(lam=4.0, loss="bce", ridge=0.3, fit_intercept=True, tol=1e-9)
    model.fit(GRAPH, X, y, TRAIN)
    assert model.status_ == "certified"
    Z = A @ model.W_ + model.intercept_
    for j in range(3):
        rows = TRAIN[np.isin(y[TRAIN, j], (0, 1))]
        E = 1 / (1 + np.exp(-Z[rows, j])) - y[rows, j]
        np.testing.assert_allclose(A[rows].T @ E + 0.3 * model.W_[:, j], 0, atol=2e-3)
        assert abs(E.sum()) < 2e-3
    predicted = model.predict(GRAPH, X)
    np.testing.assert_array_equal(predicted, Z > 0)
    known = (y == 0) | (y == 1)
    assert model.score(GRAPH, X, y) == np.mean(predicted[known] == y[known])
    one = HERTA(lam=4.0, loss="bce", ridge=0.3).fit(GRAPH, X, (Y == 1).astype(int), TRAIN)
    assert one.predict(GRAPH, X).shape == (N,)
    assert one.score(GRAPH, X, (Y == 1).astype(int)) > 0.5


WRONG = [
    ({"sample_weight": np.ones(5)}, {}, Y, "one number per node"),
    ({"sample_weight": -np.ones(N)}, {}, Y, "negative, NaN or infinite"),
    ({"sample_weight": np.full(N, np.nan)}, {}, Y, "negative, NaN or infinite"),
    ({"sample_weight": np.zeros(N)}, {}, Y, "have the weight 0"),
    ({"sample_weight": np.full(N, 1e40)}, {}, Y, "divide all of them"),
    ({"sample_weight": np.full(N, "a")}, {}, Y, "one number per node"),
    ({}, {"class_weight": {7: 1.0}}, Y, "names 7, which is no label"),
    ({}, {"class_weight": "balanced"}, X[:, 0], "needs one class label per node"),
    ({}, {"loss": "bce"}, Y, "but y holds 2"),
    ({}, {"loss": "bce"}, np.full((N, 2), np.inf), "but y holds infinity"),
    ({}, {"loss": "bce"}, np.array(["a", "b"])[Y // 2], "needs zeros and ones"),
]


@pytest.mark.parametrize(("given", "params", "y", "words"), WRONG, ids=[w[3] for w in WRONG])
def test_bad_input_is_one_sentence(given, params, y, words):
    with pytest.raises(ValueError, match=words) as error:
        HERTA(**params).fit(GRAPH, X, y, TRAIN, **given)
    assert str(error.value).endswith(".")


def test_weights_are_divided_by_a_power_of_two():
    found = make_targets(Y, TRAIN, N, "mse", 3 * WEIGHT)
    assert found.unit == 32.0
    np.testing.assert_array_equal(found.unit * found.weights, 3 * WEIGHT[TRAIN])
    assert found.weights.max() <= 1
    assert make_targets(Y, TRAIN, N, "mse", np.ones(N)).weights is None
