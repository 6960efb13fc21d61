"""Streams: an X that does not fit passes through the device, and nothing meets in the same memory.

On the stand-in for CuPy, whose streams (tests/cupy_standin/streams.py) find races by vector clocks.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.cuda_emulator import compiler

if compiler() is None:
    pytest.skip("no g++: the kernels cannot be emulated", allow_module_level=True)

import herta_gpu.features
import herta_gpu.planning.memory
from herta_gpu import HERTA
from herta_gpu.app import device_checks as checks
from herta_gpu.backends.cuda import device
from tests.conftest import random_graph
from tests.cupy_standin.ledger import Ledger
from tests.cupy_standin.streams import RaceError


@pytest.mark.parametrize("strategy", ["direct", "herta"])
def test_X_that_does_not_fit_streams_through(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr(
        herta_gpu.planning.memory, "CHUNK_BYTES", 8 * 6 * 25
    )  # 25 rows of 6 columns
    X, y = checks.block(60, 6, "float32"), np.arange(60) % 3
    fits = []
    for held in (True, False):
        if not held:
            monkeypatch.setattr(herta_gpu.features, "fits", lambda *_: False)
        g = random_graph(60, 200)  # a new one: graphs stay on the device
        ledger.clear()
        model = HERTA(device="cuda", strategy=strategy, sketch=16).fit(g, X, y)
        assert (ledger.total("bytes_streamed") > 0) == (not held)
        fits.append((model.W_, ledger.total("bytes_up")))
    (W, once), (W_streamed, streamed) = fits
    np.testing.assert_allclose(W_streamed, W, rtol=1e-6)
    assert streamed - once == ledger.total("bytes_streamed") - X.nbytes
    assert "streamed" in ledger.table().splitlines()[0]


def test_a_budget_below_X_is_kept(ledger: Ledger) -> None:
    g, rng = random_graph(600, 1200), np.random.default_rng(0)
    X, y = rng.standard_normal((600, 64)), rng.integers(0, 2, 600)
    budget = int(1.9 * X.nbytes)
    options = {"lam": 0.5, "strategy": "herta", "sketch": 128, "ridge": 10.0, "tol": 0.1}
    before = ledger.held
    model = HERTA(device="cuda", memory_budget=budget, **options).fit(g, X, y)
    assert ledger.total("bytes_streamed") > X.nbytes
    assert ledger.peak - before <= budget
    Z = HERTA(device="cpu", **options).fit(g, X, y).transform(g, X)
    assert model.status_ == "certified"
    assert np.abs(model.transform(g, X) - Z).max() <= 1e-4 * np.abs(Z).max()


def test_a_streamed_product_waits_for_nothing(
    ledger: Ledger, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(herta_gpu.planning.memory, "CHUNK_BYTES", 8 * 6 * 25)
    X, order = checks.block(60, 6, "float32"), np.random.default_rng(0).permutation(60)
    monkeypatch.setattr(herta_gpu.features, "fits", lambda *_: False)
    features = herta_gpu.features.Features(X, backend, order, budget=1 << 20)
    W = backend.asarray(checks.block(6, 2, "float64"))
    features.times(W)  # the first product allocates the buffers
    ledger.clear()
    found = features.times(W)
    counts = ledger.stages["outside"]
    assert counts["syncs"] == counts["to_host"] == 0
    assert counts["to_device"] == 3
    assert counts["bytes_up"] == counts["bytes_streamed"] == X.nbytes
    # Two buffers of 25 rows, the pinned copy aside: X as a whole never comes to the device.
    assert features._dense._buffers[0].device.nbytes == 25 * 6 * 4
    np.testing.assert_allclose(found.get(), X[order].astype(float) @ W.get(), rtol=1e-14)
    np.testing.assert_array_equal(features.column_block(2, 5, "float32").get(), X[order][:, 2:5])
    V = backend.asarray(checks.block(60, 2, "float64"))
    expected = X[order].astype(float).T @ V.get()
    np.testing.assert_allclose(features.transpose_times(V).get(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("columns", "sent", "waits"), [(slice(2, 5), 20, False), (slice(6, 7), 1, True)]
)
def test_columns_are_cut_out_of_whole_rows_on_the_device(
    ledger: Ledger,
    backend: Any,
    monkeypatch: pytest.MonkeyPatch,
    columns: slice,
    sent: int,
    waits: bool,
) -> None:
    """The host touches nothing, and so waits for nothing, unless very few of them are wanted."""
    monkeypatch.setattr(herta_gpu.planning.memory, "CHUNK_BYTES", 8 * 20 * 25)
    monkeypatch.setattr(herta_gpu.features, "fits", lambda *_: False)
    X = checks.block(60, 20, "float32")
    features = herta_gpu.features.Features(X, backend, None, budget=1 << 20)
    for _ in range(2):  # the first pass allocates the buffers
        ledger.clear()
        found = features.column_block(columns.start, columns.stop, "float32")
    counts = ledger.stages["outside"]
    assert (counts["syncs"] > 0) == waits
    assert counts["bytes_streamed"] == 60 * 4 * sent
    assert features._dense._buffers[0].device.nbytes <= 25 * 20 * 4  # no more than was planned
    np.testing.assert_array_equal(found.get(), X[:, columns])


def test_streams_have_names(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Told to NVTX, whose library CUDA's packages bring."""
    named = []
    library = SimpleNamespace(nvtxNameCudaStreamA=lambda *told: named.append(told))
    monkeypatch.setattr(device, "_nvtx", lambda: library)
    stream = device.named_stream(backend.xp, "herta: copies")
    assert [(told[0].value, told[1]) for told in named] == [(stream.ptr, b"herta: copies")]
    monkeypatch.setattr(device, "_nvtx", lambda: None)
    assert device.named_stream(backend.xp, "no library") is not None


def test_the_library_that_names_streams() -> None:
    """The real one, without a profiler: it takes a name and does nothing."""
    library = device._nvtx()
    if library is None:
        pytest.skip("NVTX is not installed: pip install nvidia-nvtx")
    assert library.nvtxNameCudaStreamA(ctypes.c_void_p(1), b"herta") is not None


@pytest.mark.parametrize("streamed", [False, True])
def test_everything_runs_on_the_callers_stream(
    ledger: Ledger, backend: Any, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """Work on any other stream would be a race; so would a fit that left some of it unfinished."""
    monkeypatch.setattr(herta_gpu.features, "fits", lambda *_: not streamed)
    g, X, y = random_graph(60, 200), checks.block(60, 6, "float32"), np.arange(60) % 3
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
            backend.list_edges(backend.laplacian(g, dtype))
    with stream(non_blocking=True):
        for dtype in ("float64", "float32"):
            L, X = backend.laplacian(g, dtype), backend.asarray(checks.block(60, 4, dtype))
            backend.apply_H(L, 3.0, X)
            backend.edge_scores(L, X, X, 3.0)
            backend.sketch_incidence(L, 4, 1)


def test_an_upload_is_over_before_another_stream_may_use_it(backend: Any) -> None:
    """Nothing else waits in between, as the list of edges above does."""
    g, stream = random_graph(60, 200, weighted=True), backend.xp.cuda.Stream
    with stream(non_blocking=True):
        L = backend.laplacian(g, "float32")
    with stream(non_blocking=True):
        backend.apply_H(L, 3.0, backend.asarray(checks.block(60, 4, "float32")))


def test_two_streams_in_one_array_are_a_race(backend: Any) -> None:
    cuda, x = backend.xp.cuda, backend.xp.zeros(3)
    other = cuda.Stream(non_blocking=True)
    with other, pytest.raises(RaceError):
        x + 1.0
    done = cuda.Event()
    done.record(cuda.get_current_stream())
    other.wait_event(done)
    with other:
        x += 1.0
    with pytest.raises(RaceError):
        x + 1.0
    other.synchronize()
    assert x.get().tolist() == [1.0] * 3
    with pytest.raises(TypeError, match="pinned"):
        x.set(np.ones(3), stream=other)
    source = np.ndarray(3, buffer=cuda.PinnedMemoryPointer(cuda.PinnedMemory(24), 0))
    source[:] = 2.0
    x.set(source, stream=other)
    with pytest.raises(RaceError):
        x + 1.0
    other.synchronize()
    assert x.get().tolist() == [2.0] * 3
    x.set(source, stream=other)
    source[:] = 3.0  # too early: the copy may not have read it yet
    with pytest.raises(RaceError, match="the host changed"):
        other.synchronize()
