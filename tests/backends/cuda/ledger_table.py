"""What a whole fit asks of the device, by stage: ``python -m tests.backends.cuda.ledger_table``.

The fit runs on the device of tests/cuda_device, so these are counts, not times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

import herta_gpu.features
import herta_gpu.herta
from herta_gpu import HERTA, Graph
from herta_gpu.backends import get_backend
from herta_gpu.plumbing.progress import Stages
from tests import cuda_device

NODES, EDGES, FEATURES, CLASSES = 200, 800, 6, 3
COLUMNS = ("launches", "library_calls", "waits", "copies_in", "copies_out", "bytes_in", "bytes_out")
HEAD = (
    "| stage | kernel launches | library calls | waits | copies to the device | copies to the host "
    "| bytes up | bytes down |"
)


def by_stage(device: Any, loss: str, streamed: bool = False) -> tuple[HERTA, dict[str, Any]]:
    """A fit that goes through every stage, and the ledger split by the innermost of them.

    With `streamed` X counts as too large for the device, and comes in parts of 50 rows.
    """
    found: dict[str, dict[str, int]] = {}
    open_ = ["inputs and result"]

    def settle() -> None:
        """What was counted until now belongs to the stage that is open."""
        counts, row = device.ledger(), found.setdefault(open_[-1], {})
        for name in COLUMNS:
            row[name] = row.get(name, 0) + counts[name]
        row["largest_out"] = max(row.get("largest_out", 0), counts["largest_out"])
        device.clear()

    class Counted(Stages):
        @contextmanager
        def __call__(self, name: str) -> Iterator[None]:
            settle()
            open_.append(name)
            try:
                with super().__call__(name):
                    yield
            finally:
                settle()
                open_.pop()

    rng = np.random.default_rng(0)
    # Repeated edges make it a weighted graph: weights move, too.
    graph = Graph.from_edges(rng.integers(0, NODES, (2, EDGES)), NODES, duplicates="sum")
    X, y = rng.standard_normal((NODES, FEATURES)), rng.integers(0, CLASSES, NODES)
    ridge = 0.1 if loss == "ce" else 0.0
    model = HERTA(lam=5.0, loss=loss, ridge=ridge, sparsify=True, sketch=True, device="cuda")
    get_backend("cuda")  # a device is tried out once, not in every fit
    device.clear()
    chunk, whole = 8 * FEATURES * 50, herta_gpu.features.chunk_bytes
    with (
        mock.patch.object(herta_gpu.herta, "Stages", Counted),
        mock.patch.object(herta_gpu.features, "fits", return_value=not streamed),
        mock.patch.object(
            herta_gpu.features, "chunk_bytes", lambda *a: chunk if streamed else whole(*a)
        ),
    ):
        model.fit(graph, X, y, np.arange(NODES // 2))
    settle()
    return model, found


def rows(stages: dict[str, Any]) -> list[list[Any]]:
    """The table: a row for each stage, and their sum."""
    table = [[name, *(counts[c] for c in COLUMNS)] for name, counts in stages.items()]
    return [*table, ["total", *(sum(row[i] for row in table) for i in range(1, len(COLUMNS) + 1))]]


def main() -> None:
    device = cuda_device.activate()
    for loss, streamed in (("mse", False), ("mse", True), ("ce", False)):
        with cuda_device.clocked(device):
            model, stages = by_stage(device, loss, streamed)
        where = ", X streamed from pinned memory" if streamed else ""
        print(f"loss={loss!r}{where}: {len(model.history_) - 1} outer steps, {model.certificate_}")
        print(f"{NODES} nodes, {FEATURES} features\n\n{HEAD}")
        print("|---" + "|---:" * len(COLUMNS) + "|")
        for name, *counts in rows(stages):
            print(" | ".join([f"| {name}", *(f"{n:,}" for n in counts)]) + " |")
        print()


if __name__ == "__main__":
    main()
