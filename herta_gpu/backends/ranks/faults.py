"""What happens when one of the ranks fails, or does not come.

An error of one rank ends a block (`together`) on all of them with the same sentence: it goes to
the others as a message of its own, which they find where they wait (`_failed`).  Whatever else was
under way is then cleared.  A rank that waits for `HERTA_TIMEOUT` seconds ends the job, and names
those who did not come.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

# Tags.  Blocks of `together` may lie within others: the first two are added to how deep they lie.
_DONE, _FAILED, _WAITS = 1000, 2000, 1
_YIELD, _NAP = 1e-3, 2e-4  # seconds a rank polls for before it sleeps, and sleeps at a time
_LAST_WORDS = 2.0  # seconds in which ranks say where they wait, before the job ends


class OtherRankFailed(BaseException):
    """Raised where a rank waits for one that has failed; `together` replaces it.

    `depth` tells in which block the other one failed: those within are left without a word.
    """

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.depth = depth


class Faults:
    """The part of `Ranks` that ends together what was begun together."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._data, self._control = comm.Dup(), comm.Dup()
        self.timeout = _seconds("HERTA_TIMEOUT", 600.0)
        self.number = 0  # exchanges so far
        self.nccl: Any = None  # how arrays on GPUs travel: `backends.ranks.nccl`
        self._depth = 0  # of blocks of `together`
        self._open: list[MPI.Request] = []  # messages of an exchange that was left
        _abort_where_uncaught(self._control)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What goes wrong on one rank ends this block on all of them, with the same sentence.

        No rank leaves the block before all have come to its end.
        """
        error: BaseException | None = None
        self._depth += 1
        try:
            try:
                yield
            except OtherRankFailed as failed_there:
                if failed_there.depth < self._depth:
                    raise
            except BaseException as raised:
                error = raised
            errors = self._at_the_end(error)
        finally:
            self._depth -= 1
        failed = [r for r, found in enumerate(errors) if found is not None]
        if not failed:
            return
        self._clear()
        first = errors[failed[0]]
        alike = len(failed) == self.size and len({str(e) for e in errors}) == 1
        alike = alike or getattr(first, "common", False)
        raised_here: Any = first if alike else _of_rank(failed[0], first)
        raised_here.on_all_ranks = True
        raise raised_here from error

    def _at_the_end(self, error: BaseException | None) -> list[Any]:
        """How each rank came to the end of a block: with an error, or None.

        This message also tells those who still wait for something that it will not come.
        """
        others = [r for r in range(self.size) if r != self.rank]
        said, tags = _pickled(error), (_DONE + self._depth, _FAILED + self._depth)
        sent = [self._control.isend(said, r, tags[error is not None]) for r in others]
        found, start = {self.rank: said}, time.perf_counter()
        while len(found) < self.size:
            missing = [r for r in others if r not in found]
            for r in missing:
                # One that is done may have failed since, in the next block; never the other way.
                tag = next((tag for tag in tags if self._control.Iprobe(r, tag)), None)
                if tag is not None:
                    found[r] = self._control.recv(source=r, tag=tag)
            depth = self._failed(self._depth - 1)
            if depth:
                raise OtherRankFailed(depth)
            self._sleep(time.perf_counter() - start, f"the end of rank {missing[0]}")
        for request in sent:
            request.wait()
        return [pickle.loads(found[r]) for r in range(self.size)]

    def failed(self) -> bool:
        """Whether another rank has failed; another thread may ask, where MPI allows threads."""
        return MPI.Query_thread() == MPI.THREAD_MULTIPLE and self._failed() > 0

    def leave(self) -> NoReturn:
        """Leave what will not come any more, for another rank has failed."""
        raise OtherRankFailed(self._failed() or self._depth)

    def _failed(self, depth: int | None = None) -> int:
        """The outermost block, down to the present one or to `depth`, that another rank failed in.

        0: none.  Who failed further within has left nothing undone that is waited for here.
        """
        depths = range(1, (self._depth if depth is None else depth) + 1)
        return next((d for d in depths if self._control.Iprobe(tag=_FAILED + d)), 0)

    def _clear(self) -> None:
        """Get rid of all that is under way, now that nobody begins anything any more.

        What was to come is taken back.  What was to go is taken by those who do not want it any
        more: only once all ranks are rid of theirs do they go on.
        """
        if self.nccl is not None:
            self.nccl.close()
        open_, self._open, self.number = [r for r in self._open if not r.Test()], [], 0
        for request in open_:
            request.Cancel()  # a message that is on its way to another rank stays so
        barrier, status, start = None, MPI.Status(), time.perf_counter()
        while barrier is None or not barrier.Test():
            while self._data.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                scrap = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
                self._data.Recv(scrap, status.source, status.tag)
            if barrier is None and MPI.Request.Testall(open_):
                barrier = self._control.Ibarrier()
            self._sleep(time.perf_counter() - start, "the end of a failure")
        # Others, where nothing can still come in late.
        self._data, self._control = self._control.Dup(), self._control.Dup()

    def _sleep(self, waited: float, what: str) -> None:
        """Give the core away for a moment; after `timeout` seconds, end the job."""
        if waited > self.timeout:
            self.give_up(what)
        time.sleep(0 if waited < _YIELD else _NAP)

    def end(self, sentence: str) -> NoReturn:
        """End the job of all ranks."""
        print(f"herta: {sentence}", file=sys.__stderr__, flush=True)
        self._control.Abort(1)
        raise SystemExit(1)

    def give_up(self, what: str) -> NoReturn:
        """End the job, and say which ranks did not come."""
        for r in range(self.size):
            if r != self.rank:
                self._control.isend(None, r, _WAITS)
        there, end = {self.rank}, time.perf_counter() + _LAST_WORDS
        status = MPI.Status()
        while time.perf_counter() < end:
            if self._control.Iprobe(tag=_WAITS, status=status):
                self._control.recv(source=status.source, tag=_WAITS)
                there.add(status.source)
            time.sleep(0.01)
        if self.rank == min(there):
            missing = [str(r) for r in range(self.size) if r not in there]
            who = f"rank {', '.join(missing)}" if missing else "one another (they went other ways)"
            self.end(
                f"The ranks have waited {self.timeout:g} s for {who}, at {what} (exchange "
                f"{self.number:,}): the job is ended."
            )
        time.sleep(_LAST_WORDS)  # the sentence comes first
        self._control.Abort(1)
        raise SystemExit(1)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Around what one rank does for all, however long it takes: nobody gives up on it."""
        before, self.timeout = self.timeout, math.inf
        try:
            yield
        finally:
            self.timeout = before


def mark_common(error: ValueError) -> ValueError:
    """Mark an error that every rank raises alike: its message then names no rank."""
    error.common = True  # type: ignore[attr-defined]
    return error


def _abort_where_uncaught(comm: MPI.Comm) -> None:
    """An error that ends one rank's program ends the others, too, instead of leaving them waiting.

    One that all ranks know of already needs no more than that.
    """
    before: Callable[..., Any] = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        before(kind, error, trace)
        if not getattr(error, "on_all_ranks", False):
            sys.stderr.flush()
            comm.Abort(1)

    sys.excepthook = hook


def _pickled(error: BaseException | None) -> bytes:
    """An error as bytes; one that cannot travel becomes a RuntimeError with the same words."""
    try:
        text = pickle.dumps(error)
        pickle.loads(text)
        return text
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _of_rank(rank: int, error: BaseException) -> BaseException:
    """The same kind of error, which says where it happened."""
    try:
        made = type(error)(f"Rank {rank}: {error}")
    except Exception:
        return RuntimeError(f"Rank {rank}: {type(error).__name__}: {error}")
    return made if isinstance(made, type(error)) else error


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text or default)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ValueError(f"{name} must be a positive number of seconds, not {text!r}.")
    return value
