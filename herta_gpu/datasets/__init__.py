"""Data to train on: one function, `load`, and one type, `Dataset`."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import scipy.sparse as sp

from herta_gpu.datasets import ogb, planetoid
from herta_gpu.datasets.blockmodel import PRESETS, kept_graph, parse, synthetic
from herta_gpu.datasets.convert import (
    from_dgl,
    from_networkx,
    from_pyg,
    from_scipy,
)
from herta_gpu.datasets.dataset import Dataset, check_training_split, data_dirs, num_outputs
from herta_gpu.datasets.npz import digits, load_npz, outline
from herta_gpu.datasets.ogb import convert_ogb, load_ogb
from herta_gpu.datasets.planetoid import find_planetoid, load_planetoid
from herta_gpu.datasets.tables import from_tables, load_tables, table_folder
from herta_gpu.graph import Graph
from herta_gpu.plumbing.checks import as_labels, has_label, parse_bytes, train_rows
from herta_gpu.plumbing.files import Archive, DataError, bytes_text
from herta_gpu.plumbing.progress import Stages

__all__ = [
    "DataError",
    "DataSizes",
    "Dataset",
    "convert_ogb",
    "digits",
    "from_dgl",
    "from_networkx",
    "from_pyg",
    "from_scipy",
    "from_tables",
    "load",
    "load_npz",
    "load_ogb",
    "load_planetoid",
    "load_tables",
    "names",
    "sizes",
    "synthetic",
]

_Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class DataSizes:
    """The numbers that a plan needs, known without loading the data."""

    n: int
    m: int
    d: int
    c: int
    n_train: int
    X_nonzeros: int | None  # None: X is dense
    mapped: bool = False  # the graph is opened from files, and need not be in memory


def load(
    name: str | os.PathLike[str],
    data_dir: _Folder = None,
    features: bool = True,
    random_state: int = 0,
    stages: Stages | None = None,
) -> Dataset:
    """Load a dataset by its name.

    Parameters
    ----------
    name : str
        "digits"; "synthetic:arxiv", "synthetic:papers100M@0.01", "synthetic:n=1e5,m=1e6,d=64";
        "cora", "citeseer", "pubmed"; "ogbn-..."; any NAME with a NAME.npz in a data folder; the
        path of a .npz file; or a folder with edges.csv (see `load_tables`), by its path or by
        its name in a data folder.
    data_dir : path, optional
        Where to look; by default the environment variable HERTA_DATA.
    features : bool
        False loads the graph, the labels and the split alone, with X None.
    random_state : int
        For data that is generated.
    stages : Stages, optional
        Shows the progress of a conversion, the first time that OGB's files are read.

    Examples
    --------
    >>> from herta_gpu.datasets import load
    >>> data = load("digits")
    >>> data.name, data.metric, len(data.split["test"])
    ('digits', 'accuracy', 1438)
    """
    kind, at = _find(name, data_dir)
    if kind == "digits":
        data = digits()
    elif kind == "synthetic":
        return synthetic(at, random_state, features)
    elif kind == "npz":
        return load_npz(at, None if str(name).endswith(".npz") else str(name), features)
    elif kind == "tables":
        data = load_tables(at)
    elif kind == "planetoid":
        data = load_planetoid(at, find_planetoid(at, data_dirs(data_dir)))
    else:
        return load_ogb(at, _ogb_root(at, data_dir), features, stages=stages)
    return data if features else replace(data, X=None)


def absolute(name: str, data_dir: _Folder = None) -> str:
    """The name by which the same dataset is found from any folder."""
    return os.path.abspath(name) if _find(name, data_dir)[1] == Path(name) else name


def check_budget(name: str | os.PathLike[str], data_dir: _Folder, budget: Any) -> None:
    """An error, before anything is unpacked, if a compressed file holds more than the budget."""
    kind, at = _find(name, data_dir)
    if budget is None or kind != "npz":
        return
    size = Archive(at, "a whole .npz archive").unpacked
    if size > parse_bytes(budget):
        raise DataError(
            f"{at} takes {bytes_text(size)} unpacked, more than the budget of "
            f"{bytes_text(parse_bytes(budget))}: raise memory_budget, or give its features as a "
            ".npy file, which stays on disk."
        )


def names(data_dir: _Folder = None) -> list[str]:
    """What `load` knows by name, with the .npz files of the data folders."""
    found = {path.stem for at in data_dirs(data_dir) for path in at.glob("*.npz")}
    made = {f"synthetic:{preset}" for preset in PRESETS}
    return sorted({"digits", *planetoid.SHAPES, *ogb.SHAPES, *made, *found})


def sizes(name: str | os.PathLike[str], data_dir: _Folder = None) -> DataSizes:
    """How large a dataset is, without loading it.

    Examples
    --------
    >>> from herta_gpu.datasets import sizes
    >>> sizes("synthetic:papers100M").n
    111059956
    """
    kind, at = _find(name, data_dir)
    if kind == "synthetic":
        spec = parse(at)
        return DataSizes(spec.n, spec.m, spec.d, spec.c, spec.n_train, None, spec.large)
    if kind == "npz":
        found = outline(Archive(at, "a whole .npz archive"))
        c = 0 if found.y is None else num_outputs(found.y)
        n_train = _n_train(at, found.split, found.n, found.y)
        return DataSizes(found.n, found.m, found.d or 0, c, n_train, found.X_nonzeros)
    if kind == "ogb":
        shape = ogb.stored_sizes(at) if ogb.is_stored(at) else ogb.SHAPES[at]
        return DataSizes(*shape, X_nonzeros=None, mapped=True)
    if kind == "planetoid":
        return DataSizes(*planetoid.SHAPES[at], X_nonzeros=20 * planetoid.SHAPES[at][0])
    data = load(name, data_dir)
    n, d = data.graph.num_nodes, 0 if data.X is None else data.X.shape[1]
    n_train = _n_train(name, data.split, n, data.y)
    nonzeros = data.X.nnz if sp.issparse(data.X) else None
    return DataSizes(n, data.graph.num_edges, d, data.num_classes, n_train, nonzeros)


def writes_first(name: str | os.PathLike[str], data_dir: _Folder = None) -> bool:
    """Whether `load` may have to make files first: one process then does that for all."""
    kind, at = _find(name, data_dir)
    return kind in ("ogb", "planetoid") or (kind == "synthetic" and parse(at).large)


def graph_at_hand(name: str | os.PathLike[str], data_dir: _Folder = None) -> Graph | None:
    """The graph of a dataset that need be neither made nor fetched; None: it need."""
    kind, at = _find(name, data_dir)
    if kind == "synthetic":
        return kept_graph(at)
    if kind == "planetoid" or (kind == "ogb" and not ogb.is_stored(at)):
        return None
    return load(name, data_dir, features=False).graph


def _find(name: str | os.PathLike[str], data_dir: _Folder) -> tuple[str, Any]:
    """Which loader a name is for, and what that loader is given: a path, or the name."""
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"A dataset has a name or a path, not {type(name).__name__}.")
    name = os.fspath(name)
    if name == "digits":
        return "digits", name
    if name.startswith("synthetic:"):
        return "synthetic", name.removeprefix("synthetic:")
    if name.endswith(".npz"):  # it need not be there
        return "npz", Path(name)
    folders = data_dirs(data_dir)
    for path in (folder / f"{name}.npz" for folder in folders):
        if path.is_file():
            return "npz", path
    tables = table_folder(name, folders)
    if tables is not None:
        return "tables", tables
    if name in planetoid.SHAPES or name in ogb.SHAPES:
        return "planetoid" if name in planetoid.SHAPES else "ogb", name
    if os.path.isdir(name):
        return "tables", Path(name)
    known = names(data_dir)
    small = {k.lower(): k for k in known}
    if close := difflib.get_close_matches(name.lower(), small, n=4, cutoff=0.5):
        told = " or ".join(small[k] for k in close)
        raise ValueError(f"There is no dataset {name!r}: did you mean {told}?")
    places = ", ".join(str(f) for f in folders) or "none: set HERTA_DATA or give --data-dir"
    raise ValueError(
        f"There is no dataset {name!r}: there are {', '.join(known)} and .npz files in the data "
        f"folders ({places}); {name}.npz there, with edge_index, features and labels, would do."
    )


def _ogb_root(name: str, data_dir: _Folder) -> Path | None:
    """A folder in which ogb has the data already, else the one asked for, else the cache."""
    for folder in data_dirs(data_dir):
        raw = name == ogb.PAPERS and ogb.find_download([folder]) is not None
        if raw or (folder / name.replace("-", "_")).is_dir():
            return folder
    return None if data_dir is None else Path(data_dir)


def _n_train(source: Any, split: dict[str, Any], n: int, y: Any) -> int:
    """Training nodes of the split, or of the random one that would be drawn."""
    if not split:
        return max(1, int(0.8 * n))
    train = check_training_split(source, split, n)["train"]
    return len(train if y is None else train_rows(train, has_label(as_labels("y", y)), n))
