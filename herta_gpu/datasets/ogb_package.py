"""Datasets of OGB through its own package, where its files are not read by us.

What ogb has processed before is read, too, although recent versions of torch refuse it.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.datasets.dataset import Dataset
from herta_gpu.datasets.ogb_files import FROM_FILES, places_text
from herta_gpu.graph import Graph
from herta_gpu.plumbing.files import DataError

_METRICS = {"acc": "accuracy", "rocauc": "rocauc"}
_PAPERS = ("paper", "cites", "paper")


def ask_ogb(name: str, root: Path, meta_dict: dict[str, Any] | None) -> Dataset:
    """A dataset as the package ogb reads it from `root`, or downloads it there."""
    try:
        from ogb.nodeproppred import NodePropPredDataset
    except ImportError as error:
        files = f", or put {places_text(name)} into a data folder" if name in FROM_FILES else ""
        raise ImportError(
            f'{name} is loaded by the package ogb ({error}): pip install "herta_gpu[ogb]"{files}.'
        ) from None
    with _trust_torch(), contextlib.redirect_stdout(sys.stderr):
        try:
            source = NodePropPredDataset(name=name, root=str(root), meta_dict=meta_dict)
            graph, labels = source[0]
            split = source.get_idx_split()
        except Exception as error:  # ogb and pandas raise all kinds at a damaged file
            raise _explain(error, name, root, meta_dict) from error
        except SystemExit:
            raise RuntimeError(f"{name} is not on disk and its download was declined.") from None
    if "edge_index_dict" in graph:  # ogbn-mag: only its papers have features
        graph = {
            "edge_index": graph["edge_index_dict"][_PAPERS],
            "node_feat": graph["node_feat_dict"]["paper"],
            "num_nodes": graph["num_nodes_dict"]["paper"],
        }
        labels, split = labels["paper"], {part: ids["paper"] for part, ids in split.items()}
    n = int(graph["num_nodes"])
    X = graph.get("node_feat")
    if X is None:
        X = _mean_edge_features(graph["edge_index"], graph["edge_feat"], n)
    y = np.asarray(labels)
    if y.ndim == 2 and y.shape[1] > 1:
        y = y.astype(np.float32)  # one column per task
    else:  # classes, for which OGB has NaN where it knows none
        y = y.reshape(y.shape[0])
        y = (np.where(np.isnan(y), -1, y) if y.dtype.kind == "f" else y).astype(np.int64)
    metadata = {"metric": _METRICS.get(source.eval_metric, "accuracy"), "source": "ogb"}
    return Dataset(
        name,
        Graph.from_edges(graph["edge_index"], n),
        np.asarray(X),
        y,
        {part: np.sort(np.asarray(ids, dtype=np.int64)) for part, ids in split.items()},
        metadata,
    )


def _explain(
    error: Exception, name: str, root: Path, meta_dict: dict[str, Any] | None
) -> Exception:
    """What went wrong in ogb, in one sentence that names the file if there is one to blame."""
    folder = root / name.replace("-", "_") if meta_dict is None else Path(meta_dict["dir_path"])
    for path in sorted(folder.rglob("*.gz")):
        try:
            with gzip.open(path, "rb") as file:
                while file.read(1 << 24):
                    pass
        except (OSError, EOFError, zlib.error) as reason:
            return DataError(
                f"{path} ({reason}) is damaged: delete the folder {folder} and load again."
            )
    if isinstance(error, EOFError) and not folder.is_dir():  # nobody there to answer ogb's question
        return RuntimeError(f"{name} is not on disk and its download was declined.")
    if isinstance(error, OSError):
        return RuntimeError(f"ogb could neither read {name} from {root} nor download it ({error}).")
    return RuntimeError(
        f"ogb could not read {name} from {root} ({type(error).__name__}: {error}): "
        "if a file there is damaged, delete the folder and load again."
    )


@contextlib.contextmanager
def _trust_torch() -> Iterator[None]:
    """Since torch 2.6 `torch.load` reads tensors only, and ogb's own files hold NumPy arrays."""
    switch = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f".*{switch}")
            yield
    finally:
        del os.environ[switch]
        os.environ |= {} if before is None else {switch: before}


def _mean_edge_features(edge_index: Any, edge_feat: Any, n: int) -> Any:
    """ogbn-proteins has features on edges only: each node gets the mean of those at its edges."""
    ends = np.asarray(edge_index)
    count = np.maximum(sum(np.bincount(end, minlength=n) for end in ends), 1)
    X = np.empty((n, edge_feat.shape[1]), dtype=np.float32)
    for j in range(edge_feat.shape[1]):
        column = np.asarray(edge_feat[:, j], dtype=np.float64)
        X[:, j] = sum(np.bincount(end, weights=column, minlength=n) for end in ends) / count
    return X
