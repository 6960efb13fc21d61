"""One .npz file per dataset: edges, features, labels and a split, without pickles.

Keys: `edge_index` (2 x m), `num_nodes`; dense `features`, or a sparse X as `feature_data`,
`feature_indices`, `feature_indptr` and `feature_shape`; `labels` (whole numbers, -1: none; text,
"": none; or floats) and `train`, `valid`, `test`, node ids or masks, where there are any.
The digits that ship with the package are one, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.datasets.dataset import PARTS, Dataset, check_split
from herta_gpu.graph import Graph
from herta_gpu.plumbing.checks import as_labels, node_rows
from herta_gpu.plumbing.files import Archive, DataError

_SPARSE = ("feature_data", "feature_indices", "feature_indptr", "feature_shape")


def load_npz(path: str | Path, name: str | None = None, features: bool = True) -> Dataset:
    """Read one dataset; with features=False, X is None and is not read at all.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from herta_gpu.datasets import load_npz
    >>> path = tempfile.mkdtemp() + "/triangle.npz"
    >>> np.savez(path, edge_index=[[0, 1, 2], [1, 2, 0]], num_nodes=3, features=np.eye(3),
    ...          labels=[0, 1, -1])
    >>> data = load_npz(path)
    >>> data.name, data.graph.num_edges, data.X.shape, data.y.tolist()
    ('triangle', 3, (3, 3), [0, 1, -1])
    """
    path = Path(path)
    archive = Archive(path, "a whole .npz archive")
    found = outline(archive)
    try:
        graph = Graph.from_edges(archive["edge_index"], num_nodes=found.n)
    except ValueError as error:
        raise error if isinstance(error, DataError) else DataError(f"{path}: {error}") from None
    X = _features(archive) if features and found.d is not None else None
    metadata = {"metric": "accuracy", "source": path.name}
    if "feature_note" in archive:
        metadata["note"] = str(archive["feature_note"])
    return Dataset(name or path.stem, graph, X, found.y, found.split, metadata)


@dataclass
class Outline:
    """What can be known, and be wrong, without edges and features themselves."""

    n: int
    m: int
    d: int | None  # None: no features
    X_nonzeros: int | None  # None: dense
    y: Any
    split: dict[str, Any]


def outline(archive: Archive) -> Outline:
    """Sizes, labels and split of a dataset, with every check that they allow."""
    path = archive.path
    if "edge_index" not in archive:
        held = ", ".join(archive.keys) or "nothing"
        raise DataError(f"{path} has no edge_index but {held}: it is no graph dataset.")
    shape = _shape(archive, "edge_index", 2, "shape (2, m)", "iu")
    if shape[0] != 2:
        turned = ": transpose it" if shape[1] == 2 else ""
        raise DataError(f"{path}: edge_index must have shape (2, m), not {shape}{turned}.")
    n, d, nonzeros = _feature_shape(archive)
    if "num_nodes" in archive:
        given = archive["num_nodes"]
        plain = given.size == 1 and given.dtype.kind in "iuf"
        number = given.reshape(-1)[0] if plain else np.nan
        if not (number >= 1 and np.isfinite(number) and number == int(number)):
            shown = number if plain else f"{given.dtype} of shape {given.shape}"
            raise DataError(f"{path}: num_nodes must be a positive whole number, not {shown}.")
        if n is not None and n != number:
            raise DataError(f"{path}: features has {n:,} rows but there are {int(number):,} nodes.")
        n = int(number)
    elif n is None:  # as many as the largest id says
        ids = archive["edge_index"]
        n = int(ids.max()) + 1 if ids.size else 0
    split = {part: archive[part] for part in PARTS if part in archive}
    return Outline(n, shape[1], d, nonzeros, _labels(archive, n), check_split(path, split, n))


def _shape(archive: Archive, key: str, dimensions: int, what: str, kinds: str) -> tuple[int, ...]:
    """The shape of an entry that is as it must be, from its header."""
    shape, dtype = archive.header(key)
    if len(shape) != dimensions:
        raise DataError(f"{archive.path}: {key} must have {what}, not shape {shape}.")
    if dtype.kind not in kinds and 0 not in shape:
        numbers = "integers" if kinds == "iu" else "real numbers"
        raise DataError(f"{archive.path}: {key} must hold {numbers}, not {dtype}.")
    return shape


def _feature_shape(archive: Archive) -> tuple[int | None, int | None, int | None]:
    """Rows, columns and non-zeros (None: dense) of the features, from their headers."""
    if "features" in archive:
        what = "one row per node and one column per feature"
        n, d = _shape(archive, "features", 2, what, "fiub")
        return n, d, None
    missing = [key for key in _SPARSE if key not in archive]
    if len(missing) == len(_SPARSE):
        return None, None, None
    if missing:
        raise DataError(f"{archive.path}: the sparse features lack {', '.join(missing)}.")
    kinds = ("fiub", "iu", "iu", "iu")
    shapes = [_shape(archive, key, 1, "one dimension", k) for key, k in zip(_SPARSE, kinds)]
    size = archive["feature_shape"]
    if size.shape != (2,) or size.min() < 0:
        raise DataError(
            f"{archive.path}: feature_shape must be (nodes, features), not {size.tolist()}."
        )
    return int(size[0]), int(size[1]), shapes[0][0]


def _features(archive: Archive) -> Any:
    if "features" in archive:
        return archive["features"]
    data, indices, indptr, shape = (archive[key] for key in _SPARSE)
    try:
        X = sp.csr_array((data, indices, indptr), shape=tuple(int(k) for k in shape))
        X.check_format(full_check=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{archive.path}: sparse features do not fit together ({error}).") from None
    return X if X.dtype.kind == "f" else X.astype(np.float32)


def _labels(archive: Archive, n: int) -> Any:
    """Labels or targets, those of `no_label_nodes` taken away; None where there are none."""
    if "labels" not in archive:
        return None
    try:
        y = as_labels("labels", archive["labels"])
        if y.ndim == 1 and y.dtype.kind in "iu":
            y = y.astype(np.int64)  # room for -1
        if y.shape[0] != n:
            raise ValueError(f"labels has {y.shape[0]:,} rows but there are {n:,} nodes.")
        if "no_label_nodes" in archive and y.dtype.kind != "b":
            without = node_rows(archive["no_label_nodes"], n, "no_label_nodes")
            y = y.copy()
            if y.dtype.kind in "iu" and y.ndim == 2:
                y = y.astype(np.float64)
            y[without] = {"U": "", "f": np.nan}.get(y.dtype.kind, -1)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{archive.path}: {error}") from None
    return y


def digits(neighbours: int = 10, random_state: int = 0) -> Dataset:
    """1,797 handwritten digits as a graph of nearest neighbours; embedded, no download.

    The 8 x 8 images are the test part of "Optical Recognition of Handwritten Digits" by
    E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, CC BY 4.0).  Each image is joined
    to its nearest ones; X holds the pixels scaled to [0, 1] and a constant.

    Examples
    --------
    >>> from herta_gpu.datasets import digits
    >>> data = digits()
    >>> data.graph.num_nodes, data.X.shape, len(data.split["train"])
    (1797, (1797, 65), 179)
    """
    with np.load(str(files(__package__) / "digits.npz")) as stored:
        pixels, y = stored["pixels"] / 16.0, stored["labels"].astype(np.int64)
    n = y.shape[0]
    squares = (pixels**2).sum(axis=1)
    distance = squares[:, None] + squares[None, :] - 2 * pixels @ pixels.T
    np.fill_diagonal(distance, np.inf)
    near = np.argpartition(distance, neighbours, axis=1)[:, :neighbours]
    source = np.repeat(np.arange(n), neighbours)
    graph = Graph.from_edges(np.stack([source, near.ravel()]), num_nodes=n)
    shuffled = np.random.default_rng(random_state).permutation(n)
    a, b = n // 10, n // 5
    split = {"train": shuffled[:a], "valid": shuffled[a:b], "test": shuffled[b:]}
    X = np.column_stack([pixels, np.ones(n)])
    metadata = {"metric": "accuracy", "source": "embedded"}
    return Dataset("digits", graph, X, y, {k: np.sort(v) for k, v in split.items()}, metadata)
