"""What a fit would move on a GPU that is not there, and how long that takes by its bandwidth.

Nothing here was measured: bytes are counted, seconds are bytes over an assumed rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from herta_gpu.planning.costs import Sizes
from herta_gpu.planning.plan import Plan

_SECTOR = 32  # bytes that a gather moves at least
_CHUNKS = 64 << 20  # bytes of device buffers through which X streams


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


def moved(plan: Plan, sizes: Sizes, card: Card, X_itemsize: int) -> list[Moved]:
    """What a fit with stored rows moves: products with H, and passes over X."""
    blocks = plan.recipe.blocks(sizes.d)
    k, passes = max(J.stop - J.start for J in blocks), 2
    steps = len(blocks) * (plan.recipe.degree + passes)
    each = step_bytes(sizes, k)
    # X^T X or norms of columns; then for each block once for B and once for its first residual.
    readings = 1 + 2 * len(blocks)
    X_moved = readings * sizes.n * sizes.d * X_itemsize
    on_card = card.X_bytes(sizes.n, sizes.d, sum(plan.memory.values())) == 4 * sizes.n * sizes.d
    rate = card.bandwidth if on_card else card.link
    return [
        Moved("products with H", f"{steps:,} of {k} columns", steps * each,
              steps * each / (card.reached * card.bandwidth)),
        Moved("passes over X", f"{readings}", X_moved, X_moved / rate),
    ]  # fmt: skip


def step_bytes(sizes: Sizes, k: int) -> int:
    """Bytes of one step of Chebyshev: gathered rows, indices, and the blocks themselves."""
    # A row of a few columns still takes a whole sector of memory.
    gathered = 2 * sizes.m * max(_SECTOR, k * (2 if sizes.half else sizes.word))
    indices = 2 * sizes.m * 4 * math.ceil(k / 64)
    streams = 4 * sizes.n * k * sizes.word + (6 * sizes.n * k if sizes.half else 0)
    return gathered + indices + streams
