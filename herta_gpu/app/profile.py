"""`herta profile`: where the time of a fit goes, with a trace to open in a browser."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from herta_gpu.app.experiment import fit, load_for, make_model, make_smoother
from herta_gpu.app.results import CommandOutput
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
    kernels = _kernels(traffic)
    total, rows = result.total_seconds, [("stage", "seconds", "share", "")]
    for name, spent in result.seconds.items():
        share = spent / total
        rows.append((name, f"{spent:.3f}", f"{share:.0%}", "#" * round(40 * share)))
    parts = [table(rows)]
    parts += [] if traffic is None else [_kernel_table(kernels, traffic.copy_rate)]
    parts.append(f"trace: {path} (open it in ui.perfetto.dev or chrome://tracing)")
    parts.append(f"with Nsight Systems on a machine with a GPU:\n  {commands['nsys']}")
    parts.append(f"with Nsight Compute, kernel by kernel:\n  {commands['ncu']}")
    content = {**result.as_json(), "trace": str(path), **commands, "kernels": kernels}
    return CommandOutput(content, "\n\n".join(parts), result.diverged)


def _kernels(traffic: Any) -> dict[str, dict[str, Any]]:
    """Launches of each kernel, the bytes that it must move, and how fast; none on the CPU."""
    found = {}
    for name, size in sorted(traffic.moved.items(), key=lambda item: -item[1]) if traffic else ():
        rate = traffic.rates.get(name)
        share = None if rate is None else rate / traffic.copy_rate
        found[name] = {"launches": traffic.launches[name], "bytes": size}
        found[name] |= {"rate": rate, "of_a_copy": share}
    return found


def _kernel_table(kernels: dict[str, dict[str, Any]], copy_rate: float) -> str:
    total = max(1, sum(row["bytes"] for row in kernels.values()))
    rows = [("kernel", "launches", "must move", "share", "of a copy's rate")]
    for name, row in kernels.items():
        size, share = row["bytes"], row["of_a_copy"]
        moved = (bytes_text(size), f"{size / total:.0%}")
        of_copy = NOTHING if share is None else f"{share:.0%}"
        rows.append((name, f"{row['launches']:,}", *moved, of_copy))
    return (
        f"{table(rows)}\ngathers of neighbours come on top, as far as the caches miss; a copy "
        f"moves {copy_rate / 1e9:.0f} GB/s; steps that were captured are not timed"
    )


def trace(model: HERTA, seconds: dict[str, float]) -> dict[str, Any]:
    """Chrome's trace format: stages on one track, the outer steps of training on another."""
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in ((1, "stages"), (2, "outer steps"))
    ]

    def add(name: str, track: int, start: float, stop: float, about: dict[str, Any]) -> None:
        times = {"ts": round(1e6 * start, 1), "dur": round(1e6 * (stop - start), 1)}
        events.append({"name": name, "ph": "X", "pid": 1, "tid": track, **times, "args": about})

    now = began = before = 0.0
    for name, spent in seconds.items():
        began = now if name == "train" else began
        add(name, 1, now, now + spent, {})
        now += spent
    for record in model.history_:
        add(f"step {record['step']}", 2, began + before, began + record["seconds"], record)
        before = record["seconds"]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
