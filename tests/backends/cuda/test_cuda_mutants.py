"""Bugs put into the host code of the CUDA backend on purpose: each turns some check red."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cuda_emulator import EmulatorError, compiler

if compiler() is None:
    pytest.skip("no g++: the kernels cannot be emulated", allow_module_level=True)

import herta_gpu
from herta_gpu.backends.cuda import algorithm2, transfer
from tests.backends.cuda import more_checks
from tests.backends.cuda.test_cuda import (
    test_a_cg_step_is_three_launches_and_nothing_else as check_ledger,
)
from tests.backends.cuda.test_cuda import (
    test_captured_steps_are_one_launch_and_the_same_steps as check_capture,
)
from tests.backends.cuda.test_cuda_streams import (
    test_an_upload_is_over_before_another_stream_may_use_it as check_uploaded,
)
from tests.backends.cuda.test_solves import (
    test_short_steps_are_replayed_and_long_ones_launched as check_replays,
)
from tests.backends.cuda.test_solves import (
    test_work_is_handed_over_between_streams as check_handover,
)
from tests.cupy_standin.ledger import Ledger

MUTANTS = {
    "a host array passed to a kernel": (
        algorithm2, "scores = self.xp.zeros(m)", "scores = np.zeros(m)"
    ),
    "a Python number as a scalar": ("cuda", "X.dtype.type(lam)", "float(lam)"),
    "a scalar of the wrong type": ("cuda", "X.dtype.type(lam)", "np.float64(lam)"),
    "a size of 32 bits": (algorithm2, "(I64(m), I64(k), lo", "(I32(m), I64(k), lo"),
    "forgotten contiguity": ("cuda", 'cupy.asarray(x, dtype=dtype, order="C")',
                             "cupy.asarray(x, dtype=dtype)"),
    "memory of the caller that is not aligned": (
        "cuda", "return x if aligned(x) else x.copy()", "return x"
    ),
    "an empty solve": ("cuda", "if not C.size or not B.size:", "if 0:"),
    "arrays swapped": ("cuda", "s.R, s.R, s.P, s.Z", "s.R, s.P, s.R, s.Z"),
    "sizes swapped": ("cuda", "args=(I64(n), I64(k), *args)", "args=(I64(k), I64(n), *args)"),
    "alpha and beta swapped": ("cuda", "s.iterations, s.alpha, s.beta,",
                               "s.iterations, s.beta, s.alpha,"),
    "tickets that do not start at 0": (
        "cuda", "tickets = cupy.zeros(-(-k // 64), dtype=U32)",
        "tickets = cupy.empty(-(-k // 64), dtype=U32)",
    ),
    "scratch of the wrong type": (
        "cuda", "cupy.empty((MAX_BLOCKS, k))", 'cupy.empty((MAX_BLOCKS, k), dtype="float32")'
    ),
    "the caller's array changed": ("cuda", "energy = energy.copy()", "energy = energy"),
    "weights forgotten": (
        "cuda", "L.indices, pointer(weights), s", "L.indices, NULL, s"
    ),
    "a launch for nothing": (
        "cuda", "if X.size:\n            self._product", "if 1:\n            self._product"
    ),
    "scales that were rounded": (
        "cuda", "exact = (held[\"inv_sqrt_degree\"]",
        "exact = (held[\"inv_sqrt_degree\"].astype(\"float32\").astype(\"float64\")",
    ),
    "segments of other rows": ("cuda", "L.segment_row[a:b]", "L.segment_row[: b - a]"),
    "up and down swapped": ("cuda", "degree, halves.up,", "degree, halves.down,"),
    "float16 of the iterate before": (
        "cuda", "\"halve\", Z, Z, L.inv", "\"halve\", Z, Z_prev, L.inv"
    ),
    "the wrong random stream": (algorithm2, "U32(STREAM_ROWS)", "U32(3)"),
    "a failed factorisation unnoticed": (
        "cuda", '(linalg="raise"):  # synchronize!', '(linalg="ignore"):'
    ),
    "long rows forgotten": (
        "cuda", "rows = np.flatnonzero(length > segment)", "rows = np.flatnonzero(length < 0)"
    ),
    "a graph that may still be on its way": (
        "cuda", "give_back_pinned(cupy)  # synchronize!", "pass"
    ),
    "rows cut at another length than is told": (
        "cuda", "I32(L.segment), I32(b - a)", "I32(512), I32(b - a)"
    ),
    "rows gathered in the order of the file": (
        transfer, "self.order[rows])", "np.arange(rows.start, rows.stop))"
    ),
    "columns cut from the first on": (
        transfer, "part[:, cut]", "part[:, : len(range(*cut.indices(part.shape[1])))]"
    ),
    "captured steps with the scratch of another stream": (
        "cuda", "self._replayed_on = cupy.cuda.get_current_stream().ptr", "pass"
    ),
    "a wait in every step": (
        "cuda", "s, k = state, state.R.shape[1]",
        "s, k = state, state.R.shape[1] + 0 * self.cg_active(state)",
    ),
    "work that does not wait for what the caller's stream makes": (
        "cuda", "        _follow(self._own, caller)\n", ""
    ),
    "a caller that does not wait for the work": (
        "cuda", "            _follow(caller, self._own)\n", "            pass\n"
    ),
    "long rows of a residual left out": ("cuda", "        if first < last:\n", "        if 0:\n"),
    "a residual in another unit": ("cuda", "B, 0, 1.0 / unit, R", "B, 0, unit, R"),
    "replays that nobody counts": ("cuda", "note_again(state.moved)", "pass"),
    "a part used before it is there": (
        transfer, "            stream.wait_event(buffer.copied)\n", ""
    ),
    "a copy into a buffer that is still in use": (
        transfer, "        self._copies.wait_event(buffer.used)\n", ""
    ),
    "a buffer given back before it was used": (
        transfer,
        "            try:\n                yield rows, part\n            finally:",
        "            buffer.used.record(stream)\n            yield rows, part\n            if 0:",
    ),
    "fresh memory overwritten while its last owner reads it": (
        transfer, "        made.used.record(stream)", "        pass"
    ),
    "a pinned buffer refilled while it is being read": (
        transfer, "        buffer.copied.synchronize()", "        pass"
    ),
    "a buffer of the ring refilled while it is being read": (
        transfer, "self._buffers[part % 2].copied.synchronize()", "pass"
    ),
    "a ring refilled while the pass before is being read": (
        transfer, "self._copies.synchronize()  # synchronize!  those", "# those"
    ),
    "a chunk refilled while it is being uploaded": (
        transfer, "        copied[i % 2].synchronize()", "        pass"
    ),
    "a buffer for the next chunk, too": (
        transfer, "chunk = buffers[i % 2]", "chunk = buffers[0]"
    ),
    "one buffer for two parts": (transfer, "buffers[(i + 1) % 2]", "buffers[i % 2]"),
}  # fmt: skip


def _mutated(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUDA backend with one bug in it."""
    where, old, new = MUTANTS[name]
    folder = Path(herta_gpu.__file__).parent / "backends" / "cuda"
    changed = "backend" if where == "cuda" else where.__name__.rpartition(".")[2]
    for file in dict.fromkeys([changed, "backend"]):
        text = (folder / f"{file}.py").read_text()
        if file == changed:
            assert text.count(old) == 1, f"the text to change occurs {text.count(old)} times"
            text = text.replace(old, new)
        module = ModuleType(f"herta_gpu.backends.cuda.{file}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text, f"{file}.py", "exec"), module.__dict__)
    return module.CUDABackend()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_turns_a_check_red(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    backend = _mutated(name, monkeypatch)
    with pytest.raises((AssertionError, EmulatorError, TypeError, ZeroDivisionError)):
        _face_every_check(ledger, backend, monkeypatch)


def _face_every_check(ledger: Ledger, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    more_checks.check_all(backend)
    check_uploaded(backend)
    check_ledger(ledger, backend, "float32")
    check_capture(ledger, backend, default=True)
    backend.capture = None
    check_handover(backend)
    check_replays(ledger, backend, monkeypatch)
