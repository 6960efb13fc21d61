"""The bytes that a profile says must move, against those that the emulator saw moving."""

from __future__ import annotations

import re

import numpy as np
import pytest

from herta_gpu import Graph
from herta_gpu.backends import get_backend
from tests.backends.cuda import device_checks as checks
from tests.cuda_emulator import compiler
from tests.cupy_standin import installed

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
            state = backend.cg_start(L, 5.0, Y, backend.asarray(np.zeros(k)), 1e-3, 1e-6)
            backend.cg_step(L, 5.0, state)
            backend.srht(X, 100, 1)
        did = {}
        for kernel, (read, written) in ledger.traffic.items():
            name = re.sub(r"_[fiu](32|64).*$", "", kernel)
            did[name] = did.get(name, 0) + read + written
    assert set(did) == set(traffic.moved)
    gathers = {"apply_H": 2 * L.nnz * 36, "chebyshev": L.nnz * 36, "residual": L.nnz * 40 // 3}
    for name, must in traffic.moved.items():
        assert 0.75 * (did[name] - gathers.get(name, 0)) < must < 1.05 * did[name], name
