"""Several processes for one fit: MPI through mpi4py, which is imported here and nowhere else, and
NCCL for what is on GPUs, one for each rank.

Each process (a rank) runs the same program.  Two ways to split the work:

* "columns": every rank has the graph, X and y.  Blocks of columns of Q, and of outputs, are dealt
  out, and what training needs of them (their labelled rows) is sent to all.
* "nodes": every rank has its nodes only, and their rows of X and y.  A product with H fetches the
  rows of neighbours that live elsewhere; sums over rows are added up in the order of the ranks.

Either way everything of d x d or d x c numbers is the same on all ranks, bit by bit, and no branch
is taken on anything else: a rank that went another way would be waited for for ever.
"""

from herta_gpu.backends.ranks.communicator import Ranks, ranks_of
from herta_gpu.backends.ranks.nccl import take_gpu
from herta_gpu.backends.ranks.parts import GraphPart
from herta_gpu.backends.ranks.teams import Columns

__all__ = ["Columns", "GraphPart", "Ranks", "ranks_of", "take_gpu"]
