"""Two variants of a computation: chosen as asked, compared by numbers that can be checked."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.app.cli import main
from herta_gpu.app.compare import choose_variants
from herta_gpu.backends import get_backend
from herta_gpu.datasets import load

try:
    get_backend("cuda")
    CUDA = True
except RuntimeError:
    CUDA = False
without_gpu = pytest.mark.skipif(CUDA, reason="there is a GPU here")


LARGE = "synthetic:n=3000,m=20000,d=8,c=3"  # enough for compiled kernels


def run(capsys, *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@without_gpu
def test_compare_says_when_there_is_no_gpu(capsys):
    answer = run(capsys, "compare", "digits", "--ridge", "0.1")
    assert "There is no cuda here" in answer["note"]
    assert set(answer["runs"]) == {"cpu float32", "cpu float64"}
    assert answer["agreement"]["W_relative_difference"] < 1e-3
    assert answer["agreement"]["same_predictions"] > 0.999
    assert main(["compare", "digits", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "####" in shown
    assert shown.startswith("There is no cuda here")


def test_scipy_against_the_compiled_kernels(capsys, monkeypatch):
    pytest.importorskip("numba", reason="without numba there is only the SciPy path")
    argv = ["compare", LARGE, "--devices", "cpu-scipy,cpu", "--ridge", "0.1", "--lam", "20"]
    answer = run(capsys, *argv)
    assert list(answer["runs"]) == ["cpu-scipy float32", "cpu float32"]
    data, W, losses = load(LARGE), [], []
    for fast in ("0", "1"):
        monkeypatch.setenv("HERTA_FAST", fast)
        model = HERTA(lam=20.0, ridge=0.1)
        W.append(model.fit(data.graph, data.X, data.y, data.split["train"]).W_)
        losses.append(model.history_[-1]["loss"])
    assert [one["loss"] for one in answer["runs"].values()] == losses
    apart = np.linalg.norm(W[0] - W[1]) / np.linalg.norm(W[1])
    assert answer["agreement"]["W_relative_difference"] == pytest.approx(apart, abs=1e-12)
    assert 0 < apart < 1e-4  # two programs do not give the same bits


def test_the_estimator_takes_cpu_scipy_as_compare_does(capsys, monkeypatch):
    data, W = load(LARGE), []
    for device, fast in (("cpu-scipy", "1"), ("cpu", "0")):
        monkeypatch.setenv("HERTA_FAST", fast)
        model = HERTA(lam=20.0, ridge=0.1, device=device)
        W.append(model.fit(data.graph, data.X, data.y, data.split["train"]).W_)
    assert (W[0] == W[1]).all()


def test_comparing_leaves_the_environment_alone(capsys, monkeypatch):
    before = dict(os.environ)
    seen = []
    monkeypatch.setattr(HERTA, "fit", lambda *a, **k: seen.append(dict(os.environ)) or 1 / 0)
    assert main(["compare", "digits", "--devices", "cpu-scipy", "--quiet"]) == 1
    assert seen == [before]


def test_what_cannot_be_compared():
    for wrong in (("cpu", "cpu"), ("cpu", "cpu-scipy", "auto")):
        with pytest.raises(ValueError, match="two different devices"):
            choose_variants(wrong, "float32")
    variants, why = choose_variants(("cpu",), "float32")
    assert [" ".join(variant) for variant in variants] == ["cpu float32", "cpu float64"]
    assert why == "cpu float32 is compared with cpu float64."


def test_without_numba_the_pip_command_is_named(monkeypatch):
    monkeypatch.setattr("herta_gpu.app.compare.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "herta_gpu\[fast\]"'):
        choose_variants(("cpu", "cpu-scipy"), "float32")


def test_the_time_of_compilation_is_not_compared(monkeypatch, capsys):
    """The second fit of each variant is reported, not the first."""
    import herta_gpu.app.compare as module

    calls, real = [], module.fit

    def slow_at_first(model, data, stages, smoother):
        result = real(model, data, stages, smoother)
        calls.append(model.dtype)
        return replace(result, seconds={"train": 50.0 if calls.count(model.dtype) == 1 else 1.0})

    monkeypatch.setattr(module, "fit", slow_at_first)
    answer = run(capsys, "compare", "digits", "--devices", "cpu", "--ridge", "0.1")
    assert calls == ["float32", "float32", "float64", "float64"]
    assert [one["seconds"]["train"] for one in answer["runs"].values()] == [1.0, 1.0]


def test_device_is_not_ignored(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "digits", "--device", "cpu"])
    assert "--devices A,B" in capsys.readouterr().err
