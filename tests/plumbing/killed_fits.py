"""Fits that stop at a step of choice and leave their checkpoints behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from herta_gpu import HERTA
from herta_gpu.datasets import load
from herta_gpu.plumbing.checkpoint import Checkpoint

PARAMS = {"lam": 5.0, "loss": "ce", "ridge": 0.1, "strategy": "herta", "tol": 1e-9}
WAY_OUT = r"choose another folder, or begin anew with checkpoint\.delete\(\) \(--overwrite on"


def given() -> dict:
    data = load("synthetic:n=400,m=2000,d=12,c=3")
    return {"graph": data.graph, "X": data.X, "y": data.y, "train": data.split["train"]}


def killed(folder: Path, data: dict, at: int = 3, warm: bool = True, **params) -> None:
    """Leave the state of a fit that stopped at step `at`; without `warm`, of the true model."""

    def stop(entry: dict) -> None:
        if entry["step"] == at and (warm or not entry["warm"]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(folder, data, stop, **params)
    assert list(folder.glob("Q*.npz"))


def fit(folder: Path, data: dict, callback=None, **params) -> HERTA:
    checkpoint = Checkpoint(folder, worth=0.0)
    return HERTA(**{**PARAMS, **params}).fit(**data, callback=callback, checkpoint=checkpoint)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def killed_command(argv: list[str], step: int) -> None:
    """A command line whose process kills itself with -9 right after it has recorded `step`."""
    code = (
        "import os; from herta_gpu.app.cli import main; from herta_gpu.app.runs import Run\n"
        "record = Run.record\n"
        "def fatal(self, entry):\n"
        "    record(self, entry)\n"
        f"    if entry['step'] == {step}: os.kill(os.getpid(), 9)\n"
        "Run.record = fatal\n"
        f"main({argv!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
