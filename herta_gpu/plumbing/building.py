"""From an edge list to the arrays of a graph: rows sorted, with each neighbour once.

A large list is read twice, a chunk at a time: to count the entries of each row, and to put them
there.  Beside the result little more than a chunk is held.  Small lists, and machines without
numba, take NumPy's sorts of one key per edge, which take several times the memory of the list; the
results are the same, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.plumbing.checks import (
    CHUNK,
    KEY_BYTES,
    check_edges,
    check_size,
    check_weights,
    directions_differ,
)
from herta_gpu.plumbing.files import GraphWriter
from herta_gpu.plumbing.machine import host_memory, num_threads

Arrays = tuple[Any, Any, Any, Any]  # indptr, indices, weights and degree as `Graph` takes them
COMPILED = 1 << 20  # nodes and listed edges from which compiled code pays for its start
NARROW = 2**31  # nodes from which their ids take 64 bits
_ROWS = 1 << 20  # rows whose weights are added up together


def build(
    edge_index: Any, num_nodes: Any, edge_weight: Any, duplicates: str | None, folder: Any = None
) -> Arrays | None:
    """What `Graph.from_edges` promises, in memory; or in a folder of files, and None here."""
    edges, n, source = check_edges(edge_index, num_nodes)
    m = edges.shape[1]
    weighted = edge_weight is not None or duplicates == "sum"
    fast = worth_compiling(n + m)
    # A node has 8 bytes of indptr, 8 of degrees, and up to 24 in what is derived from them.  Rows
    # that go to a folder are made in as much memory as there is.
    node, edge = ((40, 24) if weighted else (32, 8)) if fast else KEY_BYTES
    check_size(n, m, source, node, 0 if fast and folder is not None else edge)
    w = check_weights(edge_weight, m)
    w = np.broadcast_to(1.0, m) if w is None and weighted else w
    writer = None if folder is None else GraphWriter(folder, n, 2 * m, weighted)
    if not fast:
        arrays = _with_scipy(edges, w, n)
        if writer is None:
            return arrays
        writer.write(*arrays)
        return None
    with nullcontext() if writer is None else writer:
        arrays = _with_kernels(edges, w, n, writer)
    return arrays if writer is None else None


def worth_compiling(size: int) -> bool:
    """Whether compiled loops over so many nodes and edges are there, and pay for their start."""
    wanted = size >= COMPILED and os.environ.get("HERTA_FAST", "1") != "0"
    return wanted and find_spec("numba") is not None


# ---- in two passes, compiled -------------------------------------------------------------
class _Rows:
    """How many entries each row has before any are merged, and how they get there."""

    def __init__(self, pool: ThreadPoolExecutor, edges: Any, w: Any, n: int) -> None:
        from herta_gpu.backends.cpu.kernels import building as kernels

        self.pool, self.kernels, self.edges, self.w = pool, kernels, edges, w
        self.threads, self.ids = num_threads(), np.uint32 if n < NARROW else np.int64
        self.indptr = np.zeros(n + 1, dtype=np.int64)
        ranges = [n * t // self.threads for t in range(self.threads + 1)]
        for ends, part in self._chunks():
            self.each(partial(kernels.count, ends, part), ranges, self.indptr)
        self.total = int(kernels.starts(self.indptr))

    def _chunks(self) -> Iterator[tuple[Any, Any]]:
        """Ends and weights of the listed edges in few types: each is compiled for."""
        for a in range(0, self.edges.shape[1], CHUNK):
            ends = np.empty((2, min(CHUNK, self.edges.shape[1] - a)), self.ids)
            chunk = self.edges[:, a : a + CHUNK]
            list(self.pool.map(partial(np.copyto, casting="unsafe"), ends, chunk))
            yield ends, None if self.w is None else self.w[a : a + CHUNK].astype(np.float64)

    def each(self, job: Callable[..., Any], cuts: list[int], *rest: Any) -> list[Any]:
        """job(first, last, *rest) of the ranges between the cuts, on all threads."""
        return list(self.pool.map(lambda a, b: job(a, b, *rest), cuts[:-1], cuts[1:]))

    def start(self, row: int) -> int:
        """Where a row that is not filled yet starts."""
        return int(self.indptr[row + 1]) if row + 1 < self.indptr.shape[0] else self.total

    def cuts(self, first: int, last: int, parts: int) -> list[int]:
        """Rows first..last cut into so many ranges of about equal entries, or fewer."""
        a, b = self.start(first), self.start(last)
        wanted = [a + (b - a) * t // parts for t in range(1, parts)]
        inner = first + np.searchsorted(self.indptr[first + 1 : last + 1], wanted)
        return sorted({first, *inner.tolist(), last})

    def fill(self, first: int, last: int, codes: Any, weights: Any, loops: Any) -> None:
        """Rows first..last into the arrays given; afterwards indptr has their ends."""
        base, ranges = self.start(first), self.cuts(first, last, self.threads)
        for ends, part in self._chunks():
            job = partial(self.kernels.scatter, ends, part)
            self.each(job, ranges, self.indptr, base, codes, weights, loops)

    def merge(self, first: int, last: int, codes: Any, weights: Any, loops: Any) -> tuple[int, int]:
        """Fill rows first..last and merge them to the front of the arrays given.

        Gives how many entries there are, and how many have a weight other than 1.
        """
        kernels, indptr, base = self.kernels, self.indptr, self.start(first)
        ranges = self.cuts(first, last, 8 * self.threads)
        begin = {row: self.start(row) for row in ranges}
        self.fill(first, last, codes, weights, loops)
        clash = {row: np.zeros(2) for row in ranges}

        def merged(a: int, b: int) -> Any:
            if weights is None:
                return kernels.merge(indptr, base, codes, a, b, begin[a]), 0, False
            rows = (codes, weights, a, b, begin[a], clash[a])
            return kernels.merge_weighted(indptr, base, *rows)

        before, others = int(indptr[first]), 0
        at = before
        for (a, b), (end, other, wrong) in zip(pairwise(ranges), self.each(merged, ranges)):
            if wrong:
                directions_differ(end, other, *clash[a])
            for x in (codes,) if weights is None else (codes, weights):
                kernels.move(x, at - before, begin[a] - base, end - base)
            indptr[a + 1 : b + 1] += at - begin[a]
            at, others = at + end - begin[a], others + other
        return at - before, others


def _with_kernels(edges: Any, w: Any, n: int, writer: GraphWriter | None) -> Arrays:
    """The arrays of a graph; with a `writer`, a group of rows at a time into its files."""
    with ThreadPoolExecutor(num_threads()) as pool:
        rows = _Rows(pool, edges, w, n)
        per_entry = rows.ids().itemsize + (0 if w is None else 8)
        # Rows for files take half of the free memory: the rest is for pages on their way there.
        room = max(host_memory() // 2, CHUNK * per_entry)
        groups = rows.cuts(0, n, 1 if writer is None else -(-rows.total * per_entry // room) or 1)
        size = max(rows.start(b) - rows.start(a) for a, b in pairwise(groups))
        indices = np.empty(size, np.int32 if n < NARROW else np.int64)
        weights, loops = (None, None) if w is None else (np.empty(size), np.zeros(n))
        codes, others, looped = indices.view(rows.ids), 0, False
        for a, b in pairwise(groups):
            length, other = rows.merge(a, b, codes, weights, loops)
            others += other
            if loops is not None and weights is not None:
                looped |= _add_loops(weights, rows.indptr[a : b + 1], loops[a:b])
            if writer is not None:
                writer.append(indices[:length], None if weights is None else weights[:length])
    degree = loops if others or looped else None
    if writer is not None:
        writer.finish(rows.indptr, degree, weighted=others > 0)
        length = 0
    del codes  # nobody looks at the rest, which goes back to the system
    indices.resize(length, refcheck=False)
    if weights is not None:
        weights.resize(length, refcheck=False)
    return rows.indptr, indices, weights if others else None, degree


def _add_loops(weights: Any, indptr: Any, degree: Any) -> bool:
    """Self-loops become degrees, in place; whether one of them has a weight other than 1."""
    degree[degree == 0] = 1.0
    looped = bool((degree != 1).any())
    row_sums(weights, indptr, degree)
    return looped


def row_sums(values: Any, indptr: Any, out: Any) -> Any:
    """`out` plus the sum of the values of each row; they begin with those of the first row."""
    for a in range(0, out.shape[0], _ROWS):
        at = indptr[a : a + _ROWS + 1] - indptr[0]
        filled = np.diff(at) > 0
        if filled.any():
            sums = np.add.reduceat(values[: at[-1]], at[:-1][filled])
            out[a : a + _ROWS][filled] += sums
    return out


# ---- by sorted keys, with NumPy or CuPy --------------------------------------------------
def _with_scipy(edges: Any, w: Any, n: int) -> Arrays:
    lo, hi, w, degree = merge_edges(np, edges.astype(np.int64, copy=False), w, n)
    indptr, indices, weights = of_edges(lo, hi, w, n)
    if degree is None:
        return indptr, indices, None, None
    every = np.ones(indices.shape[0]) if weights is None else weights
    looped = _add_loops(every, indptr, degree)
    return indptr, indices, weights, degree if weights is not None or looped else None


def merge_edges(xp: Any, edges: Any, w: Any, n: int) -> tuple[Any, Any, Any, Any]:
    """(lo, hi, weight) of each undirected edge once, sorted, and (n,) the weights of self-loops.

    No weights if all are 1; the loops are None where no weights are given.
    """
    u, v = edges
    if w is None:
        keys = distinct(xp, xp.sort(edge_keys(u, v, n, xp)[u != v]))
        return keys // n, keys % n, None, None
    w, loop = w.astype(np.float64, copy=False), u == v
    loops = xp.bincount(u[loop], weights=w[loop], minlength=n).astype(np.float64, copy=False)
    kept = ~loop & (w > 0)
    u, v, w = u[kept], v[kept], w[kept]  # synchronize!
    key, back = edge_keys(u, v, n, xp), u > v
    sort = xp.argsort(back, kind="stable")  # by edge and direction, in the order of the list
    sort = sort[xp.argsort(key[sort], kind="stable")]
    key, back, w = key[sort], back[sort], w[sort]
    new = _changes(xp, key) | _changes(xp, back)
    first = xp.flatnonzero(new)  # synchronize!
    if xp is np:  # one by one, as the compiled loops add
        w = np.bincount(np.cumsum(new) - 1, weights=w)
    else:
        w = _run_sums(xp, xp.cumsum(new), w)[first]
    key = key[first]
    both = xp.flatnonzero(key[1:] == key[:-1])  # synchronize!
    differ = abs(w[both] - w[both + 1]) > 1e-6 * w[both + 1]
    if bool(differ.any()):  # synchronize!
        at = int(both[int(differ.argmax())])
        directions_differ(*divmod(int(key[at]), n), float(w[at]), float(w[at + 1]))
    one = _changes(xp, key)
    key, w = key[one], w[one]  # synchronize!
    return key // n, key % n, None if bool((w == 1).all()) else w, loops


def edge_keys(u: Any, v: Any, n: int, xp: Any = np) -> Any:
    """lo * n + hi of each pair: one int64 per edge, the same for both directions."""
    return xp.minimum(u, v).astype(np.int64) * n + xp.maximum(u, v)


def distinct(xp: Any, keys: Any) -> Any:
    """Each of the sorted keys once."""
    return keys[_changes(xp, keys)]  # synchronize!


def _run_sums(xp: Any, run: Any, w: Any) -> Any:
    """At the first of each run its sum, by a tree: CuPy's reduceat subtracts sums of all before."""
    step, longest = 1, int(xp.bincount(run).max()) if run.size else 0  # synchronize!
    while step < longest:
        same = run[step:] == run[:-step]
        w[:-step] += xp.where(same, w[step:], 0.0)
        step *= 2
    return w


def _changes(xp: Any, keys: Any) -> Any:
    """Whether each of the keys is another one than that before."""
    new = xp.ones(keys.shape[0], dtype=bool)
    new[1:] = keys[1:] != keys[:-1]
    return new


def of_edges(lo: Any, hi: Any, weight: Any, n: int) -> tuple[Any, Any, Any]:
    """CSR from edges with lo < hi; columns come out sorted."""
    data = np.ones(hi.shape[0], dtype=np.int8) if weight is None else weight
    upper = sp.coo_array((data, (lo, hi)), shape=(n, n)).tocsr()
    both = upper + upper.T.tocsr()
    both.sort_indices()
    indices = both.indices.astype(np.int32 if n < NARROW else np.int64, copy=False)
    return both.indptr.astype(np.int64), indices, None if weight is None else both.data


# ---- orders that keep neighbours close in memory -----------------------------------------
# The product with H reads, for each node, the rows of its neighbours.  Where these are far apart in
# memory, every read misses the caches.  A community of nodes that is stored together fits a cache.
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
    n, entries, of_ids = p.shape[0], graph.indices.shape[0], graph.indices.dtype
    if not worth_compiling(n + entries):
        data = np.ones(entries, np.int8) if graph.weights is None else graph.weights
        A = sp.csr_array((data, graph.indices, graph.indptr), shape=(n, n))[p][:, p]
        A.sort_indices()
        weights = None if graph.weights is None else A.data
        return A.indptr.astype(np.int64), A.indices.astype(of_ids, copy=False), weights
    from herta_gpu.backends.cpu.kernels.ordering import permute

    # Row by row on all threads: nothing is held beside the result.
    indptr = np.concatenate([[0], np.cumsum(np.diff(graph.indptr)[p])])
    inverse = np.empty(n, dtype=of_ids)
    inverse[p] = np.arange(n, dtype=of_ids)
    indices = np.empty_like(graph.indices)
    weights = None if graph.weights is None else np.empty_like(graph.weights)
    parts = 8 * num_threads()
    wanted = [entries * t // parts for t in range(parts)]
    cuts = [*np.searchsorted(indptr, wanted).tolist(), n]
    given = (graph.indptr, graph.indices, graph.weights, p, inverse, indptr, indices, weights)
    with ThreadPoolExecutor(num_threads()) as pool:
        list(pool.map(lambda a, b: permute(*given, a, b), cuts[:-1], cuts[1:]))
    return indptr, indices, weights
