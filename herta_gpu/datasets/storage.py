"""Files: where data lies, how it is written whole or not at all, and our memory-mapped cache.

A cached dataset is a folder of plain .npy files with `meta.json`.  It is written beside its final
place and renamed at the end, so an interrupted write leaves nothing that looks finished.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.datasets.dataset import PARTS, Dataset
from herta_gpu.graph import Graph
from herta_gpu.plumbing.files import (
    check_version,
    explained,
    new_folder,
    open_array,
    save_arrays,
)

VERSION = 1


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
    graph = data.graph
    arrays: dict[str, Any] = {"indptr": graph.indptr, "indices": graph.indices}
    arrays |= {"weights": graph.weights, "degree": graph.given_degree, "y": data.y, **data.split}
    with new_folder(folder) as at:
        # X may be far larger than the rest, and a changed number of it is no harm to memory.
        np.save(at / "X.npy", data.X, allow_pickle=False)
        sums = save_arrays(at, {name: array for name, array in arrays.items() if array is not None})
        sizes = {path.stem: path.stat().st_size for path in at.glob("*.npy")}
        meta = {"version": VERSION, "name": data.name, "metadata": data.metadata, "bytes": sizes}
        (at / "meta.json").write_text(json.dumps({**meta, "sums": sums}, indent=1))


def read_dataset(folder: Path, features: bool = True) -> Dataset:
    """Open what `write_dataset` wrote; X and the edges stay on disk until they are used."""
    remedy = again(folder)
    with explained(f"{folder / 'meta.json'} is damaged", f": {remedy}"):
        meta = json.loads((folder / "meta.json").read_text())
        check_version(folder, meta["version"], VERSION)
        name, metadata, sizes = meta["name"], meta["metadata"], meta["bytes"]
        sums = meta.get("sums", {})  # early ones have none
    wanted = [key for key in sizes if key != "X" or features]
    found = {
        key: open_array(folder / f"{key}.npy", remedy, sizes[key], sums.get(key)) for key in wanted
    }
    given = (found.get(key) for key in ("weights", "degree"))
    graph = Graph(found["indptr"], found["indices"], *given)
    split = {part: np.asarray(found[part]) for part in PARTS if part in found}
    return Dataset(name, graph, found.get("X"), np.asarray(found["y"]), split, metadata)


def again(folder: Path) -> str:
    """What helps where a file of the cache is damaged."""
    return f"delete the folder {folder} and load again"


def is_cached(folder: Path) -> bool:
    return (folder / "meta.json").is_file()


def cached_shapes(folder: Path, names: Iterable[str]) -> Any:
    """Shapes of arrays from their headers alone."""
    return (open_array(folder / f"{name}.npy", again(folder)).shape for name in names)
