"""What a machine with a GPU meets first: a half-installed toolkit, and which device is taken."""

from __future__ import annotations

import io
import sys
import threading
import tomllib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA
from herta_gpu.backends import get_backend
from herta_gpu.backends.cuda.device import tell_if_long
from tests.backends.cuda import primitive_checks as checks
from tests.conftest import ROOT, on_device

G, ONES, Y = checks.graph("fit"), np.ones((60, 4)), np.arange(60) % 2


def forget() -> None:
    """No backend has been made, no kernel compiled, nothing been said, as in a new process."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("herta_gpu.backends"):
            for function in [*vars(module).values()]:
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


@pytest.fixture
def fresh(device: Any) -> Iterator[Any]:
    """The device, in a process that has not used it yet."""
    forget()
    yield device
    forget()


class CompileException(Exception):  # noqa: N818 - CuPy's name; it is no RuntimeError there either
    """As CuPy's."""


def fail(error: BaseException) -> Any:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    return failing


@on_device
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
    fresh: Any, monkeypatch: pytest.MonkeyPatch, module: str, name: str, error: Exception
) -> None:
    """`import cupy` works there, the first kernel or the first solve does not."""
    monkeypatch.setattr(f"{module}.{name}", fail(error))
    said = str(error).partition("\n")[0] or "OSError"
    with pytest.raises(RuntimeError, match=rf"cannot compute \({said}\).*herta_gpu\[cu13\]"):
        HERTA(device="cuda").fit(G, ONES, Y)
    with pytest.warns(RuntimeWarning, match=rf'"auto" goes on with the CPU: .*{said}'):
        assert get_backend("auto").name == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert get_backend("auto").name == "cpu"


@on_device
def test_a_device_that_gives_wrong_numbers_is_not_used(
    fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupyx.scipy.linalg as linalg

    solve = linalg.solve_triangular
    monkeypatch.setattr(linalg, "solve_triangular", lambda *a, **k: solve(*a, **k) * 2.0)
    with pytest.raises(RuntimeError, match=r"\[5.0, 2.0, 4.0\], not \[5, 1, 2\]"):
        get_backend("cuda")


@on_device
def test_without_a_driver_the_error_says_so(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("cudaErrorInsufficientDriver: too old\nmore")
    monkeypatch.setattr("cupy.cuda.runtime.getDeviceCount", fail(error))
    with pytest.raises(RuntimeError, match=r"driver \(cudaErrorInsufficientDriver: too old\)"):
        HERTA(device="cuda").fit(G, ONES, Y)
    assert get_backend("auto").name == "cpu"


def test_without_cupy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "herta_gpu.backends.cuda.backend", raising=False)
    with pytest.raises(RuntimeError, match=r"herta_gpu\[cu13\].*herta_gpu\[cu12\]"):
        get_backend("cuda")
    assert get_backend("auto").name == "cpu"
    forget()


@on_device
def test_a_device_is_tried_once_and_not_for_small_data(fresh: Any) -> None:
    fresh.clear()
    assert get_backend("auto", G, ONES).name == "cpu"
    assert fresh.ledger()["launches"] == 0
    get_backend("cuda")
    fresh.clear()
    assert get_backend("auto") is get_backend("cuda")
    assert fresh.ledger()["launches"] == 0


@on_device
def test_a_gpu_may_be_named_by_its_number(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there = get_backend("cuda:0")
    assert there is get_backend("cuda")
    assert HERTA(device="cuda:0", ridge=0.1).fit(G, ONES, Y).device_.choice == "cuda"
    with pytest.raises(ValueError, match='device="cuda:7": there are 1 GPUs'):
        get_backend("cuda:7")
    monkeypatch.setattr("cupy.cuda.runtime.getDeviceCount", lambda: 2)
    with pytest.raises(ValueError, match="this process works on cuda:0 already"):
        HERTA(device="cuda:1").fit(G, ONES, Y)


@on_device
def test_auto_leaves_small_data_of_the_host_to_the_cpu(backend: Any) -> None:
    large = np.broadcast_to(0.0, (10**6, 11))  # takes no memory
    there = backend.sampled_graph(G, backend.xp.ones(G.num_edges))
    assert get_backend("auto", G, ONES).name == "cpu"
    assert get_backend("auto", G, sp.csr_array((10**6, 10**6))).name == "cpu"  # nothing is stored
    assert get_backend("auto", G, large).name == "cuda"
    assert get_backend("auto", there, ONES).name == "cuda"  # a graph on the device
    assert get_backend("auto", G, ONES, backend.asarray(ONES)).name == "cuda"
    assert get_backend("cuda", G, ONES).name == "cuda"
    assert get_backend("auto").name == "cuda"  # nothing is known of the data


@on_device
def test_a_small_fit_stays_on_the_cpu_and_says_why(device: Any, backend: Any) -> None:
    X, y = checks.block(60, 6, "float32"), np.arange(60) % 3
    device.clear()
    model = HERTA().fit(G, X, y)
    assert model.device_.choice == "cpu"
    assert "few: the CPU is done before a GPU" in model.device_.why
    model.predict(G, X)
    assert model.score(G, X, y) > 0
    assert device.ledger()["allocations"] == 0
    there = HERTA().fit(G, backend.asarray(X), y)  # what is on the device stays there
    assert there.device_.choice == "cuda"
    for name in ("cuda", "cpu"):
        assert HERTA(device=name).fit(G, X, y).device_ == ("device", name, "as asked")


@pytest.mark.parametrize("watched", [False, True])
def test_a_long_compilation_is_told_to_those_who_watch(
    monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    told, terminal = threading.Event(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: told.set() or watched)
    monkeypatch.setattr(sys, "stderr", terminal)
    with tell_if_long("compiling cg.cu", seconds=0.0):
        assert told.wait(30)
        while watched and "\n" not in terminal.getvalue():
            told.wait(0.001)
    assert terminal.getvalue() == ("herta_gpu: compiling cg.cu\n" if watched else "")
    with tell_if_long("nothing", seconds=1000.0):
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
