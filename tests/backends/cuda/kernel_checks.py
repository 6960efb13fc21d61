"""What every kernel must do, run by the emulator against the CPU backend: one check per primitive.

`run_checks` is also what runs under the sanitizers and on mutants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from herta_gpu.backends.base import keep_probabilities
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.graph import Graph
from tests.cuda_emulator import Module, kernel_text, load
from tests.cuda_emulator.launches import Emulated

CPU = CPUBackend()
LAM, SEED = 20.0, 0x9E3779B97F4A7C15
SIZES = ("1", "31", "32", "33", "hub")
WIDTHS = (1, 3, 8, 40, 128)
DTYPES = ("float32", "float64")
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


@cache
def graph(size: str, weighted: bool) -> Graph:
    """Random edges and empty rows; "hub": two rows far longer than a segment of 64."""
    rng = np.random.default_rng(5)
    n = 200 if size == "hub" else int(size)
    edges = rng.integers(0, max(1, n - 3), (2, 3 * n))  # the last three nodes stay alone
    if size == "hub":
        spokes = np.arange(n - 5)
        hubs = [np.stack([np.full_like(spokes, h), spokes]) for h in (0, 150)]
        edges = np.concatenate([edges, *hubs], axis=1)
    edges = np.unique(np.sort(edges, axis=0), axis=1)
    return Graph.from_edges(edges, n, 0.1 + rng.random(edges.shape[1]) if weighted else None)


@cache
def laplacian(size: str, weighted: bool, dtype: str, wide: bool = False) -> Any:
    L = CPU.laplacian(graph(size, weighted), dtype)
    return replace(L, indices=L.indices.astype(np.int64)) if wide else L


def block(n: int, k: int, dtype: str, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(dtype)


def assert_close(found: Any, expected: Any, dtype: str, factor: float = 1.0) -> None:
    assert found.shape == expected.shape
    error = np.abs(np.asarray(found, float) - expected)
    bound = factor * TOLERANCE[dtype] * max(1.0, np.abs(expected).max(initial=0))
    assert (error <= bound).all(), f"off by {np.nanmax(error, initial=0):.3g}, allowed {bound:.3g}"


def snippet(text: str) -> Module:
    common = kernel_text("cg.cu").split('#line 1 "cg.cu"')[0]
    return load("snippet", text=f"{common}\n{text}")


# ---- one per primitive


def check_apply_H(run: Emulated, L: Any, k: int, dtype: str) -> None:
    X = block(L.n, k, dtype)
    expected = CPU.apply_H(L, LAM, X)
    Y, dots = run.apply_H(L, LAM, X, dots=True)
    assert_close(Y, expected, dtype)
    assert_close(dots, CPU.column_dots(X, expected), dtype)
    assert_close(run.apply_H(L, LAM, X), expected, dtype)


def check_chebyshev(run: Emulated, L: Any, k: int, dtype: str) -> None:
    Z, before, B = (block(L.n, k, dtype, seed) for seed in range(3))
    expected, found = before.copy(), before.copy()
    CPU.chebyshev_step(L, LAM, Z, expected, B, 0.3, 0.2)
    run.chebyshev_step(L, LAM, Z, found, B, 0.3, 0.2)
    assert_close(found, expected, dtype)


def check_half(run: Emulated, L: Any, k: int, dtype: str) -> None:
    """The bits of float16 are NumPy's; a step from them is that of the reference."""
    if dtype != "float32":
        return
    Z, before, B = (block(L.n, k, dtype, seed) for seed in range(3))
    for X in (Z, before, B):
        X[:, ::3] *= 1e30  # columns of other units
    Z[L.n // 2 :: 7] *= 100.0  # too large for float16
    Z[L.n // 3 :: 7] *= 2.0**-30  # below its smallest normal number
    expected, found, theirs = before.copy(), before.copy(), CPU.halves(L, B)
    ours = replace(theirs, G=np.zeros_like(theirs.G))
    CPU.chebyshev_step(L, LAM, Z, expected, B, 0.3, 0.2, theirs)
    run.chebyshev_half(L, LAM, Z, found, B, 0.3, 0.2, ours)
    assert np.array_equal(ours.G, theirs.G)
    assert_close(found * theirs.up, expected * theirs.up, dtype)


def check_residual(run: Emulated, L: Any, k: int, dtype: str) -> None:
    """In chunks, the last one short: the same bits as at once."""
    Z, B = block(L.n, k, dtype), block(L.n, k, "float64", 1)
    rows = max(1, L.n // 3)
    parts = [run.residual_rows(L, LAM, Z, B[a : a + rows], a) for a in range(0, L.n, rows)]
    found = np.concatenate(parts)
    assert_close(found, CPU.residual_rows(L, LAM, Z, B, 0), "float64")
    assert found.tobytes() == run.residual_rows(L, LAM, Z, B, 0).tobytes()


def check_residual_with_dots(run: Emulated, L: Any, k: int, dtype: str) -> None:
    """Of any precision in and out, in units of its own; the dots are those of float64."""
    unit = 2.0 ** np.arange(-k // 2, k - k // 2)[:k]
    for kind, out in product(DTYPES, DTYPES):
        Z, B = block(L.n, k, dtype), block(L.n, k, kind, 1)
        R, dots = run.residual(L, LAM, Z, B, out, unit)
        expected, theirs = CPU.residual(L, LAM, Z, B, "float64", np.ones(k))
        assert_close(R.astype("float64") * unit, expected, out)
        assert_close(dots, theirs, "float64", factor=10)
        if out == "float64":
            shown = np.stack([(expected**2).sum(0), ((B + expected) * Z).sum(0)])
            assert_close(dots, shown, "float64", factor=10)


def check_cg(run: Emulated, L: Any, k: int, dtype: str) -> None:
    R, tol = block(L.n, k, dtype), 0.1
    R[:, k // 2] = 0  # starts frozen
    energy = 0.7 * CPU.column_dots(R, R) / tol**2
    energy[::2] = 0  # the odd columns freeze soon, the even ones later
    expected, found = (CPU.cg_start(L, LAM, R.copy(), energy.copy(), tol, 1e-3) for _ in range(2))
    for _ in range(4):
        CPU.cg_step(L, LAM, expected)
        run.cg_step(L, LAM, found)
    for name in ("active", "iterations"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    for name in ("Z", "R", "P", "rho", "energy"):
        assert_close(getattr(found, name), getattr(expected, name), dtype, factor=10)


def check_cg_of_ranks(run: Emulated, L: Any, k: int, dtype: str) -> None:
    """Alone, the bits of the fused launch; on three ranks with the same rows, three times the sums.

    The steps of CG are then the same: alpha and beta are quotients of such sums.
    """
    R, tol = block(L.n, k, dtype), 0.1
    R[:, k // 2] = 0  # starts frozen
    for ranks in (1, 3):
        energy = np.zeros(k)
        fused, cut = (CPU.cg_start(L, LAM, R.copy(), energy.copy(), tol, 1e-3) for _ in range(2))
        cut.rho, cut.floor = ranks * cut.rho, ranks * cut.floor

        def of_all(x: Any, ranks: int = ranks) -> Any:
            return np.tile(x, (ranks, 1))

        for _ in range(4):
            run.cg_step(L, LAM, fused)
            run.cg_step_of_ranks(L, LAM, cut, of_all, of_all)
        for name in ("active", "iterations"):
            assert np.array_equal(getattr(cut, name), getattr(fused, name)), name
        for name in ("Z", "R", "P"):
            found, expected = getattr(cut, name), getattr(fused, name)
            assert ranks > 1 or found.tobytes() == expected.tobytes(), name
            assert_close(found, expected, dtype, factor=10)
        assert_close(
            cut.rho, ranks * fused.rho, "float64", factor=1e9 if dtype == "float32" else 10
        )


def check_packed_rows(run: Emulated, L: Any, k: int, dtype: str) -> None:
    X = block(L.n, k, dtype)
    rows = np.random.default_rng(k).integers(0, L.n, 2 * L.n + 1).astype(np.int32)
    assert run.pack_rows(X, rows).tobytes() == X[rows].tobytes()


def check_column_dots(run: Emulated, L: Any, k: int, dtype: str) -> None:
    X, Y = block(L.n, k, dtype), block(L.n, k, dtype, 1)
    assert_close(run.column_dots(X, Y), CPU.column_dots(X, Y), "float64")


def check_sketches(run: Emulated, L: Any, k: int, dtype: str) -> None:
    expected = CPU.sketch_incidence(L, k, SEED)
    assert_close(run.sketch_incidence(L, k, SEED), expected, dtype)
    assert_close(run.sketch_identity(L, k, SEED), CPU.sketch_identity(L, k, SEED), dtype)
    named = replace(L, order=np.random.default_rng(0).permutation(L.n))  # by the caller
    expected = CPU.sketch_incidence(named, k, SEED)
    assert_close(run.sketch_incidence(named, k, SEED), expected, dtype)
    assert_close(run.sketch_identity(named, k, SEED), CPU.sketch_identity(named, k, SEED), dtype)


def check_scores(run: Emulated, L: Any, k: int, dtype: str) -> None:
    B_S, Pi_S = block(L.n, k, dtype), block(L.n, k, dtype, 1)
    expected = CPU.edge_scores(L, B_S, Pi_S, LAM)
    if expected.size:
        assert_close(run.edge_scores(L, B_S, Pi_S, LAM), expected, dtype)


def check_sampling(run: Emulated, L: Any, k: int, dtype: str) -> None:
    m = L.nnz // 2
    if m == 0:
        return
    scores = np.random.default_rng(3).random(m) ** 8
    exponent = 61 - int(np.ceil(np.log2(max(m, 2)))) - int(np.ceil(np.log2(scores.max())))
    drawn = CPU.sample_edges(scores, m + k, SEED, replace=True)
    assert np.array_equal(run.with_replacement(scores, m + k, SEED, exponent), drawn)
    kept = CPU.sample_edges(scores, m // 2, SEED, replace=False)
    assert np.array_equal(run.bernoulli(keep_probabilities(np, scores, m // 2), SEED), kept)


def check_scan(run: Emulated, L: Any, k: int, dtype: str) -> None:
    totals = np.random.default_rng(k).integers(0, 1 << 38, 5000)  # three turns of the one block
    expected = np.cumsum(totals) - totals
    run.launch("sampling.cu", "scan_totals", (1,), (256,), np.int64(5000), totals)
    assert np.array_equal(totals, expected)


def check_sampled_graph(run: Emulated, L: Any, k: int, dtype: str) -> None:
    m = L.nnz // 2
    factors = np.random.default_rng(k).integers(0, 3, m) / 3.0
    A = Graph(L.indptr, L.indices, L.weights, L.inv_sqrt_degree**-2.0)
    expected = A.with_edges(factors > 0, factors)
    indptr, indices, weights, sums = run.sampled_graph(L, factors)
    assert np.array_equal(indptr, expected.indptr)
    assert np.array_equal(indices, expected.indices)
    assert_close(weights, expected.weights, dtype)
    assert_close(sums, expected.loopless_degree, dtype)


def check_pair_bounds(run: Emulated, L: Any, k: int, dtype: str) -> None:
    """Against the dense matrix, where most ends of the largest pair lie beyond the first 32."""
    ratio = np.random.default_rng(k).random(L.n) + 0.1
    A = np.zeros((L.n, L.n), bool)
    A[np.repeat(np.arange(L.n), np.diff(L.indptr)), L.indices] = True
    expected = np.where(A, ratio[:, None] + ratio, 0.0).max(axis=1)
    assert np.array_equal(run.pair_bounds(L, ratio), expected)


def check_srht(run: Emulated, L: Any, k: int, dtype: str) -> None:
    Q = block(L.n, k, dtype)
    for s in {1, max(1, L.n // 2), L.n}:
        assert_close(run.srht(Q, s, SEED), CPU.srht(Q, s, SEED), dtype)


CHECKS: dict[str, list[Callable[[Emulated, Any, int, str], None]]] = {
    "laplacian.cu": [
        check_apply_H,
        check_chebyshev,
        check_residual,
        check_residual_with_dots,
        check_half,
    ],
    "cg.cu": [check_cg, check_cg_of_ranks, check_column_dots],
    "ranks.cu": [check_packed_rows],
    "sketch.cu": [check_sketches],
    "sampling.cu": [
        check_scores,
        check_sampling,
        check_scan,
        check_sampled_graph,
        check_pair_bounds,
    ],
    "hadamard.cu": [check_srht],
}
EVERY = [check for checks in CHECKS.values() for check in checks]


def run_checks(variant: str, modules: dict[str, Module] | None = None, only: str = "") -> None:
    """Every check (of one file) on few sizes: what runs under a sanitizer and on a mutant."""
    for size, weighted, dtype, k in [
        *[("33", False, "float32", 8), ("hub", True, "float32", 3)],
        *[("1", False, "float64", 1), ("hub", False, "float64", 16)],
    ]:
        L = laplacian(size, weighted, dtype, wide=k == 3)
        for file, checks in CHECKS.items():
            for check in checks if only in ("", file) else []:
                check(Emulated(variant, "random", 64, 3, modules), L, k, dtype)
    for n in (500, 600) if only in ("", "hadamard.cu") else ():  # one full tile; two passes
        Q = block(n, 3, "float32")
        found = Emulated(variant, modules=modules).srht(Q, 70, SEED)
        assert_close(found, CPU.srht(Q, 70, SEED), "float32")
