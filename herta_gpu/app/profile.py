"""What can be known about a fit: plan before it, profile after it, info on the side."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu import datasets
from herta_gpu.app.commands import Answer, fit, load_for, make_model
from herta_gpu.app.report import bytes_text, table
from herta_gpu.app.runs import environment, jsonable
from herta_gpu.backends import get_backend
from herta_gpu.datasets import DataSizes
from herta_gpu.datasets.storage import cache_dir
from herta_gpu.herta import HERTA
from herta_gpu.planning.plan import Plan
from herta_gpu.plumbing.files import check_target, new_file
from herta_gpu.plumbing.stages import Stages
from herta_gpu.plumbing.validation import parse_bytes
from herta_gpu.solver import column_bytes

_R_LIKELY = 5.0  # lam above which rounding usually has to be measured
# Bytes of Python with NumPy and SciPy, and of what is loaded where it is installed.
_INTERPRETER, _COMPILER, _CUPY = 100 << 20, 50 << 20, 25 << 20
_EXTRAS = {
    "fast": ("numba",),
    "ogb": ("ogb", "torch"),
    "plot": ("matplotlib",),
    "tables": ("pandas", "pyarrow"),
}


def profile(args: argparse.Namespace) -> Answer:
    """herta profile DATASET"""
    stages = Stages(args.verbose)
    path = Path(args.out or "herta-trace.json")
    make_model(args)._checked()
    check_target(path)
    data = load_for(args, stages)
    with stages("warm-up"):
        make_model(args, verbose=False).fit(data.graph, data.X, data.y, data.split["train"])
    model = make_model(args)
    with get_backend(args.device).profiled():
        result = fit(model, data, Stages(args.verbose))
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(jsonable(trace(model, result["seconds"]))))
    total = sum(result["seconds"].values())
    rows = [("stage", "seconds", "share", "")]
    rows += [
        (k, f"{v:.3f}", f"{v / total:.0%}", "#" * round(40 * v / total))
        for k, v in result["seconds"].items()
    ]
    nsys = (
        "nsys profile --trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi "
        f"--capture-range-end=stop -o herta python -m herta_gpu profile {args.dataset}"
    )
    text = "\n\n".join(
        [
            table(rows),
            f"trace: {path} (open it in ui.perfetto.dev or chrome://tracing)",
            f"with Nsight Systems on a machine with a GPU:\n  {nsys}",
        ]
    )
    return {**result, "trace": str(path), "nsys": nsys}, text


def trace(model: HERTA, seconds: dict[str, float]) -> dict[str, Any]:
    """Chrome's trace format: stages on one track, the outer steps of training on another."""
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in ((1, "stages"), (2, "outer steps"))
    ]
    start, train_start = 0.0, 0.0
    for name, spent in seconds.items():
        if name == "train":
            train_start = start
        events.append(_event(name, 1, start, spent, {}))
        start += spent
    before = 0.0
    for record in model.history_:
        until = record["seconds"]
        events.append(
            _event(f"step {record['step']}", 2, train_start + before, until - before, record)
        )
        before = until
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(name: str, track: int, start: float, spent: float, about: dict[str, Any]) -> Any:
    times = {"ts": round(1e6 * start, 1), "dur": round(1e6 * spent, 1)}
    return {"name": name, "ph": "X", "pid": 1, "tid": track, **times, "args": about}


def plan(args: argparse.Namespace) -> Answer:
    """herta plan DATASET"""
    model = make_model(args)
    model._checked()
    sizes = datasets.sizes(args.dataset, args.data_dir)
    if sizes.d == 0:
        raise ValueError(f"{args.dataset} has no features: HERTA needs some to train on.")
    free = get_backend(args.device).memory_available()
    budget = parse_bytes(args.memory_budget) if args.memory_budget else int(0.8 * free)
    numbers = (sizes.n, sizes.m, sizes.d, max(sizes.c, 1), sizes.n_train, sizes.X_nonzeros)
    made, fits = _cheapest(model, numbers, budget)
    memory = dict(made.memory)
    x_bytes = 12 * sizes.X_nonzeros if sizes.X_nonzeros else 4 * sizes.n * sizes.d
    memory = {"X itself (can stay on disk when dense)": x_bytes, **memory}
    total = sum(memory.values())
    peak = _expected_peak(made, sizes, x_bytes, args.dtype, model._lam())
    where = "fits" if fits else "does NOT fit"
    verdict = (
        f"{where} in memory: a process will hold about {bytes_text(peak)} at once, Python "
        f"included; the budget is {bytes_text(budget)} of {bytes_text(free)} free on "
        f"{get_backend(args.device).name}"
    )
    result = {
        "dataset": args.dataset, **asdict(sizes), "strategy": made.strategy, "fits": fits,
        "budget_bytes": budget, "memory_bytes": memory, "total_bytes": total,
        "expected_peak_bytes": peak,
        "predicted_seconds": made.cost, "decisions": made.decisions,
    }  # fmt: skip
    decisions = [d for d in made.decisions if d[0] != "memory"]
    text = "\n\n".join(
        [
            f"{args.dataset}: {sizes.n:,} nodes, {sizes.m:,} edges, {sizes.d:,} features, "
            f"{sizes.c:,} outputs, {sizes.n_train:,} training nodes",
            table([("", "decision", "why"), *decisions]),
            table(
                [
                    ("memory", "bytes"),
                    *((k, bytes_text(v)) for k, v in memory.items()),
                    ("all of it (not all at once)", bytes_text(total)),
                ]
            ),
            table(
                [("strategy", "predicted cost (seconds of a nominal 2-core machine)")]
                + [(k, f"{v:,.3g}") for k, v in made.cost.items()]
            ),
            verdict,
        ]
    )
    return result, text


def _expected_peak(made: Plan, sizes: DataSizes, x_bytes: int, dtype: str, lam: float) -> int:
    """What a fit with X in memory will hold at once; the plan itself adds up every stage.

    Building Q takes three blocks of columns, measuring R (which a large lam asks for) some in
    float64, a gradient a few more with whole outputs beside them; counted in the code, checked by a
    test.
    """
    memory, word = made.memory, np.dtype(dtype).itemsize
    loaded = _INTERPRETER + _COMPILER * bool(find_spec("numba")) + _CUPY * bool(find_spec("cupy"))
    always = loaded + x_bytes + memory["graph"] + memory["X (copies)"] + memory.get("Q", 0)
    wide, narrow = min(made.solve_width, sizes.d), min(made.solve_width, max(sizes.c, 1))
    building = made.recipe.width * sizes.n * (3 * word + 8 * bool(sizes.X_nonzeros))
    if "R" in memory and lam > _R_LIKELY:
        building = memory["R"] + wide * sizes.n * (2 * word + 24)
    training = sizes.n * (max(sizes.c, 1) * (3 * word + 16) + narrow * column_bytes(dtype))
    factor = memory.get("P and its factor", 0)  # three copies while it is made, one later
    return int(always + max(building, factor, training + factor // 3))


def _cheapest(model: HERTA, numbers: tuple[Any, ...], budget: int) -> tuple[Plan, bool]:
    """The plan within the budget; if there is none, the one that needs least beyond it."""
    allowed = budget
    while True:
        try:
            return model.set_params(memory_budget=allowed).plan(*numbers), allowed == budget
        except MemoryError:
            allowed = int(1.1 * allowed) + 1


def info(args: argparse.Namespace) -> Answer:
    """herta info"""
    devices = {"cpu": f"{os.cpu_count()} cores, {bytes_text(_free('cpu'))} free"}
    try:
        devices["cuda"] = f"{bytes_text(_free('cuda'))} free"
    except (RuntimeError, ImportError) as error:
        devices["cuda"] = f"no ({error})"
    extras = {}
    for extra, packages in _EXTRAS.items():
        missing = [p for p in packages if importlib.util.find_spec(p) is None]
        extras[extra] = f'no: pip install "herta_gpu[{extra}]"' if missing else "yes"
    about = environment()
    versions = {k: about[k] for k in ("herta_gpu", "python", "numpy", "scipy")}
    result = {
        "versions": versions,
        "platform": platform.platform(),
        "devices": devices,
        "extras": extras,
        "data_folders": os.environ.get("HERTA_DATA", ""),
        "cache": str(cache_dir()),
        "datasets": datasets.names(args.data_dir),
    }
    rows = list(versions.items())
    rows += [(f"device {k}", v) for k, v in devices.items()]
    rows += [(f"extra {k}", v) for k, v in extras.items()]
    rows.append(("data folders", os.environ.get("HERTA_DATA") or "none (HERTA_DATA is not set)"))
    rows += [("cache", str(cache_dir())), ("datasets", ", ".join(datasets.names(args.data_dir)))]
    return result, table(rows, header=False)


def _free(device: str) -> int:
    return get_backend(device).memory_available()
