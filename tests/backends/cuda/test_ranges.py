"""Stages and steps as ranges of NVTX, on any device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.plumbing import progress
from tests.backends.cuda import primitive_checks as checks


def test_stages_and_steps_are_nested_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    open_, seen = [], []

    @contextmanager
    def annotate(message: str, domain: str) -> Iterator[None]:
        assert domain == "herta"
        open_.append(message)
        seen.append("/".join(open_))
        try:
            yield
        finally:
            open_.pop()

    monkeypatch.setattr(progress, "nvtx", SimpleNamespace(annotate=annotate))
    X, y = checks.block(60, 6, "float32"), np.arange(60) % 3
    model = HERTA(device="cpu", loss="ce", ridge=0.1, strategy="herta")
    model.fit(checks.graph("fit"), X, y)
    assert not open_
    assert set(model.stages_) <= set(seen)
    HERTA(device="cpu", ridge=0.1, strategy="direct").fit(checks.graph("fit"), X, y)
    steps = [f"train/step {h['step']}" for h in model.history_]
    assert steps == [s for s in seen if re.fullmatch(r"train/step \d+", s)]
    # What a step and a stage consist of, with its size; X is 60 x 6, Y has three columns.
    for pattern in (
        r"train/step \d+/solve \(columns 3, tol \S+\)/refinement cycle \(number 0, .*float32\)",
        r"train/step \d+/solve \(columns 3, tol \S+\)/residual \(columns 3\)",
        r"preconditioner/block of Q \(first 0, columns 6\)/solve \(columns 6, degree \d+\)",
        r"preconditioner/block of Q \(first 0, columns 6\)/residual \(columns 6\)",
        r"(.*/)?pass over X \(columns 6\)",
    ):
        assert any(re.fullmatch(pattern, s) for s in seen), pattern
    monkeypatch.setattr(progress, "nvtx", None)
    HERTA(device="cpu").fit(checks.graph("fit"), X, y)


def test_ranges_cost_nothing_without_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untold:
        def __format__(self, spec: str) -> str:
            raise AssertionError("nobody reads this")

    monkeypatch.setattr(progress, "nvtx", None)
    marked = progress.marked
    assert marked("solve", tol=Untold()) is marked("residual")
