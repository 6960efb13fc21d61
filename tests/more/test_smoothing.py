"""Correct and Smooth against dense algebra written from the paper."""

from __future__ import annotations

import numpy as np
import pytest

from herta_gpu import HERTA, CorrectAndSmooth, Graph
from herta_gpu.backends import get_backend
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.more.labels import dirichlet
from tests.conftest import dense_H, problem
from tests.more import awkward_graph


def dense(graph, B, y, rows, lam1, lam2, correct="autoscale", scale=1.0):
    """Both steps, from the formulas of the paper."""
    n, c = B.shape
    Y = np.eye(c)[y[rows]]
    E = np.zeros((n, c))
    E[rows] = Y - B[rows]
    if correct == "autoscale":
        E_hat = np.linalg.solve(dense_H(graph, lam1), E)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.abs(E).sum() / len(rows) / np.abs(E_hat).sum(axis=1)
        factor[~(factor <= 1000)] = 1.0
        B = B + factor[:, None] * E_hat
    elif correct == "fixed":
        H = dense_H(graph, lam1)
        U = np.setdiff1d(np.arange(n), rows)
        E[U] = np.linalg.solve(H[np.ix_(U, U)], -H[np.ix_(U, rows)] @ E[rows])
        B = B + scale * E
    G = B.copy()
    G[rows] = Y
    return np.linalg.solve(dense_H(graph, lam2), G)


def scores(n, c, seed=0):
    B = np.random.default_rng(seed).random((n, c))
    return B / B.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("correct", ["autoscale", "fixed", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_both_steps_are_those_of_the_paper_within_the_bound(correct, weighted):
    g, _, y, train = problem(n=250, weighted=weighted)
    B = scores(250, 3)
    expected = dense(g, B, y, train, 8.0, 3.0, correct, 0.7)
    for graph in (g, g.reordered()):
        model = CorrectAndSmooth(8.0, 3.0, correct=correct, scale=0.7).fit(graph, B, y, train)
        off = np.abs(model.Z_ - expected)
        assert (off <= model.error_[:, None] + 1e-14).all()
        assert off.max() < 1e-5
        assert model.error_.max() < 1e-3
        assert model.undecided_ == 0
        assert (model.predict() == expected.argmax(axis=1)).all()


def test_a_node_whose_correction_is_tiny_is_left_as_it_is():
    """A long path: far from the labels the correction would be enlarged more than 1000 times."""
    n = 60
    g = Graph.from_edges([np.arange(n - 1), np.arange(1, n)])
    y, B = np.zeros(n, dtype=int), scores(n, 2)
    model = CorrectAndSmooth(0.5, 0.1).fit(g, B, y, [0])
    expected = dense(g, B, y, [0], 0.5, 0.1)
    assert (np.abs(model.Z_ - expected) <= model.error_[:, None]).all()
    assert np.abs(model.Z_ - expected).max() < 1e-5


def test_a_node_on_the_edge_of_being_enlarged_is_within_the_bound_either_way(monkeypatch):
    g = Graph.from_edges([[0, 1], [1, 2]])
    H = dense_H(g, 1.0)
    B, y = np.array([[0.5, 0.5], [0.2, 0.8], [0.3, 0.7]]), np.array([0, 0, 0])
    E = np.zeros((3, 2))
    E[0] = [0.5, -0.5]
    size = np.abs(np.linalg.solve(H, E))[2].sum()
    coarse = CorrectAndSmooth(1.0, 1.0, tol=1.0).fit(g, B, y, [0])
    assert coarse.on_the_edge_ == 0  # the ratio is about 10 here, not 1000
    monkeypatch.setattr("herta_gpu.more.labels._MOST", 1.0 / size)  # sigma is 1: on the edge
    found = CorrectAndSmooth(1.0, 1.0).fit(g, B, y, [0])
    assert found.on_the_edge_ == 1
    for enlarged in (True, False):
        E_hat = np.linalg.solve(H, E)
        factor = 1.0 / np.abs(E_hat).sum(axis=1)
        factor[2] = factor[2] if enlarged else 1.0
        G = B + factor[:, None] * E_hat
        G[0] = [1.0, 0.0]
        assert (np.abs(found.Z_ - np.linalg.solve(H, G)) <= found.error_[:, None]).all()


def test_the_dirichlet_problem_with_every_node_known_and_with_isolated_ones():
    g = Graph.from_edges([[0, 1], [1, 2]], num_nodes=5)
    H = RegularizedLaplacian(g, 7.0, get_backend("cpu"), "float32")
    E = np.arange(10.0).reshape(5, 2)
    assert (dirichlet(H, np.arange(5), E, 1e-8) == E).all()
    Z = dirichlet(H, np.array([1]), E[1:2], 1e-10)
    assert np.allclose((dense_H(g, 7.0) @ Z)[[0, 2, 3, 4]], 0, atol=1e-8)
    assert (Z[3:] == 0).all()


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_a_fitted_model_is_a_base(loss):
    g, X, y, train = problem(n=150)
    base = HERTA(lam=2.0, loss=loss, ridge=0.1).fit(g, X, y, train)
    F = base.transform(g, X).astype(float)
    if loss == "ce":
        F = np.exp(F) / np.exp(F).sum(axis=1, keepdims=True)
    model = CorrectAndSmooth(4.0, 2.0).fit(g, base, y, train, X=X)
    assert np.allclose(model.Z_, dense(g, F, y, train, 4.0, 2.0), atol=1e-5)


def test_validation_and_test_labels_change_no_bit_unless_asked():
    g, _, y, _ = problem(n=200)
    train, valid, test = np.split(np.random.default_rng(0).permutation(200), [80, 140])
    B, other = scores(200, 3), y.copy()
    other[valid], other[test] = (y[valid] + 1) % 3, (y[test] + 2) % 3
    first = CorrectAndSmooth().fit(g, B, y, train)
    assert (CorrectAndSmooth().fit(g, B, other, train).Z_ == first.Z_).all()
    asked = CorrectAndSmooth().fit(g, B, y, train, valid=valid)
    assert np.allclose(asked.Z_, dense(g, B, y, np.union1d(train, valid), 20.0, 20.0), atol=1e-5)


def test_scores_may_have_more_classes_than_the_training_nodes():
    g, _, y, train = problem(n=100, c=3)
    y = np.where(y == 1, 2, y)
    B = scores(100, 4)
    assert np.allclose(
        CorrectAndSmooth(1.0, 1.0).fit(g, B, y, train).Z_,
        dense(g, B, y, train, 1.0, 1.0),
        atol=1e-5,
    )
    assert CorrectAndSmooth().fit(g, B[:, :2], y, train).classes_.tolist() == [0, 2]


def test_alpha_is_that_of_the_paper_and_one_is_refused():
    g, _, y, train = problem(n=60)
    B = scores(60, 3)
    by_alpha = CorrectAndSmooth(correct_alpha=0.75, smooth_alpha=0.5).fit(g, B, y, train)
    assert (by_alpha.Z_ == CorrectAndSmooth(3.0, 1.0).fit(g, B, y, train).Z_).all()
    for params in ({"correct_alpha": 1.0}, {"smooth_alpha": 1}, {"smooth_lam": np.inf}):
        with pytest.raises(ValueError, match="lam = infinity, which has no solution"):
            CorrectAndSmooth(**params).fit(g, B, y, train)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base": np.ones((59, 3))}, "has 59 rows but the graph has 60 nodes"),
        ({"base": np.ones(60)}, "a column per class"),
        ({"base": np.full((60, 3), np.nan)}, "NaN or infinity"),
        ({"base": np.ones((60, 2))}, "2 columns but there are 3 classes"),
        ({"y": np.ones((60, 2))}, "one class label per node"),
        ({"base": HERTA()}, "X is missing"),
    ],
)
def test_bad_input_is_one_sentence(change, words):
    g, _, y, train = problem(n=60)
    given = {"base": scores(60, 3), "y": y, **change}
    with pytest.raises(ValueError, match=words):
        CorrectAndSmooth().fit(g, train=train, **given)


def test_a_correction_of_lam_0_is_none():
    g, _, y, train = problem(n=60)
    found = CorrectAndSmooth(0.0, 3.0).fit(g, scores(60, 3), y, train)
    assert (found.Z_ == CorrectAndSmooth(smooth_lam=3.0, correct="none").fit(
        g, scores(60, 3), y, train).Z_).all()  # fmt: skip
    assert np.allclose(found.Z_, dense(g, scores(60, 3), y, train, 1.0, 3.0, "none"), atol=1e-5)


def test_it_is_saved_and_read_again(tmp_path):
    g, _, y, train = problem(n=60)
    model = CorrectAndSmooth(correct="fixed").fit(g, scores(60, 3), y, train)
    model.save(tmp_path / "cs.npz")
    again = CorrectAndSmooth.load(tmp_path / "cs.npz")
    assert (again.Z_ == model.Z_).all()
    assert repr(again) == "CorrectAndSmooth(correct='fixed')"


def awkward(seed):
    """(graph, scores, labels, training nodes, validation nodes, parameters), all at random.

    A base that is right (no error is left to correct), scores of any size, an empty validation set.
    """
    rng, graph, c, y, rows = awkward_graph(seed)
    n = graph.num_nodes
    B = rng.random((n, c)) * 10.0 ** rng.integers(-6, 7)
    if rng.integers(0, 4) == 0:
        B[rows] = np.eye(c)[y[rows]]
    valid = [None, [], rng.permutation(n)[:3]][rng.integers(0, 3)]
    params = {
        "correct_lam": float(10.0 ** rng.uniform(-2, 3)),
        "smooth_lam": float(10.0 ** rng.uniform(-2, 3)),
        "correct": str(rng.choice(["autoscale", "autoscale", "fixed", "none"])),
        "scale": float(rng.uniform(0, 3)),
        "tol": float(10.0 ** rng.integers(-9, -2)),
        "dtype": str(rng.choice(["float32", "float64"])),
    }
    return graph, B, y, rows, valid, params


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_any_graph_base_and_split_is_within_the_bound(first):
    for seed in range(first, first + 40):
        graph, B, y, rows, valid, params = awkward(seed)
        model = CorrectAndSmooth(**params).fit(graph, B, y, rows, valid=valid)
        known = rows if valid is None else np.union1d(rows, valid).astype(int)
        lams = params["correct_lam"], params["smooth_lam"]
        expected = dense(graph, B, y, known, *lams, params["correct"], params["scale"])
        # What dense algebra itself may be off by, in float64.
        size = np.abs(B).max() + 1
        rounding = (
            1e-13 * (1 + 2 * max(lams)) * size * (1000 if "autoscale" in params.values() else 1)
        )
        off = np.abs(model.Z_ - expected)
        assert (off <= model.error_[:, None] + rounding).all(), (seed, params)
        assert np.isfinite(model.error_).all()
        if model.undecided_ == 0 and B.shape[1] > 1:
            best = np.sort(expected, axis=1)
            clear = best[:, -1] - best[:, -2] > 2 * rounding
            assert (model.predict()[clear] == expected.argmax(axis=1)[clear]).all(), seed
