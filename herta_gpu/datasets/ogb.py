"""The node datasets of the Open Graph Benchmark, through the package `ogb` or from its files.

A dataset is asked of ogb once, and ogbn-papers100M, which ogb cannot read in little memory, is
converted from the unzipped files of its download, without ogb and torch.  Either way a folder of
plain .npy files in the cache is memory-mapped from then on, without torch and without pickles.

A conversion reads `raw/data.npz` from front to back, a few megabytes at a time.  It may be killed
at any time: arrays that are finished stay, and the one in work begins again.  It gets its name once
the source was read to its end and its CRC was right.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.datasets.dataset import PARTS, Dataset, again, cache_dir, check_split
from herta_gpu.graph import Graph
from herta_gpu.plumbing.checks import check_choice
from herta_gpu.plumbing.files import (
    DataError,
    check_place,
    check_room,
    explained,
    lock_path,
    made_folder,
    new_file,
    new_folder,
    open_array,
    read_header,
    save_arrays,
)
from herta_gpu.plumbing.progress import Stages

PAPERS = "ogbn-papers100M"
SHAPES = {  # nodes, undirected edges, features, outputs, training nodes
    "ogbn-arxiv": (169_343, 1_157_799, 128, 40, 90_941),
    "ogbn-products": (2_449_029, 61_859_140, 100, 47, 196_615),
    "ogbn-proteins": (132_534, 39_561_252, 8, 112, 86_619),
    "ogbn-mag": (736_389, 5_416_271, 128, 349, 629_571),
    PAPERS: (111_059_956, 1_615_685_872, 128, 172, 1_207_179),
}
FEATURES = ("float32", "float16")
_WHERE = "ogbn_papers100M/raw or papers100M-bin/raw (unzip papers100M-bin.zip)"
_KEPT = (*PARTS, "node_label", "node_feat")
_ARRAYS = (*_KEPT[:-1], "edge_index", "node_feat")  # small ones first: errors come soon
_CHUNK = 1 << 22  # bytes read together
_VERSION = 1  # of meta.json
_LARGEST_LABEL = 2**15 - 1
_METRICS = {"acc": "accuracy", "rocauc": "rocauc"}
_CITES = ("paper", "cites", "paper")


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
    root = Path(data_dir or cache_dir() / "ogb" / "download")
    if not is_stored(name):
        if name == PAPERS and find_download([root]):
            convert_ogb(name, [root], stages=stages)
        else:
            write_dataset(stored_folder(name), _ask_ogb(name, root, meta_dict))
    return read_dataset(stored_folder(name), features)


# ---- our own files ---------------------------------------------------------------------------
def stored_folder(name: str) -> Path:
    return cache_dir() / "ogb" / "converted" / name


def is_stored(name: str) -> bool:
    """Whether everything of a dataset is there."""
    folder = stored_folder(name)
    finished = read_meta(folder)["finished"]
    needed = _KEPT if (folder / "graph").is_dir() else _ARRAYS
    return all(key in finished and (folder / f"{key}.npy").is_file() for key in needed)


def write_dataset(folder: Path, data: Dataset) -> None:
    """Store a dataset with a dense X as memory-mappable files."""
    arrays = {"node_label": data.y, "node_feat": data.X, **data.split}
    with new_folder(folder) as at:
        sums = save_arrays(at, arrays)
        data.graph.save(at / "graph")
        finished = {key: {"shape": [*arrays[key].shape], "sum": sums[key]} for key in arrays}
        _write_ledger(at, finished, data.metric)


def read_dataset(folder: Path, features: bool = True) -> Dataset:
    """A stored dataset; X and the edges stay on disk until they are used."""
    meta, remedy = read_meta(folder), again(folder)
    finished = meta["finished"]
    if not finished:
        raise DataError(f"{folder} holds no dataset: {remedy}.")

    def stored(key: str) -> Any:
        # X may be far larger than the rest, and a changed number of it is no harm to memory.
        known = None if key == "node_feat" else finished[key].get("sum")
        return open_array(folder / f"{key}.npy", remedy, expected=known)

    X, place = stored("node_feat"), folder / "graph"
    # A graph that is there is of these edges: a conversion of others deletes it.
    if place.is_dir():
        graph = Graph.open(place)
    else:
        graph = Graph.from_edges(stored("edge_index"), X.shape[0], folder=place)
    split = {part: np.array(stored(part)) for part in PARTS if part in finished}
    metadata = {"metric": meta["metric"], "source": "ogb"}
    y = np.array(stored("node_label"))
    return Dataset(folder.name, graph, X if features else None, y, split, metadata)


def stored_sizes(name: str) -> tuple[int, int, int, int, int]:
    """The numbers of `SHAPES`, of what is stored."""
    folder = stored_folder(name)
    shapes = {key: known["shape"] for key, known in read_meta(folder)["finished"].items()}
    there = (folder / "graph").is_dir()
    m = Graph.open(folder / "graph", False).num_edges if there else shapes["edge_index"][1]
    (n, d), (n_train,) = shapes["node_feat"], shapes["train"]
    return n, m, d, SHAPES[name][3], n_train


def read_meta(folder: Path) -> dict[str, Any]:
    """The metric, and of each array that is `finished` its shape; of converted ones more."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / "meta.json").read_text())
        if found["version"] == _VERSION:
            return {"metric": "accuracy", **found, "finished": dict(found["finished"])}
    return {"metric": "accuracy", "finished": {}}


def _write_ledger(
    folder: Path, finished: dict[str, dict[str, Any]], metric: str = "accuracy"
) -> None:
    with new_file(folder / "meta.json") as temporary:
        about = {"version": _VERSION, "metric": metric, "finished": finished}
        temporary.write_text(json.dumps(about, indent=1))


# ---- conversion of papers100M ----------------------------------------------------------------
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
    if name != PAPERS:
        raise ValueError(f"OGB's files are converted for {PAPERS}, not {name!r}: load it instead.")
    download = find_download([*folders, cache_dir() / "ogb" / "download"])
    if download is None:
        places = ", ".join(map(str, folders)) or "a data folder: set HERTA_DATA"
        raise FileNotFoundError(f"There is no {_WHERE} in {places}.")
    sources, folder = _survey(download), stored_folder(name)
    check_place(folder)
    with made_folder(folder), lock_path(folder) as free:
        if not free and os.name == "posix":
            raise RuntimeError(f"Another process converts into {folder}: wait for it.")
        try:
            _convert(download, folder, sources, features, stages or Stages())
        except DataError:
            if not is_stored(name):  # the arrays that are finished are of a damaged source
                shutil.rmtree(folder, ignore_errors=True)
            raise
    return [folder / f"{key}.npy" for key in _ARRAYS]


@dataclass(frozen=True)
class _Source:
    """One array of a download, which is read from front to back."""

    name: str  # for an error: the file, and the entry in it
    stamp: str  # changes with the content
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    columnwise: bool  # Fortran order, as of edges that are listed in pairs
    runs: Callable[[], Iterator[Any]]  # all values in the order of the file, some at a time


def _nbytes(goal: dict[str, Any]) -> int:
    """Of the whole file: NumPy's header and the numbers."""
    return 128 + math.prod(goal["shape"]) * np.dtype(goal["dtype"]).itemsize


def _convert(
    download: Path,
    folder: Path,
    sources: dict[str, _Source],
    features: str | None,
    stages: Stages,
) -> None:
    """What is not there yet, made from these sources."""
    n, finished, todo = sources["node_feat"].shape[0], read_meta(folder)["finished"], {}
    kept = finished.get("node_feat", {}).get("dtype", "float32")
    kinds: dict[str, Any] = {"node_label": np.int16, "node_feat": features or kept}
    kinds["edge_index"] = np.int32 if n < 2**31 else np.int64
    for key in _ARRAYS:
        source = sources[key]
        shape, dtype = list(source.shape), np.dtype(kinds.get(key, np.int64))
        shape = shape[:1] if key == "node_label" else shape
        goal = {"from": source.stamp, "dtype": dtype.str, "shape": shape}
        path = folder / f"{key}.npy"
        found = path.stat().st_size if path.is_file() else None
        if finished.get(key) != goal or found != _nbytes(goal):
            todo[key] = goal
        # Arrays from other files are never taken together with those that are to come.
        if finished.get(key, goal).get("from") != source.stamp:
            del finished[key]
            if key == "edge_index":
                shutil.rmtree(folder / "graph", ignore_errors=True)
    where = f"into {folder}, where {{free}} are free: make room, or set HERTA_CACHE to a folder"
    sentence = f"Converting {PAPERS} writes {{need}} {where} on another disk."
    check_room(folder, sum(map(_nbytes, todo.values())), RuntimeError, sentence)
    if todo:
        text = f"{PAPERS}: OGB's files in {download} are converted once, into {folder}."
        stages.note(text, stays=True)
        _write_ledger(folder, finished)
    for key, goal in todo.items():
        began = time.perf_counter()
        with new_file(folder / f"{key}.npy") as part:
            _write(part, key, sources[key], goal, n, stages.progress(f"{key:<11}", "MB"))
        finished[key] = goal
        _write_ledger(folder, finished)
        shown, size = " x ".join(f"{k:,}" for k in goal["shape"]), _nbytes(goal) / 2**20
        kind, spent = np.dtype(goal["dtype"]).name, time.perf_counter() - began
        text = f"{key:<11} {kind:<8} {shown:<22} {size:>10,.1f} MB {spent:8.2f} s"
        stages.note(text, stays=True)


def _write(
    part: Path, key: str, source: _Source, goal: dict[str, Any], n: int, tell: Callable[..., None]
) -> None:
    """The whole array, a run of the source at a time; never is all of it mapped."""
    dtype, at = np.dtype(goal["dtype"]), 0
    np.lib.format.open_memmap(part, "w+", dtype, tuple(goal["shape"]))
    for run in source.runs():
        values, out = _checked(key, source, run, at, n, dtype), np.load(part, "r+")
        end = at + run.shape[0]
        if source.columnwise and key == "edge_index":  # pairs of source and target
            out[:, at // 2 : end // 2] = values.reshape(-1, 2).T
        else:
            out.reshape(-1)[at:end] = values
        at = end
        tell(-(-at * dtype.itemsize >> 20), -(-_nbytes(goal) >> 20))


def _checked(key: str, source: _Source, values: Any, at: int, n: int, dtype: Any) -> Any:
    """Values as they are stored; an error names the first one that cannot be.

    `at` is the place of the first value in the file.
    """
    found, wrong, rule = values, np.zeros(0, bool), ""
    if key == "edge_index":
        wrong, rule = (values < 0) | (values >= n), f"but ids must lie in 0..{n - 1}"
    elif key == "node_label":  # classes, for which OGB has NaN where it knows none
        found = np.where(np.isnan(values), -1, values) if values.dtype.kind == "f" else values
        wrong = (found < -1) | (found > _LARGEST_LABEL) | (found != np.floor(found))
        rule = f"but classes are whole numbers from 0 to {_LARGEST_LABEL}, and NaN is none"
    elif key == "node_feat":
        with np.errstate(over="ignore"):
            found = values.astype(dtype, copy=False)
        wrong = np.isinf(found) & np.isfinite(values)
        rule = f"which {dtype.name} cannot hold: convert to float32 instead"
    if wrong.any():
        place, value = at + int(np.argmax(wrong)), values[np.argmax(wrong)]
        row, column = divmod(place, source.shape[-1])
        edge = place // 2 if source.columnwise else column
        what = {
            "edge_index": f"edge {edge:,} names node",
            "node_label": f"node {place:,} has the label",
        }
        told = what.get(key, f"row {row:,}, column {column} is")
        raise DataError(f"{source.name}: {told} {value:.12g}, {rule}.")
    return found.astype(dtype, copy=False)


def find_download(folders: Sequence[Path]) -> Path | None:
    """The folder of the files of papers100M: the first of some folders, or in it."""
    known = ("ogbn_papers100M", "papers100M-bin")
    for folder in folders:
        inside = [folder / called for called in known]
        for at in [folder, *inside] if folder.resolve().name in known else inside:
            if (at / "raw" / "data.npz").is_file():
                return at
    return None


def _survey(folder: Path) -> dict[str, _Source]:
    """The arrays of a download, their shapes checked against each other, and the split."""
    data, labels = folder / "raw" / "data.npz", folder / "raw" / "node-label.npz"
    counts = [_entry(data, f"num_{what}s_list") for what in ("node", "edge")]
    for source in counts:  # as many as there are graphs
        if math.prod(source.shape) != 1 or source.dtype.kind not in "iu":
            shown = f"{source.dtype} of shape {source.shape}"
            raise DataError(f"{source.name} must be one integer, for one graph, not {shown}.")
    n, m = (int(next(source.runs())[0]) for source in counts)
    if n < 1:
        raise DataError(f"{folder}: the number of nodes is {n}.")
    found = {"node_label": _entry(labels, "node_label"), "edge_index": _entry(data, "edge_index")}
    found["node_feat"] = _entry(data, "node_feat")
    d = found["node_feat"].shape[1:2] or (1,)
    for key, kinds, what, shapes in (
        ("node_label", "fiu", "numbers", ((n, 1), (n,))),
        ("edge_index", "iu", "integers", ((2, m),)),
        ("node_feat", "f", "floats", ((n, *d),)),
    ):
        source = found[key]
        by_columns = source.columnwise and key != "edge_index" and min(source.shape) > 1
        if source.shape not in shapes or source.dtype.kind not in kinds or by_columns:
            order = ", in Fortran order" * by_columns
            raise DataError(
                f"{source.name} must hold {what} of shape {shapes[0]}, row by row, but holds "
                f"{source.dtype} of shape {source.shape}{order}."
            )
    place, ids = folder / "split" / "time", {}
    for part in PARTS:
        path = place / f"{part}.csv.gz"
        with _damage_named(path):
            ids[part] = np.loadtxt(path, np.int64, comments=None, ndmin=1)
    for part, given in check_split(place, ids, n).items():  # these are in memory already
        known = np.sort(given)
        stamp, whole = f"{zlib.crc32(known):08x}", partial(iter, [known])
        found[part] = _Source(part, stamp, known.shape, known.dtype, False, whole)
    return found


def _entry(path: Path, key: str) -> _Source:
    """An array of an .npz file, of whichever version it is."""
    name = f"{path}: {key}"
    with _damage_named(path), zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if key not in members:
            held = ", ".join(members) or "nothing"
            raise DataError(f"{path} has no entry {key} but {held}: it is not OGB's file.")
        info = members[key]
        with archive.open(info) as member:
            shape, columnwise, dtype = read_header(member)
            start = member.tell()
    if dtype.hasobject:
        raise DataError(f"{name} holds Python objects, which are not read.")
    total = math.prod(shape)
    if start + total * dtype.itemsize != info.file_size or min(shape, default=0) < 0:
        raise DataError(
            f"{name} is damaged (its {info.file_size:,} bytes do not fit its shape {shape}): "
            "download it again."
        )

    def runs() -> Iterator[Any]:
        """An even number of values at a time; with the last ones zipfile compares the CRC."""
        left, most = total, max(2, _CHUNK // dtype.itemsize & ~1)
        with _damage_named(path), zipfile.ZipFile(path) as archive, archive.open(info) as member:
            member.read(start)
            while left:
                count = min(left, most)
                raw = member.read(count * dtype.itemsize)
                if len(raw) != count * dtype.itemsize:
                    raise EOFError("it is cut short")
                left -= count
                yield np.frombuffer(raw, dtype)

    return _Source(name, f"{info.file_size}-{info.CRC:08x}", shape, dtype, columnwise, runs)


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """What is wrong with a file of a download, in a sentence."""
    if not path.is_file():
        raise DataError(f"{path} is missing: unpack the download again.")
    with explained(f"{path} is damaged", ": download it again"):
        yield


# ---- through the package ogb -----------------------------------------------------------------
def _ask_ogb(name: str, root: Path, meta_dict: dict[str, Any] | None) -> Dataset:
    """A dataset as the package ogb reads it from `root`, or downloads it there."""
    try:
        from ogb.nodeproppred import NodePropPredDataset
    except ImportError as error:
        files = f", or put {_WHERE} into a data folder" if name == PAPERS else ""
        raise ImportError(
            f'{name} is loaded by the package ogb ({error}): pip install "herta_gpu[ogb]"{files}.'
        ) from None
    declined = f"{name} is not on disk and its download was declined."
    with _trust_torch(), contextlib.redirect_stdout(sys.stderr):
        try:
            source = NodePropPredDataset(name=name, root=str(root), meta_dict=meta_dict)
            graph, labels = source[0]
            split = source.get_idx_split()
        except SystemExit:
            raise RuntimeError(declined) from None
        except Exception as error:  # ogb and pandas raise all kinds at a damaged file
            folder = Path(meta_dict["dir_path"]) if meta_dict else root / name.replace("-", "_")
            if isinstance(error, EOFError) and not folder.is_dir():  # nobody to answer ogb
                raise RuntimeError(declined) from error
            raise RuntimeError(
                f"ogb could neither read {name} from {root} nor download it "
                f"({type(error).__name__}: {error}): if a file there is damaged, delete the folder "
                f"{folder} and load again."
            ) from error
    if "edge_index_dict" in graph:  # ogbn-mag: only its papers have features
        graph = {
            "edge_index": graph["edge_index_dict"][_CITES],
            "node_feat": graph["node_feat_dict"]["paper"],
            "num_nodes": graph["num_nodes_dict"]["paper"],
        }
        labels, split = labels["paper"], {part: ids["paper"] for part, ids in split.items()}
    n, ends, X = int(graph["num_nodes"]), np.asarray(graph["edge_index"]), graph.get("node_feat")
    if X is None:  # ogbn-proteins has features on edges only: each node gets the mean of its edges
        count = np.maximum(sum(np.bincount(end, minlength=n) for end in ends), 1)
        columns = np.asarray(graph["edge_feat"], dtype=np.float64).T
        sums = [sum(np.bincount(end, column, n) for end in ends) for column in columns]
        X = (np.stack(sums, axis=1) / count[:, None]).astype(np.float32)
    y = np.asarray(labels)
    if y.ndim == 2 and y.shape[1] > 1:
        y = y.astype(np.float32)  # one column per task
    else:  # classes, for which OGB has NaN where it knows none
        y = y.reshape(y.shape[0])
        y = (np.where(np.isnan(y), -1, y) if y.dtype.kind == "f" else y).astype(np.int64)
    metadata = {"metric": _METRICS.get(source.eval_metric, "accuracy"), "source": "ogb"}
    split = {part: np.sort(np.asarray(ids, dtype=np.int64)) for part, ids in split.items()}
    return Dataset(name, Graph.from_edges(ends, n), np.asarray(X), y, split, metadata)


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
