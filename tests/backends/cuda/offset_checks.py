"""Offsets beyond 2^32 in every kernel file: arrays of 17 GB and more, hardly touched.

Memory of that size is reserved only (tests/cuda_device).  A block has K columns and a few thousand
rows, so that the last row is beyond 2^32 numbers; the entries of a graph begin at 2^32 as well.
Only the last blocks of a grid run, with those of the long rows before them, and only what they
write is looked at.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.linalg import hadamard

from herta_gpu.app.device_checks import CPU, LAM, SEED, TOLERANCE
from herta_gpu.backends.base import Halves
from herta_gpu.backends.cuda.device import column_shape
from herta_gpu.graph import Graph
from tests import cuda_device
from tests.backends.cuda.kernel_checks import few_blocks, kernel

FAR = 1 << 32
N, K = 4104, 1 << 20
LAST = slice(4100, N)  # the rows of the last block
SHORT = slice(4100, N - 1)  # those that are not cut
PART = 256  # the columns of a block
COLUMNS = (slice(0, PART), slice(K - PART, K))  # of the first and of the last block along y
I64 = np.int64


def check_offsets(backend: Any, only: str = "") -> None:
    """Every kernel file, or one of them."""
    device = cuda_device.active()
    assert device is not None
    for file, checks in CHECKS.items():
        for check in checks if only in ("", file) else ():
            with device.having(memory=1 << 46, last_blocks=1), few_blocks(backend, 2048) as b:
                check(b, device)


@cache
def graph() -> Graph:
    rng = np.random.default_rng(2)
    edges = rng.integers(0, N, (2, 3 * N))
    hub = np.stack([np.full(1200, N - 1), np.arange(0, 3600, 3)])  # cut in three
    ring = np.stack([np.arange(4096, N), np.roll(np.arange(4096, N), 1)])  # far neighbours as well
    edges = np.unique(np.sort(np.concatenate([edges, hub, ring], axis=1), axis=0), axis=1)
    return Graph.from_edges(edges, N, 0.1 + rng.random(edges.shape[1]))


def far_away(backend: Any) -> tuple[Any, Any]:
    """The Laplacian on the CPU, and on the device with its entries far away."""
    L, near_ = backend.laplacian(graph(), "float32"), CPU.laplacian(graph(), "float32")
    s, diagonal, weights = L.exact

    def far(x: Any) -> Any:
        array = backend.xp.empty(FAR + x.shape[0], dtype=x.dtype)
        array[FAR:], array[: x.shape[0]] = x, 1  # what a wrapped offset would read
        return array

    exact = (s, diagonal, far(weights))
    places = {"indptr": L.indptr + FAR, "indices": far(L.indices), "weights": far(L.weights)}
    there = replace(L, **places, unrounded=lambda: exact)
    cut = backend.segments(np.diff(near_.indptr), there.nnz)
    return near_, replace(there, **cut, scratch={})


def block(backend: Any, dtype: str, seed: int) -> Any:
    """Random numbers in the columns that count, zeros in the others."""
    X, rng = backend.xp.empty((N, K), dtype=dtype), np.random.default_rng(seed)
    for columns in COLUMNS:
        X[:, columns] = backend.asarray(rng.standard_normal((N, PART)), dtype)
    return X


def near(X: Any, columns: slice) -> Any:
    return X[:, columns].get()


def assert_last(found: Any, expected: Any, dtype: str = "float32", rows: slice = LAST) -> None:
    """The rows of the last block; the hub is one of them."""
    error = np.abs(np.asarray(found[rows], float) - expected[rows]).max()
    assert error <= TOLERANCE[dtype] * np.abs(expected[rows]).max()


def check_products(b: Any, device: Any) -> None:
    L, far = far_away(b)
    device.set(last_blocks=1 + far.segment_row.shape[0])
    X, Z, B = (block(b, "float32", seed) for seed in range(3))
    Y = b.apply_H(far, LAM, X)
    before = [near(Z, columns) for columns in COLUMNS]
    b.chebyshev_step(far, LAM, X, Z, B, 0.3, 0.2)
    for columns, Z_prev, rows in zip(COLUMNS, before, (LAST, SHORT), strict=True):
        assert_last(near(Y, columns), CPU.apply_H(L, LAM, near(X, columns)), rows=rows)
        CPU.chebyshev_step(L, LAM, near(X, columns), Z_prev, near(B, columns), 0.3, 0.2)
        assert_last(near(Z, columns), Z_prev, rows=rows)
    B64 = block(b, "float64", 3)
    R = b.residual_rows(far, LAM, X, B64, 0)
    expected = CPU.residual_rows(L, LAM, near(X, COLUMNS[0]), near(B64, COLUMNS[0]), 0)
    assert_last(near(R, COLUMNS[0]), expected, "float64")


def check_half(b: Any, device: Any) -> None:
    L, far = far_away(b)
    device.set(last_blocks=1 + far.segment_row.shape[0])
    Z, Z_prev, B = (block(b, "float32", seed) for seed in range(3))
    up, down = np.full(K, 2.0**3, np.float32), np.full(K, 2.0**-3, np.float32)
    theirs = Halves(np.zeros((N, PART), np.uint16), up[:PART], down[:PART])
    first, expected = COLUMNS[0], near(Z_prev, COLUMNS[0])
    CPU.chebyshev_step(L, LAM, near(Z, first), expected, near(B, first), 0.3, 0.2, theirs)
    ours = Halves(b.xp.empty((N, K), dtype="uint16"), b.asarray(up), b.asarray(down))
    b.chebyshev_step(far, LAM, Z, Z_prev, B, 0.3, 0.2, ours)
    assert np.array_equal(ours.G[LAST, first].get(), theirs.G[LAST])
    # The blocks that were left out would have made the rest of G.
    ours.G[:, first] = b.asarray(theirs.G)
    Z_prev[:, first] = b.asarray(near(block(b, "float32", 1), first))
    b.chebyshev_step(far, LAM, Z, Z_prev, B, 0.3, 0.2, ours)
    assert_last(near(Z_prev, first), expected)


def check_cg(b: Any, device: Any) -> None:
    """One step with pHp, alpha and beta as they are given: no sum over all blocks is ever there."""
    L, far = far_away(b)
    R, P, HP, Z = (block(b, "float32", seed) for seed in range(4))
    zeros = b.xp.zeros(K)
    state = b.cg_start(far, LAM, b.xp.zeros((1, K), dtype="float32"), zeros, 0.1, 0.0)
    state.R, state.P, state.HP, state.Z = R, P, HP, Z
    state.rho, state.active = b.xp.ones(K), b.xp.ones(K, dtype=bool)
    state.pHp.fill(0.5)
    state.alpha.fill(2.0)
    state.beta.fill(2.0)
    before = [[near(X, columns) for X in (R, P, Z)] for columns in COLUMNS]
    device.set(last_blocks=1 + far.segment_row.shape[0])
    b.cg_step(far, LAM, state)
    device.set(last_blocks=1)
    for columns, (r, p, z), rows in zip(COLUMNS, before, (LAST, SHORT), strict=True):
        hp = CPU.apply_H(L, LAM, p)
        assert_last(near(state.R, columns), r - 2 * hp, rows=rows)
        assert_last(near(state.Z, columns), z + 2 * p, rows=rows)
        assert_last(near(state.P, columns), r - 2 * hp + 2 * p, rows=rows)
    x, y, _ = column_shape(K, 4)
    partials, tickets = b.xp.empty((-(-N // y), K)), b.xp.zeros(K // PART, dtype="uint32")
    args = (I64(N), I64(K), R, P, partials, tickets, b.xp.zeros(K))
    kernel(b.xp, "cg.cu", "column_dots_f32_v4")((-(-N // y), K // PART), (x, y), args)
    for columns in COLUMNS:
        expected = (near(R, columns)[LAST].astype(float) * near(P, columns)[LAST]).sum(axis=0)
        np.testing.assert_allclose(partials[-1, columns].get(), expected, rtol=1e-12)


def check_packed_rows(b: Any, device: Any) -> None:
    X, rows, out = block(b, "float32", 5), np.arange(N, dtype=np.int32), b.xp.empty((N, K), "f4")
    rows[LAST] = rows[LAST][::-1].copy()
    x, y, tiles = column_shape(K, 4)
    args = (I64(N), I64(K), X, b.asarray(rows), out)
    kernel(b.xp, "ranks.cu", "pack_rows_f32_v4")((-(-N // y), tiles), (x, y), args)
    for columns in COLUMNS:
        assert_last(near(out, columns), near(X, columns)[rows])


def check_sketches(b: Any, device: Any) -> None:
    L, far = far_away(b)
    device.set(last_blocks=2)
    scale = np.sqrt(K / PART)
    for name in ("sketch_incidence", "sketch_identity"):
        found = getattr(b, name)(far, K, SEED)[:, :PART].get() * np.float32(scale)
        assert_last(found, getattr(CPU, name)(L, PART, SEED))


def check_edges(b: Any, device: Any) -> None:
    """Rows whose entries are far away, and scores of an edge between far rows."""
    L, far = far_away(b)
    X, Y, xp = block(b, "float32", 1), block(b, "float32", 2), b.xp
    ratio = np.random.default_rng(3).random(N)
    pairs = np.repeat(ratio, np.diff(L.indptr)) + ratio[L.indices]
    largest = np.array([pairs[a:e].max(initial=0) for a, e in pairwise(L.indptr)])
    device.set(last_blocks=0)
    assert_last(b.pair_bounds(far.indptr, far.indices, b.asarray(ratio)).get(), largest, "float64")
    rows = np.repeat(np.arange(N), np.diff(L.indptr))
    upper = np.bincount(rows[L.indices > rows], minlength=N)
    counts = xp.zeros(N, dtype=I64)
    by_node = kernel(xp, "sampling.cu", "upper_counts_i32")
    by_node((-(-N // 256),), (256,), (I64(N), far.indptr, far.indices, counts))
    assert np.array_equal(counts.get(), upper)
    check_filter(b, L, far, np.concatenate([[0], np.cumsum(upper)]))
    at = b.asarray(np.array([[4101], [4103]], np.int32))  # an edge, of whatever weight
    scores, s = xp.zeros(1), L.inv_sqrt_degree
    args = (I64(1), I64(K), at[0], at[1], np.uint64(0), b.asarray(s), X, Y, np.float64(LAM), scores)
    kernel(xp, "sampling.cu", "edge_scores_f32_i32_v4")((1,), (8, 32), args)

    def distance(M: Any, columns: slice) -> Any:
        u, v = (s[i] * M[i, columns].get().astype(float) for i in (4101, 4103))
        return ((u - v) ** 2).sum()

    ours, theirs = (sum(distance(M, columns) for columns in COLUMNS) for M in (X, Y))
    np.testing.assert_allclose(scores.get(), ours + theirs / LAM, rtol=1e-4)


def check_filter(b: Any, L: Any, far: Any, first: Any) -> None:
    """The numbers of edges begin at 2^32, too."""
    m, xp = int(first[-1]), b.xp
    kept = np.random.default_rng(4).integers(0, 2, m) / 2.0
    factors = xp.empty(FAR + m)
    factors[FAR:], factors[:m] = b.asarray(kept), 1.0
    edges = (I64(N), far.indptr, far.indices, b.asarray(first + FAR))

    def by_row(name: str, *args: Any) -> None:
        kernel(xp, "sampling.cu", name)((-(-N // 8),), (32, 8), (*edges, *args))

    counts = xp.full(N, -1, dtype=I64)
    by_row("kept_counts_i32", factors, counts)
    A = Graph(L.indptr, L.indices, L.weights, L.inv_sqrt_degree**-2.0)
    expected = A.with_edges(kept > 0, kept)
    assert np.array_equal(counts.get(), np.diff(expected.indptr))
    size = FAR + int(expected.indptr[-1])
    indices, weights, sums = xp.empty(size, "int32"), xp.empty(size, "float32"), xp.zeros(N)
    there = b.asarray(expected.indptr + FAR)
    by_row("kept_fill_f32_i32", far.weights, factors, there, indices, weights, sums)
    assert np.array_equal(indices[FAR:].get(), expected.indices)
    np.testing.assert_allclose(weights[FAR:].get(), expected.weights, rtol=1e-6)
    lo, hi = (xp.empty(FAR + m, dtype="int32") for _ in range(2))
    listed = xp.empty(FAR + m, dtype="float32")
    by_row("edge_list_f32_i32", far.weights, lo, hi, listed)
    for found, wanted in zip((lo, hi, listed), A.edges(), strict=True):
        assert np.array_equal(found[FAR:].get(), wanted)


def check_flat(b: Any, device: Any) -> None:
    """One number for each of 2^32 + 300 edges; the last block has 44 of them."""
    m, xp = FAR + 300, b.xp
    own = slice(FAR + 256, m)

    def flat(name: str, size: int, *args: Any, file: str = "sampling.cu") -> None:
        kernel(xp, file, name)((-(-size // 256),), (256,), args)

    scores, q = xp.empty(m), xp.empty(m, dtype=I64)
    scores[own] = xp.arange(44.0)
    flat("integer_scores", m, I64(m), scores, np.int32(4), q)
    assert np.array_equal(q[own].get(), 16 * np.arange(44))
    prefix, counts, factors = (xp.empty(m, dtype=t) for t in (I64, I64, "float64"))
    prefix[own] = xp.cumsum(q[own])
    flat("draw_edges", 1, I64(1), I64(m), prefix, np.uint64(SEED), counts)
    assert np.flatnonzero(counts[own].get()).tolist() > [0]  # the first of them has no share
    counts[own] = xp.arange(44) % 3
    flat("replacement_factors", m, I64(66), I64(m), counts, q, prefix, factors)
    q_own, drawn = q[own].get(), np.arange(44) % 3
    total = q_own.sum()
    expected = np.where(drawn > 0, drawn * total / (66 * np.maximum(q_own, 1)), 0)
    np.testing.assert_allclose(factors[own].get(), expected, rtol=1e-12)
    scores[own] = 1.0
    flat("bernoulli_factors", m, I64(m), scores, np.uint64(SEED), factors)
    assert (factors[own].get() == 1).all()
    tiles = -(-m // 2048)
    totals = xp.zeros(tiles, dtype=I64)
    kernel(xp, "sampling.cu", "scan_tiles")((tiles,), (256,), (I64(m), q, prefix, totals))
    assert np.array_equal(prefix[own].get(), np.cumsum(q_own))
    assert int(totals[-1]) == total
    flat("scan_add", m, I64(m), totals, prefix)
    assert np.array_equal(prefix[own].get(), np.cumsum(q_own) + total)
    words = xp.empty(m, dtype="uint64")
    tail = (I64(m), np.uint32(2), np.uint64(SEED), words)
    flat("random_words", m, *tail, file="hadamard.cu")
    assert np.unique(words[own].get()).shape == (44,)


def check_hadamard(b: Any, device: Any) -> None:
    """The last of sixteen tiles of 512 rows, without signs: H_512 times it."""
    rows, last, xp = 8192, slice(8192 - 512, 8192), b.xp
    k = 16 * 65535  # no grid is wider
    Q, out = (xp.empty((rows, k), dtype="float32") for _ in range(2))
    given = np.random.default_rng(5).standard_normal((512, 16))
    Q[last, :16] = b.asarray(given, "float32")
    sizes = (I64(rows), I64(k), np.int32(9), np.int32(0), np.int32(0), np.uint64(SEED))
    args = (*sizes, Q, out, np.uint64(0), np.float32(1))
    kernel(xp, "hadamard.cu", "hadamard_f32")((16, k // 16), (512,), args)
    expected = hadamard(512) @ given
    assert np.abs(out[last, :16].get() - expected).max() <= 1e-5 * np.abs(expected).max()


CHECKS = {
    "laplacian.cu": (check_products, check_half),
    "cg.cu": (check_cg,),
    "ranks.cu": (check_packed_rows,),
    "sketch.cu": (check_sketches,),
    "sampling.cu": (check_edges, check_flat),
    "hadamard.cu": (check_hadamard,),
}
