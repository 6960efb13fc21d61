"""The processes that mpirun started this command on (one, as a rule), and what they share out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.app.plan import cheapest, ranks_sizes
from herta_gpu.backends import backend_for, get_backend
from herta_gpu.datasets import Dataset, DataSizes
from herta_gpu.herta import HERTA, works_by_nodes
from herta_gpu.planning.forecast import assumptions, choose_split, splits
from herta_gpu.planning.plan import Decision
from herta_gpu.plumbing.checks import train_rows
from herta_gpu.plumbing.machine import launched
from herta_gpu.plumbing.partition import checked_partition, rows_moved
from herta_gpu.plumbing.progress import Stages
from herta_gpu.plumbing.reading import mapping_of

if TYPE_CHECKING:
    from herta_gpu.backends.ranks import Ranks

SPLITS = ("auto", "columns", "nodes")  # what processes share out
_PATIENCE = 1.0  # seconds that the first process has to say what is wrong


@dataclass(frozen=True)
class Crew:
    """All processes of this command; the first one of them speaks and writes for all."""

    comm: Any = None
    team: Ranks | None = None

    @property
    def size(self) -> int:
        return 1 if self.team is None else self.team.size

    @property
    def first(self) -> bool:
        """Whether this process prints, and owns the run folder."""
        return self.team is None or self.team.rank == 0

    def agree(self, x: Any) -> Any:
        """What the first process has; the others need not even make it."""
        return x if self.team is None else self.team.agree(x)

    def let_first(self, work: Callable[[], Any]) -> None:
        """Let the first of several processes do this for all, however long it takes."""
        if self.team is not None:
            with self.team.patient():
                if self.first:
                    work()
                self.team.arrive()

    def together(self) -> AbstractContextManager[None]:
        """Around the command: an error of one process is an error of all."""
        return nullcontext() if self.team is None else self.team.together()

    def part(self) -> None:
        """Wait for all to come here: mpirun would end them all with the first one that fails."""
        if self.team is not None:
            self.team.arrive()
        elif launched().rank > 0:
            time.sleep(_PATIENCE)  # the first one speaks


def crew(command: str) -> Crew:
    """The processes that this one was started with."""
    size = launched().size
    if size == 1:
        return Crew()
    if command != "train":
        raise ValueError(
            f"herta {command} works in one process, but {size} were started: leave mpirun out."
        )
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            f'Training on {size} processes needs mpi4py ({error}): pip install "herta_gpu[mpi]".'
        ) from None
    from herta_gpu.backends.ranks import ranks_of

    if MPI.COMM_WORLD.size != size:
        raise RuntimeError(
            f"{size} processes were started, but mpi4py knows of {MPI.COMM_WORLD.size}: it was "
            "built for another MPI than the one that started them."
        )
    return Crew(MPI.COMM_WORLD, ranks_of(MPI.COMM_WORLD))


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

    def decide(self, data: Dataset, model: HERTA, smoothed: bool, stages: Stages) -> Sharing:
        """The same, with a decision for these data; it is told if `stages` are."""
        team = self.crew.team
        if team is None:
            if self.wish != "auto":
                stages.note("There is one process: nothing is split.", stays=True)
            return self
        decision = Decision("split", self.wish, "as asked")
        if self.wish == "auto":
            # The crew goes with the data: each process looks at a GPU of its own.
            backend = get_backend(model.device, data.graph, data.X, self.crew)
            budget = min(team.each(backend.plan_budget(model.memory_budget)))
            here = self._choose(data, model, smoothed, budget) if self.crew.first else None
            decision = self.crew.agree(here)
        by = f" by {self.partition}" * (decision.choice == "nodes")
        stages.note(f"{team.size} ranks share out {decision.choice}{by}: {decision.why}", True)
        return replace(self, decision=decision)

    def _choose(self, data: Dataset, model: HERTA, smoothed: bool, budget: int) -> Decision:
        """By memory and predicted seconds, unless only one way works."""
        reason = works_by_nodes(model, backend_for(model.device, data.graph, data.X))
        if smoothed or reason is not None:
            return Decision("split", "columns", reason or "Correct and Smooth needs all nodes")
        (graph, X), size = (data.graph, data.X), self.crew.size
        train = train_rows(data.split["train"], np.ones(graph.num_nodes, bool), len(data.y))
        numbers = (graph.num_nodes, graph.num_edges, X.shape[1], data.num_classes, len(train))
        nonzeros = X.nnz if sp.issparse(X) else None
        sizes = DataSizes(*numbers, nonzeros, mapping_of(graph.indices) is not None)
        made, _ = cheapest(HERTA(**model.get_params()), sizes, budget)
        held = 12 * X.nnz if sp.issparse(X) else 0 if mapping_of(X) is not None else X.nbytes
        # METIS itself takes as long as a short fit: what it would find is not looked for twice.
        cut = None if self.partition == "metis" else rows_moved(graph, size, self.partition)
        ranks = ranks_sizes(sizes, model.dtype, size, int(held))
        found = choose_split(splits(made, ranks, made.cost[made.strategy], cut), budget)
        return found._replace(why=f"{found.why} ({assumptions(cut, self.partition)})")

    def share(self, data: Dataset) -> Dataset:
        """The dataset as this process works on it: by nodes, its rows; by columns, all of it."""
        if self.split is None:
            return data
        graph = data.graph.on_ranks(self.crew.comm, self.split, self.partition)
        return data.rows_of(graph) if self.split == "nodes" else replace(data, graph=graph)
