"""Bugs put into the kernels and into the host code of the CUDA backend on purpose: each must turn
a check red.

A few run with every test run, all of them in the long one.  A sanitizer wants a process of its own:
``python -m tests.backends.cuda.test_mutants asan`` runs the checks of kernels under one, and with
a name behind it those of a mutant.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from tests import cuda_device
from tests.backends.cuda import kernel_checks, more_checks
from tests.backends.cuda.offset_checks import check_offsets
from tests.backends.cuda.test_counts import (
    test_a_cg_step_is_three_launches_and_nothing_else as check_counts,
)
from tests.backends.cuda.test_counts import (
    test_captured_steps_are_one_launch_and_the_same_steps as check_capture,
)
from tests.backends.cuda.test_counts import (
    test_short_steps_are_replayed_and_long_ones_launched as check_replays,
)
from tests.backends.cuda.test_streams import (
    test_a_graph_that_is_kept_may_be_used_on_another_stream as check_kept,
)
from tests.backends.cuda.test_waits import face_the_checks
from tests.conftest import ROOT
from tests.cuda_device.__main__ import under_sanitizer
from tests.cuda_device.build import NotBuiltError

pytestmark = [pytest.mark.gpu, pytest.mark.once]
REPORTS = {"asan": ("AddressSanitizer", "runtime error"), "tsan": ("ThreadSanitizer",)}
# What stands for the others where time is short.
ALWAYS = (
    "frozen columns move",
    "sum over half the lanes",
    "a scalar of the wrong type",
    "one buffer for two parts",
    "scratch of another stream",
)


def some_of(mutants: dict[str, Any]) -> list[Any]:
    """Their names; all but a few are for the long run."""
    return [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.long) for n in mutants]


# ---- kernels -------------------------------------------------------------------------------------


def sanitized(variant: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """This file as a script, on a device under a sanitizer."""
    try:
        before = under_sanitizer(variant)
    except NotBuiltError as error:
        pytest.skip(str(error))
    command = [*before, "CUDA_DEVICE_ORDER=random", sys.executable, "-m"]
    command += ["tests.backends.cuda.test_mutants", variant, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("variant", [pytest.param(v, marks=pytest.mark.long) for v in REPORTS])
def test_no_sanitizer_complains(device: Any, variant: str) -> None:
    done = sanitized(variant)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all checks passed" in done.stdout


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    red: str = "plain"  # the step that must see it


KERNELS = {
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
        "cg.cu", "if (threadIdx.x == 0 && threadIdx.y == 0) {\n        __thr", "{\n        __thr"
    ),
    "a row of partials left out": Mutant(
        "cg.cu",
        "block = threadIdx.y; block < gridDim.x;",
        "block = threadIdx.y + 1; block < gridDim.x;",
    ),
    "the first kind of dots twice": Mutant(
        "laplacian.cu", "from = partials + m * k + column", "from = partials + 0 * m * k + column"
    ),
    "only the first turn of the segments": Mutant(
        "laplacian.cu",
        "piece += L.segment_blocks)\n            long_row",
        "piece += L.segments)\n            long_row",
    ),
    "the sum of another long row": Mutant(
        "laplacian.cu", "L.segment_row[middle] < row", "L.segment_row[middle] <= row"
    ),
    "a sum of a long row that is not kept": Mutant(
        "laplacian.cu",
        "L.segment_sums[first * L.k + lane.column + i] = part[i];",
        "L.segment_sums[first * L.k + lane.column + i] += 0 * part[i];",
    ),
    "dots of what was rounded": Mutant(
        "laplacian.cu",
        "dot[0][i] += r[i] * r[i];",
        "dot[0][i] += static_cast<float>(r[i]) * r[i];",
    ),
    "a residual in the unit of another column": Mutant(
        "laplacian.cu", "scale[column + i + c]", "scale[column]"
    ),
    "columns that stopped before the others did": Mutant(
        "cg.cu", "here = here || active", "here = active"
    ),
    "steps lost where the last column is done": Mutant(
        "cg.cu", "moves = moves || alpha", "moves = alpha"
    ),
    "a step that is taken again when all is done": Mutant(
        "cg.cu", "s.alpha[at.column + i] = s.beta[at.column + i] = 0;", "s.beta[at.column + i] = 0;"
    ),
    "race: every row of the block writes the sum": Mutant(
        "cg.cu", "return all && inside && threadIdx.y == 0;", "return all && inside;", "tsan"
    ),
    "sum taken before the other blocks are done": Mutant(
        "cg.cu", "atomicInc(ticket, count - 1) == count - 1", "atomicInc(ticket, count - 1) == 0"
    ),
    "exit before a barrier": Mutant(
        "laplacian.cu", "if (active && !any", "if (!lane.inside) return;\n    if (active && !any"
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
    "32-bit offset": Mutant("laplacian.cu", "X + j * k", "X + static_cast<u32>(j * k)", "offsets"),
    "32-bit offset of float16": Mutant(
        "laplacian.cu", "G + j * k", "G + static_cast<u32>(j * k)", "offsets"
    ),
    "32-bit offset of a direction": Mutant(
        "cg.cu", "const i64 offset = row * k", "const u32 offset = row * k", "offsets"
    ),
    "32-bit offset of a sketch": Mutant(
        "sketch.cu", "out[row * k + column + i]", "out[static_cast<u32>(row * k) + i]", "offsets"
    ),
    "32-bit offset of a score": Mutant(
        "sampling.cu", "load<N>(S + hi * k + c)", "load<N>(S + u32(hi * k) + c)", "offsets"
    ),
    "32-bit offset of a tile": Mutant(
        "hadamard.cu", "in[row * k + columns + c]", "in[u32(row * k) + columns + c]", "offsets"
    ),
    "32-bit number of a thread": Mutant(
        "sampling.cu",
        "return static_cast<i64>(blockIdx.x) * blockDim.x",
        "return blockIdx.x * blockDim.x",
        "offsets",
    ),
    "32-bit number of an edge": Mutant(
        "sampling.cu", "new_indices[start + place]", "new_indices[u32(start + place)]", "offsets"
    ),
    "32-bit place of an entry": Mutant(
        "sampling.cu",
        "for (i64 e = indptr[u] + threadIdx.x; e < indptr[u + 1]; e += 32) {",
        "for (i32 e = indptr[u] + threadIdx.x; e < static_cast<i32>(indptr[u + 1]); e += 32) {",
        "offsets",
    ),
    "a chunk written from the first row on": Mutant(
        "laplacian.cu", "here = at - to.a * L.k", "here = at", "asan"
    ),
    "a chunk of other rows": Mutant(
        "laplacian.cu", "start = to.a + static_cast", "start = static_cast"
    ),
    "a neighbour that is not there": Mutant(
        "laplacian.cu", "if (u <= left)\n", "if (u <= left + 1)\n"
    ),
    "neighbours of the turn before": Mutant(
        "laplacian.cu", "at += kAhead * step;", "at += kAhead * step * (left > 2 * kAhead);"
    ),
    "a weight of the turn before": Mutant(
        "laplacian.cu", "if (weight) weight += kAhead * step;", ""
    ),
    "float64 sums kept in float32": Mutant(
        "laplacian.cu",
        "sum[i] += a * static_cast<T>(x.v[i]);",
        "sum[i] = static_cast<float>(sum[i] + a * static_cast<T>(x.v[i]));",
    ),
    "float16 cut off instead of rounded": Mutant(
        "laplacian.cu", "a + __uint_as_float(base)", "a * 0.9998f + __uint_as_float(base)"
    ),
    "float16 without its smallest numbers": Mutant(
        "laplacian.cu", "max(__float_as_uint(a) >> 23, 113u)", "max(__float_as_uint(a) >> 23, 114u)"
    ),
    "float16 that overflows": Mutant("laplacian.cu", "a > 65504.0f ? 0x7bffu", "a > 65504.0f ? 0u"),
    "the unit of another column": Mutant(
        "laplacian.cu", "unit[column] * sum", "unit[0 * column] * sum"
    ),
    "float16 times D^-1/2 once more": Mutant(
        "laplacian.cu", "factor(float) const { return 1; }", "factor(float s) const { return s; }"
    ),
    "arguments swapped": Mutant(
        "sketch.cu", "philox(lo, hi, group, kStreamInc", "philox(hi, lo, group, kStreamInc"
    ),
    "ticket that does not wrap": Mutant(
        "laplacian.cu", "atomicInc(ticket, count - 1)", "atomicInc(ticket, count)"
    ),
    "rho changed before beta is made of it": Mutant(
        "cg.cu", "alpha[c] = step;\n", "alpha[c] = step;\n        rho[c] = dot;\n"
    ),
    "sum over half the lanes": Mutant("sampling.cu", "warp_sum(l, 1, 8)", "warp_sum(l, 1, 4)"),
    "largest over half the lanes": Mutant(
        "sampling.cu",
        "bit < 32; bit *= 2) {\n            const double other",
        "bit < 16; bit *= 2) {\n            const double other",
    ),
    "only the first 32 neighbours": Mutant(
        "sampling.cu",
        "indptr[u + 1]; e += 32) {\n            const double pair",
        "indptr[u + 1]; e += 32 * 1000) {\n            const double pair",
    ),
    "search from the wrong side": Mutant(
        "sampling.cu", "if (list[middle] > value)", "if (list[middle] >= value)"
    ),
    "frozen columns move": Mutant("cg.cu", "if (active[c]) step =", "step ="),
    "32-bit offset of a packed row": Mutant(
        "ranks.cu", "static_cast<i64>(rows[i]) * k", "static_cast<u32>(rows[i] * k)", "offsets"
    ),
}


@pytest.mark.parametrize("name", some_of(KERNELS))
def test_a_bug_in_a_kernel_turns_a_check_red(device: Any, backend: Any, name: str) -> None:
    file, old, new, step = KERNELS[name]
    if step in REPORTS:
        done = sanitized(step, name)
        assert done.returncode != 0, "the mutant passed"
        assert any(word in done.stderr for word in REPORTS[step]), done.stderr[-2000:]
        return
    check = check_offsets if step == "offsets" else kernel_checks.check_kernels
    try:
        with device.changed(old, new), pytest.raises((AssertionError, RuntimeError)):
            check(backend, file)
    finally:
        device.refusals()  # of a kernel that broke a rule


def main(variant: str, name: str = "") -> None:
    """The checks under a sanitizer, whose report is what matters."""
    device = cuda_device.activate()
    from herta_gpu.backends import get_backend

    backend = get_backend("cuda")
    with cuda_device.clocked(device):  # an array, a block of memory: its ends are fenced
        if name:
            with device.changed(KERNELS[name].old, KERNELS[name].new):
                kernel_checks.check_kernels(backend, KERNELS[name].file)
                backend.synchronize()
        else:
            kernel_checks.check_kernels(backend)
            backend.synchronize()
    print("all checks passed")


# ---- the host ------------------------------------------------------------------------------------

HOST = {
    "a host array passed to a kernel": (
        "algorithm2", "scores = self.xp.zeros(m)", "scores = np.zeros(m)"
    ),
    "a Python number as a scalar": ("backend", "X.dtype.type(lam)", "float(lam)"),
    "a scalar of the wrong type": ("backend", "X.dtype.type(lam)", "np.float64(lam)"),
    "a size of 32 bits": ("algorithm2", "(m, k, lo", "(I32(m), k, lo"),
    "forgotten contiguity": ("backend", 'cupy.asarray(x, dtype=dtype, order="C")',
                             "cupy.asarray(x, dtype=dtype)"),
    "memory of the caller that is not aligned": (
        "backend", "return x if aligned(x) else x.copy()", "return x"
    ),
    "an empty solve": ("backend", "if not C.size or not B.size:", "if 0:"),
    "arrays swapped": ("backend", "s.R, s.R, s.P, s.Z", "s.R, s.P, s.R, s.Z"),
    "sizes swapped": ("backend", "n, k, *args)", "k, n, *args)"),
    "alpha and beta swapped": ("backend", "s.iterations, s.alpha, s.beta,",
                               "s.iterations, s.beta, s.alpha,"),
    "tickets that do not start at 0": (
        "backend", "tickets = cupy.zeros(", "tickets = cupy.ones(",
    ),
    "scratch of the wrong type": (
        "backend", "cupy.empty((2 * MAX_BLOCKS, k))",
        'cupy.empty((2 * MAX_BLOCKS, k), dtype="float32")',
    ),
    "scratch of another stream": (
        "backend", "key = (k, cupy.cuda.get_current_stream().ptr)", "key = (k, 0)"
    ),
    "the caller's array changed": ("backend", "energy = energy.copy()", "energy = energy"),
    "weights forgotten": (
        "backend", "L.indices, weights, s", "L.indices, None, s"
    ),
    "a launch for nothing": (
        "backend", "if X.size:\n            self._product", "if 1:\n            self._product"
    ),
    "scales that were rounded": (
        "backend", "exact = (held[\"inv_sqrt_degree\"]",
        "exact = (held[\"inv_sqrt_degree\"].astype(\"float32\").astype(\"float64\")",
    ),
    "segments of other rows": ("backend", "L.segment_row[a:b]", "L.segment_row[: b - a]"),
    "up and down swapped": ("backend", "degree, halves.up,", "degree, halves.down,"),
    "float16 of the iterate before": (
        "backend", "\"halve\", Z, Z, L.inv", "\"halve\", Z, Z_prev, L.inv"
    ),
    "the wrong random stream": ("algorithm2", "U32(STREAM_ROWS)", "U32(3)"),
    "a failed factorisation unnoticed": (
        "backend", '(linalg="raise"):  # synchronize!', '(linalg="ignore"):'
    ),
    "long rows forgotten": (
        "backend", "flatnonzero(length > segment)", "flatnonzero(length < 0)"
    ),
    "a graph that may still be on its way": (
        "backend", "give_back_pinned(cupy)  # synchronize!", "pass"
    ),
    "rows cut at another length than is told": (
        "backend", "I32(L.segment), I32(b - a)", "I32(512), I32(b - a)"
    ),
    "rows gathered in the order of the file": (
        "transfer", "self.order[rows])", "np.arange(rows.start, rows.stop))"
    ),
    "columns cut from the first on": (
        "transfer", "part[:, cut]", "part[:, : len(range(*cut.indices(part.shape[1])))]"
    ),
    "a wait in every step": (
        "backend", "s, k = state, state.R.shape[1]",
        "s, k = state, state.R.shape[1] + 0 * self.cg_active(state)",
    ),
    "long rows of a residual left out": ("backend", "if first < last:", "if 0:"),
    "a residual in another unit": ("backend", "B, 0, 1.0 / unit, R", "B, 0, unit, R"),
    "replays that nobody counts": ("backend", "note_again(state.moved)", "pass"),
    "a buffer given back before it was used": (
        "transfer",
        "            try:\n                yield rows, part\n            finally:",
        "            buffer.used.record(stream)\n            yield rows, part\n            if 0:",
    ),
    "a buffer for the next chunk, too": (
        "transfer", "chunk = buffers[i % 2]", "chunk = buffers[0]"
    ),
    "one buffer for two parts": ("transfer", "buffers[(i + 1) % 2]", "buffers[i % 2]"),
}  # fmt: skip


def with_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUDA backend with one bug in it."""
    file, old, new = HOST[name]

    def change(text: str) -> str:
        assert text.count(old) == 1, f"the text to change occurs {text.count(old)} times"
        return text.replace(old, new)

    return more_checks.changed_backend(file, change, monkeypatch)


@pytest.mark.parametrize("name", some_of(HOST))
def test_a_bug_of_the_host_turns_a_check_red(
    device: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    backend = with_bug(name, monkeypatch)
    try:
        with pytest.raises((AssertionError, TypeError, ZeroDivisionError, RuntimeError)):
            face_every_check(device, backend)
    finally:
        device.refusals()


def face_every_check(device: Any, backend: Any) -> None:
    for check in (
        lambda: more_checks.check_all(backend),
        lambda: check_kept(backend, made_there=False),
        lambda: face_the_checks(backend),  # of waits
        lambda: check_counts(device, backend, "float32"),
        lambda: check_capture(device, backend, default=True),
        lambda: check_replays(device, backend),
    ):
        check()
        said = device.refusals()
        assert not said, said
        backend.capture = None


if __name__ == "__main__":
    main(*sys.argv[1:])
