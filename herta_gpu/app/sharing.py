"""What the processes of `herta train` share out, and why: blocks of columns, or nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.app.crew import Crew
from herta_gpu.app.plan import cheapest
from herta_gpu.backends import backend_for, get_backend
from herta_gpu.datasets import Dataset, DataSizes
from herta_gpu.herta import HERTA, works_by_nodes
from herta_gpu.planning.forecast import assumptions, chosen, splits
from herta_gpu.planning.plan import Decision
from herta_gpu.plumbing.partition import checked_partition, rows_moved
from herta_gpu.plumbing.reading import mapping_of
from herta_gpu.plumbing.stages import Stages
from herta_gpu.plumbing.validation import memory_budget, train_rows


@dataclass(frozen=True)
class Sharing:
    """What was asked for, and what became of it."""

    crew: Crew
    wish: str = "auto"
    partition: str = "blocks"
    decision: Decision | None = None  # None: not decided yet, or there is one process

    @property
    def split(self) -> str | None:
        """ "columns" or "nodes"; None in one process."""
        return None if self.decision is None else self.decision.choice

    @property
    def partitioned(self) -> str | None:
        """How nodes are shared out, if they are: a word, or a path that is found from anywhere."""
        if self.split != "nodes":
            return None
        word = self.partition in ("blocks", "metis")
        return self.partition if word else os.path.abspath(self.partition)

    def check(self, smoothed: bool) -> None:
        """Say what is wrong before anything is loaded."""
        checked_partition(self.partition)
        if self.partition == "metis" and find_spec("pymetis") is None:
            raise ImportError('--partition metis needs pymetis: pip install "herta_gpu[metis]".')
        if self.wish == "nodes" and smoothed and self.crew.size > 1:
            raise ValueError(
                "Correct and Smooth needs all nodes: use --split columns, or leave it out."
            )

    def decided(self, data: Dataset, model: HERTA, smoothed: bool, stages: Stages) -> Sharing:
        """The same, with a decision for these data; it is told if `stages` are."""
        if self.crew.team is None:
            if self.wish != "auto":
                stages.note("There is one process: nothing is split.", stays=True)
            return self
        decision = Decision("split", self.wish, "as asked")
        if self.wish == "auto":
            # The crew goes with the data: each process looks at a GPU of its own.
            free = get_backend(model.device, data.graph, data.X, self.crew).memory_available()
            budget = memory_budget(model.memory_budget, self.crew.least(free))
            here = self._automatic(data, model, smoothed, budget) if self.crew.first else None
            decision = self.crew.agreed(here)
        by = f" by {self.partition}" * (decision.choice == "nodes")
        stages.note(
            f"{self.crew.size} ranks share out {decision.choice}{by}: {decision.why}", stays=True
        )
        return replace(self, decision=decision)

    def _automatic(self, data: Dataset, model: HERTA, smoothed: bool, budget: int) -> Decision:
        """By memory and predicted seconds, unless only one way works."""
        backend = backend_for(model.device, data.graph, data.X)
        reason = works_by_nodes(model, backend)
        if smoothed or reason is not None:
            return Decision("split", "columns", reason or "Correct and Smooth needs all nodes")
        sizes, size = _sizes(data), self.crew.size
        made, _ = cheapest(HERTA(**model.get_params()), sizes, budget)
        word, seconds = np.dtype(model.dtype).itemsize, made.cost[made.strategy]
        # METIS itself takes as long as a short fit: what it would find is not looked for twice.
        cut = None if self.partition == "metis" else rows_moved(data.graph, size, self.partition)
        held = 0 if mapping_of(data.X) is not None else _bytes(data.X)
        numbers = (sizes.n, sizes.d, sizes.n_train, word, size, seconds, cut, held)
        found = chosen(splits(made, *numbers), budget)
        return found._replace(why=f"{found.why} ({assumptions(cut, self.partition)})")

    def shared(self, data: Dataset) -> Dataset:
        """The dataset as this process works on it."""
        return data if self.split is None else self.crew.shared(data, self.split, self.partition)


def _sizes(data: Dataset) -> DataSizes:
    train = train_rows(data.split["train"], np.ones(data.graph.num_nodes, bool), len(data.y))
    nonzeros = data.X.nnz if sp.issparse(data.X) else None
    mapped = mapping_of(data.graph.indices) is not None
    graph = data.graph
    return DataSizes(
        graph.num_nodes, graph.num_edges, data.X.shape[1], data.num_classes, len(train), nonzeros,
        mapped,
    )  # fmt: skip


def _bytes(X: Any) -> int:
    return int(12 * X.nnz if sp.issparse(X) else X.nbytes)
