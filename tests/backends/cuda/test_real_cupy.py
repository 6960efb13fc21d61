"""What CuPy does and NumPy does not: each of these was wrong in the package once.

Run on the real CuPy, on a GPU or on the device of tests/cuda_device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from herta_gpu import SDDSolver
from herta_gpu.app import device_checks as checks
from herta_gpu.backends.ranks.nccl import Nccl
from tests.backends.cuda.test_gpu import backend as backend

pytestmark = pytest.mark.gpu

CPU, LAM = checks.CPU, checks.LAM


# ---- shapes and layouts --------------------------------------------------------------------------


@pytest.fixture
def alone(backend: Any) -> Any:
    """NCCL between the GPUs of one rank."""
    team = SimpleNamespace(
        size=1, rank=0, nccl=None, timeout=600, failed=lambda: False, debug=False,
        mark=lambda *_: None, agree=lambda x: x, each=lambda x: [x], leave=lambda: None,
    )  # fmt: skip
    library = pytest.importorskip("cupy.cuda.nccl")
    if not library.available:
        pytest.skip("NCCL is not installed")
    return Nccl(team, backend.xp, library)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (3, 1, 2), (9000,)])
def test_totals_of_ranks_keep_their_shape(backend: Any, alone: Any, shape: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape, dtype=int), dtype="float64").reshape(shape)
    total = alone.total(backend.asarray(x))
    assert total.shape == shape
    assert np.array_equal(backend.to_numpy(total), x)
    if shape == ():
        assert float(total) == 0.0  # of a shape (1,) it would be an error
    alone.close()


def by_columns(backend: Any, x: Any) -> Any:
    """As cuSOLVER and cuSPARSE leave their results."""
    made = backend.xp.asfortranarray(backend.asarray(x))
    assert not made.flags.c_contiguous
    return made


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_primitive_takes_blocks_by_columns(backend: Any, dtype: str) -> None:
    g = checks.graph("tail", True)
    L, L_cpu = backend.laplacian(g, dtype), CPU.laplacian(g, dtype)
    X, Z, B = (checks.block(L.n, 8, dtype, seed) for seed in range(3))
    x, z, b = (by_columns(backend, a) for a in (X, Z, B))
    close = checks.close
    close(backend, backend.apply_H(L, LAM, x), CPU.apply_H(L_cpu, LAM, X), dtype)
    close(backend, backend.column_dots(x, z), CPU.column_dots(X, Z), "float64")
    steps = [(0.3, 0.05)] * 3
    found = backend.chebyshev(L, LAM, b, 0.1, steps)
    close(backend, found, CPU.chebyshev(L_cpu, LAM, B, 0.1, steps), dtype)
    rows = backend.residual_rows(L, LAM, x, b.astype("float64"), 0)
    exact = CPU.residual_rows(L_cpu, LAM, X, B.astype("float64"), 0)
    close(backend, rows, exact, "float64")
    one = np.ones(8)
    ours = backend.residual(L, LAM, x, b, dtype, backend.asarray(one))
    for found, expected in zip(ours, CPU.residual(L_cpu, LAM, X, B, dtype, one), strict=True):
        close(backend, found, expected, "float32", factor=10)
    zeros = np.zeros(8)
    state = backend.cg_start(L, LAM, b, backend.asarray(zeros), 1e-3, 1e-6)
    theirs = CPU.cg_start(L_cpu, LAM, B.copy(), zeros, 1e-3, 1e-6)
    for _ in range(3):
        backend.cg_step(L, LAM, state)
        CPU.cg_step(L_cpu, LAM, theirs)
    close(backend, state.Z, theirs.Z, dtype, factor=10)
    close(backend, backend.srht(x, 5, 1), CPU.srht(X, 5, 1), dtype)
    scores = backend.edge_scores(L, x, z, LAM)
    close(backend, scores, CPU.edge_scores(L_cpu, X, Z, LAM), dtype)
    if dtype == "float32":
        found = backend.chebyshev(L, LAM, b, 0.1, steps, half=True)
        expected = CPU.chebyshev(L_cpu, LAM, B, 0.1, steps, half=True)
        close(backend, found, expected, dtype, factor=10)


def test_results_of_the_libraries_go_into_kernels(backend: Any) -> None:
    """What `solve`, `qr` and `svd` give is stored by columns."""
    g, xp = checks.graph("tail"), backend.xp
    L, L_cpu = backend.laplacian(g, "float64"), CPU.laplacian(g, "float64")
    A = checks.block(L.n, 6, "float64")
    S = np.eye(L.n) + 0.1 * A @ A.T
    solved = xp.linalg.solve(backend.asarray(S), backend.asarray(A))
    for made in (solved, xp.linalg.qr(backend.asarray(A))[0], xp.linalg.svd(solved, False)[0]):
        expected = CPU.apply_H(L_cpu, LAM, np.ascontiguousarray(backend.to_numpy(made)))
        checks.close(backend, backend.apply_H(L, LAM, made), expected, "float64")


# ---- what has no solution ------------------------------------------------------------------------


@pytest.mark.parametrize("trans", [False, True])
def test_a_singular_triangle_is_an_error_as_on_the_cpu(backend: Any, trans: bool) -> None:
    C, B = np.tril(checks.block(5, 5, "float64")), checks.block(5, 2, "float64")
    C[3, 3] = 0.0
    for where in (CPU, backend):
        with pytest.raises(np.linalg.LinAlgError, match=r"triangular factor is singular"):
            where.solve_triangular(where.asarray(C), where.asarray(B), trans)


@pytest.mark.parametrize("name", ["solve", "inv"])
def test_a_singular_matrix_is_an_error_as_on_the_cpu(backend: Any, name: str) -> None:
    """By default CuPy does not look, and the numbers are none."""
    for where in (CPU, backend):
        args = (where.asarray(np.zeros((3, 3))), where.asarray(np.ones((3, 2))))
        with where.working(), pytest.raises(np.linalg.LinAlgError):
            getattr(where.xp.linalg, name)(*args[: 1 + (name == "solve")])


def test_the_callers_own_setting_is_left_alone(backend: Any) -> None:
    """Only our work raises; the caller's singular solves go on as CuPy has them."""
    cupyx = pytest.importorskip("cupyx")
    before = cupyx.geterr()
    SDDSolver(checks.graph("tail"), lam=3.0, device="cuda").solve(checks.block(33, 2, "float32"))
    assert cupyx.geterr() == before
