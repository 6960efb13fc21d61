"""Where the time goes: one context manager around every stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stages:
    """Seconds per stage of a fit, and its progress on the terminal when `verbose`."""

    verbose: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._show(f"{name} ...")
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            self._show(f"{name}: {spent:.2f} s", end="\n")

    def step(self, step: int, limit: int, gap: float, goal: float, loss: float) -> None:
        """One outer step: a bar that fills as the certified gap falls to its goal."""
        if self.verbose:
            decades = _decades(gap, goal)
            shown = f"{gap:.1e}" if gap < float("inf") else "none"
            text = f"step {step:3d}  [{decades}]  certified gap {shown}  loss {loss:.6g}"
            self._show(text, end="\n")

    def _show(self, text: str, end: str = "") -> None:
        if self.verbose:
            print(f"\r\033[K{text}" if sys.stderr.isatty() else text, end=end or "\r",
                  file=sys.stderr, flush=True)


def _decades(gap: float, goal: float, width: int = 24) -> str:
    """A bar from a gap of 1 (empty) down to the goal (full), on a logarithmic scale."""
    from math import inf, log10

    if gap == inf or goal >= 1:
        filled = 0
    else:
        filled = int(width * min(1.0, max(0.0, log10(max(gap, 1e-300)) / log10(goal))))
    return "#" * filled + "." * (width - filled)
