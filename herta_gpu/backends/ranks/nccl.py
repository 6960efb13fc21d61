"""One GPU for each rank, and NCCL between them, through CuPy's own communicator.

MPI stays the way in which ranks agree, fail and send what is on the host.  It never reads memory of
a device: what goes by MPI is copied to the host before, and that copy waits for the device.

What NCCL asks of its callers:

* It has no tags: calls find each other by their order.  All of them go through one communicator,
  which runs them one after the other whatever their streams are.
* send and recv are in a group, or two ranks that send first would wait for each other; a group has
  at most 2,048 calls.
* allReduce adds in an order of its own: here all ranks' numbers are gathered, and everyone adds
  them in the order of the ranks, to the same bits.
* A call that waits for a rank that is gone waits for ever, and so does whoever waits for the
  device.  A thread looks after it, and aborts.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from herta_gpu.backends.base import Array
from herta_gpu.backends.cuda.device import named_stream
from herta_gpu.backends.ranks.communicator import Channel, CommonError, Ranks

GROUP = 2048  # calls that NCCL takes in a group
_POLL = 0.1  # seconds between two looks of the thread
_NO_NCCL = (
    "NCCL, which GPUs of several processes need, cannot be loaded: install nvidia-nccl-cu13 (for "
    'CUDA 13) or nvidia-nccl-cu12, or use device="cpu".'
)


def take_gpu(team: Ranks, xp: Any, used: bool = False) -> None:
    """Make one GPU the current device: that with this rank's number among those of its host.

    Where each rank was given a GPU to see (CUDA_VISIBLE_DEVICES), it is that one.  Two ranks on one
    GPU are an error on all ranks: NCCL does not take them.  What this process has `used` before has
    streams and kernels on the GPU that was current then, and must be the same.
    """
    runtime, hosts = xp.cuda.runtime, team.hosts()
    count = runtime.getDeviceCount()
    device = hosts[: team.rank].count(hosts[team.rank]) % count
    taken = [*zip(hosts, team.each(runtime.deviceGetPCIBusId(device)), strict=True)]
    twice = next((r for r, gpu in enumerate(taken) if gpu in taken[:r]), None)
    if twice is not None:
        host = hosts[twice]
        gpus = len({bus for where, bus in taken if where == host})
        text = (
            f"{hosts.count(host)} ranks are on the machine of rank {host}, which has {gpus} "
            f"{'GPU' if gpus == 1 else 'GPUs'} for them: start one rank per GPU "
            '(mpirun -n), or use device="cpu".'
        )
        raise CommonError(text)
    if used and device != runtime.getDevice():
        raise ValueError(
            f"This process has worked on GPU {runtime.getDevice()} before, but its own one is "
            f"{device}: fit on ranks first, or let CUDA_VISIBLE_DEVICES name one GPU for each rank."
        )
    xp.cuda.Device(device).use()


def nccl_of(team: Ranks, xp: Any) -> Nccl:
    """How arrays of this team travel; always the same object."""
    if team.nccl is None or team.nccl.xp is not xp:
        library = import_module(f"{xp.__name__}.cuda.nccl")  # CuPy does not do so by itself
        if team.largest(int(not library.available)):
            raise CommonError(_NO_NCCL)
        team.nccl = Nccl(team, xp, library)
    return team.nccl


class Nccl(Channel):
    """Arrays on the devices of a team.

    What a method gives is there for the work that the current stream is given next; the host waits
    for nothing.  The communicator begins with the first call, and after a failure with the next.
    """

    def __init__(self, team: Ranks, xp: Any, library: Any) -> None:
        self.team, self.xp, self.library = team, xp, library
        self.rank, self.size = team.rank, team.size
        self.device, self.stream = xp.cuda.runtime.getDevice(), named_stream(xp, "herta: messages")
        self._begun, self._arrived, self._gathered = (
            xp.cuda.Event(disable_timing=True) for _ in range(3)
        )
        self._comm: Any = None
        self._aborted = False
        # The last call: what it is, since when, and the event behind it once it is enqueued.
        self._under_way: tuple[str, float, Any] | None = None
        self._held: Any = None  # what the messages read and write
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        atexit.register(self._leave)

    # ---- what travels -------------------------------------------------------------------
    def each(self, x: Any) -> list[Any]:
        return self.team.each(x)

    def of_ranks(self, x: Array, what: str = "numbers of all GPUs") -> Array:
        found = self.xp.empty((self.size, *x.shape), dtype=x.dtype)
        if x.size:
            comm, here = self._ready(what, x.shape), self.xp.cuda.get_current_stream()
            byte = self.library.NCCL_UINT8
            comm.allGather(x.data.ptr, found.data.ptr, x.nbytes, byte, here.ptr)
            self._enqueued(what, self._gathered, here)
        return found

    def exchange(self, out: Any, into: Any, what: str, shape: tuple[int, ...] = ()) -> None:
        # Arrays one after the other, as many times as the rank with most of them has some.
        rows = [[a if isinstance(a, list) else [a] for a in side] for side in (out, into)]
        for i in range(max(len(a) for side in rows for a in side)):
            ours, theirs = ([[*a, self.xp.empty(0)][min(i, len(a))] for a in side] for side in rows)
            theirs[self.rank][...] = ours[self.rank]
            self.start(ours, theirs, what)
            self.finish()

    def start(self, out: Sequence[Array], into: Sequence[Array], what: str) -> None:
        """Messages beside the current stream: out[r] to rank r, into[r] from there.

        They come after what the stream was given before.  Until `finish` nobody may touch `into`,
        or change `out`.
        """
        comm, nccl, team = self._ready(what, ()), self.library, self.team
        self._begun.record(self.xp.cuda.get_current_stream())
        self.stream.wait_event(self._begun)
        # The same steps in a group on all ranks: each has a call, or none, at both of its ends.
        for first in range(1, team.size, GROUP // 2):
            nccl.groupStart()
            try:
                for step in range(first, min(first + GROUP // 2, team.size)):
                    to, by = (team.rank + step) % team.size, (team.rank - step) % team.size
                    for call, a, peer in ((comm.recv, into[by], by), (comm.send, out[to], to)):
                        if a.size:
                            call(a.data.ptr, a.nbytes, nccl.NCCL_UINT8, peer, self.stream.ptr)
            finally:
                nccl.groupEnd()
        self._held = (out, into)
        self._enqueued(what, self._arrived, self.stream)

    def finish(self) -> None:
        """What the current stream is given from now on comes after the messages of `start`."""
        self.xp.cuda.get_current_stream().wait_event(self._arrived)
        self._held = None

    # ---- faults -------------------------------------------------------------------------
    def _ready(self, what: str, shape: tuple[int, ...]) -> Any:
        """The communicator, for a call that all ranks make now."""
        self.team.mark(f"{what} (NCCL)", shape)
        if self._aborted:
            self.team.leave()
        if self._comm is None:
            made = self.library.get_unique_id() if self.team.rank == 0 else None
            key = self.team.agree(made)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, daemon=True)
                self._thread.start()
            self._under_way = ("the beginning of NCCL", time.monotonic(), None)
            self._comm = self.library.NcclCommunicator(self.team.size, key, self.team.rank)
        self._under_way = (what, time.monotonic(), None)
        return self._comm

    def _enqueued(self, what: str, event: Any, stream: Any) -> None:
        event.record(stream)
        self._under_way = (what, time.monotonic(), event)

    def close(self) -> None:
        """End what is under way, now that no rank begins anything any more."""
        comm, self._comm, self._held, self._under_way = self._comm, None, None, None
        if comm is not None and not self._aborted:
            comm.abort()
        self._aborted = False

    def _leave(self) -> None:
        """The program ends: a thread must not ask MPI then, and the other ranks may be behind."""
        self._stop.set()
        if self._comm is not None and not self._aborted:
            self._comm.destroy()

    def _look(self) -> None:
        """Look whether the last call still has somebody to wait for; a thread of its own."""
        self.xp.cuda.Device(self.device).use()
        while not self._stop.wait(_POLL):
            now, comm = self._under_way, self._comm
            if now is None or self._aborted or (now[2] is not None and now[2].done):
                continue
            if comm is not None:
                try:
                    comm.check_async_error()
                except Exception as error:
                    self.team.end(f"NCCL has lost another rank ({error}): the job is ended.")
                if self.team.failed():
                    self._aborted = True  # before: whoever waits goes on at once
                    comm.abort()
            if time.monotonic() - now[1] > self.team.timeout:
                self.team.give_up(f"{now[0]} (NCCL)")
