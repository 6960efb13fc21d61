"""The demo: what it needs, what it says, and that what it says is true."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.app import demo
from herta_gpu.datasets import digits
from herta_gpu.losses import softmax

ROOT = Path(__file__).parents[2]


def test_the_demo_installs_what_it_needs_and_nothing_else(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    made = subprocess.run(["make", "-n", "demo"], cwd=tmp_path, capture_output=True, text=True)
    assert re.findall(r"--editable \"(.*)\"", made.stdout) == [".[fast,plot]"]
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/demo").touch()
    made = subprocess.run(["make", "-n", "test"], cwd=tmp_path, capture_output=True, text=True)
    assert re.findall(r"--editable \"(.*)\"", made.stdout) == [".[test,fast,plot]"]


def test_the_demo_says_what_this_is_for_and_leaves_one_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="the picture is drawn by matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_SECONDS", 0.2)
    demo.main()
    said = capsys.readouterr().out
    assert said.index("predicts labels") < said.index("digits:") < said.index("certified after")
    rows = re.findall(
        r"^(herta_gpu|gradient descent|Adam) +(?:<= )?(\S+) of it +(\S+)$", said, re.M
    )
    (_, best, _), *others = rows
    assert [name for name, *_ in rows] == ["herta_gpu", "gradient descent", "Adam"]
    assert all(float(gap) > 100 * float(best) for _, gap, _ in others)
    assert [path.name for path in tmp_path.iterdir()] == ["herta-demo.png"]


@pytest.mark.parametrize("way", [demo._descent, demo._adam])
def test_its_gradient_descent_and_adam_minimise_the_same_objective(way, monkeypatch):
    """From the certified optimum neither goes anywhere but away; from 0 the loss falls."""
    data = digits()
    train = data.split["train"]
    model = HERTA(lam=20.0, loss="ce", ridge=1e-2, dtype="float64")
    model.fit(data.graph, data.X, data.y, train)
    P = softmax(np, model.transform(data.graph, data.X, train))
    loss = -np.log(P[np.arange(len(train)), data.y[train]]).sum() + 5e-3 * (model.W_**2).sum()
    assert loss == pytest.approx(model.history_[-1]["loss"], rel=1e-6)
    curve = demo._follow(data, way, 0.5)
    losses = [row[1] for row in curve]
    assert losses[0] == pytest.approx(len(train) * np.log(10))
    assert loss < losses[-1] < losses[0]
