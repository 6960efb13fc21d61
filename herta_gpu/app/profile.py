"""`herta profile`: where the time of a fit goes, with a trace to open in a browser."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from herta_gpu.app.experiment import fit, load_for, make_model
from herta_gpu.app.results import CommandOutput, FitResult
from herta_gpu.app.text import table
from herta_gpu.backends import get_backend
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.files import check_target, new_file
from herta_gpu.plumbing.plain import to_plain
from herta_gpu.plumbing.stages import Stages


def run(args: argparse.Namespace) -> CommandOutput:
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
        temporary.write_text(json.dumps(to_plain(trace(model, result.seconds), lossy=True)))
    nsys = (
        "nsys profile --trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi "
        f"--capture-range-end=stop -o herta python -m herta_gpu profile {args.dataset}"
    )
    text = "\n\n".join(
        [
            _stage_table(result),
            f"trace: {path} (open it in ui.perfetto.dev or chrome://tracing)",
            f"with Nsight Systems on a machine with a GPU:\n  {nsys}",
        ]
    )
    content = {**result.as_json(), "trace": str(path), "nsys": nsys}
    return CommandOutput(content, text, result.diverged)


def _stage_table(result: FitResult) -> str:
    total = result.total_seconds
    rows = [("stage", "seconds", "share", "")]
    rows += [
        (k, f"{v:.3f}", f"{v / total:.0%}", "#" * round(40 * v / total))
        for k, v in result.seconds.items()
    ]
    return table(rows)


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
