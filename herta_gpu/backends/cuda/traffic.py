"""Bytes that the kernels must move at least, counted launch by launch while somebody profiles.

Two events around each launch also tell how long it took, except within steps that are captured.

What must move is every array that a launch reads or writes, once, and those that it updates in
place twice.  Gathers of neighbours come on top as far as the caches do not absorb them, and what a
kernel really moves is for a profiler to say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Blocks that are read and written by the same launch: each counts once more.
_UPDATED = dict.fromkeys(("chebyshev", "chebyshev_half", "cg_residual", "cg_descend"), 1)
_UPDATED["cg_direction"] = 2
_BY_BLOCKS = ("laplacian.cu", "cg.cu")  # their first arguments are n and k
_RESIDUAL_ROWS = 18  # where the first of its rows stands among the arguments of residual
_TYPES = re.compile(r"_[fiu](32|64).*$")


@dataclass
class Traffic:
    """Launches and bytes by kernel, without the types in its name."""

    launches: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    rates: dict[str, float] = field(default_factory=dict)  # bytes a second, after `settle`
    copy_rate: float = 0.0  # that of a plain copy, read and written
    timed: list[tuple[str, int, Any, Any]] = field(default_factory=list)  # name, bytes, two events

    def settle(self, xp: Any) -> None:
        """Make rates of the events, whose work must be over."""
        moved, seconds = Counter[str](), Counter[str]()
        for name, size, begun, ended in self.timed:
            moved[name] += size
            seconds[name] += xp.cuda.get_elapsed_time(begun, ended) / 1e3
        self.rates = {name: moved[name] / s for name, s in seconds.items() if s > 0}
        self.timed.clear()


counting: list[Traffic] = []  # those who count all launches at this time


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count all launches within the block."""
    counting.append(Traffic())
    try:
        yield counting[-1]
    finally:
        counting.pop()


@contextmanager
def watch_launch(xp: Any, file: str, kernel: str, args: tuple[Any, ...]) -> Iterator[None]:
    """Around a launch while somebody counts."""
    stream, name = xp.cuda.get_current_stream(), _TYPES.sub("", kernel)
    size, events = must_move(file, name, args), [xp.cuda.Event() for _ in range(2)]
    timed = not stream.is_capturing()
    if timed:
        events[0].record(stream)
    yield
    if timed:
        events[1].record(stream)
    for traffic in counting:
        traffic.launches[name] += 1
        traffic.moved[name] += size
        traffic.timed += [(name, size, *events)] if timed else []


def copy_rate(xp: Any, size: int) -> float:
    """Bytes a second that memcpy reads and writes; `size` is more than the caches hold."""
    stream, ends = xp.cuda.get_current_stream(), [xp.cuda.Event() for _ in range(2)]
    X, Y = xp.zeros(size, dtype="int8"), xp.zeros(size, dtype="int8")
    for event in ends:  # the first copy is not timed
        runtime = xp.cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(Y.data.ptr, X.data.ptr, size, kind, stream.ptr)
        event.record(stream)
    stream.synchronize()  # synchronize!
    return 2 * size / max(1e-9, xp.cuda.get_elapsed_time(*ends) / 1e3)


def note_again(traffic: Traffic) -> None:
    """The launches of `traffic` once more: a captured graph is replayed."""
    for other in counting:
        other.launches.update(traffic.launches)
        other.moved.update(traffic.moved)


def must_move(file: str, name: str, args: tuple[Any, ...]) -> int:
    """The bytes of one launch of a kernel, `name` without its types."""
    arrays = [a for a in args if not isinstance(a, np.generic)]
    if name == "pack_rows":  # some rows of the first array
        return arrays[1].nbytes + 2 * arrays[2].nbytes
    if file not in _BY_BLOCKS or name == "cg_turn":
        return sum(a.nbytes for a in arrays)
    n, k = int(args[0]), int(args[1])
    blocks = [a for a in arrays if a.ndim == 2 and a.size]
    rows = n
    if name == "residual":  # of some rows: B and the result hold no others
        rows = int(args[_RESIDUAL_ROWS + 1] - args[_RESIDUAL_ROWS])
        blocks = blocks[:-2] if blocks[-1].shape == (2, k) else blocks  # no partials, no dots
    if name == "hub_sums":  # all that it reads is gathered
        return sum(a.nbytes for a in blocks if a.shape[0] != n)
    if name == "column_dots":  # often of a block with itself
        blocks = list({a.__cuda_array_interface__["data"][0]: a for a in blocks}.values())
    # Blocks of other heights are scratch: partial sums and tickets.
    sizes = [a.nbytes * rows // a.shape[0] for a in blocks if a.shape[0] in (n, rows)]
    flat = sum(a.nbytes for a in arrays if a.ndim == 1) * rows // n
    return sum(sizes) + flat + _UPDATED.get(name, 0) * n * k * blocks[0].itemsize
