"""A finished graph as a folder of plain .npy files, which is opened without being read.

`graph.json` says what belongs to the folder.  The folder is written beside its final place and
renamed at the end, so an interrupted write leaves nothing that looks finished.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.plumbing.files import (
    Checksum,
    DataError,
    check_place,
    check_room,
    check_version,
    explained,
    new_folder,
    open_array,
    save_arrays,
)

VERSION = 2  # the first one had no sums
_FORMAT = "herta_gpu graph"
_META = "graph.json"
_KINDS = {  # in the order of the results of `open_graph`
    "indptr": ("int64",),
    "indices": ("int32", "int64"),
    "weights": ("float64",),
    "degree": ("float64",),
    "order": ("int64",),
}


class GraphWriter:
    """Writes a graph into a new folder; its rows may come in parts."""

    def __init__(self, folder: str | os.PathLike[str], n: int, entries: int, weighted: bool):
        """An error unless there is room for so many entries in a folder that does not exist."""
        self.folder = Path(folder)
        if self.folder.exists():
            raise ValueError(f"{self.folder} exists already: name a new folder for the graph.")
        check_place(self.folder.parent)
        need = 24 * n + entries * ((4 if n < 2**31 else 8) + (8 if weighted else 0))
        where = f"in {self.folder}, where {{free}} are free: choose another disk."
        check_room(self.folder, need, OSError, "The graph may take {need} " + where)

        self._sums = {"indices": Checksum(), "weights": Checksum()}
        self._kinds: dict[str, Any] = {}  # types of the arrays that come in parts
        self._entries = 0

    def __enter__(self) -> GraphWriter:
        self._new = new_folder(self.folder)
        self.at = self._new.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._new.__exit__(*error)

    def append(self, indices: Any, weights: Any) -> None:
        """The entries of further rows."""
        for name, part in (("indices", indices), ("weights", weights)):
            if part is not None:
                with (self.at / f"{name}.npy").open("ab") as file:
                    if name not in self._kinds:
                        _write_header(file, part.dtype, 0)
                    part.tofile(file)
                self._kinds[name] = part.dtype
                self._sums[name].add(part)
        self._entries += indices.shape[0]

    def finish(self, indptr: Any, degree: Any, weighted: bool, order: Any = None) -> None:
        """Everything else; weights that all turned out to be 1 are dropped."""
        sums = {}
        for name, dtype in self._kinds.items():
            with (self.at / f"{name}.npy").open("rb+") as file:
                _write_header(file, dtype, self._entries)
            sums[name] = self._sums[name].of(dtype, (self._entries,))
        if not weighted:
            (self.at / "weights.npy").unlink(missing_ok=True)
            sums.pop("weights", None)
        rest = {"indptr": indptr, "degree": degree, "order": order}
        sums |= save_arrays(self.at, {k: array for k, array in rest.items() if array is not None})
        sizes = {path.stem: path.stat().st_size for path in sorted(self.at.glob("*.npy"))}
        meta = {"format": _FORMAT, "version": VERSION, "nodes": indptr.shape[0] - 1}
        meta |= {"edges": self._entries // 2, "bytes": sizes, "sums": sums}
        (self.at / _META).write_text(json.dumps(meta, indent=1))

    def write(
        self, indptr: Any, indices: Any, weights: Any, degree: Any, order: Any = None
    ) -> None:
        """A whole graph at once."""
        with self:
            self.append(indices, weights)
            self.finish(indptr, degree, weights is not None, order)


def _write_header(file: Any, dtype: Any, length: int) -> None:
    """That of a vector, which NumPy pads so that a longer one has room."""
    known = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, known)


def open_graph(folder: str | os.PathLike[str], check: bool = True) -> list[Any]:
    """[indptr, indices, weights, degree, order] of a folder, as memory maps.

    With `check` they are read once, and compared with their checksums.  In a folder of the first
    version, which has none, ids must at least lie within the graph.
    """
    folder = Path(folder)
    meta, remedy = _meta(folder), "delete the folder and save the graph again"
    sizes, sums = meta["bytes"], (meta.get("sums") or {}) if check else {}
    found = {
        name: open_array(folder / f"{name}.npy", remedy, sizes[name], sums.get(name))
        for name in sizes
    }
    n, entries = meta["nodes"], 2 * meta["edges"]
    lengths = {"indptr": n + 1, "indices": entries, "weights": entries}
    for name, array in found.items():
        if array.shape != (lengths.get(name, n),) or str(array.dtype) not in _KINDS[name]:
            raise _damaged(folder, f"{name} is {array.dtype} of shape {array.shape}")
    indptr, indices = found["indptr"], found["indices"]
    if indptr[0] != 0 or indptr[-1] != entries:
        raise _damaged(folder, f"indptr does not end with {entries:,}")
    if check and not sums and indices.size:
        if not 0 <= int(indices.min()) <= int(indices.max()) < n:
            raise _damaged(folder, f"indices.npy names nodes outside of 0..{n - 1}")
        if (indptr[1:] < indptr[:-1]).any():
            raise _damaged(folder, "indptr.npy does not rise")
    return [found.get(name) for name in _KINDS]


def _meta(folder: Path) -> dict[str, Any]:
    path = folder / _META
    if not path.is_file():
        raise DataError(f"{folder} holds no graph: it has no {_META}, as Graph.save writes it.")
    with explained(f"{folder} is no whole graph: its {_META}"):
        meta: dict[str, Any] = json.loads(path.read_text())
        if meta["format"] != _FORMAT:
            raise ValueError(f"it is a {meta['format']} of version {meta['version']}")
        check_version(folder, meta["version"], VERSION)
        if not {"indptr", "indices"} <= set(meta["bytes"]) <= set(_KINDS):
            raise ValueError("its list of files is not that of a graph")
        if not all(type(meta[key]) is int and meta[key] >= 0 for key in ("nodes", "edges")):
            raise ValueError("its sizes are no whole numbers")
        if meta["version"] > 1 and set(meta.get("sums", {})) != set(meta["bytes"]):
            raise ValueError("it has no sums of its files")
    return meta


def _damaged(folder: Path, what: str) -> DataError:
    return DataError(f"{folder} is no whole graph ({what}): delete it and save the graph again.")
