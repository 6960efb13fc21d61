"""A fit that survives being killed: what was expensive is on disk, whole or not at all.

Blocks of Q are stored as they are solved, Q once it is complete (its blocks then go), and blocks
of outputs once they are trained.  A later fit of the same model on the same data reads them, takes
the steps of its loop again, and ends with the same bits.  `made-from.json` is written first and
says which data and parameters the state belongs to; every other file holds a hash of it.  Processes
with rows of their own keep arrays in a folder `part-r-of-P` each, and other parts are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu import __version__
from herta_gpu.plumbing.checks import check_dtype
from herta_gpu.plumbing.files import Archive, DataError, new_file, write_npz
from herta_gpu.plumbing.interop import Array, Backend, is_sparse, on_device

Fingerprint = dict[str, dict[str, Any]]

_MADE_FROM = "made-from.json"
# Parameters that may differ: they decide when a fit stops, what it prints and how much it computes
# at once, but not what it finds.
_FREE = ("max_iter", "verbose", "memory_budget")
_CHUNK_BYTES = 16 << 20  # bytes hashed at once
_SAMPLED_ROWS = 4096  # rows of a memory map that are compared
_SAMPLED_BYTES = 256 << 20  # bytes of those rows at most


class Checkpoint:
    """A folder with the state of one fit.

    Parameters
    ----------
    folder : path
        The folder of this fit alone.  A fit of other data or of a model with other parameters is
        refused in a sentence that names them, and the state stays as it is; `max_iter`, `verbose`
        and `memory_budget` may differ.  Data are compared whole, but a memory-mapped X by some
        thousand rows and by its file's size and time of change.
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

    >>> model.set_params(ridge=0.2).fit(*arguments, checkpoint=Checkpoint(folder))
    Traceback (most recent call last):
    ValueError: ... was made from something else: ridge (0.1 then, 0.2 now) changed; ...
    """

    def __init__(self, folder: str | Path, worth: float = 0.2) -> None:
        self.folder, self.worth = Path(folder), worth
        # Validation and test nodes, which must be the same as well: scores of a run depend on them.
        self.split: dict[str, Any] | None = None
        self._made_from = ""  # the fingerprint's hash; `begin` sets it before any file is read
        self._fingerprint: Fingerprint = {}

    def begin(self, made_from: Fingerprint) -> None:
        """Refuse a state that was made from something else, before anything of it is read."""
        then, reason = None, ""
        with suppress(FileNotFoundError, ValueError):  # missing or damaged
            then = json.loads((self.folder / _MADE_FROM).read_text(encoding="utf-8"))
        if isinstance(then, dict):
            changed = differences(then, made_from)
            reason = f"was made from something else: {_listed(changed)} changed" if changed else ""
        # A killed write leaves hidden files only.
        elif any(path.name[0] != "." for path in self.folder.glob("*.npz")):
            reason = "does not say what it was made from (it is older, or damaged)"
        if reason:
            raise ValueError(
                f"The checkpoint in {self.folder} {reason}; it was left as it is: choose another "
                "folder, or begin anew with checkpoint.delete() (--overwrite on the command line)."
            )
        text = json.dumps(made_from, sort_keys=True)
        self._fingerprint, self._made_from = made_from, hashlib.sha256(text.encode()).hexdigest()

    def on(self, backend: Backend, plan: str = "", nodes: Any = ()) -> Callable[..., Any]:
        """A function `cache(name, make)` that reads what `make` made before a crash, or calls it.

        `plan` names the way in which things are made, and `nodes` those whose rows they hold beside
        the training rows; both depend on free memory, and files of another way are not read.  What
        several processes make `together`, the first one reads and stores, unless each has rows of
        its own.
        """
        made_from, nodes = self._made_from + plan, np.asarray(nodes, dtype=np.int64)
        if nodes.size:
            made_from += hashlib.sha256(nodes.tobytes()).hexdigest()
        place = self.folder
        if not backend.whole:  # what this process alone has
            place = place / f"part-{backend.rank}-of-{backend.ranks}"

        def cache(
            name: str, make: Callable[[], dict[str, Array]], together: bool = False
        ) -> dict[str, Array]:
            path = place / f"{name}.npz"
            stored = read(path, made_from)
            if not backend.whole:
                stored = None if backend.largest(int(stored is None)) else stored
            elif together:
                stored = backend.agreed(stored)
            if stored is not None:
                return {
                    key: str(array) if array.dtype.kind == "U" else backend.xp.asarray(array)
                    for key, array in stored.items()
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
    with suppress(DataError, OSError):
        stored = Archive(path, "a whole file of a checkpoint")
        stored.check_format("checkpoint")
        if str(stored["made_from"]) == made_from:
            return {k: stored[k] for k in stored.keys if k not in ("made_from", "format")}
    return None


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
    nodes, and `split` the nodes of the other parts.  To read an X that is mapped from a file takes
    as long as a part of the fit: some of its rows and the file's size and time of change stand for
    it.
    """

    def digest(*arrays: Any) -> Any:
        """A hash of arrays of this process, or of the hashes of all that have rows of their own."""
        found = _hash(arrays, backend)
        if backend.whole:
            return found.hexdigest()
        together = backend.joined(np.frombuffer(found.digest(), dtype=np.uint8))
        return hashlib.sha256(together.tobytes()).hexdigest()

    own = () if backend.whole else (graph.ids,)
    parts = (graph.indptr, graph.indices, graph.weights, graph.degree, graph.order)
    data: dict[str, Any] = {"the graph": digest(*parts, *own)}
    if is_sparse(X):
        data["the features X"] = digest(np.asarray(X.shape), X.indptr, X.indices, X.data)
    # Changes of a private map (mode "c") are in memory alone, so its file says nothing of them.
    elif backend.whole and isinstance(X, np.memmap) and X.filename is not None and X.mode != "c":
        n, row_bytes = X.shape[0], max(1, X.nbytes // max(1, X.shape[0]))
        count = min(n, _SAMPLED_ROWS, max(2, _SAMPLED_BYTES // row_bytes))
        at, about = np.linspace(0, n - 1, count).astype(np.int64), os.stat(str(X.filename))
        data["the features X"] = {
            f"{count:,} rows": digest(np.asarray(X.shape), X[at]),
            "the file's size": about.st_size,
            "the file's time of change": about.st_mtime_ns,
        }
    else:
        data["the features X"] = digest(X)
    data["the labels y"] = digest(np.asarray(y))
    data["the training nodes"] = digest(np.asarray(rows))
    if split is not None and backend.whole:
        others = [np.asarray(split[name]) for name in sorted(split) if name != "train"]
        data["the validation or test nodes"] = digest(*others)
    if weights is not None:
        data["the weights"] = digest(np.asarray(weights))
    same: dict[str, Any] = {}
    for name, given in params.items():  # as they will be when they were written as JSON
        value = given.item() if isinstance(given, np.generic) else given
        plain = isinstance(value, (bool, int, float, str, type(None)))
        same |= {} if name in _FREE else {name: value if plain else str(value)}
    # Another kind of device rounds otherwise: it gives neither the same bits nor the same bounds.
    same["device"] = f"{backend.name}, {type(backend).__name__}"
    same["dtype"] = check_dtype(params["dtype"])
    return {"data": data, "parameters": {**same, "the version of herta_gpu": __version__}}


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


def _pairs(then: Any, now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    then = then if isinstance(then, dict) else {}
    return [(name, then.get(name), now.get(name)) for name in {**now, **then}]


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _hash(arrays: Sequence[Any], backend: Backend) -> Any:
    """A hash of types, shapes and bytes in C order; a chunk of an array is copied at a time."""
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
    return whole
