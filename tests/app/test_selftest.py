"""`herta selftest`: it passes where all is well, and says what is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from herta_gpu.app import compare, device_checks, selftest
from herta_gpu.app.cli import main
from herta_gpu.backends import get_backend
from tests import cuda_device
from tests.backends.cuda import primitive_checks as checks
from tests.conftest import ROOT, random_graph

ON_GPU = (pytest.mark.gpu, pytest.mark.once)
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


def needs(device: str) -> None:
    try:
        get_backend(device)
    except RuntimeError as error:
        pytest.skip(str(error))


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


@pytest.mark.gpu
@pytest.mark.once
def test_on_a_gpu_or_on_the_device_where_times_mean_nothing(capsys: Any) -> None:
    needs("cuda")
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
    found = [*selftest._at_size(backend, graph, TINY)]
    assert {row["columns"] for _, rows in found for row in rows} == {1, 8}
    (left_out,) = (check for check, _ in found if check["outcome"] == "left out")
    assert left_out["name"] == "all numbers, k = 47"
    assert "KB are not free" in left_out["detail"]
    # A matrix of the library is not made where it has no room: the rows are still checked.
    monkeypatch.setattr(selftest, "_ENTRY_BYTES", 1e9)
    found = [*selftest._at_size(backend, graph, TINY)]
    assert {check["outcome"] for check, _ in found} == {"passed", "left out"}
    assert "SciPy" not in {row["kernel"] for _, rows in found for row in rows}


def test_steps_that_are_timed_move_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding freezes columns after a hundred steps; a frozen step would move next to nothing."""
    backend, graph, live = get_backend("cpu"), random_graph(300, 3000), []
    step = backend.cg_step

    def watched(L: Any, lam: float, state: Any) -> None:
        live.append(backend.cg_active(state))
        step(L, lam, state)

    monkeypatch.setattr(backend, "cg_step", watched)
    size = replace(TINY, columns=(4,), seconds=1.0, repeats=5)
    (_, _), (timed, rows) = selftest._at_size(backend, graph, size)
    assert timed["outcome"] == "passed"
    assert any(row["kernel"] == "CG step" for row in rows)
    assert len(live) > 150
    assert {*live} == {4}


@pytest.mark.parametrize("weighted", [False, True])
def test_numbers_at_size_are_compared(monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    """A kernel that is wrong in one row of many, or in its dots, is found."""
    backend, graph = get_backend("cpu"), random_graph(3000, 20_000, weighted=weighted)
    M = graph.to_csr()
    device_checks.check_at_size(backend, graph, M, 9)

    def spoil(name: str, at: Any) -> None:
        right = getattr(backend, name)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = right(*args, **kwargs)
            (args[3] if found is None else found)[at] *= 1.01
            return found

        with monkeypatch.context() as patch:
            patch.setattr(backend, name, wrong)
            with pytest.raises(AssertionError, match=f"{name} is off"):
                device_checks.check_at_size(backend, graph, M, 9)

    largest = int(np.diff(graph.indptr).argmax())
    spoil("apply_H", (1234, 8))
    spoil("chebyshev_step", (1234, 8))
    spoil("column_dots", 8)
    spoil("residual_rows", (largest, 8))


def test_what_fails_later_loses_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Not even where memory ends: the report has all stages before."""

    def full(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("Out of memory")

    backend = get_backend("cpu")
    monkeypatch.setattr(backend, "srht", full)
    monkeypatch.setattr(selftest.HERTA, "fit", full)
    monkeypatch.setattr(selftest.checks, "check_primitives", lambda backend: None)
    assert main(["selftest", "--quick", "--device", "cpu", "--quiet"]) == 1
    assert "Out of memory" in capsys.readouterr().err
    found = json.loads(Path("herta-selftest.json").read_text(encoding="utf-8"))
    assert "fit" not in found
    assert {row["kernel"] for row in found["kernels"]} >= {"apply_H", "SciPy", "CG step", "sketch"}
    failed = {
        check["name"]: check["detail"] for check in found["checks"] if check["outcome"] == "failed"
    }
    assert failed["times, k = 1"] == "MemoryError: Out of memory"
    assert [c["outcome"] for c in found["checks"] if c["name"] == "all numbers, k = 47"] == [
        "passed"
    ]


NSYS = """#!/bin/sh
for word in "$@"; do
    case "$before" in -o) touch "$word.nsys-rep";; esac
    before=$word
done
echo "nsys $*"
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_folder_with_all_there_is(
    capsys: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """What a user with a first GPU sends: one command."""
    needs(device)
    tools, folder = tmp_path / "tools", tmp_path / "first card"
    tools.mkdir()
    (tools / "nsys").write_text(NSYS)
    (tools / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    command = ["selftest", "--quick", "--device", device, "--quiet", "--out", str(folder)]
    assert main(command) == 0
    text = capsys.readouterr().out
    names = {"selftest.json", "selftest.md", "trace.json", "nsys.txt", "herta.nsys-rep"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "selftest.md").read_text(encoding="utf-8").strip() == text.strip()
    found = json.loads((folder / "selftest.json").read_text(encoding="utf-8"))
    runs, agreement = found["compare"]["runs"], found["compare"]["agreement"]
    other = "cuda float32" if device == "cuda" else "cpu float64"
    assert {*runs} == {"cpu float32", other}
    assert agreement["output_relative_difference"] <= 1e-4
    assert all(run["status"] == "certified" for run in runs.values())
    assert "certified gap" in text
    assert "| product of the library / apply_H |" in text
    asked = (folder / "nsys.txt").read_text(encoding="utf-8")
    assert "--force-overwrite=true" in asked
    assert f"-m herta_gpu profile {TINY.dataset}" in asked
    assert "nsys stats" in asked
    assert main(command) == 2  # it is not written over
    assert "exists already" in capsys.readouterr().err


def test_profilers_are_told_our_kernels() -> None:
    """The names of all kernels of a product, a step and a sketch begin as one of those words."""
    assert "--force-overwrite=true" in compare._PROFILERS["nsys"]
    pattern = re.search(r"--kernel-name 'regex:(.*?)'", compare._PROFILERS["ncu"])
    assert pattern is not None
    sources = [
        (ROOT / "kernels" / f"{name}.cu").read_text()
        for name in ("laplacian", "cg", "sketch", "hadamard")
    ]
    named = [
        n for text in sources for n in re.findall(r"^\s+(?:extern.*\) )?(\w+?)_##t##", text, re.M)
    ]
    assert {"apply_H", "chebyshev", "residual"} <= {*named}
    assert [n for n in named if not re.match(pattern[1], n)] == []


def test_mistakes_are_found_before_any_work(capsys: Any, tmp_path: Any) -> None:
    (tmp_path / "folder.json").mkdir()
    assert main(["selftest", "--device", "cpu", "--out", str(tmp_path / "folder.json")]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["selftest", "--device", "cpu", "--dataset", "digitz"]) == 2
    assert "did you mean digits?" in capsys.readouterr().err
    command = [sys.executable, "-O", "-m", "herta_gpu", "selftest", "--quick"]
    out = ["--out", str(tmp_path / "report.json")]
    done = subprocess.run([*command, *out], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "without -O" in done.stderr
    assert [*tmp_path.glob("*.json")] == [tmp_path / "folder.json"]
