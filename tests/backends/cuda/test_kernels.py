"""The kernels: any order of threads, wide and long rows, offsets, random bits, float16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from herta_gpu.backends.cpu import philox
from herta_gpu.backends.cuda.device import hadamard_passes
from herta_gpu.graph import Graph
from tests.backends.cuda import kernel_checks
from tests.backends.cuda import primitive_checks as checks
from tests.backends.cuda.kernel_sources import kernel_text
from tests.backends.cuda.offset_checks import check_offsets

pytestmark = [pytest.mark.gpu, pytest.mark.once]


def snippet(xp: Any, text: str, name: str) -> Any:
    """A kernel that uses what is in common.cuh."""
    common = kernel_text("cg.cu").split('#line 1 "cg.cu"')[0]
    return xp.RawModule(code=f"{common}\n{text}").get_function(name)


@pytest.mark.parametrize("file", kernel_checks.CHECKS)
@pytest.mark.parametrize(
    "order", [*(pytest.param(o, marks=pytest.mark.long) for o in ("forward", "reverse")), "random"]
)
def test_any_order_of_threads_and_blocks(device: Any, backend: Any, file: str, order: str) -> None:
    with device.having(order=["forward", "reverse", "random"].index(order)):
        kernel_checks.check_kernels(backend, file)


def test_results_have_the_same_bits_in_any_order(device: Any, backend: Any) -> None:
    g, found = checks.graph("hub", True), []
    for order in range(3):
        with device.having(order=order), kernel_checks.few_blocks(backend, 5) as b:
            L, X = b.laplacian(g, "float32"), b.asarray(checks.block(605, 40, "float32"))
            dots = b.residual(L, 3.0, X, X, "float32", b.asarray(np.ones(40)))
            made = (b.apply_H(L, 3.0, X), *dots, b.sketch_incidence(L, 40, 1))
            found.append(b"".join(b.to_numpy(x).tobytes() for x in made))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("k", [130, 516, 257])
def test_more_columns_than_a_block_is_wide(backend: Any, k: int) -> None:
    g = checks.graph("tail", True)
    with kernel_checks.few_blocks(backend, 3) as b:
        checks.check_products(b, g, k, "float32")
        checks.check_cg(b, g, k, "float32")
        checks.check_sketches(b, g, k, "float32")


def test_hub_of_twenty_thousand_neighbours(backend: Any) -> None:
    star = Graph.from_edges(np.stack([np.zeros(20_000, int), np.arange(1, 20_001)]))
    checks.check_products(backend, star, 8, "float32")
    checks.check_sampling(backend, star)


@pytest.mark.parametrize("n", [1, 2, 511, 513, 1 << 14])
def test_hadamard_of_any_size(backend: Any, n: int) -> None:
    checks.check_srht(backend, n, 5, "float64")


def test_hadamard_passes() -> None:
    assert [len(hadamard_passes(p)) for p in (0, 9, 10, 18, 19, 27)] == [1, 1, 2, 2, 3, 3]
    assert all(sum(hadamard_passes(p)) == p and max(hadamard_passes(p)) <= 9 for p in range(28))


@pytest.mark.parametrize("k", [1, 8, 40])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.long
def test_numbers_at_size(backend: Any, k: int, dtype: str) -> None:
    """Thousands of blocks, and several turns of each."""
    n = 1_000_000 if k == 1 else 100_000
    rng = np.random.default_rng(0)
    u = (n * rng.random(3 * n) ** 2).astype(int)  # some rows are long
    g = Graph.from_edges(np.stack([u, rng.integers(0, n, 3 * n)]), n)
    for check in (checks.check_products, checks.check_residual, checks.check_cg):
        check(backend, g, k, dtype)
    checks.check_sketches(backend, g, k, dtype)
    checks.check_srht(backend, n, k, dtype)
    checks.check_sampling(backend, g)
    if dtype == "float32":
        checks.check_half(backend, g, k)


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
def test_philox_known_answers(backend: Any, line: str) -> None:
    words = [int(word, 16) for word in line.split()]
    counter, key, expected = words[:4], words[4:6], words[6:]
    found = backend.xp.zeros(4, dtype=np.uint32)
    given = backend.asarray(np.array(counter, np.uint32))
    args = (given, np.uint64(key[1] << 32 | key[0]), found)
    snippet(backend.xp, PHILOX, "words")((1,), (1,), args)
    assert found.tolist() == expected
    words = map(np.uint64, (*counter, *key))
    assert [int(word) for word in philox.philox4x32(*words)] == expected


# ---- float16

HALVES = """
extern "C" __global__ void narrow(i64 n, const float* x, u16* bits) {
    for (i64 i = 0; i < n; ++i) bits[i] = half_bits(x[i]);
}
extern "C" __global__ void widen(i64 n, const u16* bits, float* x) {
    for (i64 i = 0; i < n; ++i) x[i] = half_value(bits[i]);
}
"""


def test_float16_is_that_of_numpy(backend: Any) -> None:
    """Every finite float16, what lies between two of them, and what lies beyond."""
    xp = backend.xp
    finite = np.flatnonzero(np.arange(1 << 16) % 0x8000 < 0x7C00).astype(np.uint16)
    value = finite.view(np.float16).astype(np.float32)

    def run(name: str, given: Any, dtype: Any) -> Any:
        found = xp.zeros(given.size, dtype=dtype)
        snippet(xp, HALVES, name)((1,), (1,), (np.int64(given.size), xp.asarray(given), found))
        return found.get()

    assert np.array_equal(run("widen", finite, np.float32), value)
    rng = np.random.default_rng(0)
    middle = np.float32(0.5) * (value[:-1] + value[1:])  # ties
    x = np.concatenate(
        [
            *(value, middle, np.nextafter(middle, np.float32(1e9))),
            (rng.standard_normal(50_000) * 2.0 ** rng.integers(-40, 17, 50_000)).astype("f4"),
            np.array([65504, 65519, 65520, 1e30, np.inf, -np.inf, -1e5], np.float32),
        ]
    )
    expected = np.clip(x, -65504, 65504).astype(np.float16).view(np.uint16)
    assert np.array_equal(run("narrow", x, np.uint16), expected)
    nan = run("narrow", np.full(1, np.nan, np.float32), np.uint16)
    assert np.isnan(nan.view(np.float16)[0])


def test_offsets_beyond_32_bits(backend: Any) -> None:
    check_offsets(backend)
