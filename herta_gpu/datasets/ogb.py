"""The node datasets of the Open Graph Benchmark, from OGB's files or through the `ogb` package.

Where the raw files of ogbn-arxiv, -products or -papers100M lie they are converted, without ogb and
torch, into plain .npy files that can be memory-mapped.  A conversion holds a few megabytes of
memory, and it may be killed at any time: arrays that are finished stay, and the one in work begins
again.  It gets its name once the source was read to its end and its CRC was right.

Other datasets are asked of ogb once; from then on our own copy is read, without torch and without
pickles.  What ogb has processed before is read, too, although recent versions of torch refuse it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import shutil
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.datasets.dataset import PARTS, Dataset
from herta_gpu.datasets.ogb_files import (
    FROM_FILES,
    Raw,
    Stream,
    find_download,
    places_text,
    survey,
)
from herta_gpu.datasets.storage import again, cache_dir, is_cached, read_dataset, write_dataset
from herta_gpu.graph import Graph
from herta_gpu.plumbing.checks import check_choice
from herta_gpu.plumbing.files import (
    DataError,
    check_place,
    check_room,
    load_npy,
    lock_path,
    made_folder,
    new_file,
)
from herta_gpu.plumbing.progress import Stages

SHAPES = {  # nodes, undirected edges, features, outputs, training nodes
    "ogbn-arxiv": (169_343, 1_157_799, 128, 40, 90_941),
    "ogbn-products": (2_449_029, 61_859_140, 100, 47, 196_615),
    "ogbn-proteins": (132_534, 39_561_252, 8, 112, 86_619),
    "ogbn-mag": (736_389, 5_416_271, 128, 349, 629_571),
    "ogbn-papers100M": (111_059_956, 1_615_685_872, 128, 172, 1_207_179),
}
FEATURES = ("float32", "float16")
_ARRAYS = (*PARTS, "node_label", "edge_index", "node_feat")  # in the order of their sizes
_GRAPH = "graph"
_VERSION = 1  # of meta.json
_LARGEST_LABEL = 2**15 - 1
_METRICS = {"acc": "accuracy", "rocauc": "rocauc"}
_PAPERS = ("paper", "cites", "paper")


def load_ogb(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    features: bool = True,
    meta_dict: dict[str, Any] | None = None,
    stages: Stages | None = None,
) -> Dataset:
    """A dataset of OGB; features=False leaves X on disk and gives None for it.

    Parameters
    ----------
    name : str
        "ogbn-arxiv", "ogbn-products", "ogbn-proteins", "ogbn-mag" (its paper graph) or
        "ogbn-papers100M".
    data_dir : path, optional
        ogb's `root`: where it finds the data or puts it; by default the cache.
    meta_dict : dict, optional
        As ogb takes it, for data of one's own in OGB's format.
    stages : Stages, optional
        Shows how far a conversion has come, the first time.
    """
    folder, download = cached_folder(name), cache_dir() / "ogb" / "download"
    root = Path(data_dir) if data_dir is not None else download
    if name in FROM_FILES and meta_dict is None:
        if not is_converted(name) and not is_cached(folder) and find_download(name, [root]):
            convert_ogb(name, [root], stages=stages)
        if is_converted(name):
            return read_converted(name, features)
    if not is_cached(folder):
        write_dataset(folder, _ask_ogb(name, root, meta_dict))
    return read_dataset(folder, features)


def cached_folder(name: str) -> Path:
    return cache_dir() / "ogb" / name


# ---- conversion ------------------------------------------------------------------------------
def converted_folder(name: str) -> Path:
    return cache_dir() / "ogb" / "converted" / name


def is_converted(name: str) -> bool:
    """Whether everything of a dataset is there."""
    folder = converted_folder(name)
    finished = _read_ledger(folder)
    return all(key in finished and (folder / f"{key}.npy").is_file() for key in _ARRAYS)


def convert_ogb(
    name: str,
    folders: Sequence[Path],
    features: str | None = None,
    stages: Stages | None = None,
) -> list[Path]:
    """Write the .npy files of a dataset, of OGB's files below one of the folders; their paths.

    What is finished is kept.  `features` is "float32", "float16" (an entry that it cannot hold is
    an error), or None: what is there, else float32.
    """
    check_choice("features", features, (None, *FEATURES))
    if name not in FROM_FILES:
        raise ValueError(f"OGB's files are converted for {', '.join(FROM_FILES)}, not {name!r}.")
    download = find_download(name, [*folders, cache_dir() / "ogb" / "download"])
    if download is None:
        places = ", ".join(str(folder) for folder in folders)
        raise FileNotFoundError(
            f"There is no {places_text(name)} in {places or 'a data folder: set HERTA_DATA'}."
        )
    raw, folder = survey(name, download), converted_folder(name)
    check_place(folder)
    with made_folder(folder), lock_path(folder) as free:
        if not free and os.name == "posix":
            raise RuntimeError(f"Another process converts into {folder}: wait for it.")
        finished = _read_ledger(folder)
        if features is None and "node_feat" in finished:
            features = np.dtype(finished["node_feat"]["dtype"]).name
        goals = [goal for goal in _goals(raw, features or "float32") if not goal.is_made(folder)]
        where = f"into {folder}, where {{free}} are free: make room, or set HERTA_CACHE to a folder"
        sentence = f"Converting {name} writes {{need}} {where} on another disk."
        check_room(folder, sum(goal.nbytes for goal in goals), RuntimeError, sentence)
        try:
            _convert(name, raw, folder, goals, stages or Stages())
        except DataError:
            if not is_converted(name):  # the arrays that are finished are of a damaged source
                shutil.rmtree(folder, ignore_errors=True)
            raise
    return [folder / f"{key}.npy" for key in _ARRAYS]


def read_converted(name: str, features: bool = True) -> Dataset:
    """A converted dataset; X and the edges stay on disk until they are used."""
    folder = converted_folder(name)
    what = f"a whole array: {again(folder)}"
    arrays = {key: load_npy(folder / f"{key}.npy", what) for key in _ARRAYS}
    X, place = arrays["node_feat"], folder / _GRAPH
    # A graph that is there belongs to these edges: a conversion of others deletes it.
    if place.is_dir():
        graph = Graph.open(place)
    else:
        graph = Graph.from_edges(arrays["edge_index"], X.shape[0], folder=place)
    split = {part: np.array(arrays[part]) for part in PARTS}
    metadata = {"metric": "accuracy", "source": "ogb"}
    y = np.array(arrays["node_label"])
    return Dataset(name, graph, X if features else None, y, split, metadata)


def converted_shapes(name: str) -> dict[str, list[int]]:
    """Shapes of the arrays, without reading one."""
    return {key: about["shape"] for key, about in _read_ledger(converted_folder(name)).items()}


@dataclass(frozen=True)
class _Goal:
    """One array that is to be written."""

    key: str
    stream: Stream
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    cast: Callable[[Any, int], Any]  # (values, place of the first one) -> values to be stored

    @property
    def about(self) -> dict[str, Any]:
        """What identifies it in the ledger."""
        return {"from": self.stream.stamp, "dtype": self.dtype.str, "shape": list(self.shape)}

    @property
    def nbytes(self) -> int:
        return 128 + math.prod(self.shape) * self.dtype.itemsize

    def is_made(self, folder: Path) -> bool:
        """Whether the array is there, made from this source."""
        path = folder / f"{self.key}.npy"
        if _read_ledger(folder).get(self.key) != self.about or not path.is_file():
            return False
        with contextlib.suppress(DataError):
            return bool(load_npy(path, "a whole array").shape == self.shape)
        return False

    def write(self, part: Path, tell: Callable[[int, int], None]) -> None:
        """The whole array, a run of the source at a time; never is all of it mapped."""
        at, total = 0, math.prod(self.shape)
        with open(part, "wb") as file:
            about = {"descr": self.dtype.str, "fortran_order": False, "shape": self.shape}
            np.lib.format.write_array_header_1_0(file, about)
            file.truncate(file.tell() + total * self.dtype.itemsize)
        for run in self.stream.runs():
            values, out = self.cast(run, at), np.load(part, "r+")
            if self.key == "edge_index" and self.stream.columnwise:  # pairs of source and target
                out[:, at // 2 : (at + run.shape[0]) // 2] = values.reshape(-1, 2).T
            else:
                out.reshape(-1)[at : at + run.shape[0]] = values
            at += run.shape[0]
            tell(-(-at * self.dtype.itemsize >> 20), -(-self.nbytes >> 20))
        if at != total:
            raise DataError(f"{self.stream.name} holds {at:,} values instead of {total:,}.")


def _convert(name: str, raw: Raw, folder: Path, goals: list[_Goal], stages: Stages) -> None:
    """What is not there yet, small arrays first: their errors come soon."""
    finished = _read_ledger(folder)
    # Arrays from other files are never taken together with those that are to come.
    for goal in goals:
        if finished.get(goal.key, goal.about)["from"] != goal.about["from"]:
            del finished[goal.key]
    if goals:
        text = f"{name}: OGB's files in {raw.source} are converted once, into {folder}."
        stages.note(text, stays=True)
        _write_ledger(folder, finished)
    for goal in goals:
        began = time.perf_counter()
        with new_file(folder / f"{goal.key}.npy") as part:
            goal.write(part, stages.progress(f"{goal.key:<11}", "MB"))
            if goal.key == "edge_index":
                shutil.rmtree(folder / _GRAPH, ignore_errors=True)
        finished[goal.key] = goal.about
        _write_ledger(folder, finished)
        shape, size = " x ".join(f"{n:,}" for n in goal.shape), goal.nbytes / 2**20
        spent = time.perf_counter() - began
        text = f"{goal.key:<11} {goal.dtype.name:<8} {shape:<22} {size:>10,.1f} MB {spent:8.2f} s"
        stages.note(text, stays=True)


def _read_ledger(folder: Path) -> dict[str, dict[str, Any]]:
    """meta.json: what is known of the arrays that are finished."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / "meta.json").read_text())
        if found["version"] == _VERSION:
            return dict(found["finished"])
    return {}


def _write_ledger(folder: Path, finished: dict[str, dict[str, Any]]) -> None:
    with new_file(folder / "meta.json") as temporary:
        temporary.write_text(json.dumps({"version": _VERSION, "finished": finished}, indent=1))


def _goals(raw: Raw, features: str) -> list[_Goal]:
    """All arrays of a dataset; the parts of the split are in memory already."""
    ids, kind = np.dtype(np.int32 if raw.n < 2**31 else np.int64), np.dtype(features)

    def node_ids(values: Any, at: int) -> Any:
        def say(i: int, value: Any) -> str:
            edge = i // 2 if raw.edges.columnwise else i % raw.m
            return f"edge {edge:,} names node {value}, but ids must lie in 0..{raw.n - 1}"

        _refuse(raw.edges, (values < 0) | (values >= raw.n), values, at, say)
        return values.astype(ids, copy=False)

    def floats(values: Any, at: int) -> Any:
        def say(i: int, value: Any) -> str:
            row, column = divmod(i, raw.features.shape[1])
            where = f"row {row:,}, column {column} is {value:g}"
            return f"{where}, which {kind.name} cannot hold: convert to float32 instead"

        with np.errstate(over="ignore"):
            found = values.astype(kind, copy=False)
        _refuse(raw.features, np.isinf(found) & np.isfinite(values), values, at, say)
        return found

    def classes(values: Any, at: int) -> Any:
        def say(i: int, value: Any) -> str:
            whole = f"whole numbers from 0 to {_LARGEST_LABEL}, and NaN is none"
            return f"node {i:,} has the label {value:g}, but classes are {whole}"

        found = np.where(np.isnan(values), -1, values) if values.dtype.kind == "f" else values
        wrong = (found < -1) | (found > _LARGEST_LABEL) | (found != np.floor(found))
        _refuse(raw.labels, wrong, values, at, say)
        return found.astype(np.int16)

    def split(part: str) -> _Goal:
        known = raw.split[part]
        stamp = f"{zlib.crc32(known):08x}"
        stream = Stream(part, stamp, known.shape, known.dtype, False, lambda: iter([known]))
        return _Goal(part, stream, known.shape, np.dtype(np.int64), lambda values, _: values)

    return [
        *map(split, PARTS),
        _Goal("node_label", raw.labels, (raw.n,), np.dtype(np.int16), classes),
        _Goal("edge_index", raw.edges, (2, raw.m), ids, node_ids),
        _Goal("node_feat", raw.features, raw.features.shape, kind, floats),
    ]


def _refuse(stream: Stream, wrong: Any, values: Any, at: int, say: Callable[..., str]) -> None:
    """An error that names the first of the `wrong` values; the first of all is in place `at`."""
    if wrong.any():
        bad = int(np.argmax(wrong))
        raise DataError(f"{stream.name}: {say(at + bad, values[bad])}.")


# ---- through the package ogb -----------------------------------------------------------------
def _ask_ogb(name: str, root: Path, meta_dict: dict[str, Any] | None) -> Dataset:
    """A dataset as the package ogb reads it from `root`, or downloads it there."""
    try:
        from ogb.nodeproppred import NodePropPredDataset
    except ImportError as error:
        files = f", or put {places_text(name)} into a data folder" if name in FROM_FILES else ""
        raise ImportError(
            f'{name} is loaded by the package ogb ({error}): pip install "herta_gpu[ogb]"{files}.'
        ) from None
    with _trust_torch(), contextlib.redirect_stdout(sys.stderr):
        try:
            source = NodePropPredDataset(name=name, root=str(root), meta_dict=meta_dict)
            graph, labels = source[0]
            split = source.get_idx_split()
        except Exception as error:  # ogb and pandas raise all kinds at a damaged file
            raise _explain(error, name, root, meta_dict) from error
        except SystemExit:
            raise RuntimeError(f"{name} is not on disk and its download was declined.") from None
    if "edge_index_dict" in graph:  # ogbn-mag: only its papers have features
        graph = {
            "edge_index": graph["edge_index_dict"][_PAPERS],
            "node_feat": graph["node_feat_dict"]["paper"],
            "num_nodes": graph["num_nodes_dict"]["paper"],
        }
        labels, split = labels["paper"], {part: ids["paper"] for part, ids in split.items()}
    n = int(graph["num_nodes"])
    X = graph.get("node_feat")
    if X is None:
        X = _mean_edge_features(graph["edge_index"], graph["edge_feat"], n)
    y = np.asarray(labels)
    if y.ndim == 2 and y.shape[1] > 1:
        y = y.astype(np.float32)  # one column per task
    else:  # classes, for which OGB has NaN where it knows none
        y = y.reshape(y.shape[0])
        y = (np.where(np.isnan(y), -1, y) if y.dtype.kind == "f" else y).astype(np.int64)
    metadata = {"metric": _METRICS.get(source.eval_metric, "accuracy"), "source": "ogb"}
    return Dataset(
        name,
        Graph.from_edges(graph["edge_index"], n),
        np.asarray(X),
        y,
        {part: np.sort(np.asarray(ids, dtype=np.int64)) for part, ids in split.items()},
        metadata,
    )


def _explain(
    error: Exception, name: str, root: Path, meta_dict: dict[str, Any] | None
) -> Exception:
    """What went wrong in ogb, in one sentence that names the file if there is one to blame."""
    folder = root / name.replace("-", "_") if meta_dict is None else Path(meta_dict["dir_path"])
    for path in sorted(folder.rglob("*.gz")):
        try:
            with gzip.open(path, "rb") as file:
                while file.read(1 << 24):
                    pass
        except (OSError, EOFError, zlib.error) as reason:
            return DataError(
                f"{path} ({reason}) is damaged: delete the folder {folder} and load again."
            )
    if isinstance(error, EOFError) and not folder.is_dir():  # nobody there to answer ogb's question
        return RuntimeError(f"{name} is not on disk and its download was declined.")
    if isinstance(error, OSError):
        return RuntimeError(f"ogb could neither read {name} from {root} nor download it ({error}).")
    return RuntimeError(
        f"ogb could not read {name} from {root} ({type(error).__name__}: {error}): "
        "if a file there is damaged, delete the folder and load again."
    )


@contextlib.contextmanager
def _trust_torch() -> Iterator[None]:
    """Since torch 2.6 `torch.load` reads tensors only, and ogb's own files hold NumPy arrays."""
    switch = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f".*{switch}")
            yield
    finally:
        del os.environ[switch]
        os.environ |= {} if before is None else {switch: before}


def _mean_edge_features(edge_index: Any, edge_feat: Any, n: int) -> Any:
    """ogbn-proteins has features on edges only: each node gets the mean of those at its edges."""
    ends = np.asarray(edge_index)
    count = np.maximum(sum(np.bincount(end, minlength=n) for end in ends), 1)
    X = np.empty((n, edge_feat.shape[1]), dtype=np.float32)
    for j in range(edge_feat.shape[1]):
        column = np.asarray(edge_feat[:, j], dtype=np.float64)
        X[:, j] = sum(np.bincount(end, weights=column, minlength=n) for end in ends) / count
    return X
