"""A fit that survives being killed: what was expensive is on disk, whole or not at all.

Blocks of Q are stored as they are solved, Q once it is complete (its blocks then go), and blocks
of outputs once they are trained.  A later fit of the same model on the same data with the same
folder reads them instead of computing, takes the steps of its loop again, and ends with the same
bits.  The file `made-from.json` is written first and says which data and parameters the state
belongs to; every other file holds a hash of it.

Where processes have rows of their own, each keeps its arrays in a folder `part-r-of-P`, and what
one of them cannot read is made again by all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu import __version__
from herta_gpu.plumbing.checks import as_labels, check_dtype
from herta_gpu.plumbing.files import Archive, DataError, new_file, write_npz
from herta_gpu.plumbing.interop import Array, Backend, on_device

_MADE_FROM = "made-from.json"


class Checkpoint:
    """A folder with the state of one fit.

    Parameters
    ----------
    folder : path
        The folder of this fit alone.  A fit of other data or of a model with other parameters is
        refused in a sentence that names them, and the state stays as it is; `max_iter`, `verbose`
        and `memory_budget` may differ.  X, y, the training nodes and the graph are compared whole;
        a memory-mapped X is compared by some thousand rows and by its file's size and time of
        change.
    worth : float
        Seconds of computing below which a block is not stored.

    Examples
    --------
    >>> import tempfile
    >>> from herta_gpu import HERTA, Checkpoint
    >>> from herta_gpu.datasets import load
    >>> data, folder = load("digits"), tempfile.mkdtemp() + "/state"
    >>> arguments = (data.graph, data.X, data.y, data.split["train"])
    >>> model = HERTA(lam=5.0, loss="ce", ridge=0.1, strategy="herta")
    >>> W = model.fit(*arguments).W_
    >>> def crash(record):
    ...     assert record["step"] < 9
    >>> model.fit(*arguments, callback=crash, checkpoint=Checkpoint(folder, worth=0.0))
    Traceback (most recent call last):
    AssertionError
    >>> again = model.fit(*arguments, checkpoint=Checkpoint(folder))  # Q is read
    >>> bool((again.W_ == W).all())
    True

    The state of one fit is not believed to be that of another.

    >>> model.set_params(ridge=0.2).fit(*arguments, checkpoint=Checkpoint(folder))
    Traceback (most recent call last):
    ValueError: ... was made from something else: ridge (0.1 then, 0.2 now) changed; ...

    Attributes
    ----------
    split : dict of name to node ids, or None
        Validation and test nodes, which must be the same as well: the scores of a run depend on
        them.
    """

    def __init__(self, folder: str | Path, worth: float = 0.2) -> None:
        self.folder, self.worth = Path(folder), worth
        self.split: dict[str, Any] | None = None
        self._made_from = ""  # the fingerprint's hash; `begin` sets it before any file is read
        self._fingerprint: Fingerprint = {}

    def begin(self, made_from: Fingerprint) -> None:
        """Refuse a state that was made from something else, before anything of it is read."""
        then, reason = _read_json(self.folder / _MADE_FROM), ""
        # A killed write leaves hidden files only.
        if then is None and any(path.name[0] != "." for path in self.folder.glob("*.npz")):
            reason = "does not say what it was made from (it is older, or damaged)"
        changed = [] if then is None else differences(then, made_from)
        if changed:
            reason = f"was made from something else: {_listed(changed)} changed"
        if reason:
            raise ValueError(
                f"The checkpoint in {self.folder} {reason}; it was left as it is: choose another "
                "folder, or begin anew with checkpoint.delete() (--overwrite on the command line)."
            )
        self._fingerprint, self._made_from = made_from, key(made_from)

    def on(self, backend: Backend, plan: str = "") -> Callable[..., Any]:
        """A function `cache(name, make)` that reads from disk what `make` made before a crash.

        Where there is nothing to read, it calls `make`.  `plan` names the way in which things are
        made; it depends on free memory, and files that were made in another way are not read.
        Where several processes make a thing `together`, the first one reads and stores it; where
        they have rows of their own, each its own.
        """
        plan += backend.rows_key

        def cache(
            name: str, make: Callable[[], dict[str, Array]], together: bool = False
        ) -> dict[str, Array]:
            place = self.folder
            if not backend.whole:  # what this process alone has
                place = place / f"part-{backend.rank}-of-{backend.ranks}"
            path, made_from = place / f"{name}.npz", self._made_from + plan
            stored = read(path, made_from)
            if not backend.whole:
                stored = None if backend.largest(int(stored is None)) else stored
            elif together:
                stored = backend.agreed(stored)
            if stored is not None:
                return {
                    name: str(array) if array.dtype.kind == "U" else backend.xp.asarray(array)
                    for name, array in stored.items()
                }
            start = time.perf_counter()
            made = make()
            if together and backend.whole and backend.rank > 0:
                return made
            # Without rows of their own processes work alone here, and the clocks of all count.
            seconds = time.perf_counter() - start
            seconds = seconds if backend.whole else float(backend.largest(seconds))
            if seconds >= self.worth:
                self.claim()
                on_host = {
                    name: array if isinstance(array, str) else backend.to_numpy(array)
                    for name, array in made.items()
                }  # synchronize!
                write(path, made_from, on_host)
            backend.largest(0)  # all have theirs
            for part in path.parent.glob(f"{name}-*.npz"):
                part.unlink(missing_ok=True)  # its parts are in the whole
            return made

        return cache

    def claim(self) -> None:
        """Write into the folder what its state belongs to; called before the long work begins."""
        about = self.folder / _MADE_FROM
        if self._fingerprint and not about.is_file():
            with new_file(about) as temporary:
                text = json.dumps(self._fingerprint, indent=1) + "\n"
                temporary.write_text(text, encoding="utf-8")

    def delete(self) -> None:
        """Remove the folder, which a finished fit does not need."""
        shutil.rmtree(self.folder, ignore_errors=True)


def write(path: Path, made_from: str, arrays: dict[str, Any]) -> None:
    """Arrays, or text, of the fit that has this fingerprint."""
    write_npz(path, {"made_from": np.array(made_from), **arrays}, "checkpoint")


def read(path: Path, made_from: str) -> dict[str, Any] | None:
    """The arrays of a file; None if it is missing, damaged, or from another fit."""
    try:
        stored = Archive(path, "a whole file of a checkpoint")
        stored.check_format("checkpoint", ())
        if str(stored["made_from"]) != made_from:
            return None
        names = [name for name in stored.keys if name not in ("made_from", "format")]
        return {name: stored[name] for name in names}
    except (DataError, OSError):
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# ---- what a fit was made from ------------------------------------------------------------
# Arrays are hashed whole, with their type and shape.  The one exception is an X that lies in a file
# and is mapped into memory: reading it would take as long as a part of the fit, so some of its rows
# and the file's size and time of change are compared instead.  A message on a difference says so.
#
# Where processes have rows of their own, the bits of each number are scrambled together with the
# ids of its node and added up, modulo 2^64: how the nodes are shared out does not matter.
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

    The data are as `HERTA.fit` has them after its checks, `rows` and `weights` of the training
    nodes, and `split` the nodes of the other parts, whose scores a result holds.

    Examples
    --------
    >>> from herta_gpu import HERTA
    >>> from herta_gpu.backends import get_backend
    >>> from herta_gpu.datasets import load
    >>> from herta_gpu.plumbing.checkpoint import differences, fingerprint
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
        data = {"the graph": _hash(parts, backend)}
        if sp.issparse(X):
            arrays = [np.asarray(X.shape), X.indptr, X.indices, X.data]
            data["the features X"] = _hash(arrays, backend)
        # Changes of a private map (mode "c") are in memory alone, so its file says nothing of them.
        elif isinstance(X, np.memmap) and X.filename is not None and X.mode != "c":
            data["the features X"] = _hash_of_map(X, backend)
        else:
            data["the features X"] = _hash([X], backend)
        data["the labels y"] = _hash([np.asarray(y)], backend)
    else:
        data = _of_all_processes(graph, X, as_labels("y", y), backend)
    data["the training nodes"] = _hash([np.asarray(rows)], backend)
    if split is not None and backend.whole:
        others = [np.asarray(split[name]) for name in sorted(split) if name != "train"]
        data["the validation or test nodes"] = _hash(others, backend)
    if weights is not None:
        data["the weights"] = _hash([np.asarray(weights)], backend)
    same: dict[str, Any] = {}
    for name, given in params.items():  # as they will be when they were written as JSON
        value = given.item() if isinstance(given, np.generic) else given
        plain = isinstance(value, (bool, int, float, str, type(None)))
        same |= {} if name in _FREE else {name: value if plain else str(value)}
    # Another kind of device rounds otherwise: it gives neither the same bits nor the same bounds.
    same["device"] = f"{backend.name}, {type(backend).__name__}"
    same["dtype"] = check_dtype(params["dtype"])
    return {"data": data, "parameters": {**same, "the version of herta_gpu": __version__}}


def _of_all_processes(graph: Any, X: Any, y: Any, backend: Backend) -> dict[str, Any]:
    """Hashes of a graph, of X and of y whose rows are shared out."""
    ids = graph.ids[: graph.num_nodes]
    weights = np.ones(graph.indices.shape[0]) if graph.weights is None else graph.weights
    edges = _sum(np.repeat(ids, np.diff(graph.indptr)), graph.ids[graph.indices], weights)
    parts = {  # of each the sums, and what else is compared
        "the graph": ([edges, _sum(ids, 0, graph.degree)], (graph.nodes_of_all, graph.num_edges)),
        "the features X": ([_sum_of_rows(ids, X)], (str(X.dtype), X.shape[1:])),
        "the labels y": ([_sum_of_rows(ids, y)], (y.dtype.kind, y.shape[1:])),
    }
    return {
        name: f"{backend.total(np.array(sums, dtype=np.uint64)).tolist()} of {what}"
        for name, (sums, what) in parts.items()
    }


def _sum_of_rows(ids: Any, X: Any) -> Any:
    """The scrambled numbers of a matrix, of one number per node, or of text, added up."""
    if sp.issparse(X):
        X = X.tocoo()
        return _sum(ids[X.row], X.col, X.data)
    if X.dtype.kind == "U":  # its letters; ends that are not there are 0, and count nothing
        X = np.ascontiguousarray(X).view(np.uint32).reshape(X.shape[0], -1 if X.size else 1)
    X = X[:, None] if X.ndim == 1 else X
    step, total = max(1, _CHUNK_BYTES // max(1, 8 * X.shape[1])), np.uint64(0)
    for a in range(0, X.shape[0], step):
        part = ids[a : a + step, None]
        total = total + _sum(part, np.arange(X.shape[1]), X[a : a + step])
    return total


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
        if old != new and isinstance(old, dict) and isinstance(new, dict):  # of a memory map
            seen = _listed([sign for sign, a, b in _pairs(old, new) if a != b])
            name += f" (by {seen}; of a memory map only {_listed(list(new))} are compared)"
        found += [name] * (old != new)
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


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _hash_of_map(X: np.memmap, backend: Backend) -> dict[str, Any]:
    """What is compared of a memory map: rows from all over the file, its size and its time."""
    n, row_bytes = X.shape[0], max(1, X.nbytes // max(1, X.shape[0]))
    count = min(n, _SAMPLED_ROWS, max(2, _SAMPLED_BYTES // row_bytes))
    at = np.linspace(0, n - 1, count).astype(np.int64)
    about = os.stat(str(X.filename))
    return {
        f"{count:,} rows": _hash([np.asarray(X.shape), X[at]], backend),
        "the file's size": about.st_size,
        "the file's time of change": about.st_mtime_ns,
    }


def _hash(arrays: Sequence[Any], backend: Backend) -> str:
    """A hash of types, shapes and bytes in C order.

    No more than a chunk of an array is copied at a time, whatever its layout or device.
    """
    whole = hashlib.sha256()  # the fastest hash on processors with instructions for it
    for array in arrays:
        if array is None:
            whole.update(b"none;")
            continue
        whole.update(f"{np.dtype(array.dtype).str}{(*array.shape,)};".encode())
        step = max(1, _CHUNK_BYTES // max(1, array.nbytes // max(1, array.shape[0])))
        for a in range(0, array.shape[0], step):
            part = array[a : a + step]
            part = backend.to_numpy(part) if on_device(part) else part
            whole.update(np.ascontiguousarray(part))
    return whole.hexdigest()
