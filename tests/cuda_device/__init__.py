"""A CUDA device for the real CuPy, made of g++: what runs where there is no GPU.

CuPy's own code runs unmodified, from `cupy.asarray` down to the calls of CUDA; below them
`libcuda.so.1` of this folder stands for the driver and the runtime, other libraries for cuBLAS,
cuSOLVER, cuSPARSE and NCCL, and g++ for NVRTC.  `activate` must come before CuPy is imported:

    from tests import cuda_device
    device = cuda_device.activate()
    import cupy

`python -m pytest -m gpu` does so by itself where there is no GPU.  Settings of the environment:

CUDA_DEVICE=eager (default)   work is done when it is given; memory comes from CuPy's pool
CUDA_DEVICE=lazy              nothing is done before somebody waits for it, and then only what that
                              wait orders; every array has memory and a clock of its own, and two
                              streams that meet in one without an order are refused
CUDA_DEVICE_MEMORY=8GB        memory of a device
CUDA_DEVICE_PINNED=<bytes>    pinned memory that the host has at most
CUDA_DEVICE_COUNT=1           devices
CUDA_DEVICE_ORDER=forward     of threads and blocks; or reverse, random
CUDA_DEVICE_GUARD=1           every array has memory of its own, with a page behind that nobody may
                              touch
CUDA_DEVICE_SANITIZE=asan     our kernels under a sanitizer (asan or tsan), whose runtime must be
                              preloaded; every array has memory of its own

`Device` has more that tests use: settings that change while they run, bytes that kernels move,
and bugs put into kernels.

What it does not show: that NVRTC accepts the sources (tests/backends/cuda/test_nvrtc.py does), its
arithmetic (no fused multiply-add, no flush to zero here), NVIDIA's libraries themselves, speed, and
races between blocks, which run one after another.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tests.cuda_device.build import LIBRARIES, LOADED_BY_NAME, NotBuiltError, build
from tests.cuda_device.compiler import COUNTED, HEADERS, compile_module, kernel_types

__all__ = ["Device", "NotBuiltError", "activate", "active", "clocked", "has_gpu"]


@cache
def has_gpu() -> bool:
    """Whether this machine has a GPU, whose driver must then not be replaced."""
    if active() is not None:
        return False
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    except OSError:
        return False
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return not failed and count.value > 0


_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_active: list[Device] = []


def active() -> Device | None:
    """The device of this process, if there is one."""
    return _active[-1] if _active else None


def activate() -> Device:
    """Make the device the one that CuPy will find; NotBuiltError says why it cannot be had."""
    if not _active:
        if "cupy" in sys.modules:
            raise RuntimeError("CuPy has been imported already: activate the device before.")
        folder = build()
        _active.append(Device(folder))
        _hook_cupy(folder)
    return _active[-1]


class Device:
    """The device of this process: its ledger, its memory, what it refused."""

    def __init__(self, folder: Path) -> None:
        scipy = importlib.util.find_spec("scipy")
        assert scipy is not None
        assert scipy.origin is not None
        libraries = Path(scipy.origin).parents[1] / "scipy.libs"
        os.environ["CUDA_DEVICE_LAPACK"] = str(next(libraries.glob("libscipy_openblas-*.so")))
        os.environ.setdefault("CUPY_ACCELERATORS", "")  # cub holds compiled kernels of its own
        names = ["libcuda.so.1", "libcudart.so.13", *(name for name, _, _ in LIBRARIES)]
        loaded = [
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
            for name in (*names, *LOADED_BY_NAME)
        ]
        self._library = loaded[0]
        for name in ("device_ledger", "device_refusals"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self._library.device_setting.restype = ctypes.c_longlong
        self._library.device_setting.argtypes = [ctypes.c_char_p, ctypes.c_longlong, ctypes.c_int]
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        for name in ("device_begin_array", "device_disown"):
            getattr(self._library, name).argtypes = [pointer]
        self._library.device_adopt.argtypes = [pointer, size, pointer]
        self._library.device_stream_number.argtypes = [pointer]

    # ---- what it was asked for ----------------------------------------------------------
    def ledger(self) -> dict[str, Any]:
        """Counts since `clear`: launches, copies, bytes, waits, ..., and launches by kernel."""
        return json.loads(self._library.device_ledger())

    def clear(self) -> None:
        self._library.device_clear_ledger()

    def refusals(self) -> list[str]:
        """What was refused since the last call; a failed kernel is forgotten with it."""
        return self._library.device_refusals().decode().splitlines()

    def pending(self) -> int:
        """How much work is queued, in all streams."""
        return self._library.device_pending()

    def synchronize(self) -> None:
        """Do all that is queued."""
        self._library.cudaDeviceSynchronize()

    def stream_number(self, stream: Any) -> int:
        """By which errors name a stream."""
        return self._library.device_stream_number(stream.ptr)

    # ---- settings -----------------------------------------------------------------------
    def set(self, **settings: int) -> dict[str, int]:
        """Change settings by name (device.h lists them); gives what they were before."""
        return {
            name: self._library.device_setting(name.encode(), value, 1)
            for name, value in settings.items()
        }

    @contextmanager
    def having(self, **settings: int) -> Iterator[None]:
        """With other settings for a while."""
        before = self.set(**settings)
        try:
            yield
        finally:
            self.set(**before)

    @property
    def is_lazy(self) -> bool:
        return bool(self._library.device_setting(b"lazy", 0, 0))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the bytes that our kernels read and write: `traffic` of the ledger."""
        RawModule.options = (COUNTED,)
        try:
            yield
        finally:
            RawModule.options = ()

    @contextmanager
    def changed(self, old: str, new: str) -> Iterator[None]:
        """Replace a part of the source that occurs once in our kernels: a bug, on purpose."""
        RawModule.change = (old, new)
        try:
            yield
        finally:
            RawModule.change = None

    # ---- memory -------------------------------------------------------------------------
    @cached_property
    def _arrays(self) -> Any:
        """CuPy's allocator of C functions, with those of the device."""
        import cupy

        functions = (self._library.device_malloc_array, self._library.device_free_array)
        addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in functions]
        return cupy.cuda.CFunctionAllocator(0, *addresses, self)

    def allocate(self, size: int) -> Any:
        """An allocator for CuPy: every array has a block with a clock of its own."""
        import cupy

        self._library.device_begin_array(cupy.cuda.get_current_stream().ptr)
        found = self._arrays.malloc(size)
        status = self._library.device_status_of_array()
        if status == _OUT_OF_MEMORY:
            raise cupy.cuda.memory.OutOfMemoryError(size, self.ledger()["held"])
        if status:
            cupy.cuda.runtime.check_status(status)
        return found

    @contextmanager
    def foreign(self, array: Any, stream: Any = None) -> Iterator[None]:
        """`array` of NumPy, as memory of the device that another library made on a stream."""
        at = array.ctypes.data
        self._library.device_adopt(at, array.nbytes, 0 if stream is None else stream.ptr)
        try:
            yield
        finally:
            self._library.device_disown(at)


@contextmanager
def clocked(device: Device) -> Iterator[None]:
    """A lazy device with a clock for every array, and nothing left over at the end."""
    import cupy

    before, allocator = device.set(lazy=True), cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(device.allocate)
    try:
        yield
    finally:
        said = device.refusals()
        gc.collect()  # what a test left behind goes before all is waited for
        cupy.cuda.runtime.deviceSynchronize()
        device.refusals()
        cupy.cuda.set_allocator(allocator)
        device.set(**before)
    assert not said, said


# ---- what is put in the place of parts of CuPy --------------------------------------------------


def _hook_cupy(folder: Path) -> None:
    import cuda.pathfinder

    sys.meta_path.insert(0, _Finder(folder))
    cuda.pathfinder.find_nvidia_header_directory = lambda name: str(HEADERS)


class _Finder:
    """Finds our build of the modules that hold NVIDIA's code, and hooks the compiler."""

    def __init__(self, folder: Path) -> None:
        self.files = {
            "cupy_backends.cuda.api.runtime": next(folder.glob("runtime.cpython*.so")),
            "cupy.cuda.thrust": Path(__file__).parent / "thrust.py",
        }
        self.after = {"cupy.cuda.compiler": _hook_compiler, "cupy": _hook_modules}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in self.files:
            return importlib.util.spec_from_file_location(name, str(self.files[name]))
        if name not in self.after:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute: Any = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.after[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _hook_compiler(compiler: Any) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("NVRTC is no part of this device.")

    compiler._compile_module_with_cache = compile_module
    compiler._compile_using_nvrtc_no_warning = compiler.compile_using_nvrtc = never


def _hook_modules(cupy: Any) -> None:
    """Check launches of `RawModule`; on a lazy device, give every array a clock."""
    RawModule.of_cupy, cupy.RawModule = cupy.RawModule, RawModule
    device, alone = active(), ("CUDA_DEVICE_GUARD", "CUDA_DEVICE_SANITIZE")
    if device is not None and (device.is_lazy or any(name in os.environ for name in alone)):
        cupy.cuda.set_allocator(device.allocate)


class RawModule:
    """CuPy's, with launches that are checked against the types of the kernel.

    Which variant of a kernel runs is decided at each launch, so that it does not matter who holds
    the module.
    """

    of_cupy: Any
    options: tuple[str, ...] = ()  # of all modules, beside their own
    change: tuple[str, str] | None = None

    def __init__(self, code: str, options: tuple[str, ...] = (), **more: Any) -> None:
        self._code, self._options, self._more = code, options, more
        self._variants: dict[Any, Any] = {}

    def _variant(self) -> tuple[str, Any]:
        """The source, as it is to be now, and its module."""
        key, code = (self.change, self.options), self._code
        if self.change is not None and self.change[0] in code:
            assert code.count(self.change[0]) == 1, f"{self.change[0]!r} is there more than once"
            code = code.replace(*self.change)
        if key not in self._variants:
            options = (*self._options, *self.options)
            self._variants[key] = self.of_cupy(code=code, options=options, **self._more)
        return code, self._variants[key]

    def get_function(self, name: str) -> Any:
        found: dict[Any, Any] = {}

        def kernel() -> Any:
            code, module = self._variant()
            if module not in found:
                function = module.get_function(name)
                function.attributes  # noqa: B018  compiles it
                found[module] = function, kernel_types(code, name)
            return found[module]

        def launch(grid: Any, block: Any, args: Any, **more: Any) -> None:
            function, types = kernel()
            check_arguments(name, types, args)
            function(grid, block, args, **more)

        kernel()  # whoever asks for it wants to know whether it compiles
        return launch


def check_arguments(kernel: str, types: list[str], args: Any) -> None:
    """What CUDA never looks at: the number of arguments, and the exact type of each."""
    import cupy

    if len(types) != len(args):
        raise TypeError(f"{kernel} takes {len(types)} arguments, not {len(args)}")
    width = int(kernel.rpartition("_v")[2]) if "_v" in kernel else 1
    for i, (wanted, given) in enumerate(zip(types, args, strict=True)):
        where = f"{kernel}, argument {i}"
        if not wanted.endswith("*"):
            if not isinstance(given, np.generic) or given.dtype.str[1:] != wanted:
                raise TypeError(f"{where}: {wanted} got {_described(given)}")
        elif isinstance(given, np.uint64) and given == 0:
            continue  # a null pointer
        elif not isinstance(given, cupy.ndarray) or not given.flags.c_contiguous:
            raise TypeError(f"{where}: {wanted} needs an array, not {_described(given)}")
        elif given.dtype.str[1:] != wanted[:-1].removeprefix("const "):
            raise TypeError(f"{where}: {wanted} got an array of {given.dtype}")
        elif given.size and given.dtype.char in "fdH" and width > 1:
            at_once = min(16, width * given.itemsize)
            if given.data.ptr % at_once:
                raise TypeError(f"{where}: not aligned to {at_once} bytes, which are read at once")


def _described(value: Any) -> str:
    return f"{type(value).__name__} {getattr(value, 'dtype', '')}".strip()
