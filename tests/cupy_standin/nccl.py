"""A strict stand-in for cupy.cuda.nccl on mpi4py: one process per device, all of MPI.COMM_WORLD.

It refuses what NCCL refuses, and what NCCL only punishes: memory that is not a live array of the
device, send or recv outside of a group, more than 2,048 calls in one, two ranks on one device, a
call on a communicator that was aborted, and calls that meet in another order than that in which
they were made (NCCL has no tags: it would hang, or deliver the wrong numbers).

Messages are as late as they may be: what is to come is poison until somebody waits for the event
behind it.  Whoever touches a buffer that is under way, on a stream that has not waited, races, and
the clocks of streams.py raise.
"""

from __future__ import annotations

import ctypes
import secrets
import struct
import time
from functools import partial
from typing import Any

import numpy as np

from tests.cuda_emulator import EmulatorError
from tests.cupy_standin.device_array import live, poison, uses_of
from tests.cupy_standin.ledger import LEDGER
from tests.cupy_standin.streams import Stream, current_device, order, stream_at

available = True
NCCL_UINT8 = 1
_GROUP = 2048
_HEAD = struct.Struct("<qqq")  # number of the operation, bytes, whether it is an allGather
_group: list[Any] | None = None
_abandoned: list[Any] = []  # messages that will not come; MPI may still write to their memory


class NcclError(RuntimeError):
    """As CuPy's."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"NCCL error {status}")


def get_unique_id() -> tuple[int, ...]:
    return tuple(byte - 128 for byte in secrets.token_bytes(128))


def groupStart() -> None:
    global _group
    if _group is not None:
        raise EmulatorError("a group within a group")
    _group = []


def groupEnd() -> None:
    global _group
    if _group is None:
        raise EmulatorError("groupEnd without groupStart")
    calls, _group = _group, None
    for communicator in {id(call[0]): call[0] for call in calls}.values():
        communicator._exchange([call[1:] for call in calls if call[0] is communicator])


def _memory(address: int, size: int) -> Any:
    """(the bytes there, the array that they belong to), if it lives on the device."""
    array = live(address, size)
    if array is None:
        raise EmulatorError(f"{size} bytes at {address:#x} are not those of a live device array")
    view = np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=np.uint8)
    return view, array


class NcclCommunicator:
    """One rank's end."""

    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int) -> None:
        from mpi4py import MPI

        assert isinstance(commId, tuple)
        assert len(commId) == 128
        self._request, self._mpi = MPI.Request, MPI.COMM_WORLD.Dup()
        self._rank, self._size, self._number, self._aborted = rank, ndev, 0, False
        self.error: int | None = None
        seen = self._mpi.allgather((commId, rank, MPI.Get_processor_name(), current_device()))
        if [who for _, who, *_ in seen] != list(range(ndev)) or len({s[0] for s in seen}) > 1:
            raise EmulatorError("the ranks do not begin the same communicator")
        if len({where for *_, where in [(*s[:2], s[2:]) for s in seen]}) < ndev:
            raise NcclError(5)  # ncclInvalidUsage: Duplicate GPU detected

    # ---- what CuPy's has ----------------------------------------------------------------
    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._in_group("send", sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._in_group("recv", recvbuf, count, datatype, peer, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._checked(datatype)
        if _group is not None:
            raise EmulatorError("allGather within a group of send and recv")
        on = stream_at(stream)
        (mine, source), (found, target) = (
            _memory(sendbuf, count),
            _memory(recvbuf, count * self._size),
        )
        order(uses_of(source), on)
        order(uses_of(target), on)
        self._number += 1
        rows, sent = found.reshape(self._size, count), mine.copy()
        rows.view()[...] = 0xFF
        rows[self._rank] = sent
        others = [r for r in range(self._size) if r != self._rank]
        arrivals = [self._irecv(rows[r], r, gather=True) for r in others]
        sends = [self._isend(sent, r, gather=True) for r in others]
        LEDGER.add("nccl")
        LEDGER.add("bytes_sent", count * len(others))
        work = partial(self._settle, arrivals, sends, target)
        work() if on is Stream.current else on.later(work)

    def check_async_error(self) -> None:
        self._checked(NCCL_UINT8)
        if self.error is not None:
            raise NcclError(self.error)

    def abort(self) -> None:
        self._aborted = True

    def destroy(self) -> None:
        self._aborted = True

    # ---- how it is done -----------------------------------------------------------------
    def _checked(self, datatype: int) -> None:
        if self._aborted:
            raise NcclError(4)  # a communicator that is no more
        if Stream.recording is not None:
            raise EmulatorError("the stand-in captures no call of NCCL")
        assert datatype == NCCL_UINT8

    def _in_group(
        self, kind: str, at: int, count: int, datatype: int, peer: int, stream: int
    ) -> None:
        self._checked(datatype)
        if _group is None:
            raise EmulatorError(f"{kind} outside of a group")
        if not 0 <= peer < self._size or peer == self._rank:
            raise EmulatorError(f"{kind} of rank {self._rank} with rank {peer} of {self._size}")
        if len(_group) >= _GROUP:
            raise EmulatorError(f"more than {_GROUP} calls in a group")
        view, array = _memory(at, count)
        _group.append((self, kind, view, array, peer, stream_at(stream)))

    def _exchange(self, calls: list[Any]) -> None:
        """The calls of a group, all at once."""
        self._number += 1
        LEDGER.add("nccl")
        for kind, view, array, peer, stream in calls:
            order(uses_of(array), stream)
            if kind == "send":
                LEDGER.add("bytes_sent", view.size)
                sends = [self._isend(view.copy(), peer)]
                stream.later(partial(self._settle, [], sends, array))
            else:
                poison(view.view(np.float32) if view.size % 4 == 0 else view)
                stream.later(partial(self._settle, [self._irecv(view, peer)], [], array))

    def _isend(self, payload: Any, peer: int, gather: bool = False) -> Any:
        head = np.frombuffer(_HEAD.pack(self._number, payload.size, gather), dtype=np.uint8)
        message = np.concatenate([head, payload])
        return self._mpi.Isend(message, peer), message

    def _irecv(self, target: Any, peer: int, gather: bool = False) -> Any:
        message = np.empty(_HEAD.size + target.size, dtype=np.uint8)
        wanted = (self._number, target.size, int(gather))
        return self._mpi.Irecv(message, peer), message, target, wanted

    def _settle(self, arrivals: list[Any], sends: list[Any], keep: Any) -> None:
        """Until all of these have come and gone; `keep` is the memory that they need."""
        requests = [call[0] for call in (*arrivals, *sends)]
        while not self._request.Testall(requests):
            if self._aborted:
                _abandoned.append((arrivals, sends, keep, self._mpi))
                return
            time.sleep(1e-4)
        for _, message, target, wanted in arrivals:
            found = _HEAD.unpack(message[: _HEAD.size].tobytes())
            if found != wanted:
                raise EmulatorError(f"calls met in another order: {wanted} got {found}")
            target[...] = message[_HEAD.size :]
