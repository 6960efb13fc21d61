"""What this machine has: memory and threads.  It imports next to nothing: `app.cli` begins here."""

from __future__ import annotations

import os
from typing import NamedTuple

# What launchers of MPI programs tell each process: its rank, how many there are, and how many of
# them are on its machine (Open MPI, MPICH and Intel MPI, MVAPICH, srun).
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL = (
    "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip


class Launched(NamedTuple):
    """How this process was started: `rank` of `size`, `local` of them on this machine."""

    size: int
    rank: int
    local: int


def launched() -> Launched:
    """How this process was started, as far as its environment tells; by default, alone."""

    def number(names: tuple[str, ...], default: int) -> int:
        given = next((os.environ[name] for name in names if name in os.environ), "")
        first = given.partition("(")[0].partition(",")[0]  # srun: "4(x2)", 4 on each of 2 machines
        return int(first) if first.isdigit() else default

    size = max(1, number(_SIZE, 1))
    rank = number(_RANK, 0) if size > 1 else 0
    return Launched(size, rank, min(size, max(1, number(_LOCAL, 1))))


def host_memory() -> int:
    """Bytes of the host's memory that are free: this process's share of them."""
    free = 4 << 30
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(int(s.split()[1]) << 10 for s in lines if s.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return free // launched().local


def num_threads() -> int:
    """Threads to use: ``HERTA_NUM_THREADS``, or every core this process may run on.

    Processes that one launcher started share the cores of their machine.
    """
    given = os.environ.get("HERTA_NUM_THREADS", "")
    if given:
        if not given.isdigit() or int(given) < 1:
            raise ValueError(f"HERTA_NUM_THREADS must be a positive integer, not {given!r}.")
        return int(given)
    cores = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(mine, cores // launched().local))
