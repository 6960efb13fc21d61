"""The checks of the CUDA backend on a real device: ``pytest -m gpu``.

For races and stray accesses run the same under NVIDIA's checker, without CuPy's pool, which would
hide the ends of arrays from it:

    HERTA_NO_POOL=1 compute-sanitizer --tool memcheck python -m pytest -m gpu
    HERTA_NO_POOL=1 compute-sanitizer --tool racecheck python -m pytest -m gpu -k primitives

and for a time line, after a first run that compiles the kernels:

    nsys profile -t cuda,nvtx --cuda-graph-trace=node -o herta python -m pytest -m gpu -k fits
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import herta_gpu.features
from herta_gpu import Graph, SDDSolver
from herta_gpu.backends import get_backend
from tests.backends.cuda import device_checks as checks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def backend() -> Any:
    try:
        found = get_backend("cuda")
    except RuntimeError as error:
        pytest.skip(str(error))
    if os.environ.get("HERTA_NO_POOL") == "1":
        found.xp.cuda.set_allocator(None)
    return found


def test_primitives(backend: Any) -> None:
    checks.check_all(backend)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", checks.FITS)
def test_fits(name: str, dtype: str) -> None:
    checks.check_fit(name, dtype)


def test_sampled_edges_end_to_end() -> None:
    checks.check_sampled_edges_end_to_end()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weighted", [False, True])
def test_product_is_that_of_cusparse(backend: Any, weighted: bool, dtype: str) -> None:
    checks.check_reference(backend, checks.graph("hub", weighted), dtype)


def test_X_in_pinned_memory(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_streaming(backend)
    monkeypatch.setattr(herta_gpu.features, "fits", lambda *_: False)
    monkeypatch.setattr(herta_gpu.features, "_CHUNK_BYTES", 8 * 6 * 7)  # seven rows
    checks.check_fit("mse cg herta", "float64")


@pytest.mark.parametrize("weighted", [False, True])
def test_edges_on_the_device(backend: Any, weighted: bool) -> None:
    """Through cuGraph where it is installed, else through the host: the same graph."""
    expected = checks.graph("fit", weighted)  # without self-loops, which `edges` leaves out
    u, v, w = expected.edges()
    edges = backend.asarray(np.stack([u, v]))
    g = Graph.from_edges(edges, 60, None if w is None else backend.asarray(w))
    L, L_hat = backend.laplacian_csr(backend.laplacian(g, "float64")), expected.to_csr()
    np.testing.assert_allclose(L.get().toarray(), L_hat.toarray(), atol=1e-14)
    assert g.num_components == expected.num_components


def test_tensors_of_torch(backend: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    g, X = checks.graph("tail"), checks.block(33, 3, "float32")
    solver = SDDSolver(g, lam=3.0, device="cuda")
    Z = solver.solve(torch.from_numpy(X).cuda())
    assert Z.is_cuda
    np.testing.assert_array_equal(Z.cpu().numpy(), solver.solve(X))


def test_captured_steps_are_the_same_steps(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    solutions = []
    for capture in (False, True):
        monkeypatch.setattr(backend, "capture", capture)
        with backend.xp.cuda.Stream(non_blocking=True) as stream:
            solver = SDDSolver(checks.graph("hub"), lam=50.0, device="cuda")
            solutions.append(solver.solve(checks.block(605, 8, "float32")))
            stream.synchronize()
    assert np.array_equal(*solutions)


def test_runs_on_the_callers_stream(backend: Any) -> None:
    with backend.xp.cuda.Stream(non_blocking=True) as stream:
        checks.check_products(backend, checks.graph("tail"), 3, "float32")
        stream.synchronize()
