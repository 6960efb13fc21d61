"""What the two ends of every edge have in common: weights of edges that no label enters.

They are part of the data: what is fitted on the graph that they make (`Graph.reweighted`) is
certified, left out and calibrated as on any other.  They take edges back that an attacker added
between unlike nodes, and cost accuracy where linked nodes are unlike: choose on validation nodes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.backends import get_backend
from herta_gpu.graph import Graph, check_whole
from herta_gpu.plumbing.checks import check_choice, check_rows
from herta_gpu.plumbing.interop import as_matrix, of_scipy, on_device, to_host

_AT_ONCE = 1 << 21  # numbers of X that are gathered together


def similarity(graph: Graph, X: Any, kind: str = "jaccard") -> Any:
    """(m,) how alike the ends of each edge are, from 0 to 1, in the order of `Graph.edges`.

    Parameters
    ----------
    graph : Graph
    X : array or SciPy sparse matrix, (n, d)
    kind : {"jaccard", "cosine"}
        "jaccard": columns in which both ends have something, by those in which either has; numbers
        other than 0 count alike, as words that are there.  "cosine": of the angle between the two
        rows, 0 where it is obtuse.  A row without anything is like no other.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu import Graph, similarity
    >>> path = Graph.from_edges([[0, 1, 2], [1, 2, 3]])
    >>> words = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 0], [1, 0, 0]])
    >>> weight = similarity(path, words)
    >>> weight.round(2).tolist()
    [0.67, 0.33, 0.0]
    >>> path.reweighted(np.minimum(1, 2 * weight))
    Graph(4 nodes, 2 edges, weighted, 1 isolated node, 2 components)
    """
    check_whole(graph, "similarity")
    check_choice("kind", kind, ("jaccard", "cosine"))
    backend = get_backend("cuda" if on_device(X) else "cpu")
    X = as_matrix(to_host(of_scipy(X), backend), backend)
    check_rows("X", X, graph)
    if X.shape[1] == 0:
        raise ValueError("X has no columns: give at least one feature.")
    lo, hi, _ = graph.edges()
    found = np.zeros(lo.shape[0])
    for part in _parts(X, lo, hi):
        a, b = (_rows(X[ends[part]], kind) for ends in (lo, hi))
        both, one, other = ((x * y).sum(axis=1) for x, y in ((a, b), (a, a), (b, b)))
        size = one + other - both if kind == "jaccard" else np.sqrt(one * other)
        found[part] = np.divide(both, size, out=np.zeros(both.shape), where=size > 0)
    return found.clip(0.0, 1.0)  # cosines of equal rows are 1 up to rounding


def _parts(X: Any, lo: Any, hi: Any) -> list[slice]:
    """Runs of edges whose rows of X are few enough to be gathered together, an edge at least."""
    sparse = sp.issparse(X)
    width = np.diff(X.indptr).astype(np.int64) if sparse else np.full(X.shape[0], X.shape[1])
    run = np.cumsum(width[lo] + width[hi]) // _AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(run)) + 1).tolist(), lo.shape[0]]
    return [slice(a, b) for a, b in pairwise(cuts)]


def _rows(A: Any, kind: str) -> Any:
    """Rows in float64: as zeros and ones, or in units in which no square is lost."""
    if kind == "jaccard":
        return (A != 0).astype(np.float64)
    largest = abs(A).max(axis=1).astype(np.float64)
    largest = largest.toarray() if sp.issparse(A) else largest
    return sp.diags_array(np.ldexp(1.0, -np.frexp(largest)[1].clip(min=-1023))) @ A
