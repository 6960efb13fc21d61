"""A checkpoint of data in files: memory maps, and a run of the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from herta_gpu import HERTA, Graph
from herta_gpu.app.cli import main
from herta_gpu.plumbing.checkpoint import differences, fingerprint
from tests.plumbing.killed_fits import PARAMS, files, fit, given, killed, killed_command


# ---- memory maps ----------------------------------------------------------------------------
@pytest.fixture
def mapped(tmp_path) -> tuple[dict, Path]:
    """Data whose X is mapped from a file, and the path of that file."""
    data, path = given(), tmp_path / "X.npy"
    np.save(path, np.tile(data["X"], (1, 3)) + np.arange(36, dtype="float32"))
    return dict(data, X=np.load(path, mmap_mode="r")), path


def reopened(data: dict, path: Path) -> dict:
    return dict(data, X=np.load(path, mmap_mode="r"))


COMPARED = (
    r"of a memory map only 400 rows, the file's size and the file's time of change are compared"
)


def test_a_changed_memory_map_is_refused(tmp_path, mapped):
    data, path = mapped
    folder, about = tmp_path / "state", path.stat()
    killed(folder, data)
    before = files(folder)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    with pytest.raises(ValueError, match=rf"X \(by the file's time of change; {COMPARED}\)"):
        fit(folder, reopened(data, path))
    X = np.load(path)
    X[-1, -1] += 1
    np.save(path, X)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))  # but the rows differ
    with pytest.raises(ValueError, match=rf"the features X \(by 400 rows; {COMPARED}\) changed"):
        fit(folder, reopened(data, path))
    assert files(folder) == before
    X[-1, -1] -= 1
    np.save(path, X)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    again = fit(folder, reopened(data, path))
    assert (again.W_ == HERTA(**PARAMS).fit(**data).W_).all()


def test_rows_of_a_large_map_are_sampled(tmp_path):
    """The first row, the last and some between are compared; a change of another goes unseen."""
    from herta_gpu.backends import get_backend

    path, n = tmp_path / "X.npy", 50_000
    np.save(path, np.zeros((n, 2), dtype="float32"))
    about = path.stat()

    def of(row: int) -> dict:
        X = np.load(path, mmap_mode="r+")
        X[row] = 1
        X.flush()
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        graph = Graph.from_edges([[0], [1]], num_nodes=2)
        found = fingerprint(
            HERTA().get_params(), get_backend("cpu"), graph, X, np.zeros(n), np.arange(3)
        )
        X[row] = 0
        X.flush()
        return found

    step = (n - 1) / 4095
    then = of(1)  # row 1 is not among those that are compared
    assert differences(then, of(2)) == []
    for row in (0, n - 1, int(1000 * step)):
        assert "the features X (by 4,096 rows; of a memory map" in differences(then, of(row))[0]


# ---- the command line -----------------------------------------------------------------------
def store(path: Path, data: dict, X) -> None:
    u, v, _ = data["graph"].edges()
    rest = np.setdiff1d(np.arange(400), data["train"])
    np.savez(
        path, edge_index=np.stack([u, v]), num_nodes=400, features=X, labels=data["y"],
        train=data["train"], valid=rest[:50], test=rest[50:],
    )  # fmt: skip


@pytest.mark.parametrize("at", [0, 3])
def test_resume_after_the_file_was_replaced(tmp_path, capsys, at):
    data, npz, run = given(), tmp_path / "mine.npz", tmp_path / "run"
    store(npz, data, data["X"])
    command = ["train", str(npz), "--loss", "ce", "--ridge", "0.01", "--strategy", "herta"]
    killed_command([*command, "--quiet", "--out", str(run)], at)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 99}\n')  # a line that a refusal must not remove
    before = files(run)
    store(npz, data, data["X"] * 2)
    assert main(["train", "--resume", str(run), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "the features X changed" in said
    assert "--overwrite" in said
    assert said.count("\n") == 1
    assert files(run) == before
    store(npz, data, data["X"])
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    assert steps == list(range(len(steps)))
    W = HERTA.load(run / "model.npz").W_
    store(npz, data, data["X"] * 2)
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--json"]) == 0  # a finished run: its result
    assert json.loads(capsys.readouterr().out) == json.loads((run / "result.json").read_text())
    assert main([*command, "--quiet", "--out", str(run), "--overwrite"]) == 0
    assert not np.array_equal(HERTA.load(run / "model.npz").W_, W)
