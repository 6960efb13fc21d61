"""Prediction sets hold the truth as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.conformal import SplitConformal
from herta_gpu.datasets import load

TRIALS = 400
EVEN, NONE = np.zeros((2, 2)), np.array([[0.0, np.nan], [0.0, 0.0]])


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
        (lambda: SplitConformal().calibrate(np.zeros((2, 2)), 1.0), "one target for each"),
        (lambda: SplitConformal().calibrate(np.zeros((0, 2)), [], [0, 1]), "one node at least"),
        (lambda: SplitConformal().calibrate(np.float64(3), [1.0]), "one row per node"),
        (lambda: SplitConformal().calibrate(np.zeros((2, 2, 1)), [0, 1], [0, 1]), "one row per"),
        (lambda: SplitConformal().calibrate([1.0, np.inf], [1.0, np.inf]), "infinite"),
        (lambda: SplitConformal().calibrate(np.zeros((2, 2)), [0]), "rows"),
        (lambda: SplitConformal().calibrate(np.zeros((2, 2)), [0, 1], [0, 1, 2]), "classes"),
        (lambda: SplitConformal().calibrate(np.zeros((2, 2)), [0, 1]), "shape"),
        (lambda: SplitConformal().calibrate(np.zeros(2), [0, 1]).sets(np.zeros(2)), "intervals"),
        (lambda: SplitConformal().calibrate(NONE, [0, 1], [0, 1]), "1 of 2 nodes have NaN"),
        (lambda: SplitConformal().calibrate(NONE, np.zeros((2, 2))), "1 of 2 nodes have NaN"),
        (lambda: SplitConformal().calibrate(np.zeros(2), [0, np.nan]), "1 of 2 nodes have no"),
        (lambda: SplitConformal().calibrate(EVEN, [0, -1], [0, 1]), "1 of 2 nodes have no"),
        (lambda: SplitConformal().calibrate(EVEN, ["a", ""], ["a", "b"]), "1 of 2 nodes have no"),
        (lambda: SplitConformal().calibrate(EVEN, ["a", None], ["a", "b"]), "1 of 2 nodes have no"),
        (lambda: SplitConformal().calibrate(EVEN, EVEN, [0, 1]), "one label per node"),
        (lambda: SplitConformal().calibrate(EVEN, [0, 1], [0, 1]).sets(np.zeros((3, 4))), "width"),
        (lambda: SplitConformal().calibrate(EVEN, [0, 1], [0, 1]).sets(NONE), "1 of 2 nodes"),
        (lambda: SplitConformal().calibrate(EVEN, EVEN).intervals(np.zeros((3, 1))), "width"),
        (lambda: SplitConformal().calibrate(EVEN, EVEN).intervals(NONE), "1 of 2 nodes"),
        (lambda: SplitConformal(coverage="a"), "coverage must be a number"),
    ],
)
def test_bad_input_is_one_sentence(call, words):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        call()


def test_labels_in_one_column_and_a_class_that_is_called_minus_one():
    scores = np.random.default_rng(0).standard_normal((40, 2))
    y = np.where(np.arange(40) % 3 == 0, -1, 1)
    flat, column = (SplitConformal(0.7).calibrate(scores, a, [-1, 1]) for a in (y, y[:, None]))
    assert flat.threshold_ == column.threshold_ == -np.sort(scores[range(40), y // 2 + 1])[11]
