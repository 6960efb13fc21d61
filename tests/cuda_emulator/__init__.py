"""Runs the unmodified ``kernels/*.cu`` on the CPU.

g++ compiles a kernel file behind ``language.h`` of tests/cuda_device, whose ``scheduler.cpp`` runs
one fiber per CUDA thread; this module builds, loads and launches, on arrays of NumPy.  A launch
checks what CUDA never does: the number and the exact types of the arguments.  One launch at a time:
the scheduler is not thread-safe.

>>> from tests.cuda_emulator import load
>>> load("cg.cu").types("cg_direction_f32_v4")[:3]
['i8', 'i8', 'const f4*']
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.cuda_device.build import SOURCES
from tests.sharing import cache_folder, exclusive

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
ORDERS = ("forward", "reverse", "random")

_PARTS = {"scheduler.cpp": SOURCES, "count.cpp": HERE}
_COMMON = ["-std=c++17", "-O1", "-g1", "-fPIC", "-fno-strict-aliasing", "-Wall", "-DEMU_STRICT"]
_COMMON += ["-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-variable"]
VARIANTS = {
    "plain": [],
    "asan": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-fsanitize=thread"],
    "portable": ["-DEMU_PORTABLE"],  # ucontext instead of the x86-64 context switch
    "count": ["-fsanitize=thread"],  # the access hooks of TSan, linked to counters instead
}


class EmulatorError(RuntimeError):
    """A kernel broke a rule of CUDA, or was launched with the wrong arguments."""


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def kernel_text(name: str) -> str:
    """The text of a kernel file, as NVRTC gets it."""
    common, text = (KERNELS / "common.cuh").read_text(), (KERNELS / name).read_text()
    return f'#line 1 "common.cuh"\n{common}\n#line 1 "{name}"\n{text}'


def load(name: str, variant: str = "plain", text: str | None = None) -> Module:
    """`name` compiled for the CPU; `text` replaces what the file holds (for mutants)."""
    return _load(name, variant, kernel_text(name) if text is None else text)


@lru_cache
def _load(name: str, variant: str, text: str) -> Module:
    return Module(_build(text, variant))


def _run(command: list[str], text: str = "") -> str:
    # The runtime of a sanitizer, which a test loads into Python, would slow the compiler down.
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=own)
    if done.returncode:
        raise EmulatorError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def kernel_names(text: str) -> list[str]:
    """The names of all __global__ functions, macros expanded."""
    expanded = _run([_cxx(), "-E", "-P", "-x", "c++", "-"], text)
    head = r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\('
    return re.findall(head, expanded)


def _build(text: str, variant: str) -> Path:
    """The shared library of one kernel file, from the cache when nothing has changed."""
    own = (SOURCES / "language.h").read_text()
    own += "".join((folder / name).read_text() for name, folder in _PARTS.items())
    flags = [*_COMMON, *VARIANTS[variant]]
    macros = [flag for flag in flags if flag.startswith("-D")]

    def library(out: Path) -> None:
        at = out.parent
        exports = "".join(f"EMU_EXPORT({k})\n" for k in kernel_names(text))
        (at / "kernels.cpp").write_text(f"namespace {{\n{text}\n}}\n{exports}")
        header = ["-include", str(SOURCES / "language.h")]
        _compile([*flags, *header], at / "kernels.cpp", at / "kernels.o")
        parts = ["scheduler"] + ["count"] * (variant == "count")
        objects = [str(_part(f"{part}.cpp", own, macros)) for part in parts]
        link = [] if variant == "count" else VARIANTS[variant]
        _run([_cxx(), "-shared", *link, str(at / "kernels.o"), *objects, "-o", str(out)])

    return _cached(".so", [text, own, variant, *flags], library)


def _part(source: str, own: str, macros: list[str]) -> Path:
    """A part of the emulator itself, compiled once for all kernel files."""
    flags = [*_COMMON, *macros]
    file = _PARTS[source] / source
    return _cached(".o", [source, own, *flags], lambda out: _compile(flags, file, out))


def _cached(suffix: str, key: list[str], make: Callable[[Path], None]) -> Path:
    """The file that `make` writes, from the cache when `key` and the compiler are as before."""
    text = "\0".join([*key, _run([_cxx(), "--version"])])
    cache = cache_folder("cuda-emulator")
    file = cache / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}{suffix}"
    with exclusive(file.with_suffix(f"{suffix}.lock")):
        if not file.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                made = Path(scratch) / file.name
                make(made)
                made.rename(file)  # at once: a killed build leaves nothing half done
    return file


def _cxx() -> str:
    return compiler() or "g++"


def _compile(flags: list[str], source: Path, out: Path) -> None:
    _run([_cxx(), *flags, "-c", str(source), "-o", str(out)])


def _shared_arrays(library: Path) -> list[tuple[int, int]]:
    """(offset from emu_index, size) of each __shared__ array: the static variables of functions."""
    symbols = re.findall(r"^(\w+) (\w+) [bBdD] (\w+)$", _run(["nm", "-S", str(library)]), re.M)
    base = next(int(at, 16) for at, _, name in symbols if name == "emu_index")
    own = re.compile(r"_ZZ(?!.*emu_|.*EmuKernel)")
    return [(int(at, 16) - base, int(size, 16)) for at, size, name in symbols if own.match(name)]


class Module:
    """A kernel file, compiled and loaded."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.emu_message.restype = ctypes.c_char_p
        base = ctypes.addressof(ctypes.c_char.in_dll(self._library, "emu_index"))
        pairs = [number for at, size in _shared_arrays(library) for number in (base + at, size)]
        shared = (ctypes.c_ulonglong * len(pairs))(*pairs)
        self._library.emu_prepare(shared, len(pairs) // 2, ctypes.c_ulonglong(0), False, False)

    @lru_cache  # noqa: B019 - modules live as long as the process
    def types(self, kernel: str) -> list[str]:
        """The argument types of `kernel`: f4, i8, const f8*, ..."""
        function = getattr(self._library, f"{kernel}_types")
        function.restype = ctypes.c_char_p
        return function().decode().split(",")[:-1]

    def launch(
        self,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        order: str = "forward",
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """Run `kernel`; with `blocks` only these of the grid, counted along x first."""
        types = self.types(kernel)
        if len(types) != len(args):
            raise EmulatorError(f"{kernel} takes {len(types)} arguments, not {len(args)}")
        held = [_argument(f"{kernel}, argument {i}", types[i], a) for i, a in enumerate(args)]
        pointers = (ctypes.c_void_p * len(held))(*[h.ctypes.data for h in held])
        first, last = blocks or (0, 2**62)
        status = getattr(self._library, f"{kernel}_run")(
            (ctypes.c_uint * 3)(*_three(grid)),
            (ctypes.c_uint * 3)(*_three(block)),
            ORDERS.index(order),
            ctypes.c_uint(7),
            ctypes.c_longlong(first),
            ctypes.c_longlong(last),
            pointers,
        )
        if status:
            raise EmulatorError(f"{kernel}: {self._library.emu_message().decode()}")

    def traffic(self) -> tuple[int, int]:
        """Bytes that kernels read and wrote in global memory since the last call ("count")."""
        counts = (ctypes.c_ulonglong * 2)()
        self._library.emu_traffic(counts)
        return counts[0], counts[1]


def _three(shape: tuple[int, ...]) -> tuple[int, ...]:
    if any(size < 1 for size in shape):
        raise EmulatorError(f"a launch of {shape}: every size must be at least 1")
    return (*shape, 1, 1)[:3]


def _argument(where: str, expected: str, value: Any) -> Any:
    """`value` as a NumPy array that holds what CUDA would copy to the device."""
    if expected.endswith("*"):
        if value is None:
            return np.zeros(1, np.uint64)
        if not isinstance(value, np.ndarray):
            raise EmulatorError(f"{where}: {expected} needs an array, not {type(value).__name__}")
        target = expected[:-1].removeprefix("const ")
        if value.dtype.str[1:] != target or not value.flags.c_contiguous:
            raise EmulatorError(f"{where}: {expected} got {value.dtype}, strides {value.strides}")
        if not expected.startswith("const") and not value.flags.writeable:
            raise EmulatorError(f"{where}: {expected} got a read-only array")
        return np.array([value.ctypes.data], np.uint64)
    # CuPy sends a Python int as int64 and a Python float as float64, whatever the kernel takes.
    scalar = value if isinstance(value, np.generic) else np.asarray(value)[()]
    if isinstance(value, np.ndarray) or scalar.dtype.str[1:] != expected:
        raise EmulatorError(f"{where}: {expected} got {scalar.dtype}")
    return np.array([scalar])
