"""What must hold of a device: `herta selftest` and the tests of the CUDA backend ask the same.

Every check compares with the plain CPU backend for the same seed, and raises an AssertionError
where they differ.  The tests run them on a GPU where there is one, else on an emulated device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
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


def close(
    backend: Any, found: Any, expected: Any, dtype: str, factor: float = 1.0, what: str = ""
) -> None:
    """Assert that an array is the expected one, but for `factor` times what `dtype` rounds."""
    found = np.asarray(backend.to_numpy(found), float)
    assert found.shape == expected.shape
    bound = factor * TOLERANCE[dtype] * max(1.0, np.abs(expected).max(initial=0))
    error = np.abs(found - expected).max(initial=0)
    assert error <= bound, f"{what}off by {error:.3g}, allowed {bound:.3g}"  # NaN fails as well


# ---- primitives -------------------------------------------------------------------------------
def primitives(b: Any, g: Graph, k: int, dtype: str) -> Iterator[tuple[str, Any, str, float]]:
    """(name, result, precision, times its rounding that it may be off) of every primitive."""
    fine = "float64"
    L, rng = b.laplacian(g, dtype), np.random.default_rng(3)
    X, Z, B = (b.asarray(block(L.n, k, dtype, seed)) for seed in range(3))
    yield "apply_H", b.apply_H(L, LAM, X), dtype, 1
    yield "column_dots", b.column_dots(X, Z), fine, 1
    R = b.asarray(block(L.n, k, "float64", 1))
    whole, dots = b.residual(L, LAM, Z, R, dtype, b.asarray(2.0 ** (np.arange(k) % 5)))
    yield "residual", whole, dtype, 1
    yield "dots of residual", 0.1 * dots, fine, 1
    yield "residual_rows", b.residual_rows(L, LAM, Z, R[1:], 1, out=R[1:]), fine, 1
    b.chebyshev_step(L, LAM, X, Z, B, 0.3, 0.2)
    yield "chebyshev_step", Z, dtype, 1
    if dtype == "float32":  # an iterate that is off by a rounding may go to the next float16
        half = b.chebyshev(L, LAM, B, 0.1, [(0.3, 0.05)] * 3, half=True)
        yield "chebyshev, float16", half, dtype, 10
    state = b.cg_start(L, LAM, B, b.asarray(rng.random(k)), 0.1, 1e-3)
    for _ in range(4):  # in which some columns freeze
        b.cg_step(L, LAM, state)
    for name in ("Z", "R", "P", "rho", "energy"):
        yield f"{name} of cg_step", getattr(state, name), dtype, 10
    for sketch in (b.sketch_incidence, b.sketch_identity):
        yield sketch.__name__, sketch(L, k, SEED), dtype, 1
    yield "edge_scores", b.edge_scores(L, X, R, LAM), dtype, 1
    scores = b.asarray(rng.random(g.num_edges) ** 8)
    factors = b.sample_edges(scores, g.num_edges // 2, SEED, False)
    yield "sample_edges", factors, fine, 1
    L_tilde = b.laplacian(b.sampled_graph(g, factors), "float64")
    yield "sampled_graph", b.apply_H(L_tilde, LAM, R), fine, 1
    yield "srht", b.srht(X, L.n // 2, SEED), dtype, 1
    A = b.asarray(block(40, 12, "float64"))
    yield "cholesky", b.solve_triangular(b.cholesky(A.T @ A), A.T.copy(), True), fine, 100


def check_primitives(backend: Any) -> None:
    """Every primitive that a backend has of its own; the tests ask for more of each."""
    for g, k, dtype in (
        *[(graph("tail", True), 3, "float32"), (graph("hub"), 8, "float32")],
        (graph("hub", True), 2, "float64"),
    ):
        both = (primitives(b, g, k, dtype) for b in (backend, CPU))
        for (what, found, kind, factor), (_, expected, *_) in zip(*both, strict=True):
            close(backend, found, np.asarray(expected, float), kind, factor, f"{what} is ")


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


def check_at_size(backend: Any, graph: Graph, M: Any, k: int) -> None:
    """The kernels on a large graph, in float32, within what rounding may do.

    Against products in float64 with `M`, L as the sparse library of the device has it (None: there
    is no room for one), and on the host for 1,000 rows of the residual.
    """
    xp, rng, n = backend.xp, np.random.default_rng(k), graph.num_nodes
    L, lam, number = backend.laplacian(graph, "float32"), 1000.0, np.float32
    X, Z, B = (backend.asarray(rng.standard_normal((n, k), dtype=number)) for _ in range(3))
    degrees = np.diff(graph.indptr)
    rounds = backend.roundings(float(degrees.max(initial=0)), k) + 11
    # s_i sum_j a_ij s_j <= sqrt(D_i / the least D): so many times the largest number of a block.
    root = backend.asarray(np.sqrt(graph.degree / graph.degree.min()))[:, None]
    spread = 1 + 2 * lam * root
    most = float(max(abs(A).max() for A in (X, Z, B)))
    Y, steps = backend.apply_H(L, lam, X), [Z.copy(), Z.copy()]
    c1, c2, halves = 1e-3, 1e-4, None if xp is np else backend.halves(L, X)
    for Z_prev, half in zip(steps, (None, halves), strict=True):
        backend.chebyshev_step(L, lam, X, Z_prev, B, c1, c2, half)
    for a in range(0, k if M is not None else 0, 8):
        J = slice(a, a + 8)
        x, z, b = (A[:, J].astype("float64") for A in (X, Z, B))
        Hx = x + lam * (M @ x)
        next_z = (1 + c1) * x - c1 * z + c2 * (b - Hx)
        off = rounds * 2.0**-24 * most * spread
        half_off = c2 * lam * 2.0**-10 * most * root
        for what, found, expected, bound in (
            ("apply_H", Y, Hx, off),
            ("chebyshev_step", steps[0], next_z, c2 * off + 2.0**-20 * most),
            ("chebyshev_step, float16", steps[1], next_z, c2 * off + 2.0**-20 * most + half_off),
        ):
            beyond = int((~(abs(found[:, J] - expected) <= bound)).sum())  # NaN is beyond
            assert beyond == 0, f"{what} is off in {beyond:,} numbers of columns {a} and on"
    state = backend.cg_start(L, lam, X.copy(), xp.zeros(k), 0.0, 0.0)
    backend.cg_step(L, lam, state)
    pairs = [("column_dots", backend.column_dots(X, B), X, B)]
    if hasattr(state, "pHp"):
        pairs += [("p . Hp of cg_step", state.pHp, X, Y)]
    for what, dots, A, C in pairs:
        wide = [(A[:, j].astype("float64"), C[:, j].astype("float64")) for j in range(k)]
        expected = np.array([float(xp.einsum("i,i->", a, c)) for a, c in wide])
        sizes = np.array([float(xp.sqrt((a * a).sum() * (c * c).sum())) for a, c in wide])
        off = np.abs(backend.to_numpy(dots) - expected)
        # The product of a step is that of apply_H, but for float32's roundings of other splits.
        assert (off <= 1e-6 * sizes + 1e-300).all(), f"{what} is off by {off.max():.3g}"
    _check_rows_at_size(backend, graph, L, lam, X, B, rounds)


def _check_rows_at_size(
    backend: Any, graph: Graph, L: Any, lam: float, Z: Any, B: Any, rounds: float
) -> None:
    """1,000 rows of a residual, that of the largest degree among them, by NumPy on the host."""
    (n, k), rng = Z.shape, np.random.default_rng(1)
    degrees, s = np.diff(graph.indptr), 1 / np.sqrt(graph.degree)
    rows = np.unique(np.append(rng.integers(0, n, 1000), degrees.argmax()))
    R = backend.residual_rows(L, lam, Z, backend.asarray(B, "float64"), 0)[backend.asarray(rows)]
    at = np.concatenate([np.arange(*graph.indptr[i : i + 2]) for i in rows])
    weights = np.ones(at.shape[0]) if graph.weights is None else graph.weights[at]
    ends = np.append(0, np.cumsum(degrees[rows]))
    A = sp.csr_array((weights * s[graph.indices[at]], np.arange(at.shape[0]), ends))
    A.resize(rows.shape[0], max(at.shape[0], 1))
    near = np.zeros((max(at.shape[0], 1), k))
    near[: at.shape[0]] = backend.to_numpy(Z[backend.asarray(graph.indices[at])])
    z, b = (backend.to_numpy(A[backend.asarray(rows)]).astype(float) for A in (Z, B))
    own = 1 + lam * (graph.loopless_degree / graph.degree)[rows, None]
    expected = b - (own * z - lam * s[rows, None] * (A @ near))
    terms = np.abs(b) + own * np.abs(z) + lam * s[rows, None] * (A @ np.abs(near))
    off = np.abs(backend.to_numpy(R) - expected)
    assert (off <= 2 * rounds * 2.0**-53 * terms).all(), f"residual_rows is off by {off.max():.3g}"


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
    where = herta_gpu.features
    with (
        patch.object(where, "fits", return_value=False),
        patch.object(where, "chunk_bytes", return_value=8 * 6 * 7),
    ):
        check_fit("mse cg herta", "float64")


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
        check_primitives(backend)
        stream.synchronize()
