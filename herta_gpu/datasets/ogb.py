"""The node datasets of the Open Graph Benchmark, from OGB's files or through the `ogb` package.

Where the unzipped files of ogbn-arxiv, -products or -papers100M lie they are converted, without ogb
and torch, into plain .npy files that can be memory-mapped.  OGB has members of `raw/data.npz`
(papers100M) or compressed tables `raw/*.csv.gz`; both are read from front to back, a few megabytes
at a time.  A conversion may be killed at any time: arrays that are finished stay, and the one in
work begins again.  It gets its name once the source was read to its end and its CRC was right.

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
    check_version,
    explained,
    load_npy,
    lock_path,
    made_folder,
    new_file,
    new_folder,
    open_array,
    read_header,
    save_arrays,
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
_DOWNLOADS = {  # the folder in OGB's zip, and the split that OGB uses
    "ogbn-arxiv": ("arxiv", "time"),
    "ogbn-products": ("products", "sales_ranking"),
    "ogbn-papers100M": ("papers100M-bin", "time"),
}
FROM_FILES = tuple(_DOWNLOADS)
_ARRAYS = (*PARTS, "node_label", "edge_index", "node_feat")  # small ones first: errors come soon
_CHUNK = 1 << 22  # bytes read together
_GRAPH = "graph"
_VERSION = 1  # of both kinds of meta.json
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
    root = Path(data_dir or cached_folder("download"))
    if name in FROM_FILES and meta_dict is None:
        if not is_converted(name) and not is_cached(name) and find_download(name, [root]):
            convert_ogb(name, [root], stages=stages)
        if is_converted(name):
            return read_converted(name, features)
    if not is_cached(name):
        write_dataset(cached_folder(name), _ask_ogb(name, root, meta_dict))
    return read_dataset(cached_folder(name), features)


def cached_folder(name: str) -> Path:
    return cache_dir() / "ogb" / name


def is_cached(name: str) -> bool:
    return (cached_folder(name) / "meta.json").is_file()


# ---- conversion ------------------------------------------------------------------------------
def converted_folder(name: str) -> Path:
    return cached_folder("converted") / name


def is_converted(name: str) -> bool:
    """Whether everything of a dataset is there."""
    folder = converted_folder(name)
    finished = read_ledger(name)
    return all(key in finished and (folder / f"{key}.npy").is_file() for key in _ARRAYS)


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
    download = find_download(name, [*folders, cached_folder("download")])
    if download is None:
        places = ", ".join(map(str, folders)) or "a data folder: set HERTA_DATA"
        raise FileNotFoundError(f"There is no {_places(name)} in {places}.")
    sources, folder = _survey(name, download), converted_folder(name)
    check_place(folder)
    with made_folder(folder), lock_path(folder) as free:
        if not free and os.name == "posix":
            raise RuntimeError(f"Another process converts into {folder}: wait for it.")
        try:
            _convert(name, download, sources, features, stages or Stages())
        except DataError:
            if not is_converted(name):  # the arrays that are finished are of a damaged source
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
    name: str,
    download: Path,
    sources: dict[str, _Source],
    features: str | None,
    stages: Stages,
) -> None:
    """What is not there yet, made from these sources."""
    folder, n = converted_folder(name), sources["node_feat"].shape[0]
    finished, todo = read_ledger(name), {}
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
        if finished.get(key, goal)["from"] != source.stamp:
            del finished[key]
    where = f"into {folder}, where {{free}} are free: make room, or set HERTA_CACHE to a folder"
    sentence = f"Converting {name} writes {{need}} {where} on another disk."
    check_room(folder, sum(map(_nbytes, todo.values())), RuntimeError, sentence)
    if todo:
        text = f"{name}: OGB's files in {download} are converted once, into {folder}."
        stages.note(text, stays=True)
        _write_ledger(folder, finished)
    for key, goal in todo.items():
        began = time.perf_counter()
        with new_file(folder / f"{key}.npy") as part:
            _write(part, key, sources[key], goal, n, stages.progress(f"{key:<11}", "MB"))
            if key == "edge_index":
                shutil.rmtree(folder / _GRAPH, ignore_errors=True)
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
    shape, dtype, at = tuple(goal["shape"]), np.dtype(goal["dtype"]), 0
    np.lib.format.open_memmap(part, "w+", dtype, shape)
    for run in source.runs():
        values, out = _checked(key, source, run, at, n, dtype), np.load(part, "r+")
        end = at + run.shape[0]
        if source.columnwise and key == "edge_index":  # pairs of source and target
            out[:, at // 2 : end // 2] = values.reshape(-1, 2).T
        else:
            out.reshape(-1)[at:end] = values
        at = end
        tell(-(-at * dtype.itemsize >> 20), -(-_nbytes(goal) >> 20))
    if at != math.prod(shape):
        raise DataError(f"{source.name} holds {at:,} values instead of {math.prod(shape):,}.")


def _checked(key: str, source: _Source, values: Any, at: int, n: int, dtype: Any) -> Any:
    """Values as they are stored; an error names the first one that cannot be.

    `at` is the place of the first value in the file.
    """
    found, wrong = values, np.zeros(0, bool)
    if key == "edge_index":
        wrong = (values < 0) | (values >= n)
    elif key == "node_label":  # classes, for which OGB has NaN where it knows none
        found = np.where(np.isnan(values), -1, values) if values.dtype.kind == "f" else values
        wrong = (found < -1) | (found > _LARGEST_LABEL) | (found != np.floor(found))
    elif key == "node_feat":
        with np.errstate(over="ignore"):
            found = values.astype(dtype, copy=False)
        wrong = np.isinf(found) & np.isfinite(values)
    if wrong.any():
        place, value = at + int(np.argmax(wrong)), values[np.argmax(wrong)]
        row, column = divmod(place, source.shape[-1])
        edge = place // 2 if source.columnwise else column
        says = {
            "edge_index": f"edge {edge:,} names node {value}, but ids must lie in 0..{n - 1}",
            "node_label": f"node {place:,} has the label {value:g}, but classes are whole numbers "
            f"from 0 to {_LARGEST_LABEL}, and NaN is none",
            "node_feat": f"row {row:,}, column {column} is {value:g}, which {dtype.name} cannot "
            "hold: convert to float32 instead",
        }
        raise DataError(f"{source.name}: {says[key]}.")
    return found.astype(dtype, copy=False)


def read_ledger(name: str) -> dict[str, dict[str, Any]]:
    """Source, type and shape of each array that is finished, of meta.json."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((converted_folder(name) / "meta.json").read_text())
        if found["version"] == _VERSION:
            return dict(found["finished"])
    return {}


def _write_ledger(folder: Path, finished: dict[str, dict[str, Any]]) -> None:
    with new_file(folder / "meta.json") as temporary:
        temporary.write_text(json.dumps({"version": _VERSION, "finished": finished}, indent=1))


# ---- OGB's files -----------------------------------------------------------------------------
def find_download(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder of OGB's files of a dataset: the first of some folders, or in it."""
    known = (name.replace("-", "_"), _DOWNLOADS[name][0])
    for folder in folders:
        inside = [folder / called for called in known]
        for at in [folder, *inside] if folder.resolve().name in known else inside:
            if any((at / "raw" / file).is_file() for file in ("data.npz", "edge.csv.gz")):
                return at
    return None


def _places(name: str) -> str:
    """Where the files of a dataset are looked for below a root."""
    zipped = _DOWNLOADS[name][0]
    return f"{name.replace('-', '_')}/raw or {zipped}/raw (unzip {zipped}.zip)"


def _survey(name: str, folder: Path) -> dict[str, _Source]:
    """The arrays of a download, their shapes checked against each other, and the split."""
    raw, whats = folder / "raw", ("node", "edge")
    if (raw / "data.npz").is_file():
        n, m = (_count(_entry(raw / "data.npz", f"num_{what}s_list")) for what in whats)
        keys = {"node_label": "node-label", "edge_index": "data", "node_feat": "data"}
        found = {key: _entry(raw / f"{file}.npz", key) for key, file in keys.items()}
    else:
        n, m = (_count(_table(raw / f"num-{what}-list.csv.gz", 1, 1, np.int64)) for what in whats)
        with _open(raw / "node-feat.csv.gz") as text:
            d = text.readline().count(b",") + 1
        found = {
            "node_label": _table(raw / "node-label.csv.gz", n, 1, float),
            "edge_index": _table(raw / "edge.csv.gz", m, 2, np.int64),
            "node_feat": _table(raw / "node-feat.csv.gz", n, d, float),
        }
    if n < 1:
        raise DataError(f"{folder}: the number of nodes is {n}.")
    d = found["node_feat"].shape[1:2]
    for key, kinds, what, shapes in (
        ("node_label", "fiu", "numbers", ((n, 1), (n,))),
        ("edge_index", "iu", "integers", ((2, m),)),
        ("node_feat", "f", "floats", ((n, *(d or (1,))),)),
    ):
        source = found[key]
        by_columns = source.columnwise and key != "edge_index" and min(source.shape) > 1
        if source.shape not in shapes or source.dtype.kind not in kinds or by_columns:
            order = ", in Fortran order" * by_columns
            raise DataError(
                f"{source.name} must hold {what} of shape {shapes[0]}, row by row, but holds "
                f"{source.dtype} of shape {source.shape}{order}."
            )
    place = folder / "split" / _DOWNLOADS[name][1]
    ids = {}
    for part in PARTS:
        runs = _numbers(place / f"{part}.csv.gz", 1, np.int64)
        ids[part] = np.concatenate([np.empty(0, np.int64), *runs])
    for part, given in check_split(place, ids, n).items():  # these are in memory already
        known = np.sort(given)
        stamp, whole = f"{zlib.crc32(known):08x}", partial(iter, [known])
        found[part] = _Source(part, stamp, known.shape, known.dtype, False, whole)
    return found


def _count(source: _Source) -> int:
    """The integer of an array that has one; OGB's lists have as many as there are graphs."""
    if math.prod(source.shape) != 1 or source.dtype.kind not in "iu":
        raise DataError(
            f"{source.name} must be one integer, for one graph, not {source.dtype} of shape "
            f"{source.shape}."
        )
    return int(next(source.runs())[0])


def _entry(path: Path, key: str) -> _Source:
    """An array of an .npz file, of whichever version it is."""
    name = f"{path}: {key}"
    with _open(path) as archive:
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
        with _open(path) as archive, archive.open(info) as member:
            member.read(start)
            while left:
                count = min(left, most)
                raw = member.read(count * dtype.itemsize)
                if len(raw) != count * dtype.itemsize:
                    raise EOFError("it is cut short")
                left -= count
                yield np.frombuffer(raw, dtype)

    return _Source(name, f"{info.file_size}-{info.CRC:08x}", shape, dtype, columnwise, runs)


def _table(path: Path, rows: int, columns: int, kind: type) -> _Source:
    """A table that must have so many lines; integers are the columns of (columns, rows)."""

    def runs() -> Iterator[Any]:
        left = rows * columns
        for run in _numbers(path, columns, kind):
            left -= run.shape[0]
            if left < 0:
                break
            yield run
        if left:
            more = "more" if left < 0 else "fewer"
            raise DataError(f"{path} has {more} than the {rows:,} lines that OGB's counts say.")

    with _open(path):
        about = path.stat()
    pairs, stamp = kind is np.int64, f"{about.st_size}-{about.st_mtime_ns}"
    shape = (columns, rows) if pairs else (rows, columns)
    return _Source(str(path), stamp, shape, np.dtype(kind), pairs, runs)


def _numbers(path: Path, columns: int, kind: type) -> Iterator[Any]:
    """All numbers of a compressed table without a header, whole lines at a time."""
    first = 1
    with _open(path) as text:
        while lines := text.readlines(_CHUNK):
            values = _parse(lines, columns, kind)
            if values is None:
                bad = next(i for i, one in enumerate(lines) if _parse([one], columns, kind) is None)
                shown = lines[bad].decode("utf-8", "replace").rstrip("\r\n")[:40]
                what = ("integer" if kind is np.int64 else "number") + "s" * (columns != 1)
                raise DataError(
                    f"{path}: line {first + bad:,} is {shown!r} instead of {columns} {what}."
                )
            first += len(lines)
            yield values


def _parse(lines: list[bytes], columns: int, kind: type) -> Any:
    """The numbers in whole lines; None unless each line holds so many."""
    if kind is float:  # as pandas writes a column that has no number there
        lines = [line.replace(b'""', b"nan") for line in lines]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty line
            values: Any = np.loadtxt(lines, kind, delimiter=",", comments=None, ndmin=2)
    except ValueError:
        return None
    return values.ravel() if values.shape == (len(lines), columns) else None


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    """A file of a download, unpacked: an archive of arrays, or text."""
    if not path.is_file():
        raise DataError(f"{path} is missing: unpack the download again.")
    with explained(f"{path} is damaged", ": download it again"):
        unpack: Any = zipfile.ZipFile if path.suffix == ".npz" else gzip.open
        with unpack(path) as opened:
            yield opened


# ---- through the package ogb -----------------------------------------------------------------
def write_dataset(folder: Path, data: Dataset) -> None:
    """Store a dataset with a dense X as memory-mappable files; OGB's graphs have no weights."""
    arrays = {"indptr": data.graph.indptr, "indices": data.graph.indices, "y": data.y, **data.split}
    with new_folder(folder) as at:
        # X may be far larger than the rest, and a changed number of it is no harm to memory.
        np.save(at / "X.npy", data.X, allow_pickle=False)
        sums = save_arrays(at, arrays)
        sizes = {path.stem: path.stat().st_size for path in at.glob("*.npy")}
        meta = {"version": _VERSION, "name": data.name, "metadata": data.metadata, "bytes": sizes}
        (at / "meta.json").write_text(json.dumps({**meta, "sums": sums}, indent=1))


def read_dataset(folder: Path, features: bool = True) -> Dataset:
    """Open what `write_dataset` wrote; X and the edges stay on disk until they are used."""
    with explained(f"{folder / 'meta.json'} is damaged", f": {again(folder)}"):
        meta = json.loads((folder / "meta.json").read_text())
        check_version(folder, meta["version"], _VERSION)
        name, metadata, sizes = meta["name"], meta["metadata"], meta["bytes"]
        sums = meta.get("sums", {})  # early ones have none
    found = {
        key: open_array(folder / f"{key}.npy", again(folder), sizes[key], sums.get(key))
        for key in sizes
        if key != "X" or features
    }
    split = {part: np.asarray(found[part]) for part in PARTS if part in found}
    graph, y = Graph(found["indptr"], found["indices"]), np.asarray(found["y"])
    return Dataset(name, graph, found.get("X"), y, split, metadata)


def _ask_ogb(name: str, root: Path, meta_dict: dict[str, Any] | None) -> Dataset:
    """A dataset as the package ogb reads it from `root`, or downloads it there."""
    try:
        from ogb.nodeproppred import NodePropPredDataset
    except ImportError as error:
        files = f", or put {_places(name)} into a data folder" if name in FROM_FILES else ""
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
            _check_files(folder)
            if isinstance(error, EOFError) and not folder.is_dir():  # nobody to answer ogb
                raise RuntimeError(declined) from error
            raise RuntimeError(
                f"ogb could neither read {name} from {root} nor download it "
                f"({type(error).__name__}: {error}): if a file there is damaged, delete the folder "
                "and load again."
            ) from error
    if "edge_index_dict" in graph:  # ogbn-mag: only its papers have features
        graph = {
            "edge_index": graph["edge_index_dict"][_PAPERS],
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


def _check_files(folder: Path) -> None:
    """An error that names the file if there is one to blame."""
    for path in sorted(folder.rglob("*.gz")):
        remedy = f": delete the folder {folder} and load again"
        with explained(f"{path} is damaged", remedy), gzip.open(path, "rb") as file:
            while file.read(1 << 24):
                pass


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
