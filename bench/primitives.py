"""How fast is each primitive against its peers, on the same data in the same run?

    HERTA_DATA=... python bench/primitives.py [--quick]

Peers that are not installed are left out.  `sparse_dot_mkl` finds MKL through MKL_RT.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as spla
from common import QUICK, Data, Results, race, record

from herta_gpu import Graph, SDDSolver
from herta_gpu.backends import get_backend
from herta_gpu.backends.cpu.compiled import aligned_empty
from herta_gpu.backends.cpu.reference import CPUBackend

LAM, TOL = 20.0, 1e-5
FAST, PLAIN = get_backend("cpu"), CPUBackend()


def matrix(graph: Graph, lam: float) -> Any:
    """H as SciPy's CSR, float32 with 32-bit indices, in the order in which the graph is stored."""
    s = sp.diags_array(1.0 / np.sqrt(graph.degree))
    ones = np.ones(graph.indices.shape[0])
    A = sp.csr_array((ones, graph.indices, graph.indptr), shape=(graph.num_nodes,) * 2)
    L = s @ (sp.diags_array(graph.loopless_degree) - A) @ s
    H = sp.csr_array(sp.eye_array(graph.num_nodes) + lam * L).astype(np.float32)
    H.indices, H.indptr = H.indices.astype(np.int32), H.indptr.astype(np.int32)
    return H


def normal(n: int, k: int, dtype: str = "float32") -> Any:
    out = aligned_empty((n, k), dtype)
    out[...] = np.random.default_rng(k).standard_normal((n, k))
    return out


def spmm_peers(H: Any, X: Any) -> dict[str, Callable[[], Any]]:
    """Everybody allocates its result, as its users do; MKL also writes into a given one."""
    peers: dict[str, Callable[[], Any]] = {"scipy": lambda: H @ X}
    try:
        import sparse_dot_mkl

        out = np.zeros_like(X)
        peers["mkl"] = lambda: sparse_dot_mkl.dot_product_mkl(H, X)
        peers["mkl (out)"] = lambda: sparse_dot_mkl.dot_product_mkl(H, X, out=out)
    except ImportError:
        pass
    try:
        import torch

        warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
        parts = (torch.from_numpy(a) for a in (H.indptr, H.indices, H.data))
        Ht, Xt = torch.sparse_csr_tensor(*parts, size=H.shape), torch.from_numpy(X)
        peers["torch"] = lambda: Ht @ Xt
    except ImportError:
        pass
    return peers


def bench_apply(results: Results, graph: Graph, order: str) -> None:
    H = matrix(graph, LAM)
    L, plain = FAST.laplacian(graph, "float32"), PLAIN.laplacian(graph, "float32")
    for k in (1, 8, 40, 64) if QUICK else (1, 8, 40, 64, 100, 128):
        X = normal(graph.num_nodes, k)
        out = aligned_empty(X.shape, "float32")
        runners = {
            "herta": lambda X=X: FAST.apply_H(L, LAM, X),
            "herta (out)": lambda X=X, out=out: FAST.apply_H(L, LAM, X, out=out),
            "plain": lambda X=X: PLAIN.apply_H(plain, LAM, X),
            **spmm_peers(H, X),
        }
        want = H.astype(np.float64) @ X
        error = float(np.abs(FAST.apply_H(L, LAM, X) - want).max() / np.abs(want).max())
        found = race(runners, 5 if QUICK else 21, 30)
        # What must move at least: indices, scales, X in, Y out.
        least = 4 * L.nnz + 8 * L.n + 2 * X.nbytes
        record(results, "apply_H", found, "herta", graph=order, k=k, error=error, bytes=least)


def cg_by_residual(L: Any, B: Any) -> Any:
    """Block CG until ||r|| <= TOL ||b|| in every column: the stopping rule of the peers."""
    R = aligned_empty(B.shape, B.dtype)
    R[...] = B
    state = FAST.cg_start(L, LAM, R, np.zeros(B.shape[1]), 0.0, TOL)
    while FAST.cg_active(state):
        FAST.cg_step(L, LAM, state)
    return state.Z


def bench_cg(results: Results, graph: Graph, name: str, k: int = 64) -> None:
    H, L = matrix(graph, LAM), FAST.laplacian(graph, "float32")
    B = normal(graph.num_nodes, k)
    columns = range(0, k, 16) if QUICK else range(0, k, 4)
    share = k / len(columns)  # peers take a part of the columns: their cost is linear in them
    solver = SDDSolver(graph, LAM, tol=TOL)

    def scipy_cg() -> None:
        for j in columns:
            spla.cg(H, B[:, j].copy(), rtol=TOL)

    runners: dict[str, Callable[[], Any]] = {
        "herta": lambda: cg_by_residual(L, B),
        "herta (H-norm bound)": lambda: solver.solve(B),
        "scipy.cg": scipy_cg,
    }
    setup = add_amg(runners, H, B, columns)
    add_cholmod(runners, H, B)
    found = race(runners, 3 if QUICK else 5, 240)
    for runner, row in found.items():
        if runner in ("scipy.cg", "pyamg PCG"):
            for key in ("seconds", "low", "high", "cpu_seconds"):
                row[key] *= share
    record(results, "block CG", found, "herta", graph=name, k=k, lam=LAM, tol=TOL,
           amg_setup=setup)  # fmt: skip


def add_amg(runners: dict[str, Callable[[], Any]], H: Any, B: Any, columns: Any) -> float | None:
    """Smoothed aggregation as a preconditioner of CG; its set-up is reported, not counted."""
    try:
        import pyamg
    except ImportError:
        return None
    started = time.perf_counter()
    H64 = sp.csr_matrix(H.astype(np.float64))
    H64.indices, H64.indptr = H64.indices.astype(np.int32), H64.indptr.astype(np.int32)
    # Plain aggregation and few levels: smoothed ones fill up on power-law graphs.
    levels = pyamg.smoothed_aggregation_solver(H64, smooth=None, max_levels=3, max_coarse=2000)
    setup = time.perf_counter() - started

    def pcg() -> None:
        for j in columns:
            levels.solve(B[:, j].astype(np.float64), tol=TOL, accel="cg", maxiter=200)

    runners["pyamg PCG"] = pcg
    return setup


def add_cholmod(runners: dict[str, Callable[[], Any]], H: Any, B: Any) -> None:
    """A sparse factor of H, where it fits: that of a large social graph is nearly dense."""
    try:
        from sksparse.cholmod import cholesky
    except ImportError:
        return
    if H.shape[0] > 50_000:
        return
    H64, B64 = sp.csc_matrix(H.astype(np.float64)), B.astype(np.float64)
    factor = cholesky(H64)
    runners["CHOLMOD, factor and solve"] = lambda: cholesky(H64)(B64)
    runners["CHOLMOD, factor given"] = lambda: factor(B64)


def bench_algorithm2(results: Results, graph: Graph, k: int = 20) -> None:
    L, plain = FAST.laplacian(graph, "float32"), PLAIN.laplacian(graph, "float32")
    S, T = normal(graph.num_nodes, k), normal(graph.num_nodes, k)
    scores = np.random.default_rng(0).random(graph.num_edges) ** 4
    s = graph.num_edges // 2
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "sketch": (lambda: FAST.sketch_incidence(L, k, 1),
                   lambda: PLAIN.sketch_incidence(plain, k, 1)),
        "scores": (lambda: FAST.edge_scores(L, S, T, LAM),
                   lambda: PLAIN.edge_scores(plain, S, T, LAM)),
        "sample with replacement": (lambda: FAST.sample_edges(scores, s, 1, True),
                                    lambda: PLAIN.sample_edges(scores, s, 1, True)),
        "sample, Bernoulli": (lambda: FAST.sample_edges(scores, s, 1, False),
                              lambda: PLAIN.sample_edges(scores, s, 1, False)),
    }  # fmt: skip
    for what, (ours, numpy) in pairs.items():
        found = race({"herta": ours, "numpy": numpy}, 3 if QUICK else 7, 30)
        record(results, what, found, "herta", graph="ogbn-arxiv", k=k)


def bench_residual(results: Results, graph: Graph, name: str, rows: int = 1 << 16) -> None:
    """All rows of B - H Z in float64, chunk by chunk, against one Chebyshev step in float32."""
    L, n = FAST.laplacian(graph, "float32"), graph.num_nodes
    for k in (4, 32, 64):
        Z, Z_prev, B, chunk = (normal(n, k), normal(n, k), normal(n, k), normal(rows, k, "float64"))

        def residual(Z=Z, chunk=chunk) -> None:
            for start in range(0, n, rows):
                part = chunk[: n - start]
                FAST.residual_rows(L, LAM, Z, part, start, out=part)

        def step(Z=Z, Z_prev=Z_prev, B=B) -> None:
            FAST.chebyshev_step(L, LAM, Z, Z_prev, B, 0.3, 0.01)

        found = race({"herta": residual, "one Chebyshev step": step}, 5 if QUICK else 21, 30)
        record(results, "residual in float64", found, "herta", graph=name, k=k)


def random_order(n: int, degree: int = 30) -> Graph:
    """Neighbours anywhere: the worst that a product can meet, and quick to make."""
    indptr = np.arange(n + 1, dtype=np.int64) * degree
    indices = np.random.default_rng(0).integers(0, n, n * degree, dtype=np.int32)
    return Graph(indptr, indices, None, np.full(n, degree + 1.0))


def bench_half(results: Results, graph: Graph, name: str) -> None:
    """A pass of eight Chebyshev steps, neighbours in float16 against float32."""
    L, n, steps = FAST.laplacian(graph, "float32"), graph.num_nodes, [(0.3, 0.01)] * 7
    for k in (16, 32, 64):
        B = normal(n, k)
        kinds = ("float32", "float32", "uint16")
        work = tuple(aligned_empty(B.shape, kind) for kind in kinds)
        runners = {
            "herta": lambda B=B, work=work: FAST.chebyshev(L, LAM, B, 0.1, steps, work, half=True),
            "float32": lambda B=B, work=work: FAST.chebyshev(L, LAM, B, 0.1, steps, work),
        }
        found = race(runners, 3 if QUICK else 7, 60)
        record(results, "neighbours in float16", found, "herta", graph=name, k=k)


def bench_stream(results: Results) -> None:
    """The bandwidth that one thread gets: 16 bytes of every double that is copied."""
    a, b = np.zeros(1 << 25), np.zeros(1 << 25)
    found = race({"copy": lambda: np.copyto(a, b)}, 11)
    row = found["copy"]
    results.add(
        what="stream",
        runner="copy",
        gigabytes_per_second=2 * a.nbytes / row["seconds"] / 1e9,
        **row,
    )


def main() -> None:
    results = Results("primitives")
    graph = Data("ogbn-arxiv").graph
    bench_stream(results)
    bench_apply(results, graph, "ogbn-arxiv")
    started = time.perf_counter()
    reordered = graph.reordered()
    results.add(what="reverse Cuthill-McKee", runner="herta", seconds=time.perf_counter() - started)
    bench_apply(results, reordered, "ogbn-arxiv, reordered")
    bench_residual(results, graph, "ogbn-arxiv")
    bench_residual(results, reordered, "ogbn-arxiv, reordered")
    bench_half(results, graph, "ogbn-arxiv")
    bench_half(results, reordered, "ogbn-arxiv, reordered")
    n = 300_000 if QUICK else 3_000_000
    bench_half(results, random_order(n), f"random order, {n:.0e} nodes, {30 * n:.0e} non-zeros")
    bench_algorithm2(results, graph)
    bench_cg(results, graph, "ogbn-arxiv")
    bench_cg(results, Data("pubmed").graph, "pubmed")


if __name__ == "__main__":
    main()
