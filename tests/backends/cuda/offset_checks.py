"""Offsets beyond 2^32, in every kernel: arrays of that size are reserved, and hardly touched.

Blocks have 4,104 rows and 2^20 columns, so that the last eight rows begin where a 32-bit offset is
small again; the entries of the graph begin at 2^32 as well.  Only the last blocks of a grid run,
with those of the long rows before them, and only what they write is looked at.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from scipy.linalg import hadamard

from herta_gpu.backends.base import Halves
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.graph import Graph
from tests.cuda_emulator import Module, launches, load
from tests.cuda_emulator.launches import Emulated

CPU = CPUBackend()
LAM, SEED = 20.0, 0x9E3779B97F4A7C15
FAR = 1 << 32
N, K, SEGMENT = 4104, 1 << 20, 64
LAST = slice(4100, N)  # the rows of the last block
SHORT = slice(4100, N - 1)  # those that are not cut
PART = 256  # the columns of a block
COLUMNS = (slice(0, PART), slice(K - PART, K))  # of the first and of the last block along y
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def reserve(shape: Any, dtype: Any) -> Any:
    """Zeros of any size: memory is used only where it is touched."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    try:
        buffer = mmap.mmap(-1, int(np.prod(shape)) * np.dtype(dtype).itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"no address space for an array beyond 2^32 entries: {error}")
    return np.frombuffer(buffer, dtype).reshape(shape)


class Reserving:
    """NumPy whose large new arrays are reserved; alpha and beta, which are like rho, hold twos."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def full(self, shape: Any, value: Any, dtype: Any = np.float64) -> Any:
        large = np.prod(shape) > 1 << 24
        return reserve(shape, dtype) if large else np.full(shape, value, dtype)

    def zeros(self, shape: Any, dtype: Any = np.float64) -> Any:
        return self.full(shape, 0, dtype)

    def full_like(self, x: Any, value: Any) -> Any:
        return self.full(x.shape, 2 if np.isnan(value) and x.ndim == 1 else value, x.dtype)


@dataclass
class LastBlocks(Emulated):
    """Runs the first few blocks, which are those of long rows, and the last one of each column."""

    first: int = 0

    def launch(self, file: str, kernel: str, grid: Any, block: Any, *args: Any) -> None:
        module = (self.modules or {}).get(file) or load(file)
        (x, y), count = (*grid, 1)[:2], self.first if file != "sampling.cu" else 0
        last = {(x - 1, x), (x * y - 1, x * y)} | ({(0, count)} if count else set())
        for blocks in sorted(last):
            module.launch(kernel, grid, block, args, blocks=blocks)


def emulated(modules: dict[str, Module] | None, first: int = 0) -> LastBlocks:
    return LastBlocks(segment=SEGMENT, max_blocks=2**31 - 1, modules=modules, first=first)


@cache
def graphs() -> tuple[Any, Any, int]:
    """The Laplacian, the same with its entries far away, and in how many its hub is cut."""
    rng = np.random.default_rng(2)
    edges = rng.integers(0, N, (2, 3 * N))
    hub = np.stack([np.full(200, N - 1), np.arange(0, 4000, 20)])
    ring = np.stack([np.arange(4096, N), np.roll(np.arange(4096, N), 1)])  # far neighbours as well
    edges = np.unique(np.sort(np.concatenate([edges, hub, ring], axis=1), axis=0), axis=1)
    L = CPU.laplacian(Graph.from_edges(edges, N, 0.1 + rng.random(edges.shape[1])), "float32")
    s, diagonal, weights = L.exact

    def far(x: Any) -> Any:
        array = reserve((FAR + x.shape[0],), x.dtype)
        array[FAR:], array[: x.shape[0]] = x, 1  # what a wrapped offset would read
        return array

    exact = (s, diagonal, far(weights))
    places = {"indptr": L.indptr + FAR, "indices": far(L.indices), "weights": far(L.weights)}
    return L, replace(L, **places, unrounded=lambda: exact), -(-np.diff(L.indptr)[-1] // SEGMENT)


def block(dtype: str, seed: int) -> Any:
    """Random numbers in the columns that count, zeros in the others."""
    X, rng = reserve((N, K), dtype), np.random.default_rng(seed)
    for columns in COLUMNS:
        X[:, columns] = rng.standard_normal((N, PART))
    return X


def near(X: Any, columns: slice) -> Any:
    return X[:, columns].copy()


def assert_last(found: Any, expected: Any, dtype: str = "float32", rows: slice = LAST) -> None:
    """The rows of the last block; the hub is one of them."""
    error = np.abs(np.asarray(found[rows], float) - expected[rows]).max()
    assert error <= TOLERANCE[dtype] * np.abs(expected[rows]).max()


def check_offsets(modules: dict[str, Module] | None = None) -> None:
    """Every kernel file; `modules` maps a file to a mutant of it, and others are left out then."""
    with mock.patch.object(launches, "np", Reserving()):
        for file, checks in CHECKS.items():
            for check in checks if not modules or file in modules else ():
                check(modules)


def check_products(modules: dict[str, Module] | None) -> None:
    L, far, pieces = graphs()
    run = emulated(modules, pieces)
    X, Z, B = (block("float32", seed) for seed in range(3))
    Y = run.apply_H(far, LAM, X)
    before = [near(Z, columns) for columns in COLUMNS]
    run.chebyshev_step(far, LAM, X, Z, B, 0.3, 0.2)
    for columns, Z_prev, rows in zip(COLUMNS, before, (LAST, SHORT), strict=True):
        assert_last(near(Y, columns), CPU.apply_H(L, LAM, near(X, columns)), rows=rows)
        CPU.chebyshev_step(L, LAM, near(X, columns), Z_prev, near(B, columns), 0.3, 0.2)
        assert_last(near(Z, columns), Z_prev, rows=rows)
    del Y, Z, B
    B64 = block("float64", 3)
    R = run.residual_rows(far, LAM, X, B64, 0)
    expected = CPU.residual_rows(L, LAM, near(X, COLUMNS[0]), near(B64, COLUMNS[0]), 0)
    assert_last(near(R, COLUMNS[0]), expected, "float64")


def check_half(modules: dict[str, Module] | None) -> None:
    L, far, pieces = graphs()
    Z, Z_prev, B = (block("float32", seed) for seed in range(3))
    up, down = np.full(K, 2.0**3, np.float32), np.full(K, 2.0**-3, np.float32)
    theirs = Halves(np.zeros((N, PART), np.uint16), up[:PART], down[:PART])
    first, expected = COLUMNS[0], near(Z_prev, COLUMNS[0])
    CPU.chebyshev_step(L, LAM, near(Z, first), expected, near(B, first), 0.3, 0.2, theirs)
    ours = Halves(reserve((N, K), np.uint16), up, down)
    run = emulated(modules, pieces)
    run.chebyshev_half(far, LAM, Z, Z_prev, B, 0.3, 0.2, ours)
    assert np.array_equal(ours.G[LAST, first], theirs.G[LAST])
    # The blocks that were left out would have made the rest of G.
    ours.G[:, first], Z_prev[:, first] = theirs.G, near(block("float32", 1), first)
    run.chebyshev_half(far, LAM, Z, Z_prev, B, 0.3, 0.2, ours)
    assert_last(near(Z_prev, first), expected)


def check_cg(modules: dict[str, Module] | None) -> None:
    """One step with alpha and beta as they are given: no sum over all blocks is ever there."""

    class Given(LastBlocks):
        def apply_H(self, *_: Any, **__: Any) -> Any:
            return HP, np.full(K, 0.5)  # alpha = 1 / 0.5

    R, P, HP, Z = (block("float32", seed) for seed in range(4))
    _, far, _ = graphs()
    state = CPU.cg_start(far, LAM, np.zeros((1, K), np.float32), np.zeros(K), 0.1, 0.0)
    state.R, state.P, state.HP, state.Z = R, P, HP, Z
    state.rho, state.active = np.ones(K), np.ones(K, bool)
    before = [[near(X, columns) for X in (R, P, HP, Z)] for columns in COLUMNS]
    run = Given(segment=SEGMENT, max_blocks=2**31 - 1, modules=modules)
    run.cg_step(far, LAM, state)
    for columns, (r, p, hp, z) in zip(COLUMNS, before, strict=True):
        assert_last(near(state.R, columns), r - 2 * hp)
        assert_last(near(state.Z, columns), z + 2 * p)  # alpha and beta are twos there
        assert_last(near(state.P, columns), r - 2 * hp + 2 * p)
    x, y, _ = launches.column_shape(K, 4)
    partials = reserve((-(-N // y), K), np.float64)
    tickets, dots, grid = np.zeros(K // PART, np.uint32), np.zeros(K), (-(-N // y), K // PART)
    args = (np.int64(N), np.int64(K), R, P, partials, tickets, dots)
    emulated(modules).launch("cg.cu", "column_dots_f32_v4", grid, (x, y), *args)
    for columns in COLUMNS:
        expected = (near(R, columns)[LAST].astype(float) * near(P, columns)[LAST]).sum(axis=0)
        np.testing.assert_allclose(partials[-1, columns], expected, rtol=1e-12)


def check_packed_rows(modules: dict[str, Module] | None) -> None:
    X, rows = block("float32", 5), np.arange(N, dtype=np.int32)
    rows[LAST] = rows[LAST][::-1].copy()
    found = emulated(modules).pack_rows(X, rows)
    for columns in COLUMNS:
        assert_last(near(found, columns), near(X, columns)[rows])


def check_sketches(modules: dict[str, Module] | None) -> None:
    L, far, _ = graphs()
    run, scale = emulated(modules, 1), np.sqrt(K / PART)
    for name in ("sketch_incidence", "sketch_identity"):
        found = getattr(run, name)(far, K, SEED)[:, :PART] * np.float32(scale)
        assert_last(found, getattr(CPU, name)(L, PART, SEED))


def check_edges(modules: dict[str, Module] | None) -> None:
    """Rows whose entries are far away, and scores of an edge between far rows."""
    L, far, _ = graphs()
    run, X, Y = emulated(modules), block("float32", 1), block("float32", 2)
    ratio = np.random.default_rng(3).random(N)
    pairs = np.repeat(ratio, np.diff(L.indptr)) + ratio[L.indices]
    largest = np.array([pairs[a:b].max(initial=0) for a, b in pairwise(L.indptr)])
    assert_last(run.pair_bounds(far, ratio), largest, "float64")
    first = _first_edges(L)
    upper, counts = np.diff(first), np.zeros(N, np.int64)
    run._flat("upper_counts_i32", N, np.int64(N), far.indptr, far.indices, counts)
    assert np.array_equal(counts[LAST], upper[LAST])
    _check_filter(run, L, far, first)
    at = np.array([[4101], [4103]], np.int32)  # an edge, of whatever weight
    scores, s = np.full(1, np.nan), L.inv_sqrt_degree
    sizes = (np.int64(1), np.int64(K), at[0], at[1], None)
    args = (*sizes, s, X, Y, np.float64(LAM), scores)
    run.launch("sampling.cu", "edge_scores_f32_i32_v4", (1,), (8, 32), *args)
    ours, theirs = (sum(_distance(M, s, columns) for columns in COLUMNS) for M in (X, Y))
    np.testing.assert_allclose(scores, ours + theirs / LAM, rtol=1e-4)


def _check_filter(run: LastBlocks, L: Any, far: Any, first: Any) -> None:
    """The numbers of edges begin at 2^32, too."""
    m = int(first[-1])
    factors = reserve((FAR + m,), np.float64)
    factors[FAR:] = kept = np.random.default_rng(4).integers(0, 2, m) / 2.0
    factors[:m] = 1.0
    edges = (np.int64(N), far.indptr, far.indices, first + FAR)
    counts = np.full(N, -1)
    run._rows("kept_counts_i32", N, *edges, factors, counts)
    A = Graph(L.indptr, L.indices, L.weights, L.inv_sqrt_degree**-2.0)
    expected = A.with_edges(kept > 0, kept)
    assert np.array_equal(counts[LAST], np.diff(expected.indptr)[LAST])
    new = (expected.indptr + FAR, reserve((FAR + expected.indptr[-1],), np.int32))
    weights, sums = reserve((FAR + expected.indptr[-1],), np.float32), np.full(N, np.nan)
    run._rows("kept_fill_f32_i32", N, *edges, far.weights, factors, *new, weights, sums)
    at = slice(expected.indptr[LAST.start], None)
    assert np.array_equal(new[1][FAR:][at], expected.indices[at])
    np.testing.assert_allclose(weights[FAR:][at], expected.weights[at], rtol=1e-6)
    lo, hi = (reserve((FAR + m,), np.int32) for _ in range(2))
    listed = reserve((FAR + m,), np.float32)
    run._rows("edge_list_f32_i32", N, *edges, far.weights, lo, hi, listed)
    u, v, w = A.edges()
    own = u >= LAST.start
    for found, wanted in ((lo, u), (hi, v), (listed, w)):
        assert np.array_equal(found[FAR:][own], wanted[own])


def _distance(M: Any, s: Any, columns: slice) -> Any:
    x = [s[i] * M[i, columns].astype(float) for i in (4101, 4103)]
    return ((x[0] - x[1]) ** 2).sum()


def _first_edges(L: Any) -> Any:
    rows = np.repeat(np.arange(N), np.diff(L.indptr))
    return np.concatenate([[0], np.cumsum(np.bincount(rows[L.indices > rows], minlength=N))])


def check_flat(modules: dict[str, Module] | None) -> None:
    """One number for each of 2^32 + 300 edges; the last block has 44 of them."""
    run, m = emulated(modules), FAR + 300
    own = slice(FAR + 256, m)
    scores, q = reserve((m,), np.float64), reserve((m,), np.int64)
    scores[own] = np.arange(44.0)
    run._flat("integer_scores", m, np.int64(m), scores, np.int32(4), q)
    assert np.array_equal(q[own], 16 * np.arange(44))
    prefix, counts, factors = (reserve((m,), t) for t in (np.int64, np.int64, np.float64))
    prefix[own] = np.cumsum(q[own])
    run._flat("draw_edges", 1, np.int64(1), np.int64(m), prefix, np.uint64(SEED), counts)
    (drawn,) = np.flatnonzero(counts[own])
    counts[own] = np.arange(44) % 3
    sizes = (np.int64(66), np.int64(m))
    run._flat("replacement_factors", m, *sizes, counts, q, prefix, factors)
    total, weights = q[own].sum(), np.maximum(q[own], 1)
    expected = np.where(counts[own] > 0, counts[own] * total / (66 * weights), 0)
    np.testing.assert_allclose(factors[own], expected, rtol=1e-12)
    assert drawn > 0  # the first of them has no share
    scores[own] = 1.0
    run._flat("bernoulli_factors", m, np.int64(m), scores, np.uint64(SEED), factors)
    assert (factors[own] == 1).all()
    tiles = -(-m // 2048)
    totals = np.zeros(tiles, np.int64)
    args = (np.int64(m), q, prefix, totals)
    run.launch("sampling.cu", "scan_tiles", (tiles,), (256,), *args)
    assert np.array_equal(prefix[own], np.cumsum(q[own]))
    assert totals[-1] == total
    run._flat("scan_add", m, np.int64(m), totals, prefix)
    assert np.array_equal(prefix[own], np.cumsum(q[own]) + total)
    words = reserve((m,), np.uint64)
    tail = (np.int64(m), np.uint32(2), np.uint64(SEED), words)
    run.launch("hadamard.cu", "random_words", (-(-m // 256),), (256,), *tail)
    assert np.unique(words[own]).shape == (44,)


def check_hadamard(modules: dict[str, Module] | None) -> None:
    """The last of sixteen tiles of 512 rows, without signs: H_512 times it."""
    rows, last = 8192, slice(8192 - 512, 8192)
    Q, out = (reserve((rows, K), np.float32) for _ in range(2))
    Q[last, :16] = np.random.default_rng(5).standard_normal((512, 16))
    sizes = (np.int64(rows), np.int64(K), np.int32(9), np.int32(0), np.int32(0), np.uint64(SEED))
    args = (*sizes, Q, out, None, np.float32(1))
    emulated(modules).launch("hadamard.cu", "hadamard_f32", (16, K // 16), (512,), *args)
    expected = hadamard(512) @ Q[last, :16]
    assert np.abs(out[last, :16] - expected).max() <= 1e-5 * np.abs(expected).max()


CHECKS = {
    "laplacian.cu": (check_products, check_half),
    "cg.cu": (check_cg,),
    "ranks.cu": (check_packed_rows,),
    "sketch.cu": (check_sketches,),
    "sampling.cu": (check_edges, check_flat),
    "hadamard.cu": (check_hadamard,),
}
