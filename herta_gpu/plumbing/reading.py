"""A matrix in a file, read ahead of its use.

Whoever slices a memory map waits for the disk, page by page.  Here a few threads read whole rows,
in the order of the file, into a ring of buffers, while the caller works on the part before.  Memory
is that of the ring, whatever the size of the file.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np

from herta_gpu.plumbing.files import DataError

Part = tuple[slice, slice]  # rows and columns of a matrix

RING = 3  # parts in memory: the caller's and two that come next
_PIECE = 1 << 20  # bytes that a thread reads at once
_THREADS = 4  # they wait for the disk most of the time: as many on any machine


class Reads:
    """What was read of a matrix so far, and what that cost."""

    def __init__(self) -> None:
        self.passes = 0  # how often its rows were gone through, from memory or from a file
        self.bytes_read = 0  # what came from its file; 0 where X is in memory
        self.seconds = 0.0  # during which at least one thread was reading
        self.waited = 0.0  # the part of it for which the caller had nothing else to do
        self._lock, self._busy, self._since = threading.Lock(), 0, 0.0

    def counts(self) -> dict[str, float]:
        """The numbers alone, to keep."""
        names = ("passes", "bytes_read", "seconds", "waited")
        return {name: getattr(self, name) for name in names}

    @contextmanager
    def reading(self, size: int) -> Iterator[None]:
        """Around each read: time counts once, however many threads read."""
        with self._lock:
            self._busy += 1
            if self._busy == 1:
                self._since = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                self.bytes_read += size
                if self._busy == 0:
                    self.seconds += time.perf_counter() - self._since


class MappedRows:
    """The rows of a memory-mapped matrix, read from its file instead of through the map."""

    def __init__(self, X: Any, root: np.memmap) -> None:
        self.X = X
        self._path, self._shape, self._dtype = str(root.filename), X.shape, X.dtype
        # Where X[0, 0] lies in the file, and from row to row: X may be a view of what is mapped.
        self._start = int(root.offset) + X.ctypes.data - root.ctypes.data
        self._stride, self._row_bytes = X.strides[0], X.shape[1] * X.itemsize
        self._own = threading.local()  # memory of each thread for rows that it cuts

    @classmethod
    def of(cls, X: Any) -> MappedRows | None:
        """None if the numbers are not in a file, row by row, as this machine writes them."""
        root = mapping_of(X)
        if root is None or root.mode == "c":  # what was changed there is not in the file
            return None
        plain = X.ndim == 2 and X.size and X.dtype.kind in "fiu" and X.dtype.isnative
        if not plain or X.strides[1] != X.itemsize or X.strides[0] < X.shape[1] * X.itemsize:
            return None
        return cls(X, root)

    def still_there(self) -> bool:
        """Whether the file is still the one that was mapped, by its first and last row."""
        ends = np.empty((2, self._shape[1]), dtype=self._dtype)
        try:
            for row, at in zip(ends, (0, self._shape[0] - 1)):
                self._read(self._start + at * self._stride, row)
        except FileNotFoundError:
            return False
        return ends.tobytes() == self.X[[0, -1]].tobytes()

    def parts(
        self,
        wanted: Sequence[Part],
        reads: Reads,
        ring: Sequence[Any] | None = None,
        kept: int = 1,
        before_reuse: Callable[[int], None] | None = None,
    ) -> Generator[Any, None, None]:
        """X[rows, columns] of each part in turn, in buffers that are used again.

        `ring` are flat arrays of X's type that hold the largest part each, by default new ones.
        `kept` parts, the newest included, stay as they are when the next one is asked for;
        `before_reuse` hears the number of a part before that part goes over an older one.
        """
        count = len(wanted)
        bounds = [
            (*rows.indices(self._shape[0])[:2], *columns.indices(self._shape[1])[:2])
            for rows, columns in wanted
        ]
        if ring is None:
            most = max(((b - a) * (right - left) for a, b, left, right in bounds), default=0)
            ring = [np.empty(most, self._dtype) for _ in range(min(RING, count))]
        step = max(1, _PIECE // self._stride)  # rows that a thread reads at once
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="herta-reads")
        begun: deque[tuple[Any, list[Future[None]]]] = deque()
        upcoming = iter(enumerate(bounds))
        try:
            for _ in range(count):
                due = len(ring) - kept + 1 - len(begun)  # buffers that nobody uses
                for started, (a, b, left, right) in islice(upcoming, due):
                    if before_reuse is not None and started >= len(ring):
                        before_reuse(started)
                    out = ring[started % len(ring)][: (b - a) * (right - left)]
                    out = out.reshape(b - a, right - left)
                    pieces = [
                        pool.submit(self._piece, a + j, left, right, out[j : j + step], reads)
                        for j in range(0, b - a, step)
                    ]
                    begun.append((out, pieces))
                part, pieces = begun.popleft()
                start = time.perf_counter()
                for piece in pieces:
                    piece.result()
                reads.waited += time.perf_counter() - start
                yield part
            reads.passes += 1
        finally:  # the caller may stop early
            pool.shutdown(cancel_futures=True)

    def _piece(self, first: int, left: int, right: int, out: Any, reads: Reads) -> None:
        """Whole rows, from `first` on, and of them the columns left:right."""
        rows, at = out.shape[0], self._start + first * self._stride
        size = (rows - 1) * self._stride + self._row_bytes
        with reads.reading(size):
            if out.nbytes == size:  # all columns, and nothing between the rows
                self._read(at, out)
                return
            if getattr(self._own, "raw", None) is None or self._own.raw.size < size:
                self._own.raw = np.empty(size, np.uint8)
            raw = self._own.raw[:size]
            self._read(at, raw)
            strides = (self._stride, self._dtype.itemsize)
            whole = np.ndarray((rows, self._shape[1]), self._dtype, raw, strides=strides)
            out[...] = whole[:, left:right]

    def _read(self, at: int, out: Any) -> None:
        """Fill `out` with the bytes of the file from `at` on."""
        left = memoryview(out).cast("B")
        with open(self._path, "rb", buffering=0) as file:
            file.seek(at)
            while left:
                got = file.readinto(left)
                if not got:
                    raise _shrunk(self._path, os.fstat(file.fileno()).st_size, at + len(left))
                at, left = at + got, left[got:]


def fill(out: Any, X: Any, rows: Any = None) -> None:
    """``out[...] = X``, or ``X[rows]``: one thread copies more slowly than a device takes it."""
    step = max(1, _PIECE // max(1, out[:1].nbytes))
    if out.shape[0] < 2 * _THREADS * step:  # threads take longer to begin
        out[...] = X if rows is None else X[rows]
        return

    def piece(first: int) -> None:
        at = slice(first, first + step)
        out[at] = X[at if rows is None else rows[at]]

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="herta-copies") as pool:
        list(pool.map(piece, range(0, out.shape[0], step)))


def mapping_of(X: Any) -> np.memmap | None:
    """The map of a file that X is, or is a view of."""
    while isinstance(X, np.ndarray):
        if isinstance(X, np.memmap) and isinstance(X.base, mmap.mmap):
            return X if X.filename is not None else None
        X = X.base
    return None


def check_not_shrunk(root: np.memmap) -> None:
    """An error if a mapped file ends early by now: to touch what is gone would end the process."""
    try:
        size = os.stat(str(root.filename)).st_size
    except FileNotFoundError:
        return  # without a name it stays whole until it is unmapped
    if size < int(root.offset) + root.nbytes:
        raise _shrunk(str(root.filename), size, int(root.offset) + root.nbytes)


def _shrunk(path: str, size: int, needed: int) -> DataError:
    return DataError(
        f"{path} has {size:,} bytes now, but X is mapped from its first {needed:,}: it was cut "
        "short while it was in use."
    )
