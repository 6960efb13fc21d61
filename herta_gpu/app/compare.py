"""`herta compare`: do two ways to compute agree, and which is faster?  `herta profile`: where the
time of one fit goes, with a trace to open in a browser.

Two variants differ in the device, in the kernels or in the precision.  Both use the same seed, so
that every difference is rounding.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.app.results import NOTHING, CommandOutput, FitResult, Rows, bytes_text, table
from herta_gpu.app.runs import check_new_file, write_json
from herta_gpu.app.train import Job, fit, make_model, make_smoother
from herta_gpu.backends import get_backend
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.progress import SHORTEST, Stages

_WORTH_REPEATING = 60.0  # seconds: in a longer fit the time of compiling does not show
# X^T X alone takes hundreds of launches of others before the first of ours.
_OURS = "apply_H|chebyshev|halve|residual|hub_sums|cg_|column_dots|hadamard|sketch|edge_scores"
_PROFILERS = {
    "nsys": "nsys profile --trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi "
    "--capture-range-end=stop --cuda-graph-trace=node --cuda-memory-usage=true "
    "--force-overwrite=true -o herta",
    "ncu": "ncu --profile-from-start off --nvtx --set full --launch-count 200 "
    f"--kernel-name 'regex:^({_OURS})' -o herta",
}

Variant = tuple[str, str]  # a device and a precision


# ---- compare ----------------------------------------------------------------------------------
def run(args: argparse.Namespace) -> CommandOutput:
    """herta compare DATASET"""
    variants, why = choose_variants(args.devices, args.dtype)
    make_model(args, device="cpu")._checked()
    stages = Stages(args.verbose)
    data = Job.of(args).load().data
    fits = {" ".join(v): _fit(args, v, data, stages) for v in variants}
    results = {name: result for name, (_, result, _) in fits.items()}
    agreement = compare(*((model, Z) for model, _, Z in fits.values()))
    shown = {name: format(x, ".4%" if "same" in name else ".2e") for name, x in agreement.items()}
    agreed = [("agreement", ""), *((name.replace("_", " "), text) for name, text in shown.items())]
    parts = [why, *map(table, (_result_rows(results), _speed_rows(results), agreed))]
    slowest = max(*(r.total_seconds for r in results.values()), 1e-300)
    bars = {
        name: "#" * max(1, round(40 * r.total_seconds / slowest)) for name, r in results.items()
    }
    lines = [(name, f"{bars[name]:<40}", f"{r.total_seconds:.3g} s") for name, r in results.items()]
    parts.append(table(lines, header=False))
    content: dict[str, Any] = {"dataset": data.name, "note": why, "agreement": agreement}
    content["runs"] = {name: result.as_json() for name, result in results.items()}
    code = max(r.code(args) for r in results.values())
    return CommandOutput(content, "\n\n".join(filter(None, parts)), code)


def choose_variants(devices: Sequence[str], dtype: str) -> tuple[list[Variant], str]:
    """The variants to compare, and why they are not those asked for; one device: two precisions."""
    if len(devices) > 2 or len(set(devices)) < len(devices):
        raise ValueError(f"compare takes two different devices, not {','.join(devices)}.")
    if set(devices) == {"cpu", "cpu-scipy"} and find_spec("numba") is None:
        raise ImportError(
            'The compiled CPU kernels need numba: pip install "herta_gpu[fast]". Without it '
            "cpu and cpu-scipy are the same."
        )
    usable, missing = [], ""
    for device in devices:
        try:
            get_backend(device)
            usable.append(device)
        except (RuntimeError, ImportError) as error:
            missing = f"There is no {device} here ({str(error).rstrip('.')}): {missing}"
    if len(usable) == 2:
        return [(device, dtype) for device in usable], ""
    only = usable[0] if usable else "cpu"
    why = f"{missing}{only} float32 is compared with {only} float64."
    return [(only, kind) for kind in ("float32", "float64")], why


def _fit(
    args: argparse.Namespace, variant: Variant, data: Dataset, stages: Stages
) -> tuple[HERTA, FitResult, Any]:
    """The model, its result and its outputs on all nodes.

    It is fitted twice, unless that takes long: the first fit may compile, the second is measured.
    """
    stages.note(f"-- {' '.join(variant)}")
    how = dict(zip(("device", "dtype"), variant))
    for last in (False, True):
        model, smoother = make_model(args, **how, verbose=False), make_smoother(args)
        smoother = smoother and smoother.set_params(**how)
        result = fit(model, data, Stages(), smoother)
        if last or result.total_seconds > _WORTH_REPEATING:
            stages.note(f"   {result.status} in {result.total_seconds:.2f} s")
            break
        stages.note(f"   {result.total_seconds:.2f} s to warm up")
    Z = model.transform(data.graph, data.X) if smoother is None else smoother.Z_
    return model, result, Z.astype(np.float64)


def compare(first: tuple[HERTA, Any], second: tuple[HERTA, Any]) -> dict[str, float]:
    """Differences of the first model and its outputs, relative to the second."""
    (model, Z), (other, expected) = first, second
    losses = [np.array([one.history_[-1]["loss"]]) for one in (model, other)]
    found = {}
    for name, (a, b) in {
        "W": (model.W_, other.W_),
        "output": (Z, expected),
        "loss": losses,
    }.items():
        apart = np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-300)
        found[f"{name}_relative_difference"] = float(apart)
    if model.classes_ is not None:
        found["same_predictions"] = float(np.mean(Z.argmax(axis=1) == expected.argmax(axis=1)))
    elif model.loss == "bce":
        found["same_predictions"] = float(np.mean((Z > 0) == (expected > 0)))
    return found


def _result_rows(results: dict[str, FitResult]) -> Rows:
    found = list(results.values())
    first, proofs = found[0], [r.certificate for r in found]
    part = "test" if "test" in first.scores else "train"
    gaps = ("none" if c.value == float("inf") else f"{c.value:.2e}" for c in proofs)
    rows = [("", *results), ("status", *(r.status for r in found))]
    rows += [("loss", *(f"{r.loss:.10g}" for r in found)), ("certified gap", *gaps)]
    if first.correct_and_smooth is not None:
        rows.append(("outputs proven to", *(f"{r.output_error:.2e}" for r in found)))
    if any(c.reduced for c in proofs):
        rows.append(("over features", *(f"{c.kept:,} of {c.features:,}" for c in proofs)))
    return [*rows, (f"{part} {first.metric}", *(f"{r.scores[part]:.4f}" for r in found))]


def _speed_rows(results: dict[str, FitResult]) -> Rows:
    first, second = (result.seconds for result in results.values())
    pairs = {name: (s, second[name]) for name, s in first.items()}
    pairs = {name: both for name, both in pairs.items() if max(both) >= SHORTEST}
    pairs["all"] = (sum(first.values()), sum(second.values()))
    rows = ((k, f"{a:.3f}", f"{b:.3f}", f"{a / max(b, 1e-9):.2f}") for k, (a, b) in pairs.items())
    return [("seconds", *results, "first / second"), *rows]


# ---- profile ----------------------------------------------------------------------------------
def profile(args: argparse.Namespace) -> CommandOutput:
    """herta profile DATASET"""
    path, stages = Path(args.out or "herta-trace.json"), Stages(args.verbose)
    make_model(args)._checked()
    check_new_file(path, args.overwrite)
    job = Job.of(args).load()
    data, model = job.data, job.model
    with stages("warm-up"):
        make_model(args, verbose=False).fit(data.graph, data.X, data.y, data.split["train"])
    with get_backend(args.device, data.graph, data.X).profiled() as traffic:
        result = fit(model, data, Stages(args.verbose), job.smoother)
    write_json(path, {"traceEvents": _events(model, result.seconds), "displayTimeUnit": "ms"})
    again = f"python -m herta_gpu {shlex.join(args.argv)}"
    commands = {name: f"{command} {again}" for name, command in _PROFILERS.items()}
    rows = [("stage", "seconds", "share", "")]
    for name, spent in result.seconds.items():
        share = spent / result.total_seconds
        rows.append((name, f"{spent:.3f}", f"{share:.0%}", "#" * round(40 * share)))
    parts, kernels = [table(rows)], {}
    if traffic is not None:  # launches of each kernel, the bytes that it must move, and how fast
        lines, total = [], max(1, sum(traffic.moved.values()))
        for name, size in sorted(traffic.moved.items(), key=lambda item: -item[1]):
            rate, count = traffic.rates.get(name), traffic.launches[name]
            of_copy = None if rate is None else rate / traffic.copy_rate
            kernels[name] = {"launches": count, "bytes": size, "rate": rate, "of_a_copy": of_copy}
            told = NOTHING if of_copy is None else f"{of_copy:.0%}"
            lines.append((name, f"{count:,}", bytes_text(size), f"{size / total:.0%}", told))
        head = ("kernel", "launches", "must move", "share", "of a copy's rate")
        parts.append(
            f"{table([head, *lines])}\ngathers of neighbours come on top, as far as the caches "
            f"miss; a copy moves {traffic.copy_rate / 1e9:.0f} GB/s; steps that were captured are "
            "not timed"
        )
    parts.append(f"trace: {path} (open it in ui.perfetto.dev or chrome://tracing)")
    parts.append(f"with Nsight Systems on a machine with a GPU:\n  {commands['nsys']}")
    parts.append(f"with Nsight Compute, kernel by kernel:\n  {commands['ncu']}")
    content = {**result.as_json(), "trace": str(path), **commands, "kernels": kernels}
    return CommandOutput(content, "\n\n".join(parts), result.code(args))


def _events(model: HERTA, seconds: dict[str, float]) -> list[dict[str, Any]]:
    """Chrome's trace format: stages on one track, the outer steps of training on another."""
    events: list[dict[str, Any]] = []
    for track, name in {1: "stages", 2: "outer steps"}.items():
        about = {"name": name}
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": about})

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
    return events
