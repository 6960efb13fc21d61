"""Streams, events and captured graphs, which raise where a wait is missing.

The current stream does its work at once.  A copy on another stream is adversarial: it happens as
late as it may, when somebody waits for it, and until then its target is poison.  Every stream,
event and the host carry a vector clock: an array that two streams use without an event between
them is a race and raises, and so does a source that the host changes before it has waited.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from threading import local
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

from tests.cuda_emulator import EmulatorError
from tests.cupy_standin.ledger import LEDGER

Clock = dict[int, int]  # how much of each stream's work is known to be done

_host: Clock = {}
_streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
_numbers = count()


class RaceError(EmulatorError):
    """Two streams use the same memory, and nothing says which comes first."""


def _merge(into: Clock, other: Clock) -> None:
    for key, at in other.items():
        into[key] = max(into.get(key, 0), at)


def _settle(clock: Clock) -> None:
    """Do the delayed work up to `clock` now."""
    for key, until in clock.items():
        stream = _streams.get(key)
        while stream is not None and stream.pending and stream.pending[0][0] <= until:
            stream.pending.pop(0)[1]()


def host_waited(clock: Clock | None = None) -> None:
    """Note that the host has waited for the work up to `clock`; by default the current stream's."""
    clock = Stream.current.clock if clock is None else clock
    _settle(clock)
    _merge(_host, clock)
    for key, until in clock.items():
        stream = _streams.get(key)
        while stream is not None and stream.reading and stream.reading[0][0] <= until:
            if not stream.reading.pop(0)[1]():
                stream.reading.clear()  # once is enough
                raise RaceError("the host changed memory that a copy may still have been reading")


def order(uses: Clock, stream: Stream | None = None) -> None:
    """Check and note that `stream` uses memory, after the last `uses` of it."""
    stream = stream or Stream.current
    now = stream.tick()
    for key, at in uses.items():
        if stream.clock.get(key, 0) < at:
            raise RaceError("an array is used by two streams without an event between them")
    uses.clear()
    uses[stream.number] = now


class Graph:
    """Captured launches; replaying them is one launch for the host."""

    def __init__(self, launches: list[Any]) -> None:
        self._launches = launches

    def launch(self, stream: Any = None) -> None:
        LEDGER.add("launches")
        for launch in self._launches:
            launch()


class Stream:
    """A stream; without an event it is ordered with no other, not even the default one."""

    recording: list[Any] | None = None
    current: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.ptr = 0 if null else id(self)
        self.number = next(_numbers)
        self.clock: Clock = {}
        self.pending: list[tuple[int, Callable[[], None]]] = []
        self.reading: list[tuple[int, Callable[[], bool]]] = []
        _streams[self.number] = self

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        """The stream at the address that another library gives."""
        version, address = obj.__cuda_stream__()
        assert version == 0
        return stream_at(address)

    def tick(self) -> int:
        """The number of the work that the host gives to this stream now."""
        _merge(self.clock, _host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def later(self, work: Callable[[], None]) -> None:
        """Delay work until somebody waits for it."""
        self.pending.append((self.clock[self.number], work))

    def reads(self, source: Any) -> None:
        """Note that a copy reads this memory of the host, which must not change before its end."""
        sent = source.tobytes()
        self.reading.append((self.clock[self.number], lambda: source.tobytes() == sent))

    def wait_event(self, event: Event) -> None:
        if event.clock is not None:  # an event that was never recorded is not waited for
            _settle(event.clock)
            _merge(self.clock, event.clock)

    def synchronize(self) -> None:
        LEDGER.add("syncs")
        host_waited(self.clock)

    def is_capturing(self) -> bool:
        return Stream.recording is not None

    def begin_capture(self, mode: Any = None) -> None:
        if not self.ptr:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")
        Stream.recording = []

    def end_capture(self) -> Graph:
        launches, Stream.recording = Stream.recording, None
        return Graph(launches or [])

    def __enter__(self) -> Stream:
        self._before, Stream.current = Stream.current, self
        return self

    def __exit__(self, *_: Any) -> None:
        Stream.current = self._before


class Event:
    """A point in a stream's work."""

    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        self.clock: Clock | None = None
        self.timed, self.at = not disable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        if stream is None:
            raise TypeError("Without a stream CuPy records on the default one: say which.")
        self.at = perf_counter()
        _merge(stream.clock, _host)
        self.clock = dict(stream.clock)

    @property
    def done(self) -> bool:
        """Whether nothing is delayed any more of the work before it."""
        streams = ((_streams.get(key), until) for key, until in list((self.clock or {}).items()))
        return not any(s and any(at <= until for at, _ in list(s.pending)) for s, until in streams)

    def synchronize(self) -> None:
        LEDGER.add("syncs")
        if self.clock is not None:
            host_waited(self.clock)


_here = local()


def current_device() -> int:
    """Every thread has its own, and begins with the first."""
    return getattr(_here, "device", 0)


class Device:
    """A device of this process, by its number."""

    def __init__(self, device: int | None = None) -> None:
        self.id = current_device() if device is None else device

    def use(self) -> None:
        _here.device = self.id


def stream_at(address: int) -> Stream:
    """The stream at this address, which must live."""
    found = next((stream for stream in _streams.values() if stream.ptr == address), None)
    if found is None:
        raise EmulatorError(f"there is no stream at {address:#x}")
    return found


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds; of events that time nothing, or that are not over, there are none."""
    for event in (start_event, end_event):
        over = event.clock and all(_host.get(key, 0) >= at for key, at in event.clock.items())
        if not (event.timed and over):
            raise EmulatorError("cudaErrorInvalidResourceHandle or cudaErrorNotReady")
    return 1e3 * (end_event.at - start_event.at)


Stream.current = Stream(null=True)
