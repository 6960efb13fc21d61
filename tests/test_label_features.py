"""Cross-fitted label features: what they are, and that no label leaks."""

from __future__ import annotations

import numpy as np
import pytest

from herta_gpu.label_features import label_features
from tests.conftest import dense_H, problem


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
