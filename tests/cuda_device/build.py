"""Builds the device, by g++ and from the package index: `python -m tests.cuda_device build`.

`libcuda.so.1` is the device.  `libcublas`, `libcusolver`, `libcusparse` and `libnccl` are what CuPy
calls of them, on SciPy's LAPACK.  One module of CuPy, `cupy_backends.cuda.api.runtime`, has
NVIDIA's runtime linked into it: it is built anew from CuPy's sdist, against this device.  Whatever
else CuPy's modules would call becomes a stub that refuses.

Nothing of what is fetched is kept in the repository, and nothing is installed into the environment:
the headers and Cython go to a folder of their own, which outlives the run as the build does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from pathlib import Path

from tests.sharing import cache_folder, exclusive

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "cpp"
CUPY = "14.2.0"  # the hooks into it are private, so it is this version and no other
PACKAGES = (
    "cython==3.2.4",
    "nvidia-cuda-runtime==13.0.96",  # of these three the headers only
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-profiler-api==13.0.85",
)
DEVICE = ("streams", "memory", "kernels", "properties", "scheduler", "count")
# Library, its sources, the module of CuPy that calls it.
LIBRARIES = (
    ("libcublas.so.13", ("cublas",), "cublas"),
    ("libcusolver.so.12", ("cusolver",), "cusolver"),
    ("libcusparse.so.12", ("cusparse",), "cusparse"),
    ("libnccl.so.2", ("nccl",), "nccl"),
    ("libcurand.so.10", (), "curand"),
)
LOADED_BY_NAME = ("libcublasLt.so.13", "libnvJitLink.so.13", "libcufft.so.12")  # and never called
FLAGS = ["-std=c++17", "-O2", "-g1", "-Wall", "-fPIC", "-fvisibility=hidden"]


class NotBuiltError(RuntimeError):
    """Why there is no device on this machine."""


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def run(command: list[str], text: str = "", **more: str) -> str:
    # The runtime of a sanitizer, which a test loads into Python, would slow the compiler down.
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=own | more)
    if done.returncode:
        raise NotBuiltError(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


@cache
def compiler_version() -> str:
    return run([compiler() or "g++", "--version"])


def missing() -> str | None:
    """What this machine lacks, before anything is fetched; None: nothing that can be seen."""
    if compiler() is None:
        return "g++ is not installed"
    if not sys.platform.startswith("linux"):
        return "the device is built for Linux only"
    found = {name: _version(name) for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy")}
    if found["cupy-cuda13x"] != CUPY:
        there = next((f"{name} {v}" for name, v in found.items() if v), "no CuPy")
        return f"the device is written for cupy-cuda13x {CUPY}, and {there} is installed"
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def build() -> Path:
    """The folder of the libraries, from the cache when nothing has changed."""
    why = missing()
    if why is not None:
        raise NotBuiltError(why)
    texts = [f.read_text() for f in (*sorted(SOURCES.rglob("*.[ch]*")), Path(__file__))]
    texts += [compiler_version(), sys.version, str(_site())]
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    cache_ = cache_folder("cuda-device")
    folder = cache_ / f"device-{key}"
    with exclusive(cache_ / "device.lock"):
        if not folder.exists():
            tools = _tools(cache_)
            with tempfile.TemporaryDirectory(dir=cache_) as scratch:
                _build(Path(scratch), tools)
                shutil.copytree(scratch, folder.with_suffix(".part"), dirs_exist_ok=True)
            folder.with_suffix(".part").rename(folder)  # at once: a killed build leaves nothing
    return folder


# ---- what is fetched --------------------------------------------------------------------------


def _tools(cache_: Path) -> Path:
    """A folder with Cython, the headers, and the part of CuPy's sdist that is compiled."""
    key = hashlib.sha256("\0".join([*PACKAGES, CUPY, sys.version]).encode()).hexdigest()[:16]
    folder = cache_ / f"tools-{key}"
    if folder.exists():
        return folder
    pip = [sys.executable, "-m", "pip", "--quiet", "--retries", "1", "--timeout", "60"]
    with tempfile.TemporaryDirectory(dir=cache_) as scratch:
        try:
            run([*pip, "install", "--no-deps", "--target", f"{scratch}/tools", *PACKAGES])
            # pip looks at the metadata of an sdist, and CuPy's asks for a toolkit but with this.
            source = ["--no-deps", "--no-binary", "cupy", f"cupy=={CUPY}", "-d", f"{scratch}/sdist"]
            run([*pip, "download", *source], CUPY_INSTALL_USE_STUB="1")
        except NotBuiltError as error:
            said = str(error).strip().splitlines()[-1]
            wanted = ", ".join([*PACKAGES, f"the sdist of CuPy {CUPY}"])
            raise NotBuiltError(f"pip cannot fetch {wanted} ({said})") from None
        with tarfile.open(next(Path(scratch).glob("sdist/*.tar.gz"))) as archive:
            wanted_files = [m for m in archive.getmembers() if "/cupy_backends/" in m.name]
            archive.extractall(f"{scratch}/tools", wanted_files, filter="data")
        Path(scratch, "tools", f"cupy-{CUPY}").rename(Path(scratch, "tools", "cupy-sdist"))
        Path(scratch, "tools").rename(folder)
    return folder


# ---- what is compiled -------------------------------------------------------------------------


def _site() -> Path:
    """Where CuPy is installed."""
    found = importlib.util.find_spec("cupy_backends")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def _build(out: Path, tools: Path) -> None:
    headers = f"-I{tools / 'nvidia' / 'cu13' / 'include'}"
    sources = [*DEVICE, "thrust", *(part for _, parts, _ in LIBRARIES for part in parts)]
    with ThreadPoolExecutor(2) as pool:
        module = pool.submit(_compile_module_of_cupy, out, tools, headers)
        list(pool.map(lambda name: _compile(out, SOURCES / f"{name}.cpp", headers), sources))
        module.result()
    device = [f"{name}.o" for name in DEVICE]
    _link(out, "libcuda.so.1", [*device, "-ldl"])
    _link(out, "libthrust.so", ["thrust.o", "-l:libcuda.so.1", "-ldl"])
    for name, parts, caller in LIBRARIES:
        _link_library(out, name, parts, caller)
    for name in LOADED_BY_NAME:
        _link(out, name, [_stubs(out, name, [])])
    _link_runtime(out)


def _compile(out: Path, source: Path, *flags: str) -> None:
    """The object file of a source, from the cache when neither it nor our headers have changed."""
    texts = [f.read_text() for f in (source, *sorted(SOURCES.glob("*.h")))]
    text = "\0".join([*texts, *FLAGS, *flags, compiler_version()])
    kept = cache_folder("cuda-device") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.o"
    made = out / f"{source.stem}.o"
    if not kept.exists():
        run([compiler() or "g++", *FLAGS, *flags, "-c", str(source), "-o", str(made)])
        made.rename(kept)
    shutil.copyfile(kept, made)


def _link(out: Path, name: str, parts: list[str]) -> None:
    end = [f"-Wl,-soname,{name}", f"-L{out}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
    files = [str(out / part) if part.endswith(".o") else part for part in parts]
    run([compiler() or "g++", "-shared", "-o", str(out / name), *end, *files])


def _compile_module_of_cupy(out: Path, tools: Path, headers: str) -> None:
    """cupy_backends.cuda.api.runtime, from Cython's language to an object file."""
    sdist, made = tools / "cupy-sdist", out / "runtime_module.cpp"
    constants = {
        "CUPY_CUDA_VERSION": "13000", "CUPY_HIP_VERSION": "0", "CUPY_USE_CUDA_PYTHON": "False",
        "CUPY_CUFFT_STATIC": "False", "CUPY_CYTHON_VERSION": '"3.2.4"',
    }  # fmt: skip
    known = ",".join(f"{name}={value}" for name, value in constants.items())
    folder = sdist / "cupy_backends" / "cuda" / "api"
    cython = [sys.executable, "-m", "cython", "-3", "--cplus", "-E", known, "-I", str(sdist)]
    run([*cython, "-o", str(made), str(folder / "runtime.pyx")], PYTHONPATH=str(tools))
    python = f"-I{sysconfig.get_paths()['include']}"
    _compile(out, made, headers, python, f"-I{folder}", "-w", "-O1", "-fvisibility=default")


def _link_runtime(out: Path) -> None:
    """Our build of CuPy's module, and stubs for what it imports and the device does not have."""
    wanted = re.findall(r"^ +U (cuda\w+)$", run(["nm", str(out / "runtime_module.o")]), re.M)
    stubs = _stubs(out, "libcudart", sorted({*wanted} - _exports(out / "libcuda.so.1")))
    _link(out, "libcudart.so.13", [stubs, "-l:libcuda.so.1"])
    name = f"runtime{sysconfig.get_config_var('EXT_SUFFIX')}"
    _link(out, name, ["runtime_module.o", "-l:libcudart.so.13", "-l:libcuda.so.1"])


def _link_library(out: Path, name: str, parts: tuple[str, ...], caller: str) -> None:
    """A library, with a stub for every call of its module of CuPy that it does not have."""
    module = next((_site() / "cuda" / "libs").glob(f"{caller}.*.so"))
    listed = run(["nm", "-D", str(module)])
    versioned = rf"^ +U (\w+)@{re.escape(name)}$"
    wanted = re.findall(versioned, listed, re.M) or re.findall(r"^ +U (nccl\w+)$", listed, re.M)
    have = {found for part in parts for found in _exports(out / f"{part}.o", "T")}
    stubs = _stubs(out, name, sorted({*wanted} - have))
    script = out / f"{name}.map"  # CuPy's modules ask for symbols of this version
    script.write_text(f"{name} {{ global: *; }};\n")
    objects = [f"{part}.o" for part in parts]
    end = [stubs, f"-Wl,--version-script={script}", "-l:libcuda.so.1", "-ldl"]
    _link(out, name, [*objects, *end])


def _stubs(out: Path, name: str, functions: list[str]) -> str:
    """An object file in which each of these functions refuses."""
    source = out / f"{name}-stubs.cpp"
    export = 'extern "C" __attribute__((visibility("default"))) int'
    lines = [f'{export} {f}() {{ device_refuse("{f}"); return 15; }}' for f in functions]
    source.write_text("\n".join(['extern "C" int device_refuse(const char*);', *lines, ""]))
    _compile(out, source)
    return f"{source.stem}.o"


def _exports(file: Path, kind: str = "") -> set[str]:
    flags = [] if kind else ["-D", "--defined-only"]
    return {
        line.split()[2]
        for line in run(["nm", *flags, str(file)]).splitlines()
        if len(line.split()) == 3 and line.split()[1] in (kind or "TBD")
    }
