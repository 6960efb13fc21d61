"""Checks of what a caller gives: one clear sentence each, before any long work starts.

A memory-mapped list of edges is read a chunk at a time.  At the end: what this machine has.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple, NoReturn

import numpy as np
import scipy.sparse as sp

from herta_gpu.plumbing.columns import is_frame, rows_of_frame
from herta_gpu.plumbing.interop import is_sparse, on_device, plain
from herta_gpu.plumbing.machine import host_memory

MAX_LAM = 1e6
_LARGEST, _SMALLEST = 1e15, 1e-15  # of the largest entry of X: products stay in float32
_LEAST_COLUMN = 1e-100  # of the largest entry of a column: squares do not vanish
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MAX_SEED = 2**32 - 1
MAX_RIDGE = 1e30
# Squares of such targets, and of what rounding leaves of them, are far from the ends of float64.
_LARGEST_Y, _SMALLEST_Y = 1e30, 1e-100
_CHECK_BYTES = 1 << 20  # looked at together: in a cache, and a mapped file stays on disk


class BudgetError(MemoryError):
    """Not even one column fits the memory budget; the message says which budget would do."""


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if isinstance(value, np.ndarray) or value not in choices:
        allowed = ", ".join(f'"{c}"' if isinstance(c, str) else str(c) for c in choices)
        raise ValueError(f"{name} must be one of {allowed}, not {value!r}.")


def check_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, not {value!r}.")
    return float(value)


def check_positive(name: str, value: Any) -> None:
    finite = np.isfinite(check_number(name, value))
    if not (finite and value > 0):
        number = "positive number" if finite or not value > 0 else "finite number"
        raise ValueError(f"{name} must be a {number}, not {value!r}.")


def check_lam(lam: Any) -> None:
    check_positive("lam", lam)
    if lam > MAX_LAM:
        raise ValueError(f"lam must be at most {MAX_LAM:g}, not {lam!r}: Z* no longer changes.")


def check_ridge(ridge: Any) -> None:
    check_not_negative("ridge", ridge)
    if ridge > MAX_RIDGE:
        raise ValueError(f"ridge must be at most {MAX_RIDGE:g}, not {ridge!r}: W is 0 by then.")


def check_targets(Y: Any) -> None:
    """Raise an error unless the float targets can be squared and summed."""
    if not np.isfinite(Y).all():
        raise ValueError("y holds NaN or infinity in a training row: leave such rows out of train.")
    largest = float(np.abs(Y).max(initial=0.0))
    if largest > 0 and not _SMALLEST_Y <= largest <= _LARGEST_Y:
        advice = "divide y by that, and what the model predicts is divided likewise."
        raise ValueError(f"The largest entry of y is {largest:.3g}: {advice}")


def check_not_negative(name: str, value: Any) -> None:
    if not np.isfinite(check_number(name, value)):
        raise ValueError(f"{name} must be finite, not {value!r}.")
    if value < 0:
        raise ValueError(f"{name} must not be negative, but is {value!r}.")


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}.")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, not {value!r}.")


def check_dtype(dtype: Any) -> str:
    """The name of a precision; None, which NumPy takes for float64, is refused."""
    name = dtype
    if dtype is not None and not isinstance(dtype, str):
        with contextlib.suppress(TypeError):
            name = str(np.dtype(dtype))
    check_choice("dtype", name, ("float32", "float64"))
    return str(name)


def check_plain(name: str, value: Any) -> None:
    """Refuse masked arrays: the numbers below a mask mean nothing, and would be used."""
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"{name} is a masked array: fill it (.filled(value)) or leave the masked rows out."
        )


def parse_bytes(value: int | str) -> int:
    """Bytes from 123, "512MB" or "8GB" (1 GB = 2^30 bytes)."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*)\s*([KMGT]?)i?B?\s*", value, re.IGNORECASE)
        if not found:
            raise ValueError(f'memory_budget must be bytes or like "8GB", not {value!r}.')
        value = int(float(found[1]) * _UNITS[found[2].upper()])
    check_positive("memory_budget", value)
    return int(value)


def memory_budget(wish: int | str | None, available: int, share: float = 0.8) -> int:
    """Bytes to use: as asked, or most of what is free.  Nothing else decides this."""
    return int(share * available) if wish is None else parse_bytes(wish)


class Extent(NamedTuple):
    """What the entries of a matrix lie between, signs apart."""

    largest: float
    least: float  # that is not 0; infinity where the type of the numbers has no tiny ones


def check_rows(name: str, X: Any, graph: Any) -> Extent:
    """The extent of a dense or sparse block that has one finite row per node, or an error.

    X is gone through once: a large one lies on disk.
    """
    kind, n = type(X).__name__, graph.num_nodes
    if not sp.issparse(X) and not isinstance(X, np.ndarray) and not on_device(X):
        raise TypeError(f"{name} must be a NumPy array or a SciPy sparse matrix, not {kind}.")
    check_plain(name, X)
    if X.ndim not in (1, 2):
        raise ValueError(f"{name} must have one or two dimensions, not {X.ndim}.")
    if X.shape[0] != n:
        has = f"{name} has {X.shape[0]:,} rows but the graph has {n:,} nodes"
        raise ValueError(f"{has}: give one row per node.")
    if X.dtype.kind not in "fiub":
        raise ValueError(f"{name} must hold real numbers, not {X.dtype}.")
    largest, least = 0.0, float("inf")
    values = X.data if is_sparse(X) else X
    wide = values.dtype.kind == "f" and values.dtype.itemsize >= 8
    for part in _pieces(values):
        if part.dtype == np.float16 and isinstance(part, np.ndarray):
            # NumPy takes these one by one, but bits at once; without signs they rise like numbers.
            part = (part.view(np.int16) & 0x7FFF).max(keepdims=True).view(np.float16)
        ends = (largest, float(part.max()), -float(part.min()))
        if not np.isfinite(ends).all():
            raise ValueError(f"{name} holds NaN or infinity: clean or impute it first.")
        largest = max(ends)
        if wide:
            least = min(least, float((abs(part) + (part == 0)).min()))  # 0 counts as 1
    return Extent(largest, least)


def _pieces(values: Any) -> Iterator[Any]:
    """Runs of rows, none of them empty."""
    row = max(1, values.nbytes // max(1, values.shape[0]))
    step = max(1, (_CHECK_BYTES << 8 * on_device(values)) // row)
    for a in range(0, values.shape[0] if values.size else 0, step):
        yield values[a : a + step]


def check_scale(largest: float, fitted: bool = False) -> None:
    """Refuse features whose largest entry would overflow in float32, or be lost there.

    The units of a `fitted` model are fixed: new data may be small throughout, but not too large.
    """
    what = f"The largest entry of X is {largest:.3g}"
    if fitted and largest > _LARGEST:
        advice = "give X in the units that the model was fitted with."
        raise ValueError(f"{what}, which overflows: {advice}")
    if not fitted and largest > 0 and not _SMALLEST <= largest <= _LARGEST:
        advice = "multiply X so that it is about 1, which changes W by the same factor"
        raise ValueError(f"{what}: {advice} and nothing else.")


def check_columns(X: Any, least: float, backend: Any) -> None:
    """Refuse a column of X whose squares would vanish: it would be taken for an empty one."""
    if not backend.largest(float(least < _LEAST_COLUMN)):
        return
    if is_sparse(X):
        X = X if sp.issparse(X) else X.get()  # synchronize!
        largest = abs(sp.csc_array(X)).max(axis=0).toarray().ravel()
    else:
        xp = backend.xp if on_device(X) else np
        largest = xp.zeros(X.shape[1])
        for part in _pieces(X):
            largest = xp.maximum(largest, abs(part).max(axis=0))
        largest = backend.to_numpy(largest) if on_device(largest) else largest  # synchronize!
    largest = np.asarray(backend.largest(largest))
    tiny = np.flatnonzero((largest > 0) & (largest < _LEAST_COLUMN))
    if tiny.size:
        raise ValueError(
            f"Column {tiny[0]} of X has no entry above {largest[tiny[0]]:.3g}, whose square "
            "float64 cannot hold: multiply it so that it is about 1 (its weights are divided), "
            "or leave it out."
        )


def as_labels(name: str, y: Any) -> Any:
    """Labels and targets in one of few kinds: whole numbers, text, or floats.

    One column of whole numbers is classes, with -1 for none, in one dimension or two.  So is text,
    with "" for none; None, NaN and "-1" become "".
    """
    if y is None:
        raise ValueError(f"{name} is None: give one label or target per node.")
    check_plain(name, y)
    y = y.to_frame("label") if hasattr(y, "iloc") and hasattr(y, "to_frame") else y  # a Series
    y = rows_of_frame(name, y, labels=True) if is_frame(y) else y
    y = _array(f"{name} is no array: its rows differ in length.", y)
    if y.ndim not in (1, 2):
        raise ValueError(
            f"{name} must have one row per node, but it has {y.ndim} dimensions: give a label, or "
            "a row of targets, per node."
        )
    if y.dtype.kind == "O":
        y = _of_objects(name, y)
    if y.dtype.kind == "S":
        y = np.char.decode(y, "utf-8", "replace")
    if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind in "iubU":
        y = y[:, 0]  # OGB's shape
    if y.dtype.kind == "U":
        if y.ndim == 2:
            raise ValueError(f"{name} must hold one text label per node, not {y.shape[1]}.")
        y = np.char.strip(y)
        return np.where(y == "-1", "", y)
    if y.dtype.kind not in "fiub":
        raise ValueError(f"{name} must hold whole numbers, text or floats, not {y.dtype}.")
    classes = y.ndim == 1 and y.dtype.kind in "iu" and y.size
    if classes and not -1 <= int(y.min()) <= int(y.max()) < 2**62:
        bad = y.min() if y.min() < -1 else y.max()
        raise ValueError(
            f"{name} holds the label {bad}: classes are numbers from 0 on, and -1 is none."
        )
    return y


def _of_objects(name: str, y: Any) -> Any:
    """An object array as text, whole numbers or floats, whichever all of its entries are."""
    missing, kinds = np.zeros(y.shape, dtype=bool), set()
    for at, value in np.ndenumerate(y):
        number = isinstance(value, (int, float, np.integer, np.floating))
        nan = number and value != value
        missing[at] = value is None or nan or type(value).__name__ in ("NAType", "NaTType")
        if not missing[at]:
            whole = isinstance(value, (int, np.integer)) and abs(int(value)) < 2**62
            real = isinstance(value, (float, np.floating))
            kinds.add("text" * isinstance(value, str) or "whole" * whole or "real" * real)
    if kinds <= {"text"}:
        return np.array(np.where(missing, "", y), dtype=str)
    if kinds == {"whole"}:
        return np.where(missing, -1, y).astype(np.int64)
    if kinds <= {"whole", "real"}:
        return np.where(missing, np.nan, y).astype(np.float64)
    raise ValueError(
        f"{name} holds Python objects of several kinds: give whole numbers, text or floats."
    )


def has_label(y: Any) -> Any:
    """A mask of the rows that have a label, of what `as_labels` gave."""
    if y.ndim == 2:
        return np.ones(y.shape[0], dtype=bool)
    if y.dtype.kind == "U":
        return y != ""
    return np.isfinite(y) if y.dtype.kind == "f" else y >= 0


def train_rows(train: Any, labelled: Any, n: int, alone: bool = True) -> Any:
    """Sorted ids of the training nodes from ids, a mask or None (all labelled ones).

    There is one at least, unless other processes may have some.
    """
    if train is None:
        rows = np.flatnonzero(labelled)
    else:
        rows = np.sort(part_ids("train", train, n))
        if rows.size and not labelled[rows].all():
            bad = int(rows[~labelled[rows]][0])
            raise ValueError(f"train holds node {bad}, which has no label: leave it out.")
    if rows.size == 0 and alone:
        raise ValueError("There is no training node: train is empty, or y has no label.")
    return rows


def node_rows(idx: Any, n: int, name: str = "idx") -> Any:
    """Node ids from ids, a mask or None (all), in the order given."""
    return np.arange(n) if idx is None else _ids(name, idx, n)


def part_ids(name: str, given: Any, n: int) -> Any:
    """Ids of a part of the nodes, from ids or a mask; each may be named once."""
    rows = _ids(name, given, n)
    if (np.diff(np.sort(rows)) == 0).any():
        raise ValueError(f"{name} names a node more than once: give each id once.")
    return rows


def _ids(name: str, given: Any, n: int) -> Any:
    check_plain(name, given)
    given = sorted(given) if isinstance(given, Set) else given
    if hasattr(given, "iloc") and str(given.dtype) in ("bool", "boolean"):  # a Series, as y may be
        given = rows_of_frame(name, given.to_frame("label"), labels=True)
    given = _array(f"{name} is no array: its rows differ in length.", given)
    if given.dtype == bool:
        if given.shape != (n,):
            raise ValueError(f"The mask {name} must have shape ({n},), not {given.shape}.")
        return np.flatnonzero(given)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} must be a one-dimensional array of node ids or a mask, without missing ones."
        )
    if given.size:
        least, largest = int(given.min()), int(given.max())
        # One zero or one per node is a mask: as ids they would name the nodes 0 and 1 many times.
        if given.shape[0] == n > 2 and least >= 0 and largest <= 1:
            return np.flatnonzero(given)
        _check_within(name, least, largest, n)
    return given.astype(np.int64)


def _check_within(name: str, least: int, largest: int, n: int) -> None:
    if least < 0 or largest >= n:
        bad = least if least < 0 else largest
        raise ValueError(f"{name} holds node id {bad}, but ids must lie in 0..{n - 1}.")


def _array(sentence: str, given: Any) -> Any:
    """`given` as a NumPy array; the sentence refuses rows of different lengths."""
    try:
        return np.asarray(plain(given))
    except ValueError:
        raise ValueError(sentence) from None


# ---- lists of edges ----------------------------------------------------------------------
CHUNK = 1 << 22  # listed edges that are read at once
KEY_BYTES = (48, 40)  # held a node and an edge while NumPy makes a graph from keys, at least
_MOST_NODES = 3_037_000_499  # pairs of them are numbered by int64


def check_edges(edge_index: Any, num_nodes: int | None) -> tuple[Any, int, str]:
    """The (2, m) ids as they are, the number of nodes, and the name of what it came from."""
    check_plain("edge_index", edge_index)
    edges = _array("edge_index must have shape (2, m): its two rows differ.", edge_index)
    if edges.ndim != 2 or edges.shape[0] != 2:
        raise ValueError(
            f"edge_index must have shape (2, m), not {edges.shape}: one column per edge."
        )
    if edges.size and edges.dtype.kind not in "iu":
        raise ValueError(f"edge_index must hold integers, not {edges.dtype}.")
    # Python's own numbers: the maximum of unsigned ids and -1 would be a float for NumPy.
    parts = [edges[:, a : a + CHUNK] for a in range(0, edges.shape[1], CHUNK)]
    least = min((int(part.min()) for part in parts), default=0)
    largest = max((int(part.max()) for part in parts), default=-1)
    whole = isinstance(num_nodes, (int, np.integer)) and not isinstance(num_nodes, bool)
    if num_nodes is not None and (not whole or num_nodes < 0):
        raise ValueError(f"num_nodes must be a non-negative integer, not {num_nodes!r}.")
    n = largest + 1 if num_nodes is None else int(num_nodes)
    if n == 0:
        raise ValueError("The graph is empty: give num_nodes, or at least one edge.")
    _check_within("edge_index", least, largest, n)
    return edges, n, "edge_index" if num_nodes is None else "num_nodes"


def check_size(
    n: int, m: int, source: str, node: int = KEY_BYTES[0], edge: int = KEY_BYTES[1]
) -> None:
    """A graph that cannot fit into memory is refused before the system ends the process.

    `node` and `edge`: the bytes that each of them needs.
    """
    need, free = node * n + edge * m, host_memory()
    if need <= free and n < _MOST_NODES:
        return
    named, advice = f"{source} is {n:,}", "give a smaller one."
    if source == "edge_index":
        named = f"{source} holds node id {n - 1:,}"
        advice = "ids must be 0..n-1 without gaps, so relabel them, as "
        advice += "numpy.unique(edge_index, return_inverse=True) does."
    raise ValueError(
        f"{named}, but a graph of {n:,} nodes and {m:,} edges needs {need / 2**30:,.0f} GB and "
        f"{free / 2**30:,.0f} GB are free: {advice}"
    )


def check_weights(edge_weight: Any, m: int) -> Any | None:
    """The weights as they are, in whatever type of real numbers."""
    if edge_weight is None:
        return None
    check_plain("edge_weight", edge_weight)
    w = _array(f"edge_weight must have shape ({m},), one per edge.", edge_weight)
    if w.shape != (m,):
        raise ValueError(f"edge_weight must have shape ({m},), one per edge, not {w.shape}.")
    if w.dtype.kind not in "fiub":
        raise ValueError(f"edge_weight must hold real numbers, not {w.dtype}.")
    least, low, high = 0.0, np.inf, 0.0
    for a in range(0, m, CHUNK):
        part = w[a : a + CHUNK].astype(np.float64, copy=False)
        if not np.isfinite(part).all():
            raise ValueError("edge_weight holds NaN or infinity: every weight must be finite.")
        least, high = min(least, float(part.min())), max(high, float(part.max()))
        low = min(low, float(part.min(initial=np.inf, where=part > 0)))
    if least < 0:
        raise ValueError(f"edge_weight holds {least:g}: weights must not be negative.")
    if high > 1e30 or low < 1e-30:
        raise ValueError(
            f"edge_weight ranges from {low:g} to {high:g}: scale it to lie "
            "within 1e-30 and 1e30, for only ratios of weights (self-loops included) matter."
        )
    return w


def directions_differ(a: int, b: int, ahead: float, back: float) -> NoReturn:
    raise ValueError(
        f"Edge ({a}, {b}) has weight {ahead:g} but ({b}, {a}) has {back:g}: "
        "an undirected graph needs one weight for both directions."
    )
