"""Files: where data lies, how it is written whole or not at all, and our memory-mapped cache.

A cached dataset is a folder of plain .npy files with `meta.json`.  It is written beside its final
place and renamed at the end, so an interrupted write leaves nothing that looks finished.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.datasets.dataset import PARTS, Dataset
from herta_gpu.graph import Graph
from herta_gpu.plumbing.files import DataError, checksum, load_npy, new_folder

VERSION = 1
_SMALL = 1 << 12  # bytes: of a file that need not be mapped


def data_dirs(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """The folders to look into: the one given, else HERTA_DATA (several with a separator)."""
    if data_dir is not None:
        if not Path(data_dir).is_dir():
            raise FileNotFoundError(f"The data folder {data_dir} does not exist.")
        return [Path(data_dir)]
    return [Path(p) for p in os.environ.get("HERTA_DATA", "").split(os.pathsep) if p]


def cache_dir() -> Path:
    """Where prepared data is kept: HERTA_CACHE, or the user's cache folder."""
    given = os.environ.get("HERTA_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "herta_gpu"


def write_dataset(folder: Path, data: Dataset) -> None:
    """Store a dataset with a dense X as memory-mappable files."""
    arrays: dict[str, Any] = {"indptr": data.graph.indptr, "indices": data.graph.indices}
    arrays |= {"weights": data.graph.weights, "degree": data.graph.given_degree, "y": data.y}
    arrays |= {"X": data.X, **data.split}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with new_folder(folder) as at:
        for name, array in arrays.items():
            np.save(at / f"{name}.npy", array, allow_pickle=False)
        sizes = {name: (at / f"{name}.npy").stat().st_size for name in arrays}
        meta = {"version": VERSION, "name": data.name, "metadata": data.metadata, "bytes": sizes}
        # X may be far larger than the rest, and a changed number of it is no harm to memory.
        meta["sums"] = {name: checksum(array) for name, array in arrays.items() if name != "X"}
        (at / "meta.json").write_text(json.dumps(meta, indent=1))


def read_dataset(folder: Path, features: bool = True) -> Dataset:
    """Open what `write_dataset` wrote; X and the edges stay on disk until they are used."""
    meta = _meta(folder)

    def opened(name: str) -> Any:
        array = open_array(folder / f"{name}.npy", meta["bytes"].get(name))
        if name in meta.get("sums", {}) and checksum(array) != meta["sums"][name]:
            raise DataError(
                f"{folder / name}.npy was altered, for its checksum differs: delete the folder "
                f"{folder} and load again."
            )
        return array

    has = meta["bytes"]
    weights, degree = (opened(name) if name in has else None for name in ("weights", "degree"))
    graph = Graph(opened("indptr"), opened("indices"), weights, degree)
    X = opened("X") if features and "X" in has else None
    split = {part: np.asarray(opened(part)) for part in PARTS if part in has}
    return Dataset(meta["name"], graph, X, np.asarray(opened("y")), split, meta["metadata"])


def is_cached(folder: Path) -> bool:
    return (folder / "meta.json").is_file()


def cached_sizes(folder: Path) -> dict[str, Any]:
    """Shapes from the headers alone."""
    shapes = {}
    for name in ("indptr", "indices", "X", "y", "train"):
        path = folder / f"{name}.npy"
        shapes[name] = open_array(path).shape if path.is_file() else (0, 0)
    return shapes


def _meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text())
        if meta["version"] != VERSION:
            raise ValueError(f"version {meta['version']}, not {VERSION}")
        if not {"bytes", "name", "metadata"} <= set(meta):
            raise ValueError("entries are missing")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged or from another version ({error}): delete the folder {folder} "
            "and load again."
        ) from None
    return dict(meta)


def open_array(
    path: Path, size: int | None = None, shape: tuple[int, ...] | None = None, dtype: Any = None
) -> Any:
    """An array of the cache, mapped unless it is small, which must be as it was written."""
    found = path.stat().st_size if path.is_file() else None
    again = f"elete the folder {path.parent} and load again."
    if found is None or (size is not None and found != size):
        what = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
        raise DataError(f"{path} {what}: d{again}")
    try:
        array = load_npy(path, "a whole array", mmap=found >= _SMALL)
    except DataError as error:
        raise DataError(f"{error} D{again}") from None
    if shape is not None and (array.shape != shape or array.dtype != dtype):
        raise DataError(f"{path} holds another array: d{again}")
    return array
