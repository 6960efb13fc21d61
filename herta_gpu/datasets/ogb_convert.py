"""OGB's files as plain .npy files that can be memory-mapped, made once and little by little.

A conversion holds a few megabytes of memory, and it may be killed at any time.  Arrays that are
finished stay.  The one in work goes on where `meta.json` says; as a deflated array has no entry
in the middle, its beginning is unpacked again without being written.  Each array is written to a
`.part`, which gets its name once the source was read to its end and its CRC was right.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.datasets.dataset import PARTS, Dataset
from herta_gpu.datasets.ogb_raw import Raw, Stream, survey
from herta_gpu.datasets.places import Place
from herta_gpu.datasets.storage import cache_dir
from herta_gpu.graph import Graph
from herta_gpu.plumbing.files import DataError, check_place, load_npy, new_file
from herta_gpu.plumbing.stages import Stages
from herta_gpu.plumbing.validation import check_choice

try:
    import fcntl
except ImportError:  # not POSIX: nobody keeps two conversions apart
    fcntl = None  # type: ignore[assignment]

FEATURES = ("float32", "float16")
VERSION = 1
_ARRAYS = (*PARTS, "node_label", "edge_index", "node_feat")  # in the order of their sizes
_GRAPH = "graph"
_KEPT = 1 << 28  # bytes after which what was written is sure to survive a kill
_OFTEN = 0.2  # seconds between two pictures of the bar
_WIDTH = 24  # characters of the bar
_LARGEST_LABEL = 2**15 - 1
_Cast = Callable[[Any, int], Any]  # (values, place of the first one) -> values as they are stored


def converted_folder(name: str) -> Path:
    return cache_dir() / "ogb" / "converted" / name


def is_converted(name: str) -> bool:
    """Whether everything of a dataset is there."""
    return _Ledger(converted_folder(name)).is_whole()


def convert(
    name: str, place: Place, features: str | None = None, stages: Stages | None = None
) -> list[Path]:
    """Write the .npy files of a dataset and return their paths; what is finished is kept.

    Parameters
    ----------
    name : str
        "ogbn-arxiv", "ogbn-products" or "ogbn-papers100M".
    place : Place
        Where its files lie, as `ogb_raw.find` found them.
    features : {None, "float32", "float16"}
        None is what is there or has begun, else float32.  An entry that float16 cannot hold is an
        error.
    stages : Stages, optional
        Shows the progress.
    """
    check_choice("features", features, (None, *FEATURES))
    raw, folder = survey(name, place), converted_folder(name)
    check_place(folder)
    new = [at for at in (folder, *folder.parents) if not at.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _alone(folder):
            _Work(folder, raw, stages or Stages()).convert(name, features)
    except BaseException as error:
        if isinstance(error, DataError):
            _clean(folder)
        with contextlib.suppress(OSError):  # not empty: there is something to go on with
            for at in filter(Path.exists, new):
                at.rmdir()
        raise
    return [folder / f"{key}.npy" for key in _ARRAYS]


def read_converted(name: str, features: bool = True) -> Dataset:
    """A converted dataset; X and the edges stay on disk until they are used."""
    folder = converted_folder(name)

    def opened(key: str) -> Any:
        return load_npy(folder / f"{key}.npy", f"a whole array: delete {folder} and load again")

    X = opened("node_feat")
    split = {part: np.array(opened(part)) for part in PARTS}
    graph = cached_graph(folder / _GRAPH, opened("edge_index"), X.shape[0])
    metadata = {"metric": "accuracy", "source": "ogb"}
    y = np.array(opened("node_label"))
    return Dataset(name, graph, X if features else None, y, split, metadata)


def converted_sizes(name: str) -> tuple[int, int, int, int]:
    """Nodes, listed edges, features and training nodes, from the headers alone."""
    shapes = {key: _Ledger(converted_folder(name)).finished[key]["shape"] for key in _ARRAYS}
    n, d = shapes["node_feat"]
    return n, shapes["edge_index"][1], d, shapes["train"][0]


def cached_graph(folder: Path, edges: Any, n: int) -> Graph:
    """The graph of a memory-mapped edge list (2, m), whose CSR is kept in `folder`.

    A folder that is there belongs to these edges: a conversion of others deletes it.
    """
    if folder.is_dir():
        return Graph.open(folder)
    return Graph.from_edges(edges, n, folder=folder)


@dataclass(frozen=True)
class _Goal:
    """One array that is to be: `about` identifies it in the ledger."""

    key: str
    stream: Stream
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    cast: _Cast

    @property
    def about(self) -> dict[str, Any]:
        return {"from": self.stream.stamp, "dtype": self.dtype.str, "shape": list(self.shape)}

    @property
    def header(self) -> bytes:
        made = io.BytesIO()
        about = {"descr": self.dtype.str, "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(made, about)
        return made.getvalue()

    @property
    def total(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.total * self.dtype.itemsize

    def placed(self, values: Any, at: int) -> list[tuple[int, Any]]:
        """(byte in the file, values) to write; `at` is the place of the first in the source."""
        start, size = len(self.header), self.dtype.itemsize
        if self.key != "edge_index" or not self.stream.columnwise:
            return [(start + at * size, values)]
        # Edges listed in pairs: sources go to the first half of the file, targets to the second.
        first = start + at // 2 * size
        return [(first, values[::2]), (first + self.shape[1] * size, values[1::2])]


class _Ledger:
    """meta.json: the arrays that are finished, and how far others have come."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / "meta.json"
        self.finished: dict[str, dict[str, Any]] = {}
        self.begun: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self._path.read_text())
            if found["version"] == VERSION:
                self.finished, self.begun = dict(found["finished"]), dict(found["begun"])

    def has(self, key: str) -> bool:
        return key in self.finished and (self.folder / f"{key}.npy").is_file()

    def is_whole(self) -> bool:
        return all(self.has(key) for key in _ARRAYS)

    def dtype(self, key: str) -> str | None:
        """Of an array that is finished or has begun."""
        about = self.finished.get(key) or self.begun.get(key)
        return None if about is None else np.dtype(about["dtype"]).name

    def has_made(self, goal: _Goal) -> bool:
        path = self.folder / f"{goal.key}.npy"
        known = self.has(goal.key) and self.finished[goal.key] == goal.about
        return known and path.stat().st_size == goal.nbytes

    def values_of(self, goal: _Goal) -> int:
        """How many values of the source are in the `.part` already."""
        about = dict(self.begun.get(goal.key, {}))
        values = int(about.pop("values", 0))
        return values if about == goal.about else 0

    def forget_others(self, goals: list[_Goal]) -> None:
        """Arrays from other files are never taken together with those that are to come."""
        old = [g.key for g in goals if self.finished.get(g.key, g.about)["from"] != g.about["from"]]
        for key in old:
            del self.finished[key]
        if old:
            self._save()

    def note(self, goal: _Goal, values: int | None) -> None:
        """So many values are written; None: the array is finished."""
        self.begun.pop(goal.key, None)
        if values is None:
            self.finished[goal.key] = goal.about
        else:
            self.begun[goal.key] = {**goal.about, "values": values}
        self._save()

    def _save(self) -> None:
        about = {"version": VERSION, "finished": self.finished, "begun": self.begun}
        with new_file(self._path) as temporary:
            temporary.write_text(json.dumps(about, indent=1))


class _Work:
    """One conversion."""

    def __init__(self, folder: Path, raw: Raw, stages: Stages) -> None:
        self._folder, self._raw, self._stages = folder, raw, stages
        self._ledger = _Ledger(folder)

    def convert(self, name: str, features: str | None) -> None:
        """Everything that is not there yet, small arrays first: their errors come soon."""
        wish = features or self._ledger.dtype("node_feat") or "float32"
        goals = [goal for goal in self._goals(wish) if not self._ledger.has_made(goal)]
        if not goals:
            return
        self._check_space(name, goals)
        self._ledger.forget_others(goals)
        self._stages.note(
            f"{name}: OGB's files in {self._raw.source} are converted once, into {self._folder}.",
            stays=True,
        )
        for goal in goals:
            self._write(goal)

    def _goals(self, features: str) -> list[_Goal]:
        raw = self._raw
        ids = np.dtype(np.int32 if raw.n < 2**31 else np.int64)
        made = [_of_split(part, raw.split[part]) for part in PARTS]
        made.append(_Goal("node_label", raw.labels, (raw.n,), np.dtype(np.int16), _labels(raw)))
        made.append(_Goal("edge_index", raw.edges, (2, raw.m), ids, _node_ids(raw, ids)))
        kind = np.dtype(features)
        made.append(_Goal("node_feat", raw.features, raw.features.shape, kind, _floats(raw, kind)))
        return made

    def _check_space(self, name: str, goals: list[_Goal]) -> None:
        free = shutil.disk_usage(self._folder).free
        need = sum(goal.nbytes - _on_disk(self._part(goal)) for goal in goals)
        if need > free:
            raise RuntimeError(
                f"Converting {name} writes {need / 2**30:,.1f} GB into {self._folder}, where "
                f"{free / 2**30:,.1f} GB are free: make room, or set HERTA_CACHE to a folder on "
                "another disk."
            )

    def _part(self, goal: _Goal) -> Path:
        return self._folder / f"{goal.key}.npy.part"

    def _write(self, goal: _Goal) -> None:
        """One array, from where it was left."""
        part, size = self._part(goal), goal.dtype.itemsize
        done = self._ledger.values_of(goal)
        if done and (not part.is_file() or part.stat().st_size < len(goal.header) + done * size):
            done = 0
        shown, at, kept = _Progress(self._stages, goal), 0, done
        with open(part, "r+b" if done else "wb") as file:
            file.write(goal.header)
            for run in goal.stream.runs():
                new = run[max(0, done - at) :]  # the rest was written before
                at += run.shape[0]
                if new.shape[0]:
                    first = at - new.shape[0]
                    for where, values in goal.placed(goal.cast(new, first), first):
                        file.seek(where)
                        file.write(np.ascontiguousarray(values))
                if (at - kept) * size >= _KEPT:
                    _sync(file)
                    self._ledger.note(goal, at)
                    kept = at
                shown.show(at)
            _sync(file)
        if at != goal.total:
            raise DataError(f"{goal.stream.name} holds {at:,} values instead of {goal.total:,}.")
        if goal.key == "edge_index":
            shutil.rmtree(self._folder / _GRAPH, ignore_errors=True)
        os.replace(part, self._folder / f"{goal.key}.npy")
        self._ledger.note(goal, None)
        shown.finish()


def _of_split(part: str, ids: Any) -> _Goal:
    """A part of the split, which is in memory already: the survey read and checked it."""
    stamp = f"{zlib.crc32(ids):08x}"
    stream = Stream(part, stamp, ids.shape, ids.dtype, False, lambda: iter([ids]))
    return _Goal(part, stream, ids.shape, np.dtype(np.int64), lambda values, _: values)


def _node_ids(raw: Raw, kind: np.dtype[Any]) -> _Cast:
    def cast(values: Any, at: int) -> Any:
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= raw.n:
            bad = int(np.argmax((values < 0) | (values >= raw.n)))
            edge = (at + bad) // 2 if raw.edges.columnwise else (at + bad) % raw.m
            raise DataError(
                f"{raw.edges.name}: edge {edge:,} names node {int(values[bad])}, but ids must lie "
                f"in 0..{raw.n - 1}."
            )
        return values.astype(kind, copy=False)

    return cast


def _floats(raw: Raw, kind: np.dtype[Any]) -> _Cast:
    def cast(values: Any, at: int) -> Any:
        with np.errstate(over="ignore"):
            found = values.astype(kind, copy=False)
        if kind.itemsize < values.dtype.itemsize:
            lost = np.isinf(found) & np.isfinite(values)
            if lost.any():
                bad = int(np.argmax(lost))
                row, column = divmod(at + bad, raw.features.shape[1])
                raise DataError(
                    f"{raw.features.name}: row {row:,}, column {column} is {values[bad]:g}, which "
                    f"{kind.name} cannot hold: convert to float32 instead."
                )
        return found

    return cast


def _labels(raw: Raw) -> _Cast:
    def cast(values: Any, at: int) -> Any:
        found = np.where(np.isnan(values), -1, values) if values.dtype.kind == "f" else values
        wrong = (found < -1) | (found > _LARGEST_LABEL) | (found != np.floor(found))
        if wrong.any():
            bad = int(np.argmax(wrong))
            raise DataError(
                f"{raw.labels.name}: node {at + bad:,} has the label {values[bad]:g}, but classes "
                f"are whole numbers from 0 to {_LARGEST_LABEL}, and NaN is none."
            )
        return found.astype(np.int16)

    return cast


class _Progress:
    """The bar of one array, and the line that stays when it is finished."""

    def __init__(self, stages: Stages, goal: _Goal) -> None:
        self._stages, self._goal = stages, goal
        self._start = self._last = time.perf_counter()

    def show(self, at: int) -> None:
        now = time.perf_counter()
        if now - self._last < _OFTEN:
            return
        self._last = now
        share, spent = at / max(1, self._goal.total), now - self._start
        if self._stages.drawn(self._goal.key, share * self._goal.nbytes, self._goal.nbytes, "B"):
            return
        filled = int(_WIDTH * share)
        left = spent * (1 - share) / max(share, 1e-12)
        speed = share * self._goal.nbytes / spent / 2**20
        self._stages.note(
            f"{self._goal.key:<11} [{'#' * filled:.<{_WIDTH}}] {share:4.0%} of "
            f"{self._goal.nbytes / 2**30:.1f} GB, {speed:,.0f} MB/s, {left / 60:.1f} min left ..."
        )

    def finish(self) -> None:
        goal, spent = self._goal, time.perf_counter() - self._start
        shape = " x ".join(f"{size:,}" for size in goal.shape)
        self._stages.note(
            f"{goal.key:<11} {goal.dtype.name:<8} {shape:<22} {goal.nbytes / 2**20:>10,.1f} MB "
            f"{spent:8.2f} s",
            stays=True,
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One conversion at a time; the system takes the lock back when a process ends."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"Another process converts into {folder}: wait for it.") from None
        yield
    finally:
        os.close(handle)


def _clean(folder: Path) -> None:
    """After bad input nothing stays but a dataset that was whole before."""
    if not _Ledger(folder).is_whole():
        shutil.rmtree(folder, ignore_errors=True)
    for part in folder.glob("*.part"):
        part.unlink()


def _on_disk(path: Path) -> int:
    """Bytes that a file takes already; of a file with holes fewer than its length."""
    return 512 * getattr(path.stat(), "st_blocks", 0) if path.is_file() else 0


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
