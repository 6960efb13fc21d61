"""From an edge list to a graph: CSR, degrees, and everything the Laplacian needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from herta_gpu.plumbing.interop import on_device
from herta_gpu.plumbing.machine import host_memory
from herta_gpu.plumbing.ordering import (
    LARGE,
    WORTH,
    by_community,
    by_degree,
    permuted,
    reverse_cuthill_mckee,
)
from herta_gpu.plumbing.validation import check_choice, check_plain

_GATHERED = 1 << 20  # neighbours looked at together
_TOP = 1 << 12  # nodes that usually settle the bound of lambda_max
_QUICK = 10**6  # edges up to which `repr` looks for components
_NODE_BYTES, _EDGE_BYTES = 48, 40  # held while a graph is made, at least
_MOST_NODES = 3_037_000_499  # pairs of them are numbered by int64
Edges = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64] | None]


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """An undirected graph with self-loops, as the paper assumes it (Section 4).

    Stored once: the CSR arrays of A without self-loops, and the degrees D *with* them.  The
    Laplacian is L = D^-1/2 (diag(A 1) - A) D^-1/2; for a graph made by `from_edges` this is
    L_hat = I - D^-1/2 (A + self-loops) D^-1/2.  The incidence matrix B_hat is never stored.

    Examples
    --------
    >>> from herta_gpu import Graph
    >>> g = Graph.from_edges([[0, 1, 2], [1, 2, 0]], num_nodes=4)
    >>> g
    Graph(4 nodes, 3 edges, unweighted, 1 isolated node, 2 components)
    >>> g.to_csr().toarray().round(2).tolist()[3]
    [0.0, 0.0, 0.0, 0.0]
    """

    indptr: NDArray[np.int64]  # (n + 1,)
    indices: NDArray[Any]  # (2m,) int32, or int64 from 2^31 nodes on
    weights: NDArray[np.float64] | None  # (2m,); None when every weight is 1
    degree: NDArray[np.float64]  # (n,) D, self-loops included
    order: NDArray[np.int64] | None = None  # row i holds the caller's node order[i]

    @classmethod
    def from_edges(
        cls,
        edge_index: ArrayLike,
        num_nodes: int | None = None,
        edge_weight: Any = None,
        duplicates: str | None = None,
    ) -> Graph:
        """Build a graph from (2, m) node ids, in any direction and order.

        Without weights every pair is one edge of weight 1, in whichever directions and however
        often it is listed.  With weights, repeats of one direction add up; (u, v) and (v, u) of
        equal weight are one edge, and of different weight an error.  Self-loops follow the same
        rule, missing ones get weight 1, and edges of weight 0 are dropped.

        Parameters
        ----------
        edge_index : array of ints, shape (2, m)
        num_nodes : int, optional
            Needed when the last nodes have no edge; by default the largest id plus one.
        edge_weight : array of m non-negative numbers, optional
        duplicates : {None, "sum", "error"}
            None is the rule above.  "sum" counts the repeats of an edge without weights as its
            weight.  "error" refuses an edge that is listed twice in one direction.

        Notes
        -----
        PyG's `to_undirected` adds the weights of both directions: of an edge that was listed in
        both, each direction has twice its weight afterwards, and so has the edge here.  Its edges
        without weights need no such step here.

        Arrays on a GPU stay there if cuGraph is installed, which then merges the edges.

        Examples
        --------
        >>> from herta_gpu import Graph
        >>> listed = [[0, 0, 1, 1], [1, 1, 0, 2]]  # 0-1 twice in one direction, once in the other
        >>> Graph.from_edges(listed)
        Graph(3 nodes, 2 edges, unweighted)
        >>> Graph.from_edges(listed, edge_weight=[0.5, 1.5, 2.0, 1.0]).edges()[2].tolist()
        [2.0, 1.0]
        >>> Graph.from_edges(listed, duplicates="error")
        Traceback (most recent call last):
        ValueError: Edge (0, 1) is listed more than once in this direction.
        """
        check_choice("duplicates", duplicates, (None, "sum", "error"))
        if on_device(edge_index):
            from herta_gpu.backends import get_backend

            device: Any = get_backend("cuda")
            return device.graph_from_edges(edge_index, num_nodes, edge_weight, duplicates)
        u, v, n = check_edges(edge_index, num_nodes)
        w = check_weights(edge_weight, u.shape[0])
        if duplicates == "error":
            check_repeats(np, u, v, n)
        if w is None and duplicates != "sum":
            return graph_of_keys(edge_keys(u, v, n)[u != v], n)
        w = np.ones(u.shape[0]) if w is None else w
        keep = w > 0
        u, v, w = u[keep], v[keep], w[keep]
        loop = u == v
        loops = np.bincount(u[loop], weights=w[loop], minlength=n)
        loops = np.where(loops > 0, loops, 1.0)
        if loop.any():
            u, v, w = u[~loop], v[~loop], w[~loop]
        lo, hi, weight = _merged(u, v, w, n)
        return _from_unique(lo, hi, weight, n, loops=loops)

    @classmethod
    def from_cugraph(cls, G: Any, num_nodes: int | None = None) -> Graph:
        """The graph of an undirected ``cugraph.Graph`` with vertex ids 0..num_nodes-1."""
        from herta_gpu.backends.cuda.cugraph import from_cugraph

        return from_cugraph(G, num_nodes)

    def to_cugraph(self) -> Any:
        """This graph as a ``cugraph.Graph``; nodes without an edge are not in it."""
        from herta_gpu.backends.cuda.cugraph import to_cugraph

        return to_cugraph(self)

    @property
    def num_nodes(self) -> int:
        return self.indptr.shape[0] - 1

    @property
    def num_edges(self) -> int:
        """Edges without self-loops, each counted once."""
        return self.indices.shape[0] // 2

    @cached_property
    def loopless_degree(self) -> NDArray[np.float64]:
        """A 1: the degrees without self-loops (in L_tilde, those of the sampled edges)."""
        if self.weights is None:
            return np.diff(self.indptr).astype(np.float64)
        return _row_sums(self.weights, self.indptr)

    @property
    def num_isolated(self) -> int:
        return int(np.count_nonzero(np.diff(self.indptr) == 0))

    @cached_property
    def num_components(self) -> int:
        """Connected components, isolated nodes included."""
        return int(sp.csgraph.connected_components(self._adjacency_off(), directed=False)[0])

    def connected_to(self, rows: Any) -> NDArray[np.bool_]:
        """Which stored rows are in a component with one of `rows`; H^-1 mixes no others in."""
        _, label = sp.csgraph.connected_components(self._adjacency_off(), directed=False)
        return np.isin(label, np.unique(label[rows]))

    def edges(self) -> Edges:
        """(u, v, weight) of each edge once, without self-loops; weight is None if all are 1."""
        row = np.repeat(np.arange(self.num_nodes), np.diff(self.indptr))
        upper = self.indices > row
        lo, hi = row[upper], self.indices[upper].astype(np.int64)
        weight = None if self.weights is None else self.weights[upper]
        if self.order is None:
            return lo, hi, weight
        return self.order[lo], self.order[hi], weight

    def to_csr(self) -> Any:
        """L_hat (of a sampled graph L_tilde) as a CSR matrix, float64, in the caller's order.

        SciPy's; of a graph that was made on a GPU, one of ``cupyx.scipy.sparse`` there.
        """
        s = sp.diags_array(1.0 / np.sqrt(self.degree))
        L = s @ (sp.diags_array(self.loopless_degree) - self._adjacency_off()) @ s
        return self._callers_order(L)

    def adjacency(self) -> Any:
        """A with self-loops as a SciPy CSR matrix, float64, in the caller's order."""
        return self._callers_order(
            self._adjacency_off() + sp.diags_array(self.degree - self.loopless_degree)
        )

    @cached_property
    def lambda_max_bound(self) -> float:
        """A proven bound of the largest eigenvalue: max of dt_u/d_u + dt_v/d_v over the edges.

        It is the largest row sum of |W^1/2 B D^-1 B^T W^1/2| up to a similarity, dt the degrees
        without self-loops; below 2 for L_hat, and valid for L_tilde, whose diagonal is not 1.
        """
        if self.num_edges == 0:
            return 0.0
        ratio = self.loopless_degree / self.degree
        if self.num_nodes > 2 * _TOP:
            top = np.argpartition(ratio, self.num_nodes - _TOP)[-_TOP:]
            most = self._largest_sum(ratio, np.sort(top))
            if most >= 2 * ratio[top].min():  # no edge between other nodes can have more
                return most * (1 + 1e-12)
        return self._largest_sum(ratio, np.arange(self.num_nodes)) * (1 + 1e-12)

    def _largest_sum(self, x: NDArray[np.float64], rows: NDArray[np.int64]) -> float:
        """The largest x_u + x_v over the edges of these rows."""
        starts, lengths = self.indptr[rows], self.indptr[rows + 1] - self.indptr[rows]
        rows, starts, lengths = (a[lengths > 0] for a in (rows, starts, lengths))
        ends = np.cumsum(lengths)
        cuts = np.unique(np.searchsorted(ends, np.arange(0, ends[-1], _GATHERED))).tolist()
        most = 0.0
        for a, b in pairwise([*cuts, rows.shape[0]]):
            firsts = ends[a:b] - lengths[a:b]
            at = np.arange(firsts[0], ends[b - 1]) + np.repeat(starts[a:b] - firsts, lengths[a:b])
            largest = np.maximum.reduceat(x[self.indices[at]], firsts - firsts[0])
            most = max(most, float((x[rows[a:b]] + largest).max()))
        return most

    def reordered(self, method: str = "rcm") -> Graph:
        """The same graph, stored in an order that keeps neighbours close in memory.

        Invisible to the caller: node ids, X, y and results keep the caller's order.

        Parameters
        ----------
        method : {"rcm", "degree", "communities"}
            Reverse Cuthill-McKee, nodes by falling degree, or by community (needs numba; the
            fastest to find, and the best on large real graphs).
        """
        if method == "rcm":
            p = reverse_cuthill_mckee(self)
        elif method == "degree":
            p = by_degree(self)
        elif method == "communities":
            p = by_community(self)
        else:
            raise ValueError(f'method must be "rcm", "degree" or "communities", not {method!r}.')
        return self._permuted(p)

    def _permuted(self, p: NDArray[np.int64]) -> Graph:
        """The same graph with node p[i] in row i."""
        order = p if self.order is None else self.order[p]
        return Graph(*permuted(self, p), self.degree[p], order)

    def in_local_order(self) -> Graph:
        """This graph stored by community if it is large and that pays; else itself."""
        if self.num_nodes < LARGE or self.order is not None:
            return self
        p = by_community(self, WORTH)
        return self if p is None else self._permuted(p)

    def with_edges(self, keep: NDArray[np.bool_], factor: NDArray[np.float64]) -> Graph:
        """The edges `keep` of `edges`, weights times `factor`, with this graph's degrees kept."""
        row = np.repeat(np.arange(self.num_nodes), np.diff(self.indptr))
        upper = self.indices > row
        lo, hi = row[upper][keep], self.indices[upper][keep].astype(np.int64)
        weight = factor[keep] if self.weights is None else self.weights[upper][keep] * factor[keep]
        return _from_unique(lo, hi, weight, self.num_nodes, degree=self.degree, order=self.order)

    def inverse_order(self) -> NDArray[np.int64] | None:
        """The row that holds each of the caller's nodes."""
        if self.order is None:
            return None
        inverse = np.empty_like(self.order)
        inverse[self.order] = np.arange(self.order.shape[0])
        return inverse

    def _adjacency_off(self) -> Any:
        data = np.ones(self.indices.shape[0]) if self.weights is None else self.weights
        n = self.num_nodes
        return sp.csr_array((data, self.indices, self.indptr), shape=(n, n))

    def _callers_order(self, M: Any) -> Any:
        M = sp.csr_array(M)
        inverse = self.inverse_order()
        if inverse is not None:
            M = M[inverse][:, inverse]
        M.sort_indices()
        return M

    def __repr__(self) -> str:
        parts = [
            f"{self.num_nodes:,} nodes",
            f"{self.num_edges:,} edges",
            "unweighted" if self.weights is None else "weighted",
        ]
        if self.num_isolated:
            parts.append(f"{self.num_isolated:,} isolated node" + "s" * (self.num_isolated > 1))
        if self.num_edges <= _QUICK and self.num_components > 1:
            parts.append(f"{self.num_components:,} components")
        return f"Graph({', '.join(parts)})"


def check_graph(graph: Any) -> None:
    if not isinstance(graph, Graph):
        raise TypeError(
            f"graph must be a herta_gpu.Graph, not {type(graph).__name__}: use Graph.from_edges."
        )


def check_edges(edge_index: Any, num_nodes: int | None) -> tuple[Any, Any, int]:
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
    # The maximum of unsigned ids and -1 would be a float.
    largest, least = (int(edges.max()), int(edges.min())) if edges.size else (-1, 0)
    whole = isinstance(num_nodes, (int, np.integer)) and not isinstance(num_nodes, bool)
    if num_nodes is not None and (not whole or num_nodes < 0):
        raise ValueError(f"num_nodes must be a non-negative integer, not {num_nodes!r}.")
    n = largest + 1 if num_nodes is None else int(num_nodes)
    if n == 0:
        raise ValueError("The graph is empty: give num_nodes, or at least one edge.")
    if least < 0 or largest >= n:
        bad = least if least < 0 else largest
        raise ValueError(f"edge_index holds node id {bad}, but ids must lie in 0..{n - 1}.")
    check_size(n, edges.shape[1], "edge_index" if num_nodes is None else "num_nodes")
    edges = edges.astype(np.int64, copy=False)
    return edges[0], edges[1], n


def check_size(n: int, m: int, source: str) -> None:
    """A graph that cannot fit into memory is refused before the system ends the process."""
    need, free = _NODE_BYTES * n + _EDGE_BYTES * m, host_memory()
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


def check_weights(edge_weight: Any, m: int) -> NDArray[np.float64] | None:
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
    w = w.astype(np.float64, copy=False)
    if not np.isfinite(w).all():
        raise ValueError("edge_weight holds NaN or infinity: every weight must be finite.")
    if (w < 0).any():
        raise ValueError(f"edge_weight holds {w.min():g}: weights must not be negative.")
    positive = w[w > 0]
    if positive.size and (positive.max() > 1e30 or positive.min() < 1e-30):
        raise ValueError(
            f"edge_weight ranges from {positive.min():g} to {positive.max():g}: scale it to lie "
            "within 1e-30 and 1e30, for only ratios of weights (self-loops included) matter."
        )
    return w


def check_repeats(xp: Any, u: Any, v: Any, n: int) -> None:
    """An error that names the first edge, by its ids, that one direction lists twice."""
    key = xp.sort(u * n + v)
    again = key[1:] == key[:-1]
    if bool(again.any()):  # synchronize!
        a, b = divmod(int(key[int(xp.argmax(again))]), n)  # synchronize!
        raise ValueError(f"Edge ({a}, {b}) is listed more than once in this direction.")


def edge_keys(u: Any, v: Any, n: int) -> Any:
    """lo * n + hi of each pair: one int64 per edge, the same for both directions."""
    key = np.minimum(u, v).astype(np.int64, copy=False)
    key *= n
    key += np.maximum(u, v)
    return key


def graph_of_keys(keys: Any, n: int) -> Graph:
    """The unweighted graph of `edge_keys`, which are sorted in place; none may be a self-loop.

    Large graphs are made this way: little is held beside the keys and the result.
    """
    keys.sort()
    keys = distinct(np, keys)
    above = np.zeros(n + 1, dtype=np.int64)
    lo = keys // n
    np.cumsum(np.bincount(lo, minlength=n), out=above[1:])
    index_type = np.int32 if n < 2**31 else np.int64
    keys -= lo * n
    hi = keys.astype(index_type)
    del keys, lo
    upper = sp.csr_array((np.ones(hi.shape[0], dtype=np.int8), hi, above), shape=(n, n))
    both = upper + upper.T.tocsr()
    both.sort_indices()
    indptr = both.indptr.astype(np.int64)
    degree = np.diff(indptr).astype(np.float64) + 1.0
    return Graph(indptr, both.indices.astype(index_type, copy=False), None, degree)


def distinct(xp: Any, keys: Any) -> Any:
    """Each of the sorted keys once."""
    if not keys.size:
        return keys
    first = xp.ones(keys.shape[0], dtype=bool)
    first[1:] = keys[1:] != keys[:-1]
    return keys[first]  # synchronize!


def _merged(u: Any, v: Any, w: Any, n: int) -> Edges:
    """Each undirected edge once, sorted by (lo, hi), with its weight."""
    key = edge_keys(u, v, n)
    forward = u < v
    ahead, back = (_summed(key[way], w[way]) for way in (forward, ~forward))
    keys, weight = ahead if back[0].size == 0 else back
    if ahead[0].size and back[0].size:
        keys, weight = _union(ahead, back, n)
    lo, hi = keys // n, keys % n
    return lo, hi, None if (weight == 1).all() else weight


def _summed(key: Any, w: Any) -> tuple[Any, Any]:
    """Distinct keys in order, with their weights added up."""
    sort = np.argsort(key, kind="stable")
    keys, first = np.unique(key[sort], return_index=True)
    return keys, np.add.reduceat(w[sort], first) if keys.size else w[:0]


def _union(ahead: tuple[Any, Any], back: tuple[Any, Any], n: int) -> tuple[Any, Any]:
    """Both directions in one list; an edge present in both must have one weight."""
    at = np.minimum(np.searchsorted(ahead[0], back[0]), ahead[0].size - 1)
    twice = ahead[0][at] == back[0]
    w_ahead, w_back = ahead[1][at[twice]], back[1][twice]
    differ = ~np.isclose(w_ahead, w_back, rtol=1e-6, atol=0.0)
    if differ.any():
        i = int(np.argmax(differ))
        key = int(back[0][twice][i])
        a, b = key // n, key % n
        directions_differ(a, b, w_ahead[i], w_back[i])
    keys = np.concatenate([ahead[0], back[0][~twice]])
    weight = np.concatenate([ahead[1], back[1][~twice]])
    if twice.all():
        return keys, weight
    sort = np.argsort(keys, kind="stable")
    return keys[sort], weight[sort]


def directions_differ(a: int, b: int, ahead: float, back: float) -> NoReturn:
    raise ValueError(
        f"Edge ({a}, {b}) has weight {ahead:g} but ({b}, {a}) has {back:g}: "
        "an undirected graph needs one weight for both directions."
    )


def _from_unique(
    lo: Any, hi: Any, weight: Any, n: int, loops: Any = None, degree: Any = None, order: Any = None
) -> Graph:
    """CSR from edges with lo < hi, sorted by (lo, hi); columns come out sorted as well."""
    counts = np.bincount(lo, minlength=n) + np.bincount(hi, minlength=n)
    indptr = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    index_type = np.int32 if n < 2**31 else np.int64
    # Entries below the diagonal first: within a row they precede those above it, and a
    # counting sort by row keeps that order.
    rows, columns = np.concatenate([hi, lo]), np.concatenate([lo, hi]).astype(index_type)
    data = np.arange(rows.shape[0]) if weight is not None else np.ones(rows.shape[0], np.int8)
    csr = sp.coo_array((data, (rows, columns)), shape=(n, n)).tocsr()
    indices = csr.indices.astype(index_type, copy=False)
    weights = None if weight is None else np.concatenate([weight, weight])[csr.data]
    if degree is None:
        off = np.diff(indptr).astype(np.float64) if weights is None else _row_sums(weights, indptr)
        degree = off + loops
    return Graph(indptr, indices, weights, degree, order)


def _row_sums(values: Any, indptr: Any) -> Any:
    """Sum of the values of each CSR row, 0 for an empty one."""
    total = np.zeros(indptr.shape[0] - 1)
    filled = np.diff(indptr) > 0
    total[filled] = np.add.reduceat(values, indptr[:-1][filled])
    return total
