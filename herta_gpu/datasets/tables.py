"""Graphs that lie in tables: edge lists as CSV or Parquet, features and labels beside them.

Columns are found by the names in the first line (`plumbing.columns`), or by position where there is
no such line.  What was understood stands in the note of the dataset, one line for each table.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.datasets.dataset import PARTS, Dataset, check_split
from herta_gpu.graph import Graph
from herta_gpu.plumbing import columns
from herta_gpu.plumbing.checks import as_labels, has_label
from herta_gpu.plumbing.files import DataError, explained, load_npy

_TABLES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet")
_ARRAYS = (*_TABLES, ".npy", ".npz")
_OTHER_NAMES = {"val": "valid", "validation": "valid"}
_NO_IDS = "; node ids are whole numbers from 0 on"
_FRAME = "DataFrame"
_KEPT = 1e-6  # share of a column's spread by which float32 may move an entry
_File = str | os.PathLike[str]
_MISSING = ("", "na", "nan", "n/a", "#n/a", "null", "none")  # as pandas, R and Excel write it
_MARK = re.compile(r"sep=(.)\s*")  # a line by which Excel learns the delimiter
_BEFORE = 1000  # lines of comments before the first row, at most


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
        Where ids are text (in all tables, which then have headers), nodes have the order of the
        features, else of the labels, else of the edges; `metadata["node_names"]` keeps it.
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
    table, X, y, names = None if features is None else _read(features, True), None, None, None
    parts = {part: _read(file) for part, file in (split or {}).items()}
    ends = links.apply(columns.find_edges, links.names, links.values.shape[1])
    pair = [ends.source, ends.target]
    nodes = _names_of_nodes(links, pair, [table, answers])
    if nodes:
        links = links.numbered(pair, nodes)
        table, answers = (t and t.numbered([t.id_column], nodes) for t in (table, answers))
        parts = {part: t.numbered([t.values.shape[1] - 1], nodes) for part, t in parts.items()}
    if table is not None:
        X = _features(table, answers, links, notes)
    n = None if X is None else X.shape[0]
    if answers is not None:
        y, names = _labels(answers, n, partial(links.node_ids, pair, None), notes)
        if table is not None and y.shape[0] != n:
            raise DataError(
                f"{table.path} has {n:,} rows but {answers.path} has {y.shape[0]:,} rows: each "
                "needs one row per node."
            )
    n = n if y is None else y.shape[0]
    weights = None if ends.weight is None else links.numbers([ends.weight])[:, 0]
    graph = links.apply(Graph.from_edges, links.node_ids(pair, n).T, n, weights)
    notes = [links.note(f"{graph.num_edges:,} edges", ends.used, ends.unused), *notes]
    found = {part: _ids(ids, graph.num_nodes) for part, ids in parts.items()}
    ids = check_split(f"The split of {links.path}", found, graph.num_nodes)
    source = Path(links.path).name
    metadata: dict[str, Any] = {"metric": "accuracy", "source": source, "note": "\n".join(notes)}
    metadata |= {} if names is None else {"label_names": names}
    metadata |= {"node_names": np.array(list(nodes))} if nodes else {}
    return Dataset(name or source.partition(".")[0], graph, X, y, ids, metadata)


def load_tables(folder: _File, features: bool = True) -> Dataset:
    """The same from a folder: edges.csv, and features, labels, train, valid, test if there are.

    Each of them may end in .csv, .tsv, .txt (also with .gz), .parquet, .npy or .npz; val.csv is
    valid.csv.
    """
    place, unused = Path(folder), []
    found: dict[str, Path] = {}
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
    edges, X, y = map(found.get, ("edges", "features", "labels"))
    if edges is None:
        raise FileNotFoundError(f"{place} has no edges.csv, edges.tsv, edges.txt or edges.parquet.")
    split = {part: found[part] for part in PARTS if part in found}
    data = from_tables(edges, X, y, split, place.resolve().name)
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


@dataclass
class Table:
    """Rows and columns of numbers, or of objects where some are text, and the columns' names."""

    path: str  # for sentences: a file, or "DataFrame"
    values: Any  # (rows, columns); features may be a sparse matrix
    names: list[str] | None = None  # None: columns are known by position
    is_text: bool = False  # a text file, in which whole floats and whole numbers look alike

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

    def node_ids(self, at: list[int], n: int | None) -> Any:
        """Columns of ids of n nodes, as whole numbers; n None: of any number."""
        ids = self.numbers(at, _NO_IDS)
        if not columns.is_whole(ids, 0):
            raise DataError(
                f"{self.path} must hold integer node ids from 0 on in {self.listed(at)}."
            )
        ids = ids.astype(np.int64)
        highest = int(ids.max(initial=-1))
        if n is not None and highest >= n:
            raise DataError(f"{self.path} names node {highest:,} but there are {n:,} nodes.")
        return ids

    def node_columns(self, find: Callable[..., columns.NodeColumns]) -> columns.NodeColumns:
        """Which columns are what; one called like paper_id that names each node once is the id."""
        at: columns.NodeColumns = self.apply(find, self.names, self.values.shape[1])
        names, nodes = self.names or [], np.arange(len(self.values))
        for j in at.values + at.unused if at.id is None else []:
            named = bool(names) and names[j].lower().endswith("id") and len(nodes) > 1
            cells = [as_number(cell) for cell in self.values[:, j]] if named else []
            if None not in cells and np.array_equal(np.sort(np.array(cells, float)), nodes):
                return find([*names[:j], "id", *names[j + 1 :]], len(names))
        return at

    @property
    def id_column(self) -> int | None:
        """Where nodes are named by text, the column that does so."""
        if sp.issparse(self.values):
            return None
        at = columns.find_features(self.names, self.values.shape[1])
        return at.row_names if at.id is None else at.id

    def numbered(self, at: list[Any], nodes: dict[str, int]) -> Table:
        """The same with the numbers of nodes that are named by text in some columns."""
        head = self.names or ()
        if self.is_text and not columns.has_known_name(head) and not columns.is_index(head):
            raise DataError(
                f"{self.path}: its first line may name nodes or columns: put source,target or "
                "node_id into a line before it."
            )
        values = self.values.astype(object)
        for i, j in product(range(len(values)), at):
            name = str(values[i, j]).strip()
            if name not in nodes:
                raise DataError(f"{self.path} names node {name!r}, which the other tables do not.")
            values[i, j] = nodes[name]
        return replace(self, values=values)

    @property
    def counts(self) -> bool:
        """Whether the first row counts the columns, as pandas names those that have no names."""
        plain = self.is_text and self.names is None and len(self.values) > 0
        return plain and [as_number(v) for v in self.values[0]] == [*range(self.values.shape[1])]

    def in_order(self, rows: Any, at: columns.NodeColumns, n: int | None, nothing: Any) -> Any:
        """Rows of nodes in the order of the nodes; `nothing` for a node without one."""
        if at.id is not None:
            ids = self.numbers([at.id], _NO_IDS)[:, 0]
            place = self.apply(columns.node_places, ids, self.name(at.id), n)
            found = np.full((n or len(rows), *rows.shape[1:]), nothing, rows.dtype)
            found[place] = rows
            return found
        if at.row_names is not None:
            index, count = self.numbers([at.row_names], _NO_IDS)[:, 0], np.arange(len(rows))
            if not (np.array_equal(index, count) or np.array_equal(index, count + 1)):
                raise DataError(
                    f"{self.path}: its first column has no name and does not count the rows: call "
                    "it node_id if it says which node a row is of, or leave it out (index=False)."
                )
        return rows

    def apply(self, check: Callable[..., Any], *given: Any) -> Any:
        """A result of `check`, whose sentences get the name of the table."""
        try:
            return check(*given)
        except ValueError as error:
            raise DataError(f"{self.path}: {str(error).rstrip('.')}.") from None

    def note(self, what: str, used: list[int], unused: list[Any], by: int | None = None) -> str:
        """The line that says what was read from which columns, and which one names the nodes."""
        unused = [j for j in unused if j is not None]
        named = [self.name(j) if self.names and self.names[j] else "an index" for j in unused]
        rest = f" (not used: {_list(named)})" if named else ""
        order = "" if by is None else f", rows by {self.name(by)}"
        return f"{Path(self.path).name}: {what} from {self.listed(used)}{order}{rest}"


def _names_of_nodes(edges: Table, at: list[int], tables: list[Table | None]) -> dict[str, int]:
    """The number of each node that is named by text; empty where a cell of an edge is a number."""
    ends: Any = edges.values[:, at].ravel() if edges.values.dtype.kind in "OU" else ()
    if len(ends) == 0 or any(is_numeric(str(cell)) for cell in ends):
        return {}
    named = []
    for table in filter(None, tables):
        if table.id_column is None:
            raise DataError(
                f"{edges.path} names nodes by text, like {str(ends[0])!r}: so must a column "
                f"node_id of {table.path}; else node ids are whole numbers from 0 on."
            )
        named.append(table.values[:, table.id_column])
    named = named[:1] if tables[0] is not None else [*named, ends]
    names = dict.fromkeys(str(cell).strip() for cells in named for cell in cells)
    return {name: place for place, name in enumerate(names)}


def _features(table: Table, answers: Table | None, links: Table, notes: list[str]) -> Any:
    if sp.issparse(table.values):
        return table.values
    if table.counts:  # names that pandas gave, or the numbers of the first node
        rows, count = len(table.values), None if answers is None else len(answers.values)
        named = count == rows - 1
        unsure = answers is None or (count == rows and answers.counts)
        if (named and links.counts) or (not named and unsure and table.values.shape[1] > 2):
            raise DataError(
                f"{links.path if named else table.path}: its first line counts the columns: if "
                "these are names, write others (source,target,weight or f0,f1,f2); if not, put a "
                "line with names before it."
            )
        table = replace(table, values=table.values[named:])
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
    if X.dtype != np.float32 and (X.dtype.kind != "f" or not table.path.endswith((".npy", _FRAME))):
        X = _in_float32(X)
    X = table.in_order(X, at, None, 0)
    if table.names is not None:
        unused = [*at.unused, at.row_names]
        notes.append(table.note(f"{X.shape[1]:,} features", at.values, unused, at.id))
    return X


def _in_float32(X: Any) -> Any:
    """X in float32; in float64 where that would move whole numbers, or make others alike."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        small = X.astype(np.float32)
        spread = np.ptp(X, axis=0) if X.size else 0.0
        moved = np.abs(small - X)
        far = moved > np.where(np.floor(X) == X, 0.0, _KEPT * spread)
    return X.astype(np.float64) if far.any() else small


def _labels(
    table: Table, n: int | None, ends: Callable[[], Any], notes: list[str]
) -> tuple[Any, list[str] | None]:
    """One column of whole numbers or of text is classes, all else targets; names of several."""
    if len(table.values) - 1 == n and table.counts:  # a line before the rows, as pandas writes it
        table = replace(table, values=table.values[1:])
    at = table.node_columns(columns.find_labels)
    if not at.values:
        raise DataError(f"{table.path} has no column of labels beside the ids of nodes.")
    if n is None and at.id is not None:
        ids = ends()
        if (ids == 0).any():  # nothing is counted from 1
            n = max(int(ids.max()) + 1, len(table.values))
    while len(table.values) > (n or 0) and all(map(is_missing, table.values[-1])):
        table = replace(table, values=table.values[:-1])  # empty lines at the end
    y = _text_labels(table, at, n)
    y = _number_labels(table, at) if y is None else y
    nothing = {"U": "", "f": np.nan}.get(y.dtype.kind, -1)
    if len(y) == len(table.values):
        y = table.in_order(y, at, n, nothing)
    if table.names is not None:
        what = "targets" if y.dtype.kind == "f" else "labels"
        if y.ndim == 1 and y.dtype.kind != "f":
            what = f"{np.unique(y[y != nothing]).shape[0]:,} classes"
        without = int(np.count_nonzero(~has_label(y)))
        missing = f", {without:,} of {n or len(y):,} nodes without" if without else ""
        unused = [*at.unused, at.row_names]
        notes.append(table.note(what, at.values, unused, at.id) + missing)
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
    return table.node_ids([skip], n).ravel()


def _list(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 6 else [*names[:3], "...", names[-1]])


def _read(source: Any, sparse: bool = False) -> Table:
    """A table of any of the formats; a SciPy matrix only if it may be `sparse`."""
    frame, path = source, Path(_FRAME)
    if not columns.is_frame(source):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path}.")
        if path.suffix == ".npy" or (path.suffix == ".npz" and sparse):
            return Table(str(path), _array(path))
        if path.suffix != ".parquet":
            return read_text(path)
        try:
            import pandas
            import pyarrow  # noqa: F401 - pandas needs it and says so less clearly
        except ImportError as error:
            raise ImportError(
                f"Parquet files are read with pandas and pyarrow ({error}): "
                'pip install "herta_gpu[tables]".'
            ) from None
        with explained(f"{path} is not a whole Parquet file"):
            frame = pandas.read_parquet(path)
    names, held = columns.open_frame(frame)
    numbers = bool(held) and all(column.dtype.kind in "fiub" for column in held)
    values = np.empty((len(frame), len(held)), np.result_type(*held) if numbers else object)
    for j, column in enumerate(held):
        values[:, j] = column
    return Table(str(path), values, names)


def _array(path: Path) -> Any:
    """The rows of a .npy file, or a SciPy matrix of numbers."""
    if path.suffix == ".npz":
        with explained(f"{path} is not a whole SciPy sparse matrix"):
            array = sp.csr_array(sp.load_npz(path))
            array.check_format(full_check=True)
    else:
        array = load_npy(path, "a whole .npy file")
    if array.dtype.kind not in ("fiub" if sp.issparse(array) else "fiubUS"):
        raise DataError(f"{path} must hold real numbers, not {array.dtype}.")
    if array.ndim not in (1, 2):
        raise DataError(f"{path} must hold rows and columns, not {array.ndim} dimensions.")
    array = array.astype(str) if array.dtype.kind == "S" else array
    return array[:, None] if array.ndim == 1 else array


# ---- text: CSV and its relatives, as Excel, R, pandas and people write them --------------
def is_missing(cell: Any) -> bool:
    return cell is None or cell != cell or str(cell).strip().lower() in _MISSING


def as_number(cell: Any) -> float | None:
    """A cell as a number, NaN where it is missing, None where it is text."""
    if is_missing(cell):
        return float("nan")
    text = str(cell).strip().lower()
    if text in ("true", "false"):
        return float(text == "true")
    try:
        return None if "_" in text else float(text)  # Python reads 1_2 as 12
    except ValueError:
        return None


def is_numeric(cell: str) -> bool:
    """Whether a cell is a number or was meant as one, like 1,234 or 1.234,5."""
    return as_number(cell) is not None or re.fullmatch(r"[-+]?[\d.,' ]+", cell) is not None


def read_text(path: Path) -> Table:
    """Rows of numbers, or of text (objects), and the names of the columns, if there are any.

    Columns end at tabs, semicolons, commas or spaces, whichever comes first in this list.  Where
    that is no comma, 0,5 is a number.  Comments (#, %) and empty lines are left out.
    """
    with explained(f"{path} is not a table"):
        with _open_text(path) as file:
            head = list(islice(file, _BEFORE))
        skip, mark = _first_row(path, head)
        cells = next(csv.reader([head[skip].strip()], delimiter=mark, skipinitialspace=True))
        names = _names(path, cells, mark, head[skip - 1] if skip else "")
        skip += names is cells
        while names is not None and len(names) > 1 and not names[-1].strip():
            names = names[:-1]
        values = _plain_numbers(path, mark, skip)
        if values is None or values.shape[1] != len(names or cells):
            names, values = _cells(path, mark, skip, names)
    names = None if names is None else [name.strip() for name in names]
    numbered = names is not None and columns.is_numbered(names)
    return Table(str(path), values, None if numbered else names, is_text=True)


def _open_text(path: Path) -> Any:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            raise DataError(f"{path} is text in UTF-16: save it as CSV in UTF-8.")
    return opened(path, "rt", encoding="utf-8-sig", newline="")


def _first_row(path: Path, head: list[str]) -> tuple[int, str]:
    """How many lines come before the first row, and what parts its columns."""
    mark: str | None = None
    for skip, line in enumerate(head):
        if told := _MARK.fullmatch(line):
            mark = told[1]
        elif line.startswith("%%MatrixMarket"):
            raise DataError(
                f"{path} is in the format Matrix Market: read it by scipy.io.mmread and use "
                "from_scipy."
            )
        elif line.strip() and line[0] not in "#%":
            mark = mark or next((mark for mark in "\t;," if mark in line), None)
            if mark is None:  # spaces may be part of a text: they part numbers, and what is quoted
                row = next((other for other in head[skip + 1 :] if other.strip()), line).strip()
                numbers = all(as_number(part.strip('"')) is not None for part in row.split())
                mark = " " if " " in row and (numbers or re.search(r'"\s', row)) else ";"
            return skip, mark
    raise DataError(f"{path} is empty.")


def _names(path: Path, cells: list[str], mark: str, before: str) -> list[str] | None:
    """The names of the columns: the first row, or the comment before it, or none."""
    filled = [cell for cell in cells if not is_missing(cell)]
    text = [cell for cell in filled if not is_numeric(cell)]
    named = filled and (len(text) == len(filled) or columns.has_known_name(text))
    # Pandas writes columns without names as those of an index and 0, 1, 2, ...
    if named or (columns.is_index(cells) and columns.is_numbered(cells[1:])):
        return cells
    if text:
        raise DataError(
            f"{path}: its first line has both {text[0]!r} and numbers, so that it is neither a "
            "row of numbers nor one of names: name every column."
        )
    comment = next(csv.reader([before.lstrip("#% ").strip()], delimiter=mark), [])
    return comment if len(comment) == len(cells) and columns.has_known_name(comment) else None


def _plain_numbers(path: Path, mark: str, skip: int) -> Any:
    """Rows of numbers by NumPy, which is fast; None where it cannot read them all."""
    how: dict[str, Any] = {"delimiter": mark.strip(" ") or None, "skiprows": skip, "quotechar": '"'}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a header without a row
            values = np.loadtxt(path, ndmin=2, comments=None, encoding="utf-8-sig", **how)
    except ValueError:
        return None
    if values.shape[1] == 1:  # where an empty line is a missing number, which NumPy leaves out
        with _open_text(path) as file:
            if "" in (line.strip() for line in islice(file, skip, skip + len(values))):
                return None
    return values


def _cells(path: Path, mark: str, skip: int, names: list[str] | None) -> tuple[Any, Any]:
    """The names and an array of the cells as text."""
    with _open_text(path) as file:
        lines = [line.strip(" \r\n") for line in islice(file, skip, None)]
    rows = list(csv.reader(lines, delimiter=mark, skipinitialspace=mark == " "))
    if max(map(len, rows), default=0) > 1:  # in one column, nothing is a missing value
        rows = [row for row in rows if any(cell.strip() for cell in row)]
    width = len(names or (rows[0] if rows else []))
    # R's write.table has names for the rows, and no name for those.
    if names is not None and mark != "," and all(len(row) == width + 1 and row[-1] for row in rows):
        names, width = ["", *names], width + 1
    for i, row in enumerate(rows, 1):
        if 1 < width > len(row) or any(cell.strip() for cell in row[width:]):
            raise DataError(
                f"{path} is not a table of numbers (row {i} has {len(row)} columns, not {width})."
            )
    cells = np.empty((len(rows), width), dtype=object)
    for i, row in enumerate(rows):
        cells[i] = [_with_point(cell.strip(), mark) for cell in (row or [""])[:width]]
    empty = [j for j in range(width) if not any(cells[:, j]) and not (names and names[j].strip())]
    kept = [j for j in range(width) if j not in empty or width == 1]
    return None if names is None else [names[j] for j in kept], cells[:, kept]


def _with_point(cell: str, mark: str) -> str:
    """A number with a decimal comma with a point; 1,234 may be that, or be a thousand and more."""
    decimal = re.fullmatch(r"\s*[-+]?\d*,(\d+)([eE][-+]?\d+)?\s*", cell)
    sure = decimal is not None and (mark != "," or len(decimal[1]) != 3)
    return cell.replace(",", ".") if sure else cell
