"""Prediction sets hold the truth as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.conformal import JackknifePlus, SplitConformal
from herta_gpu.datasets import load
from tests.conftest import dense_H, random_graph

TRIALS = 400
JACKKNIFE = JackknifePlus().calibrate(np.zeros((2, 2)), [0, 1], [0, 1])


def test_the_coverage_over_fresh_data():
    """Of TRIALS draws of 49 calibration nodes and one new one, at least 90% hold the truth.

    The coverage is between 0.9 and 0.92, so the count is binomial: below 0.9 * 400 - 4.9 standard
    deviations, or as far above 0.92, by chance with a probability of less than 1e-5.
    """
    rng, hits = np.random.default_rng(0), 0
    for _ in range(TRIALS):
        y = rng.integers(0, 4, 50)
        scores = rng.standard_normal((50, 4)) + 2.0 * (np.arange(4) == y[:, None])
        sets = SplitConformal(0.9).calibrate(scores[:49], y[:49], np.arange(4)).sets(scores[49:])
        hits += sets[0, y[49]]
    assert 0.9 * TRIALS - 30 <= hits <= 0.92 * TRIALS + 27


def test_intervals_over_fresh_data():
    """The same for numbers, with a coverage of 0.8 to 0.82: 5 standard deviations are 40."""
    rng, hits = np.random.default_rng(1), np.zeros(2)
    for _ in range(TRIALS):
        y, f = rng.standard_normal((2, 50, 2))
        low, high = SplitConformal(0.8).calibrate(f[:49], y[:49]).intervals(f[49:])
        hits += ((low <= y[49:]) & (y[49:] <= high))[0]
    assert (hits >= 0.8 * TRIALS - 40).all()
    assert (hits <= 0.82 * TRIALS + 39).all()


def test_the_sets_of_a_model_on_a_graph():
    """Nodes are drawn at random, so those of validation and test are exchangeable."""
    data = load("digits")
    model = HERTA(lam=5.0, ridge=0.1).fit(data.graph, data.X, data.y, data.split["train"])
    Z, rest = model.transform(data.graph, data.X), np.ones(data.y.size, dtype=bool)
    rest[data.split["train"]] = False
    rest = np.random.default_rng(3).permutation(np.flatnonzero(rest))
    half = rest.size // 2
    found = SplitConformal(0.95).calibrate(Z[rest[:half]], data.y[rest[:half]], model.classes_)
    sets = found.sets(Z[rest[half:]])
    held = sets[np.arange(rest.size - half), data.y[rest[half:]]].mean()
    # Both halves vary: 5 standard deviations of sqrt(2 * 0.95 * 0.05 / half).
    assert abs(held - 0.95) <= 5 * np.sqrt(2 * 0.0475 / half) + 1 / half
    assert 0.9 < sets.sum(axis=1).mean() < 3


# ---- jackknife+ -----------------------------------------------------------------------------
def smoother(A, Y, B, ridge):
    """(outputs of B, leave-one-out, influence) of a ridge regression by dense algebra."""
    P = A.T @ A + ridge * np.eye(A.shape[1])
    own, there = A @ np.linalg.solve(P, A.T), B @ np.linalg.solve(P, A.T)
    missed = (Y - own @ Y) / (1 - np.diag(own))[:, None]
    return there @ Y, Y - missed, there


def draws(trials, seed, labels):
    """Rows of H^-1 X of a graph, with fresh targets and fresh training nodes each time."""
    rng, graph = np.random.default_rng(seed), random_graph(160, 480)
    Z = np.linalg.solve(dense_H(graph, 2.0), rng.standard_normal((160, 10)))
    Z /= Z.std()
    for _ in range(trials):
        F = Z[:, :3] + 0.7 * rng.standard_normal((160, 3)) * (1 + np.abs(Z[:, 3:6]))
        nodes = rng.permutation(160)
        y = F.argmax(axis=1) if labels else F
        Y = np.eye(3)[y] if labels else F
        yield y, nodes[:40], nodes[40:], smoother(Z[nodes[:40]], Y[nodes[:40]], Z[nodes[40:]], 1e-3)


@pytest.mark.parametrize("labels", [False, True])
def test_the_coverage_of_jackknife_plus_over_fresh_data(labels):
    """Of TRIALS draws of 40 training nodes each holds a share of the other 120 in [0, 1].

    Its mean is at least 0.8.  The draws are independent given graph and X, so by Hoeffding their
    average is below 0.8 - 0.15 by chance with a probability below exp(-2 * 400 * 0.15^2) < 2e-8;
    how it comes out is about 0.9, as the paper says.
    """
    held = []
    for y, train, test, (outputs, loo, influence) in draws(TRIALS, 5, labels):
        found = JackknifePlus(0.9).calibrate(loo, y[train], np.arange(3) if labels else None)
        if labels:
            sets = found.sets(outputs, influence)
            held.append(sets[np.arange(120), y[test]].mean())
        else:
            low, high = found.intervals(outputs, influence)
            held.append(((low <= y[test]) & (y[test] <= high)).mean(axis=0))
    assert np.mean(held, axis=0).min() >= 0.8 - 0.15
    assert 0.87 <= np.mean(held) <= 0.95
    assert found.guaranteed_ == pytest.approx(0.8)


def test_jackknife_plus_is_its_definition():
    """Quantiles of the models that were trained without each node, one after the other."""
    y, train, _, (outputs, loo, influence) = next(draws(1, 6, False))
    low, high = JackknifePlus(0.9).calibrate(loo, y[train]).intervals(outputs, influence)
    scores = np.abs(y[train] - loo)
    for j in range(3):
        for k in range(3):
            without = outputs[j, k] + influence[j] * (loo - y[train])[:, k]
            below, above = np.sort(without - scores[:, k]), np.sort(without + scores[:, k])
            assert low[j, k] == below[4 - 1]  # floor(0.1 * 41)
            assert high[j, k] == above[37 - 1]  # ceil(0.9 * 41)
    y, train, _, (outputs, loo, influence) = next(draws(1, 6, True))
    sets = JackknifePlus(0.9).calibrate(loo, y[train], np.arange(3)).sets(outputs, influence)
    for j in range(20):
        for k in range(3):
            without = outputs[j, k] + influence[j] * (loo - np.eye(3)[y[train]])[:, k]
            larger = sum(-loo[i, y[train[i]]] < -without[i] for i in range(40))
            assert sets[j, k] == (larger < 0.9 * 41)


def test_jackknife_plus_of_a_model_on_a_graph():
    """HERTA's arrays go in as they are; a node that no model is without counts as missed."""
    data = load("digits")
    nodes = np.random.default_rng(0).permutation(data.y.size)
    train, test = nodes[:600], nodes[600:]
    model = HERTA(lam=5.0, ridge=0.1)
    model.fit(data.graph, data.X, data.y, train, evaluate=test, loo="influence")
    found = JackknifePlus(0.95).calibrate(model.loo_, data.y[model.train_], model.classes_)
    sets = found.sets(model.outputs_, model.influence_)
    held = sets[np.arange(test.size), data.y[test]].mean()
    # 5 standard deviations, as in the split above: 600 nodes calibrate, 1,197 are counted.
    assert abs(held - 0.95) <= 5 * np.sqrt(0.0475 / 600 + 0.0475 / 1197) + 1 / 600
    assert held >= found.guaranteed_
    gone = model.loo_.copy()
    gone[:31] = np.nan  # more than 5% of 601
    whole = JackknifePlus(0.95).calibrate(gone, data.y[model.train_], model.classes_)
    assert whole.sets(model.outputs_[:5], model.influence_[:5]).all()


def test_too_few_nodes_make_every_set_whole():
    found = SplitConformal(0.95).calibrate(np.zeros((5, 3)), [0, 1, 2, 0, 1], np.arange(3))
    assert found.threshold_ == np.inf
    assert found.sets(np.zeros((2, 3))).all()
    exact = SplitConformal(0.5).calibrate(np.arange(3.0), np.zeros(3))  # the second of three
    assert exact.threshold_ == [1.0]


def test_a_label_that_the_model_does_not_know_is_missed():
    found = SplitConformal(0.5).calibrate(np.eye(2)[[0, 1, 0]], ["a", "b", "c"], ["a", "b"])
    assert found.threshold_ == -1.0
    assert (
        SplitConformal(0.7).calibrate(np.eye(2)[[0, 1, 0]], ["a", "b", "c"], ["b", "a"]).threshold_
        == np.inf
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SplitConformal(1.0), "between 0 and 1"),
        (lambda: SplitConformal().sets(np.zeros((1, 2))), "calibrate first"),
        (lambda: SplitConformal().calibrate(np.zeros((2, 2)), [0]), "rows"),
        (lambda: SplitConformal().calibrate(np.zeros((2, 2)), [0, 1], [0, 1, 2]), "classes"),
        (lambda: SplitConformal().calibrate(np.zeros((2, 2)), [0, 1]), "shape"),
        (lambda: SplitConformal().calibrate(np.zeros(2), [0, 1]).sets(np.zeros(2)), "intervals"),
        (lambda: JackknifePlus(0.5), "between 0.5 and 1"),
        (lambda: JackknifePlus().sets(np.zeros((1, 2)), np.zeros((1, 3))), "calibrate first"),
        (lambda: JackknifePlus().calibrate(np.zeros((2, 2)), [0, 7], [0, 1]), "holds 7"),
        (lambda: JACKKNIFE.intervals(np.zeros((1, 2)), np.zeros((1, 2))), "use sets"),
        (lambda: JACKKNIFE.sets(np.zeros((1, 2)), np.zeros((1, 3))), "2 training nodes"),
    ],
)
def test_bad_input_is_one_sentence(call, words):
    with pytest.raises((ValueError, RuntimeError), match=words):
        call()
