"""`herta plan`: memory, cost and strategy of a fit, before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from herta_gpu import datasets
from herta_gpu.app.experiment import make_model
from herta_gpu.app.results import CommandOutput
from herta_gpu.app.text import bytes_text, table
from herta_gpu.backends import get_backend
from herta_gpu.datasets import DataSizes
from herta_gpu.herta import HERTA
from herta_gpu.planning.costs import Sizes
from herta_gpu.planning.forecast import Card, assumptions, choose_split, list_work, splits
from herta_gpu.planning.memory import column_bytes
from herta_gpu.planning.plan import Plan
from herta_gpu.plumbing.checks import check_count, memory_budget, parse_bytes
from herta_gpu.plumbing.partition import checked_partition, rows_moved

# Bytes of Python with NumPy and SciPy, and of what is loaded where it is installed.
_INTERPRETER, _COMPILER, _CUPY = 100 << 20, 50 << 20, 25 << 20
_METIS_EDGES = 5_000_000  # up to which METIS takes seconds


class _Verdict(NamedTuple):
    """What a plan means for the memory that there is."""

    memory: dict[str, int]
    text: str  # whether it fits
    work: str  # what it costs, as a table
    seconds: float
    more: dict[str, Any]  # for --json


def run(args: argparse.Namespace) -> CommandOutput:
    """herta plan DATASET"""
    model, name = make_model(args), args.dataset
    check_count("--ranks", args.ranks)
    checked_partition(args.partition)
    sizes = datasets.sizes(name, args.data_dir)
    if sizes.d == 0:
        raise ValueError(f"{name} has no features: HERTA needs some to train on.")
    card = None if args.device_memory is None else Card(parse_bytes(args.device_memory))
    free = model._checked().memory_available() if card is None else card.memory
    budget = memory_budget(args.memory_budget or None, free)
    made, fits = cheapest(model, sizes, budget, card)
    if card is None:
        found = _in_memory(args, sizes, made, budget, free)
    else:
        found = _on_card(model, sizes, made, budget, card)
    memory = found.memory
    content = {"dataset": name, **asdict(sizes), "strategy": made.strategy, "fits": fits}
    content |= {"budget_bytes": budget, "memory_bytes": memory, **found.more}
    content |= {"total_bytes": sum(memory.values()), "predicted_seconds": made.cost}
    content["decisions"] = made.decisions
    rows = [(what, bytes_text(size)) for what, size in memory.items()]
    rows.append(("all of it (not all at once)", bytes_text(sum(memory.values()))))
    parts = [
        f"{name}: {sizes.n:,} nodes, {sizes.m:,} edges, {sizes.d:,} features, "
        f"{sizes.c:,} outputs, {sizes.n_train:,} training nodes",
        table([("", "decision", "why"), *(d for d in made.decisions if d[0] != "memory")]),
        table([("memory", "bytes"), *rows]),
        found.work,
        f"{'fits' if fits else 'does NOT fit'} {found.text}",
    ]
    if args.ranks > 1:
        more, shown = _on_ranks(args, sizes, made, found.seconds, budget)
        content |= more
        parts.append(shown)
    return CommandOutput(content, "\n\n".join(parts))


def _in_memory(
    args: argparse.Namespace, sizes: DataSizes, made: Plan, budget: int, free: int
) -> _Verdict:
    x_bytes = 12 * sizes.X_nonzeros if sizes.X_nonzeros else 4 * sizes.n * sizes.d
    # A dense X that is large beside the memory stays in its file, and pages come and go.
    held = x_bytes if sizes.X_nonzeros or x_bytes <= budget // 2 else 0
    peak = _expected_peak(made, sizes, held, args.dtype)
    text = (
        f"in memory: a process will hold about {bytes_text(peak)} at once, Python included; the "
        f"budget is {bytes_text(budget)} of {bytes_text(free)} free on "
        f"{get_backend(args.device).name}" + "; X stays on disk" * (held == 0)
    )
    memory = {"X itself (can stay on disk when dense)": x_bytes, **made.memory}
    more = {"expected_peak_bytes": peak}
    return _Verdict(memory, text, _cost(made), made.cost[made.strategy], more)


def _cost(made: Plan) -> str:
    head = ("strategy", "predicted cost (seconds of a nominal 2-core machine)")
    return table([head, *((k, f"{v:,.3g}") for k, v in made.cost.items())])


def _on_card(model: HERTA, sizes: DataSizes, made: Plan, budget: int, card: Card) -> _Verdict:
    how: dict[str, Any] = {"X_nonzeros": sizes.X_nonzeros, "device_memory": card.memory}
    outlined, _ = model._outlined(**_numbers(sizes), **how)
    work = list_work(made, outlined, card, X_itemsize=4) if made.stored else []
    where = "the host or disk" if outlined.X_bytes < 4 * sizes.n * sizes.d else "the card"
    text = (
        f"on a card of {bytes_text(card.memory)}: {bytes_text(sum(made.memory.values()))} of a "
        f"budget of {bytes_text(budget)}; graph, blocks and stored rows live on the card, X on "
        f"{where}"
    )
    rows = [(m.what, m.times, bytes_text(m.moved), f"{m.seconds:,.3g}") for m in work]
    shown = table([("work", "how often", "moved", "seconds"), *rows]) + f"\n{card.assumptions}"
    seconds = sum(m.seconds for m in work) or made.cost[made.strategy]
    more = {"work": [m._asdict() for m in work], "assumptions": card.assumptions}
    return _Verdict(made.memory, text, shown if work else _cost(made), seconds, more)


def _on_ranks(
    args: argparse.Namespace, sizes: DataSizes, made: Plan, seconds: float, budget: int
) -> tuple[dict[str, Any], str]:
    """What each of several processes would hold, send and take: for --json, and as text."""
    partition = args.partition
    graph = datasets.graph_at_hand(args.dataset, args.data_dir)
    few = graph is not None and graph.num_edges <= _METIS_EDGES and find_spec("pymetis") is not None
    known = graph is not None and (partition != "metis" or few)
    cut = rows_moved(graph, args.ranks, partition) if known else None  # else it takes too long
    found = splits(made, ranks_sizes(sizes, args.dtype, args.ranks), seconds, cut)
    sent = [(bytes_text(s.memory), bytes_text(s.moved)) for s in found]
    rows = [(s.split, *both, f"{s.seconds:,.3g}") for s, both in zip(found, sent)]
    head = (f"{args.ranks} ranks, split by", "memory a rank", "received a rank", "seconds")
    choice, told = choose_split(found, budget), assumptions(cut, partition)
    content = {"ranks": args.ranks, "splits": [s._asdict() for s in found], "cut": cut}
    content |= {"split": choice.choice, "why": choice.why}
    shown = f"{table([head, *rows])}\nchosen: {choice.choice} ({choice.why})\n{told}"
    return content, shown


def ranks_sizes(sizes: DataSizes, dtype: str, ranks: int, X_bytes: int = 0) -> Sizes:
    """The sizes of a fit that several processes share; X_bytes are in memory."""
    word = np.dtype(dtype).itemsize
    return Sizes(sizes.n, sizes.m, sizes.d, sizes.c, sizes.n_train, word, X_bytes, ranks=ranks)


def _numbers(sizes: DataSizes) -> dict[str, Any]:
    numbers = {name: getattr(sizes, name) for name in ("n", "m", "d", "n_train")}
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
    numbers = {**_numbers(sizes), "X_nonzeros": sizes.X_nonzeros, "mapped_graph": sizes.mapped}
    if card is not None:
        numbers["device_memory"] = card.memory
    allowed = budget
    while True:
        try:
            return model.set_params(memory_budget=allowed).plan(**numbers), allowed == budget
        except MemoryError:
            allowed = int(1.1 * allowed) + 1
