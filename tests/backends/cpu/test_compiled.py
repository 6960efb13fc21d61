"""The compiled CPU backend against the plain one and against dense algebra."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the compiled backend needs numba")

from herta_gpu import HERTA, Graph, Sparsifier
from herta_gpu.backends import get_backend
from herta_gpu.backends.base import STREAM_SAMPLE, Backend
from herta_gpu.backends.cpu.compiled import CompiledBackend, aligned_empty
from herta_gpu.backends.cpu.reference import CPUBackend, philox

PLAIN, FAST = CPUBackend(), CompiledBackend()
ULPS = {"float32": 1e-5, "float64": 1e-13}


def close(a: np.ndarray, b: np.ndarray, dtype: str) -> None:
    scale = max(1.0, float(np.abs(b).max(initial=0.0)))
    np.testing.assert_allclose(a, b, rtol=ULPS[dtype], atol=ULPS[dtype] * scale)


GRAPHS = ("one node", "no edges", "hub", "random", "weighted", "L_tilde")


@cache
def named(name: str) -> Graph:
    """One of GRAPHS; L_tilde is a sampled graph, and its Laplacian has a diagonal other than 1."""
    if name == "L_tilde":
        g = named("random")
        return Sparsifier(lam=2.0, n_samples=g.num_edges // 2, random_state=3).fit(g).graph_
    rng, none, others = np.random.default_rng(7), np.zeros((2, 0), dtype=int), np.arange(2, 3000)
    edges = np.unique(np.sort(rng.integers(0, 150, (2, 700)), axis=0), axis=1)
    # Of the hubs two nodes have an edge to all others, and the last ten have none.
    hubs = np.stack([np.repeat([0, 1], others.size), np.tile(others, 2)])
    kinds = {"one node": (none, 1), "no edges": (none, 9), "hub": (hubs, 3010)}
    edges, n = kinds.get(name, (edges, 160))
    weights = rng.uniform(0.1, 3.0, edges.shape[1]) if name == "weighted" else None
    return Graph.from_edges(edges, n, weights)


# Each kind of arguments is compiled on its own, which takes seconds: graphs that are treated as
# large run in float32, the precision in which large graphs are solved, and one in float64.
NEAR_AND_FAR = pytest.mark.parametrize(
    ("name", "dtype", "distance"),
    [(name, dtype, "near") for name in GRAPHS for dtype in ("float32", "float64")]
    + [(name, "float32", "far") for name in GRAPHS]
    + [("random", "float64", "far")],
    indirect=["distance"],
)


@NEAR_AND_FAR
@pytest.mark.parametrize("k", [0, 1, 2, 3, 7, 8, 16, 17, 40, 64, 100])
def test_apply_and_chebyshev(name: str, k: int, dtype: str, distance: None) -> None:
    g, lam = named(name), 20.0
    rng = np.random.default_rng(k)
    X = rng.standard_normal((g.num_nodes, k)).astype(dtype)
    L, plain = FAST.laplacian(g, dtype), PLAIN.laplacian(g, dtype)
    H = np.eye(g.num_nodes) + lam * g.to_csr().toarray() if g.num_nodes < 1000 else None
    want = PLAIN.apply_H(plain, lam, X) if H is None else H @ X.astype("float64")
    close(FAST.apply_H(L, lam, X), want, dtype)
    out = np.full_like(X, np.nan)
    assert FAST.apply_H(L, lam, X, out=out) is out
    close(out, want, dtype)
    close(FAST.column_dots(X, out), (X.astype("float64") * out).sum(axis=0), "float64")
    steps = [(0.3, 0.05), (0.4, 0.06), (0.1, 0.02)]
    for count in range(4):
        ours, theirs = (
            backend.chebyshev(L_of, lam, X, 0.1, steps[:count])
            for backend, L_of in ((FAST, L), (PLAIN, plain))
        )
        close(ours, theirs, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_apply_takes_any_layout(dtype: str) -> None:
    g = named("random")
    L, X = FAST.laplacian(g, dtype), np.random.default_rng(0).standard_normal((g.num_nodes, 12))
    X = X.astype(dtype)
    want = FAST.apply_H(L, 3.0, X)
    for odd in (np.asfortranarray(X), np.repeat(X, 2, axis=1)[:, ::2]):
        np.testing.assert_array_equal(FAST.apply_H(L, 3.0, odd), want)
    Y = X.copy()
    np.testing.assert_array_equal(FAST.apply_H(L, 3.0, Y, out=Y), want)  # the output is the input
    wide = np.zeros((g.num_nodes, 24), dtype=dtype)
    FAST.apply_H(L, 3.0, X, out=wide[:, ::2])
    np.testing.assert_array_equal(wide[:, ::2], want)
    offset = np.zeros(X.size + 1, dtype=dtype)[1:].reshape(X.shape)  # not on a cache line
    offset[...] = X
    np.testing.assert_array_equal(FAST.apply_H(L, 3.0, offset), want)
    assert aligned_empty((3, 5), dtype).ctypes.data % 64 == 0


@pytest.mark.usefixtures("distance")
def test_nan_is_not_lost() -> None:
    g = named("random")
    X = np.ones((g.num_nodes, 5), dtype="float32")
    X[0, 3] = np.nan
    Y = FAST.apply_H(FAST.laplacian(g, "float32"), 1.0, X)
    neighbours = np.append(g.indices[: g.indptr[1]], 0)
    assert np.isnan(Y[neighbours, 3]).all()
    assert not np.isnan(Y[:, [0, 1, 2, 4]]).any()


@NEAR_AND_FAR
@pytest.mark.parametrize("k", [1, 40, 70])
def test_cg_steps(name: str, k: int, dtype: str, distance: None) -> None:
    g, lam = named(name), 5.0
    B = np.random.default_rng(1).standard_normal((g.num_nodes, k)).astype(dtype)
    B[:, k // 2] = 0  # a column that starts frozen
    states = []
    for backend in (FAST, PLAIN):
        L, R = backend.laplacian(g, dtype), B.copy()
        energy = backend.column_dots(R, R) / 20
        state = backend.cg_start(L, lam, R, energy, 1e-3, 1e-7)
        for _ in range(6):
            backend.cg_step(L, lam, state)
        states.append(state)
    ours, theirs = states
    np.testing.assert_array_equal(ours.iterations, theirs.iterations)
    np.testing.assert_array_equal(ours.active, theirs.active)
    close(ours.Z, theirs.Z, dtype)
    close(ours.energy, theirs.energy, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1, 3, 20, 33])
@pytest.mark.parametrize("name", GRAPHS)
def test_sketches_and_scores(name: str, k: int, dtype: str) -> None:
    g, seed = named(name), (9 << 32) + 5
    for stored in (g.reordered("degree"), g):
        ours, theirs = FAST.laplacian(stored, dtype), PLAIN.laplacian(stored, dtype)
        for sketch in ("sketch_incidence", "sketch_identity"):
            found, want = (
                getattr(on, sketch)(L, k, seed) for on, L in ((FAST, ours), (PLAIN, theirs))
            )
            close(found, want, dtype)
    S, T = FAST.sketch_incidence(ours, k, seed), FAST.sketch_identity(ours, k, seed)
    close(FAST.edge_scores(ours, S, T, 2.0), PLAIN.edge_scores(theirs, S, T, 2.0), "float64")


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=300),
    s=st.integers(1, 2000),
    seed=st.integers(0, 2**63),
    replace=st.booleans(),
)
def test_same_edges_are_sampled(scores: list[float], s: int, seed: int, replace: bool) -> None:
    values = np.array(scores)
    ours = FAST.sample_edges(values, s, seed, replace)
    np.testing.assert_array_equal(ours, PLAIN.sample_edges(values, s, seed, replace))


def test_a_large_draw_uses_the_same_words() -> None:
    scores = np.random.default_rng(0).random(5000) ** 8
    for replace in (True, False):
        ours = FAST.sample_edges(scores, 200_000 if replace else 2_000, 1, replace)
        theirs = PLAIN.sample_edges(scores, 200_000 if replace else 2_000, 1, replace)
        np.testing.assert_array_equal(ours, theirs)
    p = np.full(1000, 0.5)
    uniform = (philox.words64(0, 1000, 4, STREAM_SAMPLE) >> np.uint64(11)) * 2.0**-53
    np.testing.assert_array_equal(FAST.sample_edges(p, 500, 4, False) > 0, uniform < 0.5)


@pytest.mark.usefixtures("distance")
def test_results_do_not_depend_on_threads(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    g = Graph.from_edges(np.unique(np.sort(rng.integers(0, 20_000, (2, 90_000)), 0), axis=1))
    X = rng.standard_normal((g.num_nodes, 24)).astype("float32")
    A, W, E = (rng.standard_normal(shape) for shape in ((4000, 80), (80, 3), (4000, 3)))
    found = []
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("HERTA_NUM_THREADS", threads)
        L = backend.laplacian(g, "float32")
        state = backend.cg_start(L, 20.0, X.copy(), backend.column_dots(X, X) / 41, 1e-6, 1e-7)
        for _ in range(3):
            backend.cg_step(L, 20.0, state)
        S = backend.sketch_incidence(L, 5, 1)
        scores = backend.edge_scores(L, S, S, 20.0)
        found.append([state.Z, state.rho, backend.srht(X, 500, 2), S, scores])
        found[-1] += [backend.sample_edges(scores, 50_000, 3, replace) for replace in (True, False)]
        found[-1] += [backend.chebyshev(L, 5.0, X, 0.1, [(0.3, 0.05)] * 5, half=True)]
        found[-1] += [backend.matmul(A, W), backend.matmul(A.T, E)]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_training_gives_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    g, rng = named("random"), np.random.default_rng(0)
    X, y = rng.standard_normal((g.num_nodes, 6)), rng.integers(0, 3, g.num_nodes)
    found = []
    for fast in ("0", "1"):
        monkeypatch.setenv("HERTA_FAST", fast)
        assert isinstance(get_backend("cpu"), CompiledBackend) == (fast == "1")
        found.append(HERTA(lam=20.0, tol=1e-8).fit(g, X, y))
    np.testing.assert_allclose(found[0].W_, found[1].W_, rtol=1e-3, atol=1e-4)
    assert found[0].history_[-1]["loss"] == pytest.approx(found[1].history_[-1]["loss"], rel=1e-7)


def test_a_bad_number_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERTA_NUM_THREADS", "many")
    X = np.ones((3010, 64), dtype="float32")
    with pytest.raises(ValueError, match="HERTA_NUM_THREADS"):
        FAST.apply_H(FAST.laplacian(named("hub"), "float32"), 1.0, X)
