from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse as sp
import scipy.sparse.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from herta_gpu import Graph, SDDSolver
from herta_gpu.backends import get_backend
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.laplacian import (
    RegularizedLaplacian,
    block_cg,
    chebyshev,
    chebyshev_degree,
    chebyshev_error,
    chebyshev_rounding,
)
from tests.conftest import dense_H, random_graph
from tests.fuzz.reference import system


def h_norm_error(H, Z, B):
    """||z - H^-1 b||_H / ||H^-1 b||_H by dense float64 algebra, per column."""
    exact = np.linalg.solve(H, B.astype(float))
    E = Z - exact
    error, size = (np.sqrt((M * (H @ M)).sum(axis=0)) for M in (E, exact))
    return np.where(size > 0, error / np.where(size > 0, size, 1), error)


def exact_error(g, lam, Z, B):
    """The same in extended precision, by solves that are refined in it."""
    u, v, w = g.edges()
    H = system(g.num_nodes, np.stack([u, v]), w, lam)
    factor, exact = scipy.linalg.cho_factor(H.astype(float)), np.zeros(B.shape, dtype=H.dtype)
    for _ in range(4):
        exact += scipy.linalg.cho_solve(factor, (B - H @ exact).astype(float))
    E = Z - exact
    error, size = (np.sqrt((M * (H @ M)).sum(axis=0)) for M in (E, exact))
    return np.where(size > 0, error / np.where(size > 0, size, 1), error)


@pytest.mark.parametrize("lam", [1e2, 1.8e3, 1e4])
def test_the_bound_holds_where_the_residual_is_all_there_is_to_see(lam):
    """Cause: on two nodes whose error lies where H is 1 the bound is sharp, and rounding shows."""
    worst = 0.0
    for seed in range(60):
        g = random_graph(8, 12, seed)
        B = np.random.default_rng(seed).standard_normal((8, 4)) + 1.0
        solver = SDDSolver(g, lam, tol=1e-8, dtype="float64")
        Z = solver.solve(B)
        bound = solver.info_.h_norm_bound
        worst = max(worst, float((exact_error(g, lam, Z, B) / bound).max()))
        # An error along the eigenvector of 1, as large as the bound allows.
        smooth = np.sqrt(g.degree)[:, None]
        smooth = smooth / np.linalg.norm(smooth)
        size = np.sqrt((Z * (dense_H(g, lam) @ Z)).sum(axis=0))
        moved = Z + 0.5e-8 * size * smooth
        again = SDDSolver(g, lam, tol=1.0, dtype="float64")
        kept = again.solve(B, guess=moved)
        np.testing.assert_array_equal(kept, moved)  # good enough: only measured
        error = exact_error(g, lam, kept, B)
        assert (error <= again.info_.h_norm_bound).all()
        worst = max(worst, float((error / again.info_.h_norm_bound).max()))
    assert 0.9 < worst <= 1.0


def test_a_tolerance_that_rounding_forbids_to_prove_is_not_claimed():
    """A hub of 2,000 neighbours at lam 1e4: the residual is right to about 1e-11 only."""
    hub = np.stack([np.zeros(2000, int), np.arange(1, 2001)])
    solver = SDDSolver(Graph.from_edges(hub, 2001), 1e4, tol=1e-15, dtype="float64")
    solver.solve(np.random.default_rng(0).standard_normal((2001, 2)))
    assert solver.info_.status == "stagnated"
    assert (solver.info_.h_norm_bound > 1e-15).all()


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 40),
    density=st.floats(0, 1),
    lam=st.floats(-3, 4).map(lambda x: 10.0**x),
    tol=st.sampled_from([1e-1, 1e-3, 1e-6, 1e-9]),
    method=st.sampled_from(["cg", "chebyshev"]),
    dtype=st.sampled_from(["float32", "float64"]),
    weighted=st.booleans(),
    k=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)
def test_error_is_below_the_bound_and_the_bound_below_tol(
    n, density, lam, tol, method, dtype, weighted, k, seed
):
    g = random_graph(n, int(density * n * (n - 1) / 2), seed, weighted)
    B = np.random.default_rng(seed).standard_normal((n, k))
    solver = SDDSolver(g, lam, method=method, tol=tol, dtype=dtype)
    Z = solver.solve(B)
    info = solver.info_
    assert info.status == "converged"
    # The reference is in extended precision: the bound itself counts what its residual rounds.
    assert (exact_error(g, lam, Z, B) <= info.h_norm_bound).all()
    assert (info.h_norm_bound <= tol).all()
    true = np.linalg.norm(B - dense_H(g, lam) @ Z, axis=0)
    np.testing.assert_allclose(info.residuals, true, rtol=1e-5, atol=1e-12 * (1 + 2 * lam))


@pytest.mark.parametrize("lam", [1e-3, 1.0, 20.0, 1e3, 1e4])
@pytest.mark.parametrize("method", ["cg", "chebyshev"])
def test_all_lam_on_a_power_law_graph(lam, method):
    rng = np.random.default_rng(1)
    n = 500
    hub = np.stack([np.zeros(n - 1, int), np.arange(1, n)])
    extra = np.stack([rng.zipf(1.8, 800) % n, rng.integers(0, n, 800)])
    edges = np.unique(np.sort(np.concatenate([hub, extra], axis=1), axis=0), axis=1)
    g = Graph.from_edges(edges, n)
    B = rng.standard_normal((n, 3))
    solver = SDDSolver(g, lam, method=method, tol=1e-5)
    error = h_norm_error(dense_H(g, lam), solver.solve(B), B)
    assert error.max() <= 1e-5
    assert solver.info_.status == "converged"


def test_columns_of_any_scale_and_zero_columns():
    g = random_graph(100, 300)
    B = np.random.default_rng(0).standard_normal((100, 5))
    B[:, 1] = 0
    B[:, 2] *= 1e-25
    B[:, 3] *= 1e25
    solver = SDDSolver(g, 20.0, tol=1e-6)
    Z = solver.solve(B)
    assert h_norm_error(dense_H(g, 20.0), Z, B).max() <= 1e-6
    assert np.abs(Z[:, 1]).max() == 0
    assert solver.info_.iterations[1] == 0


def test_converged_columns_freeze():
    g = random_graph(200, 600)
    H = dense_H(g, 50.0)
    _, vectors = np.linalg.eigh(H)
    easy, hard = vectors[:, :1], np.random.default_rng(0).standard_normal((200, 1))
    solver = SDDSolver(g, 50.0, tol=1e-6, dtype="float64")
    solver.solve(np.hstack([easy, hard]))
    assert solver.info_.iterations[0] <= 2 < solver.info_.iterations[1]


def test_an_impossible_tolerance_stagnates_and_says_where():
    g = random_graph(300, 900)
    B = np.random.default_rng(0).standard_normal((300, 2))
    solver = SDDSolver(g, 1e4, tol=1e-17)
    solver.solve(B)
    assert solver.info_.status == "stagnated"
    assert (solver.info_.h_norm_bound > 1e-17).all()
    assert (solver.info_.h_norm_bound < 1e-8).all()


@pytest.mark.parametrize("size", [1e160, 1e-170])
def test_right_hand_sides_beyond_the_range_of_squares(size):
    g = random_graph(50, 150)
    B = size * np.random.default_rng(0).standard_normal((50, 2))
    solver = SDDSolver(g, 20.0, tol=1e-6)
    Z = solver.solve(B)
    assert solver.info_.status == "converged"
    np.testing.assert_allclose(Z / size, np.linalg.solve(dense_H(g, 20.0), B / size), atol=1e-5)


def test_integers_are_not_rounded_to_float32():
    g = random_graph(5, 6)
    B = np.array([2**25 + 1, 2**25 + 3, -(2**25) - 3, 5, 7])
    solver = SDDSolver(g, 1.0, tol=1e-10)
    Z = solver.solve(B)
    exact = np.linalg.solve(dense_H(g, 1.0), B.astype(float))
    assert np.abs(Z - exact).max() <= 1e-9 * np.abs(exact).max()


def test_max_iter_is_obeyed_and_checked():
    g = random_graph(300, 900)
    B = np.random.default_rng(0).standard_normal((300, 1))
    solver = SDDSolver(g, 1e4, tol=1e-12, max_iter=40)
    solver.solve(B)
    assert solver.info_.iterations.max() <= 40
    for wrong in (-1, 2.5, 0):
        with pytest.raises(ValueError, match="max_iter"):
            SDDSolver(g, max_iter=wrong)


def test_max_iter_is_not_success():
    g = random_graph(300, 900)
    solver = SDDSolver(g, 1e3, tol=1e-8, max_iter=3)
    solver.solve(np.ones((300, 1)) * np.arange(300)[:, None])
    assert solver.info_.status == "max_iter"
    assert solver.info_.h_norm_bound.max() > 1e-8


def test_float32_refines_in_float64_only_when_tol_asks():
    g = random_graph(100, 300)
    B = np.random.default_rng(0).standard_normal((100, 2))
    rough, fine = SDDSolver(g, 20.0, tol=1e-4), SDDSolver(g, 20.0, tol=1e-10)
    assert rough.solve(B).dtype == np.float32
    Z = fine.solve(B)
    assert Z.dtype == np.float64
    assert h_norm_error(dense_H(g, 20.0), Z, B).max() <= 1e-10


def test_shapes_blocks_and_sparse_input():
    g = random_graph(80, 200)
    B = np.random.default_rng(0).standard_normal((80, 10))
    exact = np.linalg.solve(dense_H(g, 5.0), B)
    one_column = 80 * (7 * 4 + 24)
    small = SDDSolver(g, 5.0, tol=1e-6, memory_budget=3 * one_column)
    np.testing.assert_allclose(small.solve(B), exact, atol=1e-5)
    assert small.info_.residuals.shape == (10,)
    assert SDDSolver(g, 5.0).solve(B[:, 0]).shape == (80,)
    sparse = SDDSolver(g, 5.0, tol=1e-6).solve(sp.csr_array(B))
    np.testing.assert_allclose(sparse, exact, atol=1e-5)
    with pytest.raises(MemoryError, match="raise memory_budget"):
        SDDSolver(g, 5.0, memory_budget=100).solve(B)


def test_a_reordered_graph_gives_the_same_answer():
    g = random_graph(120, 400)
    B = np.random.default_rng(0).standard_normal((120, 3))
    ours = SDDSolver(g.reordered("rcm"), 20.0, tol=1e-6).solve(B)
    assert h_norm_error(dense_H(g, 20.0), ours, B).max() <= 1e-6


@pytest.mark.parametrize("lam", [0.1, 1.0, 20.0, 1000.0])
@pytest.mark.parametrize("shape", ["star", "complete", "path", "random"])
def test_rounding_of_chebyshev_stays_below_its_bound(shape, lam, monkeypatch):
    """float32 against float64; equal terms at a hub round the same way, again and again."""
    n = 20_000 if shape in ("star", "path") else 400
    i = np.arange(1, n)
    ends = {"star": (0 * i, i), "path": (i - 1, i), "complete": np.triu_indices(n, 1)}
    g = random_graph(n, 5 * n) if shape == "random" else Graph.from_edges(np.stack(ends[shape]), n)
    rng, root = np.random.default_rng(0), np.sqrt(np.diff(g.indptr))
    B = np.stack([np.ones(n), root, rng.standard_normal(n), rng.random(n) < 0.01], 1)
    B = B.astype(np.float32)
    # A compiled backend sums the neighbours in runs, but not for narrow blocks, and works on other
    # variables when a graph is large.
    fast = get_backend("cpu")
    for backend, times, far in ((CPUBackend(), 1, 0), (fast, 1, 0), (fast, 5, 0), (fast, 5, 1)):
        if far:
            kernels = pytest.importorskip(
                "herta_gpu.backends.cpu.kernels.laplacian", reason="no numba"
            )
            monkeypatch.setattr(kernels, "FAR", 0)
        Z, block = {}, np.tile(B, (1, times))
        for dtype in ("float32", "float64"):
            H = RegularizedLaplacian(g, lam, backend, dtype)
            Z[dtype] = chebyshev(H, block.astype(dtype), chebyshev_degree(H, 1e-3))
        off = np.linalg.norm(Z["float32"] - Z["float64"], axis=0)
        off /= np.linalg.norm(Z["float64"], axis=0)
        assert (off <= chebyshev_rounding(H, "float32", block.shape[1])).all()
        degree = chebyshev_degree(H, 1e-3)
        assert (off <= chebyshev_rounding(H, "float32", block.shape[1], degree)).all()
        if shape == "star" and lam >= 1 and times == 1:
            # A bound that knows nothing of hubs would be wrong.
            assert off.max() > 10 * off[2]


def test_chebyshev_is_linear_and_keeps_its_proven_bound_in_both_norms():
    g = random_graph(150, 500)
    H = RegularizedLaplacian(g, 20.0, get_backend("cpu"), "float64")
    X = np.random.default_rng(0).standard_normal((150, 4))
    z = np.array([[1.0], [-2.0], [0.5], [3.0]])
    for eps in (0.3, 0.1, 1e-3):
        degree = chebyshev_degree(H, eps)
        assert chebyshev_error(H, degree) <= eps < chebyshev_error(H, degree - 1)
        Q = chebyshev(H, X, degree)
        np.testing.assert_allclose(chebyshev(H, X @ z, degree), Q @ z, atol=1e-12)
        exact = np.linalg.solve(dense_H(g, 20.0), X)
        plain = np.linalg.norm(Q - exact, axis=0) / np.linalg.norm(exact, axis=0)
        assert plain.max() <= eps
        assert h_norm_error(dense_H(g, 20.0), Q, X).max() <= eps


def test_a_good_guess_saves_iterations():
    g = random_graph(200, 800)
    H = RegularizedLaplacian(g, 20.0, get_backend("cpu"), "float64")
    B = np.random.default_rng(0).standard_normal((200, 2))
    Z, cold = block_cg(H, B, 1e-8)
    near, warm = block_cg(H, B, 1e-8, guess=Z + 1e-6)
    assert warm.status == "converged"
    assert warm.iterations.max() < cold.iterations.max() / 2
    assert h_norm_error(dense_H(g, 20.0), near, B).max() <= 1e-8


@pytest.mark.parametrize("order", [None, "rcm"])
def test_a_guess_for_the_solver_in_the_callers_order(order):
    g = random_graph(200, 800)
    g = g if order is None else g.reordered(order)
    B = np.random.default_rng(0).standard_normal((200, 3))
    exact = np.linalg.solve(dense_H(g, 20.0), B)
    solver = SDDSolver(g, 20.0, tol=1e-6)
    solver.solve(B)
    cold = solver.info_.iterations.max()
    Z = solver.solve(B, guess=exact + 1e-5)
    assert solver.info_.iterations.max() < cold / 2
    assert h_norm_error(dense_H(g, 20.0), Z, B).max() <= 1e-6
    assert solver.solve(B[:, 0], guess=exact[:, 0]).shape == (200,)
    assert solver.info_.iterations.max() == 0
    with pytest.raises(ValueError, match="guess has shape"):
        solver.solve(B, guess=exact[:, :2])
    with pytest.raises(ValueError, match='A guess is for method="cg"'):
        SDDSolver(g, method="chebyshev").solve(B, guess=exact)


def test_lam_changes_without_another_laplacian(monkeypatch):
    g = random_graph(100, 300)
    B = np.random.default_rng(0).standard_normal((100, 2))
    solver, made = SDDSolver(g, 20.0, tol=1e-8), []
    solver.solve(B)
    monkeypatch.setattr(type(solver.backend), "laplacian", lambda *args: made.append(args))
    for lam in (1.0, 300.0):
        solver.lam = lam
        assert h_norm_error(dense_H(g, lam), solver.solve(B), B).max() <= 1e-8
        assert solver.kappa <= 1 + 2 * lam
    assert not made
    with pytest.raises(ValueError, match="lam must be a positive number"):
        solver.lam = -1.0
    assert solver.lam == 300.0


@pytest.mark.parametrize("method", ["cg", "chebyshev"])
@pytest.mark.parametrize("size", [1.0, 1e-200])
def test_the_result_keeps_a_dtype_and_the_bound_knows_of_it(method, size):
    g = random_graph(100, 300)
    B = size * np.random.default_rng(0).standard_normal((100, 2))
    solver = SDDSolver(g, 20.0, method=method, tol=1e-10)
    Z = solver.solve(B, dtype="float64")
    assert Z.dtype == np.float64
    assert solver.info_.status == "converged"
    if size == 1.0:
        Z = solver.solve(B, dtype="float32")
        assert (Z.dtype, solver.info_.dtype, solver.info_.status) == ("f4", "float32", "stagnated")
        error = h_norm_error(dense_H(g, 20.0), Z, B)
        assert (error <= solver.info_.h_norm_bound * (1 + 1e-6)).all()
        assert solver.info_.h_norm_bound.max() < 1e-5
        rough = SDDSolver(g, 20.0, method=method, tol=1e-3)
        assert rough.solve(B, dtype="float64").dtype == np.float64
        assert rough.info_.status == "converged"
    with pytest.raises(ValueError, match="dtype"):
        solver.solve(B, dtype="float16")


@pytest.mark.parametrize("method", ["cg", "chebyshev"])
@pytest.mark.parametrize("size", [1e-30, 1e-42, 1e-150])
def test_the_bound_knows_what_float32_loses_of_very_small_numbers(method, size):
    g = random_graph(100, 300)
    B = np.random.default_rng(0).standard_normal((100, 2))
    solver = SDDSolver(g, 20.0, method=method, tol=1e-3)
    Z = solver.solve(size * B, dtype="float32").astype("float64")
    error = h_norm_error(dense_H(g, 20.0), Z / size, B)
    assert (error <= solver.info_.h_norm_bound * (1 + 1e-6)).all()
    assert (solver.info_.status == "converged") == (size == 1e-30)


def test_a_result_that_float32_cannot_hold_is_a_sentence():
    solver = SDDSolver(random_graph(100, 300), 20.0)
    with pytest.raises(ValueError, match="too large for float32"):
        solver.solve(np.full(100, 1e140), dtype="float32")


def test_a_guess_of_quite_another_size_is_no_worse_than_none():
    g = random_graph(100, 300)
    B = np.random.default_rng(0).standard_normal((100, 2))
    solver = SDDSolver(g, 20.0, tol=1e-6)
    Z = solver.solve(B, guess=B * [1e200, 1e3])
    assert solver.info_.status == "converged"
    assert (h_norm_error(dense_H(g, 20.0), Z, B) <= 1e-6).all()


def test_kappa_bounds_the_condition_number():
    g = random_graph(60, 150)
    values = np.linalg.eigvalsh(dense_H(g, 20.0))
    assert values[-1] / values[0] <= SDDSolver(g, 20.0).kappa <= 41


def test_the_energy_behind_the_stopping_test_is_a_lower_bound(monkeypatch):
    """What block CG stops by must not exceed ||H^-1 b||_H^2, or the true residual fails and a
    second cycle is needed."""
    rng = np.random.default_rng(0)
    graph = random_graph(300, 900, seed=0)
    B = rng.standard_normal((300, 8)).astype(np.float32)
    exact = np.linalg.solve(dense_H(graph, 20.0), B.astype(np.float64))
    truth = np.einsum("ij,ij->j", B, exact)
    started, scales = [], []
    backend = get_backend("cpu")
    original = type(backend).cg_start

    def cg_start(self, L, lam, R, *args):
        scales.append(np.linalg.norm(B, axis=0) / np.linalg.norm(R, axis=0))
        started.append(original(self, L, lam, R, *args))
        return started[-1]

    monkeypatch.setattr(type(backend), "cg_start", cg_start)
    solver = SDDSolver(graph, lam=20.0, tol=1e-5, device="cpu")
    solver.solve(B)
    assert solver.info_.status == "converged"
    np.testing.assert_array_less(started[0].energy * scales[0] ** 2, truth * (1 + 1e-5))
    assert len(started) == 1


# ---- matrices ------------------------------------------------------------------------------
def dominant_matrix(kind, seed=0, n=30):
    rng = np.random.default_rng(seed)
    if kind == "grid":  # the interior of a square: rows without anything left but at the rim
        path = sp.diags_array([-np.ones(5), 2 * np.ones(6), -np.ones(5)], offsets=[-1, 0, 1])
        return sp.csr_array(sp.kron(path, sp.eye_array(6)) + sp.kron(sp.eye_array(6), path))
    A = np.triu(rng.standard_normal((n, n)) * (rng.random((n, n)) < 0.1), 1)
    A *= 10.0 ** rng.uniform(-3, 3, (n, n))
    A = -abs(A + A.T) if kind == "negative" else A + A.T
    left = 10.0 ** rng.uniform(-3, 3, n)
    if kind == "one row":
        left[1:] = 0
        A[np.arange(n - 1), np.arange(1, n)] = A[np.arange(1, n), np.arange(n - 1)] = -1.0
    return sp.csr_array(A + np.diag(abs(A).sum(axis=1) + left))


@pytest.mark.parametrize("kind", ["negative", "any sign", "grid", "one row"])
@pytest.mark.parametrize("method", ["cg", "chebyshev"])
@pytest.mark.parametrize("tol", [1e-3, 1e-8])
def test_a_matrix_is_solved_with_in_its_own_norm(kind, method, tol):
    M = dominant_matrix(kind)
    B = np.random.default_rng(1).standard_normal((M.shape[0], 3))
    solver = SDDSolver(M, method=method, tol=tol)
    Z = solver.solve(B)
    error = h_norm_error(M.toarray(), Z, B)
    assert (error <= solver.info_.h_norm_bound + 1e-13).all()
    assert solver.info_.h_norm_bound.max() <= tol
    assert solver.info_.status == "converged"
    if method == "cg":
        solver.solve(B, guess=Z)
        assert solver.info_.iterations.max() == 0
    np.testing.assert_allclose(solver.solve(B[:, 0]), Z[:, 0], rtol=10 * tol, atol=10 * tol)
    assert solver.kappa >= 1


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), power=st.integers(-9, -1))
def test_the_bound_of_a_matrix_holds(seed, power):
    M = dominant_matrix("any sign", seed, n=2 + seed % 20)
    B = np.random.default_rng(seed).standard_normal((M.shape[0], 2))
    solver = SDDSolver(M, tol=10.0**power)
    error = h_norm_error(M.toarray(), solver.solve(sp.csr_array(B)), B)
    assert (error <= solver.info_.h_norm_bound + 1e-13).all()


@pytest.mark.parametrize(
    ("M", "more", "words"),
    [
        ([[2.0, 1.0], [0.0, 2.0]], {}, "symmetric"),
        ([[2.0, np.nan], [np.nan, 2.0]], {}, "finite"),
        ([[2.0, 1.0, 0.0]], {}, "square"),
        ([[1.0, -3.0], [-3.0, 5.0]], {}, "not diagonally dominant"),
        ([[-1.0, 0.0], [0.0, 2.0]], {}, "not diagonally dominant"),
        ([[1.0, -1.0], [-1.0, 1.0]], {}, "singular"),
        ([[2.0, -1.0], [-1.0, 2.0]], {"lam": 2.0}, "lam is for a graph"),
    ],
)
def test_matrices_that_cannot_be_solved_with_are_refused(M, more, words):
    with pytest.raises(ValueError, match=words):
        SDDSolver(sp.csr_array(np.array(M)), **more)


def test_what_a_matrix_is_multiplied_by_is_checked():
    solver = SDDSolver(dominant_matrix("negative"))
    for B, words in ((np.ones(7), "each of the 30 rows"), (np.full(30, np.nan), "NaN")):
        with pytest.raises(ValueError, match=words):
            solver.solve(B)
    with pytest.raises(ValueError, match="lam is for a graph"):
        solver.lam = 2.0
    with pytest.raises(ValueError, match="leave dtype out"):
        solver.solve(np.ones(30), dtype="float32")


def test_a_linear_operator_preconditions_scipys_cg():
    """(I + 5 L + a diagonal that varies) with H^-1 as its preconditioner; and M^-1 itself."""
    g = random_graph(200, 800, seed=1)
    H = sp.csr_array(sp.eye_array(200) + 5 * g.to_csr())
    A = H + sp.diags_array(np.random.default_rng(0).random(200))
    inverse = SDDSolver(g, 5.0, "chebyshev", tol=1e-3).aslinearoperator()
    b, counts = np.random.default_rng(1).standard_normal(200), []
    for M in (None, inverse):
        steps = []
        x, code = scipy.sparse.linalg.cg(A, b, rtol=1e-8, M=M, callback=steps.append)
        assert code == 0
        np.testing.assert_allclose(A @ x, b, atol=1e-6)
        counts.append(len(steps))
    assert counts[1] < 0.7 * counts[0]
    B = np.random.default_rng(2).standard_normal((200, 3))
    exact = SDDSolver(A, tol=1e-12).aslinearoperator()
    np.testing.assert_allclose(A @ (exact @ B), B, atol=1e-9)
    np.testing.assert_allclose(exact.rmatvec(b), exact.matvec(b))
