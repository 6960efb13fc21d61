"""What the stand-in counts: launches, CuPy calls, synchronisations, copies and bytes, by stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

COLUMNS = ("launches", "calls", "syncs", "to_device", "to_host", "bytes_up", "bytes_down")


@dataclass
class Ledger:
    """Counts since `clear`, split by the innermost open `stage`."""

    stages: dict[str, Counter[str]] = field(default_factory=dict)
    kernels: Counter[str] = field(default_factory=Counter)  # launches by name
    traffic: dict[str, list[int]] = field(default_factory=dict)  # bytes read, written, by name
    swept: int = 0  # bytes that CuPy's own operations read and wrote
    held: int = 0  # bytes allocated on the device now
    peak: int = 0
    largest_download: int = 0
    staged: int = 0  # bytes that CuPy's pool of pinned memory holds after its own uploads
    pinned: list[int] = field(default_factory=list)  # sizes of pinned memory beside that pool
    most_pinned: float = inf  # bytes of it that the system gives
    _stage: str = "outside"

    def clear(self) -> None:
        self.stages.clear()
        self.kernels.clear()
        self.traffic.clear()
        self.pinned.clear()
        self.swept = 0
        self.peak, self.largest_download, self.staged, self.most_pinned = self.held, 0, 0, inf

    def add(self, what: str, count: int = 1) -> None:
        self.stages.setdefault(self._stage, Counter())[what] += count

    def launched(self, kernel: str, moved: tuple[int, int]) -> None:
        self.kernels[kernel] += 1
        total = self.traffic.setdefault(kernel, [0, 0])
        total[0] += moved[0]
        total[1] += moved[1]

    def uploaded(self, size: int) -> None:
        if size:
            self.add("to_device")
            self.add("bytes_up", size)

    def may_pin(self, size: int) -> bool:
        self.pinned.append(size)
        return sum(self.pinned) <= self.most_pinned

    def downloaded(self, size: int) -> None:
        self.add("syncs")
        self.add("to_host")
        self.add("bytes_down", size)
        self.largest_download = max(self.largest_download, size)

    def allocated(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)

    def freed(self, size: int) -> None:
        self.held -= size

    @property
    def moved(self) -> int:
        """Bytes that all kernels, ours (of the variant "count") and CuPy's, read and wrote."""
        return self.swept + sum(map(sum, self.traffic.values()))

    def total(self, what: str) -> int:
        return sum(counts[what] for counts in self.stages.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        outer, self._stage = self._stage, name
        try:
            yield
        finally:
            self._stage = outer

    def table(self) -> str:
        """One line per stage, in Markdown; what was streamed is part of what went up."""
        heads = (
            *("stage", "kernel launches", "CuPy calls", "synchronisations"),
            *("copies to the device", "copies to the host", "bytes up", "bytes down"),
        )
        columns = COLUMNS
        if self.total("bytes_streamed"):
            heads, columns = (*heads, "streamed"), (*COLUMNS, "bytes_streamed")
        lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * len(columns) + "|"]
        for name, counts in self.stages.items():
            cells = [name, *(f"{counts[c]:,}" for c in columns)]
            lines.append("| " + " | ".join(cells) + " |")
        total = ["total", *(f"{self.total(c):,}" for c in columns)]
        return "\n".join([*lines, "| " + " | ".join(total) + " |"])


LEDGER = Ledger()
