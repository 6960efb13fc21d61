"""`herta compare`: do two ways to compute agree, and which is faster?

The two variants differ in the device, in the kernels or in the precision.  Both use the same seed,
so that every difference is rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.app.experiment import fit, load_for, make_model, make_smoother
from herta_gpu.app.pictures import draw_bars, pyplot
from herta_gpu.app.results import CommandOutput, FitResult
from herta_gpu.app.runs import check_new_file
from herta_gpu.app.text import Rows, bars, table
from herta_gpu.backends import get_backend
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.checks import check_choice
from herta_gpu.plumbing.files import new_file
from herta_gpu.plumbing.progress import SHORTEST, Stages

_WORTH_REPEATING = 60.0  # seconds: in a longer fit the time of compiling does not show

Variant = tuple[str, str]  # a device and a precision


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
    found = [_fit(args, variant, data, stages) for variant in variants]
    results = {" ".join(v): result for v, (_, result, _) in zip(variants, found)}
    agreement = compare(*((model, Z) for model, _, Z in found))
    shown = {name: format(x, ".4%" if "same" in name else ".2e") for name, x in agreement.items()}
    agreed = [("agreement", ""), *((name.replace("_", " "), text) for name, text in shown.items())]
    tables = [_result_rows(results), _speed_rows(results), agreed]
    parts = [*([why] if why else []), *map(table, tables)]
    parts.append(bars({name: result.total_seconds for name, result in results.items()}))
    if args.out is not None:
        with new_file(Path(args.out)) as temporary:
            temporary.write_bytes(draw_bars({name: r.seconds for name, r in results.items()}))
        parts.append(f"bar chart: {args.out}")
    content: dict[str, Any] = {"dataset": data.name, "note": why, "agreement": agreement}
    content["runs"] = {name: result.as_json() for name, result in results.items()}
    return CommandOutput(content, "\n\n".join(parts), any(r.diverged for r in results.values()))


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
        result = fit(model, data, Stages(), smoother=smoother)
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
    pairs = {"W": (model.W_, other.W_), "output": (Z, expected), "loss": losses}
    found = {
        f"{name}_relative_difference": float(
            np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-300)
        )
        for name, (a, b) in pairs.items()
    }
    if model.classes_ is not None:
        found["same_predictions"] = float(np.mean(Z.argmax(axis=1) == expected.argmax(axis=1)))
    elif model.loss == "bce":
        found["same_predictions"] = float(np.mean((Z > 0) == (expected > 0)))
    return found


def _result_rows(results: dict[str, FitResult]) -> Rows:
    found = list(results.values())
    certificates, first = [r.certificate for r in found], found[0]
    part = "test" if "test" in first.scores else "train"
    gaps = ("none" if c.value == float("inf") else f"{c.value:.2e}" for c in certificates)
    rows = [("", *results), ("status", *(r.status for r in found))]
    rows += [("loss", *(f"{r.loss:.10g}" for r in found)), ("certified gap", *gaps)]
    if first.correct_and_smooth is not None:
        rows.append(("outputs proven to", *(f"{r.output_error:.2e}" for r in found)))
    if any(c.reduced for c in certificates):
        rows.append(("over features", *(f"{c.kept:,} of {c.features:,}" for c in certificates)))
    return [*rows, (f"{part} {first.metric}", *(f"{r.scores[part]:.4f}" for r in found))]


def _speed_rows(results: dict[str, FitResult]) -> Rows:
    first, second = (result.seconds for result in results.values())
    pairs = {name: (first[name], second[name]) for name in first}
    pairs = {name: both for name, both in pairs.items() if max(both) >= SHORTEST}
    pairs["all"] = (sum(first.values()), sum(second.values()))
    rows = ((k, f"{a:.3f}", f"{b:.3f}", f"{a / max(b, 1e-9):.2f}") for k, (a, b) in pairs.items())
    return [("seconds", *results, "first / second"), *rows]
