"""The whole pipeline through `herta_gpu.backends.cuda.backend`, on a stand-in for CuPy.

The stand-in (tests/cupy_standin) runs the unmodified kernels in the emulator, refuses what CuPy
refuses and counts what a device would have to do.  Nothing here needs, or shows anything about, the
speed of a GPU.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT, random_graph
from tests.cuda_emulator import compiler

if compiler() is None:
    pytest.skip("no g++: the kernels cannot be emulated", allow_module_level=True)

import herta_gpu
from herta_gpu import HERTA, SDDSolver
from herta_gpu.app import device_checks as checks
from herta_gpu.backends import get_backend
from tests import cupy_standin
from tests.backends.cuda import ledger_table, more_checks
from tests.cupy_standin import build, installed
from tests.cupy_standin.device_array import ndarray
from tests.cupy_standin.ledger import Ledger

DTYPES = ("float32", "float64")


# ---- the pipeline -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "weighted", "k"),
    # A wide block of the hubs would only be slow: its columns are tested on few rows.
    [(name, name == "tail", k) for name in ("one", "tail") for k in (1, 3, 8, 130)]
    + [("hub", False, k) for k in (1, 3, 8)],
)
def test_primitives(backend: Any, name: str, weighted: bool, k: int, dtype: str) -> None:
    g = checks.graph(name, weighted)
    checks.check_products(backend, g, k, dtype)
    checks.check_residual(backend, g, k, dtype)
    checks.check_cg(backend, g, k, dtype)
    checks.check_sketches(backend, g, k, dtype)
    checks.check_srht(backend, g.num_nodes, k, dtype)


@pytest.mark.parametrize("k", [1, 6, 8, 130])
@pytest.mark.parametrize(("name", "weighted"), [("one", False), ("tail", True)])
def test_neighbours_in_float16(backend: Any, name: str, weighted: bool, k: int) -> None:
    checks.check_half(backend, checks.graph(name, weighted), k)


def test_float16_pays_where_the_cache_does_not_hold_a_block(backend: Any) -> None:
    n = 605
    L, most = backend.laplacian(checks.graph("hub"), "float32"), cupy_standin.L2_BYTES // (4 * n)
    assert not backend.half_pays(L, most)
    assert backend.half_pays(L, most + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["hub", "tail", "one"])
def test_the_product_is_that_of_the_csr_matrix(
    backend: Any, name: str, weighted: bool, dtype: str
) -> None:
    checks.check_reference(backend, checks.graph(name, weighted and name != "one"), dtype)


@pytest.mark.parametrize("weighted", [False, True])
def test_same_scores_and_seed_give_the_same_edges(backend: Any, weighted: bool) -> None:
    checks.check_sampling(backend, checks.graph("hub", weighted))
    checks.check_sampling(backend, checks.graph("tail", weighted))


def test_sampled_edges_end_to_end(ledger: Ledger) -> None:
    checks.check_sampled_edges_end_to_end()


def test_dense_algebra_and_empty_blocks(backend: Any) -> None:
    checks.check_dense(backend)
    more_checks.check_empty(backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", more_checks.FITS)
def test_fit_gives_the_answer_of_the_cpu(ledger: Ledger, name: str, dtype: str) -> None:
    checks.check_fit(name, dtype, fits=more_checks.FITS)
    assert sum(ledger.kernels.values()) > 0


@pytest.mark.parametrize("few", [False, True])
def test_leave_one_out_and_several_labels_are_those_of_the_cpu(ledger: Ledger, few: bool) -> None:
    rng, g = np.random.default_rng(0), checks.graph("tail")
    X, train = rng.standard_normal((g.num_nodes, 8)), np.arange(5 if few else 25)
    y = (rng.random((g.num_nodes, 2)) < 0.5) * 1
    found = []
    for device in ("cuda", "cpu"):
        model = HERTA(lam=3.0, ridge=0.2, fit_intercept=True, dtype="float64", device=device)
        model.fit(g, X, y * 1.0, train, evaluate=[7, 9], sample_weight=1.0 + y[:, 0], loo=True)
        labels = HERTA(lam=3.0, ridge=0.2, loss="bce", dtype="float64", device=device)
        found.append((model.loo_, model.leverage_, labels.fit(g, X, y, train).W_))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


class Tensor:
    """An array of another library: it can say where its memory is, and no more."""

    def __init__(self, data: Any, dlpack: bool) -> None:
        self.data, self._dlpack = data, dlpack

    def __getattr__(self, name: str) -> Any:
        if name == "__cuda_array_interface__" and not self._dlpack:
            return dict(self.data.__array_interface__)
        if name == "__dlpack_device__" and self._dlpack:
            return lambda: (2, 0)
        if name == "__dlpack__" and self._dlpack:
            return self.data.__dlpack__
        raise AttributeError(name)


@pytest.mark.parametrize("dlpack", [False, True])
@pytest.mark.parametrize("reordered", [False, True])
def test_arrays_on_the_device_are_used_where_they_are(
    ledger: Ledger, backend: Any, reordered: bool, dlpack: bool
) -> None:
    g, X, y = checks.graph("fit"), checks.block(60, 20, "float32"), np.arange(60) % 3 + 5
    g = g.reordered("degree") if reordered else g
    model = HERTA(device="cuda").fit(g, X, y)
    ledger.clear()
    given = Tensor(X.copy(), dlpack)
    again = HERTA(device="cuda").fit(g, given, Tensor(y, dlpack))
    assert ledger.total("bytes_up") < X.nbytes  # the rows and the targets only
    np.testing.assert_array_equal(again.W_, model.W_)
    for method in ("transform", "predict"):
        found = getattr(again, method)(g, given)
        assert isinstance(found, ndarray)
        np.testing.assert_array_equal(found.get(), getattr(model, method)(g, X))
    assert again.score(g, given, Tensor(y, dlpack)) == model.score(g, X, y)
    solver = SDDSolver(g, lam=3.0, device="cuda")
    found = solver.solve(given)
    assert isinstance(found, ndarray)
    np.testing.assert_array_equal(found.get(), solver.solve(X))
    with pytest.raises(TypeError, match=r'X is on a GPU .* use device="cuda"'):
        HERTA(device="cpu").fit(g, given, y)


# ---- the ledger -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cg_step_is_three_launches_and_nothing_else(
    ledger: Ledger, backend: Any, dtype: str
) -> None:
    L = backend.laplacian(checks.graph("hub"), dtype)
    R = backend.asarray(checks.block(605, 8, dtype))
    state = backend.cg_start(L, 3.0, R, backend.asarray(np.zeros(8)), 1e-3, 1e-7)
    backend.cg_step(L, 3.0, state)  # the first step allocates what all others use
    ledger.clear()
    for _ in range(4):
        backend.cg_step(L, 3.0, state)
    assert dict(ledger.stages) == {"outside": {"launches": 12}}
    assert ledger.peak == ledger.held
    backend.cg_active(state)
    assert ledger.total("syncs") == ledger.total("to_host") == 1


@pytest.mark.parametrize("default", [False, True])
def test_captured_steps_are_one_launch_and_the_same_steps(
    ledger: Ledger, backend: Any, default: bool
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
            ledger.clear()
            for count in (4, 4, 1):
                backend.cg_steps(L, 3.0, state, count)
            assert ledger.total("launches") == (2 + 3 if capture else 27)
            assert set(ledger.stages["outside"]) == {"launches"}
            states.append(state)
        stream.synchronize()
    for name in ("Z", "R", "P", "iterations"):
        assert np.array_equal(*(getattr(state, name).get() for state in states))


class OutOfMemoryError(MemoryError):
    """As CuPy's; RMM raises Python's own."""


@pytest.mark.parametrize("error", [OutOfMemoryError, MemoryError])
def test_out_of_memory_names_what_would_fit(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, error: type[MemoryError]
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error("Out of memory allocating 99 bytes.")

    monkeypatch.setattr(sys.modules["cupy"], "zeros_like", fail)
    with pytest.raises(MemoryError, match=r"99 bytes. Blocks of 64 columns .* memory_budget=\d+"):
        HERTA(device="cuda").fit(checks.graph("fit"), np.ones((60, 1)), np.arange(60) % 2)


def test_all_memory_comes_from_the_allocator_that_was_set(
    ledger: Ledger, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documented line plugs RMM in; nothing may go past it."""
    asked: list[int] = []
    taken: list[int] = []
    count = ledger.allocated
    monkeypatch.setattr(ledger, "allocated", lambda size: (taken.append(size), count(size)))
    backend.xp.cuda.set_allocator(asked.append)
    model = HERTA(device="cuda", sparsify=True, sketch=True, memory_budget="1GB")
    g = random_graph(60, 200, seed=5)
    model.fit(g, checks.block(60, 6, "float32"), np.arange(60) % 3)
    assert len(asked) > 100
    assert asked == taken


def test_a_chebyshev_step_is_one_launch(ledger: Ledger, backend: Any) -> None:
    L = backend.laplacian(checks.graph("tail"), "float32")
    Z, Z_prev, B = (backend.asarray(checks.block(33, 8, "float32", i)) for i in range(3))
    backend.chebyshev_step(L, 3.0, Z, Z_prev, B, 0.3, 0.2)
    ledger.clear()
    backend.chebyshev_step(L, 3.0, Z, Z_prev, B, 0.3, 0.2)
    assert dict(ledger.stages) == {"outside": {"launches": 1}}


def test_the_hadamard_transform_of_2_to_the_18_is_two_passes(ledger: Ledger, backend: Any) -> None:
    n, s = 1 << 18, 300
    Q = checks.block(n, 1, "float32")
    found = backend.srht(backend.asarray(Q), s, checks.SEED)
    assert ledger.kernels["hadamard_f32"] == 2  # three would be allowed
    checks.close(backend, found, checks.CPU.srht(Q, s, checks.SEED), "float32")


def test_a_cg_step_moves_little_more_than_it_must() -> None:
    with installed("count") as ledger:
        backend, k = get_backend("cuda"), 40
        g = random_graph(1000, 14_000)
        L = backend.laplacian(g, "float32")
        R = backend.asarray(checks.block(1000, k, "float32"))
        state = backend.cg_start(L, 3.0, R, backend.asarray(np.zeros(k)), 1e-3, 1e-7)
        ledger.clear()
        backend.cg_step(L, 3.0, state)
        moved = sum(map(sum, ledger.traffic.values()))
    gathers, compulsory = L.nnz * (k + 1) * 4, 4 * L.nnz + 8 * L.n + 10 * L.n * k * 4
    assert 0.6 * (compulsory + gathers) < moved <= 1.3 * compulsory + gathers


def test_nothing_but_small_answers_leaves_the_device_while_training(ledger: Ledger) -> None:
    ledger_table.fit(ledger, "mse")
    stages = ledger.stages
    assert stages["train"]["to_device"] == 0
    assert stages["sparsify"]["to_device"] == 0  # L_tilde is made where it is used
    for name in ("sparsify", "preconditioner", "spectrum", "train"):
        # Mostly 8 bytes; per-column reports of a solve are the longest, 8 bytes a column.
        assert stages[name]["bytes_down"] <= 8 * 64 * stages[name]["to_host"]
    assert ledger.largest_download <= 8 * 20 * 20  # the Lanczos matrix; W_ has 8 * 6 * 3


def test_the_readme_of_the_tests_has_the_table_that_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger_table.main()
    printed = capsys.readouterr().out.splitlines()
    written = (ROOT / "tests" / "README.md").read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(written) if line.startswith("| stage | kernel launches"))
    for line in written[at + 2 : written.index("", at)]:
        cells = line.split(" | ")
        again = next(other for other in printed if other.startswith(cells[0] + " |")).split(" | ")
        assert len(again) == len(cells)
        for ours, theirs in zip(_numbers(cells), _numbers(again), strict=True):
            # Another BLAS may take a step more or less.
            assert abs(ours - theirs) <= 10 + 0.25 * theirs, line


def _numbers(cells: list[str]) -> list[int]:
    digits = [cell.strip(" |").replace(",", "") for cell in cells[1:]]
    return [int(number) for number in digits if number.isdigit()]


def test_stages_and_steps_are_nested_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    open_, seen = [], []

    @contextmanager
    def annotate(message: str, domain: str) -> Iterator[None]:
        assert domain == "herta"
        open_.append(message)
        seen.append("/".join(open_))
        try:
            yield
        finally:
            open_.pop()

    monkeypatch.setattr(herta_gpu.plumbing.progress, "nvtx", SimpleNamespace(annotate=annotate))
    X, y = checks.block(60, 6, "float32"), np.arange(60) % 3
    model = HERTA(device="cpu", loss="ce", ridge=0.1, strategy="herta")
    model.fit(checks.graph("fit"), X, y)
    assert not open_
    assert set(model.stages_) <= set(seen)
    HERTA(device="cpu", ridge=0.1, strategy="direct").fit(checks.graph("fit"), X, y)
    steps = [f"train/step {h['step']}" for h in model.history_]
    assert steps == [s for s in seen if re.fullmatch(r"train/step \d+", s)]
    # What a step and a stage consist of, with its size; X is 60 x 6, Y has three columns.
    for pattern in (
        r"train/step \d+/solve \(columns 3, tol \S+\)/refinement cycle \(number 0, .*float32\)",
        r"train/step \d+/solve \(columns 3, tol \S+\)/residual \(columns 3\)",
        r"preconditioner/block of Q \(first 0, columns 6\)/solve \(columns 6, degree \d+\)",
        r"preconditioner/block of Q \(first 0, columns 6\)/residual \(columns 6\)",
        r"(.*/)?pass over X \(columns 6\)",
    ):
        assert any(re.fullmatch(pattern, s) for s in seen), pattern
    monkeypatch.setattr(herta_gpu.plumbing.progress, "nvtx", None)
    HERTA(device="cpu").fit(checks.graph("fit"), X, y)


def test_ranges_cost_nothing_without_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untold:
        def __format__(self, spec: str) -> str:
            raise AssertionError("nobody reads this")

    monkeypatch.setattr(herta_gpu.plumbing.progress, "nvtx", None)
    marked = herta_gpu.plumbing.progress.marked
    assert marked("solve", tol=Untold()) is marked("residual")


def test_a_profiler_records_what_it_shall(ledger: Ledger, backend: Any) -> None:
    """Under any profiler: nsys and ncu have different environments, and neither is asked for."""
    with backend.profiled() as traffic:
        assert ledger.total("recordings") == 1
        backend.column_dots(*2 * (backend.asarray(checks.block(33, 4, "float32")),))
    assert ledger.total("recordings") == 0
    backend.column_dots(*2 * (backend.asarray(checks.block(33, 4, "float32")),))  # not counted
    # A block with itself is read once, and the dots are written.
    assert (traffic.launches, traffic.moved) == ({"column_dots": 1}, {"column_dots": 33 * 16 + 36})


# ---- which backend ----------------------------------------------------------------------------


def test_auto_takes_a_usable_device(ledger: Ledger) -> None:
    assert get_backend("auto").name == "cuda"


def test_without_cupy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(), monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        with pytest.raises(RuntimeError, match=r"herta_gpu\[cu13\].*herta_gpu\[cu12\]"):
            get_backend("cuda")
        assert get_backend("auto").name == "cpu"


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: too old\nmore")

    with installed(), monkeypatch.context() as patch:
        patch.setattr(sys.modules["cupy.cuda.runtime"], "getDeviceCount", fail)
        with pytest.raises(RuntimeError, match=r"driver \(cudaErrorInsufficientDriver: too old\)"):
            HERTA(device="cuda").fit(checks.graph("fit"), np.ones((60, 1)), np.arange(60) % 2)
        assert get_backend("auto").name == "cpu"


# ---- the stand-in -----------------------------------------------------------------------------


_OWN = (
    "variant",
    "order",
    "recording",
    "current",
    "tick",
    "later",
    "reads",
)  # the stand-in's, not CuPy's


def test_every_name_and_parameter_is_one_of_the_installed_cupy() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed: nothing to compare with")
    wanted: dict[str, list[str] | None] = {}
    for name, module in build().items():
        for key, value in vars(module).items():
            if key.startswith("_") or isinstance(value, ModuleType):
                continue
            plain = inspect.isfunction(value) and value.__name__ not in ("run", "<lambda>")
            wanted[f"{name}:{key}"] = list(inspect.signature(value).parameters) if plain else None
    for cls in (
        "cupy:ndarray",
        "cupyx.scipy.sparse:csr_matrix",
        "cupyx.scipy.sparse:coo_matrix",
        "cupy:RawModule",
        "cupy.cuda:Stream",
        "cupy.cuda:Event",
        "cupy.cuda:Graph",
        "cupy.cuda:Device",
        "cupy.cuda.nccl:NcclCommunicator",
    ):
        module, _, name = cls.partition(":")
        for key, value in vars(getattr(build()[module], name)).items():
            if key.startswith("_") or key in _OWN:
                continue
            known = inspect.isfunction(value) and value.__code__.co_argcount > 1
            parameters = list(inspect.signature(value).parameters)[1:] if known else None
            wanted[f"{cls}.{key}"] = parameters
    for cls in ("Event", "Stream", "PinnedMemory"):  # the first parameters of each constructor
        parameters = inspect.signature(getattr(build()["cupy.cuda"], cls)).parameters
        wanted[f"cupy.cuda:{cls}.__init__"] = list(parameters)
    command = [sys.executable, "-P", str(Path(cupy_standin.__file__).parent / "installed_names.py")]
    done = subprocess.run(command, input=json.dumps(list(wanted)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout)
    assert [name for name, parameters in real.items() if parameters is False] == []
    differ = {
        name: (ours, real[name])
        for name, ours in wanted.items()
        if ours is not None and isinstance(real[name], list) and ours != real[name]
        if not (name.endswith("__init__") and ours == real[name][: len(ours)])
    }
    assert differ == {}


def test_the_stand_in_refuses_what_cupy_refuses(backend: Any, ledger: Ledger) -> None:
    xp, host = backend.xp, np.ones(3)
    x = xp.asarray(host)
    for wrong in (
        lambda: np.asarray(x),
        lambda: np.sum(x),
        lambda: x + host,
        lambda: host + x,
        lambda: xp.maximum(x, host),
        lambda: x[np.array([0])],
        lambda: x.__setitem__(slice(None), host),
        lambda: xp.ascontiguousarray(host),
        lambda: xp.concatenate([x, host]),
        lambda: xp.where(host > 0, x, 0.0),
    ):
        with pytest.raises(TypeError):
            wrong()
    for missing in ("insert", "block", "geomspace", "errstate"):
        assert not hasattr(xp, missing)
    with pytest.raises(ValueError, match="device arrays"):
        sys.modules["cupyx.scipy.sparse"].csr_matrix((host, host, host))
    assert isinstance(np.float64(2) * x, ndarray)
    ledger.clear()
    assert float(x.sum()) == 3 and bool((x > 0).all())  # noqa: PT018
    assert ledger.total("syncs") == 2
