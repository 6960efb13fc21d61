"""What a machine with a GPU meets first: a half-installed toolkit, and what only devices refuse.

On the stand-in for CuPy, like test_cuda.py.
"""

from __future__ import annotations

import io
import sys
import threading
import tomllib
import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scipy.sparse as sp

from tests.conftest import ROOT, random_graph
from tests.cuda_emulator import compiler

if compiler() is None:
    pytest.skip("no g++: the kernels cannot be emulated", allow_module_level=True)

from herta_gpu import HERTA
from herta_gpu.app import device_checks as checks
from herta_gpu.backends import get_backend
from herta_gpu.backends.cuda import device, transfer
from herta_gpu.backends.cuda.graphs import DeviceGraph, derived
from tests import cupy_standin
from tests.backends.cuda import more_checks
from tests.cupy_standin import installed, pool
from tests.cupy_standin.device_array import ndarray
from tests.cupy_standin.ledger import Ledger

# ---- which device -----------------------------------------------------------------------------


class CompileException(Exception):  # noqa: N818 - CuPy's name; it is no RuntimeError there either
    """As CuPy's."""


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        ("cupy", "RawModule", RuntimeError("libnvrtc.so.13: no such file\nmore")),
        ("cupy", "RawModule", CompileException("libnvrtc.so.13: no such file")),
        ("cupyx.scipy.linalg", "solve_triangular", ImportError("libcublas: no such file")),
        ("cupy", "RawModule", OSError()),
    ],
)
def test_a_driver_without_the_toolkit(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, error: Exception
) -> None:
    """`import cupy` works there, the first kernel or the first solve does not."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with installed(), monkeypatch.context() as patch:
        patch.setattr(sys.modules[module], name, fail)
        said = str(error).partition("\n")[0] or "OSError"
        with pytest.raises(RuntimeError, match=rf"cannot compute \({said}\).*herta_gpu\[cu13\]"):
            HERTA(device="cuda").fit(checks.graph("fit"), np.ones((60, 1)), np.arange(60) % 2)
        with pytest.warns(RuntimeWarning, match=rf'"auto" goes on with the CPU: .*{said}'):
            assert get_backend("auto").name == "cpu"
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is said once
            assert get_backend("auto").name == "cpu"


def test_a_device_that_gives_wrong_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(), monkeypatch.context() as patch:
        linalg = sys.modules["cupyx.scipy.linalg"]
        solve = linalg.solve_triangular
        patch.setattr(linalg, "solve_triangular", lambda *a, **k: solve(*a, **k) * 2.0)
        with pytest.raises(RuntimeError, match=r"\[5.0, 2.0, 4.0\], not \[5, 1, 2\]"):
            get_backend("cuda")


def test_a_device_is_tried_once(ledger: Ledger) -> None:
    get_backend("cuda")
    ledger.clear()
    assert get_backend("auto") is get_backend("cuda")
    assert dict(ledger.stages) == {}


def test_auto_leaves_small_data_of_the_host_to_the_cpu(ledger: Ledger, backend: Any) -> None:
    g, X = checks.graph("fit"), np.ones((60, 4))
    large = np.broadcast_to(0.0, (10**6, 11))  # takes no memory
    there = backend.sampled_graph(g, backend.xp.ones(g.num_edges))
    assert get_backend("auto", g, X).name == "cpu"
    assert get_backend("auto", g, sp.csr_array((10**6, 10**6))).name == "cpu"  # no entry is stored
    assert get_backend("auto", g, large).name == "cuda"
    assert get_backend("auto", there, X).name == "cuda"  # a graph on the device
    assert get_backend("auto", g, X, backend.asarray(X)).name == "cuda"
    assert get_backend("cuda", g, X).name == "cuda"
    assert get_backend("auto").name == "cuda"  # nothing is known of the data


def test_small_data_do_not_try_the_device_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed() as ledger:
        get_backend("auto", checks.graph("fit"), np.ones((60, 4)))
        assert dict(ledger.stages) == {}


@pytest.mark.parametrize("watched", [False, True])
def test_a_long_compilation_is_told_to_those_who_watch(
    monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    told, terminal = threading.Event(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: told.set() or watched)
    monkeypatch.setattr(sys, "stderr", terminal)
    with device.tell_if_long("compiling cg.cu", seconds=0.0):
        assert told.wait(30)
        while watched and "\n" not in terminal.getvalue():
            told.wait(0.001)
    assert terminal.getvalue() == ("herta_gpu: compiling cg.cu\n" if watched else "")
    with device.tell_if_long("nothing", seconds=1000.0):
        pass  # the timer ends with the block


def test_extras_bring_the_toolkit_and_no_two_cupys() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    kinds = {}
    for name, packages in project["optional-dependencies"].items():
        if name != "test":  # it only compiles and reads signatures
            assert not [p for p in packages if p.startswith("cupy") and "[ctk]" not in p]
        text = " ".join(packages)
        kinds[name] = {c for c in ("12", "13") if f"cuda{c}x" in text or f"-cu{c}" in text}
        assert len(kinds[name]) <= 1
        assert not kinds[name] or name == "test" or name.endswith(f"cu{min(kinds[name])}")
    assert {name for name, kind in kinds.items() if kind} >= {"cu12", "cu13", "cugraph-cu13"}


# ---- what the host accepts and a device does not ------------------------------------------------


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize("strategy", ["herta", "direct"])
def test_a_preconditioner_of_rank_0(ledger: Ledger, loss: str, strategy: str) -> None:
    """Its triangular factor is empty."""
    model = HERTA(device="cuda", loss=loss, ridge=0.1, strategy=strategy)
    model.fit(checks.graph("fit"), np.zeros((60, 4)), np.arange(60) % 3)
    assert not model.W_.any()


def test_X_that_begins_anywhere(ledger: Ledger, backend: Any) -> None:
    g, X, y = checks.graph("fit"), checks.block(60, 8, "float32"), np.arange(60) % 3
    flat = backend.asarray(np.concatenate([np.zeros(1, "float32"), X.ravel()]))
    unaligned = flat[1:].reshape(60, 8)
    assert unaligned.data.ptr % 16
    found = HERTA(device="cuda", strategy="herta").fit(g, unaligned, y).W_
    np.testing.assert_array_equal(found, HERTA(device="cuda", strategy="herta").fit(g, X, y).W_)


def test_a_csr_matrix_beyond_32_bits_is_refused(backend: Any) -> None:
    """Of 2^31 entries; the arrays take no memory."""

    def entries(value: Any) -> ndarray:
        return ndarray(np.broadcast_to(value, (2**31 - 3,)))

    g = checks.graph("tail")
    L = backend.laplacian(g, "float64")
    held = {"indices": entries(np.int32(0)), "weights": None, "indptr": L.indptr}
    held |= {"inv_sqrt_degree": L.inv_sqrt_degree, "diagonal": L.diagonal, "lambda_max": 2.0}
    held |= {"segments": backend.segments(np.zeros(0, int), np.zeros(0, int), 64)}
    large = backend.adopt(held, g.num_nodes)
    assert isinstance(large, DeviceGraph)
    with pytest.raises(ValueError, match=r"2,147,483,678 entries.*at most 2,147,483,647"):
        large.to_csr()


# ---- memory -----------------------------------------------------------------------------------


def test_what_a_graph_needs_beside_its_arrays_is_small(ledger: Ledger, backend: Any) -> None:
    """Not even one number of 8 bytes for every entry."""
    g = random_graph(300, 20_000)
    L = backend.laplacian(g, "float64")
    sums = backend.asarray(g.loopless_degree)
    ledger.clear()
    before = ledger.held
    found = derived(backend, {"indptr": L.indptr, "indices": L.indices}, sums, L.inv_sqrt_degree)
    assert ledger.peak - before < 8 * L.nnz // 4
    assert abs(found["lambda_max"] - g.lambda_max_bound) <= 1e-12


def test_a_large_array_is_uploaded_through_small_buffers(ledger: Ledger, backend: Any) -> None:
    more_checks.check_upload(backend)
    assert max(ledger.pinned) <= 8 * 31  # a row that is longer than a chunk
    X = np.ones((200, 50))
    ledger.clear()
    with mock.patch.object(transfer, "CHUNK_BYTES", 1000):
        backend.asarray(X)
    assert ledger.staged == 0
    assert ledger.pinned == [1000, 1000]
    assert ledger.total("bytes_up") == X.nbytes


def test_pinned_memory_is_given_back_after_a_graph(ledger: Ledger, backend: Any) -> None:
    backend.asarray(np.ones(9))
    assert ledger.staged == 128  # rounded up to a power of two
    backend.laplacian(random_graph(60, 200), "float32")
    assert ledger.staged == 0


def test_a_system_that_pins_no_more(ledger: Ledger, backend: Any) -> None:
    """Copies then make the host wait, and are the same copies."""
    ledger.most_pinned = 2000  # some of the buffers
    more_checks.check_upload(backend)
    more_checks.check_streaming(backend)
    assert sum(ledger.pinned) > 2000


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "herta"},
        {"strategy": "direct"},
        {"strategy": "herta", "sketch": True},
        {"strategy": "herta", "loss": "ce", "ridge": 0.1},
        {"strategy": "direct", "loss": "ce", "ridge": 0.1},
    ],
)
def test_a_fit_fits_into_the_pool(ledger: Ledger, options: dict[str, Any], dtype: str) -> None:
    """Pieces of memory that no longer fit together cost a quarter at most."""
    g, X, y = random_graph(200, 1200), checks.block(200, 24, "float64"), np.arange(200) % 5
    with pool.recorded() as trace:
        HERTA(device="cuda", dtype=dtype, **options).fit(g, X, y)
    large = 64  # times: the pool's unit of 512 bytes is nothing then
    needed = large * pool.peak(trace)
    assert needed <= pool.replay(trace, scale=large).most <= 1.25 * needed
    pool.replay(trace, 1.2 * needed, large)  # what a budget leaves of the device is enough


def test_the_model_of_the_pool() -> None:
    """Best fit, with splits, with joins, and blocks that go back where the device has no more."""
    a, b, c, d = range(4)
    holes = [(a, 1000), (b, 1), (c, 1000), (a, -1), (c, -1)]  # of 1024, 512 and 1024 bytes
    assert pool.peak(holes) == 2001
    assert pool.replay(holes).most == 2560
    assert pool.replay([*holes, (d, 500), (a, 500), (c, 1024)]).most == 2560
    assert pool.replay([*holes, (d, 1025)]).most == 2560 + 1536
    assert pool.replay([*holes, (d, 1025)], limit=2560).total == 512 + 1536
    with pytest.raises(MemoryError, match="2,560 bytes"):
        pool.replay([*holes, (d, 2049)], limit=2560)
    halves = [(a, 2048), (a, -1), (b, 1024), (c, 1024), (b, -1), (c, -1), (d, 2048)]
    assert pool.replay(halves).most == 2048  # b and c were parts of one block, and are again


def test_a_budget_leaves_room_for_pieces(ledger: Ledger, backend: Any) -> None:
    free = cupy_standin.FREE_BYTES - ledger.held
    assert backend.memory_available() == int(free / 1.2)
    pool_ = backend.xp.get_default_memory_pool()
    pool_.limit = ledger.held + 1200
    assert backend.memory_available() == 1000
    pool_.limit = 1  # less than is in use already
    assert backend.memory_available() == 0


def test_a_fit_from_captured_steps_is_the_same_fit(ledger: Ledger, backend: Any) -> None:
    """On the default stream, where most people are."""
    found, launches = [], []
    for backend.capture in (False, True):
        g, X = random_graph(60, 200), checks.block(60, 8, "float32")
        ledger.clear()
        model = HERTA(device="cuda", strategy="herta", lam=50.0).fit(g, X, np.arange(60) % 3)
        found.append(model.W_)
        launches.append(ledger.total("launches"))
    np.testing.assert_array_equal(*found)
    assert launches[1] < launches[0]
