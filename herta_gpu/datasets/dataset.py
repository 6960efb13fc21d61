"""What every loader returns, what can be done with it before training, and where data lies."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.graph import Graph
from herta_gpu.planning.settings import NORMALIZATIONS
from herta_gpu.plumbing.checks import as_labels, check_choice, has_label, part_ids
from herta_gpu.plumbing.files import DataError
from herta_gpu.plumbing.scaling import column_units, in_units, scaled_rows

PARTS = ("train", "valid", "test")


@dataclass(repr=False)
class Dataset:
    """A graph with features, labels and a split of the nodes.

    Attributes
    ----------
    name : str
    graph : Graph
    X : array, memory map or SciPy CSR matrix, (n, d)
        None when only the graph was asked for.
    y : array
        (n,) int labels with -1 for unlabelled, (n,) text with "" for unlabelled, (n,) floats to
        be predicted as such, or (n, c) of them for several tasks.
    split : dict of "train", "valid", "test" to node ids
        Empty when the data comes without one: see `random_split`.
    metadata : dict
        "metric" ("accuracy" or "rocauc"), "source", and "note" where the user should know more.
    """

    name: str
    graph: Graph
    X: Any
    y: Any
    split: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        X = "no features" if self.X is None else f"X {self.X.shape[0]:,} x {self.X.shape[1]:,}"
        if self.X is not None:
            X += f" {self.X.dtype}{' sparse' * sp.issparse(self.X)}"
        y = "no labels" if self.y is None else f"{self.num_classes:,} outputs"
        split = ", ".join(f"{part} {len(ids):,}" for part, ids in self.split.items())
        return f"Dataset({self.name}: {self.graph}, {X}, {y}, {split or 'no split'})"

    @property
    def num_classes(self) -> int:
        """Columns of the model's output."""
        return 0 if self.y is None else num_outputs(self.y)

    @property
    def metric(self) -> str:
        return str(self.metadata.get("metric", "accuracy"))

    def labelled(self) -> Any:
        """Ids of the nodes with a label."""
        if self.y is None:
            raise ValueError(f"The dataset {self.name} has no labels to train on.")
        return np.flatnonzero(has_label(as_labels("y", self.y)))

    def random_split(self, share: float, random_state: int = 0) -> Dataset:
        """A copy that trains on a random share of the labelled nodes; the rest is halved.

        Examples
        --------
        >>> from herta_gpu.datasets import load
        >>> data = load("digits").random_split(0.8)
        >>> [len(data.split[part]) for part in ("train", "valid", "test")]
        [1437, 180, 180]
        """
        if not 0 < share < 1:
            raise ValueError(f"The share of a random split must lie between 0 and 1, not {share}.")
        labelled = self.labelled()
        if labelled.size == 0:
            raise ValueError(f"{self.name} has no node with a label: there is nothing to split.")
        nodes = np.random.default_rng(random_state).permutation(labelled)
        a = min(max(1, int(share * nodes.shape[0])), nodes.shape[0])
        b = a + (nodes.shape[0] - a) // 2
        cut = {"train": nodes[:a], "valid": nodes[a:b], "test": nodes[b:]}
        return replace(self, split={part: np.sort(ids) for part, ids in cut.items()})

    def with_split(self, wish: str | None, random_state: int = 0) -> Dataset:
        """The split `wish`: "public", "random:0.8", or None: the public one if there is one."""
        if wish is None and not self.split:
            return self.random_split(0.8, random_state)
        if wish is None or wish == "public":
            if not self.split:
                raise ValueError(f'{self.name} has no public split: use "random:0.8".')
            checked = check_training_split(self.name, self.split, self.graph.num_nodes)
            return replace(self, split=checked)
        try:
            kind, share = str(wish).split(":")
            number = float(share if kind == "random" else "none")
        except ValueError:
            sentence = f'The split must be "public" or like "random:0.8", not {wish!r}.'
            raise ValueError(sentence) from None
        return self.random_split(number, random_state)

    def rows_of(self, part: Graph) -> Dataset:
        """The rows of the nodes that `part`, a graph split by nodes, has here, a range mapped."""
        at = part.nodes
        split = {name: _places(np.asarray(ids), at) for name, ids in self.split.items()}
        X, y = (None if rows is None else rows[at] for rows in (self.X, self.y))
        return replace(self, graph=part, X=X, y=y, split=split)

    def normalization(self, how: str | None = None) -> str:
        """How `normalized` would change the features."""
        if how is None:
            how = "row" if sp.issparse(self.X) and self.X.min() >= 0 else "none"
        check_choice("normalize", how, NORMALIZATIONS)
        return how

    def normalized(self, how: str | None = None) -> Dataset:
        """A copy with other features: "row" sums to 1, "unit" rows of length 1,
        "standard" columns, "none", or None.

        None is "row" for bags of words (a sparse X without negative numbers), "none" otherwise.
        Columns are those of all processes, where each has rows of its own.
        """
        how, X, graph = self.normalization(how), self.X, self.graph
        if how == "standard":
            n = graph.nodes_of_all if graph.by_nodes else X.shape[0]
            team = graph.team if graph.by_nodes else None
            X = in_units(X, *column_units(X, np.asarray if team is None else team.total, n))
        elif how != "none":
            X = scaled_rows(X, how)
        return replace(self, X=X, metadata={**self.metadata, "normalize": how})


def num_outputs(y: Any) -> int:
    """Columns of the output of a model for the labels or targets y."""
    y = as_labels("y", y)
    if y.ndim == 2:
        return int(y.shape[1])
    if y.dtype.kind == "U":
        return int(np.unique(y[has_label(y)]).shape[0])
    return 1 if y.dtype.kind == "f" else int(y.max(initial=-1)) + 1


def check_split(source: Any, split: dict[str, Any], n: int) -> dict[str, Any]:
    """Node ids of the parts, from ids or masks; no node may be in two of them."""
    found: dict[str, Any] = {}
    for part, given in split.items():
        try:
            found[part] = part_ids(part, _whole(given), n)
        except ValueError as error:
            raise DataError(f"{source}: {error}") from None
    for part, other in combinations(found, 2):
        twice = np.intersect1d(found[part], found[other], assume_unique=True)
        if twice.size:
            raise DataError(
                f"{source}: {part} and {other} overlap, in {twice.size:,} nodes of which the first "
                f"is {twice[0]}: a node may be in one part only, or scores mean nothing."
            )
    return found


def check_training_split(source: Any, split: dict[str, Any], n: int) -> dict[str, Any]:
    """The same, of a split that is to be trained on."""
    if split.get("train") is None:
        raise DataError(
            f"{source} has {' and '.join(split)} but no train: add the ids of the training nodes, "
            "or use --split random:0.8."
        )
    found = check_split(source, split, n)
    if found["train"].size == 0:
        raise DataError(f"{source}: train is empty, so there is no training node.")
    return found


def _whole(given: Any) -> Any:
    """Ids that a file holds as floats, as some programs write them, if they are whole."""
    given = np.asarray(given)
    if given.dtype.kind != "f" or not np.isfinite(given).all():
        return given
    bad = given[given != np.floor(given)]
    if bad.size:
        raise ValueError(f"{bad.flat[0]:g} is no node id: ids are whole numbers.")
    # Beyond this, floats skip whole numbers; and no graph has such ids.
    return np.clip(given, -(2.0**53), 2.0**53).astype(np.int64)


def _places(ids: Any, nodes: Any) -> Any:
    """Where those of `ids` that are among `nodes`, a slice or rising ids, stand there."""
    if isinstance(nodes, slice):
        return ids[(ids >= nodes.start) & (ids < nodes.stop)] - nodes.start
    at = np.searchsorted(nodes, ids)
    return at[np.isin(ids, nodes, assume_unique=True)]


# ---- where data lies -------------------------------------------------------------------------
def data_dirs(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """The folders to look into: the one given, else HERTA_DATA (several with a separator)."""
    if data_dir is not None:
        if not Path(data_dir).is_dir():
            raise FileNotFoundError(f"The data folder {data_dir} does not exist.")
        return [Path(data_dir)]
    return [Path(p) for p in os.environ.get("HERTA_DATA", "").split(os.pathsep) if p]


def cache_dir() -> Path:
    """Where prepared data is kept: HERTA_CACHE, or the user's cache folder."""
    given = os.environ.get("HERTA_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "herta_gpu"


def again(folder: Path) -> str:
    """What helps where a file of the cache is damaged."""
    return f"delete the folder {folder} and load again"
