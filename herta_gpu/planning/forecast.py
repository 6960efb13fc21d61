"""What a fit would hold, move and take on a GPU, or on several processes, that are not there.

Nothing here was measured: bytes are counted, seconds are bytes over an assumed rate.  The cut of a
graph is counted where the graph is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from herta_gpu.planning.costs import CARD_SHARE, Sizes
from herta_gpu.planning.plan import Decision, Plan
from herta_gpu.plumbing.checks import memory_budget

_SECTOR = 32  # bytes that a gather moves at least
_CHUNKS = 64 << 20  # bytes of device buffers through which X streams
# Rows that others need, in shares of all rows and for each doubling of the ranks: what METIS left
# of ogbn-arxiv on 2 to 8 ranks (0.20, 0.49 and 0.84 n; 2.2 n on 64).
_CUT = 0.28
_NETWORK = 25e9  # bytes a second that a rank sends and receives
_REPLICATED = ("Q", "P and its factor", "outputs on training nodes")  # the same on every rank


@dataclass(frozen=True)
class Card:
    """A GPU: its memory, and the rates that are assumed of it."""

    memory: int
    bandwidth: float = 3.35e12  # bytes a second of its memory, as on an H100 ...
    reached: float = 0.6  # ... of which gathers of whole rows reach this share
    link: float = 25e9  # bytes a second from the host

    def X_bytes(self, n: int, d: int, budget: int) -> int:
        """What a dense float32 X takes on the card: all of it if it fits, else buffers."""
        whole = 4 * n * d
        return whole if whole <= budget // 2 else min(whole, _CHUNKS)

    def budget(self, wish: int | str | None) -> int:
        """As the CUDA backend has it where so much is free."""
        return memory_budget(wish, self.memory, CARD_SHARE)

    @property
    def assumptions(self) -> str:
        return (
            f"assumed, not measured: {self.bandwidth / 1e12:.3g} TB/s of device memory, "
            f"{self.reached:.0%} of it reached; {self.link / 1e9:.3g} GB/s from the host"
        )


class Moved(NamedTuple):
    """One kind of work: how often, bytes in all, seconds by the assumed rate."""

    what: str
    times: str
    moved: int
    seconds: float


class Split(NamedTuple):
    """One way to split a fit."""

    split: str
    memory: int  # bytes of each rank
    moved: int  # bytes that each rank receives
    seconds: float


def list_work(plan: Plan, sizes: Sizes, card: Card, X_itemsize: int) -> list[Moved]:
    """What a fit with stored rows moves: products with H, and passes over X."""
    n, d, blocks = sizes.n, sizes.d, plan.recipe.blocks(sizes.d)
    k, passes = max(J.stop - J.start for J in blocks), 2
    steps = len(blocks) * (plan.recipe.degree + passes)
    each = step_bytes(sizes, k)
    # X^T X or norms of columns; then for each block once for B and once for its first residual.
    readings = 1 + 2 * len(blocks)
    X_moved = readings * n * d * X_itemsize
    on_card = card.X_bytes(n, d, sum(plan.memory.values())) == 4 * n * d
    rate = card.bandwidth if on_card else card.link
    spent = steps * each / (card.reached * card.bandwidth)
    return [
        Moved("products with H", f"{steps:,} of {k} columns", steps * each, spent),
        Moved("passes over X", f"{readings}", X_moved, X_moved / rate),
    ]


def step_bytes(sizes: Sizes, k: int) -> int:
    """Bytes of one step of Chebyshev: gathered rows, indices, and the blocks themselves."""
    # A row of a few columns still takes a whole sector of memory.
    gathered = 2 * sizes.m * max(_SECTOR, k * (2 if sizes.half else sizes.word))
    indices = 2 * sizes.m * 4 * math.ceil(k / 64)
    return gathered + indices + sizes.n * k * (4 * sizes.word + 6 * sizes.half)


def assumed_cut(ranks: int) -> float:
    """Rows that go from rank to rank in a product, in shares of all rows, of an unseen graph."""
    return _CUT * math.log2(max(ranks, 1))


def assumptions(cut: float | None, partition: str) -> str:
    """The sentence that tells what `splits` was not told."""
    rate = f"assumed, not measured: {_NETWORK / 1e9:g} GB/s between ranks"
    if cut is not None:
        return f"{cut:.2f} n rows go from rank to rank in a product by {partition}, counted; {rate}"
    return f"{rate}, and {_CUT:g} n rows for each doubling of ranks, as METIS left of ogbn-arxiv"


def splits(
    plan: Plan, sizes: Sizes, seconds: float, cut: float | None = None
) -> tuple[Split, Split]:
    """By columns and by nodes of `sizes.ranks`, of a plan that takes so long in one process.

    `cut` are the rows that go from rank to rank in a product, in shares of all, where counted.
    """
    d, ranks, X_bytes = sizes.d, sizes.ranks, sizes.X_bytes
    whole = sum(plan.memory.values())
    same = sum(plan.memory.get(name, 0) for name in _REPLICATED)
    rows_of_Q = sizes.n_train * d * 8 * (ranks - 1) // ranks
    blocks = plan.recipe.blocks(d)
    # As many rounds as the rank with most blocks has; narrower ones where there are too few.
    share = max(1 / ranks, math.ceil(len(blocks) / ranks) / max(len(blocks), ranks))
    columns = Split("columns", whole + X_bytes, rows_of_Q, seconds * share + rows_of_Q / _NETWORK)
    cut = assumed_cut(ranks) if cut is None else cut
    halo = cut * sizes.n / ranks * sizes.word  # bytes that a rank receives of a column
    moved = int(halo * d * (plan.recipe.degree + 2)) + rows_of_Q
    width = max(J.stop - J.start for J in blocks)
    memory = same + (whole - same + X_bytes) // ranks + int(halo * width)
    return columns, Split("nodes", memory, moved, seconds / ranks + moved / _NETWORK)


def choose_split(found: tuple[Split, Split], budget: int) -> Decision:
    """What fits into `budget` bytes of each rank; of two that do, the faster one."""
    first, other = sorted(found, key=lambda s: (s.memory > budget, s.seconds))
    if first.memory > budget:  # neither: the fit says what is missing
        first, other = sorted(found, key=lambda s: s.memory)
    needed, fewer, allowed = (
        f"{size / 2**30:,.1f} GB" for size in (other.memory, first.memory, budget)
    )
    if other.memory > budget:
        why = f"{other.split} needs {needed} a rank, of which {allowed} may be used"
        return Decision("split", first.split, f"{why}; {first.split} {fewer}")
    why = f"predicted {first.seconds:.3g} s, and {other.split} {other.seconds:.3g} s"
    return Decision("split", first.split, f"both fit into {allowed} a rank; {why}")
