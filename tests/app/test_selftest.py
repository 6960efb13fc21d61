"""`herta selftest`: it passes where all is well, and says what is not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from herta_gpu.app import selftest
from herta_gpu.app.cli import main
from herta_gpu.backends import get_backend
from tests import cuda_device
from tests.backends.cuda import primitive_checks as checks
from tests.conftest import ROOT

TINY = selftest.Size(
    "synthetic:n=150,m=400,d=5,c=3",
    columns=(1, 8, 47),
    fits=("mse cg herta",),
    dtypes=("float32",),
    seconds=0.0,
    repeats=1,
)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(selftest, "QUICK", TINY)
    monkeypatch.chdir(tmp_path)


def report(capsys: Any, device: str, *more: str) -> tuple[dict[str, Any], str]:
    assert main(["selftest", "--quick", "--device", device, "--quiet", *more]) == 0
    return json.loads(open("herta-selftest.json", encoding="utf-8").read()), capsys.readouterr().out


def test_on_the_cpu(capsys: Any) -> None:
    found, text = report(capsys, "cpu")
    assert {check["outcome"] for check in found["checks"]} == {"passed"}
    assert found["about"]["times"] == "measured"
    assert "mean nothing" not in text
    assert {row["columns"] for row in found["kernels"]} == {1, 8, 47}
    assert all(row["seconds"] > 0 for row in found["kernels"])
    assert found["fit"]["status"] == "certified"
    # The table is Markdown: every line of it has as many cells as its head.
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert lines[0] == "| kernel | k = 1 | k = 8 | k = 47 |"


def test_on_a_gpu_or_on_the_device_where_times_mean_nothing(capsys: Any) -> None:
    try:
        get_backend("cuda")
    except RuntimeError as error:
        pytest.skip(str(error))
    found, text = report(capsys, "cuda")
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    assert set(outcomes.values()) == {"passed"}
    assert {"captured steps", "X in pinned memory", "the caller's stream"} <= set(outcomes)
    emulated = cuda_device.active() is not None
    assert (found["about"]["times"] == selftest.EMULATED) == emulated
    assert (selftest.EMULATED in text) == emulated
    for k in TINY.columns:  # the product of the library is there, for every width
        names = {row["kernel"] for row in found["kernels"] if row["columns"] == k}
        assert {"apply_H", "CuPy", "CG step", "SRHT"} <= names
    assert "| product of the library / apply_H |" in text


def test_what_is_run_on_a_gpu() -> None:
    """The widths of the report that is asked for, on a graph of the size of ogbn-products."""
    assert selftest.FULL_ON_GPU.columns == (1, 8, 32, 47, 64, 100, 128)
    sizes = selftest.datasets.sizes(selftest.FULL_ON_GPU.dataset)
    assert (sizes.n, sizes.m) == (2_449_029, 61_859_140)


def test_a_device_that_computes_wrongly_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    backend = get_backend("cpu")
    right = backend.apply_H

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        if out.size:
            out[-1] *= 1.001
        return out

    monkeypatch.setattr(backend, "apply_H", wrong)
    assert main(["selftest", "--quick", "--device", "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    failed = {c["name"]: c["detail"] for c in found["checks"] if c["outcome"] == "failed"}
    assert failed["primitives"].startswith("AssertionError: apply_H is off by")


def test_a_block_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, graph = get_backend("cpu"), checks.graph("tail")
    monkeypatch.setattr(backend, "memory_available", lambda: 33 * 8 * selftest.COLUMN_BYTES)
    assert {row["columns"] for row in selftest._kernels(backend, graph, TINY)} == {1, 8}


def test_mistakes_are_found_before_any_work(capsys: Any, tmp_path: Any) -> None:
    assert main(["selftest", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["selftest", "--device", "cpu", "--dataset", "digitz"]) == 2
    assert "did you mean digits?" in capsys.readouterr().err
    command = [sys.executable, "-O", "-m", "herta_gpu", "selftest", "--quick"]
    out = ["--out", str(tmp_path / "report.json")]
    done = subprocess.run([*command, *out], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "without -O" in done.stderr
    assert not list(tmp_path.glob("*.json"))
