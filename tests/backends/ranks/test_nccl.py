"""Ranks with a GPU each, on the stand-ins for CuPy and NCCL: nothing here has run on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.backends.ranks.gpu_programs import CLI, HANG, LOST
from tests.backends.ranks.launch import needs_ranks, on_ranks
from tests.cuda_emulator import compiler

if compiler() is None:
    pytest.skip("no g++: the kernels cannot be emulated", allow_module_level=True)

pytestmark = [needs_ranks, pytest.mark.xdist_group("ranks")]


def said(size: int, *program: str, **environment: str) -> dict[str, str]:
    """What each line of JSON says, by the name in it."""
    done = on_ranks(size, *program, **environment)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    return dict(tuple(line.values()) for line in lines)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_holds_on_ranks_with_a_gpu_each(size):
    found = said(size, "-m", "tests.backends.ranks.gpu_checks")
    wrong = {name: text for name, text in found.items() if text}
    assert not wrong, "\n".join(f"{name}\n{text}" for name, text in wrong.items())
    text = (Path(__file__).parent / "gpu_checks.py").read_text(encoding="utf-8")
    assert len(found) == text.count("\ndef check_")


def test_bugs_put_in_on_purpose_are_found():
    found = said(2, "-m", "tests.backends.ranks.gpu_mutants", HERTA_TIMEOUT="200")
    assert found.pop("none") == "", found
    assert len(found) == 11
    assert all(found.values()), found


def test_more_ranks_than_gpus_are_one_sentence_and_exit_code_2(tmp_path):
    argv = ("train", "digits", "--device", "cuda", "--out", str(tmp_path / "run"))
    done = on_ranks(2, "-c", CLI, *argv, STANDIN_GPUS="1")
    assert done.returncode == 2, done.stderr
    sentences = [line for line in done.stderr.splitlines() if line.startswith("herta: ")]
    assert len(sentences) == 1
    assert "2 ranks are on the machine of rank 0, which has 1 GPU" in sentences[0]


def test_the_command_line_trains_on_a_gpu_for_each_rank(tmp_path):
    argv = ("train", "synthetic:n=120,m=300,d=4,c=3", "--lam", "1", "--device", "cuda")
    out = tmp_path / "run"
    more = ("--split", "nodes", "--split", "random:0.8", "--out", str(out))
    done = on_ranks(2, "-c", CLI, *argv, *more, STANDIN_GPUS="2")
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result["status"] == "certified"
    assert len(result["ranks"]) == 2
    assert "float32 on cuda" in done.stdout


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (HANG, "The ranks have waited 1 s for rank 1, at total (NCCL)"),
        (LOST, "NCCL has lost another rank (NCCL error 6): the job is ended."),
    ],
)
def test_a_device_that_waits_for_ever_ends_the_job(program, sentence):
    done = on_ranks(2, "-c", program, HERTA_TIMEOUT="1" if program is HANG else "60")
    assert done.returncode != 0
    assert sentence in done.stderr, done.stderr
