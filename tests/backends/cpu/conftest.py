"""Both backends of the CPU, and graphs on which they are compared."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from herta_gpu import Graph
from herta_gpu.backends.base import Backend
from herta_gpu.backends.cpu import reference


@pytest.fixture(params=["reference", "compiled"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "reference":
        return reference.CPUBackend()
    pytest.importorskip("numba", reason="the compiled backend needs numba")
    from herta_gpu.backends.cpu.compiled import CompiledBackend

    return CompiledBackend()


@pytest.fixture(params=["near", "far"])
def distance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small graphs, or small graphs treated as if they were large."""
    if request.param == "far":
        pytest.importorskip("numba", reason="the plain backend knows no difference")
        monkeypatch.setattr("herta_gpu.backends.cpu.kernels.laplacian.FAR", 0)


def hub(weighted: bool = False) -> Graph:
    """Node 0 knows all of 700 others but the last three, which know nobody."""
    rng = np.random.default_rng(2)
    spokes = np.arange(1, 698)
    edges = np.concatenate([[spokes * 0, spokes], rng.integers(1, 698, (2, 900))], axis=1)
    edges = np.unique(np.sort(edges[:, edges[0] != edges[1]], axis=0), axis=1)
    return Graph.from_edges(edges, 701, 0.1 + rng.random(edges.shape[1]) if weighted else None)


def sparse_graph(n: int) -> Graph:
    return Graph.from_edges(np.random.default_rng(0).integers(0, n, (2, 2 * n)), n)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread that works on small pieces: another block would show in the memory."""
    monkeypatch.setenv("HERTA_NUM_THREADS", "1")
    sizes = {"_CHUNK_WORK": 1 << 12, "_ENTRY_CHUNK": 1 << 10, "_FLAT": 1 << 12, "_ROWS": 256}
    for name, size in sizes.items():
        monkeypatch.setattr(reference, name, size)
    monkeypatch.setattr(Backend, "at_once", 1 << 12)


def memory_of(work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` gives, and the bytes that it takes beside."""
    work()  # compiles, and makes what stays
    tracemalloc.start()
    found = work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return found, peak
