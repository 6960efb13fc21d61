"""Bytes: what each way to fit takes, and the way that the budget allows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from herta_gpu.features import chunk_bytes
from herta_gpu.planning.costs import Sizes
from herta_gpu.planning.settings import Settings
from herta_gpu.plumbing.validation import BudgetError
from herta_gpu.solver import BLOCK_WIDTH, block_width, column_bytes

BETA = 1.0 / 64.0  # Algorithm 1; with K = C = 1 its sample sizes exceed m and n on real graphs
SKETCH_ROWS_PER_COLUMN = 16  # measured: condition number about 2.7 after preconditioning
DETERMINISTIC = ("spectral-proven", "spectral-deterministic")  # they need Q on all rows


@dataclass(frozen=True)
class Layout:
    """What is held, and how many columns are worked on together."""

    sketch_rows: int | None
    sketch_why: str
    certificate: str
    width: int  # columns of a solve
    Q_width: int  # columns of Q while it is made
    memory: dict[str, int]  # stage to bytes


def fitting_layout(
    sizes: Sizes, settings: Settings, budget: int, by_rows: bool, certificate: str
) -> Layout:
    """The best layout within the budget: first R goes, then rows of Q, then Q for its sketch."""
    rows, why = _sketch(sizes, settings, by_rows)
    ways = [(rows, why, certificate)]
    if certificate == "spectral-deterministic":
        ways.append((rows, why, "spectral-proven"))
    if certificate in DETERMINISTIC:
        ways.append((rows, why, "spectral-probabilistic"))
    can = settings.sketch.when == "auto" and not by_rows and settings.precondition
    fewer = SKETCH_ROWS_PER_COLUMN * sizes.d
    if can and fewer < sizes.n_train:
        ways.append((fewer, "Q does not fit the memory budget", ways[-1][2]))
    for rows, why, certificate in ways:
        memory = _memory(sizes, settings, budget, rows, certificate)
        left = budget - sum(memory.values())
        width = block_width(sizes.n, max(sizes.d, sizes.c), sizes.dtype, left)
        if width >= 1:
            column = _Q_column(sizes, by_rows, rows)
            Q_width = min(sizes.d, BLOCK_WIDTH, left // column)
            block = max(Q_width * column, _block_bytes(sizes, width, certificate))
            memory["one block of columns"] = block
            return Layout(rows, why, certificate, width, Q_width, memory)
    least = _least_budget(sizes, settings, rows, certificate)
    raise BudgetError(
        f"This fit needs at least {least:,} MB but the budget is {budget / 2**20:,.1f} MB: "
        "raise memory_budget, free memory or use fewer features."
    )


def _sketch(sizes: Sizes, settings: Settings, by_rows: bool) -> tuple[int | None, str]:
    """(rows of the SRHT, why)."""
    if by_rows or not settings.precondition:
        return None, "no Q to sketch"
    wish = settings.sketch
    if wish.when != "always":
        asked = wish.when != "never"
        return None, "the exact Gram matrix is cheaper" if asked else "not asked for"
    padded = 1 << max(0, sizes.n_train - 1).bit_length()
    capped = "capped at n padded to a power of two"
    if wish.count is not None:
        s = min(wish.count, padded)
        return s, "as asked" if s == wish.count else f"as asked, {capped}"
    s = math.ceil(sizes.d * math.log(max(sizes.n, 2)) / BETA**2)
    return min(s, padded), f"Algorithm 1 wants {s:.2g}, {capped}" if s > padded else "Algorithm 1"


def _least_budget(sizes: Sizes, settings: Settings, rows: int | None, certificate: str) -> int:
    """MB with which the thriftiest plan works: what it takes grows with the budget, but slower."""
    budget, need = 0, 1
    while need > budget << 20:
        budget = -(-need >> 20)
        held = sizes.X_bytes if sizes.X_bytes_at is None else sizes.X_bytes_at(budget << 20)
        there = replace(sizes, X_bytes=held)
        memory = _memory(there, settings, budget << 20, rows, certificate)
        need = sum(memory.values()) + sizes.n * column_bytes(sizes.dtype)
    return budget


def _Q_column(sizes: Sizes, by_rows: bool, sketch_rows: int | None) -> int:
    """Bytes of a column of Q while it is made: Chebyshev holds three, CG and a sketch more."""
    if by_rows or sketch_rows is not None:
        return sizes.n * column_bytes(sizes.dtype)
    return sizes.n * (3 * (8 if sizes.hidden else sizes.word) + 8)


def _block_bytes(sizes: Sizes, width: int, certificate: str) -> int:
    """Bytes of a block of outputs while CG solves for it, or of Q while R is measured."""
    block = min(width, sizes.c) * column_bytes(sizes.dtype)
    if certificate == "spectral-deterministic":
        block = max(block, width * (2 * sizes.word + 32))
    return sizes.n * block


def _memory(
    sizes: Sizes, settings: Settings, budget: int, rows: int | None, certificate: str
) -> dict[str, int]:
    """Bytes per stage that stay allocated, blocks of columns apart."""
    n, d, c, word = sizes.n, sizes.d, sizes.c, sizes.word
    graph = 2 * sizes.m * 4 + 8 * n + 4 * 8 * n
    chunks = 2 * min(chunk_bytes(budget), 8 * n * d)
    memory = {
        "graph": graph, "X (copies)": sizes.X_bytes, "chunks of X": chunks,
        "outputs": 7 * n * c * 8,
    }  # fmt: skip
    if settings.precondition:
        q_rows = sizes.n_train if rows is None else rows
        if certificate in DETERMINISTIC:
            q_rows = n
        memory["Q"] = q_rows * d * (8 if sizes.hidden else word)
        memory["P and its factor"] = 3 * min(d, max(sizes.n_train, 1)) * d * 8
    if certificate in DETERMINISTIC:
        # B and its Gram matrix, for as many rows outside training as columns at most.
        outside = min(n - sizes.n_train, d)
        memory["rows of Q outside training"] = 8 * outside * (d + 3 * outside)
    if certificate == "spectral-deterministic":
        memory["R"] = n * d * (8 if sizes.hidden else word) + 3 * d * d * 8
    return memory
