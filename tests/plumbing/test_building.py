"""The compiled way from an edge list to a graph, against NumPy's sorts, bit for bit."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from herta_gpu import Graph
from herta_gpu.plumbing import building, checks
from tests.conftest import random_graph

pytest.importorskip("numba")
ARRAYS = ("indptr", "indices", "weights", "degree")


@contextmanager
def compiled(always: bool = True, chunk: int = 1 << 22, threads: int = 2, **more: Any):
    """Compiled code for every graph, however small, or for none."""
    changed = {"COMPILED": 0 if always else 1 << 62, "CHUNK": chunk, **more}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"HERTA_FAST": "1"}))
        for name, value in changed.items():
            stack.enter_context(mock.patch.object(building, name, value))
        stack.enter_context(mock.patch.object(building, "num_threads", return_value=threads))
        yield


def outcome(*given: Any) -> Any:
    """The bytes of all arrays, or the sentence of the error."""
    try:
        graph = Graph.from_edges(*given)
    except ValueError as error:
        return str(error)
    found = [getattr(graph, name) for name in ARRAYS]
    return [None if x is None else (x.dtype, x.tobytes()) for x in found]


@st.composite
def listed(draw):
    """A multigraph: (edge_index, n, weights, duplicates), in various types and orders."""
    n = draw(st.integers(1, 9))
    ends = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    pairs = draw(st.lists(ends, max_size=30))
    repeat = draw(st.sampled_from([1, 1, 2, 9, 150]))  # NumPy sums in blocks of 8 and 128
    edges = np.array(pairs * repeat, dtype=int).reshape(-1, 2).T
    if draw(st.booleans()):
        edges = np.sort(edges, axis=0)  # one direction: no weights that contradict each other
    kind = draw(st.sampled_from(["none", "random", "small", "ones", "symmetric"]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    weights = {
        "none": None,
        "random": rng.random(edges.shape[1]),
        "small": rng.integers(0, 3, edges.shape[1]),
        "ones": np.ones(edges.shape[1], dtype=np.float32),
        "symmetric": 0.1 * (1 + edges.sum(axis=0)) + 1e-8 * rng.random(edges.shape[1]),
    }[kind]
    dtype = draw(st.sampled_from(["int32", "int64", "uint8", "uint32", "uint64"]))
    edges = np.asarray(edges, dtype=dtype, order=draw(st.sampled_from("CF")))
    edges.flags.writeable = False
    return edges, n, weights, draw(st.sampled_from([None, "sum"]))


@settings(max_examples=300, deadline=None)
@given(listed(), st.sampled_from([1, 5, 64, 1 << 22]), st.integers(1, 4))
def test_both_ways_give_the_same_bits_and_the_same_sentences(given, chunk, threads):
    with compiled(False):
        expected = outcome(*given)
    with compiled(chunk=chunk, threads=threads):
        assert outcome(*given) == expected


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_every_length(weighted):
    """Hubs whose rows are sorted in several parts, with repeats, in random order."""
    rng = np.random.default_rng(0)
    u = np.repeat(np.arange(12), [0, 1, 2, 63, 64, 65, 127, 128, 129, 500, 2000, 9000])
    edges = np.stack([u, rng.integers(0, 3000, u.shape[0])])
    edges = np.sort(edges[:, rng.permutation(u.shape[0])], axis=0)
    w = rng.random(u.shape[0]) if weighted else None
    A = sp.coo_array((np.ones(u.shape[0]) if w is None else w, edges), shape=(3000, 3000))
    A = sp.csr_array(A).toarray()
    A = (A + A.T) * (1 - np.eye(3000))
    with compiled():
        g = Graph.from_edges(edges, 3000, w)
    B = g.adjacency().toarray()
    np.fill_diagonal(B, 0.0)
    np.testing.assert_allclose(B, A if weighted else A > 0, rtol=1e-13)
    with compiled(False):
        assert outcome(edges, 3000, w) == [
            None if x is None else (x.dtype, x.tobytes()) for x in (getattr(g, a) for a in ARRAYS)
        ]


def test_ids_of_64_bits():
    edges = np.random.default_rng(1).integers(0, 50, (2, 400))
    with compiled(False):
        expected = Graph.from_edges(edges, 50)
    with compiled(NARROW=1):
        g = Graph.from_edges(edges, 50)
    assert g.indices.dtype == np.int64
    np.testing.assert_array_equal(g.indices, expected.indices)


def test_a_memory_map_is_read_where_it_is(tmp_path):
    edges = np.random.default_rng(2).integers(0, 300, (2, 4000)).astype(np.int32)
    np.save(tmp_path / "edges.npy", edges)
    mapped = np.load(tmp_path / "edges.npy", mmap_mode="r")
    with compiled(chunk=333):
        assert outcome(mapped) == outcome(edges)


def test_an_unweighted_graph_stores_no_degrees():
    loops = [[0, 0, 1], [1, 0, 2]]
    for always in (False, True):
        with compiled(always):
            assert Graph.from_edges(loops).given_degree is None
            assert Graph.from_edges(loops, edge_weight=np.ones(3)).given_degree is None
            kept = Graph.from_edges(loops, edge_weight=[1.0, 5.0, 1.0])
            assert kept.weights is None  # but a self-loop has one
            assert kept.degree.tolist() == [6, 3, 2]


@pytest.mark.parametrize("weighted", [False, True])
def test_other_orders_of_large_graphs(weighted):
    g = random_graph(300, 4000, weighted=weighted)
    p = np.random.default_rng(0).permutation(300)
    A = g.adjacency().toarray()
    with compiled():
        r = g._permuted(p)
    stored = sp.csr_array(
        (np.ones(8000) if r.weights is None else r.weights, r.indices, r.indptr), shape=(300, 300)
    )
    off = A - np.diag(np.diag(A))
    np.testing.assert_array_equal(stored.toarray(), off[p][:, p])
    assert stored.has_sorted_indices
    np.testing.assert_allclose(r.degree, A.sum(axis=1)[p], rtol=1e-14)


@pytest.mark.parametrize("seed", range(4))
def test_components_of_large_graphs(seed):
    rng = np.random.default_rng(seed)
    g = Graph.from_edges(rng.integers(0, 500, (2, 50 * (2 * seed + 1))), 500)
    count, label = sp.csgraph.connected_components(g.adjacency(), directed=False)
    rows = rng.integers(0, 500, 5)
    with compiled():
        assert g.num_components == count
        np.testing.assert_array_equal(g.connected_to(rows), np.isin(label, label[rows]))
    np.testing.assert_array_equal(g.connected_to(rows), np.isin(label, label[rows]))


def test_a_path_in_random_order_is_one_component():
    path = np.random.default_rng(0).permutation(4000)
    g = Graph.from_edges(np.stack([path[:-1], path[1:]]))
    with compiled():
        assert g.num_components == 1


def test_the_size_that_is_checked_is_that_of_the_way_that_is_taken(monkeypatch):
    edges = np.zeros((2, 1000), dtype=np.int64)
    monkeypatch.setattr(checks, "host_memory", lambda: 8 * 1000 + 32 * 500)
    with compiled():
        assert Graph.from_edges(edges, 500).num_edges == 0
        with pytest.raises(ValueError, match="a graph of 500 nodes and 1,000 edges needs"):
            Graph.from_edges(edges, 500, np.ones(1000))
    with compiled(False), pytest.raises(ValueError, match="are free: give a smaller one"):
        Graph.from_edges(edges, 500)


def test_peak_memory_is_the_graph_and_a_chunk():
    """Traced by NumPy's own accounts: the list itself is there before."""
    import tracemalloc

    edges = np.random.default_rng(0).integers(0, 20_000, (2, 400_000))
    with compiled(chunk=10_000):
        Graph.from_edges(edges[:, :1000], 20_000)  # compile
        tracemalloc.start()
        g = Graph.from_edges(edges, 20_000)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    final = g.indptr.nbytes + g.indices.nbytes
    assert held < final + 200_000
    # Accounts of NumPy 2.5 count an array twice while it is cut short; the process takes no more.
    twice = g.indices.nbytes if np.lib.NumpyVersion(np.__version__) >= "2.5.0" else 0
    assert peak < final + twice + 16 * 20_000 + 600_000
