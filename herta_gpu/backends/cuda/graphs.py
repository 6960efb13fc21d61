"""Graphs that live on the device: L_tilde, and edge lists that were there from the start."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from herta_gpu.backends.base import Array
from herta_gpu.backends.cuda.device import DeviceLaplacian
from herta_gpu.graph import Graph, read_only
from herta_gpu.plumbing.building import NARROW, merge_edges
from herta_gpu.plumbing.checks import check_edges, check_size, check_weights

_AT_ONCE = 1 << 22  # entries of a matrix that are made together

if TYPE_CHECKING:
    from herta_gpu.backends.cuda.backend import CUDABackend


def _read_back(name: str) -> Any:
    """An array of the graph that comes to the host when it is first asked for."""

    def read(graph: DeviceGraph) -> Any:
        held = graph._held[name]
        return None if held is None else read_only(graph._backend.to_numpy(held))  # synchronize!

    return cached_property(read)


class DeviceGraph(Graph):
    """A graph made on the device; each of its arrays is read back when the host first asks."""

    _held: dict[str, Any]
    _backend: CUDABackend
    num_nodes = num_edges = 0

    def __init__(
        self, backend: CUDABackend, held: dict[str, Any], n: int, order: Any = None, **known: Any
    ) -> None:
        # The dataclass is frozen: its fields go in by the back door, the large ones later.
        sizes = {"num_nodes": n, "num_edges": held["indices"].shape[0] // 2}
        self.__dict__.update(sizes, _held=held, _backend=backend, order=order, **known)

    indptr = _read_back("indptr")
    indices = _read_back("indices")
    weights = _read_back("weights")
    degree = _read_back("degree")
    given_degree: Any = property(lambda graph: graph.degree)
    made_on = "cuda"

    def with_edges(self, keep: Any, factor: Any) -> Graph:
        """`Graph.with_edges`, put together on the device."""
        factors = self._backend.asarray(np.where(keep, factor, 0.0))
        return self._backend.sampled_graph(self, factors)


def from_device_edges(
    backend: CUDABackend, edge_index: Any, num_nodes: Any, edge_weight: Any, duplicates: str | None
) -> DeviceGraph:
    """`Graph.from_edges` for arrays on the device, which stay there."""
    xp = backend.xp
    if isinstance(edge_index, (tuple, list)):
        edge_index = xp.stack([backend.asarray(ends) for ends in edge_index])
    edges = backend.asarray(edge_index)
    w = None if edge_weight is None else backend.asarray(edge_weight)
    n = _check(backend, edges, num_nodes, w)
    w = xp.ones(edges.shape[1]) if w is None and duplicates == "sum" else w
    lo, hi, weight, loops = merge_edges(xp, edges.astype("int64"), w, n)
    rows, columns = xp.concatenate([hi, lo]), xp.concatenate([lo, hi])
    sort = xp.argsort(rows * n + columns)
    indptr = xp.zeros(n + 1, dtype="int64")
    indptr[1:] = xp.cumsum(xp.bincount(rows, minlength=n))  # synchronize!
    held = {
        "indptr": indptr,
        "indices": columns[sort].astype("int32" if n < NARROW else "int64"),
        "weights": None if weight is None else xp.concatenate([weight, weight])[sort],
    }
    sums = _row_sums(backend, held)
    held["degree"] = sums + (1.0 if loops is None else xp.where(loops > 0, loops, 1.0))
    held |= derived(backend, held, sums, 1 / xp.sqrt(held["degree"]))
    return backend.adopt(held, n)


def _check(backend: CUDABackend, edges: Array, n: Any, w: Array | None) -> int:
    """The number of nodes; the host checks the extremes for all."""
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        check_edges(np.empty(edges.shape, edges.dtype), n)  # raises
    ends = [[int(x) for x in (edges.min(), edges.max())]] if edges.size else []  # synchronize!
    _, n, source = check_edges(np.array(ends * 2, dtype=np.int64).reshape(2, -1), n)
    check_size(n, 1, source)
    if w is not None and w.shape != edges.shape[1:]:
        check_weights(np.empty(w.shape), edges.shape[1])  # raises
    if w is not None and w.size:
        positive = backend.xp.where(w > 0, w, w.max()).min()
        check_weights(np.array([float(x) for x in (w.min(), w.max(), positive)]), 3)  # synchronize!
    return int(n)


def loops_of(backend: CUDABackend, graph: Graph) -> Array:
    """(n,) the weights of the self-loops, on the device."""
    if not isinstance(graph, DeviceGraph):
        return backend.asarray(graph.degree - graph.loopless_degree)
    return backend.asarray(graph._held.get("degree", graph.degree)) - _row_sums(
        backend, graph._held
    )


def csr_of(backend: CUDABackend, L: Any, order: Any = None, loops: Array | None = None) -> Any:
    """L as a CSR matrix of CuPy, or A with these `loops`; `order` are the caller's nodes.

    Some rows are made at a time: beside the matrix itself that takes little.
    """
    xp, n, size = backend.xp, L.n, L.nnz + L.n
    if size >= 2**31:  # whether 64-bit indices work there is told differently
        raise ValueError(
            f"L has {size:,} entries, and a CSR matrix of CuPy holds at most {2**31 - 1:,}: "
            "take the arrays indptr, indices and weights of the graph, or products with H from "
            "SDDSolver."
        )
    s, data = L.inv_sqrt_degree, xp.empty(size, dtype=L.inv_sqrt_degree.dtype)
    indices = xp.full(size, -1, dtype="int32")
    cuts = xp.searchsorted(L.indptr, xp.arange(0, L.nnz + _AT_ONCE, _AT_ONCE))
    for first, last in pairwise(L.indptr[cuts.clip(0, n)].tolist()):  # synchronize!
        row = xp.searchsorted(L.indptr, xp.arange(first, last), side="right") - 1
        j = L.indices[first:last]
        place = xp.arange(first, last) + row + (j > row)
        values = -s[row] * s[j] if loops is None else xp.ones(last - first)
        indices[place] = j
        data[place] = values if L.weights is None else values * L.weights[first:last]
    at = xp.flatnonzero(indices < 0)  # of each row one place is left
    indices[at], data[at] = xp.arange(n), L.diagonal if loops is None else loops
    M = backend.csr_matrix(data, indices, L.indptr + xp.arange(n + 1), (n, n))
    if order is not None:
        order = backend.asarray(order)
        M = M[xp.argsort(order)]
        M = backend.csr_matrix(M.data, order[M.indices].astype("int32"), M.indptr, M.shape)
        M.sort_indices()
    return M


def _row_sums(backend: CUDABackend, held: dict[str, Any]) -> Array:
    """A 1, summed in a fixed order: CuPy's own sums by key use atomics."""
    xp = backend.xp
    if held["weights"] is None:
        return xp.diff(held["indptr"]).astype("float64")
    n, none = held["indptr"].shape[0] - 1, xp.zeros(0, dtype="int64")
    unit, m = xp.ones(n), held["indices"].shape[0] // 2
    arrays = (held["indptr"], held["indices"], held["weights"], unit, unit)
    L = DeviceLaplacian(n, *arrays, 0.0, segment_row=none, segment_rank=none, long_rows=none)
    return backend.filter_edges(L, xp.ones(m))[3]


def derived(
    backend: CUDABackend, held: dict[str, Any], sums: Array, inv_sqrt_degree: Array
) -> dict[str, Any]:
    """What a Laplacian needs beside the CSR arrays, from the row sums A 1 and D^-1/2."""
    xp, indptr, indices = backend.xp, held["indptr"], held["indices"]
    ratio = sums * inv_sqrt_degree**2
    # The bound of `Graph.lambda_max_bound`, by a kernel: as array operations it would take four
    # arrays of an 8-byte number for every entry, more than the graph itself.
    pairs = backend.pair_bounds(indptr, indices, ratio)
    return {
        "inv_sqrt_degree": inv_sqrt_degree,
        "diagonal": ratio,
        "lambda_max": float(pairs.max()) * (1 + 1e-12),  # synchronize!
        "segments": backend.segments(xp.diff(indptr), indices.shape[0]),  # synchronize!
    }
