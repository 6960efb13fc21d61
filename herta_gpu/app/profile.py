"""`herta profile`: where the time of a fit goes, with a trace to open in a browser."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from herta_gpu.app.experiment import fit, load_for, make_model, make_smoother
from herta_gpu.app.results import CommandOutput, FitResult
from herta_gpu.app.runs import check_new_file
from herta_gpu.app.text import NOTHING, bytes_text, table
from herta_gpu.backends import get_backend
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.files import new_file
from herta_gpu.plumbing.models import to_plain
from herta_gpu.plumbing.progress import Stages

_PROFILERS = {
    "nsys": "nsys profile --trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi "
    "--capture-range-end=stop --cuda-graph-trace=node -o herta",
    "ncu": "ncu --profile-from-start off --nvtx --set full --launch-count 200 -o herta",
}


def run(args: argparse.Namespace) -> CommandOutput:
    """herta profile DATASET"""
    stages = Stages(args.verbose)
    path = Path(args.out or "herta-trace.json")
    make_model(args)._checked()
    check_new_file(path, args.overwrite)
    data = load_for(args, stages)
    with stages("warm-up"):
        make_model(args, verbose=False).fit(data.graph, data.X, data.y, data.split["train"])
    model = make_model(args)
    with get_backend(args.device, data.graph, data.X).profiled() as traffic:
        result = fit(model, data, Stages(args.verbose), smoother=make_smoother(args))
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(to_plain(trace(model, result.seconds), lossy=True)))
    again = f"python -m herta_gpu {shlex.join(args.argv)}"
    commands = {name: f"{command} {again}" for name, command in _PROFILERS.items()}
    text = "\n\n".join(
        [
            _stage_table(result),
            *([_kernel_table(traffic)] if traffic is not None else []),
            f"trace: {path} (open it in ui.perfetto.dev or chrome://tracing)",
            f"with Nsight Systems on a machine with a GPU:\n  {commands['nsys']}",
            f"with Nsight Compute, kernel by kernel:\n  {commands['ncu']}",
        ]
    )
    content = {**result.as_json(), "trace": str(path), **commands, "kernels": _kernels(traffic)}
    return CommandOutput(content, text, result.diverged)


def _kernels(traffic: Any) -> dict[str, dict[str, Any]]:
    """Launches of each kernel, the bytes that it must move, and how fast; none on the CPU."""
    if traffic is None:
        return {}
    names = sorted(traffic.moved, key=traffic.moved.__getitem__, reverse=True)
    return {
        name: {
            "launches": traffic.launches[name],
            "bytes": traffic.moved[name],
            "rate": traffic.rates.get(name),
            "of_a_copy": traffic.rates[name] / traffic.copy_rate if name in traffic.rates else None,
        }
        for name in names
    }


def _kernel_table(traffic: Any) -> str:
    found = _kernels(traffic)
    total = max(1, sum(row["bytes"] for row in found.values()))
    rows = [("kernel", "launches", "must move", "share", "of a copy's rate")]
    rows += [
        (
            name,
            f"{row['launches']:,}",
            bytes_text(row["bytes"]),
            f"{row['bytes'] / total:.0%}",
            NOTHING if row["of_a_copy"] is None else f"{row['of_a_copy']:.0%}",
        )
        for name, row in found.items()
    ]
    return (
        f"{table(rows)}\ngathers of neighbours come on top, as far as the caches miss; a copy "
        f"moves {traffic.copy_rate / 1e9:.0f} GB/s; steps that were captured are not timed"
    )


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
