"""Ranks with a GPU each: CuPy's own NCCL between processes, on the device of tests/cuda_device."""

from __future__ import annotations

import json

import pytest

from tests.backends.ranks.launch import needs_ranks, on_ranks, run_checks, said

pytestmark = [pytest.mark.gpu, pytest.mark.once, pytest.mark.usefixtures("device"), needs_ranks]
MUTANTS = ("-m", "tests.backends.ranks.gpu_mutants")
LAZY = {"CUDA_DEVICE": "lazy", "HERTA_TIMEOUT": "200"}


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3))])
def test_what_holds_on_ranks_with_a_gpu_each(size):
    run_checks(size, "gpu_checks", **LAZY)


@pytest.mark.parametrize(
    ("what", "count"), [("waits", 4), pytest.param("bugs", 12, marks=pytest.mark.long)]
)
def test_bugs_put_in_on_purpose_are_found(what, count):
    found = said(1 + count, 2, "gpu_mutants", what, **LAZY)
    assert found.pop("none") == "", found
    assert all(found.values()), found


def test_more_ranks_than_gpus_are_one_sentence_and_exit_code_2(tmp_path):
    argv = ("train", "digits", "--device", "cuda", "--out", str(tmp_path / "run"))
    done = on_ranks(2, *MUTANTS, "herta", *argv, GPUS="1")
    assert done.returncode == 2, done.stderr
    sentences = [line for line in done.stderr.splitlines() if line.startswith("herta: ")]
    assert len(sentences) == 1
    assert "2 ranks are on the machine of rank 0, which has 1 GPU" in sentences[0]


def test_the_command_line_trains_on_a_gpu_for_each_rank(tmp_path):
    argv = ("train", "synthetic:n=120,m=300,d=4,c=3", "--lam", "1", "--device", "cuda")
    out = tmp_path / "run"
    more = ("--split", "nodes", "--split", "random:0.8", "--out", str(out))
    done = on_ranks(2, *MUTANTS, "herta", *argv, *more)
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result["status"] == "certified"
    assert len(result["ranks"]) == 2
    assert "float32 on cuda" in done.stdout


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("hang", "The ranks have waited 3 s for rank 1, at total (NCCL)"),
        ("lost", "NCCL has lost another rank ("),
    ],
)
def test_a_device_that_waits_for_ever_ends_the_job(what, sentence):
    done = on_ranks(2, *MUTANTS, what, HERTA_TIMEOUT="3" if what == "hang" else "100")
    assert done.returncode != 0
    assert sentence in done.stderr, done.stderr
