"""NVRTC compiles every kernel for every architecture we name, without spills.

``nvrtc_table.json`` holds registers, shared memory and theoretical occupancy per kernel, and what
its machine code says (sass.py): how many fences there are, and how many of the bytes that Little's
law asks for its main loop has under way, in percent.  An occupancy below the table fails, as do
fewer bytes under way and more fences; with another version of the compiler, what is 25 points below
it.  After a change that is meant:  python -m tests.backends.cuda.test_nvrtc
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.backends.cuda import sass
from tests.backends.cuda.kernel_sources import KERNELS, kernel_names, kernel_text
from tests.conftest import ROOT
from tests.cuda_device.build import compiler

TABLE = Path(__file__).parent / "nvrtc_table.json"
FILES = sorted(path.name for path in KERNELS.glob("*.cu"))
FLAGS = ["-std=c++17", "-ftz=true", "--device-as-default-execution-space", "--ptxas-options=-v"]
# threads, blocks and bytes of shared memory per multiprocessor; bytes reserved per block
ARCHES = {
    75: (1024, 16, 64 << 10, 0),
    80: (2048, 32, 164 << 10, 1024),
    86: (1536, 16, 100 << 10, 1024),
    89: (1536, 24, 100 << 10, 1024),
    90: (2048, 32, 228 << 10, 1024),
    100: (2048, 32, 228 << 10, 1024),
    120: (1536, 24, 100 << 10, 1024),
}
Report = dict[str, dict[str, int]]


@cache
def nvrtc() -> Any:
    """libnvrtc of the pip package or of the system; None without either."""
    roots = [Path(p) / "nvidia" for p in sys.path if p]
    found = [p for root in roots for p in sorted(root.glob("*/lib/libnvrtc.so.*"))]
    names = [str(p) for p in found if ".alt." not in p.name] + [ctypes.util.find_library("nvrtc")]
    for name in filter(None, names):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    return None


def version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def text_of(program: ctypes.c_void_p, what: str) -> str:
    """The log or the PTX of a program."""
    size = ctypes.c_size_t()
    getattr(nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(max(1, size.value))
    getattr(nvrtc(), f"nvrtcGet{what}")(program, text)
    return text.value.decode()


def compiled(name: str, arch: int, text: str | None = None) -> tuple[str, str, bytes]:
    """(log, PTX, cubin) of one file, or of the text of a mutant, for one architecture."""
    lib, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    text = kernel_text(name) if text is None else text
    lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    flags = [flag.encode() for flag in [*FLAGS, f"-arch=sm_{arch}"]]
    status = lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    log = text_of(program, "ProgramLog")
    assert status == 0, f"{name} for sm_{arch}: {log}"
    assert "warning" not in log, log
    lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
    assert size.value > 0, f"{name} for sm_{arch}: no cubin"
    cubin = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetCUBIN(program, cubin)
    ptx = text_of(program, "PTX")
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return log, ptx, cubin.raw


def check_ptx(ptx: str) -> None:
    """What the sources promise: no float atomics, no local memory, vector loads and stores."""
    for part in ptx.split(".visible .entry ")[1:]:
        kernel = re.match(r"\w+", part)[0]
        assert not re.search(r"\b(atom|red)\.[\w.]*\.f(32|64)", part), f"{kernel}: float atomic"
        assert not re.search(r"\b(ld|st)\.local", part), f"{kernel}: local memory"
        width = re.search(r"_v([24])$", kernel)
        for access in ("ld", "st") if width else ():
            if access == "st" and kernel.startswith(("column_dots", "edge_scores", "hub_sums")):
                continue  # they write one number per column or edge, or sums one by one
            # A residual is float64 whatever is read: 16 bytes are two of it.
            N = "2" if access == "st" and kernel.startswith("residual") else width[1]
            vector = rf"\b{access}\.global[\w.]*\.v{N}\."
            assert re.search(vector, part), f"{kernel}: no {access} of {N} values"


def occupancy(arch: int, threads: int, registers: int, shared: int) -> int:
    """Resident threads over the most there can be, in percent, from the three limits."""
    max_threads, max_blocks, shared_memory, reserved = ARCHES[arch]
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = 65536 // per_warp // warps
    by_shared = shared_memory // (-(-shared // 256) * 256 + reserved or 1)
    blocks = min(max_threads // (warps * 32), max_blocks, by_registers, by_shared)
    return 100 * blocks * warps * 32 // max_threads


@cache  # a test compiles what it looks at: no worker does it all
def report(name: str, arch: int) -> Report:
    """Registers, shared memory, spills and occupancy of each kernel of a file; and its code."""
    log, ptx, cubin = compiled(name, arch)
    check_ptx(ptx)
    kernels = resources(log, arch)
    if arch in sass.CARDS and sass.disassembler() is not None:
        for kernel, code in sass.disassembled(cubin).items():
            kernels[kernel] |= machine_code(kernel, code, arch, kernels[kernel]["occupancy"])
    return kernels


def machine_code(kernel: str, code: sass.Kernel, arch: int, occupancy: int) -> dict[str, int]:
    """Fences, accesses to local memory, and the percents of Little's law in flight."""
    assert code.float_atomics == 0, f"{kernel}: float atomic"
    found = {"fences": code.fences, "local": code.local}
    size = gathered_bytes(kernel)
    if size:
        threads = ARCHES[arch][0] * occupancy / 100
        found["little"] = round(100 * threads * code.under_way(size) / sass.wanted(arch))
    return found


def gathered_bytes(kernel: str) -> int:
    """Bytes of the loads that fill the time of a kernel, told by its name; 0 for the others."""
    match = re.match(r"(\w+?)_f(32|64)(?:_i\d\d)?_v(\d)$", kernel)
    if match is None:
        return 0
    item = 2 if match[1] == "chebyshev_half" else int(match[2]) // 8
    return item * int(match[3])


def resources(log: str, arch: int) -> Report:
    """What the log of the assembler says of each kernel."""
    kernels: Report = {}
    for part in log.split("Compiling entry function")[1:]:
        kernel = re.search(r"'(\w+)'", part)[1]
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        shared = int((re.search(r"(\d+) bytes smem", part) or [0, 0])[1])
        spills = sum(int(x) for x in re.findall(r"(\d+) bytes spill", part))
        threads = 512 if kernel.startswith("hadamard") else 256  # their __launch_bounds__
        kernels[kernel] = {
            "registers": registers,
            "shared": shared,
            "spills": spills,
            "occupancy": occupancy(arch, threads, registers, shared),
        }
    return kernels


needs_nvrtc = pytest.mark.skipif(
    nvrtc() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc"
)


def in_turn(name: str, arch: int) -> Any:
    """A file for a card: each file for one of them in every run, for all takes minutes."""
    always = arch == 80 or (arch == 120 and name in ("cg.cu", "ranks.cu"))
    return pytest.param(name, arch, marks=() if always else pytest.mark.long)


@needs_nvrtc
@pytest.mark.parametrize(("name", "arch"), [in_turn(f, arch) for arch in ARCHES for f in FILES])
def test_compiles_without_spills_at_full_occupancy(name: str, arch: int) -> None:
    table, found = json.loads(TABLE.read_text()), report(name, arch)
    slack = 0 if version() == table["nvrtc"] else 25
    assert found, f"{name} holds no kernel"
    for kernel, now in found.items():
        assert now["spills"] == 0, f"{kernel} for sm_{arch} spills {now['spills']} bytes"
        assert kernel in table["kernels"], (
            f"{kernel} is not in the table: see the head of this file"
        )
        before = table["kernels"][kernel]["occupancy"][f"sm_{arch}"]
        assert now["occupancy"] >= before - slack, (
            f"{kernel} for sm_{arch}: occupancy {now['occupancy']}%, the table has {before}%"
        )
        check_machine_code(f"{kernel} for sm_{arch}", now, table["kernels"][kernel], arch, slack)


def check_machine_code(what: str, now: Any, before: Any, arch: int, slack: int) -> None:
    """Nothing to compare where there is no disassembler."""
    if "fences" not in now:
        return
    assert now["local"] == 0, f"{what} has {now['local']} accesses to local memory"
    assert now["fences"] <= before["fences"], (
        f"{what}: {now['fences']} fences, the table has {before['fences']}"
    )
    if "little" in now:
        least = before["little"][f"sm_{arch}"]
        assert now["little"] >= least * (1 - slack / 100), (
            f"{what}: {now['little']}% of the bytes in flight, the table has {least}%"
        )


@pytest.mark.skipif(compiler() is None, reason="no g++, which lists the kernels of a file")
def test_table_has_no_other_kernels() -> None:
    names = {kernel for f in FILES for kernel in kernel_names(f)}
    assert set(json.loads(TABLE.read_text())["kernels"]) == names


def test_sources_are_complete_in_themselves() -> None:
    for path in KERNELS.glob("*.cu*"):
        text = path.read_text()
        assert "#include" not in text, f"{path.name}: NVRTC from pip finds no headers"
        assert text.startswith("// "), f"{path.name} must open with what it computes"


def test_occupancy_of_known_cases() -> None:
    assert occupancy(80, 256, 64, 8192) == 50
    assert occupancy(80, 256, 65, 8192) == 37
    assert occupancy(75, 512, 42, 37376) == 50
    assert occupancy(90, 256, 32, 0) == 100


def test_gate_sees_float_atomics_and_scalar_loads() -> None:
    bad = {
        "float atomic": ".visible .entry f(\natom.global.add.f32 %f1, [%rd1], %f2;",
        "local memory": ".visible .entry f(\nst.local.u32 [%rd1], %r1;",
        "no ld": ".visible .entry f_v4(\nld.global.f32 %f1, [%rd1];",
    }
    for message, ptx in bad.items():
        with pytest.raises(AssertionError, match=message):
            check_ptx(ptx)


def write_table() -> None:
    assert sass.disassembler(), "the table needs the disassembler: pip install nvidia-cuda-nvdisasm"
    keys = [(f, arch) for arch in ARCHES for f in FILES]
    with ProcessPoolExecutor(2) as pool:  # the compiler does one thing at a time in a process
        reports = dict(zip(keys, pool.map(report, *zip(*keys)), strict=True))
    lines = []
    for f in FILES:
        for kernel in sorted(reports[f, 80]):
            by_arch = {f"sm_{arch}": reports[f, arch][kernel] for arch in ARCHES}
            row = {
                key: {arch: found[key] for arch, found in by_arch.items()}
                for key in ("registers", "occupancy")
            }
            row["shared"] = max(found["shared"] for found in by_arch.values())
            row["spills"] = sum(found["spills"] for found in by_arch.values())
            read = [found for found in by_arch.values() if "fences" in found]
            row["fences"] = max(found["fences"] for found in read)
            if "little" in read[0]:
                row["little"] = {a: f["little"] for a, f in by_arch.items() if "little" in f}
            lines.append(f"  {json.dumps(kernel)}: {json.dumps(row)}")
    kernels = ",\n".join(lines)  # a line each, so that a diff shows which kernel has changed
    TABLE.write_text(f'{{"nvrtc": "{version()}", "kernels": {{\n{kernels}\n}}}}\n')


@pytest.mark.parametrize(
    "file", [pytest.param(f, marks=() if f == "cg.cu" else pytest.mark.long) for f in FILES]
)
def test_the_way_of_a_users_first_call(file: str) -> None:
    """CuPy adds options and headers of its own to what it gives the compiler."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    if nvrtc() is None or compiler() is None:
        pytest.skip("neither without NVRTC nor without g++, which lists the kernels of a file")
    command = [sys.executable, "-m", "tests.backends.cuda.compiled_by_cupy", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(file)


if __name__ == "__main__":
    write_table()
