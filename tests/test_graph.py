from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from herta_gpu import Graph
from tests.conftest import dense_H, random_graph


@st.composite
def edge_lists(draw):
    """n, a set of weighted undirected edges, and one way to list them."""
    n = draw(st.integers(1, 12))
    pairs = draw(
        st.dictionaries(
            st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).map(lambda p: (min(p), max(p))),
            st.integers(1, 4),
            max_size=25,
        )
    )
    listed = []
    for (u, v), w in pairs.items():
        style = draw(st.sampled_from(["ahead", "back", "both", "split"]))
        if u == v or style == "ahead":
            listed.append((u, v, w))
        elif style == "back":
            listed.append((v, u, w))
        elif style == "both":
            listed += [(u, v, w), (v, u, w)]
        else:  # repeated edges of one direction add up
            listed += [(v, u, w / 2), (v, u, w / 2)]
    return n, pairs, draw(st.permutations(listed))


@settings(max_examples=150, deadline=None)
@given(edge_lists())
def test_laplacian_is_the_papers_definition(case):
    n, pairs, listed = case
    A = np.zeros((n, n))
    for (u, v), w in pairs.items():
        A[u, v] = A[v, u] = w
    A[np.diag_indices(n)] = np.where(np.diag(A) > 0, np.diag(A), 1)
    s = 1 / np.sqrt(A.sum(axis=1))
    L_hat = np.eye(n) - s[:, None] * A * s[None, :]
    edges = np.array([(u, v) for u, v, _ in listed], dtype=int).reshape(-1, 2).T
    g = Graph.from_edges(edges, num_nodes=n, edge_weight=[w for *_, w in listed])
    np.testing.assert_allclose(g.to_csr().toarray(), L_hat, atol=1e-14)
    np.testing.assert_allclose(g.adjacency().toarray(), A, atol=1e-14)
    assert g.lambda_max_bound >= np.linalg.eigvalsh(L_hat)[-1] - 1e-12


@pytest.mark.parametrize(
    ("edges", "asked", "A"),
    [
        # Without weights a pair is one edge however often it is listed, and so is a loop.
        ([[0, 0, 1], [1, 1, 2]], {}, [[1, 1, 0], [1, 1, 1], [0, 1, 1]]),
        ([[0, 0, 1, 2], [1, 1, 0, 1]], {}, [[1, 1, 0], [1, 1, 1], [0, 1, 1]]),
        ([[0, 1, 1, 2], [1, 0, 2, 1]], {}, [[1, 1, 0], [1, 1, 1], [0, 1, 1]]),
        ([[0, 0, 0], [0, 0, 1]], {}, [[1, 1], [1, 1]]),
        # With weights, or on request, repeats of one direction add up, but not both directions.
        ([[0, 0, 1, 2, 2], [1, 1, 2, 2, 2]], {"edge_weight": np.ones(5)}, "summed"),
        ([[0, 0, 1, 2, 2], [1, 1, 2, 2, 2]], {"duplicates": "sum"}, "summed"),
        ([[0, 0, 1, 1], [1, 1, 0, 0]], {"duplicates": "sum"}, [[1, 2], [2, 1]]),
        # Loops keep their weight, missing ones get 1; edges of weight 0 are none.
        ([[0, 0], [0, 1]], {"edge_weight": [5.0, 1.0]}, [[5, 1], [1, 1]]),
        ([[0, 1], [1, 2]], {"edge_weight": [0.0, 1.0]}, [[1, 0, 0], [0, 1, 1], [0, 1, 1]]),
    ],
)
def test_what_edges_become(edges, asked, A):
    g = Graph.from_edges(edges, **asked)
    A = [[1, 2, 0], [2, 1, 1], [0, 1, 2]] if A == "summed" else A
    assert g.adjacency().toarray().tolist() == A
    assert asked or g.weights is None
    assert (g.indptr.dtype, g.indices.dtype) == (np.int64, np.int32)


@pytest.mark.parametrize(
    ("edges", "asked", "u_v"),
    [
        ([[0, 0, 1], [1, 1, 0]], {"duplicates": "sum"}, (2, 1)),
        ([[0, 1], [1, 0]], {"edge_weight": [2.0, 3.0]}, (2, 3)),
    ],
)
def test_conflicting_directions_are_an_error(edges, asked, u_v):
    message = rf"Edge \(0, 1\) has weight {u_v[0]} but \(1, 0\) has {u_v[1]}"
    with pytest.raises(ValueError, match=message):
        Graph.from_edges(edges, **asked)


def test_isolated_nodes_and_components():
    g = Graph.from_edges([[0, 2], [1, 3]], num_nodes=7)
    assert g.num_isolated == 3
    assert g.num_components == 5
    assert np.abs(g.to_csr().toarray()[4:]).max() == 0
    assert "3 isolated nodes" in repr(g)


@pytest.mark.parametrize("method", ["rcm", "degree", "communities"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reordering_is_invisible(method, weighted):
    g = random_graph(60, 150, weighted=weighted)
    r = g.reordered(method).reordered("degree")
    assert r.order is not None
    assert (r.order != np.arange(60)).any()
    np.testing.assert_allclose(r.to_csr().toarray(), g.to_csr().toarray(), atol=1e-15)
    np.testing.assert_allclose(r.adjacency().toarray(), g.adjacency().toarray(), atol=1e-15)
    data = np.ones(r.indices.size) if r.weights is None else r.weights
    A = sp.csr_array((data, r.indices, r.indptr), shape=(60, 60))
    assert A.has_sorted_indices
    assert (A != A.T).nnz == 0
    ours = {tuple(sorted(e)) for e in np.stack(r.edges()[:2]).T.tolist()}
    assert ours == {tuple(sorted(e)) for e in np.stack(g.edges()[:2]).T.tolist()}


def test_reverse_cuthill_mckee_brings_neighbours_together():
    n = 400
    path = np.random.default_rng(0).permutation(n)
    g = Graph.from_edges(np.stack([path[:-1], path[1:]]), num_nodes=n)

    def bandwidth(graph: Graph) -> int:
        row = np.repeat(np.arange(n), np.diff(graph.indptr))
        return int(np.abs(row - graph.indices).max())

    assert bandwidth(g.reordered("rcm")) <= 2 < bandwidth(g)


def test_communities_are_stored_together(monkeypatch):
    """40 cliques of 30 nodes in random order, with as many edges between them as a fifth."""
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    nodes = rng.permutation(1200).reshape(40, 30)
    u, v = np.triu_indices(30, 1)
    inside = np.concatenate([[clique[u], clique[v]] for clique in nodes], axis=1)
    across = rng.integers(0, 1200, (2, inside.shape[1] // 5))
    g = Graph.from_edges(np.concatenate([inside, across], axis=1))
    r = g.reordered("communities")

    def near(graph: Graph) -> float:
        row = np.repeat(np.arange(1200), np.diff(graph.indptr))
        return float((np.abs(row - graph.indices) < 30).mean())

    assert near(g) < 0.1  # a random order
    assert near(r) > 0.6  # five of six edges are within a clique; a few cliques are split
    monkeypatch.setattr("herta_gpu.graph.LARGE", 1000)
    monkeypatch.setattr("herta_gpu.plumbing.building.COMMUNITY", 60)
    assert g.in_local_order().order is not None
    # Without communities the order stays; so it does where the caller has chosen one.
    flat = random_graph(1200, 20_000)
    assert flat.in_local_order() is flat
    assert r.in_local_order() is r


def test_sampled_graph_keeps_the_degrees():
    g = random_graph(30, 100)
    keep = np.arange(100) % 3 == 0
    factor = np.full(100, 3.0)
    sampled = g.with_edges(keep, factor)
    assert sampled.num_edges == keep.sum()
    np.testing.assert_array_equal(sampled.degree, g.degree)
    u, v, _ = g.edges()
    B = np.zeros((100, 30))
    B[np.arange(100), u], B[np.arange(100), v] = 1, -1
    B /= np.sqrt(g.degree)
    L_tilde = 3 * B[keep].T @ B[keep]
    np.testing.assert_allclose(sampled.to_csr().toarray(), L_tilde, atol=1e-14)
    top = np.linalg.eigvalsh(L_tilde)[-1]
    assert top <= sampled.lambda_max_bound


def test_dense_reference_agrees_with_to_csr():
    g = random_graph(25, 60, weighted=True).reordered("rcm")
    np.testing.assert_allclose(dense_H(g, 3.0), np.eye(25) + 3 * g.to_csr().toarray(), atol=1e-13)


@pytest.mark.parametrize("chunk", [1, 3, 17, 1 << 20])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_bound_of_lambda_max_in_chunks(chunk, weighted, monkeypatch):
    """max over the edges of dt_u/d_u + dt_v/d_v; above the largest eigenvalue."""
    monkeypatch.setattr("herta_gpu.graph._GATHERED", chunk)
    for seed in range(5):
        g = random_graph(40, 30 * (seed + 1), seed, weighted)  # the first has isolated nodes
        A = g.adjacency().toarray()
        off = A - np.diag(np.diag(A))
        ratio = off.sum(axis=1) / A.sum(axis=1)
        u, v = np.nonzero(off)
        assert g.lambda_max_bound == pytest.approx((ratio[u] + ratio[v]).max(), rel=1e-11)
        assert g.lambda_max_bound >= np.linalg.eigvalsh(g.to_csr().toarray())[-1]


@pytest.mark.parametrize("weighted", [False, True])
def test_nobody_writes_into_a_graph(weighted, tmp_path):
    """A changed neighbour would be read out of bounds, by compiled code that does not look."""
    made = random_graph(60, 200, weighted=weighted)
    graphs = {
        "made": made,
        "reordered": made.reordered(),
        "mapped": made.save(tmp_path / "g"),
        "copied": copy.deepcopy(made.reordered()),
        "sent": pickle.loads(pickle.dumps(made.reordered())),
        "sampled": made.with_edges(np.ones(made.num_edges, bool), np.full(made.num_edges, 2.0)),
    }
    for name, g in graphs.items():
        arrays = [g.indptr, g.indices, g.weights, g.given_degree, g.order]
        arrays.append(None if g.weights is None else g.loopless_degree)
        for array in arrays:
            assert array is None or not array.flags.writeable, name
        with pytest.raises(ValueError, match="read-only"):
            g.indices[0] = 10**8


def test_the_callers_arrays_are_neither_copied_nor_locked():
    indptr, indices = np.array([0, 1, 2]), np.array([1, 0], dtype=np.int32)
    g = Graph(indptr, indices)
    assert indptr.flags.writeable
    assert indices.flags.writeable
    assert np.shares_memory(g.indptr, indptr)
    assert np.shares_memory(g.indices, indices)
    edges, weights = np.array([[0, 1], [1, 2]]), np.array([2.0, 3.0])
    Graph.from_edges(edges, edge_weight=weights)
    assert edges.flags.writeable
    assert weights.flags.writeable
