"""Where the time goes: one context manager around every stage.

Stages, outer steps, solves, their cycles and residuals, blocks of Q and passes over X are also NVTX
ranges, of the domain "herta", so that a profiler shows what the device did in each.  Without the
package nvtx these ranges cost nothing; without a profiler, about a microsecond each.

A bar is a line that a terminal prints anew, and that a log file gets now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from math import inf, log10
from shutil import get_terminal_size

try:
    import nvtx
except ImportError:
    nvtx = None


SHORTEST = 0.005  # seconds: a stage below it shows as 0.00 and is not worth a line
EVERY = 10.0  # seconds between two lines of progress in a log file
OFTEN = 0.1  # ... and on a terminal, where each takes the place of the one before

Tell = Callable[[float, int], None]  # hears how much is done, and of how much

_NO_RANGE = nullcontext()


def marked(name: str, **about: object) -> AbstractContextManager[object]:
    """A range on the profiler's time line: ``solve (columns 64, tol 1e-06)``.

    What is told `about` it becomes text only where the package nvtx is installed.
    """
    if nvtx is None:
        return _NO_RANGE
    told = ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in about.items()
    )
    return nvtx.annotate(f"{name} ({told})" if told else name, domain="herta")


def marked_steps(steps: range) -> Iterator[int]:
    """The same numbers, with a range around each turn of the loop over them."""
    for step in steps:
        with marked(f"step {step}"):
            yield step


class Compilation:
    """The seconds that kernels took to compile; the backend that compiles them says when."""

    depth, seconds, _begun, _next = 0, 0.0, 0.0, 0.0
    tell: Callable[[str], object] = str  # how the stage in work shows a line

    def start(self) -> None:
        if self.depth == 0:
            self._begun = time.perf_counter()
            if self._begun >= self._next:  # of many kernels, one after the other
                self.tell("compiling kernels, once on this machine ...")
                self._next = self._begun + EVERY
        self.depth += 1

    def end(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.seconds += time.perf_counter() - self._begun


compilation = Compilation()


@dataclass
class Stages:
    """Seconds per stage of a fit, and its progress on the terminal when `verbose`."""

    verbose: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    # Called at the end of a stage: a device that works on its own is waited for, so that no stage
    # is charged for what an earlier one has begun.
    wait: Callable[[], object] | None = None
    started: float = field(default_factory=time.perf_counter)
    _held: str = ""  # the line of the last step, if it was not printed

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.verbose and sys.stderr.isatty():
            self.note(f"{name} ...")
        start, compiled, told = time.perf_counter(), compilation.seconds, compilation.tell
        compilation.tell = self.note
        try:
            with marked(name):
                yield
                if self.wait is not None:
                    self.wait()
        except BaseException:  # a stage that failed has no time to show: the error comes next
            if self.verbose and sys.stderr.isatty():
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            raise
        finally:
            compilation.tell = told
        if self._held:
            self.note(self._held, stays=True)
            self._held = ""
        compiled = compilation.seconds - compiled
        shares = {name: time.perf_counter() - start - compiled}
        for what, spent in (shares | ({"compile": compiled} if compiled else {})).items():
            self.seconds[what] = self.seconds.get(what, 0.0) + spent
            if spent >= SHORTEST:
                self.note(f"{what:<15}{spent:8.2f} s", stays=True)

    def since(self, before: dict[str, float]) -> dict[str, float]:
        """Seconds per stage that came after `before`, an earlier copy of `seconds`."""
        spent = {name: s - before.get(name, 0.0) for name, s in self.seconds.items()}
        return {name: s for name, s in spent.items() if name not in before or s > 0}

    def step(self, step: int, gap: float, goal: float, loss: float, warm: bool = False) -> None:
        """Show one step: a bar that fills as the certified gap falls to its goal.

        A `warm` step is one on a cheaper model that goes first; nothing of it is certified.
        """
        shown = f"certified gap {gap:.1e}" if gap < inf else "not certified yet    "
        share = 0.0
        if gap < inf and goal < 1:  # 0 at a gap of 1 and 1 at the goal, on a logarithmic scale
            share = min(1.0, max(0.0, log10(max(gap, 1e-300)) / log10(goal)))
        name = "warm" if warm else "step"
        text = f"{name} {step:4d}  [{_bar(share)}]  {shown}  loss {loss:.6g}"
        often = step <= 10 or step % 10 == 0
        self._held = "" if often or sys.stderr.isatty() else text
        if not self._held:
            self.note(text)

    def progress(self, name: str, what: str) -> Tell:
        """A function of (done, all) that shows a bar, and the time that the rest will take.

        Whoever calls it begins with 0; `done` may lie within a part.  The pace is that of the
        newest twentieth at least, since earlier parts may have been read from a checkpoint.
        """
        most, before, since, shown = 0.0, 0.0, time.perf_counter(), time.perf_counter()

        def tell(done: float, of: int) -> None:
            nonlocal most, before, since, shown
            now = time.perf_counter()
            if done <= most:  # what is less was told by another process, or it begins again
                if done == 0:
                    most, before, since = 0.0, 0.0, now
                return
            most, pace = done, (now - since) / (done - before)
            if done - before >= of / 20:
                before, since = done, now
            terminal = sys.stderr.isatty()
            if now - shown >= (OFTEN if terminal else EVERY) or (terminal and done == of):
                shown = now
                left = f", about {_duration(pace * (of - done))} left" if done < of else ""
                if left or terminal:
                    counts = f"{int(done):,} of {of:,} {what}"
                    self.note(f"{name:<9}  [{_bar(done / of)}]  {counts}{left}")

        return tell

    def note(self, text: str, stays: bool = False) -> None:
        """Show what goes on; on a terminal the next line takes its place unless it `stays`."""
        if not self.verbose:
            return
        with suppress(OSError):  # a full disk or a closed pipe is no reason to stop a fit
            if sys.stderr.isatty():
                # A line that is wider than the terminal could not be taken back.
                text = text if stays else text[: get_terminal_size().columns - 1]
                print(f"\r\033[K{text}", end="\n" if stays else "", file=sys.stderr, flush=True)
            else:
                print(text, file=sys.stderr, flush=True)


def _bar(share: float, width: int = 24) -> str:
    filled = int(width * share)
    return "#" * filled + "." * (width - filled)


def _duration(seconds: float) -> str:
    """A time as one says it: 90 s, 25 min, 3.5 h."""
    minutes = seconds / 60
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
