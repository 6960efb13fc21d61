"""What ranks say to each other: sums in a fixed order, arrays to all, and what went wrong.

Every exchange starts without blocking and is then waited for in one place, `_wait`.  There a rank
notices that another one has failed, and ends with the same sentence, or that nobody has come for
`HERTA_TIMEOUT` seconds, and ends the job.  A rank that waits gives its core away.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

FEW = 8192  # numbers up to which every rank adds up all of them
_PIECE = 1 << 30  # bytes of one message: MPI 3 counts to 2^31
_FAILED, _WAITS = 1, 2  # tags: a rank has failed; a rank says where it waits
_YIELD, _NAP = 1e-3, 2e-4  # seconds a rank polls for before it sleeps, and sleeps at a time
_LAST_WORDS = 2.0  # seconds in which ranks say where they wait, before the job ends
_MARK = 96  # bytes of what a rank says of an exchange in the debug mode


class _OtherRankFailed(BaseException):
    """Raised where a rank waits for one that has failed; `together` replaces it."""


class Ranks:
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
        self.timeout = _seconds("HERTA_TIMEOUT", 600.0)
        self.debug = os.environ.get("HERTA_DEBUG_RANKS", "0") == "1"
        self.number = 0  # exchanges so far
        self.waited = self.sent = 0.0
        self._inside = False
        self._orphans: list[Any] = []  # exchanges that never ended, with their buffers
        _abort_where_uncaught(self._control)

    def of(self, comm: MPI.Comm) -> bool:
        """Whether these are the processes of `comm`; handles of freed ones are used again."""
        return MPI.Comm.Compare(self._control, comm) in (MPI.IDENT, MPI.CONGRUENT)

    # ---- numbers ------------------------------------------------------------------------
    def total(self, x: Any) -> Any:
        """The sum of all ranks' x, added in their order; the same bits on all of them."""
        mine = np.ascontiguousarray(x)
        if mine.size <= FEW:
            parts = self._each(mine, "total")
            return _like(x, _added(parts))
        # Every rank adds up one share, in the order of ranks, and sends it to all.
        share = -(-mine.size // self.size)
        padded = np.zeros((self.size, share), dtype=mine.dtype)
        padded.reshape(-1)[: mine.size] = mine.reshape(-1)
        parts = np.empty_like(padded)
        self._mark("total", mine.shape)
        self._wait([self._data.Ialltoall(padded, parts)], "total", (padded, parts))
        sums = self._each(_added(parts), "sums")
        return _like(x, sums.reshape(-1)[: mine.size].reshape(mine.shape))

    def largest(self, x: Any) -> Any:
        """The largest of all ranks' x, entry by entry."""
        return _like(x, self._each(np.ascontiguousarray(x), "largest").max(axis=0))

    def each(self, x: Any) -> list[Any]:
        """All ranks' objects, in their order."""
        return [pickle.loads(part) for part in self._bytes(self._data, pickle.dumps(x), "each")]

    def agreed(self, x: Any) -> Any:
        """What rank 0 has."""
        found = self._bytes(self._data, pickle.dumps(x if self.rank == 0 else None), "agreed")
        return x if self.rank == 0 else pickle.loads(found[0])

    def same(self, x: Any, what: str, always: bool = False) -> None:
        """An error on all ranks unless they have the same bits of `x`; in the debug mode, or
        `always`."""
        if not (self.debug or always):
            return
        bits = x.tobytes() if hasattr(x, "tobytes") else repr(x).encode()
        seen = self.each(hashlib.sha256(bits).hexdigest())
        other = next((r for r, found in enumerate(seen) if found != seen[0]), None)
        if other is not None:
            kind = ValueError if always else RuntimeError
            raise kind(f"Ranks 0 and {other} should have the same {what}, but have not.")

    # ---- arrays -------------------------------------------------------------------------
    def gathered(self, x: Any) -> tuple[Any, slice]:
        """The rows of all ranks one after the other, and where those of this rank are."""
        counts = [int(n) for n in self._each(np.array([x.shape[0]]), "rows")[:, 0]]
        ends = np.cumsum([0, *counts]).tolist()
        whole = np.empty((ends[-1], *x.shape[1:]), dtype=x.dtype)
        whole[ends[self.rank] : ends[self.rank + 1]] = x
        parts = [whole[a:b] for a, b in pairwise(ends)]
        self._to_all(parts, "gathered")
        return whole, slice(ends[self.rank], ends[self.rank + 1])

    def shared(self, made: dict[Any, Any]) -> list[dict[Any, Any]]:
        """The arrays that each rank has made, by name, on all ranks."""
        self._arrive()
        about = {name: (a.shape, a.dtype.str) for name, a in made.items()}
        found = []
        for rank, named in enumerate(self.each(about)):
            mine = rank == self.rank
            found.append({
                name: np.ascontiguousarray(made[name]) if mine else np.empty(shape, dtype)
                for name, (shape, dtype) in named.items()
            })  # fmt: skip
        owned = [(a, rank) for rank, arrays in enumerate(found) for a in arrays.values()]
        self._to_all([a for a, _ in owned], "shared", [rank for _, rank in owned])
        return found

    def exchanged(self, parts: Sequence[Any]) -> list[Any]:
        """Rows for each rank (`parts`, one array per rank) for what they have for this one."""
        counts = np.array([part.shape[0] for part in parts], dtype=np.int64)
        theirs = np.empty_like(counts)
        self._mark("exchanged", counts.shape)
        self._wait([self._data.Ialltoall(counts, theirs)], "exchanged", (counts, theirs))
        got = [np.empty((int(n), *parts[0].shape[1:]), dtype=parts[0].dtype) for n in theirs]
        mine = [np.ascontiguousarray(part) for part in parts]
        got[self.rank][...] = mine[self.rank]
        self.sendrecv(mine, got)
        return got

    def sendrecv(self, out: Sequence[Any], into: Sequence[Any]) -> None:
        """Send one array to each rank and fill one from each; empty ones are not sent."""
        self._wait(self.started(out, into), "exchanged", (out, into))

    def started(self, out: Sequence[Any], into: Sequence[Any]) -> list[MPI.Request]:
        """The messages of `sendrecv`, under way; `finished` waits for them."""
        requests = []
        for step in range(1, self.size):
            to, by = (self.rank + step) % self.size, (self.rank - step) % self.size
            requests += [self._data.Irecv(piece, by) for piece in _pieces(into[by])]
            requests += [self._data.Isend(piece, to) for piece in _pieces(out[to])]
        return requests

    def finished(self, requests: list[MPI.Request], buffers: Any) -> None:
        self._wait(requests, "rows of neighbours", buffers)

    # ---- faults -------------------------------------------------------------------------
    @contextmanager
    def together(self) -> Iterator[None]:
        """What goes wrong on one rank ends this block on all of them, with the same sentence.

        No rank leaves the block before all have come to its end.
        """
        if self._inside:
            yield
            return
        self._inside, error = True, None
        try:
            yield
        except _OtherRankFailed:
            pass
        except BaseException as raised:
            error = raised
        finally:
            self._inside = False
        self._settle(error)

    def _settle(self, error: BaseException | None) -> None:
        """Raise the first error of all ranks on all of them, if there is one."""
        notes = []
        if error is not None:
            others = [r for r in range(self.size) if r != self.rank]
            notes = [self._control.isend(None, r, _FAILED) for r in others]
        said = self._bytes(self._control, _pickled(error), "the end", watch=False)
        failed = [r for r, text in enumerate(said) if pickle.loads(text) is not None]
        if not failed:
            return
        for r in failed:
            if r != self.rank:
                self._control.recv(source=r, tag=_FAILED)
        MPI.Request.waitall(notes)
        self._data, self.number = self._control.Dup(), 0  # those of the old one may never end
        errors = [pickle.loads(said[r]) for r in failed]
        first = errors[0]
        alike = len(failed) == self.size and len({str(e) for e in errors}) == 1
        raised: Any = first if alike else _of_rank(failed[0], first)
        raised.on_all_ranks = True
        raise raised from error

    def _arrive(self) -> None:
        """Wait until all ranks are here: what follows takes the time of messages only."""
        self._wait([self._data.Ibarrier()], "the others", None)

    def _wait(
        self, requests: list[MPI.Request], what: str, buffers: Any, watch: bool = True
    ) -> None:
        """Until these requests are done; `watch`: unless another rank has failed."""
        start = now = time.perf_counter()
        while not MPI.Request.Testall(requests):
            if watch and self._control.Iprobe(tag=_FAILED):
                self._orphans.append((requests, buffers))
                raise _OtherRankFailed
            if now - start > self.timeout:
                self._give_up(what)
            time.sleep(0 if now - start < _YIELD else _NAP)
            now = time.perf_counter()
        spent = time.perf_counter() - start
        if what in ("shared", "gathered", "rows of neighbours"):
            self.sent += spent
        else:
            self.waited += spent

    def _give_up(self, what: str) -> NoReturn:
        """End the job, and say which ranks did not come."""
        for r in range(self.size):
            if r != self.rank:
                self._control.isend(f"{what} (exchange {self.number:,})", r, _WAITS)
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
            print(
                f"herta: The ranks have waited {self.timeout:g} s for {who}, at {what} (exchange "
                f"{self.number:,}): the job is ended.", file=sys.stderr, flush=True,
            )  # fmt: skip
        time.sleep(_LAST_WORDS)  # the sentence comes first
        self._control.Abort(1)
        raise SystemExit(1)

    # ---- messages -----------------------------------------------------------------------
    def _each(self, mine: Any, what: str) -> Any:
        """(size, ...) the arrays of all ranks, which have the same shape and type."""
        self._mark(what, mine.shape)
        parts = np.empty((self.size, *mine.shape), dtype=mine.dtype)
        self._wait([self._data.Iallgather(mine, parts)], what, (mine, parts))
        return parts

    def _bytes(self, comm: MPI.Comm, mine: bytes, what: str, watch: bool = True) -> list[bytes]:
        """The bytes of all ranks, which may differ in number."""
        if watch:
            self._mark(what, ())
        counts, count = np.empty(self.size, dtype=np.int64), np.array([len(mine)])
        self._wait([comm.Iallgather(count, counts)], what, (count, counts), watch)
        parts, sent = np.empty(int(counts.sum()), dtype=np.uint8), np.frombuffer(mine, np.uint8)
        places = [counts.tolist(), (np.cumsum(counts) - counts).tolist()]
        request = comm.Iallgatherv(sent, [parts, *places, MPI.BYTE])
        self._wait([request], what, (sent, parts), watch)
        return [parts[a : a + n].tobytes() for n, a in zip(*places)]

    def _to_all(self, arrays: Sequence[Any], what: str, roots: Sequence[int] | None = None) -> None:
        """Send each array from its root (by default rank i has array i) to all ranks."""
        self._mark(what, (len(arrays),))
        roots = range(len(arrays)) if roots is None else roots
        requests = [
            self._data.Ibcast(piece, root) for a, root in zip(arrays, roots) for piece in _pieces(a)
        ]
        self._wait(requests, what, arrays)

    def _mark(self, what: str, shape: tuple[int, ...]) -> None:
        """Count an exchange; in the debug mode, all ranks must have come for the same one."""
        self.number += 1
        if not self.debug:
            return
        text = f"{what} {shape} as number {self.number}".encode()[:_MARK]
        mine = np.frombuffer(text.ljust(_MARK), np.uint8)
        seen = np.empty((self.size, _MARK), dtype=np.uint8)
        self._wait([self._data.Iallgather(mine, seen)], what, (mine, seen))
        said = [bytes(row).decode().strip() for row in seen]
        other = next((r for r, found in enumerate(said) if found != said[0]), None)
        if other is not None:
            raise RuntimeError(
                f"Rank 0 has come for {said[0]}, rank {other} for {said[other]}: a branch was "
                "taken on a number that is not the same on all ranks."
            )


_known: dict[int, Ranks] = {}  # by the handle of the communicator


def ranks_of(comm: Any) -> Ranks:
    """The ranks of a communicator: always the same object for the same one."""
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm must be an mpi4py.MPI.Comm, not {type(comm).__name__}.")
    handle = comm.py2f()
    found = _known.get(handle)
    if found is None or not found.of(comm):
        found = _known[handle] = Ranks(comm)
    return found


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


def _added(parts: Any) -> Any:
    """The sum over the first axis, in its order: NumPy's own may pair them otherwise."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def _like(x: Any, found: Any) -> Any:
    """A number where x was one."""
    return found if isinstance(x, np.ndarray) else found.item()


def _pieces(a: Any) -> list[Any]:
    """The bytes of a contiguous array in pieces that one message takes."""
    flat = a.reshape(-1).view(np.uint8)
    return [flat[i : i + _PIECE] for i in range(0, flat.shape[0], _PIECE)]


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
