"""One .npz file per dataset: edges, features, labels and a split, without pickles.

Keys: `edge_index` (2 x m), `num_nodes`; dense `features`, or a sparse X as `feature_data`,
`feature_indices`, `feature_indptr` and `feature_shape`; `labels` (-1: none) and node ids `train`,
`valid`, `test` where there are any.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.datasets.dataset import PARTS, Dataset
from herta_gpu.files import DataError
from herta_gpu.graph import Graph

_SPARSE = ("feature_data", "feature_indices", "feature_indptr", "feature_shape")
_BROKEN = (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error)


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
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array, not an archive")
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path}.") from None
    except _BROKEN as error:
        raise DataError(f"{path} is not a whole .npz archive ({error}).") from None
    with archive:
        return _dataset(path, archive, name or path.stem, features)


def _dataset(path: Path, archive: Any, name: str, features: bool) -> Dataset:
    if "edge_index" not in archive:
        raise DataError(
            f"{path} has no edge_index but {', '.join(archive.files) or 'nothing'}: "
            "it is no graph dataset."
        )
    n = int(_read(path, archive, "num_nodes")) if "num_nodes" in archive else None
    try:
        graph = Graph.from_edges(_read(path, archive, "edge_index"), num_nodes=n)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    X = _features(path, archive) if features else None
    y = _read(path, archive, "labels") if "labels" in archive else None
    if y is not None and y.ndim == 1 and y.dtype.kind in "iu":
        y = y.astype(np.int64)
        if "no_label_nodes" in archive:
            y[_read(path, archive, "no_label_nodes")] = -1
    for key, block in (("features", X), ("labels", y)):
        if block is not None and block.shape[0] != graph.num_nodes:
            raise DataError(
                f"{path}: {key} has {block.shape[0]:,} rows but there are "
                f"{graph.num_nodes:,} nodes."
            )
    split = {part: _ids(path, archive, part, graph.num_nodes) for part in PARTS if part in archive}
    metadata = {"metric": "accuracy", "source": path.name}
    if "feature_note" in archive:
        metadata["note"] = str(_read(path, archive, "feature_note"))
    return Dataset(name, graph, X, y, split, metadata)


def _features(path: Path, archive: Any) -> Any:
    if "features" in archive:
        return _read(path, archive, "features")
    if not all(key in archive for key in _SPARSE):
        return None
    data, indices, indptr, shape = (_read(path, archive, key) for key in _SPARSE)
    try:
        X = sp.csr_array((data, indices, indptr), shape=tuple(int(k) for k in shape))
        X.check_format(full_check=True)
    except ValueError as error:
        raise DataError(f"{path}: the sparse features do not fit together ({error}).") from None
    return X if X.dtype.kind == "f" else X.astype(np.float32)


def _ids(path: Path, archive: Any, part: str, n: int) -> Any:
    ids = _read(path, archive, part).astype(np.int64)
    if ids.ndim != 1 or (ids.size and (ids.min() < 0 or ids.max() >= n)):
        raise DataError(f"{path}: {part} must be a list of node ids in 0..{n - 1}.")
    return ids


def _read(path: Path, archive: Any, key: str) -> Any:
    try:
        return archive[key]
    except _BROKEN as error:
        raise DataError(f"{path} is damaged: its entry {key} cannot be read ({error}).") from None


def npz_shapes(path: Path) -> dict[str, Any]:
    """Shapes of the entries from their headers, and the small numbers themselves."""
    shapes: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.namelist():
                with archive.open(entry) as member:
                    version = np.lib.format.read_magic(member)
                    reader = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shapes[entry.removesuffix(".npy")] = reader(member)[0]
        with np.load(path, allow_pickle=False) as archive:
            for key in ("num_nodes", "feature_shape", "labels"):
                if key in archive:
                    shapes[f"{key} itself"] = archive[key]
    except _BROKEN as error:
        raise DataError(f"{path} is not a whole .npz archive ({error}).") from None
    return shapes
