"""A strict stand-in for CuPy, on NumPy and the CUDA emulator.

With it the whole package runs through `herta_gpu.backends.cuda` without a GPU.  It is stricter than
CuPy where CuPy is silent: kernel arguments must have the exact types, uninitialised memory is NaN,
indices out of range raise, a grid of no blocks raises, two streams that meet in an array raise.

    with installed() as ledger:
        backend = get_backend("cuda")
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from herta_gpu import backends
from tests.cuda_emulator import EmulatorError, load
from tests.cupy_standin import cusparse, functions, nccl, sparse
from tests.cupy_standin.device_array import ndarray
from tests.cupy_standin.ledger import LEDGER, Ledger
from tests.cupy_standin.streams import (
    Device,
    Event,
    Graph,
    Stream,
    current_device,
    get_elapsed_time,
)

FREE_BYTES = 8 << 30
L2_BYTES = 1 << 20
GPUS = [1]  # devices that this process sees
_FUNCTIONS = (
    *(
        "asarray",
        "from_dlpack",
        "asnumpy",
        "empty",
        "empty_like",
        "zeros",
        "zeros_like",
        "ones",
        "eye",
        "full",
    ),
    *("arange", "ascontiguousarray", "where", "clip", "take", "concatenate", "diag", "tril"),
    *("stack", "diff", "flatnonzero", "bincount", "cumsum", "searchsorted"),
    *("sort", "argsort", "argmax", "argmin", "count_nonzero", "sum", "mean"),
)
_ON_CUPY = ("herta_gpu.backends.cuda.backend", "herta_gpu.backends.cuda.nodes")
_OF_NCCL = ("available", "NCCL_", "NcclCommunicator", "get_unique_id", "group")
_OF_CUSPARSE = ("CUSPARSE_", "create", "destroy", "setStream", "spMM")


class RawKernel:
    """A kernel of the emulator, behind CuPy's way to launch it."""

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        types = self.module.types(self.name)
        if Stream.recording is not None:
            Stream.recording.append(lambda: self._run(grid, block, args, types))
        else:
            self._run(grid, block, args, types)
            LEDGER.add("launches")

    def _run(self, grid: Any, block: Any, args: Any, types: list[str]) -> None:
        held = [self._checked(i, a, types) for i, a in enumerate(args)]
        count = self.module.traffic if RawModule.variant == "count" else lambda: (0, 0)
        count()  # forget what was counted before the launch
        self.module.launch(self.name, tuple(grid), tuple(block), tuple(held), RawModule.order)
        moved = count()
        LEDGER.launched(self.name, moved)
        for array in held:  # tickets, the only uint32 arrays, must be ready for the next launch
            if isinstance(array, np.ndarray) and array.dtype == np.uint32 and array.any():
                raise EmulatorError(f"{self.name} left its tickets at {array}")

    def _checked(self, i: int, a: Any, types: list[str]) -> Any:
        if isinstance(a, ndarray):
            width = int(self.name.rpartition("_v")[2]) if "_v" in self.name else 1
            bytes_ = min(16, width * a.itemsize)
            if width > 1 and a.size and a.dtype.char in "fdH" and a.data.ptr % bytes_:
                raise EmulatorError(f"{self.name}, argument {i}: not aligned to {bytes_} bytes")
            return a._data  # type, contiguity and the number of arguments: the emulator looks
        if isinstance(a, np.ndarray) or a is None:
            raise TypeError(f"{self.name}, argument {i}: {type(a)} is not on the device")
        pointer = i < len(types) and types[i].endswith("*")
        if pointer and isinstance(a, np.uint64) and a == 0:
            return None  # a null pointer
        return a


class RawModule:
    """A kernel file; compiled, as in CuPy, when the first function is asked for."""

    variant, order = "plain", "forward"

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Any = None,
        jitify: bool = False,
    ) -> None:
        assert isinstance(options, tuple)
        self.code = code

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(load("", self.variant, self.code), name)


class _PinnedPool:
    """The pool of pinned memory: it keeps what uploads took until somebody frees it."""

    def free_all_blocks(self) -> None:
        LEDGER.staged = 0


class _Pool:
    """The memory pool: it never keeps what is freed."""

    limit = 0

    def free_bytes(self) -> int:
        return 0

    def used_bytes(self) -> int:
        return LEDGER.held

    def get_limit(self) -> int:
        return self.limit


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []  # a package: it may have submodules
    module.__spec__ = ModuleSpec(name, None)  # it counts as installed
    module.__dict__.update(members)
    return module


def build() -> dict[str, ModuleType]:
    """All modules of the stand-in, by name."""
    pool = _Pool()
    runtime = _module(
        "cupy.cuda.runtime",
        CUDARuntimeError=functions.CUDARuntimeError,
        getDeviceCount=lambda: GPUS[0],
        getDevice=current_device,
        deviceGetPCIBusId=lambda device: f"0000:{device:02x}:00.0",
        getDeviceProperties=lambda device: {"l2CacheSize": L2_BYTES, "name": b"emulator"},
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 13000,
        memGetInfo=lambda: (FREE_BYTES - LEDGER.held, FREE_BYTES),
        memcpyAsync=functions.memcpyAsync,
        memcpyDeviceToDevice=3,
        CUDA_R_32F=0,
        CUDA_R_64F=1,
    )
    profiler = _module(
        "cupy.cuda.profiler",
        start=lambda: LEDGER.add("recordings"),
        stop=lambda: LEDGER.add("recordings", -1),
    )
    device = _module("cupy.cuda.device", get_cusparse_handle=lambda: cusparse._HANDLE)
    names = [name for name in vars(nccl) if name[0] != "_" and name.startswith(_OF_NCCL)]
    between = _module("cupy.cuda.nccl", **{name: getattr(nccl, name) for name in names})
    cuda = _module(
        "cupy.cuda",
        Device=Device,
        runtime=runtime,
        profiler=profiler,
        device=device,
        Stream=Stream,
        Event=Event,
        get_elapsed_time=get_elapsed_time,
        Graph=Graph,
        PinnedMemory=functions.PinnedMemory,
        PinnedMemoryPointer=functions.PinnedMemoryPointer,
        set_allocator=functions.set_allocator,
        get_current_stream=lambda device_id=-1: Stream.current,
    )
    names = ("norm", "eigh", "cholesky", "qr", "svd", "solve", "inv")
    parts = {name: getattr(functions, name) for name in names}
    linalg = _module("cupy.linalg", **parts)
    cupy = _module(
        "cupy",
        ndarray=ndarray,
        RawModule=RawModule,
        inf=np.inf,
        cuda=cuda,
        linalg=linalg,
        get_default_memory_pool=lambda: pool,
        get_default_pinned_memory_pool=_PinnedPool,
        **{name: getattr(functions, name) for name in _FUNCTIONS},
        **{name: functions.ufunc(name) for name in functions.UFUNCS},
    )
    parts = {name: getattr(sparse, name) for name in ("csr_matrix", "coo_matrix")}
    cupyx_sparse = _module("cupyx.scipy.sparse", **parts)
    solve = functions.solve_triangular
    cupyx_linalg = _module("cupyx.scipy.linalg", solve_triangular=solve)
    cupyx_scipy = _module("cupyx.scipy", sparse=cupyx_sparse, linalg=cupyx_linalg)
    cupyx = _module("cupyx", scipy=cupyx_scipy, errstate=functions.errstate)
    names = [name for name in vars(cusparse) if name.startswith(_OF_CUSPARSE)]
    members = {name: getattr(cusparse, name) for name in names}
    library = _module("cupy_backends.cuda.libs.cusparse", **members)
    libraries = _module("cupy_backends.cuda.libs", cusparse=library)
    below = _module("cupy_backends.cuda", libs=libraries)
    modules = (
        _module("cupy_backends", cuda=below),
        below,
        libraries,
        library,
        cupy,
        cuda,
        runtime,
        device,
        between,
        profiler,
        linalg,
        cupyx,
        cupyx_scipy,
        cupyx_sparse,
        cupyx_linalg,
    )
    return {module.__name__: module for module in modules}


@contextmanager
def installed(variant: str = "plain") -> Iterator[Ledger]:
    """Make ``device="cuda"`` the stand-in within the block; after it, CuPy is what it was."""
    ours = ("cupy", "cupyx", *_ON_CUPY)
    saved = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name in ours or name.startswith(("cupy.", "cupyx.", "cupy_backends"))
    }
    sys.modules.update(build())
    RawModule.variant, before = variant, RawModule.variant
    Device(0).use()
    _forget_backends()
    functions.set_allocator()
    LEDGER.clear()
    try:
        yield LEDGER
    finally:
        RawModule.variant = before
        for name in [*build(), *_ON_CUPY]:
            sys.modules.pop(name, None)
        sys.modules.update(saved)
        _forget_backends()


def _forget_backends() -> None:
    backends._cuda.cache_clear()
    backends._cuda_is_usable.cache_clear()
