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
    from_cugraph,
    from_dgl,
    from_networkx,
    from_pyg,
    from_scipy,
)
from herta_gpu.datasets.dataset import (
    Dataset,
    cached_shapes,
    check_training_split,
    data_dirs,
    is_cached,
    num_outputs,
)
from herta_gpu.datasets.embedded import digits
from herta_gpu.datasets.npz import load_npz, outline
from herta_gpu.datasets.ogb import (
    FROM_FILES,
    convert_ogb,
    converted_shapes,
    find_download,
    is_converted,
    load_ogb,
)
from herta_gpu.datasets.planetoid import load_planetoid
from herta_gpu.datasets.tables import from_tables, load_tables, read_edges, table_folder
from herta_gpu.graph import Graph
from herta_gpu.plumbing.checks import as_labels, has_label, parse_bytes, train_rows
from herta_gpu.plumbing.files import Archive, DataError, in_words
from herta_gpu.plumbing.progress import Stages

__all__ = [
    "DataError",
    "DataSizes",
    "Dataset",
    "convert_ogb",
    "digits",
    "from_cugraph",
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
    "read_edges",
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
    name = _text(name)
    if name == "digits":
        return digits() if features else replace(digits(), X=None)
    if name.startswith("synthetic:"):
        return synthetic(name.removeprefix("synthetic:"), random_state, features)
    stored = _npz_of(name, data_dir)
    if stored is not None:
        return load_npz(stored, None if name.endswith(".npz") else name, features)
    folders = data_dirs(data_dir)
    tables = table_folder(name, folders)
    if tables is not None:
        return load_tables(tables, features)
    if name in planetoid.NAMES:
        data = load_planetoid(name, planetoid.find_planetoid(name, folders))
        return data if features else replace(data, X=None)
    if name in ogb.SHAPES:
        return load_ogb(name, _ogb_root(name, folders, data_dir), features, stages=stages)
    raise ValueError(_unknown(name, folders))


def check_budget(name: str | os.PathLike[str], data_dir: _Folder, budget: Any) -> None:
    """An error, before anything is unpacked, if a compressed file holds more than the budget."""
    name = _text(name)
    if budget is None or name == "digits" or name.startswith("synthetic:"):
        return
    path = _npz_of(name, data_dir)
    size = 0 if path is None else Archive(path, "a whole .npz archive").unpacked
    if size > parse_bytes(budget):
        raise DataError(
            f"{path} takes {in_words(size)} unpacked, more than the budget of "
            f"{in_words(parse_bytes(budget))}: raise memory_budget, or give its features as a "
            ".npy file, which stays on disk."
        )


def names(data_dir: _Folder = None, *more: Path) -> list[str]:
    """What `load` knows by name, with the .npz files of the data folders and of `more` folders."""
    found = {path.stem for at in (*data_dirs(data_dir), *more) for path in at.glob("*.npz")}
    made = {f"synthetic:{preset}" for preset in PRESETS}
    return sorted({"digits", *planetoid.NAMES, *ogb.SHAPES, *made, *found})


def sizes(name: str | os.PathLike[str], data_dir: _Folder = None) -> DataSizes:
    """How large a dataset is, without loading it.

    Examples
    --------
    >>> from herta_gpu.datasets import sizes
    >>> sizes("synthetic:papers100M").n
    111059956
    """
    name = _text(name)
    if name.startswith("synthetic:"):
        spec = parse(name.removeprefix("synthetic:"))
        return DataSizes(spec.n, spec.m, spec.d, spec.c, spec.n_train, None, spec.large)
    stored = None if name == "digits" else _npz_of(name, data_dir)
    if stored is not None:
        found = outline(Archive(stored, "a whole .npz archive"))
        c = 0 if found.y is None else num_outputs(found.y)
        n_train = _n_train(stored, found.split, found.n, found.y)
        return DataSizes(found.n, found.m, found.d or 0, c, n_train, found.X_nonzeros)
    if name in ogb.SHAPES:
        return _ogb_sizes(name)
    if name in planetoid.SHAPES:
        return DataSizes(*planetoid.SHAPES[name], X_nonzeros=20 * planetoid.SHAPES[name][0])
    data = load(name, data_dir)
    n, d = data.graph.num_nodes, 0 if data.X is None else data.X.shape[1]
    n_train = _n_train(name, data.split, n, data.y)
    nonzeros = data.X.nnz if sp.issparse(data.X) else None
    return DataSizes(n, data.graph.num_edges, d, data.num_classes, n_train, nonzeros)


def writes_first(name: str | os.PathLike[str], data_dir: _Folder = None) -> bool:
    """Whether `load` may have to make files first: one process then does that for all."""
    name = _text(name)
    if name.startswith("synthetic:"):
        return parse(name.removeprefix("synthetic:")).large
    known = name in ogb.SHAPES or name in planetoid.NAMES
    return known and _npz_of(name, data_dir) is None


def graph_at_hand(name: str | os.PathLike[str], data_dir: _Folder = None) -> Graph | None:
    """The graph of a dataset that need be neither made nor fetched; None: it need."""
    name = _text(name)
    if name.startswith("synthetic:"):
        return kept_graph(name.removeprefix("synthetic:"))
    at_hand = name in FROM_FILES and is_converted(name)
    if not at_hand and writes_first(name, data_dir) and not is_cached(ogb.cached_folder(name)):
        return None
    return load(name, data_dir, features=False).graph


def _text(name: str | os.PathLike[str]) -> str:
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"A dataset has a name or a path, not {type(name).__name__}.")
    return os.fspath(name)


def _npz_of(name: str, data_dir: _Folder) -> Path | None:
    """The .npz file that a name stands for; one that is given itself need not be there."""
    if name.endswith(".npz"):
        return Path(name)
    paths = (folder / f"{name}.npz" for folder in data_dirs(data_dir))
    return next((path for path in paths if path.is_file()), None)


def _ogb_root(name: str, folders: list[Path], data_dir: _Folder) -> Path | None:
    """A folder in which ogb has the data already, else the one asked for, else the cache."""
    for folder in folders:
        raw = name in FROM_FILES and find_download(name, [folder]) is not None
        if raw or (folder / name.replace("-", "_")).is_dir():
            return folder
    return None if data_dir is None else Path(data_dir)


def _n_train(source: Any, split: dict[str, Any], n: int, y: Any) -> int:
    """Training nodes of the split, or of the random one that would be drawn."""
    if not split:
        return max(1, int(0.8 * n))
    train = check_training_split(source, split, n)["train"]
    return len(train if y is None else train_rows(train, has_label(as_labels("y", y)), n))


def _ogb_sizes(name: str) -> DataSizes:
    if name in FROM_FILES and is_converted(name):
        found = converted_shapes(name)
        (n, d), m = found["node_feat"], found["edge_index"][1]
        return DataSizes(n, m, d, ogb.SHAPES[name][3], found["train"][0], None, mapped=True)
    folder = ogb.cached_folder(name)
    if not is_cached(folder):
        return DataSizes(*ogb.SHAPES[name], X_nonzeros=None, mapped=name in FROM_FILES)
    rows, entries, X, train = cached_shapes(folder, ("indptr", "indices", "X", "train"))
    n, m, c = rows[0] - 1, entries[0] // 2, ogb.SHAPES[name][3]
    return DataSizes(n, m, X[1], c, train[0], None, mapped=True)


def _unknown(name: str, folders: list[Path]) -> str:
    known = names(None, *folders)
    small = {k.lower(): k for k in known}
    close = [small[k] for k in difflib.get_close_matches(name.lower(), small, n=4, cutoff=0.5)]
    places = ", ".join(str(f) for f in folders) or "none: set HERTA_DATA or give --data-dir"
    if close:
        return f"There is no dataset {name!r}: did you mean {' or '.join(close)}?"
    return (
        f"There is no dataset {name!r}: there are {', '.join(known)} and .npz files in the data "
        f"folders ({places})."
    )
