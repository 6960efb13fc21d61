"""Cora, Citeseer and Pubmed from the Planetoid raw files `ind.<name>.*`.

The files are pickles.  They are read by an unpickler that knows SciPy matrices, NumPy arrays and
dictionaries and refuses everything else, so that a file from anywhere cannot run code.
"""

from __future__ import annotations

import os
import pickle
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.datasets.dataset import Dataset, cache_dir
from herta_gpu.graph import Graph
from herta_gpu.plumbing.files import DataError, explained, new_file

SHAPES = {  # nodes, edges, features, classes, training nodes
    "cora": (2708, 5278, 1433, 7, 140),
    "citeseer": (3327, 4552, 3703, 6, 120),
    "pubmed": (19717, 44324, 500, 3, 60),
}
# How defaultdicts are made again, and how protocol 2 writes bytes.
_PLAIN = (("collections", "defaultdict"), ("copyreg", "_reconstructor"), ("_codecs", "encode"))
_PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
_URL = "https://raw.githubusercontent.com/kimiyoung/planetoid/master/data"
_VALID = 500  # nodes after the training ones, by convention


def find_planetoid(name: str, folders: list[Path]) -> Path | None:
    """The folder that holds the raw files of `name`, in the layouts that others use, too."""
    for folder in folders:
        for inner in ("", name, f"{name}/raw", f"{name.capitalize()}/raw", "planetoid", "raw"):
            if (folder / inner / f"ind.{name}.graph").is_file():
                return folder / inner
    return None


def load_planetoid(name: str, folder: Path | None = None) -> Dataset:
    """The raw files in `folder`, or downloaded once into the cache."""
    folder = _download(name) if folder is None else folder
    *pickles, index = (folder / f"ind.{name}.{part}" for part in _PARTS)
    for path in (*pickles, index):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: Planetoid comes in eight files.")
    x, y, tx, ty, allx, ally, neighbours = map(_unpickle, pickles)
    try:
        test = np.array([int(line) for line in index.read_text().split()], dtype=np.int64)
    except ValueError as error:
        raise DataError(f"{index} must hold one node id per line ({error}).") from None
    if test.shape[0] != tx.shape[0] or ty.shape[0] != tx.shape[0] or y.shape[0] != x.shape[0]:
        raise DataError(
            f"{index} names {len(test):,} nodes, and x, y, tx and ty have {x.shape[0]:,}, "
            f"{len(y):,}, {tx.shape[0]:,} and {len(ty):,} rows: the files do not belong together."
        )
    first = allx.shape[0]
    # Citeseer: 15 ids in the range of the test nodes are absent.  They keep their place in the
    # graph, with empty features and no label.
    n = max(first + tx.shape[0], int(test.max()) + 1)
    # allx on top, and each row of tx at its node.
    X, position = sp.csr_array(allx), (test, np.arange(test.shape[0]))
    X.resize((n, X.shape[1]))
    at_nodes = sp.csr_array((np.ones(test.shape[0]), position), shape=(n, test.shape[0]))
    X = sp.csr_array(X + at_nodes @ sp.csr_array(tx)).astype(np.float32)
    labels = np.full(n, -1, dtype=np.int64)
    for at, one_hot in ((slice(first), np.asarray(ally)), (test, np.asarray(ty))):
        labels[at] = np.where(one_hot.any(axis=1), one_hot.argmax(axis=1), -1)
    # The lists name both directions, and some edges twice.
    source = np.repeat(list(neighbours), [len(ids) for ids in neighbours.values()])
    target = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in neighbours.values()])
    graph, train = Graph.from_edges(np.stack([source, target]), num_nodes=n), x.shape[0]
    split = {"train": np.arange(train), "valid": np.arange(train, min(train + _VALID, first))}
    split["test"] = np.sort(test)
    metadata = {"metric": "accuracy", "source": "Planetoid raw files"}
    return Dataset(name, graph, X, labels, split, metadata)


class _Unpickler(pickle.Unpickler):
    """Only the classes these files are made of."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("scipy.sparse") and name == "csr_matrix":
            return sp.csr_matrix
        if module.startswith("numpy") and name in ("ndarray", "dtype", "_reconstruct"):
            return np.empty(0).__reduce__()[0] if name == "_reconstruct" else getattr(np, name)
        if name in ("list", "int", "object"):
            return {"list": list, "int": int, "object": object}[name]
        module = module.replace("copy_reg", "copyreg")
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unpickle(path: Path) -> Any:
    with explained(f"{path} is not a whole Planetoid file"), open(path, "rb") as file:
        try:
            return _Unpickler(file, encoding="latin1").load()
        except (pickle.UnpicklingError, AttributeError, IndexError) as error:
            raise ValueError(str(error)) from None


def _download(name: str) -> Path:
    folder = cache_dir() / "planetoid"
    base = os.environ.get("HERTA_PLANETOID_URL", _URL)
    for part in _PARTS:
        path = folder / f"ind.{name}.{part}"
        if path.is_file():
            continue
        try:
            with urllib.request.urlopen(f"{base}/{path.name}", timeout=30) as answer:
                content = answer.read()
            with new_file(path) as temporary:
                temporary.write_bytes(content)
        except (urllib.error.URLError, OSError) as error:
            raise FileNotFoundError(
                f"{name} is in no data folder and {base}/{path.name} could not be fetched "
                f"({error}): set HERTA_DATA or --data-dir to a folder with {name}.npz or the "
                f"files ind.{name}.*."
            ) from None
    return folder
