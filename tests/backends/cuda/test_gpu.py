"""The checks of the CUDA backend on a real device: ``pytest -m gpu``.

``herta selftest --device cuda`` runs the same without pytest, and times the kernels as well.

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

import pytest

from herta_gpu.app import device_checks as checks
from herta_gpu.backends import get_backend
from tests.backends.cuda import more_checks

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
    more_checks.check_all(backend)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", more_checks.FITS)
def test_fits(name: str, dtype: str) -> None:
    checks.check_fit(name, dtype, fits=more_checks.FITS)


def test_sampled_edges_end_to_end() -> None:
    checks.check_sampled_edges_end_to_end()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weighted", [False, True])
def test_product_is_that_of_cusparse(backend: Any, weighted: bool, dtype: str) -> None:
    checks.check_reference(backend, checks.graph("hub", weighted), dtype)


def test_X_in_pinned_memory(backend: Any) -> None:
    checks.check_X_in_pinned_memory(backend)


@pytest.mark.parametrize("weighted", [False, True])
def test_edges_on_the_device(backend: Any, weighted: bool) -> None:
    checks.check_edges_on_the_device(backend, weighted)


def test_tensors_of_torch(backend: Any) -> None:
    missing = checks.check_tensors_of_torch(backend)
    if missing:
        pytest.skip(missing)


def test_captured_steps_are_the_same_steps(backend: Any) -> None:
    checks.check_captured_steps(backend)


def test_runs_on_the_callers_stream(backend: Any) -> None:
    checks.check_callers_stream(backend)
