"""Checks of an edge list: one clear sentence each, before any long work starts.

A memory-mapped list is read a chunk at a time.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from herta_gpu.plumbing.machine import host_memory
from herta_gpu.plumbing.validation import check_plain

CHUNK = 1 << 22  # listed edges that are read at once
KEY_BYTES = (48, 40)  # held a node and an edge while NumPy makes a graph from keys, at least
_MOST_NODES = 3_037_000_499  # pairs of them are numbered by int64


def check_edges(edge_index: Any, num_nodes: int | None) -> tuple[Any, int, str]:
    """The (2, m) ids as they are, the number of nodes, and the name of what it came from."""
    check_plain("edge_index", edge_index)
    try:
        edges = np.asarray(edge_index)
    except ValueError as error:
        raise ValueError("edge_index must have shape (2, m): its two rows differ.") from error
    if edges.ndim != 2 or edges.shape[0] != 2:
        raise ValueError(
            f"edge_index must have shape (2, m), not {edges.shape}: one column per edge."
        )
    if edges.size and edges.dtype.kind not in "iu":
        raise ValueError(f"edge_index must hold integers, not {edges.dtype}.")
    # Python's own numbers: the maximum of unsigned ids and -1 would be a float for NumPy.
    parts = [edges[:, a : a + CHUNK] for a in range(0, edges.shape[1], CHUNK)]
    found = [(int(part.min()), int(part.max())) for part in parts]
    least, largest = min((a for a, _ in found), default=0), max((b for _, b in found), default=-1)
    whole = isinstance(num_nodes, (int, np.integer)) and not isinstance(num_nodes, bool)
    if num_nodes is not None and (not whole or num_nodes < 0):
        raise ValueError(f"num_nodes must be a non-negative integer, not {num_nodes!r}.")
    n = largest + 1 if num_nodes is None else int(num_nodes)
    if n == 0:
        raise ValueError("The graph is empty: give num_nodes, or at least one edge.")
    if least < 0 or largest >= n:
        bad = least if least < 0 else largest
        raise ValueError(f"edge_index holds node id {bad}, but ids must lie in 0..{n - 1}.")
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
    of_ids = source == "edge_index"
    named = f"{source} holds node id {n - 1:,}" if of_ids else f"{source} is {n:,}"
    relabel = (
        "ids must be 0..n-1 without gaps, so relabel them, as "
        "numpy.unique(edge_index, return_inverse=True) does."
    )
    raise ValueError(
        f"{named}, but a graph of {n:,} nodes and {m:,} edges needs {need / 2**30:,.0f} GB and "
        f"{free / 2**30:,.0f} GB are free: {relabel if of_ids else 'give a smaller one.'}"
    )


def check_weights(edge_weight: Any, m: int) -> Any | None:
    """The weights as they are, in whatever type of real numbers."""
    if edge_weight is None:
        return None
    check_plain("edge_weight", edge_weight)
    try:
        w = np.asarray(edge_weight)
    except ValueError:
        raise ValueError(f"edge_weight must have shape ({m},), one per edge.") from None
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


def repeated(a: int, b: int) -> NoReturn:
    raise ValueError(f"Edge ({a}, {b}) is listed more than once in this direction.")


def directions_differ(a: int, b: int, ahead: float, back: float) -> NoReturn:
    raise ValueError(
        f"Edge ({a}, {b}) has weight {ahead:g} but ({b}, {a}) has {back:g}: "
        "an undirected graph needs one weight for both directions."
    )


def check_repeats(xp: Any, u: Any, v: Any, n: int) -> None:
    """An error that names the first edge, by its ids, that one direction lists twice."""
    key = xp.sort(u * n + v)
    again = key[1:] == key[:-1]
    if bool(again.any()):  # synchronize!
        repeated(*divmod(int(key[int(xp.argmax(again))]), n))  # synchronize!
