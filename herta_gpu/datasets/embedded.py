"""Data that ships with the package."""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from herta_gpu.datasets.dataset import Dataset
from herta_gpu.graph import Graph


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
