"""What ranks say to each other: sums in a fixed order, and arrays to all.

Every exchange is a message from each rank to each other one, which starts without blocking and is
waited for in one place, `wait_for`.  A rank that waits gives its core away.  MPI's own collective
calls are not used: one that a rank has begun can neither be left nor taken back, and the order in
which they add is not known.

An error of one rank ends a block (`together`) on all of them with the same sentence: it goes to
the others as a message of its own, which they find where they wait (`_failed`).  Whatever else was
under way is then cleared.  A rank that waits for `HERTA_TIMEOUT` seconds ends the job, and names
those who did not come.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

FEW = 8192  # numbers up to which every rank adds up all of them
_PIECE = 1 << 30  # bytes of one message: MPI 3 counts to 2^31
_LARGE = ("shared", "gathered", "rows of neighbours")  # what takes time for its size
_MARK = 96  # bytes of what a rank says of an exchange in the debug mode
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


class CommonError(ValueError):
    """An error that every rank raises alike: its message names no rank."""


class Channel(ABC):
    """Arrays of one kind, those of `xp`, on their way between all ranks."""

    xp: Any = np
    rank: int
    size: int

    @abstractmethod
    def each(self, x: Any) -> list[Any]:
        """All ranks' objects, in their order."""

    @abstractmethod
    def of_ranks(self, x: Any, what: str) -> Any:
        """(ranks, ...) the arrays of all ranks, which have the same shape and type."""

    @abstractmethod
    def exchange(self, out: Any, into: Any, what: str, shape: tuple[int, ...] = ()) -> None:
        """out[r] to each rank r, and into[r] from there, which are arrays or lists of such.

        `what` and `shape` tell what it is.
        """

    def total(self, x: Any) -> Any:
        """The sum of all ranks' x, added in their order; the same bits on all of them.

        Of more than a few numbers every rank adds up one share, and sends it to all.
        """
        xp, size = self.xp, self.size
        x = xp.ascontiguousarray(x).reshape(np.shape(x))  # which it makes (1,) of ()
        if x.size <= FEW:
            return _sum_in_order(self.of_ranks(x, "total"))
        share = -(-x.size // size)
        padded = xp.zeros((size, share), dtype=x.dtype)
        padded.reshape(-1)[: x.size] = x.reshape(-1)
        parts = xp.empty_like(padded)
        self.exchange(padded, parts, "total", x.shape)
        sums = self.of_ranks(_sum_in_order(parts), "sums")
        return sums.reshape(-1)[: x.size].reshape(x.shape)

    def gather(self, x: Any) -> tuple[Any, slice]:
        """The rows of all ranks one after the other, and where those of this rank are."""
        if x.dtype.kind == "U":  # text is as wide as the longest that a rank has
            x = x.astype(f"U{max(1, *self.each(x.dtype.itemsize // 4))}")
        ends = np.cumsum([0, *self.each(int(x.shape[0]))]).tolist()
        whole = self.xp.empty((ends[-1], *x.shape[1:]), dtype=x.dtype)
        parts = [whole[a:b] for a, b in pairwise(ends)]
        self.exchange([self.xp.ascontiguousarray(x)] * self.size, parts, "gathered")
        return whole, slice(ends[self.rank], ends[self.rank + 1])

    def share(self, made: dict[Any, Any]) -> list[dict[Any, Any]]:
        """The arrays that each rank has made, by name, on all ranks."""
        # Whoever is late is waited for here.
        theirs = self.each({name: (a.shape, a.dtype.str) for name, a in made.items()})
        found = [
            {name: self.xp.empty(shape, dtype=dtype) for name, (shape, dtype) in about.items()}
            for about in theirs
        ]
        out = [self.xp.ascontiguousarray(a) for a in made.values()]
        self.exchange([out] * self.size, [list(f.values()) for f in found], "shared")
        return found


class Ranks(Channel):
    """The processes of an MPI communicator, as a fit uses them.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        It is duplicated, so that nothing else on it meets these messages.

    Attributes
    ----------
    rank, size : int
    waited, sent : float
        Seconds that this rank waited for others, and that messages took.

    Notes
    -----
    ``HERTA_TIMEOUT`` (default 600) is the number of seconds after which a rank that waits ends the
    job.  ``HERTA_DEBUG_RANKS=1`` numbers all exchanges and compares what each rank has come for,
    and compares the bits of what should be the same everywhere.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._data, self._control = comm.Dup(), comm.Dup()
        text = os.environ.get("HERTA_TIMEOUT", "") or "600"
        try:
            self.timeout = float(text)
        except ValueError:
            self.timeout = -1.0
        if not self.timeout > 0:
            raise ValueError(f"HERTA_TIMEOUT must be a positive number of seconds, not {text!r}.")
        self.number = 0  # exchanges so far
        self.nccl: Any = None  # how arrays on GPUs travel: `backends.ranks.nccl`
        self._depth = 0  # of blocks of `together`
        self._open: list[MPI.Request] = []  # messages of an exchange that was left
        _abort_where_uncaught(self._control)
        self.debug = os.environ.get("HERTA_DEBUG_RANKS", "0") == "1"
        self.waited = self.sent = 0.0
        self._begun = time.perf_counter()
        self._alone = False

    # ---- numbers ------------------------------------------------------------------------
    def total(self, x: Any) -> Any:
        found = super().total(x)
        return found if isinstance(x, np.ndarray) else found.item()

    def largest(self, x: Any) -> Any:
        """The largest of all ranks' x, entry by entry."""
        mine = np.ascontiguousarray(x).reshape(np.shape(x))
        found = self.of_ranks(mine, "largest").max(axis=0)
        return found if isinstance(x, np.ndarray) else found.item()

    def each(self, x: Any) -> list[Any]:
        mine = np.frombuffer(pickle.dumps(x), dtype=np.uint8)
        counts = self.of_ranks(np.array([mine.shape[0]]), "each")[:, 0]
        parts = [np.empty(int(count), dtype=np.uint8) for count in counts]
        self.exchange([mine] * self.size, parts, "each")
        return [pickle.loads(part.tobytes()) for part in parts]

    def agree(self, x: Any) -> Any:
        """What rank 0 has."""
        found = self.each(x if self.rank == 0 else None)
        return x if self.rank == 0 else found[0]

    def same(self, x: Any, what: str, always: bool = False) -> None:
        """An error on all ranks unless they have the same bits of `x`; in the debug mode, or
        `always`."""
        if not (self.debug or always):
            return
        bits = np.ascontiguousarray(x).data if hasattr(x, "tobytes") else repr(x).encode()
        seen = self.each(hashlib.sha256(bits).hexdigest())
        other = next((r for r, found in enumerate(seen) if found != seen[0]), None)
        if other is not None:
            kind = ValueError if always else RuntimeError
            raise kind(f"Ranks 0 and {other} should have the same {what}, but have not.")

    def seconds(self) -> list[dict[str, float]]:
        """Of each rank since it began: what it worked, waited for others, and sent."""
        work = time.perf_counter() - self._begun - self.waited - self.sent
        return self.each({"work": work, "waiting": self.waited, "messages": self.sent})

    def hosts(self) -> list[int]:
        """Of each rank, the first one that runs on the same machine."""
        self.arrive()  # what follows cannot be left any more
        here = self._control.Split_type(MPI.COMM_TYPE_SHARED)
        first = here.bcast(self.rank)
        here.Free()
        return self.each(first)

    # ---- arrays -------------------------------------------------------------------------
    def exchange_rows(self, parts: Sequence[Any]) -> list[Any]:
        """Rows for each rank (`parts`, one array per rank) for what they have for this one."""
        counts = np.array([[part.shape[0]] for part in parts], dtype=np.int64)
        theirs = np.empty_like(counts)
        self.exchange(counts, theirs, "exchanged", counts.shape)
        got = [np.empty((int(n), *parts[0].shape[1:]), dtype=parts[0].dtype) for n in theirs[:, 0]]
        self.exchange([np.ascontiguousarray(part) for part in parts], got, "exchanged")
        return got

    def exchange(self, out: Any, into: Any, what: str, shape: tuple[int, ...] = ()) -> None:
        self.mark(what, shape)
        for piece, own in zip(_pieces(into[self.rank]), _pieces(out[self.rank])):
            piece[...] = own
        self.wait_for(self.send(out, into), what)

    def send(self, out: Sequence[Any], into: Sequence[Any]) -> list[MPI.Request]:
        """Messages under way: out[r] to rank r, into[r] from there; `wait_for` waits for them."""
        requests = []
        for step in range(1, self.size):
            to, by = (self.rank + step) % self.size, (self.rank - step) % self.size
            requests += [self._data.Irecv(piece, by) for piece in _pieces(into[by])]
            requests += [self._data.Isend(piece, to) for piece in _pieces(out[to])]
        return requests

    def wait_for(self, requests: list[MPI.Request], what: str) -> None:
        """Until these messages have come and gone, unless another rank has failed."""
        start = now = time.perf_counter()
        while not MPI.Request.Testall(requests):
            depth = self._failed()
            if depth:
                self._open += requests
                raise OtherRankFailed(depth)
            self._sleep(now - start, what)
            now = time.perf_counter()
        if what in _LARGE:
            self.sent += now - start
        else:
            self.waited += now - start

    def of_ranks(self, x: Any, what: str) -> Any:
        found = np.empty((self.size, *x.shape), dtype=x.dtype)
        self.exchange([x] * self.size, [found[r : r + 1] for r in range(self.size)], what, x.shape)
        return found

    def mark(self, what: str, shape: tuple[int, ...]) -> None:
        """Count an exchange; in the debug mode, all ranks must have come for the same one."""
        if self._alone:
            raise RuntimeError(f"A rank has come for {what} {shape} in the middle of its own work.")
        self.number += 1
        if not self.debug:
            return
        text = f"{what} {shape} as number {self.number}".encode()[:_MARK]
        mine = np.frombuffer(text.ljust(_MARK), np.uint8)
        seen = np.tile(mine, (self.size, 1))
        self.wait_for(self.send([mine] * self.size, list(seen)), what)
        said = [bytes(row).decode().strip() for row in seen]
        other = next((r for r, found in enumerate(said) if found != said[0]), None)
        if other is not None:
            raise RuntimeError(
                f"Rank 0 has come for {said[0]}, rank {other} for {said[other]}: a branch was "
                "taken on a number that is not the same on all ranks."
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around what a rank does on its own: the others would not come to an exchange in it."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def arrive(self) -> None:
        """Wait until all ranks are here."""
        self.of_ranks(np.zeros(1), "the others")

    # ---- faults -------------------------------------------------------------------------
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
        rank, first = failed[0], errors[failed[0]]
        alike = len(failed) == self.size and len({str(e) for e in errors}) == 1
        raised_here: Any = first
        if not alike and not isinstance(first, CommonError):
            try:
                raised_here = type(first)(f"Rank {rank}: {first}")
            except Exception:
                raised_here = RuntimeError(f"Rank {rank}: {type(first).__name__}: {first}")
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
                # Its end came first, so it is there by the second look if a fault is by the first.
                failed = self._control.Iprobe(r, tags[1])
                done = self._control.Iprobe(r, tags[0])
                if done or failed:
                    found[r] = self._control.recv(source=r, tag=tags[not done])
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


_RANKS = MPI.Comm.Create_keyval()  # of an attribute of a communicator, which goes with it


def ranks_of(comm: Any) -> Ranks:
    """The ranks of a communicator: always the same object for the same one."""
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm must be an mpi4py.MPI.Comm, not {type(comm).__name__}.")
    found: Any = comm.Get_attr(_RANKS)
    ranks: Ranks = found or Ranks(comm)
    if found is None:
        comm.Set_attr(_RANKS, ranks)
    return ranks


def _sum_in_order(parts: Any) -> Any:
    """The sum over the first axis: NumPy's own may pair them otherwise."""
    total = parts[0].copy()
    for r in range(1, parts.shape[0]):
        total += parts[r]
    return total


def _pieces(a: Any) -> list[Any]:
    """The bytes of contiguous arrays in pieces that one message takes."""
    if isinstance(a, list):
        return [piece for array in a for piece in _pieces(array)]
    flat = a.reshape(-1).view(np.uint8)
    return [flat[i : i + _PIECE] for i in range(0, flat.shape[0], _PIECE)]


def _abort_where_uncaught(comm: MPI.Comm) -> None:
    """An error that ends one rank's program ends the others, too, but for one that all know of."""
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
