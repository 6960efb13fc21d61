"""Checks of what a caller gives: one clear sentence each, before any long work starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.interop import on_device

MAX_LAM = 1e6
_LARGEST, _SMALLEST = 1e15, 1e-15  # of the largest entry of X: products must not leave float32
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_CHECK_ROWS = 1 << 16  # rows looked at once, so that memory-mapped input stays on disk


def check_graph(graph: Any) -> None:
    from herta_gpu.graph import Graph

    if not isinstance(graph, Graph):
        raise TypeError(
            f"graph must be a herta_gpu.Graph, not {type(graph).__name__}: use Graph.from_edges."
        )


class BudgetError(MemoryError):
    """Not even one column fits the budget; the sentence says what would."""


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        allowed = ", ".join(f'"{c}"' if isinstance(c, str) else str(c) for c in choices)
        raise ValueError(f"{name} must be one of {allowed}, not {value!r}.")


def check_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, not {value!r}.")
    return float(value)


def check_positive(name: str, value: Any) -> None:
    if not (np.isfinite(check_number(name, value)) and value > 0):
        raise ValueError(f"{name} must be a positive number, not {value!r}.")


def check_lam(lam: Any) -> None:
    check_positive("lam", lam)
    if lam > MAX_LAM:
        raise ValueError(f"lam must be at most {MAX_LAM:g}, not {lam!r}: Z* no longer changes.")


def check_not_negative(name: str, value: Any) -> None:
    if not (np.isfinite(check_number(name, value)) and value >= 0):
        raise ValueError(f"{name} must not be negative, but is {value!r}.")


def check_count(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}.")


def check_dtype(dtype: Any) -> str:
    name = str(np.dtype(dtype)) if not isinstance(dtype, str) else dtype
    check_choice("dtype", name, ("float32", "float64"))
    return name


def parse_bytes(value: int | str) -> int:
    """Bytes from 123, "512MB" or "8GB" (1 GB = 2^30 bytes)."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*)\s*([KMGT]?)i?B?\s*", value, re.IGNORECASE)
        if not found:
            raise ValueError(f'memory_budget must be bytes or like "8GB", not {value!r}.')
        value = int(float(found[1]) * _UNITS[found[2].upper()])
    check_positive("memory_budget", value)
    return int(value)


def check_rows(name: str, X: Any, graph: Any) -> None:
    """A dense or sparse block with one row per node and finite numbers only."""
    if not sp.issparse(X) and not isinstance(X, np.ndarray) and not on_device(X):
        raise TypeError(
            f"{name} must be a NumPy array or a SciPy sparse matrix, not {type(X).__name__}."
        )
    if X.ndim not in (1, 2):
        raise ValueError(f"{name} must have one or two dimensions, not {X.ndim}.")
    if X.shape[0] != graph.num_nodes:
        raise ValueError(
            f"{name} has {X.shape[0]:,} rows but the graph has {graph.num_nodes:,} nodes: "
            "give one row per node."
        )
    if X.dtype.kind not in "fiub":
        raise ValueError(f"{name} must hold real numbers, not {X.dtype}.")
    if X.dtype.kind == "f":
        values = X.data if sp.issparse(X) else X
        for a in range(0, values.shape[0], _CHECK_ROWS):
            if not np.isfinite(values[a : a + _CHECK_ROWS]).all():
                raise ValueError(f"{name} holds NaN or infinity: clean or impute it first.")


def check_scale(X: Any) -> None:
    """Features whose size would overflow or vanish in float32 are refused."""
    values = X.data if hasattr(X, "indptr") else X
    largest = 0.0
    for a in range(0, values.shape[0], _CHECK_ROWS):
        part = values[a : a + _CHECK_ROWS]
        if part.size:
            largest = max(largest, float(part.max()), -float(part.min()))
    if largest > 0 and not _SMALLEST <= largest <= _LARGEST:
        raise ValueError(
            f"The largest entry of X is {largest:.3g}: multiply X so that it is about 1, which "
            "changes W by the same factor and nothing else."
        )


def train_rows(train: Any, labelled: Any, n: int) -> Any:
    """Sorted ids of the training nodes from ids, a mask or None (all labelled ones)."""
    if train is None:
        rows = np.flatnonzero(labelled)
    else:
        given = np.asarray(train)
        if given.dtype == bool:
            if given.shape != (n,):
                raise ValueError(f"The mask train must have shape ({n},), not {given.shape}.")
            rows = np.flatnonzero(given)
        else:
            rows = _ids("train", given, n)
            if np.unique(rows).shape[0] != rows.shape[0]:
                raise ValueError("train names a node more than once: give each id once.")
            rows = np.sort(rows)
        if rows.size and not labelled[rows].all():
            bad = int(rows[~labelled[rows]][0])
            raise ValueError(f"train holds node {bad}, which has no label: leave it out.")
    if rows.size == 0:
        raise ValueError("There is no training node: train is empty, or y has no label.")
    return rows


def node_rows(idx: Any, n: int) -> Any:
    """Node ids from ids, a mask or None (all), in the order given."""
    if idx is None:
        return np.arange(n)
    given = np.asarray(idx)
    if given.dtype == bool:
        if given.shape != (n,):
            raise ValueError(f"The mask idx must have shape ({n},), not {given.shape}.")
        return np.flatnonzero(given)
    return _ids("idx", given, n)


def _ids(name: str, given: Any, n: int) -> Any:
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a one-dimensional array of node ids or a mask.")
    ids = given.astype(np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= n):
        bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise ValueError(f"{name} holds node id {bad}, but ids must lie in 0..{n - 1}.")
    return ids
