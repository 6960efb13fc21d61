"""Bytes: what each way to fit takes, and the way that the budget allows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from herta_gpu.planning.costs import BLOCK_WIDTH, Case, Sizes, case_of
from herta_gpu.planning.settings import LABEL_LAMS, LABEL_WIDTH, TOGETHER, Settings
from herta_gpu.plumbing.checks import BudgetError

BETA = 1.0 / 64.0  # Algorithm 1; with K = C = 1 its sample sizes exceed m and n on real graphs
SKETCH_ROWS_PER_COLUMN = 16  # measured: condition number about 2.7 after preconditioning
_BLOCKS, _ENOUGH = 1 << 30, 32  # blocks of so many bytes are no wider than so many columns
CHUNK_BYTES = 16 << 20  # float64 copies of rows of X at most, and a small part of the budget
_SWEEP = 128 << 20  # bytes of outputs, residuals and targets of a run of training rows
_OUTPUTS = 7  # float64 numbers per node and output that the loop with the true model holds
_FEW = 16  # outputs at once: before they are fewer, rows of Q outside training go
_BESIDE = 0.25  # share of the memory that rows for evaluation may take
_LEFT_OUT_ROWS = 1 << 13  # training rows that leave-one-out looks at together
_NARROWEST = 8  # columns: a narrower block costs about as much
_LINE = 16  # columns of float32 in a cache line: a gather of fewer costs as much
# CuPy's pool cuts memory into pieces that no longer fit together: fits took up to 1.2 times the
# bytes that they used at once.  What is allocated once and stays is in one piece.
FRAGMENTS, CARD_SHARE = 1.2, 0.85
_IN_PIECES = ("chunks of X", "outputs on training nodes", "leave-one-out", "P and its factor")
DETERMINISTIC = ("spectral-proven", "spectral-deterministic")  # they need Q on all rows


@dataclass(frozen=True)
class Layout:
    """One way to fit: what is held, and how many columns are worked on together."""

    sizes: Sizes
    settings: Settings
    certificate: str  # the kind that is tried first
    stored: bool  # proven from training rows of Q: nothing else of it is held, nor n x c numbers
    by_rows: bool  # H^-1 M^T is solved for
    sketch_rows: int | None = None
    paged: bool = False  # neighbours stay in the graph's file
    # What the budget leaves room for, as `fitting_layout` finds it.
    width: int = 0  # columns of a solve
    Q_width: int = 0  # columns of Q while it is made
    memory: dict[str, int] = field(default_factory=dict)  # stage to bytes
    outputs: int = 0  # worked on together by solves over the outputs; 0: no memory for one
    beside: int = 0  # rows of Q outside training that are kept for evaluation
    on_host: bool = False  # stored rows of a GPU are trained on by the CPU

    @property
    def solved_column(self) -> int:
        """Bytes of a column while CG solves for it."""
        return self.sizes.n * column_bytes(self.sizes.dtype)

    def held(self, budget: int) -> dict[str, int]:
        """Bytes per stage that stay allocated, blocks of columns and of outputs apart."""
        sizes, settings = self.sizes, self.settings
        n, n_train, d, c, word = sizes.n, max(sizes.n_train, 1), sizes.d, sizes.c, sizes.word
        # Scale, diagonal and weights in the working precision, and those of nodes in float64, too.
        graph = 24 * n + 2 * sizes.m * word * sizes.weighted
        if not self.paged:  # neighbours, their weights, where rows begin; degrees on the way
            graph += 2 * sizes.m * (12 if sizes.weighted else 4) + (8 if sizes.card else 16) * n
        chunks = 4 * min(chunk_bytes(budget), 8 * n * d)
        memory = {"graph": graph, "X (copies)": sizes.X_bytes, "chunks of X": chunks}
        if self.stored:  # MSE looks at runs of rows, cross entropy at all outputs
            outputs = sizes.n_train * c * 8
            outputs = min(_SWEEP, 4 * outputs) if settings.quadratic else 8 * outputs
            memory["outputs on training nodes"] = outputs
        if settings.hidden:  # what goes into the layer: of all nodes, and of those trained on
            wide = 8 * min(settings.hidden_rank or d, d)
            memory["hidden layer"] = wide * (2 * n + (settings.blocks + 1) * sizes.n_train)
        if settings.label_folds:
            memory["label features"] = 8 * n * len(LABEL_LAMS) * c
        if settings.loo:  # outputs without each row, and what they are found from
            few = 4 * sizes.n_train**2 + 3 * sizes.n_train * d
            found = few if sizes.few_rows else 2 * d * min(sizes.n_train, _LEFT_OUT_ROWS)
            memory["leave-one-out"] = 8 * (6 * sizes.n_train * c + found)
        all_rows = self.certificate in DETERMINISTIC
        if settings.precondition:
            rows = n if all_rows else self.sketch_rows or sizes.n_train
            wide = 8 if sizes.hidden or self.stored else word
            memory["Q"] = rows * d * wide + sizes.copies * sizes.n_train * d * 8
            # P, its factor, and what is needed on the way from one to the other.
            factor = 3 * min(d, n_train) * d
            if self.stored and n_train < d:  # else rows, their span, and copies for LAPACK
                dense = case_of(n_train, d, settings.ridge, known=True) is Case.DENSE
                factor = 4 * d * d if dense else 5 * n_train * d
            memory["P and its factor"] = 8 * factor
        if all_rows:  # B and its Gram matrix, for as many rows outside training as columns at most
            outside = min(n - sizes.n_train, d)
            memory["rows of Q outside training"] = 8 * outside * (d + 3 * outside)
        if sizes.card:
            pieces = sum(memory.get(name, 0) for name in _IN_PIECES)
            memory["gaps between pieces"] = int((FRAGMENTS - 1) * pieces)
        return memory

    def outputs_in(self, left: int) -> int:
        """Outputs that the loop with the true model can work on together; 0: none.

        Those of cross entropy are one problem: all of them, or none.
        """
        c, column, separable = self.sizes.c, self.solved_column, self.settings.quadratic
        # Solves of a block that is all there are as wide as it is, if there is a choice.
        wide = min(c, _FEW) if separable else 1
        if self.output_bytes(c) + wide * column <= left:
            return c
        if not separable:
            return 0
        one = self.output_bytes(2) - self.output_bytes(1)
        return max(0, min(c - 1, (left - self.output_bytes(0)) // (one + column), BLOCK_WIDTH))

    def output_bytes(self, outputs: int) -> int:
        """What the loop with the true model holds of so many outputs, beside its solves."""
        sizes = self.sizes
        targets = 0 if outputs == sizes.c else sizes.n_train * sizes.c  # those of all, meanwhile
        return 8 * (_OUTPUTS * sizes.n * outputs + targets)

    def refuse(self, budget: int, column: int) -> BudgetError:
        """The error that names the least budget: what it takes grows with the budget, but slower.

        `column`: bytes beside those `held` without which nothing can be done.
        """
        allowed, need, sizes = 0, 1, self.sizes
        while need > allowed << 20:
            allowed = -(-need >> 20)
            held = sizes.X_bytes if sizes.X_bytes_at is None else sizes.X_bytes_at(allowed << 20)
            there = replace(self, sizes=replace(sizes, X_bytes=held))
            need = sum(there.held(allowed << 20).values()) + column
        return _too_little(allowed, budget, self.settings)


def fitting_layout(way: Layout, budget: int) -> Layout:
    """The best layout within the budget.

    First the rows of Q outside training go, then Q for its sketch.
    """
    sizes, settings = way.sizes, way.settings
    # Processes with rows of their own have this together, beside what each of them holds whole.
    whole = 8 * (sizes.n_train * (sizes.d + 4 * sizes.c) + 3 * sizes.d**2)
    budget = sizes.parts * budget - (sizes.parts - 1) * whole
    if way.stored and not way.by_rows:
        return _roomy_layout(way, budget)
    ways = [replace(way, sketch_rows=sketch(sizes, settings, way.by_rows)[0])]
    if way.certificate in DETERMINISTIC:
        ways.append(replace(ways[0], certificate="spectral-probabilistic"))
    can = settings.sketch.when == "auto" and not way.by_rows and settings.precondition
    if can and SKETCH_ROWS_PER_COLUMN * sizes.d < sizes.n_train:
        ways.append(replace(ways[-1], sketch_rows=SKETCH_ROWS_PER_COLUMN * sizes.d))
    # Rather narrower blocks of outputs than a rougher P, down to a few.
    for fewest in (min(sizes.c, _FEW), 1):
        for one in ways:
            memory = one.held(budget)
            left = budget - sum(memory.values())
            left = int(left / FRAGMENTS) if sizes.card else left  # blocks come and go
            outputs = one.outputs_in(left)
            if not one.stored:
                memory["outputs"] = one.output_bytes(outputs)
                left -= memory["outputs"]
            width = block_width(sizes.n, max(sizes.d, sizes.c), sizes.dtype, left)
            if width < 1 or not (one.stored or outputs >= fewest):
                continue
            # Chebyshev holds three columns of Q while they are made, CG and a sketch more.
            Q_column = sizes.n * (3 * (8 if sizes.hidden else sizes.word) + 8)
            if one.by_rows or one.sketch_rows is not None:
                Q_column = one.solved_column
            solved = min(sizes.n_train, sizes.d) if one.by_rows else sizes.d
            Q_width = min(sizes.d, BLOCK_WIDTH, left // Q_column)
            Q_width = dealt_width(solved, Q_width, sizes.ranks)
            width = dealt_width(outputs or sizes.c, width, sizes.ranks)
            block = max(Q_width * Q_column, min(width, outputs) * one.solved_column)
            memory["one block of columns"] = block
            return replace(one, width=width, Q_width=Q_width, memory=memory, outputs=outputs)
    column = way.solved_column
    if not way.stored:
        column += way.output_bytes(1 if settings.quadratic else sizes.c)
    raise ways[-1].refuse(budget, column)


def _roomy_layout(way: Layout, budget: int) -> Layout:
    """The layout of stored rows; neighbours of a mapped graph may stay in its file.

    There they are read again for each product.  It gathers whole cache lines, and so takes as long
    for two columns as for sixteen.
    """
    try:
        held = _stored_layout(way, budget)
        if held.width >= min(_LINE, way.sizes.d) or not way.sizes.mapped:
            return held
        paged = _stored_layout(replace(way, paged=True), budget)
        return max(held, paged, key=lambda layout: layout.width)
    except BudgetError:
        return _stored_layout(replace(way, paged=way.sizes.mapped), budget)


def _stored_layout(way: Layout, budget: int) -> Layout:
    """Three blocks of columns beside the training rows of Q."""
    sizes, settings = way.sizes, way.settings
    # Three blocks (and half of one for gathers), and the rows of one on their way into Q.
    word = 8 if settings.hops else sizes.word  # products without a solve are in float64
    column = (3 * word + 2 * sizes.half) * sizes.n + 3 * sizes.n_train * 8
    column += 8 * sizes.n * (sizes.nonzeros is not None)  # of a sparse X, made dense
    memory = way.held(budget)
    on_host = sizes.card and sum(memory.values()) + column > budget
    if on_host:
        memory["outputs on training nodes"] = min(_SWEEP, memory["outputs on training nodes"])
    beside = sizes.beside * sizes.d * sizes.word
    # Outputs that would take much of the memory are solved for when they are asked for.
    beside = beside if beside <= _BESIDE * (budget - sum(memory.values())) else 0
    if beside:
        memory["rows of Q for evaluation"] = beside
    left = budget - sum(memory.values())
    # Half as many columns cost little more each, once they are far larger than any cache.
    wide = min(BLOCK_WIDTH, max(_ENOUGH, _BLOCKS // column))
    width = dealt_width(sizes.d, min(sizes.d, wide, left // column), sizes.ranks)
    if width < 1:
        raise way.refuse(budget, column)
    memory["one block of columns"] = width * column
    if settings.label_folds:  # made before anything else is there but the graph
        # Blocks for all lam: their sums and what is added to them, steps that wait, some blocks;
        # or a copy of the columns.
        blocks = (2 * len(LABEL_LAMS) + TOGETHER + 8) * min(sizes.c, LABEL_WIDTH) + sizes.c
        made = 8 * sizes.n * max(len(LABEL_LAMS) * sizes.c, blocks)
        short = made - (sum(memory.values()) - memory["graph"] - memory["label features"])
        if short > 0:
            memory["making label features"] = short
            if sum(memory.values()) > budget:
                raise _too_little(-(-sum(memory.values()) >> 20), budget, settings)
    return replace(
        way,
        width=width,
        Q_width=width,
        memory=memory,
        outputs=way.outputs_in(left),
        beside=sizes.beside if beside else 0,
        on_host=on_host,
    )


def _too_little(least: int, budget: int, settings: Settings) -> BudgetError:
    # Outputs of cross entropy cannot be worked on in blocks: each step would visit them all.
    other = settings.strategy == "herta" and settings.precondition and not settings.custom_P
    advice = 'strategy="direct", which works on no outputs' if other else "fewer features"
    return BudgetError(
        f"This fit needs at least {least:,} MB but the budget is {budget / 2**20:,.1f} MB: "
        f"raise memory_budget, free memory or use {advice}."
    )


def dealt_width(columns: int, width: int, ranks: int) -> int:
    """Columns of a block, at most `width`, so that each rank has as many blocks as any other.

    Of 200 columns at most 64 at once: 64 for one rank, 52 for two, 36 for three.
    """
    if ranks == 1 or width <= 0:
        return width
    rounds = -(-columns // (width * ranks))
    share = -(-columns // (rounds * ranks))
    return min(width, max(_NARROWEST, -(-share // 4) * 4))  # whole vectors, as `Recipe.blocks`


def outputs_at_once(sizes: Sizes, budget: int, X_width: int, label_columns: int = 0) -> int:
    """Outputs of a fitted model that are solved for together, one at least."""
    n, word = sizes.n, sizes.word
    # The graph, X, and of each node its two best outputs and a class, once more on the way.
    held = 8 * sizes.m + 40 * n + sizes.X_bytes + 6 * n * word
    held += 4 * min(chunk_bytes(budget), 8 * n * X_width) + 8 * n * label_columns
    # X W, and Z as it goes.
    columns = (budget - held) // max(1, n * (column_bytes(sizes.dtype) + 8 + word))
    return max(1, min(sizes.c, BLOCK_WIDTH, columns))


def column_bytes(dtype: str) -> int:
    """Per node, of a column that block CG works on.

    B, which may be float64; Z; and of a cycle R, P, H P, its own Z and, on a CPU, D^-1/2 P.
    """
    return 8 + 6 * np.dtype(dtype).itemsize


def block_width(n: int, k: int, dtype: str, budget: int) -> int:
    """Columns that a solve may advance together within `budget` bytes; 0 when not even one."""
    return int(min(k, BLOCK_WIDTH, budget // (max(n, 1) * column_bytes(dtype))))


def chunk_bytes(budget: int) -> int:
    """Bytes of a chunk of rows of X in float64; a budget of 0 stands for none."""
    return min(CHUNK_BYTES, budget // 16) if budget else CHUNK_BYTES


def sketch(sizes: Sizes, settings: Settings, by_rows: bool) -> tuple[int | None, str]:
    """(rows of the SRHT, why)."""
    wish = settings.sketch
    if by_rows or not settings.precondition:
        return None, "no Q to sketch"
    if wish.when != "always":
        asked = wish.when != "never"
        return None, "the exact Gram matrix is cheaper" if asked else "not asked for"
    padded = 1 << max(0, sizes.n_train - 1).bit_length()
    s, why = wish.count, "as asked"
    if s is None:
        s, why = math.ceil(sizes.d * math.log(max(sizes.n, 2)) / BETA**2), "Algorithm 1"
    if s <= padded:
        return s, why
    why = why if wish.count else f"Algorithm 1 wants {s:.2g}"
    return padded, f"{why}, capped at n padded to a power of two"
