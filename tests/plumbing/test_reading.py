"""X in a file: read ahead, the same numbers as by slicing, and nothing left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from herta_gpu import HERTA, Graph
from herta_gpu.backends.base import Blocks
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.plumbing import reading
from herta_gpu.plumbing.files import DataError
from herta_gpu.plumbing.reading import RING, MappedRows, Reads, mapping_of

N, D = 103, 7


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE", 150)  # a few rows: every part is read in pieces


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert not reading_threads()


def reading_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("herta-reads")]


def numbers(dtype: str = "float32", n: int = N, d: int = D) -> Any:
    return (100 * np.random.default_rng(0).standard_normal((n, d))).astype(dtype)


def mapped(path: Path, X: Any, mode: Any = "r") -> Any:
    np.save(path, X)
    return np.load(path, mmap_mode=mode)


def cut(rows: int, columns: slice = slice(0, D), n: int = N) -> list[tuple[slice, slice]]:
    return [(slice(a, min(a + rows, n)), columns) for a in range(0, n, rows)]


def check_parts(blocks: Blocks, X: Any) -> None:
    """In any parts, the numbers of the array X; each part stays until the next one is asked for."""
    for rows, columns in ((10, slice(0, D)), (40, slice(2, 5)), (N, slice(6, 7)), (1, slice(0, D))):
        wanted = cut(rows, slice(*columns.indices(X.shape[1])), X.shape[0])
        seen = 0
        for (expected, _), (at, part) in zip(wanted, blocks.parts(wanted), strict=True):
            assert at == expected
            assert part.dtype == X.dtype
            for _ in range(2):
                np.testing.assert_array_equal(part, X[at, columns])
                time.sleep(0 if rows < 10 else 1e-4)
            seen += 1
        assert seen == len(wanted)
    assert list(blocks.parts([])) == []


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64"])
def test_the_numbers_are_those_of_slices(tmp_path: Path, dtype: str) -> None:
    X = numbers(dtype)
    blocks = Blocks(mapped(tmp_path / "X.npy", X))
    assert blocks._readable() is not None
    check_parts(blocks, X)


@pytest.mark.parametrize("offset", [0, 1, 13, 4096, 70_001])
def test_rows_may_begin_anywhere_in_the_file(tmp_path: Path, offset: int) -> None:
    X, path = numbers(), tmp_path / "raw"
    path.write_bytes(b"?" * offset + X.tobytes() + b"after")
    blocks = Blocks(np.memmap(path, np.float32, "r", offset, X.shape))
    assert blocks._readable() is not None
    check_parts(blocks, X)


VIEWS = {
    "array": lambda M: np.asarray(M),
    "rows": lambda M: M[20:90],
    "columns": lambda M: M[:, 1:6],
    "every other row": lambda M: M[1::2],
    "a view of a view": lambda M: np.asarray(M[5:])[:, 2:][10:],
    "one column": lambda M: M[:, 3:4],
    "read only": lambda M: np.lib.stride_tricks.as_strided(M, writeable=False),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_map_are_read_as_well(tmp_path: Path, view: str) -> None:
    X = numbers()
    blocks = Blocks(VIEWS[view](mapped(tmp_path / "X.npy", X)))
    assert (blocks._readable() is not None) == (view != "read only")  # that one hides its map
    check_parts(blocks, VIEWS[view](X))


@pytest.mark.parametrize("kind", ["fortran", "other bytes", "reversed", "bool", "memory", "order"])
def test_what_is_not_there_row_by_row_is_sliced(tmp_path: Path, kind: str) -> None:
    X, order = numbers(), None
    if kind == "fortran":
        X = np.asfortranarray(X)
    elif kind == "other bytes":
        X = X.astype(X.dtype.newbyteorder())
    elif kind == "bool":
        X = X > 0
    given = X if kind == "memory" else mapped(tmp_path / "X.npy", X)
    if kind == "reversed":
        given, X = given[::-1, ::-1], X[::-1, ::-1]
    elif kind == "order":
        order = np.random.default_rng(1).permutation(N)
        X = X[order]
    blocks = Blocks(given, order)
    assert blocks._readable() is None
    check_parts(blocks, np.asarray(X))
    assert blocks.reads.passes == 5
    assert blocks.reads.bytes_read == 0


def test_changes_of_a_map_are_seen_and_so_are_private_ones(tmp_path: Path) -> None:
    X = numbers()
    for mode in ("r+", "c"):
        M = mapped(tmp_path / "X.npy", X, mode)
        M[50] = 7.0
        expected = X.copy()
        expected[50] = 7.0
        check_parts(Blocks(M), expected)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_map_outlives_the_name_of_its_file(tmp_path: Path, how: str) -> None:
    X, path = numbers(), tmp_path / "X.npy"
    blocks = Blocks(mapped(path, X))
    if how == "replaced":
        np.save(tmp_path / "other.npy", 2 * X)
        os.replace(tmp_path / "other.npy", path)
    else:
        path.unlink()
    check_parts(blocks, X)


@pytest.mark.parametrize("order", [None, np.arange(N)], ids=["read", "sliced"])
def test_a_file_that_shrinks_is_one_sentence(tmp_path: Path, order: Any) -> None:
    path = tmp_path / "X.npy"
    blocks = Blocks(mapped(path, numbers()), order)
    whole = path.stat().st_size
    os.truncate(path, whole - 1)
    with pytest.raises(DataError, match=rf"X\.npy has {whole - 1:,} bytes now.*cut short"):
        list(blocks.parts(cut(10)))


def test_a_file_that_shrinks_during_a_pass_is_the_same_sentence(tmp_path: Path) -> None:
    path = tmp_path / "X.npy"
    blocks = Blocks(mapped(path, numbers()))
    parts = blocks.parts(cut(10))
    next(parts)
    os.truncate(path, 128 + 50 * D * 4)  # what is ahead of the third part is gone
    with pytest.raises(DataError, match="cut short while it was in use"):
        list(parts)
    assert blocks.reads.passes == 0


def test_an_error_of_a_thread_comes_to_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, read = Blocks(mapped(tmp_path / "X.npy", numbers())), MappedRows._read

    def broken(self: Any, at: int, out: Any) -> None:
        if at > 128 + 60 * D * 4 and threading.current_thread() is not threading.main_thread():
            raise OSError("the disk is on fire")
        read(self, at, out)

    monkeypatch.setattr(MappedRows, "_read", broken)
    parts = blocks.parts(cut(10))
    assert [next(parts)[0].start for _ in range(6)] == [0, 10, 20, 30, 40, 50]
    with pytest.raises(OSError, match="on fire"):
        next(parts)


@pytest.mark.parametrize("how", ["break", "error", "dropped", "never started"])
def test_who_stops_early_leaves_no_thread(tmp_path: Path, how: str) -> None:
    blocks = Blocks(mapped(tmp_path / "X.npy", numbers()))
    parts = blocks.parts(cut(10))
    if how == "error":
        with pytest.raises(ZeroDivisionError):
            [1 / int(at.start * bool(reading_threads())) for at, _ in parts]
    elif how == "break":
        for _ in parts:
            break
    elif how == "dropped":
        next(parts)
        assert reading_threads()
    del parts
    assert not reading_threads()


def test_no_more_is_read_ahead_than_the_ring_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, ends, read = numbers("float64"), [0], MappedRows._read

    def watched(self: Any, at: int, out: Any) -> None:
        read(self, at, out)
        if threading.current_thread() is not threading.main_thread():
            ends.append((at + out.nbytes - 128) // (D * 8))

    monkeypatch.setattr(MappedRows, "_read", watched)
    places = set()
    for columns in (slice(0, D), slice(1, 3)):
        ends[:] = [0]
        for at, part in Blocks(mapped(tmp_path / "X.npy", X)).parts(cut(5, columns)):
            time.sleep(0.01)  # more than enough to read everything
            assert max(ends) <= at.start + RING * 5
            places.add(part.__array_interface__["data"][0])
    assert max(ends) == N
    assert len(places) <= 2 * RING


def test_two_passes_may_be_under_way(tmp_path: Path) -> None:
    X = numbers()
    blocks = Blocks(mapped(tmp_path / "X.npy", X))
    for (a, one), (b, other) in zip(blocks.parts(cut(10)), blocks.parts(cut(10)), strict=True):
        np.testing.assert_array_equal(one, X[a])
        np.testing.assert_array_equal(other, X[b])


def test_passes_bytes_and_seconds_are_counted(tmp_path: Path) -> None:
    X = numbers()
    blocks = Blocks(mapped(tmp_path / "X.npy", X))
    list(blocks.parts(cut(10)))
    assert (blocks.reads.passes, blocks.reads.bytes_read) == (1, X.nbytes)
    list(blocks.parts(cut(10, slice(2, 4))))  # whole rows, but for the end of each piece
    reads = blocks.reads
    assert reads.passes == 2
    assert reads.bytes_read == 2 * X.nbytes
    assert reads.seconds > 0
    assert reads.waited >= 0


def test_seconds_of_threads_that_read_together_count_once() -> None:
    reads, both = Reads(), threading.Barrier(2)

    def work() -> None:
        with reads.reading(10):
            both.wait()
            time.sleep(0.05)

    start = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.05 <= reads.seconds <= time.perf_counter() - start
    assert reads.bytes_read == 20


def test_copies_of_a_map_are_not_in_its_file(tmp_path: Path) -> None:
    M = mapped(tmp_path / "X.npy", numbers())
    assert mapping_of(M) is M
    for copy in (M.copy(), M[[1, 2]], M + 1, numbers(), None):
        assert mapping_of(copy) is None


def test_a_fit_on_a_file_is_the_fit_in_memory(tmp_path: Path) -> None:
    rng, X = np.random.default_rng(3), numbers("float32")
    g, y = Graph.from_edges(rng.integers(0, N, (2, 300)), N), rng.integers(0, 3, N)
    fits = [HERTA(ridge=0.1).fit(g, M, y).W_ for M in (X, mapped(tmp_path / "X.npy", X))]
    np.testing.assert_array_equal(*fits)
    assert isinstance(CPUBackend().host_blocks(mapped(tmp_path / "X.npy", X)), Blocks)
    assert CPUBackend().host_blocks(mapped(tmp_path / "Z.npy", X))._readable() is not None


@pytest.mark.parametrize("rows", [None, "permuted"])
@pytest.mark.parametrize("columns", [slice(None), slice(3, 5)])
def test_fill_is_one_assignment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: Any, columns: slice
) -> None:
    """On many threads, from a file, of another type and order."""
    monkeypatch.setattr(reading, "_PIECE", 64)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((500, 7)).astype(np.float32)
    X.tofile(tmp_path / "X")
    mapped = np.memmap(tmp_path / "X", np.float32, "r", shape=X.shape)[:, columns]
    order = None if rows is None else rng.permutation(500)[:400]
    out = np.full((500 if order is None else 400, mapped.shape[1]), np.nan)
    reading.fill(out, mapped, order)
    assert np.array_equal(out, X[:, columns] if order is None else X[order][:, columns])
    reading.fill(np.empty((0, 3)), np.empty((0, 3)))
