"""A simple undirected graph from millions of pairs, with little memory beside the result."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.graph import Graph


def edge_keys(u: Any, v: Any, n: int) -> Any:
    """lo * n + hi of each pair: one int64 per edge, the same for both directions."""
    key = np.minimum(u, v).astype(np.int64)
    key *= n
    key += np.maximum(u, v)
    return key


def simple_graph(edge_index: Any, n: int) -> Graph:
    """Every pair once and with weight 1, however often and in whichever direction it is given."""
    u, v = edge_index[0], edge_index[1]
    return graph_of_keys(edge_keys(u, v, n)[np.asarray(u != v)], n)


def graph_of_keys(keys: Any, n: int) -> Graph:
    """The graph of `edge_keys`, which are sorted in place; no pair may be a self-loop."""
    keys.sort()
    keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if keys.size else keys
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
