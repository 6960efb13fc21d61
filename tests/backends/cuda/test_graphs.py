"""Edge lists on the device: the graph is made there, and is the one that the host makes."""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph, SDDSolver, similarity
from herta_gpu.backends.cuda import graphs
from herta_gpu.backends.cuda.graphs import DeviceGraph
from tests.conftest import dense_H, random_graph

pytestmark = [pytest.mark.gpu, pytest.mark.once]


@pytest.fixture
def xp(backend: Any) -> Any:
    return backend.xp


REPEATED = np.array([[0, 0, 1, 1, 2, 2, 3, 3], [1, 1, 0, 0, 1, 3, 3, 3]])


def messy_edges(weighted: bool) -> tuple[Any, Any]:
    """Both directions of some edges, repeated ones, self-loops, nodes without any."""
    rng = np.random.default_rng(0)
    lo, hi = np.triu_indices(50, 1)
    pick = rng.choice(lo.shape[0], 70, replace=False)
    one = np.stack([lo[pick], hi[pick]])
    w = rng.uniform(0.5, 3, 70) if weighted else np.ones(70)
    w[5:8] = 0.0  # dropped
    loops = np.array([[3, 3, 60], [3, 3, 60]])
    edges = np.concatenate([one, one[::-1, 10:40], one[:, 50:], loops], axis=1)
    return edges, np.concatenate([w, w[10:40], w[50:], [1.0, 2.0, 0.5]])


@pytest.mark.parametrize("weighted", [False, True])
def test_edges_on_the_device_stay_there(device: Any, xp: Any, weighted: bool) -> None:
    edges, w = messy_edges(weighted)
    expected = Graph.from_edges(edges, 64, w)
    edges_there, w_there = xp.asarray(edges), xp.asarray(w)
    device.clear()
    g = Graph.from_edges(edges_there, 64, w_there)
    assert isinstance(g, DeviceGraph)
    assert device.ledger()["bytes_out"] <= 8 * 64
    assert (g.num_nodes, g.num_edges) == (64, expected.num_edges)
    assert g.num_components == expected.num_components
    L = g.to_csr()
    assert not sp.issparse(L)
    np.testing.assert_allclose(L.get().toarray(), expected.to_csr().toarray(), atol=1e-14)
    for name in ("indptr", "indices", "weights", "degree"):
        found, wanted = getattr(g, name), getattr(expected, name)
        assert (found is None) == (wanted is None)
        assert found is None or np.allclose(found, wanted, rtol=1e-14)
    again = pickle.loads(pickle.dumps(g))
    assert type(again) is Graph
    assert repr(again) == repr(g) == repr(expected)


@pytest.mark.parametrize(
    ("edges", "n", "duplicates", "components"),
    [
        (np.array([[0, 1, 2, 5], [1, 2, 0, 4]], dtype="int32"), None, None, 3),
        (REPEATED, 5, None, 2),
        (REPEATED, 5, "sum", 2),
    ],
)
def test_unweighted_edges_on_the_device(
    xp: Any, edges: Any, n: Any, duplicates: Any, components: int
) -> None:
    g, expected = (
        Graph.from_edges(e, n, duplicates=duplicates) for e in (xp.asarray(edges), edges)
    )
    assert isinstance(g, DeviceGraph)
    assert (g.weights is None) == (expected.weights is None) == (duplicates is None)
    np.testing.assert_array_equal(g.indices, expected.indices)
    assert g.indices.dtype == expected.indices.dtype
    np.testing.assert_allclose(g.to_csr().get().toarray(), expected.to_csr().toarray(), atol=1e-15)
    assert g.num_components == expected.num_components == components


@pytest.mark.parametrize("weighted", [False, True])
def test_a_graph_of_the_device_is_reweighted_there(device: Any, xp: Any, weighted: bool) -> None:
    edges, w = messy_edges(weighted)
    graphs = [
        Graph.from_edges(*a) for a in ((edges, 64, w), (xp.asarray(edges), 64, xp.asarray(w)))
    ]
    X = np.random.default_rng(2).random((64, 9)) < 0.2
    weight = similarity(graphs[1], xp.asarray(X))
    np.testing.assert_array_equal(weight, similarity(graphs[0], X))
    device.clear()
    here, there = (g.reweighted(weight) for g in graphs)
    assert isinstance(there, DeviceGraph)
    assert device.ledger()["bytes_out"] <= 8 * 64 + 64  # the degrees and a few counts
    assert here.num_edges == there.num_edges == np.count_nonzero(weight)
    L = there.to_csr().get().toarray()
    np.testing.assert_allclose(L, here.to_csr().toarray(), atol=1e-14)
    np.testing.assert_allclose(there.degree, graphs[0].degree, rtol=1e-14)


def test_a_heavy_edge_costs_the_others_no_digits(xp: Any) -> None:
    """Sums over runs of a sorted list are no differences of sums over all of it."""
    rng = np.random.default_rng(0)
    edges = np.stack([np.zeros(40, int), np.repeat(np.arange(1, 11), 4)])
    w = rng.uniform(0.5, 2.0, 40)
    w[:4] = 1e14
    found, expected = (
        Graph.from_edges(e, None, x) for e, x in ((xp.asarray(edges), xp.asarray(w)), (edges, w))
    )
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-15)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reordered", [False, True])
def test_matrices_of_a_graph_and_back(
    device: Any, xp: Any, weighted: bool, reordered: bool
) -> None:
    """As CuPy has them: made a few rows at a time, and read in any format without the host."""
    edges, w = messy_edges(weighted)
    g = Graph.from_edges(edges, 64, w)
    g = g.reordered("degree") if reordered else g
    with mock.patch.object(graphs, "_AT_ONCE", 16):
        L, A = g.to_csr("cuda"), g.adjacency("cuda")
    for found, expected in ((L, g.to_csr()), (A, g.adjacency())):
        assert found.has_sorted_indices
        np.testing.assert_allclose(found.get().toarray(), expected.toarray(), atol=1e-15)
    for M in (A, A.tocoo(), A.tocsc(), triangle(A)):
        device.clear()
        made = Graph.from_sparse(M)
        assert isinstance(made, DeviceGraph)
        assert device.ledger()["largest_out"] <= 8
        for device_or_none in ("cuda", None):
            again = made.adjacency(device_or_none).get()
            np.testing.assert_allclose(again.toarray(), g.adjacency().toarray(), rtol=1e-14)
        np.testing.assert_allclose(made.to_csr("cpu").toarray(), g.to_csr().toarray(), atol=1e-14)
    with pytest.raises(TypeError, match="needs a square sparse matrix"):
        Graph.from_sparse(A[:3])
    with pytest.raises(ValueError, match='device must be one of None, "cpu", "cuda"'):
        g.to_csr("gpu")


def triangle(A: Any) -> Any:
    """The entries of A on and above its diagonal, in another order, the first of them in halves."""
    A = A.tocoo()
    keep = (A.row <= A.col).get().nonzero()[0][::-1]
    M = type(A)((A.data[keep], (A.row[keep], A.col[keep])), shape=A.shape)
    M.data[0] /= 2
    ends = [xp_concatenate(x, x[:1]) for x in (M.data, M.row, M.col)]
    return type(A)((ends[0], (ends[1], ends[2])), shape=A.shape)


def xp_concatenate(*parts: Any) -> Any:
    return np.concatenate(parts)  # CuPy's, by __array_function__


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
@pytest.mark.parametrize("reordered", [False, True])
def test_sparse_matrices_of_cupy(device: Any, backend: Any, form: str, reordered: bool) -> None:
    """X and B stay on the device, and so do the results; an entry may be there twice."""
    rng, g = np.random.default_rng(0), random_graph(60, 200)
    g = g.reordered("degree") if reordered else g
    X = sp.random_array((60, 40), density=0.3, rng=rng, format="coo")
    X.data[:3] = 0.0
    y = rng.integers(0, 3, 60)
    row, col, data = (np.concatenate([x, x[:9]]) for x in (*X.coords, X.data))
    rows = np.argsort(row, kind="stable")
    indptr = np.searchsorted(row[rows], np.arange(61))
    twice = backend.csr(sp.csr_array((data[rows], col[rows], indptr), shape=X.shape))
    there = backend.csr(X.tocsr()) if form != "csr" else twice
    X = X.tocsr() if form != "csr" else sp.csr_array((data, (row, col)), shape=X.shape)
    there = getattr(there, f"to{form}")()
    how = {"lam": 5.0, "ridge": 0.1, "dtype": "float64"}
    for more in ({"strategy": "herta"}, {"fit_intercept": True, "evaluate": [1, 2]}):
        evaluate = more.pop("evaluate", None)
        expected = HERTA(device="cpu", **how, **more).fit(g, X, y)
        device.clear()
        model = HERTA(**how, **more).fit(g, there, y, evaluate=evaluate)
        assert model.device_.choice == "cuda"
        assert device.ledger()["largest_out"] <= 8 * 40 * 3  # W, and nothing of X's size
        np.testing.assert_allclose(model.W_, expected.W_, rtol=1e-8, atol=1e-10)
        Z = model.transform(g, there)
        assert isinstance(Z, backend.xp.ndarray)
        np.testing.assert_allclose(Z.get(), expected.transform(g, X), rtol=1e-5, atol=1e-7)
        assert isinstance(model.predict(g, there), backend.xp.ndarray)
    Z = SDDSolver(g, lam=3.0, device="cuda").solve(there)
    assert isinstance(Z, backend.xp.ndarray)
    exact = np.linalg.solve(dense_H(g, 3.0), X.toarray())
    assert np.abs(Z.get() - exact).max() <= 1e-5 * np.abs(exact).max()


def test_bad_sparse_matrices_of_cupy(backend: Any) -> None:
    g, y, M = random_graph(60, 200), np.arange(60) % 3, backend.csr(sp.eye_array(60, format="csr"))
    nothing, tiny, outside = M.copy(), M.copy(), M.copy()
    nothing.data[3], tiny.data[3], outside.indices[3] = np.nan, 1e-160, 61
    for X, sentence in (
        (nothing, "X holds NaN or infinity"),
        (tiny, "Column 3 of X has no entry above 1e-160"),
        (outside, "X is no whole sparse matrix"),
        (M[:50], "X has 50 rows but the graph has 60 nodes"),
    ):
        with pytest.raises(ValueError, match=sentence):
            HERTA(device="cuda").fit(g, X, y)
    with pytest.raises(TypeError, match=r'X is on a GPU .* use device="cuda"'):
        HERTA(device="cpu").fit(g, M, y)


def test_a_fit_on_a_graph_of_the_device(xp: Any) -> None:
    edges, w = messy_edges(True)
    rng = np.random.default_rng(1)
    X, y = rng.standard_normal((64, 5)), rng.integers(0, 3, 64)
    graphs = (
        Graph.from_edges(xp.asarray(edges), 64, xp.asarray(w)),
        Graph.from_edges(edges, 64, w),
    )
    ours, theirs = (
        HERTA(lam=5.0, tol=1e-14, device=device, dtype="float64").fit(g, X, y)
        for g, device in zip(graphs, ("cuda", "cpu"), strict=True)
    )  # on the CPU Q comes from a factor: the two ways meet where tol leaves them no room
    np.testing.assert_allclose(ours.W_, theirs.W_, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("edges", "n", "w", "duplicates"),
    [
        ([[0, 5], [1, 1]], 3, None, None),
        ([[0, -1], [1, 1]], None, None, None),
        ([[0.0, 1.0], [1.0, 2.0]], None, None, None),
        ([[0, 1, 2]], None, None, None),
        ([[0, 1], [1, 2]], None, [1.0, -1.0], None),
        ([[0, 1], [1, 2]], None, [1.0, np.nan], None),
        ([[0, 1], [1, 2]], None, [1.0], None),
        ([[0, 1], [1, 0]], None, [1.0, 2.0], None),
        ([[1, 0, 1], [0, 1, 0]], None, [1.0, 2.0, 5.0], None),  # 6 one way, 2 the other
        ([[1, 0, 0], [0, 1, 1]], None, None, "sum"),  # twice one way, once the other
        ([[4, 2, 0, 2, 4], [4, 1, 1, 1, 4]], None, None, "error"),
        ([[2, 0, 2], [1, 1, 1]], None, [1.0, 1.0, 1.0], "error"),
        ([[0], [1]], None, None, "once"),
    ],
)
def test_what_is_wrong_on_the_host_is_wrong_on_the_device(
    xp: Any, edges: Any, n: Any, w: Any, duplicates: Any
) -> None:
    edges, w = np.array(edges), None if w is None else np.array(w)
    with pytest.raises(ValueError) as expected:  # noqa: PT011 - the other says which
        Graph.from_edges(edges, n, w, duplicates)
    w_there = None if w is None else xp.asarray(w)
    with pytest.raises(ValueError) as found:  # noqa: PT011
        Graph.from_edges(xp.asarray(edges), n, w_there, duplicates)
    assert str(found.value) == str(expected.value)
