"""Kernels for the device: what CuPy hands to its compiler as source, g++ compiles.

CuPy's own kernels and those of `RawModule` come through one private function of
`cupy.cuda.compiler`, which is replaced by `compile_module`.  NVRTC is neither loaded nor asked.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.cuda_device.build import SOURCES, NotBuiltError, compiler, compiler_version, run
from tests.sharing import cache_folder, exclusive

HEADERS = SOURCES / "include"
_COMMON = [
    *("-std=c++17", "-w", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-fno-gnu-unique", "-fvisibility=hidden"),  # modules do not see each other
]
_VARIANTS = {
    "plain": ["-O1"],
    "asan": ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
             "-fno-sanitize=alignment,vptr"],
    "tsan": ["-O1", "-g1", "-fsanitize=thread"],
    "count": ["-O1", "-g1", "-fsanitize=thread"],  # its hooks, with counters behind them
}  # fmt: skip
VARIANT = os.environ.get("CUDA_DEVICE_SANITIZE", "plain")
COUNTED = "-DEMU_COUNT"  # the option of a module whose bytes are counted
_OF_CUPY = ("cupy/complex.cuh", "cupy/carray.cuh", "cupy/atomics.cuh", "cupy/math_constants.h")

_KERNEL = re.compile(
    r"__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+"
    r"(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\("
)
_TEMPLATE = re.compile(r"template\s*<[^;{}]*>\s*(?:static|inline|\s)*$")
_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s+)?([\w:<>, ]+?)\s+(\w+)\s*\[\s*\]\s*;"
)
_kernels: dict[str, dict[str, list[str]]] = {}  # of each source: the argument types by name


class Kind(NamedTuple):
    """How a source is compiled: a sanitizer watches our kernels; CuPy's are as always."""

    of_cupy: bool
    variant: str

    @property
    def flags(self) -> list[str]:
        strict = [] if self.of_cupy else ["-DEMU_STRICT"]
        return [*_COMMON, *_VARIANTS[self.variant], *strict]


class _Entry(ctypes.Structure):
    """EmuEntry of language.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("body", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("types", ctypes.c_char_p),
    ]


def compile_module(
    source: str, options: Sequence[str] = (), *, name_expressions: Any = None, **_: Any
) -> Any:
    """A module of CuPy, from the cache when it has been compiled before."""
    from cupy.cuda import function
    from cupy.cuda.compiler import CompileException

    of_cupy, labels = source.startswith("#include <cupy/"), sorted(name_expressions or ())
    kept = [option for option in options if option.startswith(("-I", "-D"))]
    kind = Kind(of_cupy, "plain" if of_cupy else "count" if COUNTED in kept else VARIANT)
    key = _key(source, *kept, *kind.flags, *labels)
    image = cache_folder("cuda-device") / f"{key}.image"
    with exclusive(image.with_suffix(".lock")):
        if not image.exists():
            try:
                _compile(source, kept, labels, kind, image)
            except NotBuiltError as error:
                text = str(error)
                raise CompileException(text, source, str(image), options, "g++") from None
    module = function.Module()
    module.load(image.read_bytes() + b"\0")
    if not of_cupy:
        _kernels[source] = _types(image.with_suffix(".so"))
    if labels:
        module._set_mapping({label: label for label in labels})
    return module


def kernel_types(source: str, name: str) -> list[str]:
    """The argument types of a kernel that has been compiled: "f4", "const i8*", ..."""
    return _kernels[source][name]


def _types(library: Path) -> dict[str, list[str]]:
    found, at = {}, 0
    table = (_Entry * 4096).in_dll(ctypes.CDLL(str(library)), "emu_entries")
    while table[at].name is not None:
        found[table[at].name.decode()] = table[at].types.decode().split(",")[:-1]
        at += 1
    return found


def _key(*parts: str) -> str:
    own = [f.read_text() for f in (SOURCES / "language.h", *sorted(HEADERS.glob("*.h")))]
    own += [Path(__file__).read_text(), compiler_version()]
    return hashlib.sha256("\0".join([*parts, *own]).encode()).hexdigest()[:24]


def _compile(source: str, options: list[str], labels: list[str], kind: Kind, image: Path) -> None:
    """A shared library with a table of its kernels, and the text that the device loads it by."""
    names = [*dict.fromkeys(find_kernels(source, options, kind.of_cupy)), *labels]
    text = _DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(emu_dynamic_shared());", source)
    text = f'#line 1 "kernel.cu"\n{text}\n'
    if "#include" not in source:  # local symbols: AddressSanitizer fences only those
        text = f"namespace {{\n{text}\n}}\n"
    entries = "".join(f"EMU_ENTRY({json.dumps(name)}, {name})\n" for name in names)
    export = 'extern "C" __attribute__((visibility("default")))'
    table = (
        f"{export} EmuEntry emu_entries[] = {{\n{entries}{{nullptr, nullptr, nullptr, nullptr}}}};"
    )
    cpp, library = image.with_suffix(".cpp"), image.with_suffix(".so")
    cpp.write_text(f"{text}{table}\n")
    compile_ = [compiler() or "g++", *kind.flags, *options, *_header(kind, options)]
    if kind.variant == "count":  # linked without TSan, or that would be loaded
        made = image.with_suffix(".o")
        run([*compile_, "-c", str(cpp), "-o", str(made)])
        run([compiler() or "g++", "-shared", str(made), "-o", str(library)])
    else:
        run([*compile_, "-shared", str(cpp), "-o", str(library)])
    symbols = run(["nm", "-S", str(library)])
    found = re.findall(r"^(\w+) (\w+) [bBdDuV] (\w+)", symbols, re.M)
    base = next(int(at, 16) for at, _, name in found if name == "emu_entries")
    own = re.compile(r"_ZZ(?!.*emu_|.*EmuKernel)")  # the static variables of functions
    shared = [f"{int(at, 16)} {int(size, 16)}" for at, size, name in found if own.match(name)]
    plain = not re.search(r" U emu_collective\b", symbols) and kind.variant not in ("tsan", "count")
    part = image.with_suffix(".part")
    words = ["cuda_device", str(library), f"{kind.of_cupy:d}", f"{plain:d}", str(base), *shared]
    part.write_text(" ".join(words))
    part.rename(image)


def find_kernels(source: str, options: list[str], of_cupy: bool = False) -> list[str]:
    """The kernels of a source, templates aside; in ours macros make some of the names."""
    if not of_cupy and "#" in source:
        source = re.sub(r"(?m)^\s*#\s*include.*$", "", source)
        macros = [option for option in options if option.startswith("-D")]
        source = run([compiler() or "g++", "-E", "-P", "-x", "c++", *macros, "-"], source)
    found = _KERNEL.finditer(source)
    return [m[1] for m in found if not _TEMPLATE.search(source, 0, m.start())]


def _header(kind: Kind, options: list[str]) -> list[str]:
    """`-include` of language.h, with CuPy's headers for CuPy's kernels, precompiled once."""
    text = f'#include "{SOURCES}/language.h"\n'
    flags = [*kind.flags, *(o for o in options if kind.of_cupy and o.startswith("-I"))]
    text += "".join(f"#include <{name}>\n" for name in _OF_CUPY if kind.of_cupy)
    folder = cache_folder("cuda-device") / f"header-{_key(text, *flags)}"
    folder.mkdir(exist_ok=True)
    header = folder / "all.h"
    with exclusive(folder / "lock"):
        if not header.exists():
            part = folder / "all.part.h"
            part.write_text(text)
            gch = ["-x", "c++-header", str(part), "-o", f"{header}.gch"]
            run([compiler() or "g++", *flags, *gch])
            part.rename(header)
    return ["-include", str(header)]
