"""What CuPy does and NumPy does not: each of these was wrong in the package once.

Run on the real CuPy, on a GPU or on the device of tests/cuda_device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from herta_gpu import SDDSolver
from tests.backends.cuda import primitive_checks as checks
from tests.backends.cuda.test_gpu import backend as backend
from tests.cuda_device.compiler import VARIANT

pytestmark = pytest.mark.gpu

CPU, LAM = checks.CPU, checks.LAM


# ---- shapes and layouts --------------------------------------------------------------------------


@pytest.fixture
def alone(backend: Any) -> Any:
    """NCCL between the GPUs of one rank."""
    pytest.importorskip("mpi4py", reason="ranks need mpi4py")
    if VARIANT == "tsan":
        pytest.skip("Open MPI, which the ranks load, does not start under ThreadSanitizer")
    from herta_gpu.backends.ranks.nccl import Nccl

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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_primitive_takes_blocks_by_columns(backend: Any, dtype: str) -> None:
    """As cuSOLVER and cuSPARSE leave their results."""
    g, steps = checks.graph("tail", True), [(0.3, 0.05)] * 3

    def run(b: Any) -> Any:
        L, made = b.laplacian(g, dtype), (checks.block(33, 8, dtype, seed) for seed in range(3))
        x, z, B = (b.xp.asfortranarray(b.asarray(block)) for block in made)
        assert not x.flags.c_contiguous
        rows = b.residual_rows(L, LAM, x, B.astype("float64"), 0)
        R, dots = b.residual(L, LAM, x, B, dtype, b.asarray(np.ones(8)))
        state = b.cg_start(
            L, LAM, b.xp.asfortranarray(B.copy()), b.asarray(np.zeros(8)), 1e-3, 1e-6
        )
        for _ in range(3):
            b.cg_step(L, LAM, state)
        found = [b.apply_H(L, LAM, x), b.chebyshev(L, LAM, B, 0.1, steps), R, state.Z]
        found += [b.srht(x, 5, 1), b.edge_scores(L, x, z, LAM)]
        if dtype == "float32":
            found.append(b.chebyshev(L, LAM, B, 0.1, steps, half=True))
        return found, [b.column_dots(x, z), rows, dots]

    checks.agree(backend, run, dtype, factor=10)


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
