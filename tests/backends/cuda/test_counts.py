"""What the CUDA backend asks of a device, counted where the driver would be: on the real CuPy.

The ledger of tests/cuda_device counts launches, copies, waits and memory, those of CuPy's own
kernels included.  Every array has memory of its own here, so that peaks are those of the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

import herta_gpu.features
from herta_gpu import HERTA, SDDSolver
from herta_gpu.app import device_checks as checks
from herta_gpu.backends import get_backend
from herta_gpu.laplacian import RegularizedLaplacian, block_cg
from herta_gpu.planning.memory import column_bytes
from tests.backends.cuda import ledger_table
from tests.backends.cuda.test_cuda_device import device as device
from tests.conftest import random_graph

pytestmark = [pytest.mark.gpu, pytest.mark.once]

LAM = 20.0
MOVES = ("copies_in", "copies_out", "copies_on", "sets", "library_calls", "graph_launches")


@pytest.fixture
def backend(device: Any) -> Any:
    found = get_backend("cuda")
    found.synchronize()
    yield found
    found.capture = None
    found.synchronize()


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
        device.set_memory(total - free + 150_000)
        try:
            sentence = r"Out of memory.*Blocks of \d+ columns .* memory_budget=\d+"
            with pytest.raises(MemoryError, match=sentence):
                HERTA(device="cuda", memory_budget="1GB").fit(g, X, np.arange(600) % 3)
        finally:
            device.set_memory(total)


# ---- copies --------------------------------------------------------------------------------------


def test_a_streamed_product_waits_for_nothing(
    device: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(herta_gpu.features, "chunk_bytes", lambda *_: 8 * 6 * 25)
    monkeypatch.setattr(herta_gpu.features, "fits", lambda *_: False)
    X, order = checks.block(60, 6, "float32"), np.random.default_rng(0).permutation(60)
    features = herta_gpu.features.Features(X, backend, order, budget=1 << 20)
    W = backend.asarray(checks.block(6, 2, "float64"))
    features.times(W)  # the first product allocates the buffers
    device.clear()
    found = features.times(W)
    counts = device.ledger()
    assert counts["waits"] == counts["copies_out"] == 0
    assert (counts["copies_in"], counts["bytes_in"]) == (3, X.nbytes)
    np.testing.assert_allclose(found.get(), X[order].astype(float) @ W.get(), rtol=1e-14)


def test_nothing_large_leaves_the_device_while_training(device: Any, backend: Any) -> None:
    stages: dict[str, dict[str, Any]] = {}

    class Split:
        """What `ledger_table.fit` wants: counts by stage."""

        def clear(self) -> None:
            device.clear()

        @contextmanager
        def stage(self, name: str) -> Iterator[None]:
            before = device.ledger()
            yield
            after, sums = device.ledger(), stages.setdefault(name, {})
            for key in ("copies_in", "copies_out", "bytes_out"):
                sums[key] = sums.get(key, 0) + after[key] - before[key]
            sums["largest_out"] = after["largest_out"]

    ledger_table.fit(Split(), "mse")  # type: ignore[arg-type]
    assert stages["train"]["copies_out"] > 0
    for name in ("sparsify", "preconditioner", "spectrum", "train"):
        # Mostly 8 bytes; per-column reports of a solve are the longest, 8 bytes a column.
        assert stages[name]["bytes_out"] <= 8 * 64 * stages[name]["copies_out"]
    assert stages["train"]["largest_out"] <= 8 * 20 * 20  # the Lanczos matrix


class Tensor:
    """An array of another library: it can say where its memory is, and no more."""

    def __init__(self, data: Any) -> None:
        self.__cuda_array_interface__ = dict(data.__array_interface__) | {"version": 3}


def test_arrays_of_another_library_are_used_where_they_are(device: Any, backend: Any) -> None:
    g, X, y = checks.graph("fit"), checks.block(60, 20, "float32"), np.arange(60) % 3 + 5
    model = HERTA(device="cuda").fit(g, X, y)
    theirs, labels = X.copy(), y.copy()
    with device.foreign(theirs), device.foreign(labels):
        given = Tensor(theirs)
        device.clear()
        again = HERTA(device="cuda").fit(g, given, Tensor(labels))
        assert device.ledger()["bytes_in"] < X.nbytes  # the rows and the targets only
        np.testing.assert_array_equal(again.W_, model.W_)
        found = again.transform(g, given)
        assert isinstance(found, backend.xp.ndarray)
        np.testing.assert_array_equal(found.get(), model.transform(g, X))
        solver = SDDSolver(g, lam=3.0, device="cuda")
        np.testing.assert_array_equal(solver.solve(given).get(), solver.solve(X))
        with pytest.raises(TypeError, match=r'X is on a GPU .* use device="cuda"'):
            HERTA(device="cpu").fit(g, given, y)
        del given, again, found


def test_a_profiler_records_what_it_shall(device: Any, backend: Any) -> None:
    """Under any profiler: nsys and ncu have different environments, and neither is asked for."""
    x = backend.asarray(checks.block(33, 4, "float32"))
    with mock.patch.object(type(backend), "_l2_bytes", 1 << 10), backend.profiled() as traffic:
        assert device.ledger()["recordings"] == 1
        backend.column_dots(x, x)
    assert device.ledger()["recordings"] == 0
    backend.column_dots(x, x)  # not counted
    # A block with itself is read once, and the dots are written.
    assert (traffic.launches, traffic.moved) == ({"column_dots": 1}, {"column_dots": 33 * 16 + 36})
