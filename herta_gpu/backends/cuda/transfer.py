"""Arrays of the host on their way to the device, through pinned memory.

An array that shall be on the device (`upload`): CuPy would stage all of it in pinned memory,
rounded up to a power of two, and keep that for good; 12.9 GB of X would hold 16 GB of the host.
Here it passes through two pinned buffers of a fixed size, which are kept; while one is being
copied, threads of the host fill the other.

A matrix too large for the device stays in pinned host memory, or in its file, and passes through in
parts (`StreamedBlocks`; kernels/README.md has a picture of it).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Blocks, Part
from herta_gpu.backends.cuda.device import named_stream
from herta_gpu.plumbing.reading import MappedRows, fill

CHUNK_BYTES = 64 << 20  # of a buffer; what is smaller goes CuPy's way
_FEW = 8  # times as many columns as are wanted: then they are gathered on the host
_RING = 4  # parts in pinned memory: two that the copies may still read, two that are being read


def empty_pinned(xp: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Pinned host memory, beside CuPy's pool; ordinary memory where the system pins no more.

    A copy from ordinary memory makes the host wait, and is right all the same.
    """
    try:
        memory = xp.cuda.PinnedMemory(math.prod(shape) * np.dtype(dtype).itemsize)
    except xp.cuda.runtime.CUDARuntimeError:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, buffer=xp.cuda.PinnedMemoryPointer(memory, 0))


def is_large(x: Any) -> bool:
    """Whether an array of the host is worth the two buffers."""
    return x.nbytes > CHUNK_BYTES


_kept: list[Any] = []  # two buffers of bytes, for the process: to free them waits for the device
_one_at_a_time = Lock()


def _two_kept(xp: Any, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    size = math.prod(shape) * dtype.itemsize
    if not _kept or _kept[0].nbytes < size:
        _kept[:] = [empty_pinned(xp, (max(size, CHUNK_BYTES),), "uint8") for _ in range(2)]
    return _kept


def upload(xp: Any, x: Any, dtype: Any = None) -> Array:
    """`x` in C order on the device, as `dtype`, chunk by chunk on the current stream."""
    dtype = np.dtype(x.dtype if dtype is None else dtype)
    out, stream = xp.empty(x.shape, dtype=dtype), xp.cuda.get_current_stream()
    source, target = (x.reshape(-1), out.reshape(-1)) if x.flags.c_contiguous else (x, out)
    size = max(1, CHUNK_BYTES // (dtype.itemsize * math.prod(source.shape[1:])))
    shape = (min(size, source.shape[0]), *source.shape[1:])
    copied = [xp.cuda.Event(disable_timing=True) for _ in range(2)]
    with _one_at_a_time:
        flat = [b[: math.prod(shape) * dtype.itemsize] for b in _two_kept(xp, shape, dtype)]
        buffers = [b.view(dtype).reshape(shape) for b in flat]
        for i, start in enumerate(range(0, source.shape[0], shape[0])):
            part = source[start : start + shape[0]]
            copied[i % 2].synchronize()  # synchronize!  the copy before the last may still read it
            chunk = buffers[i % 2][: part.shape[0]]
            fill(chunk, part)
            target[start : start + shape[0]].set(chunk, stream=stream)
            copied[i % 2].record(stream)
        stream.synchronize()  # synchronize!  the buffers are the next call's now
    return out


def give_back_pinned(xp: Any) -> None:
    """Wait for the current stream, then free what CuPy's own uploads have pinned."""
    xp.cuda.get_current_stream().synchronize()  # synchronize!
    xp.get_default_pinned_memory_pool().free_all_blocks()


_in_place: set[int] = set()  # where arrays begin that are pinned so


def _pinned_in_place(xp: Any, X: Any) -> bool:
    """Whether the memory of an array could be pinned: it is not, say, where it is already."""
    try:
        if X.flags.c_contiguous and X.nbytes and X.ctypes.data not in _in_place:
            xp.cuda.runtime.hostRegister(X.ctypes.data, X.nbytes, 0)
            _in_place.add(X.ctypes.data)
            return True
    except xp.cuda.runtime.CUDARuntimeError:
        pass
    return False


def _let_go(xp: Any, copies: Any, X: Any) -> None:
    copies.synchronize()  # synchronize!  they read it until then
    _in_place.discard(X.ctypes.data)
    xp.cuda.runtime.hostUnregister(X.ctypes.data)


@dataclass
class Buffer:
    """Room for one part."""

    device: Array  # flat
    copied: Any  # event of the copying stream: the part is there
    used: Any  # event of the caller's stream: nobody reads it any more
    pinned: Any = None  # flat, on the host: for parts that have to be gathered


class StreamedBlocks(Blocks):
    """X in pinned memory, rows already in `order`; its parts come through two buffers.

    An array whose rows are in order is pinned where it is, if the system does that.

    While the caller's stream works on one, a stream that does nothing but copy fills the other.
    Two events per buffer keep them apart: the caller's stream waits until the buffer is `copied`, a
    copy until it has been `used`.  The host waits for neither, unless it has to gather a part.

    A part that is some of the columns comes as whole rows and is cut on the device.  Only where
    fewer than one column in eight is wanted, threads of the host gather them.  A memory-mapped X
    may be larger than the host's memory: threads read its rows into a ring of pinned buffers ahead
    of the copies (`herta_gpu.plumbing.reading`); rows in another order than the file's are
    gathered into a buffer of their own size, as is a part that cuts rows.
    """

    def __init__(self, xp: Any, X: Any, order: Any = None) -> None:
        self._in_file = isinstance(X, np.memmap)
        in_place = not self._in_file and order is None and _pinned_in_place(xp, X)
        if not self._in_file and not in_place:
            pinned = empty_pinned(xp, X.shape, X.dtype)
            fill(pinned, X, order)
            X, order = pinned, None
        super().__init__(X, order)
        self._xp, self._copies = xp, named_stream(xp, "herta: copies of X")
        self._buffers: list[Buffer] = []
        self._ring: list[Any] = []  # flat, pinned, for what is read from a file
        # Pinned memory and buffers must outlive the copies, which the host does not wait for.
        if in_place:
            weakref.finalize(self, _let_go, xp, self._copies, X).atexit = False
            return
        weakref.finalize(self, self._copies.synchronize).atexit = False

    def parts(self, wanted: Sequence[Part]) -> Iterator[tuple[slice, Array]]:
        file, stream = self._readable(), self._xp.cuda.get_current_stream()
        every, sent, cuts = slice(None), [], []
        for rows, columns in wanted:  # whole rows are sent, and cut there
            whole = self.whole_rows(len(range(*columns.indices(self.X.shape[1]))))
            sent.append((rows, every if whole else columns))
            cuts.append(columns if whole else every)
        buffers = self._two_buffers(max(map(self._size, sent), default=0), stream)
        with closing(self._gathers(sent) if file is None else self._read(file, sent)) as hosts:
            parts = self._sent(sent, hosts, buffers, stream)
            with closing(parts):  # who stops early gives the buffer back
                for (rows, part), cut in zip(parts, cuts, strict=True):
                    yield rows, part[:, cut]

    def whole_rows(self, columns: int) -> bool:
        return self.X.shape[1] < _FEW * columns

    def _sent(
        self, wanted: Sequence[Part], hosts: Iterator[Any], buffers: list[Buffer], stream: Any
    ) -> Generator[tuple[slice, Array], None, None]:
        """The parts on the device; `hosts` gives them in pinned memory."""
        ahead = self._send(next(hosts), buffers[0]) if wanted else None
        for i, (rows, _) in enumerate(wanted):
            buffer, part = buffers[i % 2], ahead
            if i + 1 < len(wanted):
                ahead = self._send(next(hosts), buffers[(i + 1) % 2])
            stream.wait_event(buffer.copied)
            try:
                yield rows, part
            finally:  # the caller may stop early
                buffer.used.record(stream)
        next(hosts, None)  # its end counts the pass

    def _send(self, host: Any, buffer: Buffer) -> Array:
        """Start the copy of a part in pinned memory; where it will be."""
        view = buffer.device[: host.size].reshape(host.shape)
        self._copies.wait_event(buffer.used)
        view.set(host, stream=self._copies)
        buffer.copied.record(self._copies)
        return view

    def _read(self, file: MappedRows, wanted: Sequence[Part]) -> Generator[Any, None, None]:
        """Parts in pinned memory, read ahead from the file."""
        size = self._buffers[0].device.size
        self._copies.synchronize()  # synchronize!  those of the pass before may still be reading
        if not self._ring or self._ring[0].size < size:
            self._ring = [empty_pinned(self._xp, (size,), self.X.dtype) for _ in range(_RING)]

        def before_reuse(part: int) -> None:
            # Part - 4 was there.  Part - 2 has not been sent, so the event is still that one's.
            self._buffers[part % 2].copied.synchronize()  # synchronize!

        yield from file.parts(wanted, self.reads, self._ring, kept=2, before_reuse=before_reuse)

    def _gathers(self, wanted: Sequence[Part]) -> Generator[Any, None, None]:
        """Parts in pinned memory, gathered where they are not there as they should be."""
        for i, (rows, columns) in enumerate(wanted):
            host, buffer = self.X[rows, columns], self._buffers[i % 2]
            if self._in_file or not host.flags.c_contiguous:
                if buffer.pinned is None:
                    buffer.pinned = empty_pinned(self._xp, buffer.device.shape, self.X.dtype)
                buffer.copied.synchronize()  # synchronize!  the last copy may still be reading
                gathered = buffer.pinned[: host.size].reshape(host.shape)
                if self.order is None:
                    fill(gathered, host)
                else:
                    fill(gathered, self.X[:, columns], self.order[rows])
                host = gathered
            yield host
        self.reads.passes += 1

    def _two_buffers(self, size: int, stream: Any) -> list[Buffer]:
        if not self._buffers or self._buffers[0].device.size < size:
            self._copies.synchronize()  # synchronize!  rare: smaller buffers are given up
            event = partial(self._xp.cuda.Event, disable_timing=True)
            room = [self._xp.empty(size, dtype=self.X.dtype) for _ in range(2)]
            self._buffers = [Buffer(flat, event(), event()) for flat in room]
            for made in self._buffers:  # the pool may hand out memory that this stream still reads
                made.used.record(stream)
        return self._buffers

    def _size(self, part: Part) -> int:
        rows, columns = (len(range(*s.indices(n))) for s, n in zip(part, self.X.shape, strict=True))
        return rows * columns
