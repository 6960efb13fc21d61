"""The numbers of the CUDA backend on the real CuPy: ``pytest -m gpu``.

They run on a GPU where there is one, else on the device of tests/cuda_device.  ``herta selftest
--device cuda`` runs the same checks without pytest, and times the kernels as well.

On a GPU, for races and stray accesses run the same under NVIDIA's checker, without CuPy's pool,
which would hide the ends of arrays from it:

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

from herta_gpu import HERTA
from herta_gpu.backends import get_backend
from tests.backends.cuda import more_checks
from tests.backends.cuda import primitive_checks as checks

pytestmark = pytest.mark.gpu
DTYPES = ("float32", pytest.param("float64", marks=pytest.mark.once))


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "weighted", "k"),
    # A wide block of the hubs would only be slow: its columns are tested on few rows.
    [(name, name == "tail", k) for name in ("one", "tail") for k in (1, 3, 8, 130)]
    + [("hub", False, k) for k in (1, 3, 8)],
)
def test_primitives_of_any_width(
    backend: Any, name: str, weighted: bool, k: int, dtype: str
) -> None:
    g = checks.graph(name, weighted)
    checks.check_products(backend, g, k, dtype)
    checks.check_residual(backend, g, k, dtype)
    checks.check_cg(backend, g, k, dtype)
    checks.check_sketches(backend, g, k, dtype)
    checks.check_srht(backend, g.num_nodes, k, dtype)
    if dtype == "float32":
        checks.check_half(backend, g, k)


def test_float16_pays_where_the_cache_does_not_hold_a_block(backend: Any) -> None:
    runtime = backend.xp.cuda.runtime
    cache = runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"]
    L, most = backend.laplacian(checks.graph("hub"), "float32"), cache // (4 * 605)
    assert not backend.half_pays(L, most)
    assert backend.half_pays(L, most + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", more_checks.FITS)
def test_fits(name: str, dtype: str) -> None:
    checks.check_fit(name, dtype, fits=more_checks.FITS)


@pytest.mark.parametrize("few", [False, True])
def test_leave_one_out_and_several_labels_are_those_of_the_cpu(few: bool) -> None:
    rng, g = np.random.default_rng(0), checks.graph("tail")
    X, train = rng.standard_normal((g.num_nodes, 8)), np.arange(5 if few else 25)
    y = (rng.random((g.num_nodes, 2)) < 0.5) * 1
    found = []
    for device in ("cuda", "cpu"):
        model = HERTA(lam=3.0, ridge=0.2, fit_intercept=True, dtype="float64", device=device)
        model.fit(g, X, y * 1.0, train, evaluate=[7, 9], sample_weight=1.0 + y[:, 0], loo=True)
        labels = HERTA(lam=3.0, ridge=0.2, loss="bce", dtype="float64", device=device)
        found.append((model.loo_, model.leverage_, labels.fit(g, X, y, train).W_))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize("strategy", ["herta", "direct"])
def test_a_preconditioner_of_rank_0(loss: str, strategy: str) -> None:
    """Its triangular factor is empty."""
    model = HERTA(device="cuda", loss=loss, ridge=0.1, strategy=strategy)
    model.fit(checks.graph("fit"), np.zeros((60, 4)), np.arange(60) % 3)
    assert not model.W_.any()


def test_X_that_begins_anywhere(backend: Any) -> None:
    g, X, y = checks.graph("fit"), checks.block(60, 8, "float32"), np.arange(60) % 3
    flat = backend.asarray(np.concatenate([np.zeros(1, "float32"), X.ravel()]))
    unaligned = flat[1:].reshape(60, 8)
    assert unaligned.data.ptr % 16
    found = HERTA(device="cuda", strategy="herta").fit(g, unaligned, y).W_
    np.testing.assert_array_equal(found, HERTA(device="cuda", strategy="herta").fit(g, X, y).W_)


def test_sampled_edges_end_to_end() -> None:
    checks.check_sampled_edges_end_to_end()


@pytest.mark.parametrize("weighted", [False, True])
def test_same_scores_and_seed_give_the_same_edges(backend: Any, weighted: bool) -> None:
    for name in ("hub", "tail"):
        checks.check_sampling(backend, checks.graph(name, weighted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["hub", "tail", "one"])
def test_product_is_that_of_cusparse(backend: Any, name: str, weighted: bool, dtype: str) -> None:
    checks.check_reference(backend, checks.graph(name, weighted and name != "one"), dtype)


def test_a_csr_matrix_beyond_32_bits_is_refused(backend: Any) -> None:
    """Of 2^31 entries; the arrays take no memory."""
    g, xp = checks.graph("tail"), backend.xp
    L = backend.laplacian(g, "float64")
    held = {"indices": xp.broadcast_to(xp.zeros(1, "int32"), (2**31 - 3,)), "weights": None}
    held |= {name: getattr(L, name) for name in ("indptr", "inv_sqrt_degree", "diagonal")}
    held |= {"lambda_max": 2.0}
    held["segments"] = backend.segments(np.zeros(0, int), 0)
    with pytest.raises(ValueError, match=r"2,147,483,678 entries.*at most 2,147,483,647"):
        backend.adopt(held, g.num_nodes).to_csr()


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
