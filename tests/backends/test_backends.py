"""What all backends share, and the CPU backend's primitives against closed forms, dense algebra
and published vectors."""

from __future__ import annotations

import ast
import inspect

import numpy as np
import pytest
import scipy.linalg
import scipy.stats

from herta_gpu.backends import base
from herta_gpu.backends.base import Backend, keep_probabilities
from herta_gpu.backends.cpu import lapack
from herta_gpu.backends.cpu.reference import CPUBackend, philox, walsh_hadamard
from tests.conftest import ROOT, dense_H, random_graph


def _backend(name: str) -> type[Backend]:
    if name == "fast":
        pytest.importorskip("numba", reason="the compiled backend needs numba")
        from herta_gpu.backends.cpu.compiled import CompiledBackend

        return CompiledBackend
    if name == "cuda":
        from herta_gpu.backends.cuda.backend import CUDABackend

        return CUDABackend
    return CPUBackend


@pytest.mark.parametrize("name", ["cpu", "fast", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_backend_has_the_documented_signatures(name):
    backend = _backend(name)  # this test is on names; mypy looks at the types
    own = [name for name, kind in Backend.__annotations__.items() if kind.startswith("Callable")]
    shared = [name for name, _ in inspect.getmembers(Backend, inspect.isfunction)]
    assert len(own) >= 18
    for method in (*shared, *(set(own) - {"communities"})):
        ours, theirs = (
            [(x.name, x.kind, x.default) for x in inspect.signature(f).parameters.values()]
            for f in (getattr(backend, method), getattr(CPUBackend, method))
        )
        ours, theirs = ([x for x in one if x[0] != "self"] for one in (ours, theirs))
        assert ours == theirs, method


def test_no_cuda_source_is_a_python_string():
    for file in (ROOT / "herta_gpu").rglob("*.py"):
        assert "__global__" not in file.read_text(encoding="utf-8"), file.name


def test_only_the_cuda_backend_imports_cupy():
    """No other module imports CuPy, neither at its top nor inside a function."""
    found = set()
    for file in (ROOT / "herta_gpu").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "asname")]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and node.args:
                called = ast.unparse(node.func)
                names = [ast.unparse(node.args[0]).strip("'")] if "import" in called else []
            elif not isinstance(node, ast.Import):
                continue
            if {name.partition(".")[0] for name in names} & {"cupy", "cupyx", "cupy_backends"}:
                found.add(file.relative_to(ROOT / "herta_gpu").as_posix())
    assert found == {"backends/cuda/backend.py"}


@pytest.mark.parametrize(
    "words",
    [
        "0 0 0 0  0 0  6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        "ffffffff " * 6 + "408f276d 41c83b0e a20bc7c6 6d5451fd",
        "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
    ],
)
def test_philox_known_answers(words):
    """Counter, key and answer, as they were published with Random123."""
    w = [np.uint64(int(word, 16)) for word in words.split()]
    assert [*philox.philox4x32(*w[:6])] == w[6:]


def test_gaussians_are_normal_and_keyed_by_row_and_column():
    rows = np.arange(4000)
    G = philox.gaussians(rows, rows * 0, 25, seed=7, stream=1)
    # Kolmogorov-Smirnov on 100,000 draws; a right generator fails with probability 1e-4.
    assert scipy.stats.kstest(G.ravel(), "norm").pvalue > 1e-4
    correlation = np.corrcoef(G.T)
    assert np.abs(correlation - np.eye(25)).max() < 5 / np.sqrt(4000)
    np.testing.assert_array_equal(
        G[100:103, :9], philox.gaussians(rows[100:103], rows[:3] * 0, 9, 7, 1)
    )
    assert (G[:3] != philox.gaussians(rows[:3], rows[:3] * 0, 25, 8, 1)).all()


def test_multiply_high_is_exact():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2**64, 200, dtype=np.uint64)
    for b in (1, 12345, 2**40 + 3, 2**62 - 1):
        ours = philox.multiply_high(a, np.uint64(b))
        assert [int(x) for x in ours] == [(int(x) * b) >> 64 for x in a]


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 400])
@pytest.mark.parametrize("k", [1, 3, 8, 64])
@pytest.mark.parametrize("weighted", [False, True])
def test_apply_H_is_the_dense_product(n, k, weighted):
    backend, lam = CPUBackend(), 7.0
    g = random_graph(n, 3 * n, weighted=weighted)
    X = np.random.default_rng(0).standard_normal((g.num_nodes, k))
    exact = dense_H(g, lam) @ X
    for dtype, atol in (("float64", 1e-12), ("float32", 1e-4)):
        L = backend.laplacian(g, dtype)
        np.testing.assert_allclose(
            backend.apply_H(L, lam, X.astype(dtype)), exact, atol=atol * max(1, abs(exact).max())
        )


def test_sketches_are_the_stated_products():
    g, k = random_graph(40, 120, weighted=True), 6
    backend = CPUBackend()
    L = backend.laplacian(g, "float64")
    u, v, w = g.edges()
    B_hat = np.zeros((120, 40))
    B_hat[np.arange(120), u] = np.sqrt(w / g.degree[u])
    B_hat[np.arange(120), v] = -np.sqrt(w / g.degree[v])
    np.testing.assert_allclose(B_hat.T @ B_hat, g.to_csr().toarray(), atol=1e-14)
    Pi_1 = philox.gaussians(u, v, k, 5, base.STREAM_INCIDENCE).T / np.sqrt(k)
    np.testing.assert_allclose(backend.sketch_incidence(L, k, 5), (Pi_1 @ B_hat).T, atol=1e-14)
    Pi_2 = philox.gaussians(np.arange(40), np.zeros(40, int), k, 5, base.STREAM_IDENTITY).T
    np.testing.assert_allclose(backend.sketch_identity(L, k, 5), Pi_2.T / np.sqrt(k), atol=1e-14)
    B_S, Pi_S = np.random.default_rng(0).standard_normal((2, 40, k))
    ours = backend.edge_scores(L, B_S, Pi_S, 3.0)
    theirs = ((B_hat @ B_S) ** 2).sum(axis=1) + ((B_hat @ Pi_S) ** 2).sum(axis=1) / 3.0
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_sampling_with_replacement_draws_by_the_scores():
    """Chi-square on 10^5 draws over 50 edges; fails with probability 1e-4 if right."""
    scores = np.random.default_rng(0).uniform(0.01, 1, 50)
    s = 100_000
    factors = CPUBackend().sample_edges(scores, s, 3, True)
    p = scores / scores.sum()
    counts = factors * s * p
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-3)
    assert scipy.stats.chisquare(np.round(counts), s * p).pvalue > 1e-4


def test_bernoulli_sampling_caps_at_one_and_meets_the_budget():
    scores = np.concatenate([np.full(5, 1.0), np.full(2000, 0.001)])
    p = keep_probabilities(np, scores, 105)
    assert p[:5].min() == 1.0
    assert p.sum() == pytest.approx(105)
    factors = CPUBackend().sample_edges(scores, 105, 0, False)
    assert (factors[:5] == 1).all()
    # 100 expected of 2,000: five standard deviations, probability below 1e-5.
    assert abs(np.count_nonzero(factors[5:]) - 100) < 50
    kept = factors[5:][factors[5:] > 0]
    np.testing.assert_allclose(kept, 20.0)


@pytest.mark.parametrize("n", [1, 2, 8, 32, 64, 512, 2048])
def test_walsh_hadamard_is_the_recursive_definition(n):
    Y = np.random.default_rng(0).standard_normal((n, 3))
    np.testing.assert_allclose(
        walsh_hadamard(Y), scipy.linalg.hadamard(n) @ Y / np.sqrt(n), atol=1e-12
    )


@pytest.mark.parametrize("n", [1, 5, 64, 100])
def test_srht_keeps_everything_when_it_keeps_every_row(n):
    Q = np.random.default_rng(0).standard_normal((n, 4))
    padded = 1 << (n - 1).bit_length()
    Q_tilde = CPUBackend().srht(Q, padded, 0)
    np.testing.assert_allclose(Q_tilde.T @ Q_tilde, Q.T @ Q, atol=1e-12)


def test_srht_is_the_same_for_every_column_block():
    Q = np.random.default_rng(0).standard_normal((100, 6))
    whole = CPUBackend().srht(Q, 32, 5)
    parts = [CPUBackend().srht(np.ascontiguousarray(Q[:, j : j + 2]), 32, 5) for j in (0, 2, 4)]
    np.testing.assert_allclose(np.hstack(parts), whole, atol=1e-14)


def test_few_features_ask_for_few_threads_of_BLAS(monkeypatch):
    known = lapack._threads_of_blas()
    if known is None:
        pytest.skip("SciPy's BLAS is not OpenBLAS")
    (tell, take), before = known, known[0]()
    monkeypatch.setattr(lapack, "num_threads", lambda: 4)
    monkeypatch.delenv("HERTA_NUM_THREADS", raising=False)
    assert [lapack.blas_threads(d) for d in (1, 1433, 5000, 10**6)] == [1, 1, 2, 4]
    try:
        for told, columns, inside in ((2, 100, 1), (2, 10**6, 2), (1, 10**6, 1)):
            take(told)  # no more than it was told
            with lapack.limited(columns):
                assert tell() == inside
            assert tell() == told
        monkeypatch.setenv("HERTA_NUM_THREADS", "4")  # rules all
        with lapack.limited(1):
            assert tell() == 4
        assert tell() == 1
    finally:
        take(before)
