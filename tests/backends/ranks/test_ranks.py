"""Fits on several ranks: the same as in one process, and what happens when a rank fails."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.datasets import load
from tests.backends.ranks.launch import needs_ranks, on_ranks, run_checks, said
from tests.sharing import compile_kernels_once


@needs_ranks
@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 4))])
def test_what_holds_on_any_number_of_ranks(size):
    run_checks(size, "checks", "node_checks")


def test_a_kernel_has_one_lock_however_often_it_is_asked_for():
    """With two of them its compilation would wait for itself."""
    dispatcher = pytest.importorskip("numba.core.dispatcher", reason="no numba").Dispatcher
    compile_kernels_once()
    before = dispatcher.compile
    compile_kernels_once()
    assert dispatcher.compile is before


class _Mail:
    """Messages of rank 1, which come in between two looks for them: of its end, then of a fault."""

    def __init__(self, depth: int) -> None:
        self.tags, self.looks = [1000 + depth, 2000 + depth], 0

    def Iprobe(self, source: int = 1, tag: int = 0) -> bool:
        self.looks += 1
        return self.looks > 1 and tag in self.tags

    def isend(self, said: bytes, to: int, tag: int) -> _Mail:
        return self

    def wait(self) -> None:
        pass

    def recv(self, source: int, tag: int) -> bytes:
        self.tags.remove(tag)
        return pickle.dumps(None if tag < 2000 else ValueError("of the next block"))


@needs_ranks
def test_a_fault_of_the_next_block_is_not_taken_for_one_of_this():
    from herta_gpu.backends.ranks import Ranks

    team: Any = Ranks.__new__(Ranks)
    team.rank, team.size, team.timeout, team._depth, team._control = 0, 2, 10.0, 1, _Mail(1)
    assert team._at_the_end(None) == [None, None]
    assert team._control.tags == [2001]  # which waits for the next block


def _program(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


@needs_ranks
def test_an_error_outside_of_a_fit_ends_all_ranks(tmp_path):
    program = _program(
        tmp_path,
        "from mpi4py import MPI; from herta_gpu import Graph\n"
        "g = Graph.from_edges([[0, 1], [1, 2]]).on_ranks(MPI.COMM_WORLD)\n"
        "if MPI.COMM_WORLD.rank == 1: raise FileNotFoundError('There is no X.npy.')\n"
        "g.team.total(1.0)\n",
    )
    done = on_ranks(2, program)
    assert done.returncode != 0
    assert "There is no X.npy." in done.stderr


@needs_ranks
def test_a_rank_that_hangs_ends_the_job_with_its_name(tmp_path):
    program = _program(
        tmp_path,
        "import time; from mpi4py import MPI; from herta_gpu import Graph\n"
        "g = Graph.from_edges([[0, 1], [1, 2]]).on_ranks(MPI.COMM_WORLD)\n"
        "if MPI.COMM_WORLD.rank == 1: time.sleep(1000)\n"
        "g.team.total(1.0)\n",
    )
    done = on_ranks(3, program, HERTA_TIMEOUT="1")
    assert done.returncode != 0
    assert "The ranks have waited 1 s for rank 1, at total" in done.stderr


_KILLED = """
import os, sys
from functools import partial
from mpi4py import MPI
from herta_gpu.app import cli, runs
from herta_gpu.diffusion import Rows
from tests.sharing import compile_kernels_once

compile_kernels_once()
block = Rows._block
def fatal(self, J, *rest):
    if MPI.COMM_WORLD.rank == 1 and J.start >= 100:
        os.kill(os.getpid(), 9)
    return block(self, J, *rest)
if sys.argv.pop(1) == "kill":
    Rows._block = fatal
runs.Checkpoint = partial(runs.Checkpoint, worth=0.0)
sys.exit(cli.main())
"""


@needs_ranks
def test_a_killed_rank_is_named_and_its_run_goes_on(tmp_path):
    program, out = _program(tmp_path, _KILLED), str(tmp_path / "run")
    options = ("synthetic:n=500,m=2000,d=200,c=3", "--lam", "5", "--split", "random:0.9",
               "--strategy", "direct")  # fmt: skip
    whole = on_ranks(2, program, "live", "train", *options, "--out", out + "-whole")
    assert whole.returncode == 0, whole.stderr
    dead = on_ranks(2, program, "kill", "train", *options, "--out", out)
    assert dead.returncode != 0
    assert re.search(r"rank 1\b.*signal 9", " ".join(dead.stderr.split())), dead.stderr
    assert list(Path(out, "checkpoint").glob("*-columns-*.npz"))
    shutil.copytree(out, out + "-one")
    again = on_ranks(2, program, "live", "train", "--resume", out, "--json")
    assert again.returncode == 0, again.stderr
    with np.load(out + "/model.npz") as a, np.load(out + "-whole/model.npz") as b:
        assert (a["W"] == b["W"]).all()
    result = json.loads(Path(out, "result.json").read_text())
    assert len(result["ranks"]) == 2
    config = json.loads(Path(out, "config.json").read_text())
    assert config["environment"]["ranks"] == 2
    assert json.loads(again.stdout)["status"] == result["status"]
    one = on_ranks(1, program, "live", "train", "--resume", out + "-one")
    assert one.returncode == 0, one.stderr
    assert "The run began with 2 ranks: the last bits may differ." in one.stderr
    with np.load(out + "-one/model.npz") as a, np.load(out + "-whole/model.npz") as b:
        assert np.abs(a["W"] - b["W"]).max() <= 1e-3 * np.abs(b["W"]).max()


@needs_ranks
def test_nodes_are_shared_out_by_the_command_line(tmp_path):
    """The result of one process; a killed run goes on to the same bits.

    The dataset lives in files, as large ones do: the first process makes them.
    """
    in_files = "from herta_gpu.datasets import blockmodel; blockmodel._ON_DISK = 0\n"
    program, out = _program(tmp_path, in_files + _KILLED), str(tmp_path / "run")
    cache = {"HERTA_CACHE": str(tmp_path / "cache")}
    name = "synthetic:n=500,m=2000,d=200,c=3"
    owners = np.random.default_rng(0).integers(0, 2, 500)
    np.save(tmp_path / "owners.npy", owners)
    options = (name, "--lam", "5", "--split", "random:0.9", "--split", "nodes",
               "--partition", str(tmp_path / "owners.npy"), "--normalize", "standard",
               "--strategy", "direct")  # fmt: skip
    whole = on_ranks(2, program, "live", "train", *options, "--out", out + "-whole", **cache)
    assert whole.returncode == 0, whole.stderr
    assert "2 ranks share out nodes" in whole.stderr
    data = load(name).random_split(0.9).normalized("standard")
    model = HERTA(lam=5.0, ridge=0.01).fit(data.graph, data.X, data.y, data.split["train"])
    result = json.loads(Path(out + "-whole", "result.json").read_text())
    assert result["loss"] == pytest.approx(model.history_[-1]["loss"], rel=3e-6)
    for part, ids in data.split.items():
        score = model.score(data.graph, data.X, data.y, ids)
        assert result["scores"][part] == pytest.approx(score, abs=2 / len(ids))
    assert (result["nodes"], result["edges"], len(result["ranks"])) == (500, 2000, 2)
    config = json.loads(Path(out + "-whole", "config.json").read_text())
    for told in (result, config):
        assert told["ranks_split"] == "nodes"
        assert told["partition"] == str(tmp_path / "owners.npy")
    assert (HERTA.load(out + "-whole/model.npz").train_ == data.split["train"]).all()
    assert "<h2>Time per rank</h2>" in Path(out + "-whole", "report.html").read_text()
    dead = on_ranks(2, program, "kill", "train", *options, "--out", out, **cache)
    assert dead.returncode != 0
    again = on_ranks(2, program, "live", "train", "--resume", out, "--json", **cache)
    assert again.returncode == 0, again.stderr
    with np.load(out + "/model.npz") as a, np.load(out + "-whole/model.npz") as b:
        assert (a["W"] == b["W"]).all()


@needs_ranks
def test_the_command_line_says_what_is_wrong_once(tmp_path):
    np.save(tmp_path / "owners.npy", np.zeros(7, dtype=int))
    wrong = ("--split", "nodes", "--partition", str(tmp_path / "owners.npy"))
    for argv in (("tune", "digits"), ("train", "digits", *wrong)):
        done = on_ranks(2, "-m", "herta_gpu", *argv)
        assert done.returncode == 2
        assert len([line for line in done.stderr.splitlines() if line.startswith("herta: ")]) == 1


@needs_ranks
def test_bugs_put_in_on_purpose_are_found():
    found = said(14, 2, "mutants", HERTA_TIMEOUT="200")
    unharmed = [found.pop(name) for name in ("solves", "fits", "samples", "left_out", "resumed")]
    assert not any(unharmed), unharmed
    assert all(found.values()), found
