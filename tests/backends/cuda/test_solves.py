"""What a solve asks of a device: bytes, columns, streams and steps, on the stand-in for CuPy."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.conftest import dense_H, random_graph
from tests.cuda_emulator import compiler

if compiler() is None:
    pytest.skip("no g++: the kernels cannot be emulated", allow_module_level=True)

import herta_gpu.backends.cuda.device as device
from herta_gpu import HERTA, Graph, SDDSolver
from herta_gpu.app import device_checks as checks
from herta_gpu.backends import get_backend
from herta_gpu.laplacian import RegularizedLaplacian, block_cg
from herta_gpu.planning.memory import column_bytes
from tests.cuda_emulator.launches import Emulated
from tests.cupy_standin import installed
from tests.cupy_standin.ledger import Ledger

LAM = 20.0


def solved(backend: Any, g: Graph, B: Any, tol: float = 1e-5, guess: Any = None) -> Any:
    H = RegularizedLaplacian(g, LAM, backend, "float32")
    guess = None if guess is None else backend.asarray(guess)
    return block_cg(H, backend.asarray(B), tol, guess)


# ---- bytes ------------------------------------------------------------------------------------


def test_measuring_a_residual_costs_less_than_a_step() -> None:
    """It was 2.3 steps: a float64 copy of Z, a float64 product, and a pass for each dot."""
    n, k = 1000, 40
    with installed("count") as ledger:
        backend, g = get_backend("cuda"), random_graph(n, 7000)
        L = backend.laplacian(g, "float32")
        B, Z = (backend.asarray(checks.block(n, k, "float32", seed)) for seed in range(2))
        ones = backend.asarray(np.ones(k))
        state = backend.cg_start(L, LAM, B.copy(), backend.asarray(np.zeros(k)), 1e-3, 1e-7)
        for action in (
            lambda: backend.cg_step(L, LAM, state),
            lambda: backend.residual(L, LAM, Z, B, "float32", ones),
        ):
            action()  # the first one allocates
        ledger.clear()
        backend.cg_step(L, LAM, state)
        step = ledger.moved
        ledger.clear()
        backend.residual(L, LAM, Z, B, "float32", ones)
        assert ledger.total("launches") == 1
        residual = ledger.moved
        ledger.clear()
        block_cg(RegularizedLaplacian(g, LAM, backend, "float32"), B, 1e-5)
        steps, whole = ledger.kernels["cg_direction_f32_v4"], ledger.moved
    gathers = L.nnz * (4 * k + 8 + 4)
    assert residual <= 1.3 * (12 * n * k + 32 * n) + gathers
    assert residual < 0.75 * step
    # Measuring twice, starting and adding up: no more than two steps and a half beside the steps.
    assert whole <= (steps + 2.5) * step


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_solve_takes_the_memory_that_is_planned_for_it(ledger: Ledger, dtype: str) -> None:
    n, k = 3000, 32
    backend, g = get_backend("cuda"), random_graph(n, 6000)
    H = RegularizedLaplacian(g, LAM, backend, dtype)
    B = backend.asarray(checks.block(n, k, "float64"))
    block_cg(H, B, 1e-4)  # what the graph and the kernels keep
    ledger.clear()
    before = ledger.held - B.nbytes
    block_cg(H, B, 1e-4)
    assert ledger.peak - before <= n * k * column_bytes(dtype) + 20_000
    assert column_bytes(dtype) == {"float32": 32, "float64": 56}[dtype]


# ---- columns ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [3, 7, 47])
@pytest.mark.parametrize("warm", [False, True])
def test_odd_widths_are_read_by_whole_loads(
    ledger: Ledger, backend: Any, k: int, warm: bool
) -> None:
    g = random_graph(60, 200)
    B = checks.block(60, k, "float32")
    exact = np.linalg.solve(dense_H(g, LAM), B)
    guess = exact.astype("float32") + 1e-3 if warm else None
    ledger.clear()
    Z, info = solved(backend, g, B, guess=guess)
    used = {name for name in ledger.kernels if name.startswith(("apply_H", "cg_", "residual"))}
    assert used
    assert all(name.endswith("_v4") for name in used)
    assert Z.shape == B.shape
    assert Z.flags.c_contiguous
    assert len(info.iterations) == len(info.residuals) == len(info.h_norm_bound) == k
    assert info.status == "converged"
    assert info.iterations.min() > 0  # no column of zeros is among them
    assert np.abs(Z.get() - exact).max() <= 1e-4 * np.abs(exact).max()


def test_one_or_two_columns_are_not_padded(ledger: Ledger, backend: Any) -> None:
    for k, name in ((1, "cg_direction_f32_v1"), (2, "cg_direction_f32_v2")):
        ledger.clear()
        solved(backend, random_graph(60, 200), checks.block(60, k, "float32"))
        assert ledger.kernels[name] > 0
    assert [device.padded(k, 4) for k in (1, 2, 3, 4, 5, 47, 50)] == [1, 2, 4, 4, 8, 48, 52]
    assert [device.padded(k, 8) for k in (1, 2, 3, 47)] == [1, 2, 4, 48]


# ---- steps ------------------------------------------------------------------------------------


def test_steps_beyond_the_last_one_move_nothing() -> None:
    n, k = 500, 300  # two tiles of columns, of which one is done from the start
    with installed("count") as ledger:
        backend, g = get_backend("cuda"), random_graph(n, 1500)
        L, R = backend.laplacian(g, "float32"), checks.block(n, k, "float32")
        R[:, 200:] = 0
        R = backend.asarray(R)
        state = backend.cg_start(L, LAM, R, backend.asarray(np.zeros(k)), 1e-3, 1e-4)
        backend.cg_step(L, LAM, state)
        ledger.clear()
        backend.cg_step(L, LAM, state)
        step = ledger.moved
        while backend.cg_active(state):
            backend.cg_step(L, LAM, state)
        done = {name: getattr(state, name).get() for name in ("Z", "R", "rho", "iterations")}
        ledger.clear()
        for _ in range(3):
            backend.cg_step(L, LAM, state)
        assert ledger.total("launches") == 9
        assert ledger.moved < 0.02 * 3 * step
    for name, before in done.items():
        assert np.array_equal(getattr(state, name).get(), before)


def test_segments_have_a_bounded_number_of_blocks(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four segments of two hubs, two blocks: the last block adds as many rows of partials."""
    module = sys.modules[type(backend).__module__]
    monkeypatch.setattr(module, "MAX_BLOCKS", 2)
    monkeypatch.setattr(device, "MAX_BLOCKS", 2)
    grids, launch = [], module._launch

    def spied(file: str, name: str, **rest: Any) -> None:
        grids.append(rest["grid"][0])
        launch(file, name, **rest)

    monkeypatch.setattr(module, "_launch", spied)
    checks.check_products(backend, checks.graph("hub", True), 8, "float32")
    checks.check_residual(backend, checks.graph("hub", True), 8, "float32")
    checks.check_cg(backend, checks.graph("hub", True), 8, "float32")
    assert max(grids) == 4


# ---- rounding ---------------------------------------------------------------------------------


def star_sum(m: int, k: int, dtype: str, x: Any) -> Any:
    """What the kernels make of a sum over m neighbours; `x` (m,) are the terms."""
    star = Graph.from_edges(np.stack([np.zeros(m, int), np.arange(1, m + 1)]))
    L = checks.CPU.laplacian(star, dtype)
    one = np.ones(m + 1)
    L = replace(L, inv_sqrt_degree=one.astype(dtype), diagonal=0 * one.astype(dtype))
    L.unrounded = lambda: (one, 0 * one, None)
    X = np.zeros((m + 1, k), dtype)
    X[1:] = x[:, None]
    run = Emulated(max_blocks=64)
    product = -run.apply_H(L, 1.0, X)[0].astype("float64")
    residual, _ = run.residual(L, 1.0, X, np.zeros(X.shape), "float64", np.ones(k))
    return product, residual[0]


@pytest.mark.parametrize("m", [1, 64, 512, 513, 5000])
@pytest.mark.parametrize("k", [1, 3, 8, 40, 256])
def test_sums_round_as_often_as_is_said(m: int, k: int) -> None:
    """Every term behind the first of a thread is lost: half of what the bound allows."""
    for dtype in ("float32", "float64"):
        u = float(np.finfo(dtype).eps) / 2
        x = np.full(m, u / 2, dtype)
        x[0] = 1.0
        exact = math.fsum(x.tolist())
        allowed = device.roundings(m, k) * exact
        product, residual = star_sum(m, k, dtype, x)
        assert (np.abs(product - exact) <= u * allowed).all()
        assert (np.abs(residual - exact) <= 2.0**-53 * allowed).all()
        if m == 512 and k == 40:  # one thread has the whole row: the bound cannot be smaller
            assert np.abs(product - exact).min() >= 0.49 * u * allowed


def test_hubs_round_no_more_than_a_segment(backend: Any) -> None:
    for m, k in ((513, 64), (10_000, 47), (500_000, 64)):
        assert 512 / 8 <= backend.roundings(m, k) <= 520
    assert backend.roundings(100, 64) == 100
    assert backend.roundings(10**8, 64) < 10**5  # segments are added, too


# ---- streams ----------------------------------------------------------------------------------


def test_inputs_and_results_of_the_callers_stream(ledger: Ledger, backend: Any) -> None:
    """Made just before, used just after, on a stream of the caller's, and nobody waits."""
    cuda, g = backend.xp.cuda, random_graph(60, 200)
    X, y = checks.block(60, 6, "float32"), np.arange(60) % 3
    solver = SDDSolver(g, lam=3.0, device="cuda")
    model = HERTA(device="cuda", strategy="herta").fit(g, X, y)
    expected, outputs = solver.solve(2 * X), model.transform(g, 2 * X)
    with cuda.Stream(non_blocking=True):
        given = backend.xp.asarray(X)
        found = solver.solve(given + given) * 1.0
        shown = model.transform(g, given + given) * 1.0
        given += 1.0  # the solve has read it: the caller's stream comes after
        np.testing.assert_array_equal(found.get(), expected)
        np.testing.assert_array_equal(shown.get(), outputs)


def test_work_is_handed_over_between_streams(backend: Any) -> None:
    """A primitive of the backend between two operations of the caller; a race raises."""
    with backend.xp.cuda.Stream(non_blocking=True):
        x = backend.xp.asarray(checks.block(33, 4, "float32")) * 2.0
        with backend.working():
            dots = backend.column_dots(x, x)
        x += dots.astype("float32") * 0.0


def test_work_is_on_the_stream_of_the_backend(backend: Any) -> None:
    cuda = backend.xp.cuda
    caller = cuda.get_current_stream()
    with backend.working():
        own = cuda.get_current_stream()
        assert own.ptr not in (0, caller.ptr)
        with backend.working():  # a method that calls another one
            assert cuda.get_current_stream() is own
    assert cuda.get_current_stream() is caller
    with pytest.raises(ZeroDivisionError), backend.working():
        1 / 0  # noqa: B018
    assert cuda.get_current_stream() is caller


def test_short_steps_are_replayed_and_long_ones_launched(
    ledger: Ledger, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    g, B = random_graph(300, 600), checks.block(300, 8, "float32")
    found, launches = [], []
    for bytes_ in (0, 32 << 20):
        module = sys.modules[type(backend).__module__]
        monkeypatch.setattr(module, "_SHORT_STEP", bytes_)
        ledger.clear()
        with backend.profiled() as traffic:
            Z, info = solved(backend, g, B, tol=1e-6)
        assert info.iterations.max() > 2 * backend.check_every
        found.append(Z.get())
        launches.append(ledger.total("launches"))
        # A replay counts as the launches that it is.
        assert traffic.launches["cg_direction"] == ledger.kernels["cg_direction_f32_v4"]
    assert launches[1] < launches[0]
    np.testing.assert_array_equal(*found)


# ---- which device -----------------------------------------------------------------------------


def test_a_small_fit_stays_on_the_cpu_and_says_why(ledger: Ledger, backend: Any) -> None:
    g, X, y = checks.graph("fit"), checks.block(60, 6, "float32"), np.arange(60) % 3
    ledger.clear()
    model = HERTA().fit(g, X, y)
    assert model.device_.choice == "cpu"
    assert "few: the CPU is done before a GPU" in model.device_.why
    model.predict(g, X)
    assert model.score(g, X, y) > 0
    assert dict(ledger.stages) == {}
    there = HERTA().fit(g, backend.asarray(X), y)  # what is on the device stays there
    assert there.device_.choice == "cuda"
    assert HERTA(device="cuda").fit(g, X, y).device_ == ("device", "cuda", "as asked")
    assert HERTA(device="cpu").fit(g, X, y).device_ == ("device", "cpu", "as asked")
