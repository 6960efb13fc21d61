"""Do two ways to compute agree, and which is faster: devices, kernels or precisions.

Both ways use the same seed, so that every difference is rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.app.commands import Answer, fit, load_for, make_model
from herta_gpu.app.report import bars, draw_bars, pyplot, table
from herta_gpu.backends import get_backend
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.files import check_target
from herta_gpu.plumbing.stages import SHORTEST, Stages
from herta_gpu.plumbing.validation import check_choice

_WORTH_REPEATING = 60.0  # seconds: compilation is no part of a speed, but a long fit hides it


@dataclass(frozen=True)
class Way:
    """One of the things to compare; "cpu-scipy" is the CPU without compiled kernels."""

    device: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.device} {self.dtype}"

    @contextlib.contextmanager
    def chosen(self) -> Iterator[str]:
        """The device for HERTA, while the CPU backend is the one that was meant."""
        before = os.environ.get("HERTA_FAST")
        if self.device == "cpu-scipy":
            os.environ["HERTA_FAST"] = "0"
        try:
            yield "cpu" if self.device == "cpu-scipy" else self.device
        finally:
            if before is None:
                os.environ.pop("HERTA_FAST", None)
            else:
                os.environ["HERTA_FAST"] = before


@dataclass
class Fitted:
    """What came out of one way."""

    model: HERTA
    answer: dict[str, Any]
    Z: Any


def compare(args: argparse.Namespace) -> Answer:
    """herta compare DATASET"""
    ways, why = choose_ways(args.devices, args.dtype)
    make_model(args, device="cpu")._checked()
    if args.out is not None:
        check_target(args.out)
        check_choice("The ending of --out", Path(args.out).suffix, (".png",))
        pyplot()  # it says so if it cannot be imported
    stages = Stages(args.verbose)
    data = load_for(args, stages)
    found = {str(way): _fitted(args, way, data, stages) for way in ways}
    agreement = agreement_of(*found.values())
    seconds = {name: one.answer["seconds"] for name, one in found.items()}
    totals = {name: sum(spent.values()) for name, spent in seconds.items()}
    parts = [_result_table(found), _speed_table(seconds), _agreement_table(agreement), bars(totals)]
    text = "\n\n".join([why, *parts] if why else parts)
    if args.out is not None:
        draw_bars(seconds, Path(args.out))
        text += f"\n\nbar chart: {args.out}"
    result = {
        "dataset": data.name,
        "note": why,
        "agreement": agreement,
        "runs": {name: one.answer for name, one in found.items()},
    }
    return result, text


def choose_ways(devices: Sequence[str], dtype: str) -> tuple[list[Way], str]:
    """What to compare, and why it is not what was asked for; with one device: two precisions."""
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
        return [Way(device, dtype) for device in usable], ""
    only = usable[0] if usable else "cpu"
    why = f"{only} float32 is compared with {only} float64."
    for device, reason in reasons.items():
        if reason is not None:
            why = f"There is no {device} here ({reason.rstrip('.')}): {why}"
    return [Way(only, kind) for kind in ("float32", "float64")], why


def _missing(device: str) -> str | None:
    """Why a device cannot be used, or None."""
    try:
        get_backend("cpu" if device == "cpu-scipy" else device)
    except (RuntimeError, ImportError) as error:
        return str(error)
    return None


def _fitted(args: argparse.Namespace, way: Way, data: Dataset, stages: Stages) -> Fitted:
    stages.note(f"-- {way}")
    with way.chosen() as device:
        for last in (False, True):
            model = make_model(args, device=device, dtype=way.dtype, verbose=False)
            answer = fit(model, data, Stages())
            total = sum(answer["seconds"].values())
            if last or total > _WORTH_REPEATING:
                stages.note(f"   {answer['status']} in {total:.2f} s")
                break
            stages.note(f"   {total:.2f} s to warm up")
        return Fitted(model, answer, model.transform(data.graph, data.X).astype(np.float64))


def agreement_of(a: Fitted, b: Fitted) -> dict[str, float]:
    """Differences of the first way relative to the second."""
    losses = [one.model.history_[-1]["loss"] for one in (a, b)]
    found = {
        "W_relative_difference": _relative(a.model.W_, b.model.W_),
        "output_relative_difference": _relative(a.Z, b.Z),
        "loss_relative_difference": abs(losses[0] - losses[1]) / max(abs(losses[1]), 1e-300),
    }
    if a.model.classes_ is not None:
        found["same_predictions"] = float(np.mean(a.Z.argmax(axis=1) == b.Z.argmax(axis=1)))
    return found


def _relative(a: Any, b: Any) -> float:
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-300))


def _result_table(found: dict[str, Fitted]) -> str:
    answers = [one.answer for one in found.values()]
    part = "test" if "test" in answers[0]["scores"] else "train"
    rows = [("", *found)]
    rows.append(("status", *(a["status"] for a in answers)))
    rows.append(("loss", *(f"{a['loss']:.10g}" for a in answers)))
    rows.append(("certified gap", *(_gap(a["certificate"]["value"]) for a in answers)))
    if any(a["certificate"]["reduced"] for a in answers):
        over = [f"{c['kept']:,} of {c['features']:,}" for c in (a["certificate"] for a in answers)]
        rows.append(("over features", *over))
    rows.append((f"{part} {answers[0]['metric']}", *(f"{a['scores'][part]:.4f}" for a in answers)))
    return table(rows)


def _speed_table(seconds: dict[str, dict[str, float]]) -> str:
    first, second = seconds.values()
    rows = [("seconds", *seconds, "first / second")]
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
