"""`herta compare`: do two ways to compute agree, and which is faster?

The two variants differ in the device, in the kernels or in the precision.  Both use the same seed,
so that every difference is rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.app.experiment import fit, load_for, make_model, make_smoother
from herta_gpu.app.pictures import draw_bars, pyplot
from herta_gpu.app.results import CommandOutput, FitResult
from herta_gpu.app.runs import check_new_file
from herta_gpu.app.text import bars, table
from herta_gpu.backends import get_backend
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.checks import check_choice
from herta_gpu.plumbing.files import new_file
from herta_gpu.plumbing.progress import SHORTEST, Stages

_WORTH_REPEATING = 60.0  # seconds: in a longer fit the time of compiling does not show


@dataclass(frozen=True)
class Variant:
    """A device, by a name that `get_backend` knows, and a precision to compute in."""

    device: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.device} {self.dtype}"


@dataclass(frozen=True)
class Fitted:
    """The fit of one variant."""

    model: HERTA
    result: FitResult
    Z: Any  # the output of the model on all nodes, in float64


def run(args: argparse.Namespace) -> CommandOutput:
    """herta compare DATASET"""
    variants, why = choose_variants(args.devices, args.dtype)
    make_model(args, device="cpu")._checked()
    make_smoother(args)  # an error, if it is asked for wrongly
    if args.out is not None:
        check_new_file(args.out, args.overwrite)
        check_choice("The ending of --out", Path(args.out).suffix, (".png",))
        pyplot()  # an error, before the long work, where matplotlib is missing
    stages = Stages(args.verbose)
    data = load_for(args, stages)
    found = {str(variant): _fitted(args, variant, data, stages) for variant in variants}
    results = {name: one.result for name, one in found.items()}
    agreement = agreement_of(*found.values())
    text = _text(results, agreement)
    if args.out is not None:
        with new_file(Path(args.out)) as temporary:
            temporary.write_bytes(draw_bars({name: r.seconds for name, r in results.items()}))
        text += f"\n\nbar chart: {args.out}"
    content = {
        "dataset": data.name,
        "note": why,
        "agreement": agreement,
        "runs": {name: result.as_json() for name, result in results.items()},
    }
    diverged = any(result.diverged for result in results.values())
    return CommandOutput(content, f"{why}\n\n{text}" if why else text, diverged)


def choose_variants(devices: Sequence[str], dtype: str) -> tuple[list[Variant], str]:
    """The variants to compare, and why they are not those asked for; one device: two precisions."""
    if len(devices) > 2 or len(set(devices)) < len(devices):
        raise ValueError(f"compare takes two different devices, not {','.join(devices)}.")
    if set(devices) == {"cpu", "cpu-scipy"} and find_spec("numba") is None:
        raise ImportError(
            'The compiled CPU kernels need numba: pip install "herta_gpu[fast]". Without it '
            "cpu and cpu-scipy are the same."
        )
    reasons = {device: _missing(device) for device in devices}
    usable = [device for device, reason in reasons.items() if reason is None]
    if len(usable) == 2:
        return [Variant(device, dtype) for device in usable], ""
    only = usable[0] if usable else "cpu"
    why = f"{only} float32 is compared with {only} float64."
    for device, reason in reasons.items():
        if reason is not None:
            why = f"There is no {device} here ({reason.rstrip('.')}): {why}"
    return [Variant(only, kind) for kind in ("float32", "float64")], why


def _missing(device: str) -> str | None:
    """The reason why a device cannot be used, or None."""
    try:
        get_backend(device)
    except (RuntimeError, ImportError) as error:
        return str(error)
    return None


def _fitted(args: argparse.Namespace, variant: Variant, data: Dataset, stages: Stages) -> Fitted:
    """Fit twice, unless that takes long: the first fit may compile, the second is measured."""
    stages.note(f"-- {variant}")
    for last in (False, True):
        model = make_model(args, device=variant.device, dtype=variant.dtype, verbose=False)
        smoother = make_smoother(args)
        if smoother is not None:
            smoother.set_params(device=variant.device, dtype=variant.dtype)
        result = fit(model, data, Stages(), smoother=smoother)
        if last or result.total_seconds > _WORTH_REPEATING:
            stages.note(f"   {result.status} in {result.total_seconds:.2f} s")
            break
        stages.note(f"   {result.total_seconds:.2f} s to warm up")
    Z = model.transform(data.graph, data.X) if smoother is None else smoother.Z_
    return Fitted(model, result, Z.astype(np.float64))


def agreement_of(a: Fitted, b: Fitted) -> dict[str, float]:
    """Differences of the first variant relative to the second."""
    losses = [one.model.history_[-1]["loss"] for one in (a, b)]
    found = {
        "W_relative_difference": _relative(a.model.W_, b.model.W_),
        "output_relative_difference": _relative(a.Z, b.Z),
        "loss_relative_difference": abs(losses[0] - losses[1]) / max(abs(losses[1]), 1e-300),
    }
    if a.model.classes_ is not None:
        found["same_predictions"] = float(np.mean(a.Z.argmax(axis=1) == b.Z.argmax(axis=1)))
    elif a.model.loss == "bce":
        found["same_predictions"] = float(np.mean((a.Z > 0) == (b.Z > 0)))
    return found


def _relative(a: Any, b: Any) -> float:
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-300))


def _text(results: dict[str, FitResult], agreement: dict[str, float]) -> str:
    """Results, seconds and agreement as tables, and the totals as bars."""
    totals = {name: result.total_seconds for name, result in results.items()}
    parts = [_result_table(results), _speed_table(results), _agreement_table(agreement)]
    return "\n\n".join([*parts, bars(totals)])


def _result_table(results: dict[str, FitResult]) -> str:
    found = list(results.values())
    part = "test" if "test" in found[0].scores else "train"
    rows = [
        ("", *results),
        ("status", *(r.status for r in found)),
        ("loss", *(f"{r.loss:.10g}" for r in found)),
        ("certified gap", *(_gap(r.certificate.value) for r in found)),
    ]
    certificates = [r.certificate for r in found]
    if found[0].correct_and_smooth is not None:
        rows.append(("outputs proven to", *(f"{r.output_error:.2e}" for r in found)))
    if any(c.reduced for c in certificates):
        rows.append(("over features", *(f"{c.kept:,} of {c.features:,}" for c in certificates)))
    rows.append((f"{part} {found[0].metric}", *(f"{r.scores[part]:.4f}" for r in found)))
    return table(rows)


def _speed_table(results: dict[str, FitResult]) -> str:
    first, second = (result.seconds for result in results.values())
    rows = [("seconds", *results, "first / second")]
    for stage in first:
        if max(first[stage], second[stage]) >= SHORTEST:
            rows.append(_speeds(stage, first[stage], second[stage]))
    rows.append(_speeds("all", sum(first.values()), sum(second.values())))
    return table(rows)


def _speeds(name: str, first: float, second: float) -> tuple[str, ...]:
    return name, f"{first:.3f}", f"{second:.3f}", f"{first / max(second, 1e-9):.2f}"


def _agreement_table(agreement: dict[str, float]) -> str:
    rows = [("agreement", "")]
    for key, value in agreement.items():
        shown = f"{value:.4%}" if key == "same_predictions" else f"{value:.2e}"
        rows.append((key.replace("_", " "), shown))
    return table(rows)


def _gap(value: float) -> str:
    return "none" if value == float("inf") else f"{value:.2e}"
