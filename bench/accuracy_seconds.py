"""Accuracy against seconds: the recipe beside PyG's GCN and APPNP trained by Adam, in one run.

    HERTA_DATA=... python bench/accuracy_seconds.py [amazon-photo]

The published split.  Ours: each candidate of the recipe as it is done, and the test accuracy of the
best on the validation nodes so far.  Theirs: two layers of 64 (APPNP: 10 steps, alpha 0.1), dropout
0.5, Adam with learning rate 0.01 and weight decay 5e-4; the test accuracy of the epoch that was
best on the validation nodes so far.  One thread each; the picture is results/accuracy_seconds.svg.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from accuracy import splits
from common import RESULTS, Results
from torch_geometric.nn import APPNP, GCNConv

from herta_gpu.app.recipe import _candidates, score
from herta_gpu.datasets import Dataset
from herta_gpu.plumbing.targets import make_targets

EPOCHS, HIDDEN = 300, 64


def main() -> None:
    torch.set_num_threads(1)
    name = sys.argv[1] if len(sys.argv) > 1 else "amazon-photo"
    data = next(one for kind, _, one in splits(name) if kind == "published")
    results, curves = Results("accuracy_seconds"), {}
    for who, run in (("herta_gpu", ours), ("PyG GCN", gcn), ("PyG APPNP", appnp)):
        start, best, points = time.process_time(), -1.0, []
        for valid, test in run(data):
            if valid > best:
                best = valid
                points.append((time.process_time() - start, 100 * test))
        results.add(data=name, who=who, seconds=time.process_time() - start, points=points)
        curves[who] = points
    draw(name, curves)


def ours(data: Dataset) -> Iterator[tuple[float, float]]:
    t = make_targets(data.y, data.split["train"], data.graph.num_nodes, "mse")
    t.Y = np.asarray(t.Y)
    for _, made in _candidates(data, t, "cpu", 0):
        for _, Z in made:
            yield tuple(score(data, data.split[part], Z, t.classes) for part in ("valid", "test"))


def gcn(data: Dataset) -> Iterator[tuple[float, float]]:
    d, c = data.X.shape[1], int(data.y.max()) + 1
    first, second = GCNConv(d, HIDDEN), GCNConv(HIDDEN, c)

    def forward(X: Any, edges: Any, train: bool) -> Any:
        H = nnf.dropout(first(nnf.dropout(X, 0.5, train), edges).relu(), 0.5, train)
        return second(H, edges)

    yield from adam(data, [first, second], forward)


def appnp(data: Dataset) -> Iterator[tuple[float, float]]:
    d, c = data.X.shape[1], int(data.y.max()) + 1
    first, second = torch.nn.Linear(d, HIDDEN), torch.nn.Linear(HIDDEN, c)
    spread = APPNP(10, 0.1)

    def forward(X: Any, edges: Any, train: bool) -> Any:
        H = nnf.dropout(first(nnf.dropout(X, 0.5, train)).relu(), 0.5, train)
        return spread(second(H), edges)

    yield from adam(data, [first, second], forward)


def adam(
    data: Dataset, layers: list[Any], forward: Callable[..., Any]
) -> Iterator[tuple[float, float]]:
    """(validation, test accuracy) after each epoch."""
    torch.manual_seed(0)
    for layer in layers:
        layer.reset_parameters()
    X = data.normalized("row").X
    X = torch.from_numpy(np.asarray(X.todense() if hasattr(X, "todense") else X, dtype="float32"))
    u, v, _ = data.graph.edges()
    edges = torch.from_numpy(np.stack([np.concatenate([u, v]), np.concatenate([v, u])])).long()
    y, ids = (
        torch.from_numpy(data.y).long(),
        {k: torch.from_numpy(a) for k, a in data.split.items()},
    )
    weights = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.Adam(weights, lr=0.01, weight_decay=5e-4)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = forward(X, edges, True)[ids["train"]]
        nnf.cross_entropy(out, y[ids["train"]]).backward()
        optimizer.step()
        with torch.no_grad():
            right = forward(X, edges, False).argmax(dim=1) == y
        yield tuple(float(right[ids[part]].float().mean()) for part in ("valid", "test"))


def draw(name: str, curves: dict[str, Any]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for who, points in curves.items():
        axes.step(*zip(*points, strict=True), where="post", marker=".", label=who)
    axes.set(xscale="log", xlabel="processor seconds, one thread", ylabel="test accuracy, %",
             title=f"{name}, published split", ylim=(85, 98))  # fmt: skip
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "accuracy_seconds.svg")


if __name__ == "__main__":
    main()
