"""What a whole fit asks of the device, by stage: ``python -m tests.backends.cuda.ledger_table``.

The fit runs on the stand-in for CuPy, so these are counts, not times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np

import herta_gpu.features
import herta_gpu.herta
import herta_gpu.planning.memory
from herta_gpu import HERTA, Graph
from herta_gpu.backends import get_backend
from herta_gpu.plumbing.progress import Stages
from tests.cupy_standin import installed
from tests.cupy_standin.ledger import Ledger

NODES, EDGES, FEATURES, CLASSES = 200, 800, 6, 3


def fit(ledger: Ledger, loss: str, streamed: bool = False) -> HERTA:
    """A fit that goes through every stage, with the ledger split by stage.

    With `streamed` X counts as too large for the device, and comes in parts of 50 rows.
    """

    class Counted(Stages):
        @contextmanager
        def __call__(self, name: str) -> Iterator[None]:
            with ledger.stage(name), super().__call__(name):
                yield

    rng = np.random.default_rng(0)
    # Repeated edges make it a weighted graph: weights move, too.
    graph = Graph.from_edges(rng.integers(0, NODES, (2, EDGES)), NODES, duplicates="sum")
    X, y = rng.standard_normal((NODES, FEATURES)), rng.integers(0, CLASSES, NODES)
    model = HERTA(
        lam=5.0, loss=loss, ridge=0.1 if loss == "ce" else 0.0, sparsify=True, sketch=True,
        device="cuda",
    )  # fmt: skip
    get_backend("cuda")  # a device is tried out once, not in every fit
    ledger.clear()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(herta_gpu.herta, "Stages", Counted))
        if streamed:
            chunk = 8 * FEATURES * 50
            stack.enter_context(mock.patch.object(herta_gpu.features, "fits", return_value=False))
            stack.enter_context(mock.patch.object(herta_gpu.planning.memory, "CHUNK_BYTES", chunk))
        stack.enter_context(ledger.stage("inputs and result"))
        return model.fit(graph, X, y, np.arange(NODES // 2))


def main() -> None:
    for loss, streamed in (("mse", False), ("mse", True), ("ce", False)):
        with installed("count") as ledger:
            model = fit(ledger, loss, streamed)
        where = ", X streamed from pinned memory" if streamed else ""
        print(f"loss={loss!r}{where}: {len(model.history_) - 1} outer steps, {model.certificate_}")
        print(f"{NODES} nodes, {FEATURES} features; peak {ledger.peak:,} bytes on the device\n")
        print(ledger.table())
        print("\n| kernel | launches | bytes read | bytes written |\n|---|---:|---:|---:|")
        for name, (read, written) in sorted(ledger.traffic.items()):
            print(f"| {name} | {ledger.kernels[name]:,} | {read:,} | {written:,} |")
        print()


if __name__ == "__main__":
    main()
