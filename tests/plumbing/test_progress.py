"""Stages: their seconds are true, and the terminal shows them and nothing else."""

from __future__ import annotations

import time
from math import inf

import numpy as np
import pytest

from herta_gpu import HERTA, Graph
from herta_gpu.plumbing.progress import Stages, compilation


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


def test_compilation_is_none_of_the_time_of_a_stage(capsys, monkeypatch):
    monkeypatch.setattr(compilation, "_next", 0.0)
    stages = Stages(verbose=True)
    with stages("solve"):
        for _ in range(2):  # a kernel, and one that it calls
            compilation.start()
        time.sleep(0.05)
        for _ in range(2):
            compilation.end()
    assert 0 <= stages.seconds["solve"] < 0.05 <= stages.seconds["compile"]
    before = dict(stages.seconds)
    with stages("solve"):
        pass
    assert stages.seconds["compile"] == before["compile"]  # booked once
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "compiling kernels, once on this machine ..."
    assert [line.split()[0] for line in said[1:]] == ["compile"]


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


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_a_terminal_sees_how_much_is_left(monkeypatch):
    terminal, clock = Terminal(), Clock()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("herta_gpu.plumbing.progress.time", clock)
    tell = Stages(verbose=True).progress("Q", "columns")
    clock.now += 50.0  # before the first column anything may happen
    tell(0, 128)
    assert terminal.text == ""
    tell(64, 128)  # read from a checkpoint: no time at all
    clock.now += 40.0
    tell(96, 128)
    shown = "Q          [##################......]  96 of 128 columns, about 40 s left"
    assert terminal.seen() == [shown]
    tell(0, 128)  # once more, to a smaller residual
    clock.now += 1000.0
    tell(32, 128)
    assert terminal.seen()[0].endswith("32 of 128 columns, about 50 min left")
    tell(128, 128)
    assert terminal.seen()[0].endswith("[########################]  128 of 128 columns")


def test_a_log_file_gets_a_line_of_progress_now_and_then(monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr("herta_gpu.plumbing.progress.time", clock)
    for verbose in (False, True):
        tell = Stages(verbose=verbose).progress("Q", "columns")
        for done in range(101):  # 4 seconds for each column
            tell(done, 100)
            clock.now += 4.0
        lines = capsys.readouterr().err.splitlines()
        assert verbose or not lines
    assert [int(line.split("]")[1].split()[0]) for line in lines] == [*range(3, 100, 3)]
    assert lines[0].endswith("3 of 100 columns, about 6 min left")
    assert lines[-1].endswith("99 of 100 columns, about 4 s left")


def test_a_fit_tells_of_every_block_of_columns(monkeypatch):
    told = []
    monkeypatch.setattr(Stages, "progress", lambda *_: lambda *counts: told.append(counts))
    rng = np.random.default_rng(0)
    graph = Graph.from_edges(rng.integers(0, 3000, (2, 9000)), num_nodes=3000)
    X, y = rng.standard_normal((3000, 40)), rng.integers(0, 3, 3000)
    model = HERTA(strategy="direct", memory_budget=3_000_000).fit(graph, X, y)
    blocks = model.plan_.recipe.blocks(40)
    assert len(blocks) > 1
    first = told[: told.index((40, 40)) + 1]  # Q may be solved for once more
    assert {(0, 40), *((J.stop, 40) for J in blocks)} <= set(first)
    shares = [done for done, _ in first]
    assert shares == sorted(shares)
    within = [done for done in shares if done < blocks[0].stop]
    assert len(within) > 5  # a line comes within a block, too, step by step


def test_what_another_process_has_done_does_not_count_back(monkeypatch):
    terminal, clock = Terminal(), Clock()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("herta_gpu.plumbing.progress.time", clock)
    tell = Stages(verbose=True).progress("Q", "columns")
    tell(0, 100)
    clock.now += 10.0
    tell(62.5, 100)
    told = "Q          [###############.........]  62 of 100 columns, about 6 s left"
    assert terminal.seen() == [told]
    clock.now += 10.0
    tell(25, 100)  # a block that came from elsewhere
    assert terminal.seen() == [told]


def test_a_line_never_wraps(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    for width, kept in ((0, 79), (40, 39)):  # a terminal may not tell its width
        monkeypatch.setenv("COLUMNS", str(width))
        Stages(verbose=True).note("x" * 200)
        assert terminal.seen() == ["x" * kept]


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
