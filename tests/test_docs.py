"""Pages and notebook for readers: all code runs, all commands work, what is shown is printed."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import herta_gpu
from herta_gpu.app.cli import main
from tests.backends.ranks.launch import SETTINGS, mpirun, why_not
from tests.conftest import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "herta_gpu/app/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
CORA = Path(os.environ.get("HERTA_DATA", ""), "cora.npz").is_file()
# What a page needs beyond NumPy and SciPy.
NEEDS = {"coming-from.md": ("torch_geometric", "sklearn"), "pytorch.md": ("torch",)}
# In place of what is not there: the same commands on something small.
SMALL = {
    "ogbn-arxiv": "synthetic:n=2000,m=10000,d=16,c=5",
    "ogbn-papers100M": "synthetic:n=20000,m=100000,d=16,c=5",
}
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of the code of a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def herta(line: str) -> str:
    """What a command prints; it must work."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        assert main(shlex.split(line, comments=True)[1:]) == 0, line
    return said.getvalue()


def run_commands(text: str) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        for name, small in SMALL.items():
            line = line.replace(name, small)
        first = line.split(" ", 1)[0]
        needs_cora = " cora" in line and not CORA
        if first == "herta" and " convert " not in line and not needs_cora:  # no OGB's files here
            herta(line)
        elif first == "mpirun" and why_not() is None:
            argv = [str(mpirun()), "--oversubscribe", "--bind-to", "none", *line.split()[1:]]
            at = argv.index("herta")
            argv[at : at + 1] = [sys.executable, "-m", "herta_gpu"]
            env = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)}
            subprocess.run(argv, check=True, capture_output=True, timeout=300, env=env)


def alike(shown: str, printed: str) -> bool:
    """Whether two lines say the same: times and memory apart, up to what other kernels round."""
    timed = re.match(r"(seconds|peak memory|load|evaluate|train|preconditioner|plan) +\d", shown)
    if timed is not None and printed.startswith(timed[1]):
        return True
    if NUMBER.sub("", shown).split() != NUMBER.sub("", printed).split():
        return False
    for a, b in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        x, y = (float(text.replace(",", "").rstrip(".")) for text in (a, b))
        apart = max(abs(x), abs(y)) / max(min(abs(x), abs(y)), 1e-300)
        tiny = "e-" in a and max(x, y) <= 1e-6  # certified: how far below may change
        if x != y and not tiny and apart > (30 if "e-" in a else 1.05):
            return False
    return True


def check_outputs(text: str) -> None:
    """What stands below each `$ herta ...` is printed, in this order; "..." leaves lines out."""
    for command, shown in re.findall(r"^\$ (herta .*)\n((?:(?!\$ ).*\n)*)", text, re.M):
        printed = [line.rstrip() for line in herta(command).splitlines() if line.strip()]
        at = 0
        for line in (line.rstrip() for line in shown.splitlines() if line.strip()):
            if line == "..." or re.fullmatch(r"\w+ +\d+\.\d+ s", line):
                continue  # a stage may be too short to be told
            found = [i for i in range(at, len(printed)) if alike(line, printed[i])]
            assert found, f"{command} does not print {line!r} but\n" + "\n".join(printed[at:])
            at = found[0] + 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: Any) -> None:
    for package in NEEDS.get(page.name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{page.name} needs {package}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HERTA_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {}
    for language, text in blocks(page):
        if language == "python" and "mpi4py" in text and why_not() is not None:
            continue
        if language == "python":
            if "ogbn-arxiv" in text:
                text = text.replace("ogbn-arxiv", SMALL["ogbn-arxiv"])
            exec(compile(text, page.name, "exec"), names)
        elif language == "sh":
            run_commands(text)
        elif language == "text" and (CORA or " cora" not in text):
            check_outputs(text)


def test_the_notebook_runs_from_top_to_bottom(monkeypatch: Any) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    notebook = json.loads((ROOT / "docs/start.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 4
    for cell in cells:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile("".join(cell["source"]), "start.ipynb", "exec"), names)
        kept = "".join(text for out in cell["outputs"] for text in out.get("text", ()))
        for shown, printed in zip(kept.splitlines(), said.getvalue().splitlines(), strict=True):
            assert alike(shown, printed), (shown, printed)


def test_the_reference_has_all_that_is_public() -> None:
    told = set(re.findall(r"^::: herta_gpu\S*\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M))
    assert set(herta_gpu.__all__) <= told
