"""What a user installs: light to import, complete as a wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT

HEAVY = ("cupy", "cupyx", "cugraph", "torch", "ogb", "matplotlib", "numba", "sklearn", "pandas")


def run(code: str, cwd: Path) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_no_extra(tmp_path):
    code = f"import sys, herta_gpu; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run(code, tmp_path).strip() == "[]"


def test_what_a_user_needs_is_at_the_top_level():
    import herta_gpu
    from herta_gpu.plumbing.checkpoint import Checkpoint

    assert herta_gpu.Checkpoint is Checkpoint  # it is an argument of `fit`
    assert set(herta_gpu.__all__) <= set(dir(herta_gpu))
    assert all(hasattr(herta_gpu, name) for name in herta_gpu.__all__)


def test_importing_costs_less_than_twice_its_dependencies(tmp_path):
    """The time is compared with that of the NumPy and SciPy modules, as a ratio in one run."""
    code = """
import subprocess, sys, time
def seconds(what):
    best = 1e9
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", what], check=True)
        best = min(best, time.perf_counter() - start)
    return best
base = "import numpy, scipy.sparse.csgraph, scipy.sparse.linalg, scipy.linalg"
print(seconds("import herta_gpu") / seconds(base))
"""
    assert float(run(code, tmp_path)) < 2


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="runs from the source tree only")
def test_the_idiom_of_the_readme_is_typed(tmp_path):
    """`HERTA().fit(...)` is a HERTA, so that an editor completes what comes after it."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    code = """import herta_gpu
graph = herta_gpu.Graph.from_edges([[0], [1]])
reveal_type(herta_gpu.HERTA().fit(graph, 1, 2))
reveal_type(herta_gpu.HERTA().fit(object()).score(graph))
"""
    (tmp_path / "idiom.py").write_text(code)
    argv = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml"]
    done = subprocess.run([*argv, tmp_path / "idiom.py"], cwd=ROOT, capture_output=True, text=True)
    told = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert told == ["herta_gpu.herta.HERTA", "float"], done.stdout + done.stderr


def test_the_wheel_works_with_the_source_tree_out_of_the_way(tmp_path):
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: the wheel cannot be built here")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = tmp_path / "inside"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(inside)
    for kernel in (ROOT / "kernels").iterdir():
        assert f"herta_gpu/kernels/{kernel.name}" in names
    assert "herta_gpu/py.typed" in names  # type checkers read our annotations
    assert not [n for n in names if n.startswith(("tests", "bench"))]
    code = f"""
import sys
sys.path.insert(0, {str(inside)!r})
import herta_gpu
from herta_gpu.backends.cuda.device import kernel_folder
from herta_gpu.datasets import digits
assert herta_gpu.__file__.startswith({str(inside)!r}), herta_gpu.__file__
assert str(kernel_folder()).startswith({str(inside)!r}), kernel_folder()
data = digits()
model = herta_gpu.HERTA(lam=20.0, ridge=1e-3)
model.fit(data.graph, data.X, data.y, data.split["train"])
print(model.status_)
"""
    assert run(code, tmp_path).strip() == "certified"
    check_the_command(wheel, tmp_path)


def check_the_command(wheel: Path, tmp_path: Path) -> None:
    """The `herta` that pip puts on the PATH, in an environment that has this wheel alone."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    scripts = venv / ("Scripts" if os.name == "nt" else "bin")
    python = str(scripts / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True, cwd=tmp_path)
    # NumPy and SciPy are borrowed; our own source tree must not come with them.
    site = Path(np.__file__).parents[1]
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", purelib], capture_output=True, text=True, check=True)
    for package in ("numpy", "scipy", "numpy.libs", "scipy.libs"):
        if (site / package).exists():
            (Path(own.stdout.strip()) / package).symlink_to(site / package)
    herta = str(scripts / "herta")

    def say(*argv: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.run(
            [herta, *argv], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=120
        )

    trained = say("train", "digits", "--json", "--out", "run")
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["status"] == "certified"
    assert say("predict", "run", "digits", "--quiet").returncode == 0
    assert (tmp_path / "run" / "predictions.npz").is_file()
    wrong = say("train", "digitz")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "herta_gpu 0" in say("--version").stdout


def test_kernels_are_found_from_the_source_tree():
    from herta_gpu.backends.cuda.device import kernel_folder

    names = {p.name for p in kernel_folder().iterdir()} - {"README.md"}
    assert "common.cuh" in names
    assert {Path(name).suffix for name in names} == {".cu", ".cuh"}
