"""Graphs that lie in tables: edge lists as CSV or Parquet, features and labels beside them."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.datasets.dataset import PARTS, Dataset
from herta_gpu.datasets.edges import simple_graph
from herta_gpu.files import DataError
from herta_gpu.graph import Graph

_TABLES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet")
_ARRAYS = (*_TABLES, ".npy", ".npz")
_File = str | os.PathLike[str]


def from_tables(
    edges: _File,
    features: _File | None = None,
    labels: _File | None = None,
    split: dict[str, _File] | None = None,
    name: str | None = None,
) -> Dataset:
    """A dataset from files: text tables (a header is skipped), Parquet, or .npy.

    Parameters
    ----------
    edges : path
        Two columns of node ids from 0 on, and a third one if the edges have weights.
    features : path, optional
        One row per node; also the .npz of a SciPy sparse matrix.
    labels : path, optional
        One row per node: a class (-1: unknown), or one float per task.
    split : dict of "train", "valid", "test" to paths, optional
        Node ids.
    name : str, optional
        By default that of the file of the edges.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from herta_gpu.datasets import from_tables
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "e.csv").write_text("source,target\\n0,1\\n1,2\\n")
    >>> _ = (folder / "y.csv").write_text("0\\n1\\n1\\n-1\\n")
    >>> data = from_tables(folder / "e.csv", labels=folder / "y.csv")
    >>> data.graph.num_nodes, data.graph.num_edges, data.y.tolist()
    (4, 2, [0, 1, 1, -1])
    """
    X = None if features is None else _features(Path(features))
    y = None if labels is None else _labels(Path(labels))
    rows = {str(file): a.shape[0] for file, a in ((features, X), (labels, y)) if a is not None}
    if len(set(rows.values())) > 1:
        told = " but ".join(f"{file} has {count:,} rows" for file, count in rows.items())
        raise DataError(f"{told}: each needs one row per node.")
    graph = read_edges(edges, next(iter(rows.values()), None))
    ids = {part: _ids(Path(file), graph.num_nodes) for part, file in (split or {}).items()}
    metadata = {"metric": "accuracy", "source": Path(edges).name}
    return Dataset(name or Path(edges).name.partition(".")[0], graph, X, y, ids, metadata)


def load_tables(folder: _File, features: bool = True) -> Dataset:
    """The same from a folder: edges.csv, and features, labels, train, valid, test if there are.

    Each of them may end in .csv, .tsv, .txt (also with .gz), .parquet, .npy or .npz.
    """
    place = Path(folder)
    edges = _find(place, "edges", _TABLES)
    if edges is None:
        raise FileNotFoundError(f"{place} has no edges.csv, edges.tsv, edges.txt or edges.parquet.")
    found = {name: _find(place, name, _ARRAYS) for name in ("features", "labels", *PARTS)}
    split: dict[str, _File] = {part: path for part in PARTS if (path := found[part]) is not None}
    name = place.resolve().name
    data = from_tables(edges, found["features"], found["labels"], split, name)
    return data if features else replace(data, X=None)  # its rows said how many nodes there are


def table_folder(name: str, folders: list[Path]) -> Path | None:
    """Where a folder of tables lies: a path with a separator in it, or a name in a data folder."""
    is_path = os.sep in name or name in (".", "..")
    for place in [Path(name)] if is_path else [folder / name for folder in folders]:
        if place.is_dir() and (is_path or _find(place, "edges", _TABLES) is not None):
            return place
    return None


def read_edges(path: _File, num_nodes: int | None = None) -> Graph:
    """An edge list from CSV (also .tsv, .txt, .gz; a header is skipped) or Parquet.

    The first two columns are node ids from 0 on, a third one holds weights.
    """
    path = Path(path)
    table = _table(path)
    if table.shape[1] < 2:
        raise DataError(f"{path} must have two columns of node ids, and a third for weights.")
    ids = table[:, :2]
    _check_whole(path, ids, 0, "node ids from 0 on in its first two columns")
    edges = ids.T.astype(np.int64)
    highest = int(edges.max(initial=-1))
    if num_nodes is not None and highest >= num_nodes:
        raise DataError(f"{path} names node {highest:,} but there are {num_nodes:,} nodes.")
    n = highest + 1 if num_nodes is None else num_nodes
    if table.shape[1] > 2:
        return Graph.from_edges(edges, num_nodes=n, edge_weight=table[:, 2])
    return simple_graph(edges, n)


def _find(folder: Path, name: str, endings: tuple[str, ...]) -> Path | None:
    return next((p for e in endings if (p := folder / f"{name}{e}").is_file()), None)


def _features(path: Path) -> Any:
    if path.suffix != ".npz":
        X = _table(path)
        return X.astype(np.float32) if X.dtype.kind != "f" or path.suffix != ".npy" else X
    try:
        return sp.csr_array(sp.load_npz(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path}.") from None
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a whole SciPy sparse matrix ({error}).") from None


def _labels(path: Path) -> Any:
    """One column of whole numbers is classes, everything else floats."""
    table = _table(path)
    if table.shape[1] > 1:
        return table.astype(np.float32)
    _check_whole(path, table, -1, "classes from 0 on, or -1 for none")
    return table[:, 0].astype(np.int64)


def _ids(path: Path, n: int) -> Any:
    table = _table(path)
    _check_whole(path, table, 0, "node ids")
    if table.size and table.max() >= n:
        raise DataError(f"{path} names node {int(table.max()):,} but there are {n:,} nodes.")
    return np.sort(table[:, 0].astype(np.int64))


def _check_whole(path: Path, values: Any, least: int, what: str) -> None:
    if (
        not np.isfinite(values).all()
        or (values != np.floor(values)).any()
        or (values < least).any()
    ):
        raise DataError(f"{path} must hold integer {what}.")


def _table(path: Path) -> Any:
    """Rows and columns of numbers from any of the formats."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    if path.suffix == ".parquet":
        return _parquet(path)
    return _array(path) if path.suffix == ".npy" else _text(path)


def _array(path: Path) -> Any:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} is not a whole .npy file ({error}).") from None
    return array[:, None] if array.ndim == 1 else array


def _text(path: Path) -> Any:
    import gzip

    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt") as file:
            first = file.readline()
        if not first.strip():
            raise DataError(f"{path} is empty, or its first line is.")
        # Without one of these, columns are parted by spaces, or there is one column.
        delimiter = next((mark for mark in ",\t;" if mark in first), None)
        header = not _is_number(first.split(delimiter)[0])
        return np.loadtxt(path, delimiter=delimiter, skiprows=int(header), ndmin=2, comments=None)
    except DataError:
        raise
    except (ValueError, OSError, EOFError) as error:  # gzip's own errors are of these kinds
        raise DataError(f"{path} is not a table of numbers ({error}).") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parquet(path: Path) -> Any:
    try:
        import pandas
        import pyarrow  # noqa: F401 - pandas needs it and says so less clearly
    except ImportError as error:
        raise ImportError(
            f"Parquet files are read with pandas and pyarrow ({error}): "
            'pip install "herta_gpu[tables]".'
        ) from None
    try:
        return pandas.read_parquet(path).to_numpy(dtype=np.float64)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a whole Parquet file ({error}).") from None
