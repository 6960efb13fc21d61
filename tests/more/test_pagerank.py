"""Personalised PageRank against dense algebra, networkx and igraph, and its bounds against both."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import herta_gpu.more.pagerank as module
from herta_gpu import Graph, personalized_pagerank
from tests.conftest import random_graph


def dense(graph, P, damping, self_loops=False):
    """pi of each column by a dense solve of the chain; nodes without edges start anew."""
    A = graph.adjacency().toarray()
    A = A if self_loops else A - np.diag(np.diag(A))
    sums, found = A.sum(axis=0), []
    for p in (P / P.sum(axis=0)).T:
        T = np.where(sums > 0, A / np.where(sums > 0, sums, 1), p[:, None])
        found.append(np.linalg.solve(np.eye(len(p)) - damping * T, (1 - damping) * p))
    return np.array(found).T


def lonely(seed, weighted):
    """A graph with nodes without edges, in an order of its own."""
    g = random_graph(40, 90, seed, weighted)
    u, v, w = g.edges()
    return Graph.from_edges([u, v], 44, edge_weight=w).reordered("rcm")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("damping", [0.0, 0.15, 0.85, 0.999])
@pytest.mark.parametrize("chunk", [7, 1 << 19])
def test_every_number_is_within_its_bound(weighted, self_loops, damping, chunk, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    g, rng = lonely(0, weighted), np.random.default_rng(0)
    P = rng.random((44, 5)) * (rng.random((44, 5)) < 0.2)
    P[43] = [0, 0, 1, 1, 1]  # without an edge
    P[:43, 4] = 0
    exact = dense(g, P, damping, self_loops)
    np.testing.assert_allclose(exact.sum(axis=0), 1, rtol=1e-9)
    for tol in (1e-2, 1e-9):
        found = personalized_pagerank(g, P, damping, tol, self_loops)
        assert found.error.max() <= tol * (1 + 1e-6)
        assert (abs(found.scores - exact) <= found.error + 1e-14).all()
    np.testing.assert_allclose(found.scores, exact, atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), power=st.integers(-12, -1), damping=st.floats(0.01, 0.9999))
def test_the_bound_holds_for_any_graph_and_tolerance(seed, power, damping):
    g = lonely(seed, seed % 2 == 0)
    P = np.random.default_rng(seed).random((44, 3)) ** 8
    found = personalized_pagerank(g, P, damping, 10.0**power)
    slack = 1e-14 / (1 - damping)  # of the dense solve
    assert (abs(found.scores - dense(g, P, damping)) <= found.error + slack).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_networkx_says_the_same(weighted):
    g = lonely(3, weighted)
    u, v, w = g.edges()
    theirs = nx.Graph()
    theirs.add_nodes_from(range(44))
    ones = np.ones(len(u)) if w is None else w
    theirs.add_weighted_edges_from(zip(u.tolist(), v.tolist(), ones.tolist(), strict=True))
    seeds = [[0], [3, 5, 41], {7: 2.0, 9: 1.0}]
    found = personalized_pagerank(g, seeds, tol=1e-10)
    for column, one in zip(found.scores.T, seeds, strict=True):
        weights = one if isinstance(one, dict) else dict.fromkeys(one, 1.0)
        pi = nx.pagerank(theirs, 0.85, personalization=weights, tol=1e-13, max_iter=10**4)
        np.testing.assert_allclose(column, [pi[i] for i in range(44)], atol=1e-9)


def test_igraph_says_the_same():
    igraph = pytest.importorskip("igraph")
    g = random_graph(60, 200, seed=4, weighted=True)
    u, v, w = g.edges()
    theirs = igraph.Graph(n=60, edges=list(zip(u.tolist(), v.tolist(), strict=True)))
    assert min(theirs.degree()) > 0
    found = personalized_pagerank(g, [[0], [3, 5]], tol=1e-10).scores.T
    for column, one in zip(found, ([0], [3, 5]), strict=True):
        pi = theirs.personalized_pagerank(reset_vertices=one, weights=w.tolist())
        np.testing.assert_allclose(column, pi, atol=1e-9)


@pytest.mark.parametrize("tol", [1e-1, 1e-3, 1e-6])
def test_who_is_not_undecided_is_truly_in_or_out(tol):
    g = random_graph(80, 300, seed=2)
    P = np.eye(80)[:, :20]
    exact, found = dense(g, P, 0.85), personalized_pagerank(g, P, tol=tol)
    open_ = 0
    for j, top in enumerate(found.top(5)):
        best = set(np.argsort(-exact[:, j])[:5].tolist())
        sure, unsure = set(top.nodes.tolist()), set(top.undecided.tolist())
        assert sure - unsure <= best <= sure | unsure
        assert top.scores.tolist() == found.scores[top.nodes, j].tolist()
        assert (np.diff(top.scores) <= 0).all()
        open_ += len(unsure)
    assert (open_ > 100) == (tol == 1e-1)
    assert (open_ == 0) == (tol == 1e-6)


def test_nodes_that_tie_are_never_decided():
    star = Graph.from_edges([[0, 0, 0, 0], [1, 2, 3, 4]])
    (top,) = personalized_pagerank(star, [[0]], tol=1e-12).top(3)
    assert top.nodes[0] == 0
    assert top.undecided.tolist() == [1, 2, 3, 4]
    (all_,) = personalized_pagerank(star, [[0]]).top(5)
    assert all_.undecided.size == 0


def test_forms_of_seeds():
    g = random_graph(30, 60)
    P = np.zeros((30, 2))
    P[4, 0], P[[2, 7], 1] = 1, [1, 3]
    same = [P, sp.csc_array(P), [[4], {2: 1, 7: 3}], [np.array([4]), {2: 0.5, 7: 1.5}]]
    found = [personalized_pagerank(g, one).scores for one in same]
    assert all((one == found[0]).all() for one in found)
    twice = personalized_pagerank(g, [[2, 7, 7, 7]]).scores[:, 0]
    np.testing.assert_allclose(twice, found[0][:, 1], atol=1e-12)


@pytest.mark.parametrize(
    ("seeds", "more", "words"),
    [
        ([0, 3], {}, "a list of sets"),
        ("ab", {}, "a list of sets"),
        ([[0], []], {}, "needs a node"),
        ([], {}, "needs a node"),
        ([{0: -1.0, 1: 2.0}], {}, ">= 0"),
        ([{0: np.nan}], {}, "finite"),
        ([[9]], {}, "node id 9"),
        (np.ones((4, 2)), {}, r"\(5, k\) array"),
        ([[0]], {"damping": 1.0}, "damping must lie between"),
        ([[0]], {"tol": 0.0}, "tol"),
        ([[0]], {"self_loops": "yes"}, "self_loops"),
    ],
)
def test_what_is_wrong_is_said(seeds, more, words):
    g = Graph.from_edges([[0, 1, 2, 3], [1, 2, 3, 4]])
    with pytest.raises((ValueError, TypeError), match=words):
        personalized_pagerank(g, seeds, **more)
    with pytest.raises(ValueError, match="count"):
        personalized_pagerank(g, [[0]]).top(6)
