"""What ranks say to each other: sums in a fixed order, and arrays to all.

Every exchange is a message from each rank to each other one, which starts without blocking and is
waited for in one place, `wait_for`.  There a rank notices that another one has failed, or does not
come (`faults`).  A rank that waits gives its core away.  MPI's own collective calls are not used:
one that a rank has begun can neither be left nor taken back, and the order in which they add is not
known.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from herta_gpu.backends.ranks.faults import Faults, OtherRankFailed

FEW = 8192  # numbers up to which every rank adds up all of them
_PIECE = 1 << 30  # bytes of one message: MPI 3 counts to 2^31
_LARGE = ("shared", "gathered", "rows of neighbours")  # what takes time for its size
_MARK = 96  # bytes of what a rank says of an exchange in the debug mode


class Ranks(Faults):
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
        super().__init__(comm)
        self.debug = os.environ.get("HERTA_DEBUG_RANKS", "0") == "1"
        self.waited = self.sent = 0.0
        self._begun = time.perf_counter()
        self._alone = False

    def of(self, comm: MPI.Comm) -> bool:
        """Whether these are the processes of `comm`; handles of freed ones are used again."""
        return MPI.Comm.Compare(self._control, comm) in (MPI.IDENT, MPI.CONGRUENT)

    # ---- numbers ------------------------------------------------------------------------
    def total(self, x: Any) -> Any:
        """The sum of all ranks' x, added in their order; the same bits on all of them."""
        mine = np.ascontiguousarray(x).reshape(np.shape(x))
        return _like(x, add_up(np, self.size, mine, self._each, self._exchange))

    def largest(self, x: Any) -> Any:
        """The largest of all ranks' x, entry by entry."""
        mine = np.ascontiguousarray(x).reshape(np.shape(x))
        return _like(x, self._each(mine, "largest").max(axis=0))

    def each(self, x: Any) -> list[Any]:
        """All ranks' objects, in their order."""
        mine = np.frombuffer(pickle.dumps(x), dtype=np.uint8)
        counts = self._each(np.array([mine.shape[0]]), "each")[:, 0]
        parts = [np.empty(int(count), dtype=np.uint8) for count in counts]
        self._exchange([mine] * self.size, parts, "each", ())
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
        bits = x.tobytes() if hasattr(x, "tobytes") else repr(x).encode()
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
    def gather(self, x: Any) -> tuple[Any, slice]:
        """The rows of all ranks one after the other, and where those of this rank are."""
        if x.dtype.kind == "U":  # text is as wide as the longest that a rank has
            x = x.astype(f"U{self.largest(max(1, x.dtype.itemsize // 4))}")
        counts = self._each(np.array([x.shape[0]]), "rows")[:, 0]
        ends = np.cumsum([0, *counts]).tolist()
        whole = np.empty((ends[-1], *x.shape[1:]), dtype=x.dtype)
        parts = [whole[a:b] for a, b in pairwise(ends)]
        self._exchange([np.ascontiguousarray(x)] * self.size, parts, "gathered", ())
        return whole, slice(ends[self.rank], ends[self.rank + 1])

    def share(self, made: dict[Any, Any]) -> list[dict[Any, Any]]:
        """The arrays that each rank has made, by name, on all ranks."""
        about = {name: (a.shape, a.dtype.str) for name, a in made.items()}
        theirs = self.each(about)  # whoever is late is waited for here
        found = [
            {name: np.empty(shape, dtype) for name, (shape, dtype) in named.items()}
            for named in theirs
        ]
        out = [np.ascontiguousarray(a) for a in made.values()]
        self._exchange([out] * self.size, [list(f.values()) for f in found], "shared", ())
        return found

    def exchange_rows(self, parts: Sequence[Any]) -> list[Any]:
        """Rows for each rank (`parts`, one array per rank) for what they have for this one."""
        counts = np.array([[part.shape[0]] for part in parts], dtype=np.int64)
        theirs = np.empty_like(counts)
        self._exchange(counts, theirs, "exchanged", counts.shape)
        got = [np.empty((int(n), *parts[0].shape[1:]), dtype=parts[0].dtype) for n in theirs[:, 0]]
        self._exchange([np.ascontiguousarray(part) for part in parts], got, "exchanged", ())
        return got

    def neighbours(self, out: Sequence[Any], into: Sequence[Any]) -> None:
        """Rows of a block that other ranks need, for those that this one needs of theirs."""
        self.mark("rows of neighbours", ())
        self.wait_for(self.send(out, into), "rows of neighbours")

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

    def _exchange(self, out: Any, into: Any, what: str, shape: tuple[int, ...]) -> None:
        self.mark(what, shape)
        for piece, own in zip(_pieces(into[self.rank]), _pieces(out[self.rank])):
            piece[...] = own
        self.wait_for(self.send(out, into), what)

    def _each(self, mine: Any, what: str) -> Any:
        """(size, ...) the arrays of all ranks, which have the same shape and type."""
        parts = np.empty((self.size, *mine.shape), dtype=mine.dtype)
        rows = [parts[r : r + 1] for r in range(self.size)]
        self._exchange([mine] * self.size, rows, what, mine.shape)
        return parts

    def mark(self, what: str, shape: tuple[int, ...]) -> None:
        """Count an exchange; in the debug mode, all ranks must have come for the same one."""
        if self._alone:
            raise RuntimeError(f"A rank has come for {what} {shape} in the middle of its own work.")
        self.number += 1
        if not self.debug:
            return
        text = f"{what} {shape} as number {self.number}".encode()[:_MARK]
        mine = np.frombuffer(text.ljust(_MARK), np.uint8)
        seen = np.empty((self.size, _MARK), dtype=np.uint8)
        seen[self.rank] = mine
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
        self._each(np.zeros(1), "the others")


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


def add_up(
    xp: Any, size: int, x: Any, each: Callable[..., Any], exchange: Callable[..., Any]
) -> Any:
    """The sum of the arrays x of all ranks, added in their order; the same bits on all of them.

    `each` gathers an array of all ranks, `exchange` sends a row to each of them.  Of more than a
    few numbers every rank adds up one share, and sends it to all.
    """
    if x.size <= FEW:
        return _sum_in_order(each(x, "total"))
    share = -(-x.size // size)
    padded = xp.zeros((size, share), dtype=x.dtype)
    padded.reshape(-1)[: x.size] = x.reshape(-1)
    parts = xp.empty_like(padded)
    exchange(padded, parts, "total", x.shape)
    sums = each(_sum_in_order(parts), "sums")
    return sums.reshape(-1)[: x.size].reshape(x.shape)


def _sum_in_order(parts: Any) -> Any:
    """The sum over the first axis: NumPy's own may pair them otherwise."""
    total = parts[0].copy()
    for r in range(1, parts.shape[0]):
        total += parts[r]
    return total


def _like(x: Any, found: Any) -> Any:
    """A number where x was one."""
    return found if isinstance(x, np.ndarray) else found.item()


def _pieces(a: Any) -> list[Any]:
    """The bytes of contiguous arrays in pieces that one message takes."""
    if isinstance(a, list):
        return [piece for array in a for piece in _pieces(array)]
    flat = a.reshape(-1).view(np.uint8)
    return [flat[i : i + _PIECE] for i in range(0, flat.shape[0], _PIECE)]
