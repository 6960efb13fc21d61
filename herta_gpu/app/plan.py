"""`herta plan`: memory, cost and strategy of a fit, before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import numpy as np

from herta_gpu import datasets
from herta_gpu.app.results import CommandOutput, bytes_text, table
from herta_gpu.datasets import DataSizes
from herta_gpu.herta import HERTA
from herta_gpu.planning.costs import Sizes, column_bytes
from herta_gpu.planning.forecast import Card, assumptions, choose_split, list_work, splits
from herta_gpu.planning.plan import Plan
from herta_gpu.plumbing.checks import check_count, parse_bytes
from herta_gpu.plumbing.partition import checked_partition, rows_moved

# Bytes of Python with NumPy and SciPy, and of what is loaded where it is installed.
_INTERPRETER, _COMPILER, _CUPY = 100 << 20, 50 << 20, 25 << 20
_METIS_EDGES = 5_000_000  # up to which METIS takes seconds


def run(args: argparse.Namespace) -> CommandOutput:
    """herta plan DATASET"""
    given = {k: v for k, v in vars(args).items() if k in HERTA._defaults()}
    model = HERTA(**{**given, "normalize": args.normalize or "none"})  # no size depends on it
    name = args.dataset
    check_count("--ranks", args.ranks)
    checked_partition(args.partition)
    sizes = datasets.sizes(name, args.data_dir)
    if sizes.d == 0:
        raise ValueError(f"{name} has no features: HERTA needs some to train on.")
    card = None if args.device_memory is None else Card(parse_bytes(args.device_memory))
    wish = args.memory_budget or None
    backend: Any = model._checked() if card is None else None
    if backend is not None and backend.xp is not np:
        card = Card(backend.memory_free())
    budget = backend.plan_budget(wish) if card is None else card.budget(wish)
    made, fits = cheapest(model, sizes, budget, card)
    memory, seconds = made.memory, made.cost[made.strategy]
    costs = [(k, f"{v:,.3g}") for k, v in made.cost.items()]
    work = table([("strategy", "predicted cost (seconds of a nominal 2-core machine)"), *costs])
    more: dict[str, Any] = {}
    if card is None:
        x_bytes = 12 * sizes.X_nonzeros if sizes.X_nonzeros else 4 * sizes.n * sizes.d
        # A dense X that is large beside the memory stays in its file, and pages come and go.
        held = x_bytes if sizes.X_nonzeros or x_bytes <= budget // 2 else 0
        more["expected_peak_bytes"] = peak = _expected_peak(made, sizes, held, args.dtype)
        memory = {"X itself (can stay on disk when dense)": x_bytes, **memory}
        where = (
            f"in memory: a process will hold about {bytes_text(peak)} at once, Python included; "
            f"the budget is {bytes_text(budget)} of {bytes_text(backend.memory_free())} free on "
            f"{backend.name}" + "; X stays on disk" * (held == 0)
        )
    else:
        outlined, _ = model._outline(**_numbers(sizes, card))
        at = "the host or disk" if outlined.X_bytes < 4 * sizes.n * sizes.d else "the card"
        where = (
            f"on a card of {bytes_text(card.memory)}: {bytes_text(sum(memory.values()))} of a "
            f"budget of {bytes_text(budget)}; graph, blocks and stored rows live on the card, X on "
            f"{at}"
        )
        moved = list_work(made, outlined, card, X_itemsize=4) if made.stored else []
        more = {"work": [m._asdict() for m in moved], "assumptions": card.assumptions}
        if moved:
            rows = [(m.what, m.times, bytes_text(m.moved), f"{m.seconds:,.3g}") for m in moved]
            work = table([("work", "how often", "moved", "seconds"), *rows])
            work += f"\n{card.assumptions}"
            seconds = sum(m.seconds for m in moved)
    total = sum(memory.values())
    content = {"dataset": name, **asdict(sizes), "strategy": made.strategy, "fits": fits}
    content |= {"budget_bytes": budget, "memory_bytes": memory, **more, "total_bytes": total}
    content |= {"predicted_seconds": made.cost, "decisions": made.decisions}
    held_rows = [*memory.items(), ("all of it (not all at once)", total)]
    parts = [
        f"{name}: {sizes.n:,} nodes, {sizes.m:,} edges, {sizes.d:,} features, "
        f"{sizes.c:,} outputs, {sizes.n_train:,} training nodes",
        table([("", "decision", "why"), *(d for d in made.decisions if d[0] != "memory")]),
        table([("memory", "bytes"), *((what, bytes_text(size)) for what, size in held_rows)]),
        work,
        f"{'fits' if fits else 'does NOT fit'} {where}",
    ]
    if args.ranks > 1:
        more, shown = _on_ranks(args, sizes, made, seconds, budget)
        content |= more
        parts.append(shown)
    return CommandOutput(content, "\n\n".join(parts))


def _on_ranks(
    args: argparse.Namespace, sizes: DataSizes, made: Plan, seconds: float, budget: int
) -> tuple[dict[str, Any], str]:
    """What each of several processes would hold, send and take: for --json, and as text."""
    graph, partition = datasets.graph_at_hand(args.dataset, args.data_dir), args.partition
    if graph is not None and partition == "metis":
        few = graph.num_edges <= _METIS_EDGES and find_spec("pymetis") is not None
        graph = graph if few else None  # else it takes too long
    cut = None if graph is None else rows_moved(graph, args.ranks, partition)
    found = splits(made, ranks_sizes(sizes, args.dtype, args.ranks), seconds, cut)
    choice, rows = choose_split(found, budget), []
    for s in found:
        rows.append((s.split, bytes_text(s.memory), bytes_text(s.moved), f"{s.seconds:,.3g}"))
    head = (f"{args.ranks} ranks, split by", "memory a rank", "received a rank", "seconds")
    content = {"ranks": args.ranks, "splits": [s._asdict() for s in found], "cut": cut}
    content |= {"split": choice.choice, "why": choice.why}
    chosen = f"chosen: {choice.choice} ({choice.why})\n{assumptions(cut, partition)}"
    return content, f"{table([head, *rows])}\n{chosen}"


def ranks_sizes(sizes: DataSizes, dtype: str, ranks: int, X_bytes: int = 0) -> Sizes:
    """The sizes of a fit that several processes share; X_bytes are in memory."""
    word = np.dtype(dtype).itemsize
    return Sizes(sizes.n, sizes.m, sizes.d, sizes.c, sizes.n_train, word, X_bytes, ranks=ranks)


def _numbers(sizes: DataSizes, card: Card | None) -> dict[str, Any]:
    numbers = {name: getattr(sizes, name) for name in ("n", "m", "d", "n_train", "X_nonzeros")}
    numbers |= {} if card is None else {"device_memory": card.memory}
    return {**numbers, "c": max(sizes.c, 1)}


def _expected_peak(made: Plan, sizes: DataSizes, x_bytes: int, dtype: str) -> int:
    """What a fit with X in memory will hold at once; the plan itself adds up every stage.

    Building Q takes three blocks of columns.  A gradient takes a few more, with whole outputs
    beside them, unless the fit is proven from stored rows of Q.  The factors were counted in the
    code, and a test compares the sum with a process.
    """
    memory, word = made.memory, np.dtype(dtype).itemsize
    loaded = _INTERPRETER + _COMPILER * bool(find_spec("numba")) + _CUPY * bool(find_spec("cupy"))
    if made.stored:  # blocks and stored rows are there together
        return loaded + x_bytes + sum(memory.values())
    throughout = loaded + x_bytes + memory["graph"] + memory["X (copies)"] + memory.get("Q", 0)
    outputs = max(1, min(made.outputs, sizes.c))
    narrow = min(made.solve_width, outputs)
    building = made.recipe.width * sizes.n * (3 * word + 8 * bool(sizes.X_nonzeros))
    training = sizes.n * (outputs * (3 * word + 16) + narrow * column_bytes(dtype))
    factor = memory.get("P and its factor", 0)  # three copies while it is made, one later
    return int(throughout + max(building, factor, training + factor // 3))


def cheapest(
    model: HERTA, sizes: DataSizes, budget: int, card: Card | None = None
) -> tuple[Plan, bool]:
    """The plan within the budget, and True; if there is none, what needs least beyond it."""
    numbers, allowed = {**_numbers(sizes, card), "mapped_graph": sizes.mapped}, budget
    while True:
        try:
            return model.set_params(memory_budget=allowed).plan(**numbers), allowed == budget
        except MemoryError:
            allowed = int(1.1 * allowed) + 1
