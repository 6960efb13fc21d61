"""Programs for ranks with a GPU each, which end badly."""

from __future__ import annotations

_BEGIN = """
import sys, time
from mpi4py import MPI
from tests import cupy_standin
from herta_gpu.backends import backend_for
from herta_gpu import Graph
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
"""
_TOTAL = f"""{_BEGIN}
cupy_standin.GPUS[0] = size
with cupy_standin.installed():
    edges = [[0, 1], [1, 2]] if rank == 0 else [[2], [3]]
    graph = Graph.from_edges(edges, 4, comm=MPI.COMM_WORLD, split="nodes")
    backend = backend_for("cuda", graph, None)
    x = backend.total(backend.xp.ones(3))
    if rank == 1: time.sleep(1000)
    SOON
    backend.total(x)
"""
# A rank that does not come: the others wait inside NCCL, where no poll of MPI's sees it.
HANG = _TOTAL.replace("SOON", "")
# NCCL itself reports that a peer is gone (ncclRemoteError).
LOST = _TOTAL.replace("SOON", "backend.nccl._comm.error = 6")
# The command line, on so many GPUs.
CLI = f"""{_BEGIN}
import os
from herta_gpu.app.cli import main
cupy_standin.GPUS[0] = int(os.environ["STANDIN_GPUS"])
with cupy_standin.installed():
    code = main()
sys.exit(code)
"""
