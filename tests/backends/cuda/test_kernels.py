"""The unmodified CUDA kernels, run on the CPU by the emulator, against the CPU backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.backends.cuda.offset_checks import check_offsets
from tests.cuda_emulator import ORDERS, compiler, load
from tests.cuda_emulator.launches import Emulated

if compiler() is None:
    pytest.skip("no g++: the kernels cannot be emulated", allow_module_level=True)

from herta_gpu.backends.cpu import philox
from herta_gpu.backends.cuda.device import hadamard_passes
from herta_gpu.graph import Graph
from tests.backends.cuda.kernel_checks import (
    CPU,
    DTYPES,
    EVERY,
    LAM,
    SEED,
    SIZES,
    WIDTHS,
    assert_close,
    block,
    check_apply_H,
    check_cg,
    check_column_dots,
    check_sampled_graph,
    check_sketches,
    laplacian,
    snippet,
)

# ---- against the CPU backend


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", EVERY, ids=lambda check: check.__name__[6:])
def test_kernel_equals_the_cpu_backend(check: Any, size: str, weighted: bool) -> None:
    for dtype in DTYPES:
        for number, k in enumerate(WIDTHS):
            run = Emulated(order=ORDERS[number % 3], segment=64, max_blocks=5)
            check(run, laplacian(size, weighted, dtype, wide=k == 3), k, dtype)


@pytest.mark.parametrize("k", [130, 516, 257])
def test_more_columns_than_a_block_is_wide(k: int) -> None:
    run = Emulated(segment=64, max_blocks=3)
    for check in (check_apply_H, check_cg, check_column_dots, check_sketches):
        check(run, laplacian("hub", True, "float32"), k, "float32")


def test_hub_of_twenty_thousand_neighbours() -> None:
    star = Graph.from_edges(np.stack([np.zeros(20_000, int), np.arange(1, 20_001)]))
    L = CPU.laplacian(star, "float32")
    for check in (check_apply_H, check_sketches, check_sampled_graph):
        check(Emulated(max_blocks=64), L, 8, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_order_of_threads_and_blocks(dtype: str) -> None:
    L = laplacian("hub", True, dtype)
    X = block(L.n, 40, dtype)
    runs = [Emulated(order=order, segment=64, max_blocks=5) for order in ORDERS]
    results = [(*run.apply_H(L, LAM, X, dots=True), run.sketch_incidence(L, 40, 1)) for run in runs]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("n", [1, 2047, 2048, 2049, 6_000_000])
def test_prefix_sums(n: int) -> None:
    x = np.random.default_rng(0).integers(0, 1 << 38, n)
    assert np.array_equal(Emulated().prefix_sum(x), np.cumsum(x))


@pytest.mark.parametrize("n", [1, 2, 511, 513, 1 << 14])
def test_hadamard_of_any_size(n: int) -> None:
    Q = block(n, 5, "float64")
    assert_close(Emulated().srht(Q, max(1, n // 3), 1), CPU.srht(Q, max(1, n // 3), 1), "float64")


def test_hadamard_passes() -> None:
    assert [len(hadamard_passes(p)) for p in (0, 9, 10, 18, 19, 27)] == [1, 1, 2, 2, 3, 3]
    assert all(sum(hadamard_passes(p)) == p and max(hadamard_passes(p)) <= 9 for p in range(28))


def test_offsets_beyond_32_bits() -> None:
    check_offsets()


# ---- random numbers

# Counter, key, output: the known answers of philox4x32-10 in Random123.
KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000  00000000 00000000  6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  d16cfe09 94fdcceb 5001e420 24126ea1
"""
PHILOX = """
extern "C" __global__ void words(const u32* c, u64 seed, u32* out) {
    const Words r = philox(c[0], c[1], c[2], c[3], seed);
    for (int i = 0; i < 4; ++i) out[i] = r.w[i];
}
"""


@pytest.mark.parametrize("line", KNOWN_ANSWERS.split("\n")[1:-1])
def test_philox_known_answers(line: str) -> None:
    words = [int(word, 16) for word in line.split()]
    counter, key, expected = words[:4], words[4:6], words[6:]
    found = np.zeros(4, np.uint32)
    args = (np.array(counter, np.uint32), np.uint64(key[1] << 32 | key[0]), found)
    snippet(PHILOX).launch("words", (1,), (1,), args)
    assert found.tolist() == expected
    assert [int(word) for word in philox.philox4x32(tuple(counter), tuple(key))] == expected


def test_random_words_beyond_32_bits_and_streams() -> None:
    for stream in (2, 4):
        found = Emulated().random_words(1000, stream, SEED)
        assert np.array_equal(found, philox.words64(0, 1000, SEED, stream))


# ---- float16

HALVES = """
extern "C" __global__ void narrow(i64 n, const float* x, u16* bits) {
    for (i64 i = 0; i < n; ++i) bits[i] = half_bits(x[i]);
}
extern "C" __global__ void widen(i64 n, const u16* bits, float* x) {
    for (i64 i = 0; i < n; ++i) x[i] = half_value(bits[i]);
}
"""


def test_float16_is_that_of_numpy() -> None:
    """Every finite float16, what lies between two of them, and what lies beyond."""
    finite = np.flatnonzero(np.arange(1 << 16) % 0x8000 < 0x7C00).astype(np.uint16)
    value = finite.view(np.float16).astype(np.float32)
    found = np.full_like(value, np.nan)
    snippet(HALVES).launch("widen", (1,), (1,), (np.int64(value.size), finite, found))
    assert np.array_equal(found, value)
    rng = np.random.default_rng(0)
    middle = np.float32(0.5) * (value[:-1] + value[1:])  # ties
    x = np.concatenate(
        [
            *(value, middle, np.nextafter(middle, np.float32(1e9))),
            (rng.standard_normal(50_000) * 2.0 ** rng.integers(-40, 17, 50_000)).astype("f4"),
            np.array([65504, 65519, 65520, 1e30, np.inf, -np.inf, -1e5], np.float32),
        ]
    )
    bits = np.zeros(x.size, np.uint16)
    snippet(HALVES).launch("narrow", (1,), (1,), (np.int64(x.size), x, bits))
    assert np.array_equal(bits, np.clip(x, -65504, 65504).astype(np.float16).view(np.uint16))
    snippet(HALVES).launch("narrow", (1,), (1,), (np.int64(1), np.full(1, np.nan, "f4"), bits))
    assert np.isnan(bits.view(np.float16)[0])


# ---- traffic


def moved(action: Callable[[Emulated], Any], *files: str) -> int:
    """Bytes of global memory that the kernels of `files` move in one action."""
    counted = [load(file, "count") for file in files]
    for module in counted:
        module.traffic()
    action(Emulated("count", max_blocks=20))
    return sum(sum(module.traffic()) for module in counted)


@cache
def dense(dtype: str) -> Any:
    edges = np.unique(np.sort(np.random.default_rng(0).integers(0, 2000, (2, 28_000)), 0), axis=1)
    return CPU.laplacian(Graph.from_edges(edges, 2000), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [8, 40])
def test_steps_move_little_more_than_they_must(k: int, dtype: str) -> None:
    L, X, width = dense(dtype), block(2000, k, dtype), np.dtype(dtype).itemsize
    gathers = L.nnz * (k + 1) * width  # X_j and s_j
    start = CPU.cg_start(L, LAM, X.copy(), np.zeros(k), 1e-3, 1e-6)
    cg = moved(lambda run: run.cg_step(L, LAM, start), "laplacian.cu", "cg.cu")
    chebyshev = moved(
        lambda run: run.chebyshev_step(L, LAM, X, X.copy(), X.copy(), 0.3, 0.2), "laplacian.cu"
    )
    for found, blocks in ((cg, 10), (chebyshev, 4)):
        compulsory = 4 * L.nnz + 8 * L.n + blocks * L.n * k * width
        assert 0.6 * (compulsory + gathers) < found <= 1.3 * compulsory + gathers


@pytest.mark.parametrize("k", [8, 40])
def test_float16_halves_the_gathers_and_a_residual_reads_what_it_must(k: int) -> None:
    L, X, B = dense("float32"), block(2000, k, "float32"), block(2000, k, "float64")
    halves = CPU.halves(L, X)
    rest = (X, X.copy(), X.copy(), 0.3, 0.2, halves)
    half = moved(lambda run: run.chebyshev_half(L, LAM, *rest), "laplacian.cu")
    compulsory, gathers = 4 * L.nnz + 12 * L.n + (16 + 6) * L.n * k, 2 * L.nnz * k
    assert 0.6 * (compulsory + gathers) < half <= 1.3 * compulsory + gathers
    residual = moved(lambda run: run.residual_rows(L, LAM, X, B, 0), "laplacian.cu")
    compulsory, gathers = 4 * L.nnz + 24 * L.n + 20 * L.n * k, L.nnz * (4 * k + 8)
    assert 0.6 * (compulsory + gathers) < residual <= 1.3 * compulsory + gathers


def test_hadamard_reads_and_writes_once_per_pass() -> None:
    n, k, s = 4000, 16, 100
    Q = block(n, k, "float32")
    found = moved(lambda run: run.srht(Q, s, SEED), "hadamard.cu")
    blocks = 4 * k * (n + 4096 + 4096 + s)  # Q in, work out and in, the chosen rows out
    assert blocks < found <= 1.001 * (blocks + 4096 * (8 + 8))  # keys out, places in
