"""What a fit would hold, move and take on a GPU, or on several processes, that are not there.

Nothing here was measured: bytes are counted, seconds are bytes over an assumed rate.  The cut of a
graph is counted where the graph is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from herta_gpu.planning.costs import CARD_SHARE, CHUNK_BYTES, Sizes
from herta_gpu.planning.plan import Decision, Plan
from herta_gpu.plumbing.checks import memory_budget

_SECTOR = 32  # bytes that a gather moves at least
_HALF = 5e-4  # what a pass leaves at best whose neighbours are float16
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
    reached: float = 0.65  # ... of which gathers of whole rows reach this share
    link: float = 25e9  # bytes a second from the host
    host: float = 180e-6  # seconds of the host for each chunk of X

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
            f"{self.reached:.0%} of it reached, in sectors of {_SECTOR} bytes; "
            f"{self.link / 1e9:.3g} GB/s from the host, where X is pinned, and "
            f"{1e6 * self.host:.0f} us for each chunk of X; of a mapped X the disk decides"
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
    """What a fit with stored rows moves: products with H, residuals, and passes over X."""
    n, d, blocks = sizes.n, sizes.d, plan.recipe.blocks(sizes.d)
    k, gathers = max(J.stop - J.start for J in blocks), card.reached * card.bandwidth
    degree, passes = plan.recipe.degree, 2
    if sizes.half and plan.recipe.goal is not None:  # float16 takes a pass to 5e-4 at best
        passes = max(1, math.ceil(math.log(0.9 * plan.recipe.goal) / math.log(_HALF)))
        degree = passes * sizes.degree(plan.recipe.goal ** (1 / passes))
    steps, residuals = len(blocks) * degree, len(blocks) * passes
    each, last = step_bytes(sizes, k), residual_bytes(sizes, k)
    # X^T X, with which norms come, and X C0; that goes to the host meanwhile, and comes in blocks.
    readings, spool = 2, n * d * sizes.word * (len(blocks) > 1)
    X_moved, chunks = readings * n * d * X_itemsize, math.ceil(8 * n * d / CHUNK_BYTES)
    on_card = card.X_bytes(n, d, sum(plan.memory.values())) == 4 * n * d
    if on_card:
        readings, X_moved, spool = 1 + len(blocks), (1 + len(blocks)) * n * d * X_itemsize, 0
    rate = card.bandwidth if on_card else card.link
    spent = max((X_moved + spool) / rate, readings * chunks * card.host)
    return [
        Moved("products with H", f"{steps:,} of {k} columns", steps * each, steps * each / gathers),
        Moved("residuals", f"{residuals:,}", residuals * last, residuals * last / gathers),
        Moved("passes over X", f"{readings}", X_moved + 2 * spool, spent),
    ]


def step_bytes(sizes: Sizes, k: int) -> int:
    """Bytes of one step of Chebyshev: gathered rows, indices, and the blocks themselves.

    In sectors: products in full precision also gather D^-1/2 of each neighbour.
    """
    word = 2 if sizes.half else sizes.word
    gathered = 2 * sizes.m * (sectors(k * word) + (0 if sizes.half else 1)) * _SECTOR
    indices = 2 * sizes.m * 4 * math.ceil(k / 64)
    return round(gathered) + indices + sizes.n * k * (4 * sizes.word + 6 * sizes.half)


def residual_bytes(sizes: Sizes, k: int) -> int:
    """The same of a residual: rows of the iterate and D^-1/2 in float64; B is overwritten."""
    gathered = 2 * sizes.m * (sectors(k * sizes.word) + 1) * _SECTOR
    indices = 2 * sizes.m * 4 * math.ceil(k / 64)
    return round(gathered) + indices + sizes.n * k * 3 * sizes.word


def sectors(row: int) -> float:
    """Sectors that a row of so many bytes lies in, on average over all rows of a block.

    >>> [sectors(2 * k) for k in (16, 24, 28, 32)]
    [1.0, 2.0, 2.5, 2.0]
    """
    begins = [i * row % _SECTOR for i in range(_SECTOR)]
    return sum(-(-(begin + row) // _SECTOR) for begin in begins) / _SECTOR


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
