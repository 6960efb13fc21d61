"""What must hold of each primitive of a device, on the plain CPU backend's numbers.

`herta selftest` asks less of each (`herta_gpu.app.device_checks`, whose names are here, too).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from herta_gpu import Graph, SDDSolver
from herta_gpu.app.device_checks import (
    CPU,
    FITS,
    LAM,
    SEED,
    block,
    check_callers_stream,
    check_captured_steps,
    check_fit,
    check_reference,
    check_sampled_edges_end_to_end,
    check_X_in_pinned_memory,
    close,
    graph,
)

__all__ = [
    "CPU",
    "FITS",
    "LAM",
    "SEED",
    "block",
    "check_X_in_pinned_memory",
    "check_callers_stream",
    "check_captured_steps",
    "check_fit",
    "check_reference",
    "check_sampled_edges_end_to_end",
    "close",
    "graph",
]


# ---- primitives -------------------------------------------------------------------------------
Pair = tuple[list[Any], list[Any]]


def agree(backend: Any, run: Callable[[Any], Pair], dtype: str, factor: float = 1.0) -> None:
    """Run the same on the device and on the CPU; what it gives must be the same.

    `run` takes a backend and gives arrays that may differ by the rounding of `dtype`, and those
    that may differ by that of float64.
    """
    for kind, ours, theirs in zip((dtype, "float64"), run(backend), run(CPU), strict=True):
        for found, expected in zip(ours, theirs, strict=True):
            close(backend, found, np.asarray(expected, float), kind, factor)


def check_products(backend: Any, g: Graph, k: int, dtype: str) -> None:
    def run(b: Any) -> Pair:
        L = b.laplacian(g, dtype)
        X, Z, B = (b.asarray(block(L.n, k, dtype, seed)) for seed in range(3))
        dots = [b.column_dots(X, Z), b.column_dots(X, Z.astype("float64"))]
        H_X = b.apply_H(L, LAM, X)
        b.chebyshev_step(L, LAM, X, Z, B, 0.3, 0.2)
        return [H_X, Z], dots

    agree(backend, run, dtype)


def check_residual(backend: Any, g: Graph, k: int, dtype: str) -> None:
    """Chunks of it, onto B itself, and all of it with its dots.

    The scales of a float32 graph are float64 all the same.
    """

    def run(b: Any) -> Pair:
        L, Z = b.laplacian(g, dtype), b.asarray(block(g.num_nodes, k, dtype))
        B, unit = block(g.num_nodes, k, "float64", 1), 2.0 ** (np.arange(k) % 5)
        R = b.asarray(B.copy())
        for start, stop in pairwise(sorted({0, 1, L.n // 2, L.n})):  # each hub in its own chunk
            part = R[start:stop]
            assert b.residual_rows(L, LAM, Z, part, start, out=part) is part
        whole, dots = b.residual(L, LAM, Z, b.asarray(B), dtype, b.asarray(unit))
        return [whole], [R, 0.1 * dots]

    agree(backend, run, dtype)


def check_half(backend: Any, g: Graph, k: int) -> None:
    """Chebyshev with float16 neighbours, in blocks of the caller, which are used again."""

    def run(b: Any) -> Pair:
        L, B = b.laplacian(g, "float32"), b.asarray(block(g.num_nodes, k, "float32"))
        work = tuple(b.empty(B.shape, kind) for kind in ("float32", "float32", "uint16"))
        steps, found = [(0.3, 0.05)] * 3, []
        for _ in range(2):
            Z = b.chebyshev(L, LAM, B, 0.1, steps, work, half=True)
            assert b is CPU or Z is work[1]
            found.append(b.to_numpy(Z).copy())
        assert b.chebyshev(L, LAM, B[:, :0].copy(), 0.1, steps, half=True).size == 0
        return found, []

    # An iterate that is off by a rounding of float32 may be rounded to the next float16.
    agree(backend, run, "float32", factor=10)


def check_cg(backend: Any, g: Graph, k: int, dtype: str) -> None:
    """Four steps, in which some columns freeze, and the caller's energy stays as it was."""

    def run(b: Any) -> Pair:
        L, R, tol = b.laplacian(g, dtype), block(g.num_nodes, k, dtype), 0.1
        R[:, k // 2] = 0  # starts frozen
        energy = 0.7 * CPU.column_dots(R, R) / tol**2
        energy[::2] = 0  # the odd columns freeze soon, the even ones later
        given = b.asarray(energy.copy())
        state, active = b.cg_start(L, LAM, b.asarray(R), given, tol, 1e-3), []
        for _ in range(4):
            active.append(b.cg_active(state))
            b.cg_step(L, LAM, state)
        assert np.array_equal(b.to_numpy(given), energy)
        counts = [np.array(active), b.to_numpy(state.iterations)]
        return [getattr(state, name) for name in ("Z", "R", "P", "rho", "energy")], counts

    agree(backend, run, dtype, factor=10)


def check_sketches(backend: Any, g: Graph, k: int, dtype: str) -> None:
    def run(b: Any) -> Pair:
        found = []
        for one in (g.reordered("degree"), g):
            L = b.laplacian(one, dtype)
            found += [b.sketch_incidence(L, k, SEED), b.sketch_identity(L, k, SEED)]
        B_S, Pi_S = block(L.n, k, dtype), block(L.n, k, "float64", 1)  # the second was refined
        return [*found, b.edge_scores(L, b.asarray(B_S), b.asarray(Pi_S), LAM)], []

    agree(backend, run, dtype)


def check_sampling(backend: Any, g: Graph) -> None:
    """The same scores and seed give the same edges, and the same L_tilde."""
    m = g.num_edges
    scores, X = np.random.default_rng(3).random(m) ** 8, block(g.num_nodes, 3, "float64")

    def run(b: Any) -> Pair:
        found = []
        for replace, s in ((True, m + 3), (False, m // 2)):
            nothing = b.zeros((0,), "float64")
            factors = b.sample_edges(b.asarray(scores), s, SEED, replace) if m else nothing
            there = b.sampled_graph(g, factors)
            L = b.laplacian(there, "float64")
            weights = there.weights if b is CPU else L.weights
            found += [factors, b.to_numpy(factors) > 0, there.indptr, there.indices, weights]
            found += [L.diagonal, np.array([L.lambda_max]), b.apply_H(L, LAM, b.asarray(X))]
        return [], found

    agree(backend, run, "float64")


def check_srht(backend: Any, n: int, k: int, dtype: str) -> None:
    def run(b: Any) -> Pair:
        Q = b.asarray(block(n, k, dtype))
        return [b.srht(Q, s, SEED) for s in sorted({1, max(1, n // 2), n})], []

    agree(backend, run, dtype)


def check_dense(backend: Any) -> None:
    """Factorisations, where they exist and where they do not."""
    A = block(40, 12, "float64")

    def run(b: Any) -> Pair:
        C, A_T = b.cholesky(b.asarray(A.T @ A)), b.asarray(np.ascontiguousarray(A.T))
        return [], [b.solve_triangular(C, A_T, trans) for trans in (False, True)]

    agree(backend, run, "float64", 100)
    A[:, 7] = A[:, 2] - A[:, 3]
    P = A.T @ A
    P[7, 7] -= 1e-9  # not positive definite for sure
    assert backend.cholesky(backend.asarray(P)) is None
    L, J = (backend.to_numpy(x) for x in backend.pivoted_cholesky(backend.asarray(P), 1e-6))
    assert L.shape == (11, 11)
    np.testing.assert_allclose(L @ L.T, P[np.ix_(J, J)], atol=1e-10)
    F = backend.asarray(np.asfortranarray(A))
    assert F.flags.c_contiguous
    assert backend.asarray(F.T).flags.c_contiguous


def check_kernels(backend: Any) -> None:
    """Every primitive that a backend has of its own, on any device."""
    for name, weighted, k, dtype in (
        *[("tail", True, 3, "float32"), ("hub", False, 8, "float32")],
        *[("one", False, 1, "float64"), ("hub", True, 2, "float64")],
    ):
        for check in (check_products, check_residual, check_cg, check_sketches):
            check(backend, graph(name, weighted), k, dtype)
    check_half(backend, graph("hub", True), 6)
    check_sampling(backend, graph("hub", True))
    check_srht(backend, 600, 3, "float32")
    check_dense(backend)


def check_edges_on_the_device(backend: Any, weighted: bool) -> None:
    """Merged there: the same graph."""
    expected = graph("fit", weighted)  # without self-loops, which `edges` leaves out
    u, v, w = expected.edges()
    edges = backend.asarray(np.stack([u, v]))
    g = Graph.from_edges(edges, 60, None if w is None else backend.asarray(w))
    L = backend.laplacian_csr(backend.laplacian(g, "float64"))
    np.testing.assert_allclose(L.get().toarray(), expected.to_csr().toarray(), atol=1e-14)
    assert g.num_components == expected.num_components


def check_tensors_of_torch(backend: Any) -> str | None:
    """A tensor goes in and comes out; or why there is none to try."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "this torch has no CUDA"
    X, solver = block(33, 3, "float32"), SDDSolver(graph("tail"), lam=3.0, device="cuda")
    Z = solver.solve(torch.from_numpy(X).cuda())
    assert Z.is_cuda
    np.testing.assert_array_equal(Z.cpu().numpy(), solver.solve(X))
    return None
