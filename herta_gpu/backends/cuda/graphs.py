"""Graphs that live on the device: L_tilde, and edge lists that were there from the start."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from herta_gpu.backends.base import Array
from herta_gpu.backends.cuda import cugraph as cugraph_adapter
from herta_gpu.backends.cuda.device import DeviceLaplacian, segment_length
from herta_gpu.graph import Graph, read_only
from herta_gpu.plumbing.building import distinct
from herta_gpu.plumbing.checks import (
    check_edges,
    check_repeats,
    check_size,
    check_weights,
    directions_differ,
)

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

    def to_csr(self) -> Any:
        """L as a CSR matrix of cupyx.scipy.sparse, on the device, float64, caller's order."""
        return self._backend.laplacian_csr(self._backend.laplacian(self, "float64"), self.order)


def from_device_edges(
    backend: CUDABackend,
    edge_index: Any,
    num_nodes: int | None,
    edge_weight: Any,
    duplicates: str | None,
) -> Graph:
    """`Graph.from_edges` for arrays on the device; without cuGraph the host does the work."""
    edges = backend.asarray(edge_index)
    w = None if edge_weight is None else backend.asarray(edge_weight)
    if not cugraph_adapter.available() or edges.ndim != 2 or not edges.size:
        weights = None if w is None else backend.to_numpy(w)  # synchronize!
        edges = backend.to_numpy(edges)  # synchronize!
        return Graph.from_edges(edges, num_nodes, weights, duplicates)
    u, v, n = _checked(backend, edges, num_nodes, w)
    if duplicates == "error":
        check_repeats(backend.xp, u, v, n)
    if w is None and duplicates != "sum":
        u, v = _pairs_once(backend.xp, u, v, n)
    w = backend.xp.ones(u.shape[0]) if w is None else w.astype("float64", copy=False)
    keep = w > 0
    u, v, w = u[keep], v[keep], w[keep]  # synchronize!  how many
    loop = u == v
    loops = backend.xp.bincount(u[loop], weights=w[loop], minlength=n)  # synchronize!
    loops = backend.xp.where(loops > 0, loops, 1.0)
    u, v, w = u[~loop], v[~loop], w[~loop]  # synchronize!
    directed, once, components = cugraph_adapter.merged(backend.asarray, u, v, w, n)
    lo, hi, weights = _sorted(backend.xp, *once, n)
    _check_directions(backend, directed, (lo, hi, weights), n)
    return _built(backend, lo, hi, weights, loops, components)


def _checked(backend: CUDABackend, edges: Array, n: Any, w: Array | None) -> tuple[Any, Any, int]:
    """(u, v, number of nodes); the host checks the extremes for all."""
    if edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        check_edges(np.empty(edges.shape, edges.dtype), n)  # raises
    extremes = np.array([[int(edges.min())], [int(edges.max())]])  # synchronize!
    _, n, source = check_edges(extremes, n)
    check_size(n, 1, source)
    if w is not None and w.shape == edges.shape[1:]:
        positive = backend.xp.where(w > 0, w, w.max()).min()
        check_weights(np.array([float(x) for x in (w.min(), w.max(), positive)]), 3)  # synchronize!
    elif w is not None:
        check_weights(np.empty(w.shape), edges.shape[1])  # raises
    return edges[0].astype("int64"), edges[1].astype("int64"), n


def _pairs_once(xp: Any, u: Array, v: Array, n: int) -> tuple[Array, Array]:
    """(lo, hi) of each pair of nodes, once: edges without weights."""
    keys = distinct(xp, xp.sort(xp.minimum(u, v) * n + xp.maximum(u, v)))
    return keys // n, keys % n


def _sorted(xp: Any, u: Array, v: Array, w: Array, n: int) -> tuple[Array, Array, Array]:
    """The same edges with lo < hi, in the order of `Graph.edges`."""
    lo, hi = (f(u, v).astype("int64", copy=False) for f in (xp.minimum, xp.maximum))
    sort = xp.argsort(lo * n + hi)
    return lo[sort], hi[sort], w[sort]


def _check_directions(backend: CUDABackend, directed: Any, once: Any, n: int) -> None:
    """cuGraph keeps one of the weights of (u, v) and (v, u); here they must be the same."""
    xp, (u, v, w), (lo, hi, kept) = backend.xp, directed, once
    at = xp.searchsorted(lo * n + hi, xp.minimum(u, v) * n + xp.maximum(u, v))
    off = abs(w - kept[at]) - 1e-6 * kept[at]
    worst = int(xp.argmax(off)) if off.size else 0  # synchronize!
    if off.size and float(off[worst]) > 0:  # synchronize!
        a, b, x, y = (float(z[worst]) for z in (u, v, w, kept[at]))  # synchronize!
        ahead, back = (x, y) if a < b else (y, x)
        directions_differ(int(min(a, b)), int(max(a, b)), ahead, back)


def _built(
    backend: CUDABackend, lo: Array, hi: Array, weight: Array, loops: Array, components: int
) -> DeviceGraph:
    """CSR on the device from edges with lo < hi, sorted by (lo, hi)."""
    xp, n = backend.xp, loops.shape[0]
    rows, columns = xp.concatenate([hi, lo]), xp.concatenate([lo, hi])
    sort = xp.argsort(rows * n + columns)
    indptr = xp.zeros(n + 1, dtype="int64")
    indptr[1:] = xp.cumsum(xp.bincount(rows, minlength=n))  # synchronize!
    unweighted = bool((weight == 1).all())  # synchronize!
    held = {
        "indptr": indptr,
        "indices": columns[sort].astype("int32" if n < 2**31 else "int64"),
        "weights": None if unweighted else xp.concatenate([weight, weight])[sort],
    }
    off = _row_sums(backend, held)
    held["degree"] = off + loops
    held |= derived(backend, held, off, 1 / xp.sqrt(held["degree"]))
    return backend.adopt(held, n, num_components=components)


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
    ratio, length = sums * inv_sqrt_degree**2, xp.diff(indptr)
    segment = segment_length(indices.shape[0])
    rows, host = xp.flatnonzero(length > segment), backend.to_numpy  # synchronize!  few rows ...
    # The bound of `Graph.lambda_max_bound`, by a kernel: as array operations it would take four
    # arrays of an 8-byte number for every entry, more than the graph itself.
    pairs = backend.pair_bounds(indptr, indices, ratio)
    return {
        "inv_sqrt_degree": inv_sqrt_degree,
        "diagonal": ratio,
        "lambda_max": float(pairs.max()) * (1 + 1e-12),  # synchronize!
        "segments": backend.segments(host(rows), host(length[rows]), segment),  # ... are read
    }
