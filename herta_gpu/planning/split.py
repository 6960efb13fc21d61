"""What each of several processes would hold, send and take, for both ways to split a fit.

Arithmetic on sizes, not measurement: the cut of a graph is not known before it is there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from herta_gpu.planning.plan import Plan

# Rows that others need, in shares of all rows and for each doubling of the ranks: what METIS left
# of ogbn-arxiv on 2 to 8 ranks (0.20, 0.49 and 0.84 n; 2.2 n on 64).
_CUT = 0.28
_NETWORK = 25e9  # bytes a second that a rank sends and receives
_REPLICATED = ("Q", "P and its factor", "outputs on training nodes")  # the same on every rank


class Split(NamedTuple):
    """One way to split a fit."""

    split: str
    memory: int  # bytes of each rank
    moved: int  # bytes that each rank receives
    seconds: float

    @property
    def assumptions(self) -> str:
        return (
            f"assumed, not measured: {_NETWORK / 1e9:g} GB/s between ranks, and for each doubling "
            f"of the ranks {_CUT:g} n rows that others need, as METIS left of ogbn-arxiv"
        )


def splits(
    plan: Plan, n: int, d: int, n_train: int, word: int, ranks: int, seconds: float
) -> tuple[Split, Split]:
    """By columns and by nodes, of a plan that takes so many seconds in one process.

    Examples
    --------
    >>> from herta_gpu import HERTA
    >>> from herta_gpu.planning.split import splits
    >>> plan = HERTA(lam=20.0, memory_budget="64GB").plan(10**6, 10**7, 128, 40, 5 * 10**5)
    >>> columns, nodes = splits(plan, 10**6, 128, 5 * 10**5, 4, 8, seconds=80.0)
    >>> columns.memory > nodes.memory, columns.moved < nodes.moved
    (True, True)
    """
    whole = sum(plan.memory.values())
    same = sum(plan.memory.get(name, 0) for name in _REPLICATED)
    rows_of_Q = n_train * d * 8 * (ranks - 1) // ranks
    blocks = plan.recipe.blocks(d)
    # As many rounds as the rank with most blocks has; narrower ones where there are too few.
    share = max(1 / ranks, math.ceil(len(blocks) / ranks) / max(len(blocks), ranks))
    columns = Split("columns", whole, rows_of_Q, seconds * share + rows_of_Q / _NETWORK)
    halo = _CUT * math.log2(max(ranks, 2)) * n / ranks * (ranks > 1)  # rows of each rank
    products = d * (plan.recipe.degree + 2)  # columns of products with H
    moved = int(halo * products * word) + rows_of_Q
    width = max(J.stop - J.start for J in blocks)
    memory = same + (whole - same) // ranks + int(halo * width * word)
    return columns, Split("nodes", memory, moved, seconds / ranks + moved / _NETWORK)
