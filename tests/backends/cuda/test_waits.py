"""Waits of the CUDA backend, dropped one at a time: each turns a check red on the device.

Every line of herta_gpu/backends/cuda that records an event, waits for one or waits for a stream is
found by its text and replaced by `pass`.  A new one comes to this list by itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import herta_gpu
from tests.backends.cuda import more_checks
from tests.backends.cuda import primitive_checks as checks
from tests.conftest import random_graph

pytestmark = [pytest.mark.gpu, pytest.mark.once]

FOLDER = Path(herta_gpu.__file__).parent / "backends" / "cuda"
_WAIT = re.compile(
    r"^ +(?:[\w.\[\]() %]+\.(?:wait_event|record|synchronize)\(.*\)|_follow\(.*\)"
    r"|weakref\.finalize\(self, [\w.]+\.synchronize\)\.atexit = False)(?=  #|$)"
)


def waits() -> Iterator[tuple[str, int]]:
    """(file, line) of each."""
    for path in sorted(FOLDER.glob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            if _WAIT.match(line):
                yield path.stem, number


WAITS = [*waits()]


def without(file: str, line: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUDA backend without the wait in this line; -1: as it is."""

    def drop(text: str) -> str:
        lines = text.splitlines()
        if line >= 0:
            lines[line] = " " * (len(lines[line]) - len(lines[line].lstrip())) + "pass"
        return "\n".join(lines)

    return more_checks.changed_backend(file, drop, monkeypatch)


def face_the_checks(backend: Any) -> None:
    """What needs one of the waits; whatever the device refuses ends it."""
    for check in (
        *(_uploaded, _graph, _side_by_side, _handed_over, _streamed, _left_early, _spooled),
        *(_profiled, _timed),
    ):
        check(backend)
        said = device_of(backend).refusals()
        assert not said, said


def device_of(backend: Any) -> Any:
    from tests import cuda_device

    return cuda_device.active()


def _uploaded(backend: Any) -> None:
    X, transfer = checks.block(31, 6, "float64"), sys.modules["herta_gpu.backends.cuda.transfer"]
    with mock.patch.object(transfer, "CHUNK_BYTES", 100):
        both = [backend.asarray(x) for x in (X, 2 * X)]  # in the same buffers
        assert all(np.array_equal(backend.to_numpy(a), x) for a, x in zip(both, (X, 2 * X)))


def _graph(backend: Any) -> None:
    """Kept for whoever asks next, on whatever stream; its list of edges as well."""
    g, stream = random_graph(60, 200, weighted=True), backend.xp.cuda.Stream
    with stream(non_blocking=True):
        L = backend.laplacian(g, "float32")
    for _ in range(2):
        with stream(non_blocking=True):
            X = backend.asarray(checks.block(60, 4, "float32"))
            backend.apply_H(L, 3.0, X)
            backend.edge_scores(L, X, X, 3.0)


def _side_by_side(backend: Any) -> None:
    """Two streams at once, on one graph: each has partial sums and tickets of its own."""
    L, states = backend.laplacian(checks.graph("hub"), "float32"), []
    streams = [backend.xp.cuda.Stream(non_blocking=True) for _ in range(2)]
    for stream in streams:
        with stream:
            R, none = backend.asarray(checks.block(L.n, 4, "float32")), backend.xp.zeros(4)
            states.append(backend.cg_start(L, 3.0, R, none, 0.0, 0.0))
    for _ in range(2):
        for stream, state in zip(streams, states, strict=True):
            with stream:
                backend.cg_step(L, 3.0, state)
    for stream in streams:
        stream.synchronize()
    assert np.array_equal(backend.to_numpy(states[0].R), backend.to_numpy(states[1].R))


def _handed_over(backend: Any) -> None:
    """A primitive of the backend between two operations of the caller."""
    with backend.xp.cuda.Stream(non_blocking=True):
        x = backend.xp.asarray(checks.block(33, 4, "float32")) * 2.0
        with backend.working():
            dots = backend.column_dots(x, x)
        x += dots.astype("float32") * 0.0


def _streamed(backend: Any) -> None:
    more_checks.check_streaming(backend)
    backend.synchronize()


def _left_early(backend: Any) -> None:
    """A caller that stops while the next part is on its way, then wants larger ones.

    Of whole rows, and of one column, which is gathered into pinned memory of the buffer's own.
    """
    X = checks.block(60, 20, "float64")
    for columns, order in product((slice(None), slice(6, 7)), (None, np.arange(60))):
        blocks = backend.host_blocks(X, order)  # pinned where it is, and copied
        for rows in (10, 30):
            for _, part in blocks.parts([(slice(a, a + rows), columns) for a in (0, 30)]):
                assert np.array_equal(backend.to_numpy(part), X[:rows, columns])
                break
        del part, blocks


def _spooled(backend: Any) -> None:
    """Blocks of columns that are on the host when they are handed over."""
    X = checks.block(60, 8, "float32")
    there, cuts = backend.asarray(X), [slice(a, a + 20) for a in (0, 20, 40)]
    blocks, parts = [slice(0, 5), slice(5, 8)], ((rows, there[rows] * 2.0) for rows in cuts)
    held = backend.spooled(parts, blocks, X.shape, "float32")
    assert np.array_equal(np.hstack(held), 2 * X)


def _profiled(backend: Any) -> None:
    x = backend.asarray(checks.block(33, 4, "float32"))
    with mock.patch.object(type(backend), "_l2_bytes", 1 << 10), backend.profiled() as traffic:
        backend.column_dots(x, x)
    assert traffic.rates["column_dots"] > 0
    assert traffic.copy_rate > 0


def _timed(backend: Any) -> None:
    """`synchronize` is what a clock on the host relies on."""
    backend.asarray(np.ones(3)) * 2.0
    backend.synchronize()
    assert device_of(backend).pending() == 0


def test_the_waits_are_found() -> None:
    files = [file for file, _ in WAITS]
    assert len(WAITS) >= 24
    assert {*files} >= {"backend", "transfer", "traffic", "algorithm2"}


def test_all_checks_pass_as_it_is(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in dict.fromkeys(file for file, _ in WAITS):
        face_the_checks(without(file, -1, monkeypatch))


@pytest.mark.parametrize(("file", "line"), WAITS, ids=lambda x: str(x + 1) if type(x) is int else x)
def test_a_wait_that_is_dropped_turns_a_check_red(
    device: Any, monkeypatch: pytest.MonkeyPatch, file: str, line: int
) -> None:
    backend = without(file, line, monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        face_the_checks(backend)
    device.refusals()
