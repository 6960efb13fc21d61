"""Small data, files and runs to damage, and what must be true of every bad input.

A bad input has its sentence: one row each, in one of the tables of the tests.  A row says what is
done, how it ends, and words of the sentence.  Whatever is done, nothing is left behind on disk,
nothing that was there is lost, and nobody is told to load a pickle.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph
from herta_gpu.app.cli import main
from herta_gpu.plumbing.files import checksum

N, D = 30, 4
RNG = np.random.default_rng(0)
EDGES = np.stack([np.arange(N), (np.arange(N) + 1) % N])
G = Graph.from_edges(EDGES)
X = RNG.standard_normal((N, D))
Y = np.arange(N) % 3
NAMES = np.array(["red", "green", "blue"])[Y]
SPARSE = sp.csr_array(X)
HTML = b"<!DOCTYPE html><html><body>404: not found</body></html>"


@cache
def trained() -> HERTA:
    """A model that was trained on the data above."""
    return HERTA(ridge=0.1).fit(G, X, Y)


def rows(table: list[Any]) -> list[Any]:
    """The rows of a table as parameters; the first entry of each names its test."""
    return [pytest.param(*row[1:], id=row[0]) for row in table]


# ---- small files ----------------------------------------------------------------------------
def npz(folder: Path, drop: tuple[str, ...] = (), **change: Any) -> Path:
    """A dataset that can be trained on, but for what is changed or dropped."""
    arrays: dict[str, Any] = {"edge_index": EDGES, "num_nodes": N, "features": X, "labels": Y}
    arrays |= {"train": np.arange(15), "valid": np.arange(15, 20), "test": np.arange(20, N)}
    arrays |= change
    path = folder / "data.npz"
    np.savez(path, **{key: value for key, value in arrays.items() if key not in drop})
    return path


def sparse_npz(folder: Path, **change: Any) -> Path:
    parts = {"data": SPARSE.data, "indices": SPARSE.indices, "indptr": SPARSE.indptr}
    keys = {f"feature_{key}": value for key, value in parts.items()}
    return npz(folder, drop=("features",), **{**keys, "feature_shape": (N, D), **change})


def tables(folder: Path, **content: Any) -> Path:
    """A folder of tables: text becomes a .csv file, an array a .npy file, None no file."""
    place = folder / "tables"
    place.mkdir()
    rows = {"edges": "\n".join(f"{u},{v}" for u, v in EDGES.T) + "\n"}
    rows |= {"features": X, "labels": Y, "train": np.arange(15), "test": np.arange(20, N)}
    for name, value in {**rows, **content}.items():
        if isinstance(value, str):
            (place / f"{name}.csv").write_text(value)
        elif isinstance(value, bytes):
            (place / f"{name}.npy").write_bytes(value)
        elif value is not None:
            np.save(place / f"{name}.npy", value)
    return place


def raw(folder: Path, content: bytes, name: str = "data.npz") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def cut(path: Path, share: float) -> Path:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    return path


def absurd(folder: Path) -> Path:
    """A dataset whose header promises 10^12 rows of features, of which there are none."""
    path, header = npz(folder, drop=("features",)), io.BytesIO()
    about = {"descr": "<f8", "fortran_order": False, "shape": (10**12, 4)}
    np.lib.format.write_array_header_1_0(header, about)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("features.npy", header.getvalue())
    return path


def a_run(folder: Path) -> Path:
    """A run as the command line leaves it."""
    place = folder / "run"
    code = main(["train", str(npz(folder)), "--ridge", "0.1", "--quiet", "--out", str(place)])
    assert code == 0
    return place


def with_config(run: Path, **change: Any) -> Path:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, **change}))
    return run


def model_file(folder: Path, drop: tuple[str, ...] = (), about: Any = None, **change: Any) -> Path:
    """A stored model, some entries changed and summed anew; `about`: text, or entries of it."""
    path = folder / "model.npz"
    trained().save(path)
    with np.load(path) as stored:
        arrays = dict(stored)
    form = json.loads(str(arrays.pop("format")))
    if isinstance(about, dict):
        about = json.dumps({**json.loads(str(arrays["about"])), **about})
    arrays |= {} if about is None else {"about": about}
    kept = {k: np.asarray(v) for k, v in {**arrays, **change}.items() if k not in drop}
    form["sums"] = {k: "" if v.dtype.hasobject else checksum(v) for k, v in kept.items()}
    np.savez(path, format=np.array(json.dumps(form)), **kept)
    return path


def masked(array: Any) -> Any:
    return np.ma.masked_array(array, mask=np.zeros(array.shape, dtype=bool))


def fit(**change: Any) -> Any:
    params = change.pop("params", {})
    given = {"graph": G, "X": X, "y": Y, "train": None, **change}
    return HERTA(**params).fit(**given)


# ---- what must be true of every row ---------------------------------------------------------
def listing(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder, hidden ones included, with the content of the files."""
    found = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in found}


def check_text(text: str, words: str) -> None:
    assert words.lower() in text.lower(), text
    assert "pickle" not in text.lower()
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) == 1, text


def refused(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as found:
        call()
    check_text(str(found.value), words)
