"""Orders of the nodes that keep neighbours close in memory.

The product with H reads, for each node, the rows of its neighbours.  Where these are far apart in
memory, every read misses the caches.  A community of nodes that is stored together fits a cache.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.plumbing.building import worth_compiling
from herta_gpu.plumbing.machine import num_threads

Graph = Any  # a `herta_gpu.Graph`, which is above this module
COMMUNITY = 4096  # nodes at most: their rows of 64 float32 columns are 1 MB, an L2 cache
WORTH = 0.2  # share of the edges within communities from which storing them together pays
LARGE = 1 << 16  # nodes from which a block does not fit the caches anyway
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
    sizes, counts = np.ones(n, dtype=np.int32), np.zeros(n, dtype=np.int32)
    share = 0.0
    for _ in range(_ROUNDS):
        inside = propagate(graph.indptr, graph.indices, labels, sizes, counts, COMMUNITY)
        share = inside / max(graph.indices.shape[0], 1)
        if share < 0.5 * worth:
            break  # it will not come to anything
    del sizes, counts  # the sort needs the room
    return np.argsort(labels, kind="stable") if share >= worth else None


def components(graph: Graph) -> tuple[int, Any]:
    """How many connected components there are, and of each node a number that is its own's."""
    n = graph.num_nodes
    if worth_compiling(n + graph.indices.shape[0]):
        from herta_gpu.backends.cpu.kernels.ordering import join

        label = np.arange(n, dtype=graph.indices.dtype)
        return int(join(graph.indptr, graph.indices, label)), label
    ones = np.ones(graph.indices.shape[0])
    A = sp.csr_array((ones, graph.indices, graph.indptr), shape=(n, n))
    count, label = sp.csgraph.connected_components(A, directed=False)
    return int(count), label


def permuted(graph: Graph, p: Any) -> tuple[Any, Any, Any | None]:
    """(indptr, indices, weights) of the graph with node p[i] in row i, columns sorted."""
    indptr = np.zeros(p.shape[0] + 1, dtype=np.int64)
    np.take(np.diff(graph.indptr), p, out=indptr[1:])
    np.cumsum(indptr[1:], out=indptr[1:])
    inverse = np.empty(p.shape[0], dtype=graph.indices.dtype)
    inverse[p] = np.arange(p.shape[0], dtype=inverse.dtype)
    if worth_compiling(p.shape[0] + graph.indices.shape[0]):
        return indptr, *_permuted_rows(graph, p, inverse, indptr)
    take = np.repeat(graph.indptr[p] - indptr[:-1], np.diff(indptr))
    take += np.arange(take.shape[0])
    columns = inverse[graph.indices[take]]
    data = np.ones(take.shape[0], np.int8) if graph.weights is None else graph.weights[take]
    # A symmetric matrix is its own transpose, and transposing sorts the columns.
    A = sp.csc_array((data, columns, indptr), shape=(p.shape[0],) * 2).tocsr()
    indices = A.indices.astype(graph.indices.dtype, copy=False)
    return indptr, indices, None if graph.weights is None else A.data


def _permuted_rows(graph: Graph, p: Any, inverse: Any, indptr: Any) -> tuple[Any, Any]:
    """The same, row by row on all threads: nothing is held beside the result."""
    from herta_gpu.backends.cpu.kernels.ordering import permute

    indices = np.empty_like(graph.indices)
    weights = None if graph.weights is None else np.empty_like(graph.weights)
    parts = 8 * num_threads()
    wanted = [indices.shape[0] * t // parts for t in range(parts)]
    cuts = [*np.searchsorted(indptr, wanted).tolist(), p.shape[0]]
    given = (graph.indptr, graph.indices, graph.weights, p, inverse, indptr, indices, weights)
    with ThreadPoolExecutor(num_threads()) as pool:
        list(pool.map(lambda a, b: permute(*given, a, b), cuts[:-1], cuts[1:]))
    return indices, weights
