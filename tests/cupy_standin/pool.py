"""A model of CuPy's memory pool: how much of a device a series of allocations really takes.

The pool rounds sizes up to 512 bytes, takes the smallest free piece that is large enough and
splits it, joins neighbours that are free, and asks the device for more when nothing fits.  Where
the device has no more, it first gives back the blocks that are free as a whole.  Pieces that no
longer fit together make a pool larger than the bytes in use.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.cupy_standin import device_array

UNIT = 512
Trace = list[tuple[int, int]]  # (which array, its bytes; -1 when it is freed)


@dataclass(eq=False)
class Piece:
    """A part of a block that the device gave."""

    size: int
    before: Piece | None = None
    after: Piece | None = None

    def split(self, size: int) -> Piece | None:
        """Keep `size` bytes; the rest, if there is one."""
        if self.size == size:
            return None
        rest = Piece(self.size - size, self, self.after)
        if self.after is not None:
            self.after.before = rest
        self.size, self.after = size, rest
        return rest

    def join(self, other: Piece) -> None:
        """Take the next piece in."""
        self.size, self.after = self.size + other.size, other.after
        if self.after is not None:
            self.after.before = self


@dataclass
class Pool:
    """The pool of one stream, on a device of `limit` bytes."""

    limit: float = float("inf")
    total: int = 0  # bytes of the device that the pool holds
    most: int = 0
    _free: list[tuple[int, int, Piece]] = field(default_factory=list)  # sorted by size

    def take(self, size: int) -> Piece:
        size = max(1, -(-size // UNIT)) * UNIT
        at = bisect_left(self._free, (size,))
        if at < len(self._free):
            piece = self._free.pop(at)[2]
            rest = piece.split(size)
            if rest is not None:
                self._keep(rest)
            return piece
        if self.total + size > self.limit:
            self._give_back()
        if self.total + size > self.limit:
            raise MemoryError(f"{size:,} bytes, and {self.total:,} of {self.limit:,} are held")
        self.total += size
        self.most = max(self.most, self.total)
        return Piece(size)

    def release(self, piece: Piece) -> None:
        if piece.after is not None and self._taken_out(piece.after):
            piece.join(piece.after)
        if piece.before is not None and self._taken_out(piece.before):
            piece.before.join(piece)
            piece = piece.before
        self._keep(piece)

    def _keep(self, piece: Piece) -> None:
        insort(self._free, (piece.size, id(piece), piece))

    def _taken_out(self, piece: Piece) -> bool:
        at = bisect_left(self._free, (piece.size, id(piece)))
        found = at < len(self._free) and self._free[at][2] is piece
        if found:
            self._free.pop(at)
        return found

    def _give_back(self) -> None:
        whole = [entry for entry in self._free if entry[2].before is entry[2].after is None]
        self._free = [entry for entry in self._free if entry not in whole]
        self.total -= sum(size for size, _, _ in whole)


def replay(trace: Iterable[tuple[int, int]], limit: float = float("inf"), scale: int = 1) -> Pool:
    """The pool after a trace, with every size times `scale`, as a graph so much larger has it."""
    pool, held = Pool(limit), {}
    for key, size in trace:
        if size >= 0:
            held[key] = pool.take(size * scale)
        elif key in held:
            pool.release(held.pop(key))
    return pool


def peak(trace: Trace) -> int:
    """The most bytes in use at once."""
    held: dict[int, int] = {}
    most = now = 0
    for key, size in trace:
        now += size if size >= 0 else -held.pop(key, 0)
        if size >= 0:
            held[key] = size
        most = max(most, now)
    return most


@contextmanager
def recorded() -> Iterator[Trace]:
    """What is allocated and freed on the device meanwhile."""
    trace: Trace = []
    device_array.traces.append(trace)
    try:
        yield trace
    finally:
        device_array.traces.remove(trace)
