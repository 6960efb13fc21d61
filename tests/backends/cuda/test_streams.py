"""Streams: an X that does not fit passes through the device, and nothing meets in the same memory.

On the device of tests/cuda_device, whose clocks find what nothing orders.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import herta_gpu.features
from herta_gpu import HERTA, SDDSolver
from herta_gpu.backends.cuda import device as cuda_device
from herta_gpu.planning.plan import Recipe
from tests.backends.cuda import primitive_checks as checks
from tests.conftest import dense_H, least_squares, random_graph

pytestmark = [pytest.mark.gpu, pytest.mark.once]


@contextmanager
def too_large(columns: int) -> Iterator[None]:
    """X counts as too large for the device, and comes in parts of 25 rows."""
    with (
        mock.patch.object(herta_gpu.features, "fits", return_value=False),
        mock.patch.object(herta_gpu.features, "chunk_bytes", return_value=8 * columns * 25),
    ):
        yield


@pytest.mark.parametrize("strategy", ["direct", "herta"])
def test_X_that_does_not_fit_streams_through(device: Any, backend: Any, strategy: str) -> None:
    X, y = checks.block(60, 6, "float32"), np.arange(60) % 3

    def fit() -> tuple[Any, int]:
        g = random_graph(60, 200)  # a new one: graphs stay on the device
        device.clear()
        model = HERTA(device="cuda", strategy=strategy, sketch=16).fit(g, X, y)
        return model.W_, device.ledger()["bytes_in"]

    W, once = fit()
    with too_large(6):
        W_streamed, streamed = fit()
    np.testing.assert_allclose(W_streamed, W, rtol=1e-6)
    assert streamed >= once + X.nbytes


@pytest.mark.long
def test_a_budget_below_X_is_kept(device: Any, backend: Any) -> None:
    g, rng = random_graph(600, 1200), np.random.default_rng(0)
    X, y = rng.standard_normal((600, 64)), rng.integers(0, 2, 600)
    budget = int(1.9 * X.nbytes)
    options = {"lam": 0.5, "strategy": "herta", "sketch": 128, "ridge": 10.0, "tol": 0.1}
    device.clear()
    before = device.ledger()["held"]
    model = HERTA(device="cuda", memory_budget=budget, **options).fit(g, X, y)
    found = device.ledger()
    assert found["bytes_in"] > 2 * X.nbytes
    assert found["peak"] - before <= budget
    assert model.status_ == "certified"
    A, Y = np.linalg.solve(dense_H(g, 0.5), X), np.eye(2)[y]
    optimum = least_squares(A, Y, ridge=10.0)[1]
    Z = A @ model.W_
    assert 0.5 * ((Z - Y) ** 2).sum() + 5.0 * (model.W_**2).sum() <= 1.1 * optimum
    assert np.abs(model.transform(g, X) - Z).max() <= 1e-4 * np.abs(Z).max()


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("strategy", ["direct", "herta"])
def test_X_comes_once_for_all_blocks_of_Q(
    device: Any, backend: Any, monkeypatch: pytest.MonkeyPatch, room: bool, strategy: str
) -> None:
    """Of 40 columns in blocks of 12: for X^T X, with norms, and for X C0, which the host keeps."""
    module = sys.modules["herta_gpu.backends.cuda.backend"]
    monkeypatch.setattr(module, "host_memory", lambda: 10**12 if room else 0)
    g, X, y = random_graph(600, 1200), checks.block(600, 40, "float32"), np.arange(600) % 3
    passes = []
    real = herta_gpu.features.Features.row_chunks

    def counted(features: Any, columns: Any = None) -> Any:
        passes.append(columns)
        return real(features, columns)

    monkeypatch.setattr(herta_gpu.features.Features, "row_chunks", counted)
    monkeypatch.setattr(
        Recipe, "blocks", lambda recipe, d: [slice(a, min(a + 12, d)) for a in range(0, d, 12)]
    )
    with too_large(40):
        model = HERTA(device="cuda", strategy=strategy, ridge=0.1, lam=2.0).fit(g, X, y)
    assert model.status_ == "certified"
    if strategy == "direct":
        assert len(passes) == (2 if room else 1 + 4)
    A, Y = np.linalg.solve(dense_H(g, 2.0), X.astype(float)), np.eye(3)[y]
    optimum = least_squares(A, Y, ridge=0.1)[1]
    objective = 0.5 * ((A @ model.W_ - Y) ** 2).sum() + 0.05 * (model.W_**2).sum()
    assert objective <= optimum * (1 + model.certificate_.value) + 1e-9


def columns_of(features: Any, J: slice) -> Any:
    found = features.backend.xp.empty((features.shape[0], J.stop - J.start), dtype="float32")
    for rows, part in features.row_chunks(J):
        found[rows] = part
    return found


def test_a_streamed_product_waits_for_nothing(device: Any, backend: Any) -> None:
    X, order = checks.block(60, 6, "float32"), np.random.default_rng(0).permutation(60)
    with too_large(6):
        features = herta_gpu.features.Features(X, backend, order, budget=1 << 20)
    W = backend.asarray(checks.block(6, 2, "float64"))
    features.times(W)  # the first product allocates the buffers
    device.clear()
    found = features.times(W)
    counts = device.ledger()
    assert counts["waits"] == counts["copies_out"] == 0
    assert (counts["copies_in"], counts["bytes_in"]) == (3, X.nbytes)
    np.testing.assert_allclose(found.get(), X[order].astype(float) @ W.get(), rtol=1e-14)
    np.testing.assert_array_equal(columns_of(features, slice(2, 5)).get(), X[order][:, 2:5])
    V = backend.asarray(checks.block(60, 2, "float64"))
    expected = X[order].astype(float).T @ V.get()
    np.testing.assert_allclose(features.transpose_times(V).get(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("columns", "sent", "waits"), [(slice(2, 5), 20, False), (slice(6, 7), 1, True)]
)
def test_columns_are_cut_out_of_whole_rows_on_the_device(
    device: Any, backend: Any, columns: slice, sent: int, waits: bool
) -> None:
    """The host touches nothing, and so waits for nothing, unless very few of them are wanted."""
    X = checks.block(60, 20, "float32")
    with too_large(20):
        features = herta_gpu.features.Features(X, backend, None, budget=1 << 20)
    for _ in range(2):  # the first pass allocates the buffers
        device.clear()
        found = columns_of(features, columns)
    counts = device.ledger()
    assert (counts["waits"] > 0) == waits
    assert counts["bytes_in"] == 60 * 4 * sent
    np.testing.assert_array_equal(found.get(), X[:, columns])


def test_an_array_in_order_is_pinned_where_it_is(device: Any, backend: Any) -> None:
    """No second copy of it on the host; what cannot be pinned there is copied as before."""
    X = checks.block(600, 20, "float32")
    device.clear()
    before = device.ledger()["pinned"]
    blocks = backend.host_blocks(X)
    assert blocks.X is X
    assert device.ledger()["pinned"] - before == X.nbytes
    again = backend.host_blocks(X)  # pinned already: a copy
    assert not np.shares_memory(again.X, X)
    reordered = backend.host_blocks(X, np.arange(600)[::-1])
    for held, expected in ((blocks, X), (again, X), (reordered, X[::-1])):
        wanted = [(slice(a, a + 200), slice(None)) for a in (0, 200, 400)]
        found = [part.get() for _, part in held.parts(wanted)]
        np.testing.assert_array_equal(np.concatenate(found), expected)
    del blocks, again, reordered, held
    gc.collect()
    assert device.ledger()["pinned"] <= before
    backend.host_blocks(X)  # it can be pinned once more


def test_streams_have_names(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Told to NVTX, whose library CUDA's packages bring."""
    named = []
    library = SimpleNamespace(nvtxNameCudaStreamA=lambda *told: named.append(told))
    monkeypatch.setattr(cuda_device, "_nvtx", lambda: library)
    stream = cuda_device.named_stream(backend.xp, "herta: copies")
    assert [(told[0].value, told[1]) for told in named] == [(stream.ptr, b"herta: copies")]
    monkeypatch.setattr(cuda_device, "_nvtx", lambda: None)
    assert cuda_device.named_stream(backend.xp, "no library") is not None


def test_the_library_that_names_streams() -> None:
    """The real one, without a profiler: it takes a name and does nothing."""
    library = cuda_device._nvtx()
    if library is None:
        pytest.skip("NVTX is not installed: pip install nvidia-nvtx")
    assert library.nvtxNameCudaStreamA(ctypes.c_void_p(1), b"herta") is not None


@pytest.mark.parametrize("streamed", [False, True])
def test_everything_runs_on_the_callers_stream(backend: Any, streamed: bool) -> None:
    """Work on any other stream would be a race; so would a fit that left some of it unfinished."""
    g, X, y = random_graph(60, 200), checks.block(60, 6, "float32"), np.arange(60) % 3
    with mock.patch.object(herta_gpu.features, "fits", return_value=not streamed):
        with backend.xp.cuda.Stream(non_blocking=True):
            model = HERTA(device="cuda", sparsify=True, sketch=True).fit(g, X, y)
        with backend.xp.cuda.Stream(non_blocking=True):
            Z = model.transform(g, X)
    np.testing.assert_array_equal(model.transform(g, X), Z)


@pytest.mark.parametrize("made_there", [False, True])
def test_a_graph_that_is_kept_may_be_used_on_another_stream(backend: Any, made_there: bool) -> None:
    """Uploaded, or made on the device; its list of edges is kept, too."""
    g, stream = random_graph(60, 200, weighted=True), backend.xp.cuda.Stream
    with stream(non_blocking=True):
        if made_there:
            g = backend.sampled_graph(g, backend.xp.ones(g.num_edges))
        for dtype in ("float64", "float32"):
            X = backend.asarray(checks.block(60, 4, dtype))
            backend.edge_scores(backend.laplacian(g, dtype), X, X, 3.0)
        backend.synchronize()
    with stream(non_blocking=True):
        for dtype in ("float64", "float32"):
            L, X = backend.laplacian(g, dtype), backend.asarray(checks.block(60, 4, dtype))
            backend.apply_H(L, 3.0, X)
            backend.edge_scores(L, X, X, 3.0)
            backend.sketch_incidence(L, 4, 1)


def test_inputs_and_results_of_the_callers_stream(backend: Any) -> None:
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


class SideTensor:
    """A tensor of PyTorch's that a side stream makes; what CuPy reads of it tells no stream."""

    def __init__(self, memory: Any, stream: Any) -> None:
        self.memory, self.stream = memory, stream
        self.__dlpack_device__ = memory.__dlpack_device__
        told = {**memory.__cuda_array_interface__, "version": 2}
        self.__cuda_array_interface__ = {k: x for k, x in told.items() if k != "stream"}

    def __dlpack__(self, stream: int, **more: Any) -> Any:
        with self.stream:  # the consumer's stream comes after it
            return self.memory.__dlpack__(stream=stream, **more)


def test_what_a_side_stream_makes_is_waited_for(backend: Any) -> None:
    side, g, X = (
        backend.xp.cuda.Stream(non_blocking=True),
        random_graph(60, 200),
        checks.block(60, 6, "float32"),
    )
    y = np.arange(60) % 3
    solver = SDDSolver(g, lam=3.0, device="cuda")
    with side:
        given = SideTensor(backend.xp.asarray(X) * 2.0, side)
    found = solver.solve(given)
    np.testing.assert_array_equal(found.get(), solver.solve(2 * X))
    with side:
        given = SideTensor(backend.xp.asarray(X) * 2.0, side)
    found = HERTA(device="cuda", strategy="herta").fit(g, given, y).W_
    np.testing.assert_array_equal(found, HERTA(device="cuda", strategy="herta").fit(g, 2 * X, y).W_)


@pytest.mark.parametrize("torch", [False, True])
def test_a_result_that_dies_on_a_side_stream_may_still_be_read_there(
    backend: Any, monkeypatch: pytest.MonkeyPatch, torch: bool
) -> None:
    """Its memory is the next call's, which comes after all streams that results were given to."""
    xp, g = backend.xp, random_graph(60, 200)
    sides = [xp.cuda.Stream(non_blocking=True) for _ in range(2)]
    here = SimpleNamespace(cuda_stream=sides[0].ptr)
    cuda = SimpleNamespace(is_initialized=lambda: torch, current_stream=lambda device: here)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    solver, X = SDDSolver(g, lam=3.0, device="cuda"), xp.asarray(checks.block(60, 6, "float32"))
    expected = solver.solve(X).get()
    for side in sides:
        here.cuda_stream = side.ptr
        if torch:
            Z = solver.solve(X)
            with side:
                Y = Z * 1.0
        else:
            with side:
                Z = solver.solve(X)
                Y = Z * 1.0
        del Z
        again = solver.solve(X)  # on another stream, in the memory that is free now
        np.testing.assert_array_equal(again.get(), expected)
        with side:
            np.testing.assert_array_equal(Y.get(), expected)


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
