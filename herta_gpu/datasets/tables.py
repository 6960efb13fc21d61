"""Graphs that lie in tables: edge lists as CSV or Parquet, features and labels beside them."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.datasets.dataset import PARTS, Dataset, checked_split
from herta_gpu.graph import Graph
from herta_gpu.plumbing.files import BROKEN, DataError, load_npy, why
from herta_gpu.plumbing.validation import as_labels

_TABLES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet")
_ARRAYS = (*_TABLES, ".npy", ".npz")
_HEADS = ("label", "labels", "class", "classes", "target", "targets", "y")  # heads of a text column
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
        One row per node: a class (-1: unknown), text ("": unknown), or one float per task.
    split : dict of "train", "valid", "test" to paths, optional
        Node ids, or one 0 or 1 per node.
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
    y = None if labels is None else _labels(Path(labels), None if X is None else X.shape[0])
    rows = {str(file): a.shape[0] for file, a in ((features, X), (labels, y)) if a is not None}
    if len(set(rows.values())) > 1:
        told = " but ".join(f"{file} has {count:,} rows" for file, count in rows.items())
        raise DataError(f"{told}: each needs one row per node.")
    graph = read_edges(edges, next(iter(rows.values()), None))
    found = {part: _ids(Path(file), graph.num_nodes) for part, file in (split or {}).items()}
    ids = checked_split(Path(edges).parent, found, graph.num_nodes)
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

    The first two columns are node ids from 0 on, a third one holds weights; repeated edges are
    merged by the rule of `Graph.from_edges`.
    """
    path = Path(path)
    table = _table(path)
    if table.ndim != 2 or table.shape[1] < 2:
        raise DataError(f"{path} must have two columns of node ids, and a third for weights.")
    ids = table[:, :2]
    _check_whole(path, ids, 0, "node ids from 0 on in its first two columns")
    edges = ids.T.astype(np.int64)
    highest = int(edges.max(initial=-1))
    if num_nodes is not None and highest >= num_nodes:
        raise DataError(f"{path} names node {highest:,} but there are {num_nodes:,} nodes.")
    weights = table[:, 2] if table.shape[1] > 2 else None
    try:
        return Graph.from_edges(edges, num_nodes, weights)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def _find(folder: Path, name: str, endings: tuple[str, ...]) -> Path | None:
    return next((p for e in endings if (p := folder / f"{name}{e}").is_file()), None)


def _features(path: Path) -> Any:
    if path.suffix != ".npz":
        X = _table(path)
        return X.astype(np.float32) if X.dtype.kind != "f" or path.suffix != ".npy" else X
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        X = sp.csr_array(sp.load_npz(path))
        X.check_format(full_check=True)
    except BROKEN as error:
        raise DataError(f"{path} is not a whole SciPy sparse matrix ({why(error)}).") from None
    return _of_numbers(path, X)


def _labels(path: Path, n: int | None) -> Any:
    """One column of whole numbers or of text is classes, everything else floats."""
    try:
        table = _table(path)
    except DataError:
        text = _text_column(path, n)
        if text is None:
            raise
        return as_labels("labels", text)
    if table.shape[1] != 1:
        return table.astype(np.float32)
    _check_whole(path, table, -1, "classes from 0 on, or -1 for none")
    return table[:, 0].astype(np.int64)


def _text_column(path: Path, n: int | None) -> Any:
    """Labels of a file that is no table of numbers, if they are text; else None.

    Its first line is a header if there is one line too many, or by its word.
    """
    if path.suffix == ".npy":
        array = load_npy(path, "a whole .npy file", mmap=False)
        return array if array.dtype.kind in "US" and array.ndim == 1 else None
    if path.suffix == ".parquet":
        frame = _frame(path)
        of_text = frame.shape[1] == 1 and frame.dtypes.iloc[0].kind == "O"
        return frame.iloc[:, 0].to_numpy(dtype=object) if of_text else None
    rows = _lines(path)
    cells = [row[0].strip() if row else "" for row in rows]
    if any(len(row) > 1 for row in rows) or not any(cells):
        return None
    if len(cells) == n + 1 if n is not None else cells[0].lower() in _HEADS:
        del cells[0]
    cells = ["" if cell.lower() in ("-1", "nan") else cell for cell in cells]
    numbers = {_is_number(cell) for cell in cells if cell}
    # A slip in a column of numbers must not make a class of its own of every number.
    return None if True in numbers else np.array(cells)


def _lines(path: Path) -> list[list[str]]:
    try:
        with _opened(path) as file:
            return list(csv.reader(file))
    except (*BROKEN, csv.Error) as error:
        raise DataError(f"{path} is not a table ({why(error)}).") from None


def _opened(path: Path) -> Any:
    import gzip

    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8", newline="")


def _ids(path: Path, n: int) -> Any:
    table = _table(path)
    _check_whole(path, table, 0, "node ids")
    if table.shape[1] != 1 and table.size:
        raise DataError(f"{path} must hold one column of node ids, not {table.shape[1]}.")
    if table.size and table.max() >= n:
        raise DataError(f"{path} names node {int(table.max()):,} but there are {n:,} nodes.")
    return table.ravel().astype(np.int64)


def _check_whole(path: Path, values: Any, least: int, what: str) -> None:
    if (
        not np.isfinite(values).all()
        or (values != np.floor(values)).any()
        or (values < least).any()
        or (values > 2**53).any()
    ):
        raise DataError(f"{path} must hold integer {what}.")


def _table(path: Path) -> Any:
    """Rows and columns of numbers from any of the formats."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    if path.suffix == ".parquet":
        return _parquet(path)
    return _array(path) if path.suffix == ".npy" else _text(path)


def _of_numbers(path: Path, array: Any) -> Any:
    if array.dtype.kind not in "fiub":
        raise DataError(f"{path} must hold real numbers, not {array.dtype}.")
    return array


def _array(path: Path) -> Any:
    array = _of_numbers(path, load_npy(path, "a whole .npy file"))
    if array.ndim not in (1, 2):
        raise DataError(f"{path} must hold rows and columns, not {array.ndim} dimensions.")
    return array[:, None] if array.ndim == 1 else array


def _text(path: Path) -> Any:
    try:
        with _opened(path) as file:
            first = file.readline()
        if not first.strip():
            raise DataError(f"{path} is empty, or its first line is.")
        # Without one of these, columns are parted by spaces, or there is one column.
        delimiter = next((mark for mark in ",\t;" if mark in first), None)
        header = not _is_number(first.split(delimiter)[0])
        return np.loadtxt(path, delimiter=delimiter, skiprows=int(header), ndmin=2, comments=None)
    except DataError:
        raise
    except BROKEN as error:  # gzip's own errors are of these kinds
        raise DataError(f"{path} is not a table of numbers ({why(error)}).") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parquet(path: Path) -> Any:
    try:
        return _frame(path).to_numpy(dtype=np.float64)
    except (ValueError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not a table of numbers ({error}).") from None


def _frame(path: Path) -> Any:
    try:
        import pandas
        import pyarrow  # noqa: F401 - pandas needs it and says so less clearly
    except ImportError as error:
        raise ImportError(
            f"Parquet files are read with pandas and pyarrow ({error}): "
            'pip install "herta_gpu[tables]".'
        ) from None
    try:
        return pandas.read_parquet(path)
    except BROKEN as error:
        raise DataError(f"{path} is not a whole Parquet file ({why(error)}).") from None
