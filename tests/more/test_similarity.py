"""Weights of edges against their definitions, and fits on the graphs that they make."""

from __future__ import annotations

import os
from itertools import product

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.metrics import jaccard_score

import herta_gpu.more.similarity as module
from herta_gpu import HERTA, Graph, similarity
from tests.conftest import closed_form, dense_H, random_graph, shared


def one_by_one(graph, X, kind):
    """From the definition, an edge at a time."""
    X = X.toarray() if sp.issparse(X) else X
    found = []
    for u, v in zip(*graph.edges()[:2], strict=True):
        a, b = X[u].astype(float), X[v].astype(float)
        if not a.any() or not b.any():
            found.append(0.0)
        elif kind == "jaccard":
            found.append(jaccard_score(a != 0, b != 0))
        else:
            found.append(max(0.0, a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
    return np.array(found)


@pytest.mark.parametrize("kind", ["jaccard", "cosine"])
@pytest.mark.parametrize("make", [np.asarray, sp.csr_array, sp.csc_matrix, np.float32])
@pytest.mark.parametrize("at_once", [1, 37, 1 << 21])
def test_each_weight_is_that_of_its_definition(kind, make, at_once, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    g = random_graph(40, 150, weighted=True).reordered("rcm")
    X = rng.standard_normal((40, 9)) * (rng.random((40, 9)) < 0.3)
    X[3] = 0.0
    found = similarity(g, make(X), kind)
    np.testing.assert_allclose(found, one_by_one(g, make(X), kind), atol=1e-15, rtol=1e-6)
    assert found.min() == 0
    assert 0.9 < found.max() <= 1


@pytest.mark.parametrize("unit", [1e-310, 1e-200, 1.0, 1e200, 1e308])
@pytest.mark.parametrize("make", [np.asarray, sp.csr_array])
def test_units_that_cannot_be_squared(unit, make):
    g = Graph.from_edges([[0, 1], [1, 2]])
    X = make(np.array([[0.6, 0.8, 0.0], [0.0, 0.8, 0.6], [0.0, 0.8, 0.6]]) * unit)
    np.testing.assert_allclose(similarity(g, X, "cosine"), [0.64, 1.0], rtol=1e-12)


def test_no_edges_and_empty_rows():
    g = Graph.from_edges(np.zeros((2, 0), int), num_nodes=3)
    assert similarity(g, np.ones((3, 2))).shape == (0,)
    assert similarity(Graph.from_edges([[0], [1]]), sp.csr_array((2, 5)), "cosine").tolist() == [0]


@pytest.mark.parametrize(
    ("X", "kind", "words"),
    [
        (np.ones((3, 2)), "jacard", '"jaccard", "cosine"'),
        (np.ones((4, 2)), "jaccard", "4 rows but the graph has 3"),
        (np.full((3, 2), np.nan), "cosine", "NaN"),
        (np.ones((3, 0)), "cosine", "no columns"),
    ],
)
def test_what_is_wrong_is_said(X, kind, words):
    with pytest.raises(ValueError, match=words):
        similarity(Graph.from_edges([[0, 1], [1, 2]]), X, kind)


# ---- Graph.reweighted ----------------------------------------------------------------------
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("order", [None, "rcm"])
@pytest.mark.parametrize("kept", [0.8, 1.0])
def test_reweighted_is_I_plus_B_weights_B(weighted, order, kept):
    g = random_graph(30, 90, weighted=weighted)
    g = g if order is None else g.reordered(order)
    rng = np.random.default_rng(1)
    weight = rng.random(90) * (rng.random(90) < kept)
    made = g.reweighted(weight)
    assert made.num_edges == np.count_nonzero(weight)
    u, v, w = g.edges()
    callers = g.degree[g.stored(np.arange(30))]
    B = np.zeros((90, 30))
    B[np.arange(90), u], B[np.arange(90), v] = 1, -1
    B /= np.sqrt(callers)
    L = B.T @ ((weight * (1.0 if w is None else w))[:, None] * B)
    np.testing.assert_allclose(made.to_csr().toarray(), L, atol=1e-14)
    assert np.linalg.eigvalsh(L)[-1] <= made.lambda_max_bound < 2
    # What an edge loses is in the self-loops: the rows of A sum to the degrees.
    A = made.adjacency().toarray()
    np.testing.assert_allclose(A.sum(axis=1), callers, rtol=1e-13)
    assert A.diagonal().min() >= 1 - 1e-12
    again = Graph.from_edges(np.nonzero(np.triu(A)), 30, A[np.nonzero(np.triu(A))])
    np.testing.assert_allclose(again.to_csr().toarray(), L, atol=1e-13)


def test_teams_parts_and_files(tmp_path):
    g, team = random_graph(20, 40), object()
    weight = np.linspace(0.1, 1, 40)
    assert g.with_team(team).reweighted(weight).team is team

    class Part(Graph):
        by_nodes = True

    with pytest.raises(ValueError, match="split by nodes"):
        Part(g.indptr, g.indices).reweighted(weight)
    made = g.reweighted(weight)
    opened = made.save(tmp_path / "g")
    assert (opened.to_csr() != made.to_csr()).nnz == 0
    twice = made.reweighted(weight)
    assert abs(twice.to_csr() - g.reweighted(weight**2).to_csr()).max() < 1e-15


def test_weights_of_one_change_nothing():
    g, X, y, train = problem_of(0)
    one = g.reweighted(np.ones(g.num_edges))
    assert (one.to_csr() != g.to_csr()).nnz == 0
    a, b = (HERTA(lam=5.0, ridge=0.1).fit(graph, X, y, train).W_ for graph in (g, one))
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def problem_of(seed):
    rng = np.random.default_rng(seed)
    g = random_graph(120, 400, seed)
    return g, rng.standard_normal((120, 6)), rng.integers(0, 3, 120), np.arange(0, 120, 2)


def test_a_fit_on_it_has_the_optimum_of_dense_algebra():
    g, X, y, train = problem_of(3)
    made = g.reweighted(similarity(g, X, "cosine"))
    model = HERTA(lam=8.0, ridge=0.5, tol=1e-9).fit(made, X, y, train, loo=True)
    W, best = closed_form(made, X, np.eye(3)[y[train]], train, 8.0, 0.5)
    assert model.status_ == "certified"
    assert model.history_[-1]["loss"] - best <= 1e-9 * best
    np.testing.assert_allclose(model.W_, W, atol=1e-4)
    A = np.linalg.solve(dense_H(made, 8.0), X)[train]
    left = np.delete(np.arange(60), 7)
    Y = np.eye(3)[y[train]]
    refit = np.linalg.solve(A[left].T @ A[left] + 0.5 * np.eye(6), A[left].T @ Y[left])
    np.testing.assert_allclose(model.loo_[7], A[7] @ refit, atol=1e-4)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (np.ones(2), "each of the 3 edges"),
        (["a", "b", "c"], "each of the 3 edges"),
        ([1.0, 1.0, 1.5], "between 0 and 1"),
        ([1.0, 1.0, -0.5], "between 0 and 1"),
        ([1.0, 1.0, np.nan], "between 0 and 1"),
    ],
)
def test_wrong_weights_are_refused(weight, words):
    g = Graph.from_edges([[0, 1, 2], [1, 2, 0]])
    with pytest.raises(ValueError, match=words):
        g.reweighted(weight)


@pytest.mark.parametrize(
    ("name", "plain", "weighted"), [("cora", 0.680, 0.810), ("citeseer", 0.704, 0.736)]
)
def test_an_attack_is_taken_back(name, plain, weighted):
    """Mettack, 20% of the edges; lam and ridge by the validation nodes."""
    data = shared(f"{name}-mettack-20")
    folder = os.environ["HERTA_DATA"]
    with np.load(f"{folder}/{name}-mettack-20.npz") as f:
        parts = [f[part] for part in ("train", "valid", "test")]
    X = (
        sp.diags_array(1 / np.sqrt(np.maximum(data.X.multiply(data.X).sum(axis=1), 1e-300)))
        @ data.X
    )
    weight = np.minimum(1, 5 * similarity(data.graph, X))
    for graph, expected in ((data.graph, plain), (data.graph.reweighted(weight), weighted)):
        found = []
        for lam, ridge in product((1.0, 3.0, 10.0), (0.3, 1.0)):
            model = HERTA(lam=lam, ridge=ridge, fit_intercept=True).fit(graph, X, data.y, parts[0])
            found.append([model.score(graph, X, data.y, part) for part in parts[1:]])
        assert max(found, key=lambda scores: scores[0])[1] == pytest.approx(expected, abs=0.006)
