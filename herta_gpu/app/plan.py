"""`herta plan`: memory, cost and strategy of a fit, before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import numpy as np

from herta_gpu import datasets
from herta_gpu.app.experiment import make_model
from herta_gpu.app.results import CommandOutput
from herta_gpu.app.text import bytes_text, table
from herta_gpu.backends import get_backend
from herta_gpu.datasets import DataSizes
from herta_gpu.herta import HERTA
from herta_gpu.planning.plan import Plan
from herta_gpu.plumbing.validation import memory_budget
from herta_gpu.solver import column_bytes

_R_LIKELY = 5.0  # lam above which R is usually needed: the rounding of Q has to be measured
# Bytes that a process holds: Python with NumPy and SciPy, and numba and CuPy if installed.
_INTERPRETER, _COMPILER, _CUPY = 100 << 20, 50 << 20, 25 << 20


def run(args: argparse.Namespace) -> CommandOutput:
    """herta plan DATASET"""
    model = make_model(args)
    model._checked()
    sizes = datasets.sizes(args.dataset, args.data_dir)
    if sizes.d == 0:
        raise ValueError(f"{args.dataset} has no features: HERTA needs some to train on.")
    backend = get_backend(args.device)
    free = backend.memory_available()
    budget = memory_budget(args.memory_budget or None, free)
    made, fits = _cheapest(model, sizes, budget)
    x_bytes = 12 * sizes.X_nonzeros if sizes.X_nonzeros else 4 * sizes.n * sizes.d
    memory = {"X itself (can stay on disk when dense)": x_bytes, **made.memory}
    peak = _expected_peak(made, sizes, x_bytes, args.dtype, model._lam())
    verdict = (
        f"{'fits' if fits else 'does NOT fit'} in memory: a process will hold about "
        f"{bytes_text(peak)} at once, Python included; the budget is {bytes_text(budget)} of "
        f"{bytes_text(free)} free on {backend.name}"
    )
    result = {
        "dataset": args.dataset, **asdict(sizes), "strategy": made.strategy, "fits": fits,
        "budget_bytes": budget, "memory_bytes": memory, "total_bytes": sum(memory.values()),
        "expected_peak_bytes": peak,
        "predicted_seconds": made.cost, "decisions": made.decisions,
    }  # fmt: skip
    return CommandOutput(result, _text(args.dataset, sizes, made, memory, verdict))


def _text(name: str, sizes: DataSizes, made: Plan, memory: dict[str, int], verdict: str) -> str:
    """The plan for people: sizes, decisions, memory, cost, and whether it fits."""
    decisions = [d for d in made.decisions if d[0] != "memory"]
    return "\n\n".join(
        [
            f"{name}: {sizes.n:,} nodes, {sizes.m:,} edges, {sizes.d:,} features, "
            f"{sizes.c:,} outputs, {sizes.n_train:,} training nodes",
            table([("", "decision", "why"), *decisions]),
            table(
                [
                    ("memory", "bytes"),
                    *((k, bytes_text(v)) for k, v in memory.items()),
                    ("all of it (not all at once)", bytes_text(sum(memory.values()))),
                ]
            ),
            table(
                [("strategy", "predicted cost (seconds of a nominal 2-core machine)")]
                + [(k, f"{v:,.3g}") for k, v in made.cost.items()]
            ),
            verdict,
        ]
    )


def _expected_peak(made: Plan, sizes: DataSizes, x_bytes: int, dtype: str, lam: float) -> int:
    """Bytes that a fit with X in memory will hold at once; a plan's memory adds up all stages.

    Building Q takes three blocks of columns.  Measuring R, which a large lam asks for, takes some
    in float64.  A gradient takes a few more, with whole outputs beside them.  The factors were
    counted in the code, and a test compares the sum with a process.
    """
    memory, word = made.memory, np.dtype(dtype).itemsize
    loaded = _INTERPRETER + _COMPILER * bool(find_spec("numba")) + _CUPY * bool(find_spec("cupy"))
    throughout = loaded + x_bytes + memory["graph"] + memory["X (copies)"] + memory.get("Q", 0)
    wide, narrow = min(made.solve_width, sizes.d), min(made.solve_width, max(sizes.c, 1))
    building = made.recipe.width * sizes.n * (3 * word + 8 * bool(sizes.X_nonzeros))
    if "R" in memory and lam > _R_LIKELY:
        building = memory["R"] + wide * sizes.n * (2 * word + 24)
    training = sizes.n * (max(sizes.c, 1) * (3 * word + 16) + narrow * column_bytes(dtype))
    factor = memory.get("P and its factor", 0)  # three copies while it is computed, one later
    return int(throughout + max(building, factor, training + factor // 3))


def _cheapest(model: HERTA, sizes: DataSizes, budget: int) -> tuple[Plan, bool]:
    """(plan, True) within the budget; if nothing fits, (the plan that needs least, False)."""
    numbers: tuple[Any, ...] = (
        sizes.n, sizes.m, sizes.d, max(sizes.c, 1), sizes.n_train, sizes.X_nonzeros
    )  # fmt: skip
    allowed = budget
    while True:
        try:
            return model.set_params(memory_budget=allowed).plan(*numbers), allowed == budget
        except MemoryError:
            allowed = int(1.1 * allowed) + 1
