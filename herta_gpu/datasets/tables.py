"""Graphs that lie in tables: edge lists as CSV or Parquet, features and labels beside them.

Columns are found by the names in the first line (`plumbing.columns`), or by position where there is
no such line.  What was understood stands in the note of the dataset, one line for each table.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.datasets.dataset import PARTS, Dataset, check_split
from herta_gpu.datasets.text import as_number, is_missing, is_numeric, read_text
from herta_gpu.graph import Graph
from herta_gpu.plumbing import columns
from herta_gpu.plumbing.checks import as_labels, has_label
from herta_gpu.plumbing.files import BROKEN, DataError, load_npy, why

_TABLES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet")
_ARRAYS = (*_TABLES, ".npy", ".npz")
_OTHER_NAMES = {"val": "valid", "validation": "valid"}
_NO_IDS = "; node ids are whole numbers from 0 on"
_FRAME = "DataFrame"
_KEPT = 1e-6  # share of a column's spread by which float32 may move an entry
_File = str | os.PathLike[str]


def from_tables(
    edges: Any,
    features: Any = None,
    labels: Any = None,
    split: dict[str, Any] | None = None,
    name: str | None = None,
) -> Dataset:
    """A dataset from files: text tables with or without a header, Parquet, .npy, or DataFrames.

    `metadata["note"]` of the dataset says which columns were used for what.

    Parameters
    ----------
    edges : path or DataFrame
        Columns source and target (src and dst, from and to, ...) of node ids from 0 on, and weight
        if the edges have weights.  Without a header these are the first two and the third column.
    features : path or DataFrame, optional
        One row per node, in the order of the nodes or with a column node_id (or id, node); also
        the .npz of a SciPy sparse matrix.
    labels : path or DataFrame, optional
        One row per node, ordered likewise.  One column of whole numbers (-1 or nothing: unknown)
        or of text is classes; one of other numbers is a target, and so are several columns.
        Where there are ids, nodes without a row have no label.
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
    >>> _ = (folder / "e.csv").write_text("weight,source,target\\n0.5,0,1\\n2.0,1,2\\n")
    >>> _ = (folder / "y.csv").write_text("node_id,label\\n3,-1\\n2,1\\n1,1\\n0,0\\n")
    >>> data = from_tables(folder / "e.csv", labels=folder / "y.csv")
    >>> data.graph.num_nodes, data.graph.num_edges, data.y.tolist()
    (4, 2, [0, 1, 1, -1])
    >>> print(data.metadata["note"])
    e.csv: 2 edges from columns source, target, weight
    y.csv: 2 classes from column label, rows by node_id, 1 of 4 nodes without
    """
    notes: list[str] = []
    links, answers = _read(edges), None if labels is None else _read(labels)
    X = None if features is None else _features(features, answers, links, notes)
    n = None if X is None else X.shape[0]
    y, label_names = None, None
    if answers is not None:
        y, label_names = _labels(_without_count(answers, n), n, links, notes)
    if X is not None and y is not None and y.shape[0] != n:
        raise DataError(
            f"{_called(features)} has {n:,} rows but {_called(labels)} has {y.shape[0]:,} rows: "
            "each needs one row per node."
        )
    graph, used = _edges(links, n if y is None else y.shape[0])
    notes.insert(0, used)
    found = {part: _ids(_read(file), graph.num_nodes) for part, file in (split or {}).items()}
    is_frame = columns.is_frame(edges)
    ids = check_split("split" if is_frame else Path(edges).parent, found, graph.num_nodes)
    source = "tables" if is_frame else Path(edges).name
    metadata: dict[str, Any] = {"metric": "accuracy", "source": source, "note": "\n".join(notes)}
    metadata |= {} if label_names is None else {"label_names": label_names}
    return Dataset(name or source.partition(".")[0], graph, X, y, ids, metadata)


def load_tables(folder: _File, features: bool = True) -> Dataset:
    """The same from a folder: edges.csv, and features, labels, train, valid, test if there are.

    Each of them may end in .csv, .tsv, .txt (also with .gz), .parquet, .npy or .npz; val.csv is
    valid.csv.
    """
    place = Path(folder)
    found: dict[str, Path] = {}
    unused = []
    for path in sorted(p for p in place.iterdir() if p.is_file()) if place.is_dir() else []:
        stem, dot, ending = path.name.lower().partition(".")
        stem = _OTHER_NAMES.get(stem, stem)
        readable = dot + ending in (_TABLES if stem == "edges" else _ARRAYS)
        if stem not in ("edges", "features", "labels", *PARTS) or not readable:
            unused += [path.name] * (dot + ending in _ARRAYS)
        elif stem in found:
            raise DataError(f"{place} has {found[stem].name} and {path.name}: remove one of them.")
        else:
            found[stem] = path
    if "edges" not in found:
        raise FileNotFoundError(f"{place} has no edges.csv, edges.tsv, edges.txt or edges.parquet.")
    split = {part: found[part] for part in PARTS if part in found}
    name = place.resolve().name
    data = from_tables(found["edges"], found.get("features"), found.get("labels"), split, name)
    if unused:
        data.metadata["note"] += f"\nfiles that are not used: {', '.join(unused)}"
    return data if features else replace(data, X=None)  # its rows said how many nodes there are


def table_folder(name: str, folders: list[Path]) -> Path | None:
    """Where a folder of tables lies: a path with a separator in it, or a name in a data folder."""
    if os.sep in name or name in (".", ".."):
        return Path(name) if Path(name).is_dir() else None
    for place in [folder / name for folder in folders]:
        if any((place / f"edges{ending}").is_file() for ending in _TABLES):
            return place
    return None


def read_edges(path: Any, num_nodes: int | None = None) -> Graph:
    """An edge list from CSV (also .tsv, .txt, .gz), Parquet or a DataFrame; see `from_tables`.

    Repeated edges are merged by the rule of `Graph.from_edges`.
    """
    graph, note = _edges(_read(path), num_nodes)
    if "not used" in note:
        warnings.warn(note, stacklevel=2)
    return graph


@dataclass
class Table:
    """Rows and columns of numbers, or of objects where some are text, and the columns' names."""

    path: str  # for sentences: a file, or "DataFrame"
    values: Any  # (rows, columns)
    names: list[str] | None  # None: columns are known by position
    is_text: bool = False  # a text file, in which whole floats and whole numbers look alike

    @property
    def title(self) -> str:
        return Path(self.path).name

    def name(self, j: int) -> str:
        return f"{j + 1}" if self.names is None else self.names[j] or "without a name"

    def listed(self, at: list[int]) -> str:
        """Some columns by name, or by number."""
        return f"column{'s' * (len(at) != 1)} {_list([self.name(j) for j in at])}"

    def numbers(self, at: list[int], hint: str = "") -> Any:
        """Some columns as numbers, NaN where there is none."""
        values = self.values if at == list(range(self.values.shape[1])) else self.values[:, at]
        if values.dtype.kind in "fiub":
            return values
        if values.dtype.kind == "U":
            raise DataError(f"{self.path} must hold real numbers, not text.")
        found = np.empty(values.shape)
        for (i, j), cell in np.ndenumerate(values):
            number = as_number(cell)
            if number is None:
                reason = f"row {i + 1} has {str(cell)!r} in column {self.name(at[j])}{hint}"
                raise DataError(f"{self.path} is not a table of numbers ({reason}).")
            found[i, j] = number
        return found

    def node_columns(self, find: Callable[..., columns.NodeColumns]) -> columns.NodeColumns:
        """Which columns are what; one called like paper_id that names each node once is the id."""
        at: columns.NodeColumns = _named(self, find, self.names, self.values.shape[1])
        names, nodes = self.names or [], np.arange(len(self.values))
        for j in at.values + at.unused if at.id is None else []:
            named = bool(names) and names[j].lower().endswith("id") and len(nodes) > 1
            cells = [as_number(cell) for cell in self.values[:, j]] if named else []
            if None not in cells and np.array_equal(np.sort(np.array(cells, float)), nodes):
                return find([*names[:j], "id", *names[j + 1 :]], len(names))
        return at

    def counts(self) -> bool:
        """Whether the first row counts the columns, as pandas names those that have no names."""
        plain = self.is_text and self.names is None and len(self.values) > 0
        return plain and [as_number(cell) for cell in self.values[0]] == [
            float(j) for j in range(self.values.shape[1])
        ]

    def by_node(self, at: columns.NodeColumns, n: int | None) -> Any:
        """The node of each row, or None where the rows are in the order of the nodes."""
        if at.id is not None:
            ids = self.numbers([at.id], _NO_IDS)[:, 0]
            return _named(self, columns.node_places, ids, self.name(at.id), n)
        if at.row_names is None:
            return None
        index, rows = self.numbers([at.row_names], _NO_IDS)[:, 0], np.arange(len(self.values))
        if not (np.array_equal(index, rows) or np.array_equal(index, rows + 1)):
            raise DataError(
                f"{self.path}: its first column has no name and does not count the rows: call it "
                "node_id if it says which node a row is of, or leave it out (index=False)."
            )
        return None


def _without_count(table: Table, n: int | None) -> Table:
    """A table of n rows without a line before them that counts the columns."""
    counted = len(table.values) - 1 == n and table.counts()
    return replace(table, values=table.values[1:]) if counted else table


def _ends(table: Table) -> tuple[columns.EdgeColumns, Any]:
    """Which columns of an edge list are what, and its ids of nodes, (2, m)."""
    at = _named(table, columns.find_edges, table.names, table.values.shape[1])
    ends = [at.source, at.target]
    ids = table.numbers(ends, _NO_IDS)
    if not columns.is_whole(ids, 0):
        raise DataError(
            f"{table.path} must hold integer node ids from 0 on in {table.listed(ends)}."
        )
    return at, ids.T.astype(np.int64)


def _edges(table: Table, n: int | None) -> tuple[Graph, str]:
    """The graph of an edge list, and the line that says what was read."""
    at, edges = _ends(table)
    highest = int(edges.max(initial=-1))
    if n is not None and highest >= n:
        raise DataError(f"{table.path} names node {highest:,} but there are {n:,} nodes.")
    weights = None if at.weight is None else table.numbers([at.weight])[:, 0]
    graph = _named(table, Graph.from_edges, edges, n, weights)
    note = f"{table.title}: {graph.num_edges:,} edges from {table.listed(at.used)}"
    return graph, note + _unused(table, at.unused)


def _features(source: Any, answers: Table | None, links: Table, notes: list[str]) -> Any:
    if not columns.is_frame(source) and Path(source).suffix == ".npz":
        return _sparse(Path(source))
    table = _read(source)
    if table.counts():
        table = _with_names(table, answers, links)
    at = table.node_columns(columns.find_features)
    wrong = [] if table.names is None else columns.find_answers([*table.names], at.values)
    if wrong:
        raise DataError(
            f"{table.path}: {table.name(wrong[0])} is no feature: put that column into labels."
        )
    X = table.numbers(at.values)
    if table.is_text and np.isnan(X).any():
        i, j = np.argwhere(np.isnan(X))[0]
        where = f"row {i + 1} has no number in column {table.name(at.values[j])}"
        raise DataError(f"{table.path}: {where}: fill it in, or leave the column out.")
    place = table.by_node(at, None)
    if X.dtype.kind != "f" or not table.path.endswith((".npy", _FRAME)):
        X = X if X.dtype == np.float32 else _in_float32(X)
    if place is not None:
        X, rows = np.empty_like(X), X
        X[place] = rows
    if table.names is not None:
        notes.append(f"{table.title}: {X.shape[1]:,} features{_from(table, at)}")
    return X


def _with_names(table: Table, answers: Table | None, links: Table) -> Table:
    """Features whose first line is 0, 1, 2, ...: names that pandas gave, or those of a node."""
    count = None if answers is None else len(answers.values)
    found = _without_count(table, count)
    names = found is not table
    unsure = answers is None or (count == len(table.values) and answers.counts())
    if (names and links.counts()) or (not names and unsure and table.values.shape[1] > 2):
        raise DataError(
            f"{links.path if names else table.path}: its first line counts the columns: if these "
            "are names, write others (source,target,weight or f0,f1,f2); if not, put a line with "
            "names before it."
        )
    return found


def _in_float32(X: Any) -> Any:
    """X in float32; in float64 where that would move whole numbers, or make others alike."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        small = X.astype(np.float32)
        spread = np.ptp(X, axis=0) if X.size else 0.0
        moved = np.abs(small - X)
        far = moved > np.where(np.floor(X) == X, 0.0, _KEPT * spread)
    return X.astype(np.float64) if far.any() else small


def _labels(
    table: Table, n: int | None, links: Table, notes: list[str]
) -> tuple[Any, list[str] | None]:
    """One column of whole numbers or of text is classes, all else targets; names of several."""
    at = table.node_columns(columns.find_labels)
    if not at.values:
        raise DataError(f"{table.path} has no column of labels beside the ids of nodes.")
    if n is None and at.id is not None:
        ids = _ends(links)[1]
        if (ids == 0).any():  # nothing is counted from 1
            n = max(int(ids.max()) + 1, len(table.values))
    while len(table.values) > (n or 0) and all(map(is_missing, table.values[-1])):
        table = replace(table, values=table.values[:-1])  # empty lines at the end
    y = _text_labels(table, at, n)
    y = _number_labels(table, at) if y is None else y
    nothing = {"U": "", "f": np.nan}.get(y.dtype.kind, -1)
    place = table.by_node(at, n) if len(y) == len(table.values) else None
    if place is not None:
        y, rows = np.full((n or len(y), *y.shape[1:]), nothing, y.dtype), y
        y[place] = rows
    if table.names is not None:
        what = "targets" if y.dtype.kind == "f" else "labels"
        if y.ndim == 1 and y.dtype.kind != "f":
            what = f"{np.unique(y[y != nothing]).shape[0]:,} classes"
        without = int(np.count_nonzero(~has_label(y)))
        notes.append(f"{table.title}: {what}{_from(table, at)}" + _of(without, n or len(y)))
    return y, [table.name(j) for j in at.values] if table.names and y.ndim == 2 else None


def _number_labels(table: Table, at: columns.NodeColumns) -> Any:
    values = table.numbers(at.values)
    known = values[np.isfinite(values)]
    whole, single = columns.is_whole(known, -(2**53)), values.shape[1] == 1
    if np.isinf(values).any() or (single and whole and (known < -1).any()):
        raise DataError(
            f"{table.path} must hold integer classes from 0 on, or -1 for none, or finite targets."
        )
    if whole and (single or table.is_text or values.dtype.kind != "f"):
        values = np.where(np.isfinite(values), values, -1).astype(np.int64)
    elif not single:
        values = values.astype(np.float32)
    return values[:, 0] if single else values


def _text_labels(table: Table, at: columns.NodeColumns, n: int | None) -> Any:
    """Labels of one column that holds text; None where it holds numbers, or there are several.

    A first line that is no name we know is a label, unless there is one line too many.
    """
    if table.values.dtype.kind == "U" and table.values.shape[1] == 1:
        return as_labels("labels", table.values[:, 0])
    if len(at.values) != 1 or table.values.dtype.kind != "O":
        return None
    cells = ["" if is_missing(v) or v == "-1" else str(v) for v in table.values[:, at.values[0]]]
    # A slip in a column of numbers must not make a class of its own of every number.
    if not any(cells) or any(is_numeric(cell) for cell in cells if cell):
        return None
    head = table.name(at.values[0])
    if table.is_text and table.names == [head] and not columns.is_label_name(head):
        if n is None and head not in cells:
            raise DataError(
                f"{table.path}: its first line, {head}, may be a label or a name: write label "
                "into a line before it, or in its place."
            )
        cells = cells if len(cells) == n else [head, *cells]
    return as_labels("labels", np.array(cells, dtype=str))


def _ids(table: Table, n: int) -> Any:
    """The ids of a part of the nodes, or a mask of them."""
    skip = int(columns.is_index(table.names or ()))
    count = table.values.shape[1] - skip
    if count != 1 and table.values.size:
        raise DataError(f"{table.path} must hold one column of node ids, not {count}.")
    ids = table.numbers([skip], _NO_IDS)
    if not columns.is_whole(ids, 0):
        raise DataError(f"{table.path} must hold integer node ids.")
    if ids.size and ids.max() >= n:
        raise DataError(f"{table.path} names node {int(ids.max()):,} but there are {n:,} nodes.")
    return ids.ravel().astype(np.int64)


def _called(source: Any) -> str:
    return _FRAME if columns.is_frame(source) else str(source)


def _named(table: Table, check: Callable[..., Any], *given: Any) -> Any:
    """A result of `check`, whose sentences get the name of the table."""
    try:
        return check(*given)
    except ValueError as error:
        raise DataError(f"{table.path}: {str(error).rstrip('.')}.") from None


def _from(table: Table, at: columns.NodeColumns) -> str:
    order = "" if at.id is None else f", rows by {table.name(at.id)}"
    index = [] if at.row_names is None else [at.row_names]
    return f" from {table.listed(at.values)}{order}{_unused(table, at.unused + index)}"


def _of(without: int, n: int) -> str:
    return f", {without:,} of {n:,} nodes without" if without else ""


def _unused(table: Table, at: list[int]) -> str:
    named = [table.name(j) if table.names and table.names[j] else "an index" for j in at]
    return f" (not used: {_list(named)})" if named else ""


def _list(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 6 else [*names[:3], "...", names[-1]])


def _read(source: Any) -> Table:
    """A table of any of the formats."""
    if columns.is_frame(source):
        return _open_frame(_FRAME, source)
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    if path.suffix == ".parquet":
        return _open_frame(str(path), _parquet(path))
    if path.suffix == ".npy":
        return _array(path)
    names, values = read_text(path)
    return Table(str(path), values, names, is_text=True)


def _open_frame(path: str, frame: Any) -> Table:
    names, held = columns.open_frame(frame)
    numbers = bool(held) and all(column.dtype.kind in "fiub" for column in held)
    values = np.empty((len(frame), len(held)), np.result_type(*held) if numbers else object)
    for j, column in enumerate(held):
        values[:, j] = column
    return Table(path, values, names)


def _array(path: Path) -> Table:
    array = load_npy(path, "a whole .npy file")
    if array.dtype.kind not in "fiubUS":
        raise DataError(f"{path} must hold real numbers, not {array.dtype}.")
    if array.ndim not in (1, 2):
        raise DataError(f"{path} must hold rows and columns, not {array.ndim} dimensions.")
    array = array.astype(str) if array.dtype.kind == "S" else array
    return Table(str(path), array[:, None] if array.ndim == 1 else array, None)


def _sparse(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        X = sp.csr_array(sp.load_npz(path))
        X.check_format(full_check=True)
    except BROKEN as error:
        raise DataError(f"{path} is not a whole SciPy sparse matrix ({why(error)}).") from None
    if X.dtype.kind not in "fiub":
        raise DataError(f"{path} must hold real numbers, not {X.dtype}.")
    return X


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
        return pandas.read_parquet(path)
    except BROKEN as error:
        raise DataError(f"{path} is not a whole Parquet file ({why(error)}).") from None
