"""Orders of the nodes that keep neighbours close in memory.

The product with H reads, for each node, the rows of its neighbours.  Where these are far apart in
memory, every read misses the caches.  A community of nodes that is stored together fits a cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

Graph = Any  # a `herta_gpu.Graph`, whose module imports this one
COMMUNITY = 4096  # nodes of one at most: their rows of 64 float32 columns fill an L2 cache of 1 MB
WORTH = 0.2  # share of the edges that must lie within communities for this order to pay
LARGE = 1 << 16  # nodes from which on a block of columns does not fit the caches
_ROUNDS = 3  # rounds of label propagation: later ones move few nodes


def reverse_cuthill_mckee(graph: Graph) -> Any:
    """Nodes in the order of a breadth-first search, which gives a small bandwidth."""
    ones = np.ones(graph.indices.shape[0], dtype=np.int8)
    A = sp.csr_array((ones, graph.indices, graph.indptr), shape=(graph.num_nodes,) * 2)
    return sp.csgraph.reverse_cuthill_mckee(A, symmetric_mode=True).astype(np.int64)


def by_degree(graph: Graph) -> Any:
    """Nodes by falling degree."""
    return np.argsort(-np.diff(graph.indptr), kind="stable")


def by_community(graph: Graph, worth: float = 0.0) -> Any | None:
    """Nodes by community; None where less than `worth` of the edges lie within one.

    Label propagation: each node in turn takes the label that most of its neighbours have, unless
    that community is full.  A round costs about as much as H times a block of 64 columns.
    """
    try:
        from herta_gpu.backends.cpu.kernels.ordering import propagate
    except ImportError as error:
        raise ImportError(
            'Ordering by community needs numba: pip install "herta_gpu[fast]", or use "rcm".'
        ) from error
    n = graph.num_nodes
    labels = np.arange(n, dtype=graph.indices.dtype)
    sizes, counts = np.ones(n, dtype=np.int64), np.zeros(n, dtype=np.int32)
    share = 0.0
    for _ in range(_ROUNDS):
        inside = propagate(graph.indptr, graph.indices, labels, sizes, counts, COMMUNITY)
        share = inside / max(graph.indices.shape[0], 1)
        if share < 0.5 * worth:
            break  # later rounds will not bring it up to `worth`
    return np.argsort(labels, kind="stable") if share >= worth else None


def permuted(graph: Graph, p: Any) -> tuple[Any, Any, Any | None]:
    """(indptr, indices, weights) of the graph with node p[i] in row i, columns sorted."""
    inverse = np.empty_like(p)
    inverse[p] = np.arange(p.shape[0])
    degrees = np.diff(graph.indptr)[p]
    indptr = np.zeros(p.shape[0] + 1, dtype=np.int64)
    np.cumsum(degrees, out=indptr[1:])
    take = np.repeat(graph.indptr[p] - indptr[:-1], degrees)
    take += np.arange(take.shape[0])
    columns = inverse.astype(graph.indices.dtype)[graph.indices[take]]
    data = np.ones(take.shape[0], np.int8) if graph.weights is None else graph.weights[take]
    # A symmetric matrix is its own transpose, and transposing sorts the columns.
    A = sp.csc_array((data, columns, indptr), shape=(p.shape[0],) * 2).tocsr()
    indices = A.indices.astype(graph.indices.dtype, copy=False)
    return indptr, indices, None if graph.weights is None else A.data
