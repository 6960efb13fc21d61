"""The processes that mpirun started this command on; one, as a rule."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from herta_gpu.datasets import Dataset
from herta_gpu.plumbing.machine import launched

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

    def agreed(self, x: Any) -> Any:
        """What the first process has; the others need not even make it."""
        return x if self.team is None else self.team.agreed(x)

    def least(self, x: int) -> int:
        """The smallest of what the processes have."""
        return x if self.team is None else min(self.team.each(x))

    def prepared_by_first(self, work: Callable[[], Any]) -> None:
        """Let the first process do this for all, however long it takes, unless it is alone."""
        if self.team is not None:
            with self.team.patient():
                if self.first:
                    work()
                self.team.arrive()

    def shared(self, data: Dataset, split: str, partition: str) -> Dataset:
        """The dataset with a graph that all processes work on; by nodes, this one's rows of it."""
        if self.team is None:
            return data
        graph = data.graph.on_ranks(self.comm, split, partition)
        return data.rows_of(graph) if split == "nodes" else replace(data, graph=graph)

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
