"""What the CUDA backend asks of a device, counted where the driver would be: on the real CuPy.

The ledger of tests/cuda_device counts launches, copies, waits and memory, those of CuPy's own
kernels included.  Every array has memory of its own here, so that peaks are those of the arrays.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from herta_gpu import HERTA, Graph, SDDSolver
from herta_gpu.app.cli import main
from herta_gpu.backends.cuda import transfer
from herta_gpu.backends.cuda.graphs import derived
from herta_gpu.laplacian import RegularizedLaplacian, block_cg
from herta_gpu.planning.costs import column_bytes
from tests.backends.cuda import ledger_table, more_checks
from tests.backends.cuda import primitive_checks as checks
from tests.backends.cuda.kernel_checks import few_blocks
from tests.conftest import ROOT, dense_H, random_graph

pytestmark = [pytest.mark.gpu, pytest.mark.once]

LAM = 20.0
MOVES = ("copies_in", "copies_out", "copies_on", "sets", "library_calls", "graph_launches")


def ours(ledger: dict[str, Any]) -> dict[str, int]:
    """Launches of this package's kernels, by name."""
    return {name: n for name, n in ledger["kernels"].items() if not name.startswith("cupy")}


def nothing_else(ledger: dict[str, Any]) -> bool:
    """No wait, no copy, no memory, no work of CuPy's or of a library."""
    quiet = not any(ledger[name] for name in (*MOVES, "waits", "allocations", "frees"))
    return quiet and ledger["launches"] == sum(ours(ledger).values())


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_cg_step_is_three_launches_and_nothing_else(
    device: Any, backend: Any, dtype: str
) -> None:
    L = backend.laplacian(checks.graph("hub"), dtype)
    R = backend.asarray(checks.block(605, 8, dtype))
    state = backend.cg_start(L, 3.0, R, backend.asarray(np.zeros(8)), 1e-3, 1e-7)
    backend.cg_step(L, 3.0, state)  # the first step allocates what all others use
    device.clear()
    for _ in range(4):
        backend.cg_step(L, 3.0, state)
    found = device.ledger()
    assert nothing_else(found)
    assert sorted(ours(found).values()) == [4, 4, 4]
    backend.cg_active(state)
    found = device.ledger()
    assert (found["copies_out"], found["bytes_out"]) == (1, 8)
    assert found["waits"] == 1


def test_a_chebyshev_step_is_one_launch(device: Any, backend: Any) -> None:
    L = backend.laplacian(checks.graph("tail"), "float32")
    Z, Z_prev, B = (backend.asarray(checks.block(33, 8, "float32", i)) for i in range(3))
    backend.chebyshev_step(L, 3.0, Z, Z_prev, B, 0.3, 0.2)
    device.clear()
    backend.chebyshev_step(L, 3.0, Z, Z_prev, B, 0.3, 0.2)
    found = device.ledger()
    assert nothing_else(found)
    assert found["launches"] == 1


@pytest.mark.parametrize("default", [False, True])
def test_captured_steps_are_one_launch_and_the_same_steps(
    device: Any, backend: Any, default: bool
) -> None:
    """On any stream, the default one too, which cannot capture."""
    states, cuda = [], backend.xp.cuda
    with cuda.get_current_stream() if default else cuda.Stream(non_blocking=True) as stream:
        L = backend.laplacian(checks.graph("tail"), "float32")
        for capture in (False, True):
            backend.capture = capture
            R = backend.asarray(checks.block(33, 8, "float32"))
            state = backend.cg_start(L, 3.0, R, backend.asarray(np.zeros(8)), 1e-3, 1e-7)
            backend.cg_steps(L, 3.0, state, 4)
            device.clear()
            for count in (4, 4, 1):
                backend.cg_steps(L, 3.0, state, count)
            found = device.ledger()
            assert found["launches"] == (3 if capture else 27)
            assert found["graph_launches"] == (2 if capture else 0)
            assert sorted(ours(found).values()) == [9, 9, 9]
            assert found["waits"] == found["allocations"] == 0
            states.append(state)
        stream.synchronize()
        for name in ("Z", "R", "P", "iterations"):
            assert np.array_equal(*(getattr(state, name).get() for state in states))


def test_the_hadamard_transform_of_2_to_the_18_is_two_passes(device: Any, backend: Any) -> None:
    n, s = 1 << 18, 300
    Q = backend.asarray(checks.block(n, 1, "float32"))
    device.clear()
    found = backend.srht(Q, s, checks.SEED)
    assert device.ledger()["kernels"]["hadamard_f32"] == 2  # three would be allowed
    expected = checks.CPU.srht(checks.block(n, 1, "float32"), s, checks.SEED)
    checks.close(backend, found, expected, "float32")


def solved(backend: Any, g: Graph, B: Any, tol: float = 1e-5, guess: Any = None) -> Any:
    H = RegularizedLaplacian(g, LAM, backend, "float32")
    guess = None if guess is None else backend.asarray(guess)
    return block_cg(H, backend.asarray(B), tol, guess)


def test_short_steps_are_replayed_and_long_ones_launched(device: Any, backend: Any) -> None:
    g, B = random_graph(300, 600), checks.block(300, 8, "float32")
    found, launches = [], []
    for backend.capture in (False, None):  # None: as the size of a step says
        device.clear()
        with backend.profiled() as traffic:
            Z, info = solved(backend, g, B, tol=1e-6)
        assert info.iterations.max() > 2 * backend.check_every
        found.append(Z.get())
        counts = device.ledger()
        launches.append(counts["launches"])
        # A replay counts as the launches that it is.
        assert traffic.launches["cg_direction"] == counts["kernels"]["cg_direction_f32_v4"]
    assert launches[1] < launches[0]
    np.testing.assert_array_equal(*found)


def test_a_fit_from_captured_steps_is_the_same_fit(device: Any, backend: Any) -> None:
    """On the default stream, where most people are."""
    found, launches = [], []
    for backend.capture in (False, True):
        g, X = random_graph(60, 200), checks.block(60, 8, "float32")
        device.clear()
        model = HERTA(device="cuda", strategy="herta", lam=50.0).fit(g, X, np.arange(60) % 3)
        found.append(model.W_)
        launches.append(device.ledger()["launches"])
    np.testing.assert_array_equal(*found)
    assert launches[1] < launches[0]


@pytest.mark.parametrize("k", [3, 7, 47])
@pytest.mark.parametrize("warm", [False, True])
def test_odd_widths_are_read_by_whole_loads(device: Any, backend: Any, k: int, warm: bool) -> None:
    g, B = random_graph(60, 200), checks.block(60, k, "float32")
    exact = np.linalg.solve(dense_H(g, LAM), B)
    device.clear()
    Z, info = solved(backend, g, B, guess=exact.astype("float32") + 1e-3 if warm else None)
    used = [name for name in ours(device.ledger()) if name.startswith(("apply_H", "cg_", "resid"))]
    assert used
    assert all(name.endswith("_v4") for name in used)
    assert Z.shape == B.shape
    assert Z.flags.c_contiguous
    assert len(info.iterations) == len(info.residuals) == len(info.h_norm_bound) == k
    assert info.status == "converged"
    assert info.iterations.min() > 0  # no column of zeros is among them
    assert np.abs(Z.get() - exact).max() <= 1e-4 * np.abs(exact).max()


def test_one_or_two_columns_are_not_padded(device: Any, backend: Any) -> None:
    for k in (1, 2):
        device.clear()
        solved(backend, random_graph(60, 200), checks.block(60, k, "float32"))
        assert device.ledger()["kernels"][f"cg_direction_f32_v{k}"] > 0
    assert [backend.padded(k, "float32") for k in (1, 2, 3, 4, 5, 47, 50)] == [
        1,
        2,
        4,
        4,
        8,
        48,
        52,
    ]
    assert [backend.padded(k, "float64") for k in (1, 2, 3, 47)] == [1, 2, 4, 48]


# ---- bytes that kernels move ---------------------------------------------------------------------


def moved(device: Any, action: Callable[[], Any]) -> int:
    """Bytes that our kernels read and write."""
    device.clear()
    with device.counting():
        action()
        device.synchronize()
    return sum(map(sum, device.ledger()["traffic"].values()))


@cache
def dense() -> Graph:
    edges = np.unique(np.sort(np.random.default_rng(0).integers(0, 2000, (2, 28_000)), 0), axis=1)
    return Graph.from_edges(edges, 2000)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [8, 40])
def test_steps_move_little_more_than_they_must(
    device: Any, backend: Any, k: int, dtype: str
) -> None:
    with few_blocks(backend, 20) as b:  # sums of blocks are nothing in a large graph
        L, width = b.laplacian(dense(), dtype), np.dtype(dtype).itemsize
        X, Z, B = (b.asarray(checks.block(2000, k, dtype, seed)) for seed in range(3))
        state = b.cg_start(L, LAM, B.copy(), b.asarray(np.zeros(k)), 1e-3, 1e-7)
        gathers = L.nnz * (k + 1) * width  # X_j and s_j
        cg = moved(device, lambda: b.cg_step(L, LAM, state))
        chebyshev = moved(device, lambda: b.chebyshev_step(L, LAM, X, Z, B, 0.3, 0.2))
        for found, blocks in ((cg, 10), (chebyshev, 4)):
            compulsory = 4 * L.nnz + 8 * L.n + blocks * L.n * k * width
            assert 0.6 * (compulsory + gathers) < found <= 1.3 * compulsory + gathers


def test_measuring_a_residual_costs_less_than_a_step(device: Any, backend: Any) -> None:
    """It was 2.3 steps: a float64 copy of Z, a float64 product, and a pass for each dot."""
    n, k = 1000, 40
    with few_blocks(backend, 20) as b:
        L, ones = b.laplacian(random_graph(n, 7000), "float32"), b.asarray(np.ones(k))
        B, Z = (b.asarray(checks.block(n, k, "float32", seed)) for seed in range(2))
        state = b.cg_start(L, LAM, B.copy(), b.asarray(np.zeros(k)), 1e-3, 1e-7)
        step = moved(device, lambda: b.cg_step(L, LAM, state))
        residual = moved(device, lambda: b.residual(L, LAM, Z, B, "float32", ones))
    gathers = L.nnz * (4 * k + 8 + 4)
    assert residual <= 1.3 * (12 * n * k + 32 * n) + gathers
    assert residual < 0.75 * step


@pytest.mark.parametrize("k", [8, 40])
def test_float16_halves_the_gathers_and_a_residual_reads_what_it_must(
    device: Any, backend: Any, k: int
) -> None:
    L = backend.laplacian(dense(), "float32")
    X, Z, B = (backend.asarray(checks.block(2000, k, "float32", seed)) for seed in range(3))
    halves = backend.halves(L, X)
    half = moved(device, lambda: backend.chebyshev_step(L, LAM, X, Z, B, 0.3, 0.2, halves))
    compulsory, gathers = 4 * L.nnz + 12 * L.n + (16 + 6) * L.n * k, 2 * L.nnz * k
    assert 0.6 * (compulsory + gathers) < half <= 1.3 * compulsory + gathers
    B = B.astype("float64")
    residual = moved(device, lambda: backend.residual_rows(L, LAM, X, B, 0))
    compulsory, gathers = 4 * L.nnz + 24 * L.n + 20 * L.n * k, L.nnz * (4 * k + 8)
    assert 0.6 * (compulsory + gathers) < residual <= 1.3 * compulsory + gathers


def test_a_hadamard_transform_reads_and_writes_once_per_pass(device: Any, backend: Any) -> None:
    n, k, s = 4000, 16, 100
    Q = backend.asarray(checks.block(n, k, "float32"))
    found = moved(device, lambda: backend.srht(Q, s, checks.SEED))
    blocks = 4 * k * (n + 4096 + 4096 + s)  # Q in, work out and in, the chosen rows out
    assert blocks < found <= 1.001 * (blocks + 4096 * (8 + 8))  # keys out, places in


def test_steps_beyond_the_last_one_move_nothing(device: Any, backend: Any) -> None:
    n, k = 500, 300  # two tiles of columns, of which one is done from the start
    L, R = backend.laplacian(random_graph(n, 1500), "float32"), checks.block(n, k, "float32")
    R[:, 200:] = 0
    zeros = backend.asarray(np.zeros(k))
    state = backend.cg_start(L, LAM, backend.asarray(R), zeros, 1e-3, 1e-4)
    step = moved(device, lambda: backend.cg_step(L, LAM, state))
    while backend.cg_active(state):
        backend.cg_step(L, LAM, state)
    done = {name: getattr(state, name).get() for name in ("Z", "R", "rho", "iterations")}
    beyond = moved(device, lambda: [backend.cg_step(L, LAM, state) for _ in range(3)])
    assert sorted(ours(device.ledger()).values()) == [3, 3, 3]
    assert beyond < 0.02 * 3 * step
    for name, before in done.items():
        assert np.array_equal(getattr(state, name).get(), before)


def test_bytes_that_a_profile_tells_are_those_that_move(device: Any, backend: Any) -> None:
    """The count of a profile leaves out gathers and scratch."""
    g, k = Graph.from_edges(np.random.default_rng(0).integers(0, 3000, (2, 9000)), 3000), 8
    L, B = backend.laplacian(g, "float32"), checks.block(3000, k, "float32")
    X, Z, Y = (backend.asarray(B.copy()) for _ in range(3))
    device.clear()
    with backend.profiled() as traffic, device.counting():
        backend.apply_H(L, 5.0, X)
        backend.chebyshev_step(L, 5.0, X, Z, Y, 0.3, 0.2)
        backend.residual_rows(L, 5.0, X, backend.asarray(B[:1000], "float64"), 1000)
        backend.residual(L, 5.0, X, Y, "float32", backend.asarray(np.ones(k)))  # 12 bytes a number
        state = backend.cg_start(L, 5.0, Y, backend.asarray(np.zeros(k)), 1e-3, 1e-6)
        backend.cg_step(L, 5.0, state)
        backend.srht(X, 100, 1)
        backend.synchronize()
    did: dict[str, int] = {}
    for kernel, bytes_ in device.ledger()["traffic"].items():
        name = re.sub(r"_[fiu](32|64).*$", "", kernel)
        did[name] = did.get(name, 0) + sum(bytes_)
    assert set(did) == set(traffic.moved)
    gathers = {"apply_H": 2 * L.nnz * 36, "chebyshev": L.nnz * 36, "residual": L.nnz * 40 * 4 // 3}
    for name, must in traffic.moved.items():
        assert 0.75 * (did[name] - gathers.get(name, 0)) < must < 1.05 * did[name], name


def test_a_profile_on_the_device_tells_launches_and_bytes_of_each_kernel(
    backend: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--device", "cuda", "--lam", "3", "--strategy", "herta", "--ridge", "0.1"]
    argv = ["profile", "synthetic:n=120,m=300,d=4,c=3", *options, "--loss", "ce", "--overwrite"]
    assert main([*argv, "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert main([*argv, "--quiet"]) == 0
    shown = capsys.readouterr().out
    steps = {kernels[name]["launches"] for name in ("apply_H", "cg_residual", "cg_direction")}
    assert len(steps) == 1  # a step of CG is one of each
    assert min(steps) > kernels["residual"]["launches"] > 0
    assert all(row["bytes"] > 0 for row in kernels.values())
    assert kernels["residual"]["rate"] > 0  # it is never captured
    assert "of a copy's rate" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.startswith("cg_")]
    assert f"python -m herta_gpu {shlex.join([*argv, '--quiet'])}" in shown


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_solve_takes_the_memory_that_is_planned_for_it(
    device: Any, backend: Any, dtype: str
) -> None:
    n, k = 3000, 32
    H = RegularizedLaplacian(random_graph(n, 6000), LAM, backend, dtype)
    B = backend.asarray(checks.block(n, k, "float64"))
    block_cg(H, B, 1e-4)  # what the graph and the kernels keep
    device.clear()
    before = device.ledger()["held"] - B.nbytes
    block_cg(H, B, 1e-4)
    found = device.ledger()
    assert found["peak"] - before <= n * k * column_bytes(dtype) + 20_000
    assert found["allocations"] == found["frees"]  # nothing is left behind
    assert found["held"] == before + B.nbytes


def test_out_of_memory_names_what_would_fit(device: Any, backend: Any) -> None:
    """A card that has less than was promised, and CuPy's own pool on it."""
    cuda, g, X = backend.xp.cuda, random_graph(600, 3000), checks.block(600, 40, "float32")
    with cuda.using_allocator(cuda.MemoryPool().malloc):
        free, total = cuda.runtime.memGetInfo()
        device.set(memory=total - free + 150_000)
        try:
            sentence = r"Out of memory.*Blocks of \d+ columns .* memory_budget=\d+"
            with pytest.raises(MemoryError, match=sentence):
                HERTA(device="cuda", memory_budget="1GB").fit(g, X, np.arange(600) % 3)
        finally:
            device.set(memory=total)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "direct"},
        pytest.param({"strategy": "herta", "sketch": True}, marks=pytest.mark.long),
        pytest.param({"strategy": "herta", "loss": "ce", "ridge": 0.1}, marks=pytest.mark.long),
        pytest.param({"strategy": "herta", "dtype": "float64"}, marks=pytest.mark.long),
    ],
)
def test_a_fit_fits_into_the_pool(device: Any, backend: Any, options: dict[str, Any]) -> None:
    """Pieces of memory that no longer fit together cost a quarter at most: CuPy's own pool."""
    rng, cuda = np.random.default_rng(0), backend.xp.cuda
    g, X, y = random_graph(900, 3600), checks.block(900, 24, "float64"), rng.integers(0, 5, 900)
    device.clear()
    before = device.ledger()["held"]
    HERTA(device="cuda", **options).fit(g, X, y)
    needed = device.ledger()["peak"] - before
    pool = cuda.MemoryPool()
    with cuda.using_allocator(pool.malloc):
        HERTA(device="cuda", **options).fit(random_graph(900, 3600), X, y)
        assert pool.total_bytes() <= 1.25 * needed


def test_a_budget_leaves_room_for_pieces(device: Any, backend: Any) -> None:
    pool = backend.xp.get_default_memory_pool()  # in which other tests have left free blocks
    free = 8 * 2**30 - device.ledger()["held"] + pool.free_bytes()
    assert backend.memory_available() == int(free / 1.2)
    assert backend.memory_free() == free
    assert backend.plan_budget(None) == int(0.85 * free)
    assert backend.plan_budget("1GB") == 2**30
    before = pool.get_limit()
    try:
        pool.set_limit(size=pool.used_bytes() + 1200)
        assert backend.memory_available() == 1000
        pool.set_limit(size=max(1, pool.used_bytes()))
        assert backend.memory_available() <= 1
    finally:
        pool.set_limit(size=before)


def test_a_step_that_is_launched_again_is_not_put_together_again(
    device: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes, names and arguments are those of the first step; another stream has its own."""
    module, made = sys.modules["herta_gpu.backends.cuda.backend"], []
    typed = module._typed
    monkeypatch.setattr(module, "_typed", lambda x, name: made.append(name) or typed(x, name))
    L, R = backend.laplacian(checks.graph("hub"), "float32"), checks.block(605, 8, "float32")
    counts, states = [], []
    for again in (True, False):
        state = backend.cg_start(L, 3.0, backend.asarray(R), backend.xp.zeros(8), 0.0, 0.0)
        for _ in range(3):
            made.clear()
            backend.cg_step(L, 3.0, state)
            counts.append(len(made))
            state.noted = state.noted if again else None
        states.append(state)
    assert counts[1:3] == [0, 0]
    assert min(counts[3:]) > 30
    for name in ("Z", "R", "P", "iterations"):
        assert np.array_equal(*(getattr(state, name).get() for state in states))
    side = backend.xp.cuda.Stream(non_blocking=True)
    backend.synchronize()
    with side:
        made.clear()
        backend.cg_step(L, 3.0, states[0])
        assert len(made) > 30


def test_residuals_after_the_first_are_one_launch(device: Any, backend: Any) -> None:
    """Over B itself, whatever its size: chunks would cost the host more than they cost a card."""
    g, lam = random_graph(600, 2400), 5.0
    L, (Z, B) = (
        backend.laplacian(g, "float32"),
        (checks.block(600, 8, "float32", s) for s in (0, 1)),
    )
    Z_there, B_there = backend.asarray(Z), backend.asarray(B)
    backend.residual_over(L, lam, Z_there, B_there.copy())  # compiles, makes its scratch memory
    device.clear()
    squares = backend.residual_over(L, lam, Z_there, B_there)
    found = device.ledger()
    named = {name: n for name, n in found["kernels"].items() if "cupy" not in name}
    assert sum(named.values()) == 1
    assert found["waits"] == 0
    R = B - dense_H(g, lam) @ Z.astype(float)
    np.testing.assert_allclose(B_there.get(), R, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(squares.get(), (R * R).sum(axis=0), rtol=1e-12)


def test_a_plan_for_a_card_is_that_of_a_fit_on_it(device: Any, backend: Any) -> None:
    """An H100 of 80 GB has 79.1 GB free, and the blocks of papers100M have 32 columns there."""
    sizes = {"n": 111_059_956, "m": 1_615_685_872, "d": 128, "c": 172, "n_train": 1_210_553}
    free, model = int(79.1 * 2**30), HERTA(lam=1.0, device="cuda")
    with mock.patch.object(backend, "memory_free", return_value=free):
        there = model.plan(**sizes)
    for other in (
        model.plan(**sizes, device_memory=free),
        model.plan(**sizes, device_memory="80GB"),
    ):
        assert other.recipe.width == there.recipe.width == 32
    assert there.memory == model.plan(**sizes, device_memory=free).memory
    kept = sum(there.memory[name] for name in ("graph", "Q", "one block of columns"))
    assert kept + 1.2 * (sum(there.memory.values()) - kept) <= 0.86 * free


def test_all_memory_comes_from_the_allocator_that_was_set(device: Any, backend: Any) -> None:
    """The documented line plugs RMM in; nothing may go past it."""
    asked: list[int] = []
    allocate = backend.xp.cuda.get_allocator()

    def counted(size: int) -> Any:
        asked.append(size)
        return allocate(size)

    with backend.xp.cuda.using_allocator(counted):
        device.clear()
        model = HERTA(device="cuda", sparsify=True, sketch=True, memory_budget="1GB")
        model.fit(random_graph(60, 200, seed=5), checks.block(60, 6, "float32"), np.arange(60) % 3)
        assert len(asked) > 100
        assert device.ledger()["allocations"] == sum(size > 0 for size in asked)


def test_what_a_graph_needs_beside_its_arrays_is_small(device: Any, backend: Any) -> None:
    """Not even one number of 8 bytes for every entry."""
    g = random_graph(300, 20_000)
    L = backend.laplacian(g, "float64")
    sums = backend.asarray(g.loopless_degree)
    device.clear()
    before = device.ledger()["held"]
    found = derived(backend, {"indptr": L.indptr, "indices": L.indices}, sums, L.inv_sqrt_degree)
    assert device.ledger()["peak"] - before < 8 * L.nnz // 4
    assert abs(found["lambda_max"] - g.lambda_max_bound) <= 1e-12


def test_a_large_array_is_uploaded_through_small_buffers(device: Any, backend: Any) -> None:
    X = np.ones((200, 50))
    transfer._kept.clear()
    device.clear()
    before = device.ledger()["pinned"]
    with mock.patch.object(transfer, "CHUNK_BYTES", 1000):
        backend.asarray(X)
        found = device.ledger()
        assert found["bytes_in"] == X.nbytes
        assert (found["largest_pinned"], found["most_pinned"] - before) == (1000, 2000)
        backend.asarray(X.astype("float32"))  # in the same buffers
        assert device.ledger()["pinned"] - before == 2000
    transfer._kept.clear()


def test_pinned_memory_is_given_back_after_a_graph(device: Any, backend: Any) -> None:
    backend.xp.get_default_pinned_memory_pool().free_all_blocks()
    before = device.ledger()["pinned"]
    backend.asarray(np.ones(9))
    assert device.ledger()["pinned"] > before  # CuPy's own pool keeps it
    backend.laplacian(random_graph(60, 200), "float32")
    assert device.ledger()["pinned"] <= before


def test_a_solve_that_has_no_room_says_so(device: Any, backend: Any) -> None:
    cuda, solver = backend.xp.cuda, SDDSolver(random_graph(600, 3000), lam=3.0, device="cuda")
    solver.memory_budget = "1GB"
    solver.solve(checks.block(600, 1, "float32"))  # the graph is there
    with cuda.using_allocator(cuda.MemoryPool().malloc):
        free, total = cuda.runtime.memGetInfo()
        device.set(memory=total - free + 100_000)
        try:
            with pytest.raises(MemoryError, match=r"The GPU is out of memory: .* memory_budget"):
                solver.solve(checks.block(600, 64, "float32"))
        finally:
            device.set(memory=total)


def test_a_system_that_pins_no_more(device: Any, backend: Any) -> None:
    """Copies then make the host wait, and are the same copies."""
    backend.xp.get_default_pinned_memory_pool().free_all_blocks()
    transfer._kept.clear()
    with device.having(pinned=device.ledger()["pinned"] + 2000):  # some of the buffers
        more_checks.check_upload(backend)
        more_checks.check_streaming(backend)


# ---- copies --------------------------------------------------------------------------------------


def test_nothing_large_leaves_the_device_while_training(device: Any, backend: Any) -> None:
    stages = ledger_table.by_stage(device, "mse")[1]
    assert stages["train"]["copies_out"] > 0
    assert stages["train"]["copies_in"] == 0
    assert stages["sparsify"]["copies_in"] == 0  # L_tilde is made where it is used
    for name in ("sparsify", "preconditioner", "spectrum", "train"):
        # Mostly 8 bytes; per-column reports of a solve are the longest, 8 bytes a column.
        assert stages[name]["bytes_out"] <= 8 * 64 * stages[name]["copies_out"]
    assert stages["train"]["largest_out"] <= 8 * 20 * 20  # the Lanczos matrix


def test_the_readme_of_the_tests_has_the_table_that_the_command_prints(device: Any) -> None:
    again = {row[0]: row[1:] for row in ledger_table.rows(ledger_table.by_stage(device, "mse")[1])}
    written = (ROOT / "tests" / "README.md").read_text(encoding="utf-8").splitlines()
    at = written.index(ledger_table.HEAD)
    table = [line.strip("| ").split(" | ") for line in written[at + 2 : written.index("", at)]]
    assert [row[0] for row in table] == [*again]
    for name, *cells in table:
        for cell, theirs in zip(cells, again[name], strict=True):
            ours = int(cell.replace(",", ""))
            assert abs(ours - theirs) <= 10 + 0.25 * theirs, name  # BLAS may take a step more


class Tensor:
    """An array of another library: it can say where its memory is, and no more."""

    def __init__(self, data: Any, dlpack: bool) -> None:
        self.data = data
        if dlpack:
            self.__dlpack__, self.__dlpack_device__ = data.__dlpack__, data.__dlpack_device__
        else:
            self.__cuda_array_interface__ = data.__cuda_array_interface__


@pytest.mark.parametrize(("reordered", "dlpack"), [(False, False), (True, True)])
def test_arrays_of_another_library_are_used_where_they_are(
    device: Any, backend: Any, reordered: bool, dlpack: bool
) -> None:
    g, X, y = checks.graph("fit"), checks.block(60, 20, "float32"), np.arange(60) % 3 + 5
    g = g.reordered("degree") if reordered else g
    model = HERTA(device="cuda").fit(g, X, y)
    given, labels = (Tensor(backend.xp.asarray(x), dlpack) for x in (X, y))
    device.clear()
    again = HERTA(device="cuda").fit(g, given, labels)
    assert device.ledger()["bytes_in"] < X.nbytes  # the rows and the targets only
    np.testing.assert_array_equal(again.W_, model.W_)
    for method in ("transform", "predict"):
        found = getattr(again, method)(g, given)
        assert isinstance(found, backend.xp.ndarray)
        np.testing.assert_array_equal(found.get(), getattr(model, method)(g, X))
    assert again.score(g, given, labels) == model.score(g, X, y)
    solver = SDDSolver(g, lam=3.0, device="cuda")
    np.testing.assert_array_equal(solver.solve(given).get(), solver.solve(X))
    with pytest.raises(TypeError, match=r'X is on a GPU .* use device="cuda"'):
        HERTA(device="cpu").fit(g, given, y)


def test_a_profiler_records_what_it_shall(device: Any, backend: Any) -> None:
    """Under any profiler: nsys and ncu have different environments, and neither is asked for."""
    x = backend.asarray(checks.block(33, 4, "float32"))
    with mock.patch.object(type(backend), "_l2_bytes", 1 << 10), backend.profiled() as traffic:
        assert device.ledger()["recordings"] == 1
        backend.column_dots(x, x)
    assert device.ledger()["recordings"] == 0
    backend.column_dots(x, x)  # not counted
    # A block with itself is read once, and the dots are written.
    assert (traffic.launches, traffic.moved) == ({"column_dots": 1}, {"column_dots": 33 * 16 + 32})
