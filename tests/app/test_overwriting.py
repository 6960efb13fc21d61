"""No file that exists is replaced unless --overwrite says so, and never one of another kind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from herta_gpu import HERTA
from herta_gpu.app.cli import main
from herta_gpu.app.report import report
from herta_gpu.datasets import load_npz
from tests.plumbing.bad_input import a_run, check_text, listing

EXISTS = "exists already: name another file, or give --overwrite"
OF_RUN = "belongs to the run in"
NO_RUN = "is no run, and --overwrite replaces only a run"


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> Path:
    """A finished run beside its data."""
    return a_run(tmp_path_factory.mktemp("before")).parent


@pytest.fixture
def place(before, tmp_path, monkeypatch) -> Path:
    shutil.copytree(before, tmp_path / "all")
    for name in ("p.npz", "p.csv", "p.npy", "p.png", "p.json"):
        (tmp_path / "all" / name).write_text("mine")
    for name in ("report.html", "predictions.npz", "convergence.png", "tune.json"):
        folder = tmp_path / "all" / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("mine")
    (tmp_path / "all" / "with checkpoint" / "checkpoint").mkdir(parents=True)
    (tmp_path / "all" / "with checkpoint" / "checkpoint" / "weights").write_text("mine")
    other = tmp_path / "all" / "with config.json"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["Other"]}')
    (other / "model.npz").write_text("mine")
    monkeypatch.chdir(tmp_path / "all")
    return tmp_path / "all"


FILES = [
    (["predict", "run", "./data.npz", "--to", "p.npz"], EXISTS),
    (["predict", "run", "./data.npz", "--to", "p.npy"], EXISTS),
    (["predict", "run", "./data.npz", "--to", "p.csv"], EXISTS),
    (["predict", "run", "./data.npz", "--to", "run/model.npz"], OF_RUN),
    (["predict", "run", "./data.npz", "--to", "run/../run/model.npz", "--overwrite"], OF_RUN),
    (["predict", "run", "./data.npz", "--to", "data.npz"], EXISTS),
    (["profile", "./data.npz", "--out", "p.json"], EXISTS),
    (["profile", "./data.npz", "--out", "run/config.json", "--overwrite"], OF_RUN),
    (["profile", "./data.npz", "--out", "run/metrics.jsonl", "--overwrite"], OF_RUN),
    (["selftest", "--device", "cpu", "--out", "p.json"], EXISTS),
    (["selftest", "--device", "cpu", "--out", "run/result.json", "--overwrite"], OF_RUN),
    (["train", "./data.npz", "--out", "run"], "already holds a run"),
    (["tune", "./data.npz", "--out", "run"], "already holds a run"),
    *(
        ([command, "./data.npz", "--out", f"with {name}", *more], NO_RUN)
        for command in ("train", "tune")
        for name in ("report.html", "predictions.npz", "tune.json", "checkpoint", "config.json")
        for more in ([], ["--overwrite"])
    ),
    (["train", "./data.npz", "--out", "with convergence.png"], NO_RUN),
]


@pytest.mark.parametrize(("argv", "words"), FILES, ids=[" ".join(row[0]) for row in FILES])
def test_what_is_there_stays(argv, words, place, capsys, monkeypatch):
    monkeypatch.setattr(HERTA, "fit", lambda *args, **more: pytest.fail("the fit has begun"))
    held = listing(place)
    assert main([*argv, "--quiet"]) == 2
    check_text(capsys.readouterr().err, words)
    assert listing(place) == held


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["predict", "run", "./data.npz", "--to", "p.npz"], "p.npz"),
        (["predict", "run", "./data.npz", "--to", "p.npy"], "p.npy"),
        (["predict", "run", "./data.npz", "--to", "p.csv"], "p.csv"),
        (["profile", "./data.npz", "--out", "p.json"], "p.json"),
    ],
)
def test_overwrite_replaces_that_file_alone(argv, name, place):
    held = listing(place)
    assert main([*argv, "--overwrite", "--quiet"]) == 0
    now = listing(place)
    assert {key for key in held | now if held.get(key) != now.get(key)} == {name}


def test_predictions_of_a_run_are_asked_for_twice(place, capsys):
    argv = ["predict", "run", "./data.npz", "--quiet"]
    assert main(argv) == 0
    assert main(argv) == 2
    check_text(capsys.readouterr().err, EXISTS)
    assert main([*argv, "--overwrite"]) == 0
    assert HERTA.load("run/model.npz").classes_.tolist() == [0, 1, 2]


def test_overwrite_replaces_a_run_and_nothing_else_in_its_folder(place):
    (place / "run" / "notes.txt").write_text("mine")
    before = HERTA.load("run/model.npz").W_
    argv = ["train", "./data.npz", "--ridge", "2", "--quiet", "--out", "run", "--overwrite"]
    assert main(argv) == 0
    assert (place / "run" / "notes.txt").read_text() == "mine"
    assert (before != HERTA.load("run/model.npz").W_).any()


def test_an_old_run_that_was_moved_away_by_a_killed_one_comes_back(place, capsys):
    """The kill came after the old run had been moved and before the new one had begun."""
    old = place / "run" / ".replaced"
    old.mkdir()
    for path in [p for p in (place / "run").iterdir() if not p.name.startswith(".")]:
        path.rename(old / path.name)
    assert main(["train", "./data.npz", "--quiet", "--out", "run"]) == 2
    check_text(capsys.readouterr().err, "already holds a run")
    assert main(["predict", "run", "./data.npz", "--quiet"]) == 0


def test_a_report_replaces_no_file_unless_told(place):
    data = load_npz("data.npz")
    model = HERTA(ridge=0.1).fit(data.graph, data.X, data.y)
    with pytest.raises(ValueError, match="exists already"):
        report(model, data, "p.json")
    report(model, data, "p.json", overwrite=True)
    assert "HERTA on data" in (place / "p.json").read_text()
