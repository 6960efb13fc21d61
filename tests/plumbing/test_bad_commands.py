"""Bad command lines, streams that cannot be written to, and Ctrl-C at any moment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from herta_gpu import HERTA
from herta_gpu.app import train as train_command
from herta_gpu.app.cli import main
from tests.plumbing.bad_input import check_text, listing, npz

COMMANDS: list[tuple[list[str], int, str]] = [
    (["train", "digits", "--out", ""], 2, "--out is empty"),
    (["tune", "digits", "--out", ""], 2, "--out is empty"),
    (["profile", "digits", "--out", ""], 2, "--out is empty"),
    (["predict", "FINISHED", "digits", "--to", ""], 2, "--to is empty"),
    (["predict", "", "digits"], 2, "RUN is empty"),
    (["train", "--resume", ""], 2, "--resume is empty"),
    (["train", "digits", "--data-dir", ""], 2, "--data-dir is empty"),
    (["plan", ""], 2, "DATASET is empty"),
    (["train", "digits", "--memory-budget", ""], 2, "--memory-budget is empty"),
    (["plan", "digits", "--memory-budget", "lots"], 2, "memory_budget must be"),
    (["plan", "digits", "--lam", "-1"], 2, "lam must be a positive number"),
    (["plan", "digits", "--tol", "nan"], 2, "tol must be a positive number"),
    (["train", "digits", "--seed", "99999999999999999999"], 2, "random_state must be at most"),
    (["train", "digits", "--out", "file"], 2, "is a file"),
    (["train", "digits", "--out", "file/run"], 2, "is a file"),
    (["profile", "digits", "--out", "folder"], 2, "is a folder"),
    (["predict", "FINISHED", "digits", "--to", "folder.npz"], 2, "is a folder"),
    (["predict", "FINISHED", "digits", "--to", "file/p.csv"], 2, "is a file"),
    (["predict", "FINISHED", "digits"], 2, "X has 65 features but the model was fitted with 4"),
    (["predict", "folder", "digits"], 1, "is no run"),
    (["train", "--resume", "folder"], 1, "is no run"),
    (["train", "./folder.npz"], 1, "is a folder"),
    (["train", "digitz"], 2, "did you mean digits?"),
    (["train", "digits", "--lam", "-1"], 2, "lam must be a positive number"),
    (["train", "digits", "--alpha", "2"], 2, "alpha must lie between 0 and 1"),
    (["train", "digits", "--split", "half"], 2, "random:0.8"),
    (["train", "digits", "--sparsify", "maybe"], 2, "sparsify must be"),
    (["train", "cora", "--data-dir", "no-such"], 1, "no-such does not exist"),
    (["train", "./none.npz"], 1, "There is no file none.npz"),
    (["train", "digits", "--device", "cuda"], 1, "cuda"),
    (["tune", "digits", "--ridge", "-1"], 2, "ridge must not be negative"),
    (["predict", "no-run", "digits"], 1, "no-run is no run"),
    (["predict", "no-run", "digits", "--to", "p.xlsx"], 2, "must be one of"),
    (["train", "./"], 1, "has no edges.csv"),
    (["plan", "synthetic:n=10,m=999"], 2, "at most"),
    (["train", "synthetic:n=1e13,m=1e13"], 2, "GB of disk"),
    (["train", "synthetic:n=inf"], 2, "is not a number"),
    (["train", "synthetic:n=nan"], 2, "is not a number"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "code", "words"), COMMANDS, ids=[" ".join(r[0]) for r in COMMANDS]
)
def test_commands(argv, code, words, tmp_path, capsys, monkeypatch, finished):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.npz").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HERTA, "fit", lambda *args, **more: pytest.fail("the fit has begun"))
    before, of_run = listing(tmp_path), listing(finished)
    assert main([str(finished) if a == "FINISHED" else a for a in argv] + ["--quiet"]) == code
    shown = capsys.readouterr()
    check_text(shown.err, words)
    assert shown.out == ""
    assert listing(tmp_path) == before
    assert listing(finished) == of_run


@pytest.mark.parametrize("command", ["train", "tune"])
def test_a_diverged_run_fails(command, tmp_path, capsys, monkeypatch):
    real = train_command.fit

    def diverged(*args: Any, **more: Any) -> Any:
        return replace(real(*args, **more), status="diverged")

    monkeypatch.setattr(train_command, "fit", diverged)
    assert main([command, str(npz(tmp_path)), "--quiet", "--out", str(tmp_path / "r")]) == 1
    assert "diverged" in capsys.readouterr().out
    if command == "train":
        assert main(["train", "--resume", str(tmp_path / "r"), "--quiet"]) == 1


def test_an_error_of_our_own_is_a_sentence_too(capsys, monkeypatch):
    monkeypatch.setattr("herta_gpu.app.train.load_data", lambda *args: {}["nothing"])
    assert main(["train", "digits", "--quiet"]) == 1
    check_text(capsys.readouterr().err, "An error of herta itself (KeyError: 'nothing')")


def herta(*argv: str, **more: Any) -> Any:
    command = [sys.executable, "-m", "herta_gpu", *argv]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, **more)


needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")


@needs_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("argv", [["info"], ["--help"], ["plan", "digits", "--json"]])
def test_standard_output_on_a_full_device(argv, unbuffered):
    with open("/dev/full", "w") as full:
        done = herta(*argv, stdout=full, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 1
    check_text(done.stderr, "could not be written to standard output (No space left")


@needs_full
def test_progress_that_cannot_be_shown_stops_nothing(tmp_path):
    command = [sys.executable, "-m", "herta_gpu", "train", "digits", "--out", str(tmp_path / "r")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stderr=full, stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0
    assert (tmp_path / "r" / "result.json").is_file()


def test_a_reader_who_leaves_is_no_failure():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        done = herta("info", stdout=pipe)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_while_it_is_imported():
    """Ctrl-C has its sentence as soon as `main` runs, whatever is being imported."""
    code = (
        "import sys, threading, os, signal, time\n"
        "from herta_gpu.app.cli import main\n"
        "def stop():\n"
        "    while 'numpy' not in sys.modules: time.sleep(0.001)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=stop, daemon=True).start()\n"
        "sys.exit(main(['info']))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, "herta: Interrupted.\n")


def test_importing_the_command_line_takes_no_numpy():
    code = "import sys, herta_gpu.app.cli; assert not {'numpy', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("at", ["_write_config", "fit"])
def test_ctrl_c_before_a_run_has_begun_leaves_the_old_one(at, tmp_path, monkeypatch, finished):
    def stopped(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    shutil.copytree(finished, tmp_path / "run")
    path, before = npz(tmp_path), listing(tmp_path / "run")
    monkeypatch.setattr(f"herta_gpu.app.train.{at}", stopped)
    out = ["--out", str(tmp_path / "run"), "--overwrite", "--quiet"]
    assert main(["train", str(path), *out]) == 130
    kept = listing(tmp_path / "run")
    if at == "_write_config":
        assert kept == before
    else:  # the run has begun: its config is on disk, and it can be resumed
        assert set(kept) == {"config.json", ".lock"}
