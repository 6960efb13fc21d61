"""What a fit was made from, in a few hashes: a checkpoint of anything else is refused.

Arrays are hashed whole, with their type and shape.  The one exception is an X that lies in a file
and is mapped into memory: reading it would take as long as a part of the fit, so some of its rows
and the file's size and time of change are compared instead.  A message on a difference says so.

Where processes have rows of their own, the bits of each number are scrambled together with the ids
of its node and added up, modulo 2^64: how the nodes are shared out does not matter.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu import __version__
from herta_gpu.plumbing.interop import Backend, on_device
from herta_gpu.plumbing.validation import as_labels, check_dtype

Fingerprint = dict[str, dict[str, Any]]

# Parameters that may differ: they decide when a fit stops, what it prints and how much it computes
# at once, but not what it finds.
_FREE = ("max_iter", "verbose", "memory_budget")
_CHUNK_BYTES = 16 << 20  # bytes hashed at once
_SAMPLED_ROWS = 4096  # rows of a memory map that are compared
_SAMPLED_BYTES = 256 << 20  # bytes of those rows at most


def fingerprint(
    params: Mapping[str, Any],
    backend: Backend,
    graph: Any,
    X: Any,
    y: Any,
    rows: Any,
    split: dict[str, Any] | None = None,
    weights: Any = None,
) -> Fingerprint:
    """Hashes of the data, the parameters and the backend: all that must be the same.

    Parameters
    ----------
    params : dict
        The parameters of the model.
    backend, graph, X, y
        As `HERTA.fit` has them after its checks.
    rows : array
        Ids of the training nodes.
    split : dict of name to ids, optional
        The nodes of the other parts, whose scores a result holds.
    weights : array, optional
        Of the training nodes.

    Examples
    --------
    >>> from herta_gpu import HERTA
    >>> from herta_gpu.backends import get_backend
    >>> from herta_gpu.datasets import load
    >>> from herta_gpu.plumbing.fingerprint import differences, fingerprint
    >>> data, cpu = load("digits"), get_backend("cpu")
    >>> given = (cpu, data.graph, data.X, data.y, data.split["train"])
    >>> then = fingerprint(HERTA(lam=5.0).get_params(), *given)
    >>> differences(then, fingerprint(HERTA(lam=5, max_iter=7).get_params(), *given))
    []
    >>> data.X[17, 3] += 1
    >>> differences(then, fingerprint(HERTA(lam=7.0).get_params(), *given))
    ['the features X', 'lam (5.0 then, 7.0 now)']
    """
    data: dict[str, Any]
    if backend.whole:
        parts = (graph.indptr, graph.indices, graph.weights, graph.degree, graph.order)
        data = {
            "the graph": _hash(parts, backend),
            "the features X": _features(X, backend),
            "the labels y": _hash([np.asarray(y)], backend),
        }
    else:
        data = _of_all_processes(graph, X, as_labels("y", y), backend)
    data["the training nodes"] = _hash([np.asarray(rows)], backend)
    if split is not None and backend.whole:
        others = [np.asarray(split[name]) for name in sorted(split) if name != "train"]
        data["the validation or test nodes"] = _hash(others, backend)
    if weights is not None:
        data["the weights"] = _hash([np.asarray(weights)], backend)
    same = {k: _plain(v) for k, v in params.items() if k not in _FREE}
    # Another kind of device rounds otherwise: it gives neither the same bits nor the same bounds.
    same["device"] = f"{backend.name}, {type(backend).__name__}"
    same["dtype"] = check_dtype(params["dtype"])
    return {"data": data, "parameters": {**same, "the version of herta_gpu": __version__}}


def _of_all_processes(graph: Any, X: Any, y: Any, backend: Backend) -> dict[str, Any]:
    """Hashes of a graph, of X and of y whose rows are shared out."""
    ids = graph.ids[: graph.num_nodes]
    weights = np.ones(graph.indices.shape[0]) if graph.weights is None else graph.weights
    row = np.repeat(ids, np.diff(graph.indptr))
    sums = [
        [_sum(row, graph.ids[graph.indices], weights), _sum(ids, 0, graph.degree)],
        _sums_of_rows(ids, X), _sums_of_rows(ids, y),
    ]  # fmt: skip
    whole = [backend.total(np.array(found, dtype=np.uint64)).tolist() for found in sums]
    about = [(graph.nodes_of_all, graph.num_edges), (str(X.dtype), X.shape[1:]),
             (y.dtype.kind, y.shape[1:])]  # fmt: skip
    names = ("the graph", "the features X", "the labels y")
    return {name: f"{found} of {what}" for name, found, what in zip(names, whole, about)}


def _sums_of_rows(ids: Any, X: Any) -> list[Any]:
    """The scrambled numbers of a matrix, of one number per node, or of text, added up."""
    if sp.issparse(X):
        X = X.tocoo()
        return [_sum(ids[X.row], X.col, X.data)]
    if X.dtype.kind == "U":  # its letters; ends that are not there are 0, and count nothing
        X = np.ascontiguousarray(X).view(np.uint32).reshape(X.shape[0], -1 if X.size else 1)
    X = X[:, None] if X.ndim == 1 else X
    step, total = max(1, _CHUNK_BYTES // max(1, 8 * X.shape[1])), np.uint64(0)
    for a in range(0, X.shape[0], step):
        part = ids[a : a + step, None]
        total = total + _sum(part, np.arange(X.shape[1]), X[a : a + step])
    return [total]


def _sum(row: Any, column: Any, values: Any) -> Any:
    """Sum of scrambled (row, column, value), zeros left out."""
    bits = np.ascontiguousarray(values, dtype=np.float64).view(np.uint64)
    place = mixed(np.asarray(row, dtype=np.uint64) + np.uint64(1)) + np.asarray(column, np.uint64)
    return np.where(values != 0, mixed(bits ^ mixed(place)), np.uint64(0)).sum(dtype=np.uint64)


def mixed(bits: Any) -> Any:
    """A bijection of 64-bit numbers that keeps 0 and scatters everything else (splitmix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def differences(then: Fingerprint, now: Fingerprint) -> list[str]:
    """The parts that differ, each in words that fit into a sentence."""
    found = []
    for name, old, new in _pairs(then.get("data"), now["data"]):
        if old != new:
            found.append(name + _in_a_map(old, new))
    for name, old, new in _pairs(then.get("parameters"), now["parameters"]):
        if old != new or isinstance(old, bool) != isinstance(new, bool):  # True is not 1
            found.append(f"{name} ({old} then, {new} now)")
    return found


def key(made_from: Fingerprint) -> str:
    """A hash of a fingerprint."""
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def nodes_key(nodes: Any) -> str:
    """A hash of node ids; nothing where there are none."""
    nodes = np.asarray(nodes, dtype=np.int64)
    return hashlib.sha256(nodes.tobytes()).hexdigest() if nodes.size else ""


def _pairs(then: Any, now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    then = then if isinstance(then, dict) else {}
    names = [*now, *(name for name in then if name not in now)]
    return [(name, then.get(name), now.get(name)) for name in names]


def _in_a_map(old: Any, new: Any) -> str:
    """The signs by which a memory map differs, and what was compared at all."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return ""
    seen = _listed([name for name, a, b in _pairs(old, new) if a != b])
    return f" (by {seen}; of a memory map only {_listed(list(new))} are compared)"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _plain(value: Any) -> Any:
    """A parameter as it will be when it has been written as JSON and read again."""
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _features(X: Any, backend: Backend) -> str | dict[str, Any]:
    if sp.issparse(X):
        shape = np.asarray(X.shape)
        return _hash([shape, X.indptr, X.indices, X.data], backend)
    # Changes of a private map (mode "c") are in memory alone, so its file says nothing of them.
    mapped = isinstance(X, np.memmap) and X.filename is not None and X.mode != "c"
    return _of_map(X, backend) if mapped else _hash([X], backend)


def _of_map(X: np.memmap, backend: Backend) -> dict[str, Any]:
    """What is compared of a memory map: rows from all over the file, its size and its time."""
    n, row_bytes = X.shape[0], max(1, X.nbytes // max(1, X.shape[0]))
    count = min(n, _SAMPLED_ROWS, max(2, _SAMPLED_BYTES // row_bytes))
    at = np.linspace(0, n - 1, count).astype(np.int64)
    about = os.stat(str(X.filename))
    return {
        f"{count:,} rows": _hash([np.asarray(X.shape), X], backend, at),
        "the file's size": about.st_size,
        "the file's time of change": about.st_mtime_ns,
    }


def _hash(arrays: Sequence[Any], backend: Backend, at: Any = None) -> str:
    """A hash of types, shapes and bytes in C order; only the rows `at` of the last array, if given.

    No more than a chunk of an array is copied at a time, whatever its layout or device.
    """
    whole = hashlib.sha256()  # the fastest hash on processors with instructions for it
    for i, array in enumerate(arrays):
        if array is None:
            whole.update(b"none;")
            continue
        rows = at if i == len(arrays) - 1 else None
        count = array.shape[0] if rows is None else rows.shape[0]
        whole.update(f"{np.dtype(array.dtype).str}{(count, *array.shape[1:])};".encode())
        step = max(1, _CHUNK_BYTES // max(1, array.nbytes // max(1, array.shape[0])))
        for a in range(0, count, step):
            J = slice(a, min(a + step, count))
            part = array[J] if rows is None else array[rows[J]]
            part = backend.to_numpy(part) if on_device(part) else part
            whole.update(np.ascontiguousarray(part))
    return whole.hexdigest()
