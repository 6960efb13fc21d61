"""A small fit that stops at a step of choice and leaves its checkpoint behind."""

from __future__ import annotations

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
    assert (folder / "step.npz").is_file()
    assert list(folder.glob("Q*.npz"))


def fit(folder: Path, data: dict, callback=None, **params) -> HERTA:
    checkpoint = Checkpoint(folder, worth=0.0, share=1.0)
    return HERTA(**{**PARAMS, **params}).fit(**data, callback=callback, checkpoint=checkpoint)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
