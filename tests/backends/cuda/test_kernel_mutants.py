"""The kernels under sanitizers, and bugs put into them on purpose: each turns a check red.

A sanitizer wants a process of its own: ``python -m tests.backends.cuda.test_kernel_mutants asan``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT
from tests.cuda_emulator import EmulatorError, Module, compiler, kernel_text, load

if compiler() is None:
    pytest.skip("no g++: the kernels cannot be emulated", allow_module_level=True)

from tests.backends.cuda.kernel_checks import run_checks
from tests.backends.cuda.offset_checks import check_offsets

REPORTS = {"asan": ("AddressSanitizer", "runtime error"), "tsan": ("ThreadSanitizer",)}


def sanitized(variant: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """This file as a script, with the sanitizer's runtime loaded first."""
    named = [str(compiler()), f"-print-file-name=lib{variant}.so"]
    runtime = Path(subprocess.run(named, capture_output=True, text=True).stdout.strip())
    if not runtime.is_absolute() or not runtime.exists():
        pytest.skip(f"lib{variant} is not installed")
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []  # TSan needs fixed addresses
    options = {
        "LD_PRELOAD": str(runtime.resolve()),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "halt_on_error=1",
        "OPENBLAS_NUM_THREADS": "1",
        "HERTA_NUM_THREADS": "1",
    }
    command = [*fixed, "env", *(f"{name}={value}" for name, value in options.items())]
    command += [
        sys.executable,
        "-m",
        "tests.backends.cuda.test_kernel_mutants",
        variant,
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("variant", REPORTS)
def test_no_sanitizer_complains(variant: str) -> None:
    done = sanitized(variant)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all checks passed" in done.stdout


# ---- mutants


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    red: str = "plain"  # the step that must see it


MUTANTS = {
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
        "laplacian.cu", "start = to.a + static_cast", "start = static_cast", "asan"
    ),
    "float64 sums kept in float32": Mutant(
        "laplacian.cu",
        "sum[i] += a * static_cast<T>(value(x.v[i]))",
        "sum[i] = static_cast<float>(sum[i] + a * static_cast<T>(value(x.v[i])))",
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
    "the last rank left out of a sum": Mutant("cg.cu", "r < ranks; ++r", "r < ranks - 1; ++r"),
    "the sums of one rank only": Mutant(
        "cg.cu", "s.turn(c, step, over_ranks(dots, ranks, k, c));", "s.turn(c, step, dots[c]);"
    ),
    "rows packed one further": Mutant(
        "ranks.cu", "store(out + i * k", "store(out + (m - 1 - i) * k"
    ),
    "32-bit offset of a packed row": Mutant(
        "ranks.cu", "static_cast<i64>(rows[i]) * k", "static_cast<u32>(rows[i] * k)", "offsets"
    ),
}


def mutant(name: str, variant: str) -> dict[str, Module]:
    file, old, new, _ = MUTANTS[name]
    text = kernel_text(file)
    if text.count(old) != 1:
        raise ValueError(f"{name}: the text to change occurs {text.count(old)} times")
    return {file: load(file, variant, text.replace(old, new))}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_turns_a_check_red(name: str) -> None:
    file, _, _, step = MUTANTS[name]
    if step in REPORTS:
        done = sanitized(step, name)
        assert done.returncode != 0, "the mutant passed"
        assert any(word in done.stderr for word in REPORTS[step]), done.stderr[-2000:]
        return
    modules = mutant(name, "plain")
    if step == "offsets":
        with pytest.raises((AssertionError, EmulatorError)):
            check_offsets(modules)
    else:
        with pytest.raises((AssertionError, EmulatorError)):
            run_checks("plain", modules, only=file)


def main(variant: str, name: str = "") -> None:
    modules = mutant(name, variant) if name else None
    run_checks(variant, modules, only=MUTANTS[name].file if name else "")
    print("all checks passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
