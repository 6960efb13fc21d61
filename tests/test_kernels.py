"""The unmodified CUDA kernels, run on the CPU by the emulator, against the CPU backend.

The same checks run three ways: plain, under AddressSanitizer + UBSan, under ThreadSanitizer (the
last two in a process of their own: ``python tests/test_kernels.py asan``).  Mutants at the end show
that a bug put into a kernel turns a check red.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cuda_emulator import (  # noqa: E402
    ORDERS,
    EmulatorError,
    Module,
    compiler,
    kernel_text,
    load,
)
from cuda_emulator.launches import Emulated  # noqa: E402

from herta_gpu.backends import philox  # noqa: E402
from herta_gpu.backends.cpu import CPUBackend, keep_probabilities  # noqa: E402
from herta_gpu.backends.device import hadamard_passes  # noqa: E402
from herta_gpu.graph import Graph  # noqa: E402

if compiler() is None:
    pytest.skip("no g++: the kernels cannot be emulated", allow_module_level=True)

CPU = CPUBackend()
LAM, SEED = 20.0, 0x9E3779B97F4A7C15
SIZES = ("1", "31", "32", "33", "hub")
WIDTHS = (1, 3, 8, 40, 128)
DTYPES = ("float32", "float64")
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


@cache
def graph(size: str, weighted: bool) -> Graph:
    """Random edges and empty rows; "hub": two rows far longer than a segment of 64."""
    rng = np.random.default_rng(5)
    n = 200 if size == "hub" else int(size)
    edges = rng.integers(0, max(1, n - 3), (2, 3 * n))  # the last three nodes stay alone
    if size == "hub":
        spokes = np.arange(n - 5)
        hubs = [np.stack([np.full_like(spokes, h), spokes]) for h in (0, 150)]
        edges = np.concatenate([edges, *hubs], axis=1)
    edges = np.unique(np.sort(edges, axis=0), axis=1)
    return Graph.from_edges(edges, n, 0.1 + rng.random(edges.shape[1]) if weighted else None)


@cache
def laplacian(size: str, weighted: bool, dtype: str, wide: bool = False) -> Any:
    L = CPU.laplacian(graph(size, weighted), dtype)
    return replace(L, indices=L.indices.astype(np.int64)) if wide else L


def block(n: int, k: int, dtype: str, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(dtype)


def assert_close(found: Any, expected: Any, dtype: str, factor: float = 1.0) -> None:
    assert found.shape == expected.shape
    error = np.abs(np.asarray(found, float) - expected)
    bound = factor * TOLERANCE[dtype] * max(1.0, np.abs(expected).max(initial=0))
    assert (error <= bound).all(), f"off by {np.nanmax(error, initial=0):.3g}, allowed {bound:.3g}"


# ---- the checks: one per primitive ---------------------------------------------------------------


def check_apply_H(run: Emulated, L: Any, k: int, dtype: str) -> None:
    X = block(L.n, k, dtype)
    expected = CPU.apply_H(L, LAM, X)
    Y, dots = run.apply_H(L, LAM, X, dots=True)
    assert_close(Y, expected, dtype)
    assert_close(dots, CPU.column_dots(X, expected), dtype)
    assert_close(run.apply_H(L, LAM, X), expected, dtype)


def check_chebyshev(run: Emulated, L: Any, k: int, dtype: str) -> None:
    Z, before, B = (block(L.n, k, dtype, seed) for seed in range(3))
    expected, found = before.copy(), before.copy()
    CPU.chebyshev_step(L, LAM, Z, expected, B, 0.3, 0.2)
    run.chebyshev_step(L, LAM, Z, found, B, 0.3, 0.2)
    assert_close(found, expected, dtype)


def check_cg(run: Emulated, L: Any, k: int, dtype: str) -> None:
    R, tol = block(L.n, k, dtype), 0.1
    R[:, k // 2] = 0  # starts frozen
    energy = 0.7 * CPU.column_dots(R, R) / tol**2
    energy[::2] = 0  # the odd columns freeze soon, the even ones later
    expected, found = (CPU.cg_start(L, LAM, R.copy(), energy.copy(), tol, 1e-3) for _ in range(2))
    for _ in range(4):
        CPU.cg_step(L, LAM, expected)
        run.cg_step(L, LAM, found)
    for name in ("active", "iterations"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    for name in ("Z", "R", "P", "rho", "energy"):
        assert_close(getattr(found, name), getattr(expected, name), dtype, factor=10)


def check_column_dots(run: Emulated, L: Any, k: int, dtype: str) -> None:
    X, Y = block(L.n, k, dtype), block(L.n, k, dtype, 1)
    assert_close(run.column_dots(X, Y), CPU.column_dots(X, Y), "float64")


def check_sketches(run: Emulated, L: Any, k: int, dtype: str) -> None:
    expected = CPU.sketch_incidence(L, k, SEED)
    assert_close(run.sketch_incidence(L, k, SEED), expected, dtype)
    assert_close(run.sketch_identity(L, k, SEED), CPU.sketch_identity(L, k, SEED), dtype)


def check_scores(run: Emulated, L: Any, k: int, dtype: str) -> None:
    B_S, Pi_S = block(L.n, k, dtype), block(L.n, k, dtype, 1)
    expected = CPU.edge_scores(L, B_S, Pi_S, LAM)
    if expected.size:
        assert_close(run.edge_scores(L, B_S, Pi_S, LAM), expected, dtype)


def check_sampling(run: Emulated, L: Any, k: int, dtype: str) -> None:
    m = L.nnz // 2
    if m == 0:
        return
    scores = np.random.default_rng(3).random(m) ** 8
    exponent = 61 - int(np.ceil(np.log2(max(m, 2)))) - int(np.ceil(np.log2(scores.max())))
    drawn = CPU.sample_edges(scores, m + k, SEED, replace=True)
    assert np.array_equal(run.with_replacement(scores, m + k, SEED, exponent), drawn)
    kept = CPU.sample_edges(scores, m // 2, SEED, replace=False)
    assert np.array_equal(run.bernoulli(keep_probabilities(scores, m // 2), SEED), kept)


def check_scan(run: Emulated, L: Any, k: int, dtype: str) -> None:
    totals = np.random.default_rng(k).integers(0, 1 << 38, 5000)  # three turns of the one block
    expected = np.cumsum(totals) - totals
    run.launch("sampling.cu", "scan_totals", (1,), (256,), np.int64(5000), totals)
    assert np.array_equal(totals, expected)


def check_sampled_graph(run: Emulated, L: Any, k: int, dtype: str) -> None:
    m = L.nnz // 2
    factors = np.random.default_rng(k).integers(0, 3, m) / 3.0
    A = Graph(L.indptr, L.indices, L.weights, L.inv_sqrt_degree**-2.0)
    expected = A.with_edges(factors > 0, factors)
    indptr, indices, weights, sums = run.sampled_graph(L, factors)
    assert np.array_equal(indptr, expected.indptr)
    assert np.array_equal(indices, expected.indices)
    assert_close(weights, expected.weights, dtype)
    assert_close(sums, expected.sampled_degree, dtype)


def check_srht(run: Emulated, L: Any, k: int, dtype: str) -> None:
    Q = block(L.n, k, dtype)
    for s in {1, max(1, L.n // 2), L.n}:
        assert_close(run.srht(Q, s, SEED), CPU.srht(Q, s, SEED), dtype)


CHECKS: dict[str, list[Callable[[Emulated, Any, int, str], None]]] = {
    "laplacian.cu": [check_apply_H, check_chebyshev],
    "cg.cu": [check_cg, check_column_dots],
    "sketch.cu": [check_sketches],
    "sampling.cu": [check_scores, check_sampling, check_scan, check_sampled_graph],
    "hadamard.cu": [check_srht],
}
EVERY = [check for checks in CHECKS.values() for check in checks]


# ---- plain ---------------------------------------------------------------------------------------


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


# ---- random numbers ------------------------------------------------------------------------------

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


# ---- large offsets -------------------------------------------------------------------------------


def reserve(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros of any size: memory is used only where it is touched."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    try:
        buffer = mmap.mmap(-1, int(np.prod(shape)) * np.dtype(dtype).itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"no address space for an array beyond 2^32 entries: {error}")
    return np.frombuffer(buffer, dtype).reshape(shape)


def check_offsets(modules: dict[str, Module] | None = None) -> None:
    """Blocks of 9 x 2^29: row 8 begins at 2^32, where a 32-bit offset is 0 again."""
    n, k, part = 9, 1 << 29, 256
    module = {f: (modules or {}).get(f) or load(f) for f in CHECKS}
    L = CPU.laplacian(Graph.from_edges([[0], [8]], n), "float32")
    X, Y, Z = (reserve((n, k), np.float32) for _ in range(3))
    X[:, :part], Z[:, :part] = block(n, part, "float32"), block(n, part, "float32", 1)
    X0, Z0 = X[:, :part].copy(), Z[:, :part].copy()
    size, none = (np.int64(n), np.int64(k)), np.zeros(0)
    graph_args = (L.indptr, L.indices, None, L.inv_sqrt_degree, L.diagonal, np.float32(LAM))
    cut = (np.int32(64), np.int32(0), np.zeros(0, np.int64), np.zeros(0, np.int32), none)
    tickets = np.zeros(1, np.uint32)
    args = (*size, *graph_args, *cut, tickets, X, Y, None, None)
    shape = ((1, k // part), (64, 4))
    module["laplacian.cu"].launch("apply_H_f32_i32_v4", *shape, args, blocks=(0, 1))
    assert_close(Y[:, :part], CPU.apply_H(L, LAM, X0), "float32")

    alpha, beta = reserve((k,), np.float64), reserve((k,), np.float64)
    alpha[:part], beta[:part] = 2.0, 3.0
    P0 = Y[:, :part].copy()
    args = (*size, X, Y, Z, alpha, beta)
    module["cg.cu"].launch("cg_direction_f32_v4", *shape, args, blocks=(0, 1))
    assert_close(Z[:, :part], Z0 + 2 * P0, "float32")
    assert_close(Y[:, :part], X0 + 3 * P0, "float32")

    args = (*size, np.float32(1), np.uint64(SEED), Y)
    module["sketch.cu"].launch("sketch_identity_f32", *shape, args, blocks=(0, 1))
    expected = CPU.sketch_identity(L, part, SEED) * np.sqrt(np.float32(part))
    assert_close(Y[:, :part], expected, "float32")


def test_offsets_beyond_32_bits() -> None:
    check_offsets()


# ---- traffic -------------------------------------------------------------------------------------


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


def test_hadamard_reads_and_writes_once_per_pass() -> None:
    n, k, s = 4000, 16, 100
    Q = block(n, k, "float32")
    found = moved(lambda run: run.srht(Q, s, SEED), "hadamard.cu")
    blocks = 4 * k * (n + 4096 + 4096 + s)  # Q in, work out and in, the chosen rows out
    assert blocks < found <= 1.001 * (blocks + 4096 * (8 + 8))  # keys out, places in


# ---- the emulator itself -------------------------------------------------------------------------


def snippet(text: str) -> Module:
    common = kernel_text("cg.cu").split('#line 1 "cg.cu"')[0]
    return load("snippet", text=f"{common}\n{text}")


BROKEN = {
    "divergent barrier": "if (threadIdx.x < 3) { __syncthreads(); } else {\n __syncthreads(); }",
    "left the kernel": "if (threadIdx.x == 5) return; __syncthreads();",
    "has left": "if (threadIdx.x == 5) return; __syncwarp();",
    "not in the mask": "__syncwarp(0xff);",
    "outside the mask": "if (threadIdx.x < 8) out[0] = __shfl_sync(0xffu, 1, 9);",
    "divergent warp": "if (threadIdx.x & 1) { __syncwarp(); } else {\n __ballot_sync(~0u, 1); }",
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_collectives_fail_loudly(message: str) -> None:
    text = f'extern "C" __global__ void broken(int* out) {{ {BROKEN[message]} }}'
    for order in ORDERS:
        with pytest.raises(EmulatorError, match=f"{message}|deadlock"):
            snippet(text).launch("broken", (1,), (32,), (np.zeros(32, np.int32),), order)


def test_shared_memory_is_poisoned_before_each_block() -> None:
    text = """template <class T> __device__ T peek() {
        __shared__ T x[7];
        const T found = x[3];
        x[3] = 1;
        return found;
    }
    extern "C" __global__ void poison(double* out) { out[blockIdx.x] = peek<double>(); }"""
    out = np.zeros(3)
    snippet(text).launch("poison", (3,), (1,), (out,))
    assert np.isnan(out).all()


def test_portable_fibers_do_the_same() -> None:
    check_cg(Emulated("portable", segment=64), laplacian("hub", True, "float64"), 3, "float64")


def test_launches_with_wrong_arguments_are_refused() -> None:
    module, a = load("cg.cu"), np.ones((4, 4), np.float32)
    scalars = (np.int64(4), np.int64(4))
    good = (*scalars, a.copy(), a.copy(), a.copy(), np.ones(4), np.ones(4))

    def launch(*args: Any) -> None:
        module.launch("cg_direction_f32_v4", (1,), (1, 4), args)

    launch(*good)
    wrong: list[tuple[Any, ...]] = [
        good[:-1],
        (np.int32(4), *good[1:]),  # a 64-bit size sent as 32 bits
        (4.0, *good[1:]),
        (*good[:2], a.astype(float), *good[3:]),
        (*good[:3], a[:, ::-1], *good[4:]),  # a view: the pointer alone says nothing of strides
        (*good[:6], np.float64(1)),
    ]
    for args in wrong:
        with pytest.raises(EmulatorError):
            launch(*args)
    with pytest.raises(EmulatorError, match="at least 1"):
        module.launch("cg_direction_f32_v4", (0,), (1, 4), good)


def test_wrong_scalar_type_is_refused() -> None:
    L, X = laplacian("33", False, "float32"), block(33, 8, "float32")

    class Careless(Emulated):
        def launch(self, file: str, kernel: str, grid: Any, block: Any, *args: Any) -> None:
            super().launch(file, kernel, grid, block, *args[:7], float(args[7]), *args[8:])

    with pytest.raises(EmulatorError, match="argument 7: f4 got float64"):
        Careless().apply_H(L, LAM, X)


# ---- sanitizers ----------------------------------------------------------------------------------

REPORTS = {"asan": ("AddressSanitizer", "runtime error"), "tsan": ("ThreadSanitizer",)}


def sanitized(variant: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """This file as a script, with the sanitizer's runtime loaded first."""
    named = [str(compiler()), f"-print-file-name=lib{variant}.so"]
    runtime = Path(subprocess.run(named, capture_output=True, text=True).stdout.strip())
    if not runtime.is_absolute() or not runtime.exists():
        pytest.skip(f"lib{variant} is not installed")
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []  # TSan needs fixed addresses
    options = {
        "LD_PRELOAD": str(runtime.resolve()),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "halt_on_error=1",
        "OPENBLAS_NUM_THREADS": "1",
        "HERTA_NUM_THREADS": "1",
    }
    command = [*fixed, "env", *(f"{name}={value}" for name, value in options.items())]
    command += [sys.executable, str(HERE / "test_kernels.py"), variant, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ)


def run_checks(variant: str, modules: dict[str, Module] | None = None, only: str = "") -> None:
    """Every check (of one file) on few sizes: what runs under a sanitizer and on a mutant."""
    for size, weighted, dtype, k in [
        *[("33", False, "float32", 8), ("hub", True, "float32", 3)],
        *[("1", False, "float64", 1), ("hub", False, "float64", 16)],
    ]:
        L = laplacian(size, weighted, dtype, wide=k == 3)
        for file, checks in CHECKS.items():
            for check in checks if only in ("", file) else []:
                check(Emulated(variant, "random", 64, 3, modules), L, k, dtype)
    for n in (500, 600) if only in ("", "hadamard.cu") else ():  # one full tile; two passes
        Q = block(n, 3, "float32")
        found = Emulated(variant, modules=modules).srht(Q, 70, SEED)
        assert_close(found, CPU.srht(Q, 70, SEED), "float32")


@pytest.mark.parametrize("variant", REPORTS)
def test_no_sanitizer_complains(variant: str) -> None:
    done = sanitized(variant)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all checks passed" in done.stdout


# ---- mutants -------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    red: str = "plain"  # the step that must see it


MUTANTS = {
    "barrier missing before a block sum": Mutant(
        "cg.cu", "tile[i][thread] = v[i];\n    __syncthreads();", "tile[i][thread] = v[i];"
    ),
    "barrier missing before shared memory is used again": Mutant(
        "laplacian.cu", "__syncthreads();  // the tile may", "// the tile may", "tsan"
    ),
    "barrier missing between butterflies": Mutant(
        "hadamard.cu", "= x[j];\n    }\n    __syncthreads();", "= x[j];\n    }", "tsan"
    ),
    "barrier missing between two scans": Mutant(
        "sampling.cu", "__syncthreads();  // the totals may", "// the totals may", "tsan"
    ),
    "race: every thread takes a ticket": Mutant(
        "cg.cu", "if (threadIdx.x == 0 && threadIdx.y == 0) last =", "last ="
    ),
    "race: every row of the block writes the sum": Mutant(
        "cg.cu", "if (!inside || threadIdx.y != 0) return;", "if (!inside) return;", "tsan"
    ),
    "sum taken before the other blocks are done": Mutant(
        "cg.cu", "atomicInc(ticket, count - 1) == count - 1", "atomicInc(ticket, count - 1) == 0"
    ),
    "exit before a barrier": Mutant(
        "laplacian.cu", "lane(L.k);\n", "lane(L.k);\n    if (!lane.inside) return;\n"
    ),
    "off by one: a row too many": Mutant(
        "laplacian.cu", "const bool mine = row < L.n &&", "const bool mine = row <= L.n &&", "asan"
    ),
    "off by one: the tail of a tile": Mutant(
        "sampling.cu", "x[i] = first + i < n ?", "x[i] = first + i <= n ?", "asan"
    ),
    "off by one: a column too many": Mutant(
        "sketch.cu", "if (column + i < k)", "if (column + i <= k)", "asan"
    ),
    "shared tile without its padding": Mutant(
        "hadamard.cu", "tile[slot(1 << kLogRows)]", "tile[1 << kLogRows]", "asan"
    ),
    "32-bit offset": Mutant(
        "laplacian.cu", "X + j * L.k + column", "X + static_cast<i32>(j * L.k) + column", "offsets"
    ),
    "arguments swapped": Mutant(
        "sketch.cu", "philox(lo, hi, group, kStreamInc", "philox(hi, lo, group, kStreamInc"
    ),
    "ticket that does not wrap": Mutant(
        "laplacian.cu", "atomicInc(ticket, count - 1)", "atomicInc(ticket, count)"
    ),
    "rho changed before beta is made of it": Mutant(
        "cg.cu", "alpha[c] = step[i];\n", "alpha[c] = step[i];\n        rho[c] = dot[i];\n"
    ),
    "sum over half the lanes": Mutant("sampling.cu", "warp_sum(l, 1, 8)", "warp_sum(l, 1, 4)"),
    "search from the wrong side": Mutant(
        "sampling.cu", "if (list[middle] > value)", "if (list[middle] >= value)"
    ),
    "frozen columns move": Mutant("cg.cu", "if (active[c]) step[i] =", "step[i] ="),
}


def mutant(name: str, variant: str) -> dict[str, Module]:
    file, old, new, _ = MUTANTS[name]
    text = kernel_text(file)
    if text.count(old) != 1:
        raise ValueError(f"{name}: the text to change occurs {text.count(old)} times")
    return {file: load(file, variant, text.replace(old, new))}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_turns_a_check_red(name: str) -> None:
    file, _, _, step = MUTANTS[name]
    if step in REPORTS:
        done = sanitized(step, name)
        assert done.returncode != 0, "the mutant passed"
        assert any(word in done.stderr for word in REPORTS[step]), done.stderr[-2000:]
        return
    modules = mutant(name, "plain")
    if step == "offsets":
        with pytest.raises((AssertionError, EmulatorError)):
            check_offsets(modules)
    else:
        with pytest.raises((AssertionError, EmulatorError)):
            run_checks("plain", modules, only=file)


def main(variant: str, name: str = "") -> None:
    modules = mutant(name, variant) if name else None
    run_checks(variant, modules, only=MUTANTS[name].file if name else "")
    print("all checks passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
