"""The bytes that a profile says must move, against those that the emulator saw moving."""

from __future__ import annotations

import json
import re
import shlex
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from herta_gpu import Graph
from herta_gpu.app import device_checks as checks
from herta_gpu.app.cli import main
from herta_gpu.backends import get_backend
from tests.cuda_emulator import compiler
from tests.cupy_standin import L2_BYTES, installed, streams

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++: the kernels cannot be emulated")


def test_bytes_that_must_move_against_those_that_did() -> None:
    """The count of a profile against the emulator's own, which counts gathers and scratch too."""
    g = Graph.from_edges(np.random.default_rng(0).integers(0, 3000, (2, 9000)), 3000)
    B, k = checks.block(3000, 8, "float32"), 8
    with installed("count") as ledger:
        backend = get_backend("cuda")
        L = backend.laplacian(g, "float32")
        X, Z, Y = (backend.asarray(B.copy()) for _ in range(3))
        with backend.profiled() as traffic:
            ledger.clear()
            backend.apply_H(L, 5.0, X)
            backend.chebyshev_step(L, 5.0, X, Z, Y, 0.3, 0.2)
            backend.residual_rows(L, 5.0, X, backend.asarray(B[:1000], "float64"), 1000)
            ones = backend.asarray(np.ones(k))
            backend.residual(L, 5.0, X, Y, "float32", ones)  # 12 bytes a number, not 20
            state = backend.cg_start(L, 5.0, Y, backend.asarray(np.zeros(k)), 1e-3, 1e-6)
            backend.cg_step(L, 5.0, state)
            backend.srht(X, 100, 1)
        did = {}
        for kernel, (read, written) in ledger.traffic.items():
            name = re.sub(r"_[fiu](32|64).*$", "", kernel)
            did[name] = did.get(name, 0) + read + written
    assert set(did) == set(traffic.moved)
    gathers = {"apply_H": 2 * L.nnz * 36, "chebyshev": L.nnz * 36, "residual": L.nnz * 40 * 4 // 3}
    for name, must in traffic.moved.items():
        assert 0.75 * (did[name] - gathers.get(name, 0)) < must < 1.05 * did[name], name


def test_rates_are_bytes_over_the_time_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks once an event: a launch takes a second."""
    monkeypatch.setattr(streams, "perf_counter", count().__next__)
    with installed():
        backend, k = get_backend("cuda"), 8
        L = backend.laplacian(checks.graph("hub"), "float32")
        X = backend.asarray(checks.block(L.n, k, "float32"))
        with backend.profiled() as traffic, backend.working():
            for _ in range(3):
                backend.apply_H(L, 5.0, X)
            backend.column_dots(X, X)
            state = backend.cg_start(L, 5.0, X, backend.asarray(np.zeros(k)), 1e-3, 1e-6)
            backend.capture = True
            for _ in range(3):  # launched, captured, replayed
                backend.cg_steps(L, 5.0, state, 2)
    assert traffic.launches["cg_direction"] == 6
    timed = {"apply_H": 3 + 2, "cg_direction": 2}  # not those of a captured graph
    for name, launches in timed.items():
        each = traffic.moved[name] / traffic.launches[name]
        assert traffic.rates[name] == pytest.approx(each, rel=0.01), (name, launches)
    assert traffic.copy_rate == 8 * L2_BYTES
    assert traffic.timed == []


def test_a_profile_on_the_device_tells_launches_and_bytes_of_each_kernel(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--device", "cuda", "--lam", "3", "--strategy", "herta", "--ridge", "0.1"]
    argv = ["profile", "synthetic:n=120,m=300,d=4,c=3", *options, "--loss", "ce", "--overwrite"]
    with installed():
        assert main([*argv, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert main([*argv, "--quiet"]) == 0
        shown = capsys.readouterr().out
    kernels = answer["kernels"]
    steps = {kernels[name]["launches"] for name in ("apply_H", "cg_residual", "cg_direction")}
    assert len(steps) == 1  # a step of CG is one of each
    assert min(steps) > kernels["residual"]["launches"] > 0
    assert all(row["bytes"] > 0 for row in kernels.values())
    assert kernels["residual"]["rate"] > 0  # it is never captured
    assert "of a copy's rate" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.startswith("cg_")]
    assert f"python -m herta_gpu {shlex.join([*argv, '--quiet'])}" in shown
