"""Columns of a table by their names: which of them hold edges, weights, node ids and labels.

Tables in files and DataFrames follow the same rules.  Neither pandas nor polars is imported: a
DataFrame is recognised by what it offers.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_EDGES = {
    "source": "source src from u sender start node1",
    "target": "target dst to v receiver end dest destination node2",
    "weight": "weight weights w edgeweight edgeweights",
}
_NODES = {
    "id": "id ids node nodes nodeid nodeids nid idx index nodeidx nodeindex vertex vertexid",
    "label": "label labels y class classes target targets prediction predictions",
}
_INDEX = re.compile(r"(Unnamed: \d+|__index_level_\d+__)?")  # how pandas and R call the row names
_WHOLE = 2.0**53  # beyond it, floats skip whole numbers


class EdgeColumns(NamedTuple):
    """Places of the columns of an edge list; `unused` are those that mean nothing to us."""

    source: int
    target: int
    weight: int | None
    unused: list[int]

    @property
    def used(self) -> list[int]:
        return [j for j in (self.source, self.target, self.weight) if j is not None]


class NodeColumns(NamedTuple):
    """Places of the columns of a table with one row per node."""

    id: int | None
    row_names: int | None  # a first column without a name, as pandas and R write it
    values: list[int]
    unused: list[int]


def role(name: str, roles: dict[str, str]) -> str | None:
    """What a column is for, by its name; case, spaces and a final "node" or "id" do not count."""
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    stem = re.sub(r"(node|vertex)?(id|idx|index)?$", "", word)
    for candidate in (word, stem):
        for found, words in roles.items():
            if candidate in words.split():
                return found
    return None


def is_label_name(name: str) -> bool:
    return role(name, _NODES) == "label"


def has_known_name(names: Sequence[str]) -> bool:
    """Whether a line is a header because it names a column that we know."""
    return any(role(name, roles) for name in names for roles in (_EDGES, _NODES))


def is_index(names: Sequence[str]) -> bool:
    """Whether the first column holds row names, as its own name tells."""
    return bool(names) and _INDEX.fullmatch(names[0].strip()) is not None


def is_numbered(names: Sequence[str]) -> bool:
    """Whether columns have numbers for names, as pandas gives them where there are no names."""
    return list(names) == [str(j) for j in range(len(names))]


def find_edges(names: Sequence[str] | None, count: int) -> EdgeColumns:
    """Which of `count` columns hold edges; without names by position, else by names."""
    first = int(is_index(names or ()))
    if names is None or is_numbered(names[first:]):
        held = count - first
        if not 2 <= held <= 3:
            raise ValueError(
                "must have two columns of node ids, and a third for weights"
                + (f", not {held}: name them in a first line, source,target,weight" * (held > 3))
            )
        return EdgeColumns(first, first + 1, first + 2 if held == 3 else None, [0] * first)
    at = _by_role(names, _EDGES)
    others = [j for j in range(count) if j not in at.values()]
    if not {"source", "target"} & set(at) and len(others[first:]) == 2:
        source, target = others[first:]
        return EdgeColumns(source, target, at.get("weight"), [0] * first)
    if "source" not in at or "target" not in at:
        raise ValueError(
            f"has the columns {', '.join(names)}, and must have two columns of node ids: name them "
            "source and target, and weights weight"
        )
    return EdgeColumns(at["source"], at["target"], at.get("weight"), others)


def find_labels(names: Sequence[str] | None, count: int) -> NodeColumns:
    """Which columns hold labels: those called so, or all that are not ids."""
    found = find_features(names, count)
    called = [j for j in found.values if names is not None and is_label_name(names[j])]
    if not called or len(found.values) == 1:
        return found
    return found._replace(values=called, unused=[j for j in found.values if j not in called])


def find_features(names: Sequence[str] | None, count: int) -> NodeColumns:
    """Which columns hold numbers of nodes: all that are not ids of nodes."""
    names = names or ()
    at, index = _by_role(names, {"id": _NODES["id"]}).get("id"), 0 if is_index(names) else None
    return NodeColumns(at, index, [j for j in range(count) if j not in (at, index)], [])


def find_answers(names: Sequence[str], at: Sequence[int]) -> list[int]:
    """Which of the columns `at` hold labels by their names; y beside x is a coordinate."""
    words = [name.strip().lower() for name in names]
    return [j for j in at if is_label_name(names[j]) and not (words[j] == "y" and "x" in words)]


def _by_role(names: Sequence[str], roles: dict[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for j, name in enumerate(names):
        this = role(name, roles)
        if this is not None and found.setdefault(this, j) != j:
            twice = f"{names[found[this]]!r} and {name!r}"
            raise ValueError(f"has two columns for one thing, {twice}: leave one of them out")
    return found


def is_whole(values: Any, least: int) -> bool:
    """Whether all numbers are whole, at least `least`, and exact as floats."""
    values = np.asarray(values)
    if values.dtype.kind == "f" and not (np.floor(values) == values).all():  # NaN is not, either
        return False
    return not values.size or (least <= values.min() and values.max() <= _WHOLE)


def node_places(ids: Any, called: str, n: int | None) -> Any:
    """The node of each row, from a column of ids; with n None the rows are those of all nodes."""
    if not is_whole(ids, 0):
        raise ValueError(f"column {called} must hold whole node ids from 0 on")
    ids = np.asarray(ids).astype(np.int64)
    total = ids.shape[0] if n is None else n
    unique, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"column {called} names node {unique[counts > 1][0]:,} more than once")
    if n is None and (unique != np.arange(total)).any():
        missing = int(np.setdiff1d(np.arange(total), unique)[0])
        wanted = f"column {called} must name each of 0..{total - 1} once"
        wanted += "; count from 0, in the edges, too" * (missing == 0)
        raise ValueError(f"there is no row for node {missing:,}: {wanted}")
    if unique.size and unique[-1] >= total:
        raise ValueError(f"column {called} names node {unique[-1]:,} of {total:,} nodes")
    return ids


def is_frame(x: Any) -> bool:
    """Whether `x` is a DataFrame, of pandas or what can become one."""
    columns = hasattr(x, "columns") or hasattr(x, "column_names")
    return columns and (hasattr(x, "iloc") or hasattr(x, "to_pandas"))


def open_frame(x: Any) -> tuple[list[str] | None, list[Any]]:
    """The names (None: numbered, as pandas does it) and columns of a DataFrame.

    Columns are numbers, NaN for missing ones, or objects.  An index whose name we know is a
    column; any other is one without a name, unless it counts the rows from 0.
    """

    def column(series: Any) -> Any:
        kind, size = series.dtype.kind, min(8, getattr(series.dtype, "itemsize", 8))
        if kind in "fiub" and not series.hasnans:
            return series.to_numpy(dtype=f"{kind}{size}")
        if kind == "f":  # of whole numbers, some may be missing
            return series.to_numpy(dtype=np.float64, na_value=np.nan)
        return series.to_numpy(dtype=object)

    frame = x if hasattr(x, "iloc") and hasattr(x, "index") else x.to_pandas()
    index = frame.index
    known = has_known_name([str(name) for name in index.names if name is not None])
    frame = frame.reset_index() if known else frame
    columns = [column(frame.iloc[:, j]) for j in range(frame.shape[1])]
    names = [str(name) for name in frame.columns]
    if known or np.array_equal(index, np.arange(len(index))):
        return None if is_numbered(names) else names, columns
    return ["", *names], [np.asarray(index), *columns]


def edges_of_frame(frame: Any, weight: Any) -> tuple[Any, Any]:
    """((2, m) node ids, weights or None) of a DataFrame with one edge per row."""
    there = type(frame).__module__.partition(".")[0] == "cudf"  # its columns stay on the GPU
    names, columns = _columns_there(frame) if there else open_frame(frame)
    try:
        at = find_edges(names, len(columns))
        for j in (at.source, at.target):
            if there and columns[j].dtype.kind in "iu" and not columns[j].hasnans:
                continue  # the graph looks for negative ones
            if there or columns[j].dtype.kind not in "fiu" or not is_whole(columns[j], 0):
                called = names[j] if names else j
                raise ValueError(f"must hold integer node ids from 0 on in column {called}")
    except ValueError as error:
        raise ValueError(f"The DataFrame of edges {error}.") from None
    unused = [names[j] for j in at.unused if names is not None and names[j]]
    if unused:
        warnings.warn(f"Columns of the edges that are not used: {', '.join(unused)}.", stacklevel=3)
    source, target, *w = (columns[j].values if there else columns[j] for j in at.used)
    edges = (source, target) if there else np.stack([source, target]).astype(np.int64)
    return edges, weight if weight is not None or not w else w[0]


def _columns_there(frame: Any) -> tuple[list[str], list[Any]]:
    """The names and columns of a frame of cuDF."""
    return [str(name) for name in frame.columns], [frame[name] for name in frame.columns]


def rows_of_frame(name: str, frame: Any, labels: bool = False) -> Any:
    """The numbers of a DataFrame, one row per node; a column of node ids says which."""
    names, columns = open_frame(frame)
    index = None
    if is_index(names or ()):
        index, names, columns = columns[0], (names or [])[1:], columns[1:]
    try:
        at = (find_labels if labels else find_features)(names, len(columns))
        if at.unused:
            unused = ", ".join(names[j] for j in at.unused if names)
            raise ValueError(f"has columns beside the labels, {unused}: leave them out")
        values = [columns[j] for j in at.values]
        taken = np.column_stack(values) if values else np.empty((len(frame), 0))
        taken = values[0] if labels and len(values) == 1 else taken
        if at.id is not None and names is not None:
            placed = np.empty_like(taken)
            placed[node_places(columns[at.id], names[at.id], None)] = taken
            return placed
        moved = index is not None and index.dtype.kind in "iu"
        if moved and np.array_equal(np.sort(np.asarray(index)), np.arange(len(frame))):
            raise ValueError(
                "its index counts the rows in another order: sort_index() if it says which node "
                "a row is of, else reset_index(drop=True)"
            )
        return taken
    except ValueError as error:
        raise ValueError(f"{name}, a DataFrame: {error}.") from None
