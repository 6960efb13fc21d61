"""The primitives as CUDA kernels, through CuPy: the only module that imports it.

The kernels are in ``kernels/*.cu``, one module per file, compiled when first used and kept by
CuPy's cache.  A kernel gets bare pointers and unchecked scalars, so every launch goes through
`_launch`, which wants C-contiguous device arrays and NumPy scalars of the exact type where that is
not of 64 bits.

Everything runs on the current stream, which is the backend's own within `working`.
`# synchronize!` marks each line that waits for the device.  Memory comes from CuPy's current
allocator; RMM's is plugged in by the line
``cupy.cuda.set_allocator(rmm.allocators.cupy.rmm_cupy_allocator)``, with a ``memory_budget``, since
a device whose memory RMM holds looks full.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import cupy
import cupyx
import cupyx.scipy.sparse
import numpy as np

from herta_gpu.backends.base import Array, CGState, Halves, Laplacian
from herta_gpu.backends.cuda import cugraph
from herta_gpu.backends.cuda.algorithm2 import Algorithm2
from herta_gpu.backends.cuda.device import (
    MAX_BLOCKS,
    NULL,
    DeviceLaplacian,
    aligned,
    blocks,
    by_precision,
    column_shape,
    named_stream,
    padded,
    pivoted_cholesky,
    roundings,
    segment_length,
    source,
    suffix,
    tell_if_long,
    vector_width,
)
from herta_gpu.backends.cuda.graphs import (
    DeviceGraph,
    csr_of,
    derived,
    from_device_edges,
    loops_of,
)
from herta_gpu.backends.cuda.traffic import (
    Traffic,
    copy_rate,
    count_traffic,
    counting,
    note_again,
    watch_launch,
)
from herta_gpu.backends.cuda.transfer import (
    StreamedBlocks,
    empty_pinned,
    give_back_pinned,
    is_large,
    upload,
)
from herta_gpu.graph import Graph
from herta_gpu.planning.costs import CARD_SHARE, FRAGMENTS
from herta_gpu.plumbing.building import by_community
from herta_gpu.plumbing.interop import on_device
from herta_gpu.plumbing.machine import host_memory

# Bytes of a step that a device moves (some TB/s) while the host makes its three launches, which is
# some 40 microseconds: both are figures of data sheets and rules of thumb, not measured here.
_SHORT_STEP = 128 << 20
_SUMMED = ("column_dots", "cg_residual", "cg_descend")  # kernels of cg.cu
I32, I64, U32, U64 = np.int32, np.int64, np.uint32, np.uint64
_SPOOLED = 1.25  # times the bytes of X C0 must be free on the host
Sent = WeakKeyDictionary[Graph, dict[str, Any]]  # what the device has of graphs of the host


@cache
def _kernel(file: str, name: str) -> Any:
    with tell_if_long(
        f"compiling {file} for this GPU, once: the next run finds it in CuPy's cache"
    ):
        return _module(file, int(file == "laplacian.cu" and "_i64_" in name)).get_function(name)


@cache
def _module(file: str, wide: int) -> Any:
    return cupy.RawModule(code=source(file, wide), options=("-std=c++17",))


def _launch(
    file: str, name: str, grid: tuple[int, ...], block: tuple[int, ...], *args: Any
) -> None:
    """Run a kernel of one of our files; None is a null pointer, a Python number has 64 bits."""
    call = Call(file, name, _kernel(file, name), grid, block, tuple(_typed(x, name) for x in args))
    if _noted.calls is not None:
        _noted.calls.append(call)
    _again(call)


class Call(NamedTuple):
    """A launch with all that it needs: what is launched over and over is put together once."""

    file: str
    name: str
    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]


class _Noted(threading.local):
    calls: list[Call] | None = None  # those who note the launches of a step


_noted = _Noted()


def _again(call: Call) -> None:
    with watch_launch(cupy, call.file, call.name, call.args) if counting else nullcontext():
        call.kernel(call.grid, call.block, call.args)


def _typed(x: Any, name: str) -> Any:
    """An argument as CuPy shall pass it on: a pointer knows nothing of types and strides."""
    if x is None:
        return NULL
    if isinstance(x, (int, float)) and not isinstance(x, np.generic):
        return I64(x) if isinstance(x, int) else np.float64(x)
    contiguous = isinstance(x, cupy.ndarray) and x.flags.c_contiguous
    assert contiguous or isinstance(x, np.generic), f"{name}: {type(x)}"
    return x


def _follow(later: Any, earlier: Any) -> None:
    """What stream `later` is given from now on comes after all that `earlier` has been given."""
    here = cupy.cuda.Event(disable_timing=True)
    here.record(earlier)
    later.wait_event(here)


@dataclass
class CUDACGState(CGState):
    """CG with its scalars on the device."""

    pHp: Array
    alpha: Array
    beta: Array
    steps: int | None = None  # steps of the last batch that was not captured
    graph: Any = None  # that many steps as a CUDA graph ...
    moved: Traffic | None = None  # ... and what they move
    noted: tuple[Any, list[Call]] | None = None  # the launches of a step, and what they are for


class CUDABackend(Algorithm2):
    """CuPy and the kernels of this package on the current device."""

    name = "cuda"
    xp = cupy
    launch = staticmethod(_launch)
    check_every = 8  # a look waits for the device, and steps beyond the last cost nearly nothing
    at_once, share = 1 << 23, CARD_SHARE
    # bench/l2.py: ordering by community takes the host some 70 ns for each non-zero, and saves 2.2
    # bytes of DRAM for each non-zero and column at best, which is a picosecond.
    order_columns = 65_000

    def __init__(self, like: CUDABackend | None = None) -> None:
        # One that is `like` another has its stream, and the graphs that it has sent.
        # The steps of CG between two looks at the mask can be captured once per solve and replayed
        # as one launch: always with HERTA_CUDA_GRAPHS=1, never with 0, else where they are short.
        self.capture = {"1": True, "0": False}.get(os.environ.get("HERTA_CUDA_GRAPHS", ""))
        self.look()
        self._graphs: Sent = WeakKeyDictionary() if like is None else like._graphs
        self._scratch: dict[tuple[int, int], tuple[Array, Array, Array]] = {}
        # Streams of callers so far, by address, and those of PyTorch among them.
        self._callers: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._torchs: dict[int, Any] = {}
        if like is not None:
            self._own, self._callers, self._torchs = like._own, like._callers, like._torchs

    @staticmethod
    def look() -> None:
        """An error unless there is a device."""
        if cupy.cuda.runtime.getDeviceCount() < 1:  # raises where there is no driver
            raise RuntimeError("no CUDA device is visible")

    def try_out(self) -> None:
        """One kernel of ours and one solve of cuBLAS: a driver without the toolkit fails here."""
        x = self.asarray(np.array([[1.0], [2.0]]))
        C, b = self.asarray(np.array([[2.0, 0.0], [1.0, 4.0]])), self.asarray(np.array([2.0, 9.0]))
        found = [float(self.column_dots(x, x)[0]), *self.solve_triangular(C, b).tolist()]
        if found != [5.0, 1.0, 2.0]:  # synchronize!
            raise RuntimeError(f"a first kernel and a first solve gave {found}, not [5, 1, 2]")

    # ---- arrays -------------------------------------------------------------------------
    def asarray(self, x: Any, dtype: str | None = None) -> Array:
        if not isinstance(x, cupy.ndarray) and on_device(x) and hasattr(x, "__dlpack__"):
            x = cupy.from_dlpack(x)  # which waits for what its maker has not done yet
        if isinstance(x, np.ndarray) and is_large(x):
            return upload(cupy, x, dtype)
        if isinstance(x, cupy.ndarray) and x.size:
            self._check_place(x.device.id)
        x = cupy.asarray(x, dtype=dtype, order="C")
        # The caller's own memory may begin anywhere, and an access of several columns may not.
        return x if aligned(x) else x.copy()

    def to_numpy(self, x: Array) -> Any:
        return cupy.asnumpy(x)  # synchronize!

    def csr(self, M: Any) -> Any:
        if on_device(M):
            return M.tocsr()
        data, indices, indptr = map(self.asarray, (M.data, M.indices, M.indptr))
        return self.csr_matrix(data, indices, indptr, M.shape)

    def csr_matrix(self, data: Array, indices: Array, indptr: Array, shape: Any) -> Any:
        return cupyx.scipy.sparse.csr_matrix((data, indices, indptr), shape=shape)

    def host_blocks(self, X: Any, order: Any = None) -> StreamedBlocks:
        return StreamedBlocks(cupy, X, order)

    def spooled(
        self, parts: Iterable[tuple[slice, Array]], blocks: Sequence[slice], shape: Any, dtype: str
    ) -> list[Any] | None:
        n, columns = shape
        if _SPOOLED * n * columns * np.dtype(dtype).itemsize > host_memory():
            return None
        held = [empty_pinned(cupy, (n, J.stop - J.start), dtype) for J in blocks]
        for rows, part in parts:
            for J, block in zip(blocks, held, strict=True):
                # Nobody waits: what is freed here is used again on this stream, behind the copy.
                part_J = cupy.ascontiguousarray(part[:, J].astype(dtype))
                part_J.get(out=block[rows], blocking=False)
        self.synchronize()
        return held

    def solve_triangular(self, C: Array, B: Array, trans: bool = False) -> Array:
        from cupyx.scipy.linalg import solve_triangular  # needs cuBLAS, which a probe may lack

        if not C.size or not B.size:  # P of rank 0; cuBLAS takes no empty matrix
            return cupy.empty(B.shape, dtype=C.dtype)
        if not bool(C.diagonal().all()):  # synchronize!  cuBLAS would divide by it
            raise np.linalg.LinAlgError("A triangular factor is singular.")
        return solve_triangular(C, B, trans="T" if trans else "N", lower=True)

    def _triangle(self, P: Array) -> Array | None:
        # By default CuPy does not look whether the factorisation went through.
        try:
            with cupyx.errstate(linalg="raise"):  # synchronize!
                return cupy.linalg.cholesky(P)
        except np.linalg.LinAlgError:
            return None

    def pivoted_cholesky(self, P: Array, cut: float) -> tuple[Array, Array]:
        return pivoted_cholesky(cupy, P, cut)

    @contextmanager
    def profiled(self) -> Iterator[Traffic]:
        cupy.cuda.profiler.start()  # tells nsys and ncu alike; without either it does nothing
        try:
            with count_traffic() as traffic:
                yield traffic
            self.synchronize()
            traffic.settle(cupy)
            traffic.copy_rate = copy_rate(cupy, 4 * self._l2_bytes)
        finally:
            cupy.cuda.profiler.stop()

    def on_stream(self, stream: int, device: int) -> Any:
        self._check_place(device)
        # CUDA's stream protocol: its version, and the address.
        foreign = SimpleNamespace(__cuda_stream__=lambda: (0, stream))
        return cupy.cuda.Stream.from_external(foreign)

    def _check_place(self, device: int) -> None:
        here = cupy.cuda.runtime.getDevice()
        if device != here:
            raise RuntimeError(
                f"The data are on cuda:{device}, but herta_gpu works on cuda:{here}, the current "
                "device: move them there, or let CUDA_VISIBLE_DEVICES name one device."
            )

    @contextmanager
    def working(self) -> Iterator[Any]:
        caller = cupy.cuda.get_current_stream()
        if caller.ptr == self._own.ptr:  # a method that calls another one
            yield caller
            return
        callers = {caller.ptr: caller, **self._torchs_stream()}
        # Results given to other streams before may have died there: their memory is ours again.
        for stream in {**self._callers, **callers}.values():
            _follow(self._own, stream)
        self._callers.update(callers)
        try:
            # By default CuPy does not look whether a factorisation went through.
            with self._own, cupyx.errstate(linalg="raise"):
                yield self._own
        except cupy.cuda.memory.OutOfMemoryError as error:
            what = f"The GPU is out of memory: {error}  A smaller memory_budget takes less."
            raise MemoryError(what) from error
        finally:
            for stream in callers.values():
                _follow(stream, self._own)

    def _torchs_stream(self) -> dict[int, Any]:
        """The stream that PyTorch works on, if it does so on this device: not always CuPy's."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return {}
        here = cupy.cuda.runtime.getDevice()
        stream = cuda.current_stream(here).cuda_stream
        if stream not in self._torchs:  # PyTorch never gives one up
            null = cupy.cuda.Stream.null
            self._torchs[stream] = self.on_stream(stream, here) if stream else null
        return {stream: self._torchs[stream]}

    @cached_property
    def _own(self) -> Any:
        """The stream of all work: the default one would wait for others, and they for it."""
        return named_stream(cupy, "herta")

    def padded(self, k: int, dtype: str) -> int:
        return padded(k, np.dtype(dtype).itemsize)

    def synchronize(self) -> None:
        cupy.cuda.get_current_stream().synchronize()  # synchronize!

    def memory_available(self) -> int:
        return int(self.memory_free() / FRAGMENTS)

    def memory_free(self) -> int:
        pool = cupy.get_default_memory_pool()
        free = cupy.cuda.runtime.memGetInfo()[0] + pool.free_bytes()
        limit = pool.get_limit()
        return max(0, min(free, limit - pool.used_bytes()) if limit else free)

    def on_part(self, graph: Any) -> CUDABackend:
        from herta_gpu.backends.cuda.nodes import CUDANodesBackend

        return CUDANodesBackend(self, graph)

    # ---- graphs ---------------------------------------------------------------------------
    def laplacian(self, graph: Graph, dtype: str) -> DeviceLaplacian:
        held = self._graphs.setdefault(graph, {})
        if dtype not in held:
            held[dtype] = self._uploaded(graph, dtype, held)
            # It is kept for whoever asks next, and that may be work on another stream.
            give_back_pinned(cupy)  # synchronize!
        return held[dtype]

    def _uploaded(self, graph: Graph, dtype: str, held: dict[str, Any]) -> DeviceLaplacian:
        """`graph` in one precision; `held` is what the device has of it, sent at the first call."""
        if "indptr" not in held:
            held |= {
                "indptr": self.asarray(graph.indptr),
                "indices": self.asarray(graph.indices),
                "weights": None if graph.weights is None else self.asarray(graph.weights),
                "inv_sqrt_degree": self.asarray(self.inverse_roots(graph)),
                "diagonal": self.asarray(graph.loopless_degree / graph.degree),
                "lambda_max": graph.lambda_max_bound,
                "segments": self.segments(np.diff(graph.indptr), graph.indices.shape[0]),
            }
        if graph.order is not None and "order" not in held:
            held["order"] = self.asarray(graph.order, "int64")
        exact = (held["inv_sqrt_degree"], held["diagonal"], held["weights"])
        s, diagonal, weights = (x if x is None else x.astype(dtype, copy=False) for x in exact)
        numbers: dict[str, Any] = {"weights": weights, "inv_sqrt_degree": s, "diagonal": diagonal}
        numbers |= {name: held.get(name) for name in ("indptr", "indices", "lambda_max", "order")}
        numbers |= held["segments"]
        return DeviceLaplacian(graph.num_nodes, **numbers, unrounded=lambda: exact)

    def inverse_roots(self, graph: Graph) -> Any:
        """D^-1/2 of all nodes that a row may have for a neighbour."""
        return 1.0 / np.sqrt(graph.degree)

    def segments(self, length: Any, nnz: int) -> dict[str, Any]:
        """What the kernels must know of the rows that are too long for one block.

        `length` of each row may be on the device: few are read.
        """
        segment = segment_length(nnz)
        rows = cupy.get_array_module(length).flatnonzero(length > segment)  # synchronize!
        rows, pieces = (cupy.asnumpy(x) for x in (rows, -(-length[rows] // segment)))
        rank = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        row = np.repeat(rows, pieces)
        return {
            "segment_row": self.asarray(row, "int64"),
            "segment_rank": self.asarray(rank, "int32"),
            "long_rows": self.asarray(rows, "int64"),
            "cut_rows": row,
        }

    graph_from_edges, laplacian_csr, loops = from_device_edges, csr_of, loops_of

    def communities(self, graph: Graph, worth: float) -> Any | None:
        """An order by community: cuGraph's, else the host's; None where caches absorb gathers."""
        if 4 * 32 * graph.num_nodes < 2 * self._l2_bytes or isinstance(graph, DeviceGraph):
            return None
        if cugraph.available():
            return cugraph.by_leiden(graph, worth)
        return by_community(graph, worth) if find_spec("numba") else None

    def sampled_graph(self, graph: Graph, factors: Array) -> Graph:
        """L_tilde is put together on the device; the host reads it when somebody asks."""
        L = self.laplacian(graph, "float64")
        indptr, indices, weights, sums = self.filter_edges(L, factors)
        held = {"indptr": indptr, "indices": indices, "weights": weights}
        held |= derived(self, held, sums, L.inv_sqrt_degree)
        return self.adopt(held, graph.num_nodes, graph.order, degree=graph.degree)

    def adopt(self, held: dict[str, Any], n: int, order: Any = None, **known: Any) -> DeviceGraph:
        """A graph whose arrays are on the device already."""
        made = DeviceGraph(self, held, n, order, **known)
        self._graphs[made] = held
        return made

    # ---- H = I + lam L ---------------------------------------------------------------------
    def apply_H(self, L: Laplacian, lam: float, X: Array, out: Array | None = None) -> Array:
        X = self.asarray(X)
        Y = cupy.empty_like(X) if out is None else out
        if X.size:
            self._product("apply_H", L, lam, X, X, Y, None, None, None)
        return Y

    def residual_rows(
        self, L: Laplacian, lam: float, Z: Array, B: Array, start: int, out: Array | None = None
    ) -> Array:
        Z, B = self.asarray(Z), self.asarray(B, "float64")
        R = cupy.empty(B.shape) if out is None else out
        if R.size:
            self._residual(L, lam, Z, B, start, None, R, None, None)
        return R

    def residual(
        self, L: Laplacian, lam: float, Z: Array, B: Array, dtype: str, unit: Array
    ) -> tuple[Array, Array]:
        Z, B = self.asarray(Z), self.asarray(B)
        B = B if B.dtype in (np.float32, np.float64) else B.astype("float64")
        R, dots = cupy.empty(Z.shape, dtype=dtype), cupy.zeros((2, Z.shape[1]))
        if R.size:
            partials = self._scratch_of(L, Z.shape[1])[2]
            self._residual(L, lam, Z, B, 0, 1.0 / unit, R, partials, dots)
        return R, dots

    def residual_over(self, L: Laplacian, lam: float, Z: Array, B: Array) -> Array:
        """In one launch, or two where rows are cut."""
        dots = cupy.zeros((2, B.shape[1]))
        if B.size:
            partials = self._scratch_of(L, B.shape[1])[2]
            self._residual(L, lam, Z, B, 0, None, B, partials, dots)
        return dots[0]

    def _residual(self, L: Any, lam: float, Z: Array, B: Array, start: int, *to: Any) -> None:
        """The rows from `start` on, as `to` says: unit, R, partial and whole dots.

        Long rows are summed in a launch before.
        """
        scales, at = (*L.exact, np.float64(lam)), slice(start, start + B.shape[0])
        first, last = L.cut_segments(at)
        if first < last:
            self._rows("hub_sums", L, scales, at, (Z,), only="long")
        unit, R, *dots = to
        rest = (*by_precision(B), at.start, at.stop, unit, *by_precision(R), *dots)
        self._rows("residual", L, scales, at, (Z, *rest), only="short", summed=dots[-1] is not None)

    def roundings(self, neighbours: float, columns: int, rows: bool = False) -> float:
        return roundings(neighbours, columns)

    def _product(self, kernel: str, L: Laplacian, lam: float, X: Array, *tail: Any) -> None:
        """apply_H or chebyshev on the block X; `tail` is what follows the common arguments."""
        assert X.dtype == L.inv_sqrt_degree.dtype
        scales = (L.inv_sqrt_degree, L.diagonal, L.weights, X.dtype.type(lam))
        summed = kernel == "apply_H" and tail[-1] is not None
        self._rows(kernel, L, scales, slice(0, L.n), tail, like=X, summed=summed)

    def _rows(
        self,
        kernel: str,
        L: Any,
        scales: Any,
        at: slice,
        tail: Any,
        *,
        like: Any = None,
        only: str = "",
        summed: bool = False,
    ) -> None:
        """A kernel of laplacian.cu on some rows; `scales` are s, diag(L), the weights and lam.

        It has blocks of threads for short rows and for segments of long ones, or for one kind
        `only`, of a shape for blocks `like` this one, by default the first of `tail`.
        """
        X = tail[0] if like is None else like
        k, (s, diagonal, weights, lam) = X.shape[1], scales
        width = vector_width(k, X.dtype)
        x, y, tiles = column_shape(k, width, least=8)
        a, b = L.cut_segments(at)
        taken = blocks(b - a, 1, summed) if a < b else 0
        sums, tickets, _ = self._scratch_of(L, k)
        graph = (L.n, k, L.indptr, L.indices, weights, s, diagonal, lam)
        cut = (L.segment_row[a:b], L.segment_rank[a:b], sums, tickets)
        rows = blocks(at.stop - at.start, y, summed)
        grid = (rows * (only != "long") + taken * (only != "short"), tiles)
        name = f"{kernel}_{suffix(X.dtype)}_{suffix(L.indices.dtype)}_v{width}"
        sizes = (I32(L.segment), I32(b - a), I32(taken))
        _launch("laplacian.cu", name, grid, (x, y), *graph, *sizes, *cut, *tail)

    def _columns(self, file: str, kernel: str, X: Array, *args: Any) -> None:
        """A kernel on blocks shaped like X."""
        n, k = X.shape
        width = vector_width(k, X.dtype)
        x, y, tiles = column_shape(k, width)
        name = f"{kernel}_{suffix(X.dtype)}_v{width}"
        _launch(file, name, (blocks(n, y, kernel in _SUMMED), tiles), (x, y), n, k, *args)

    def _scratch_of(self, L: Any, k: int) -> tuple[Array, Array, Array]:
        """(sums of segments, tickets, partial dots) for k columns, made once per width and stream.

        Without an `L` those of `_columns`, which has no segments; a stream runs one at a time.
        """
        held, pieces = (self._scratch, 0) if L is None else (L.scratch, L.segment_row.shape[0])
        key = (k, cupy.cuda.get_current_stream().ptr)
        if key not in held:
            tickets = cupy.zeros((-(-k // 64), pieces + 1), dtype=U32)
            held[key] = cupy.empty((pieces, k)), tickets, cupy.empty((2 * MAX_BLOCKS, k))
        return held[key]

    def _sums_of(self, k: int) -> tuple[Array, Array]:
        """(partial sums, tickets) for k columns of `_columns`."""
        _, tickets, partials = self._scratch_of(None, k)
        return partials, tickets

    def column_dots(self, X: Array, Y: Array) -> Array:
        dots = cupy.zeros(X.shape[1])
        if X.size:
            dtype = str(np.promote_types(X.dtype, Y.dtype))
            X, Y = self.asarray(X, dtype), self.asarray(Y, dtype)
            self._columns("cg.cu", "column_dots", X, X, Y, *self._sums_of(X.shape[1]), dots)
        return dots

    def cg_start(
        self, L: Laplacian, lam: float, R: Array, energy: Array, tol: float, floor: float
    ) -> CUDACGState:
        energy = energy.copy()  # the kernel adds to it in place
        state = super().cg_start(L, lam, R, energy, tol, floor)
        pHp, alpha, beta = (cupy.empty(R.shape[1]) for _ in range(3))
        return CUDACGState(**vars(state), pHp=pHp, alpha=alpha, beta=beta)

    def cg_step(self, L: Laplacian, lam: float, state: CGState) -> None:
        assert isinstance(state, CUDACGState)
        s, k = state, state.R.shape[1]
        if not s.R.size:
            return
        key = (id(L), lam, cupy.cuda.get_current_stream().ptr)  # a stream has scratch of its own
        if s.noted is not None and s.noted[0] == key:
            for call in s.noted[1]:
                _again(call)
            return
        _noted.calls = []
        try:
            self._launch_step(L, lam, s, k)
            s.noted = key, _noted.calls
        finally:
            _noted.calls = None

    def _launch_step(self, L: Laplacian, lam: float, s: CUDACGState, k: int) -> None:
        partials = self._scratch_of(L, k)[2]
        self._product("apply_H", L, lam, s.P, s.P, s.HP, s.active, partials, s.pHp)
        numbers = (s.pHp, s.rho, s.energy, float(s.tol), s.floor)
        ends = (s.active, s.iterations, s.alpha, s.beta, *self._sums_of(k))
        self._columns("cg.cu", "cg_residual", s.R, s.HP, s.R, *numbers, *ends)
        self._columns("cg.cu", "cg_direction", s.R, s.R, s.P, s.Z, s.alpha, s.beta)

    def cg_steps(self, L: Laplacian, lam: float, state: CGState, count: int) -> None:
        assert isinstance(state, CUDACGState)
        if not self._captures(L, state):
            super().cg_steps(L, lam, state, count)
            return
        with self.working() as stream:  # the default stream could replay a graph, but not capture
            if state.steps != count:  # the first batch compiles and allocates: a capture must not
                super().cg_steps(L, lam, state, count)
                state.steps, state.graph = count, None
                return
            if state.graph is None:
                with count_traffic() as state.moved:
                    stream.begin_capture()
                    try:
                        super().cg_steps(L, lam, state, count)
                    finally:  # a stream that captures is of no other use
                        state.graph = stream.end_capture()
            elif state.moved is not None:
                note_again(state.moved)
            state.graph.launch()

    def _captures(self, L: Laplacian, state: CGState) -> bool:
        """Whether a step is over before the host has launched the next one."""
        if self.capture is not None:
            return self.capture
        return state.P.nbytes * (10 + L.nnz / max(L.n, 1)) + 4 * L.nnz + 8 * L.n <= _SHORT_STEP

    def cg_active(self, state: CGState) -> int:
        return int(cupy.count_nonzero(state.active))  # synchronize!

    def chebyshev_step(
        self,
        L: Laplacian,
        lam: float,
        Z: Array,
        Z_prev: Array,
        B: Array,
        c1: float,
        c2: float,
        halves: Halves | None = None,
    ) -> None:
        if not Z.size:
            return
        rest = (Z, Z_prev, B, Z.dtype.type(c1), Z.dtype.type(c2))
        if halves is None:
            self._product("chebyshev", L, lam, Z, *rest)
            return
        self._columns("laplacian.cu", "halve", Z, Z, L.inv_sqrt_degree, halves.up, halves.G)
        self._product("chebyshev_half", L, lam, Z, halves.G, halves.down, *rest)

    def half_pays(self, L: Laplacian, k: int) -> bool:
        # The caches hold no block that is larger; every gather is then half the bytes.
        return 4 * L.n * k > self._l2_bytes

    @cached_property
    def _l2_bytes(self) -> int:
        runtime = cupy.cuda.runtime
        return int(runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"])
