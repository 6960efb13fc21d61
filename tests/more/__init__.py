"""What the tests of labels and of smoothing share."""

from __future__ import annotations

from typing import Any

import numpy as np

from herta_gpu import Graph


def awkward_graph(seed: int) -> tuple[Any, Graph, int, Any, Any]:
    """(generator, graph, number of classes, labels, training nodes): one of these, or all.

    Isolated nodes, weights over twelve orders, an order of its own.
    """
    rng = np.random.default_rng(seed)
    n, c = int(rng.integers(1, 30)), int(rng.integers(1, 5))
    edges = np.unique(np.sort(rng.integers(0, n, (2, int(rng.integers(0, 3 * n)))), axis=0), axis=1)
    weights = 10.0 ** rng.uniform(-6, 6, edges.shape[1]) if rng.integers(0, 2) else None
    graph = Graph.from_edges(edges, n, edge_weight=weights)
    graph = graph.reordered("rcm") if rng.integers(0, 2) else graph
    y = rng.integers(0, c, n)
    rows = np.sort(rng.permutation(n)[: int(rng.choice([1, n, max(1, n // 2)]))])
    return rng, graph, c, y, rows
