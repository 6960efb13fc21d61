"""What every loader returns, and what can be done with it before training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.graph import Graph
from herta_gpu.validation import check_choice

PARTS = ("train", "valid", "test")
NORMALIZATIONS = ("none", "row", "standard")


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
        (n,) int labels with -1 for unlabelled, or (n, c) floats for several tasks.
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
        if self.y is None:
            return 0
        return int(self.y.shape[1]) if self.y.ndim == 2 else int(self.y.max()) + 1

    @property
    def metric(self) -> str:
        return str(self.metadata.get("metric", "accuracy"))

    def labelled(self) -> Any:
        """Ids of the nodes with a label."""
        if self.y is None:
            raise ValueError(f"The dataset {self.name} has no labels to train on.")
        return np.flatnonzero(self.y >= 0) if self.y.ndim == 1 else np.arange(self.y.shape[0])

    def feature_rows(self, chunk: int = 1 << 16) -> Iterator[tuple[slice, Any]]:
        """(rows, X[rows]) a chunk at a time: a memory-mapped X is never read whole."""
        n = self.X.shape[0]
        for a in range(0, n, chunk):
            at = slice(a, min(a + chunk, n))
            yield at, self.X[at]

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
        nodes = np.random.default_rng(random_state).permutation(self.labelled())
        a = min(max(1, int(share * nodes.shape[0])), nodes.shape[0])
        b = a + (nodes.shape[0] - a) // 2
        cut = {"train": nodes[:a], "valid": nodes[a:b], "test": nodes[b:]}
        return replace(self, split={part: np.sort(ids) for part, ids in cut.items()})

    def with_split(self, wish: str | None, random_state: int = 0) -> Dataset:
        """The split `wish`: "public", "random:0.8", or None: the public one if there is one."""
        if wish is None:
            return self if self.split else self.random_split(0.8, random_state)
        if wish == "public":
            if not self.split:
                raise ValueError(f'{self.name} has no public split: use "random:0.8".')
            return self
        kind, _, share = wish.partition(":")
        try:
            if kind != "random":
                raise ValueError
            number = float(share)
        except ValueError:
            raise ValueError(
                f'The split must be "public" or like "random:0.8", not {wish!r}.'
            ) from None
        return self.random_split(number, random_state)

    def with_log_degree(self) -> Dataset:
        """A copy with one more feature, log(degree); ogbn-proteins has few of its own."""
        column = np.log(self.graph.degree)
        inverse = self.graph.inverse_order()
        column = (column if inverse is None else column[inverse])[:, None]
        if sp.issparse(self.X):
            return replace(self, X=sp.csr_array(sp.hstack([self.X, column])))
        return replace(self, X=np.hstack([self.X, column.astype(self.X.dtype)]))

    def normalized(self, how: str | None = None) -> Dataset:
        """A copy with other features: "row" sums to 1, "standard" columns, "none", or None.

        None is "row" for bags of words (a sparse X without negative numbers), "none" otherwise.
        """
        if how is None:
            how = "row" if sp.issparse(self.X) and self.X.min() >= 0 else "none"
        check_choice("normalize", how, NORMALIZATIONS)
        metadata = {**self.metadata, "normalize": how}
        if how == "none":
            return replace(self, metadata=metadata)
        X = _rows_to_one(self.X) if how == "row" else _standardized(self.X)
        return replace(self, X=X, metadata=metadata)


def _rows_to_one(X: Any) -> Any:
    """Rows divided by the sum of their absolute values; empty rows stay zero."""
    if sp.issparse(X):
        total = np.asarray(abs(X).sum(axis=1)).ravel()
        return sp.csr_array(sp.diags_array(1.0 / np.where(total > 0, total, 1.0)) @ X)
    total = np.abs(X).sum(axis=1, dtype=np.float64)[:, None]
    return (X / np.where(total > 0, total, 1.0)).astype(_float_of(X))


def _standardized(X: Any) -> Any:
    """Columns of variance 1 and, unless that would fill a sparse X with numbers, mean 0."""
    if sp.issparse(X):
        square = np.asarray(X.multiply(X).mean(axis=0)).ravel()
        deviation = np.sqrt(np.maximum(square - np.asarray(X.mean(axis=0)).ravel() ** 2, 0.0))
        return sp.csr_array(X @ sp.diags_array(1.0 / np.where(deviation > 0, deviation, 1.0)))
    mean = X.mean(axis=0, dtype=np.float64)
    deviation = X.std(axis=0, dtype=np.float64)
    # A constant column is kept: it is the intercept.
    constant = deviation <= 1e-12 * np.maximum(np.abs(mean), 1e-300)
    mean, deviation = np.where(constant, 0.0, mean), np.where(constant, 1.0, deviation)
    return ((X - mean) / deviation).astype(_float_of(X))


def _float_of(X: Any) -> Any:
    return X.dtype if X.dtype in (np.float32, np.float64) else np.float32
