"""What must hold of a device: `herta selftest` and the tests of the CUDA backend ask the same.

Every check compares with the plain CPU backend for the same seed, and raises an AssertionError
where they differ.  The tests run them on a GPU where there is one, else on an emulated device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import scipy.sparse as sp

import herta_gpu.features
from herta_gpu import HERTA, Graph, SDDSolver, Sparsifier
from herta_gpu.backends.cpu.reference import CPUBackend

CPU = CPUBackend()
LAM, SEED = 20.0, 0x9E3779B97F4A7C15
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
# (relative to the largest output, to the largest weight)
FIT_TOLERANCE = {"float32": (1e-4, 5e-4), "float64": (1e-10, 1e-10)}
GPU_FIRST = ("cuda", "cpu")  # the devices that a fit is compared on


@cache
def graph(name: str, weighted: bool = False) -> Graph:
    """ "hub": two rows longer than a segment of 512; "tail": 33 nodes, some alone; or "one"."""
    if name == "fit":
        return random_graph(60, 200, weighted=weighted)
    n, edges = 1, np.zeros((2, 0), int)
    if name == "tail":
        edges = np.sort(np.random.default_rng(1).integers(0, 30, (2, 90)), axis=0)
        n, edges = 33, np.unique(edges, axis=1)
    elif name == "hub":
        u, v = np.divmod(np.arange(1, 1202), 601)  # all others from node 0, then from node 1
        n, edges = 605, np.stack([u, v])[:, v > u]
    weight = 0.1 + np.random.default_rng(0).random(edges.shape[1])
    return Graph.from_edges(edges, n, weight if weighted else None)


def random_graph(n: int, m: int, seed: int = 0, weighted: bool = False) -> Graph:
    """m distinct random edges, each in a random direction."""
    rng = np.random.default_rng(seed)
    edges = np.stack(np.triu_indices(n, 1))
    edges = edges[:, rng.choice(edges.shape[1], size=min(m, edges.shape[1]), replace=False)]
    edges = np.where(rng.random(edges.shape[1]) < 0.5, edges, edges[::-1])
    return Graph.from_edges(edges, n, rng.uniform(0.1, 3, edges.shape[1]) if weighted else None)


def block(n: int, k: int, dtype: str, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(dtype)


def close(backend: Any, found: Any, expected: Any, dtype: str, factor: float = 1.0) -> None:
    found = np.asarray(backend.to_numpy(found), float)
    assert found.shape == expected.shape
    bound = factor * TOLERANCE[dtype] * max(1.0, np.abs(expected).max(initial=0))
    error = np.abs(found - expected).max(initial=0)
    assert error <= bound, f"off by {error:.3g}, allowed {bound:.3g}"  # NaN fails as well


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


def check_reference(backend: Any, g: Graph, dtype: str) -> None:
    """The kernel against CuPy's own product with the CSR matrix of the same Laplacian."""
    L, X = backend.laplacian(g, dtype), backend.asarray(block(g.num_nodes, 5, dtype))
    expected = X + LAM * (backend.laplacian_csr(L) @ X)
    close(backend, backend.apply_H(L, LAM, X), backend.to_numpy(expected), dtype)
    made_here = backend.sampled_graph(g, backend.xp.ones(g.num_edges))  # all edges, on the device
    for M, expected in ((made_here.to_csr(), g.to_csr()), (backend.csr(g.to_csr()), g.to_csr())):
        assert type(M).__module__.partition(".")[0] != "scipy"
        assert M.shape == expected.shape
        np.testing.assert_allclose(M.get().toarray(), expected.toarray(), atol=1e-14)


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


# ---- fits -------------------------------------------------------------------------------------
def _inputs(kind: str) -> tuple[Graph, Any, Any]:
    rng = np.random.default_rng(0)
    g = graph("hub" if "hub" in kind else "fit", weighted="weighted" in kind)
    g = g.reordered("degree") if "reordered" in kind else g
    X: Any = rng.standard_normal((g.num_nodes, 6))
    if "dependent" in kind:
        X = np.hstack([X, X[:, :2] - X[:, 2:4]])
    if "sparse" in kind:
        X = sp.random_array((g.num_nodes, 20), density=0.3, rng=rng, format="csr")
    if "wide" in kind:
        X = rng.standard_normal((g.num_nodes, 50))
    return g, X, rng.integers(0, 3, g.num_nodes)


_ROUGH = {"sketch": 16, "max_iter": 5}  # of MSE: with the exact P nothing is left to optimise
_WEIGHTED = {"class_weight": "balanced", "fit_intercept": True}
FITS: dict[str, tuple[str, dict[str, Any]]] = {  # kind of data, parameters
    "mse cg herta": ("plain", {**_ROUGH, "strategy": "herta"}),
    "mse gd direct": ("plain", {**_ROUGH, "optimizer": "gd", "strategy": "direct"}),
    "ce lbfgs direct": ("plain", {"loss": "ce", "optimizer": "lbfgs", "ridge": 0.1}),
    "Algorithms 1 and 2 as printed": ("plain", {"sparsify": True, "sketch": True}),
    "mixed": ("weighted", {"sparsify": "mixed", "tol": 0.3}),
    "hubs": ("hub", {"strategy": "herta"}),
    "sparse X, reordered graph": ("sparse reordered", {"strategy": "herta", "ridge": 0.1}),
    "fewer rows than columns": ("wide", {"ridge": 0.1}),
    "weights and an intercept": ("plain", {**_WEIGHTED, "strategy": "herta"}),
    "several lam": ("plain", {"lam": [0, 1, 5], "ridge": 0.1, "fit_intercept": True}),
}


def check_fit(
    name: str,
    dtype: str,
    devices: tuple[str, str] = GPU_FIRST,
    fits: Mapping[str, tuple[str, dict[str, Any]]] = FITS,
) -> HERTA:
    """The fit on the first device is that of the second."""
    kind, options = fits[name]
    g, X, y = _inputs(kind)
    how = {"lam": 5.0, **options, "dtype": dtype, "random_state": 1}
    ours, theirs = (
        HERTA(**how, device=device).fit(g, X, y, np.arange(0, g.num_nodes, 2)) for device in devices
    )
    of_Z, of_W = FIT_TOLERANCE[dtype]
    if name.endswith("no ridge"):  # a damping of 1e-8 in P lifts the rounding of W by as much
        of_Z, of_W = max(of_Z, 1e-7), max(of_W, 1e-7)
    if dtype == "float64":
        assert len(ours.history_) == len(theirs.history_)
    assert ours.status_ == theirs.status_
    Z, expected = ours.transform(g, X), theirs.transform(g, X)
    assert np.abs(Z - expected).max() <= of_Z * np.abs(expected).max()
    if "dependent" not in kind:  # there, which of the columns get a weight is up to rounding
        assert np.abs(ours.W_ - theirs.W_).max() <= of_W * np.abs(theirs.W_).max()
    return ours


def check_sampled_edges_end_to_end(devices: tuple[str, str] = GPU_FIRST) -> None:
    """Algorithm 2 from scores to edges: rounding may move a draw, not more than one in 100."""
    for scores, least in (("sketch", 0.99), ("degree", 1.0)):
        ours, theirs = (
            Sparsifier(lam=5.0, n_samples=120, scores=scores, device=device).fit(graph("fit", True))
            for device in devices
        )
        a, b = ({*zip(*s.graph_.edges()[:2], strict=True)} for s in (ours, theirs))
        assert len(a & b) >= least * len(a | b)
        np.testing.assert_allclose(ours.scores_, theirs.scores_, rtol=1e-4)


# ---- what only a GPU has ----------------------------------------------------------------------
def check_X_in_pinned_memory(backend: Any) -> None:
    """A fit whose X counts as too large for the device, and comes in parts of seven rows."""
    parts: dict[str, Any] = {
        "fits": lambda *_, **__: False,
        "chunk_bytes": lambda *_, **__: 8 * 6 * 7,
    }
    with patch.multiple(herta_gpu.features, **parts):
        check_fit("mse cg herta", "float64")


def check_edges_on_the_device(backend: Any, weighted: bool) -> None:
    """Through RAPIDS where it is installed, else through the host: the same graph."""
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


def check_captured_steps(backend: Any) -> None:
    """Steps of CG that are captured and replayed give the same bits as launched ones."""
    solutions = []
    for capture in (False, True):
        stream = backend.xp.cuda.Stream(non_blocking=True)
        with patch.object(backend, "capture", capture), stream:
            solver = SDDSolver(graph("hub"), lam=50.0, device="cuda")
            solutions.append(solver.solve(block(605, 8, "float32")))
            stream.synchronize()
    assert np.array_equal(*solutions)


def check_callers_stream(backend: Any) -> None:
    with backend.xp.cuda.Stream(non_blocking=True) as stream:
        check_products(backend, graph("tail"), 3, "float32")
        stream.synchronize()
