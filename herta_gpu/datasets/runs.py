"""More edges than memory holds, sorted and each of them once.

Edges come in chunks, as keys (`edge_keys`).  Each chunk is sorted and appended to a
file as it is, a run.  All runs are cut at the same keys, so that the n-th piece of every run
together are a range that memory holds: the ranges, sorted one by one, are the sorted list.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from herta_gpu.plumbing.building import distinct
from herta_gpu.plumbing.machine import num_threads
from herta_gpu.plumbing.progress import Tell

_RANGE = 1 << 22  # keys that are sorted at once


class Scratch:
    """Bytes that are needed for a while: in memory, or in a file of the folder.

    The file has no name: it is gone with the process, however that ends.
    """

    def __init__(self, folder: Path | None) -> None:
        in_memory = folder is None
        self._file: Any = io.BytesIO() if in_memory else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._lock, self._size = Lock(), 0

    def append(self, array: Any) -> int:
        """Write at the end; where that was."""
        with self._lock:
            at, self._size = self._size, self._size + array.nbytes
        self.write(at, array)
        return at

    def write(self, at: int, array: Any) -> None:
        with self._lock:
            self._file.seek(at)
            self._file.write(array.data.cast("B") if array.size else b"")

    def read(self, at: int, out: Any) -> None:
        with self._lock:
            self._file.seek(at)
            if out.size and self._file.readinto(out.data.cast("B")) != out.nbytes:
                raise OSError("A working file is shorter than what was written to it.")

    def array(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Everything as one array, mapped if it is a file."""
        if 0 in shape:
            return np.empty(shape, dtype)
        if isinstance(self._file, io.BytesIO):
            return np.frombuffer(self._file.getbuffer(), dtype).reshape(shape)
        self._file.flush()
        return np.memmap(self._file, dtype, "r", shape=shape)


class Runs:
    """Edges of n nodes, about `expected` of them, that come as keys in any order."""

    def __init__(self, n: int, expected: int, scratch: Scratch) -> None:
        self._n, self._scratch = n, scratch
        # Keys begin with the smaller of two nodes: a share x of the nodes holds 1 - (1 - x)^2 of
        # them, if hubs have no preferred ids.
        self.ranges = max(1, -(-expected // _RANGE))
        share = np.arange(1, self.ranges + 1) / self.ranges
        self._ends = ((1 - np.sqrt(1 - share)) * n).astype(np.int64) * n
        self._cuts: list[Any] = []  # of each run: where its ranges begin and end, in keys

    def add(self, keys: Any) -> None:
        """One more run, sorted in place; negative keys stand for nothing.  Threads may add."""
        keys.sort()
        keys = keys[np.searchsorted(keys, 0) :]
        start = self._scratch.append(keys) // keys.itemsize
        self._cuts.append(start + np.append(0, np.searchsorted(keys, self._ends)))

    def count(self, tell: Tell | None = None) -> Any:
        """How many different edges each range holds."""
        counts = np.zeros(self.ranges, dtype=np.int64)

        def count(i: int) -> None:
            counts[i] = self._range(i).shape[0]

        in_parallel(count, range(self.ranges), tell)
        return counts

    def edge_list(
        self,
        counts: Any,
        gone: Any,
        scratch: Scratch,
        tell: Tell | None = None,
    ) -> Any:
        """(2, m) node ids, sorted, each edge once; without the places `gone` (sorted) in that list.

        `counts` as `count` found them: they say where each range goes.
        """
        starts = np.append(0, np.cumsum(counts))
        m = int(starts[-1]) - gone.shape[0]
        kind = np.dtype(np.int32 if self._n < 2**31 else np.int64)

        def write(i: int) -> None:
            a, b = np.searchsorted(gone, starts[i : i + 2])
            keys = np.delete(self._range(i), gone[a:b] - starts[i])
            lo = keys // self._n
            keys -= lo * self._n
            at = int(starts[i] - a) * kind.itemsize
            scratch.write(at, lo.astype(kind))
            scratch.write(at + m * kind.itemsize, keys.astype(kind))

        in_parallel(write, range(self.ranges), tell)
        return scratch.array(kind, (2, m))

    def _range(self, i: int) -> Any:
        """The keys of a range, sorted, each once."""
        pieces = [(cuts[i], int(cuts[i + 1] - cuts[i])) for cuts in self._cuts]
        keys = np.empty(sum(size for _, size in pieces), dtype=np.int64)
        end = 0
        for start, size in pieces:
            self._scratch.read(int(start) * keys.itemsize, keys[end : end + size])
            end += size
        keys.sort()
        return distinct(np, keys)


def in_parallel(
    task: Callable[[int], None], given: Iterable[int], tell: Tell | None = None
) -> None:
    """The task for each of the numbers, by all threads; `tell` hears how many are done."""
    given = list(given)
    with ThreadPoolExecutor(num_threads()) as pool:
        for done, _ in enumerate(pool.map(task, given), 1):
            if tell is not None:
                tell(done, len(given))
