"""Stages: their seconds are true, and the terminal shows them and nothing else."""

from __future__ import annotations

import time
from math import inf

import pytest

from herta_gpu.plumbing.stages import Stages


class Terminal:
    """An imitation of a terminal: what was written to it, and what can be seen on it."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass

    def seen(self) -> list[str]:
        return [line.rsplit("\r\033[K", 1)[-1] for line in self.text.split("\n")]


def _fail_after(seconds: float) -> None:
    time.sleep(seconds)
    raise ValueError("no")


def test_a_stage_that_failed_shows_no_time(capsys, monkeypatch):
    for terminal in (None, Terminal()):
        if terminal is not None:
            monkeypatch.setattr("sys.stderr", terminal)
        stages = Stages(verbose=True)
        with pytest.raises(ValueError, match="no"), stages("load"):
            _fail_after(0.01)
        assert stages.seconds == {}
        assert (capsys.readouterr().err if terminal is None else "".join(terminal.seen())) == ""


def test_repeated_stages_add_up(capsys):
    stages = Stages(verbose=True)
    for _ in range(2):
        with stages("solve"):
            time.sleep(0.01)
    assert stages.seconds["solve"] >= 0.02
    with stages("nothing"):
        pass
    assert "nothing" in stages.seconds
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["solve", "solve"]


def test_a_log_file_gets_a_tenth_of_the_steps_and_the_last(capsys):
    stages = Stages(verbose=True)
    with stages("train"):
        for step in range(34):
            stages.step(step, 1e-7 if step == 33 else inf, 1e-6, 1.0)
        time.sleep(0.01)
    lines = capsys.readouterr().err.splitlines()
    assert [int(line.split()[1]) for line in lines[:-1]] == [*range(11), 20, 30, 33]
    assert "not certified yet" in lines[0]
    assert "[########################]  certified gap 1.0e-07" in lines[-2]
    assert lines[-1].startswith("train")


def test_a_terminal_sees_every_step_in_one_place(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    stages = Stages(verbose=True)
    with stages("train"):
        for step in range(15):
            stages.step(step, 1e-3, 1e-6, 1.0)
            assert terminal.seen()[-1].startswith(f"step {step:4d}  [############......")
        time.sleep(0.01)
    assert len(terminal.seen()) == 2
    assert terminal.seen()[0].startswith("train")


def test_a_stage_waits_for_the_device_and_is_charged_for_it():
    stages = Stages(wait=lambda: time.sleep(0.02))
    with stages("solve"):
        pass
    assert stages.seconds["solve"] >= 0.02
    called = []
    stages.wait = lambda: called.append("wait")
    with pytest.raises(ValueError, match="no"), stages("load"):
        _fail_after(0.0)
    assert called == []  # there may be no device left to wait for
