"""What must hold of a device: `herta selftest` and the tests of the CUDA backend ask the same.

Every check compares with the plain CPU backend for the same seed, and raises an AssertionError
where they differ.  The tests run them on a stand-in for CuPy, and on a GPU where there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import scipy.sparse as sp

import herta_gpu.features
from herta_gpu import HERTA, Graph, SDDSolver, Sparsifier
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.backends.cuda.cusparse import ALGORITHMS, RowMajorProduct

CPU = CPUBackend()
LAM, SEED = 20.0, 0x9E3779B97F4A7C15
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
# (relative to the largest output, to the largest weight)
FIT_TOLERANCE = {"float32": (1e-4, 5e-4), "float64": (1e-10, 1e-10)}


@cache
def graph(name: str, weighted: bool = False) -> Graph:
    """ "hub": two rows longer than a segment of 512; "tail": 33 nodes, some alone; or "one"."""
    if name == "one":
        return Graph.from_edges(np.zeros((2, 0), int), 1)
    if name == "tail":
        rng = np.random.default_rng(1)
        edges = np.unique(np.sort(rng.integers(0, 30, (2, 90)), axis=0), axis=1)
        return Graph.from_edges(edges, 33, rng.random(edges.shape[1]) if weighted else None)
    if name == "fit":
        return random_graph(60, 200, weighted=weighted)
    spokes = np.arange(1, 601)
    hubs = np.concatenate([[spokes * 0, spokes], [spokes[1:] * 0 + 1, spokes[1:]]], axis=1)
    weight = 0.1 + np.random.default_rng(0).random(hubs.shape[1]) if weighted else None
    return Graph.from_edges(hubs, 605, weight)


def random_graph(n: int, m: int, seed: int = 0, weighted: bool = False) -> Graph:
    """m distinct random edges, each in a random direction."""
    rng = np.random.default_rng(seed)
    lo, hi = np.triu_indices(n, 1)
    pick = rng.choice(lo.shape[0], size=min(m, lo.shape[0]), replace=False)
    u, v = lo[pick], hi[pick]
    flip = rng.random(pick.shape[0]) < 0.5
    edges = np.where(flip, np.stack([u, v]), np.stack([v, u]))
    return Graph.from_edges(edges, n, rng.uniform(0.1, 3, pick.shape[0]) if weighted else None)


def block(n: int, k: int, dtype: str, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(dtype)


def close(backend: Any, found: Any, expected: Any, dtype: str, factor: float = 1.0) -> None:
    found = np.asarray(backend.to_numpy(found), float)
    assert found.shape == expected.shape
    bound = factor * TOLERANCE[dtype] * max(1.0, np.abs(expected).max(initial=0))
    error = np.abs(found - expected).max(initial=0)
    assert error <= bound, f"off by {error:.3g}, allowed {bound:.3g}"  # NaN fails as well


# ---- primitives -------------------------------------------------------------------------------


def check_products(backend: Any, g: Graph, k: int, dtype: str) -> None:
    L, L_cpu = backend.laplacian(g, dtype), CPU.laplacian(g, dtype)
    X, Z, B = (block(L.n, k, dtype, seed) for seed in range(3))
    X_dev, Z_dev, B_dev = (backend.asarray(a) for a in (X, Z, B))
    close(backend, backend.apply_H(L, LAM, X_dev), CPU.apply_H(L_cpu, LAM, X), dtype)
    close(backend, backend.column_dots(X_dev, Z_dev), CPU.column_dots(X, Z), "float64")
    mixed = backend.column_dots(X_dev, Z_dev.astype("float64"))
    close(backend, mixed, CPU.column_dots(X, Z), "float64")
    backend.chebyshev_step(L, LAM, X_dev, Z_dev, B_dev, 0.3, 0.2)
    CPU.chebyshev_step(L_cpu, LAM, X, Z, B, 0.3, 0.2)
    close(backend, Z_dev, Z, dtype)


def check_residual(backend: Any, g: Graph, k: int, dtype: str) -> None:
    """Chunks of it, onto B itself, and all of it with its dots.

    The scales of a float32 graph are float64 all the same.
    """
    L, L_cpu = backend.laplacian(g, dtype), CPU.laplacian(g, dtype)
    Z, B = block(L.n, k, dtype), block(L.n, k, "float64", 1)
    R = backend.asarray(B.copy())
    for a, b in pairwise(sorted({0, 1, L.n // 2, L.n})):  # each hub in a chunk of its own
        part = R[a:b]
        assert backend.residual_rows(L, LAM, backend.asarray(Z), part, a, out=part) is part
    close(backend, R, CPU.residual_rows(L_cpu, LAM, Z, B, 0), "float64")
    unit = 2.0 ** (np.arange(k) % 5)
    ours = backend.residual(L, LAM, *map(backend.asarray, (Z, B)), dtype, backend.asarray(unit))
    theirs = CPU.residual(L_cpu, LAM, Z, B, dtype, unit)
    close(backend, ours[0], theirs[0], dtype)
    close(backend, ours[1], theirs[1], "float64", factor=10)


def check_half(backend: Any, g: Graph, k: int) -> None:
    """Chebyshev with float16 neighbours, in blocks of the caller, which are used again."""
    L, L_cpu, steps = (
        backend.laplacian(g, "float32"),
        CPU.laplacian(g, "float32"),
        [(0.3, 0.05)] * 3,
    )
    B = block(g.num_nodes, k, "float32")
    expected = CPU.chebyshev(L_cpu, LAM, B, 0.1, steps, half=True)
    kinds = ("float32", "float32", "uint16")
    work = tuple(backend.empty(B.shape, kind) for kind in kinds)
    for _ in range(2):
        found = backend.chebyshev(L, LAM, backend.asarray(B), 0.1, steps, work, half=True)
        assert found is work[1]
        # An iterate that is off by a rounding of float32 may be rounded to the next float16.
        close(backend, found, expected, "float32", factor=10)
    assert (
        backend.chebyshev(L, LAM, backend.asarray(B[:, :0].copy()), 0.1, steps, half=True).size == 0
    )


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


def check_cusparse(backend: Any, g: Graph, dtype: str) -> None:
    """The kernel against both products of cuSPARSE with row-major blocks, a second time as well."""
    L, M = backend.laplacian(g, dtype), backend.laplacian_csr(backend.laplacian(g, dtype))
    for k in (1, 8, 47):
        X, Y = (backend.asarray(block(g.num_nodes, k, dtype, seed)) for seed in range(2))
        for algorithm in ALGORITHMS:
            multiply = RowMajorProduct(backend.xp, M, X, Y, algorithm)
            for _ in range(2):
                multiply()
                expected = backend.to_numpy(X + LAM * Y)
                close(backend, backend.apply_H(L, LAM, X), expected, dtype)
                X *= 0.5


def check_cg(backend: Any, g: Graph, k: int, dtype: str) -> None:
    L, L_cpu = backend.laplacian(g, dtype), CPU.laplacian(g, dtype)
    R, tol = block(L.n, k, dtype), 0.1
    R[:, k // 2] = 0  # starts frozen
    energy = 0.7 * CPU.column_dots(R, R) / tol**2
    energy[::2] = 0  # the odd columns freeze soon, the even ones later
    energy_dev = backend.asarray(energy)
    ours = backend.cg_start(L, LAM, backend.asarray(R), energy_dev, tol, 1e-3)
    theirs = CPU.cg_start(L_cpu, LAM, R.copy(), energy.copy(), tol, 1e-3)
    for _ in range(4):
        assert backend.cg_active(ours) == CPU.cg_active(theirs)
        backend.cg_step(L, LAM, ours)
        CPU.cg_step(L_cpu, LAM, theirs)
    assert np.array_equal(backend.to_numpy(ours.iterations), theirs.iterations)
    for name in ("Z", "R", "P", "rho", "energy"):
        close(backend, getattr(ours, name), getattr(theirs, name), dtype, factor=10)
    assert np.array_equal(backend.to_numpy(energy_dev), energy)  # the caller's stays as it was


def check_sketches(backend: Any, g: Graph, k: int, dtype: str) -> None:
    for graph in (g.reordered("degree"), g):
        L, L_cpu = backend.laplacian(graph, dtype), CPU.laplacian(graph, dtype)
        for name in ("sketch_incidence", "sketch_identity"):
            ours, theirs = getattr(backend, name)(L, k, SEED), getattr(CPU, name)(L_cpu, k, SEED)
            close(backend, ours, theirs, dtype)
    B_S, Pi_S = block(L.n, k, dtype), block(L.n, k, "float64", 1)  # the second was refined
    scores = backend.edge_scores(L, backend.asarray(B_S), backend.asarray(Pi_S), LAM)
    close(backend, scores, CPU.edge_scores(L_cpu, B_S, Pi_S, LAM), dtype)


def check_sampling(backend: Any, g: Graph) -> None:
    """The same scores and seed give the same edges, and the same L_tilde."""
    m = g.num_edges
    scores = np.random.default_rng(3).random(m) ** 8
    for replace, s in ((True, m + 3), (False, m // 2)):
        factors = backend.sample_edges(backend.asarray(scores), s, SEED, replace)
        expected = CPU.sample_edges(scores, s, SEED, replace) if m else np.zeros(0)
        assert np.array_equal(backend.to_numpy(factors) > 0, expected > 0)
        close(backend, factors, expected, "float64")
        ours, theirs = backend.sampled_graph(g, factors), CPU.sampled_graph(g, expected)
        L, L_cpu = backend.laplacian(ours, "float64"), CPU.laplacian(theirs, "float64")
        for name in ("indptr", "indices"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))
        close(backend, L.weights, theirs.weights, "float64")
        close(backend, L.diagonal, L_cpu.diagonal, "float64")
        assert abs(L.lambda_max - L_cpu.lambda_max) <= 1e-11
        X = block(L.n, 3, "float64")
        found = backend.apply_H(L, LAM, backend.asarray(X))
        close(backend, found, CPU.apply_H(L_cpu, LAM, X), "float64")


def check_srht(backend: Any, n: int, k: int, dtype: str) -> None:
    Q = block(n, k, dtype)
    for s in {1, max(1, n // 2), n}:
        close(backend, backend.srht(backend.asarray(Q), s, SEED), CPU.srht(Q, s, SEED), dtype)


def check_dense(backend: Any) -> None:
    """Factorisations, where they exist and where they do not."""
    A = block(40, 12, "float64")
    P = A.T @ A
    for trans in (False, True):
        found = backend.solve_triangular(
            backend.cholesky(backend.asarray(P)), backend.asarray(A.T), trans
        )
        close(backend, found, CPU.solve_triangular(CPU.cholesky(P), A.T, trans), "float64", 100)
    A[:, 7] = A[:, 2] - A[:, 3]
    P = A.T @ A
    P[7, 7] -= 1e-9  # not positive definite for sure
    assert backend.cholesky(backend.asarray(P)) is None
    L, J = backend.pivoted_cholesky(backend.asarray(P), 1e-6)
    L, J = backend.to_numpy(L), backend.to_numpy(J)
    assert L.shape == (11, 11)
    np.testing.assert_allclose(L @ L.T, P[np.ix_(J, J)], atol=1e-10)
    F = np.asfortranarray(A)
    assert backend.asarray(F).flags.c_contiguous
    assert backend.asarray(backend.asarray(F).T).flags.c_contiguous


def check_empty(backend: Any) -> None:
    """No columns, no edges: nothing to launch, nothing to fail."""
    L = backend.laplacian(graph("one"), "float32")
    none = backend.asarray(np.zeros((1, 0), "float32"))
    assert backend.apply_H(L, LAM, none).shape == (1, 0)
    assert backend.column_dots(none, none).shape == (0,)
    assert backend.residual_rows(L, LAM, none, none.astype("float64"), 0).shape == (1, 0)
    assert backend.srht(none, 1, 0).shape == (1, 0)
    state = backend.cg_start(L, LAM, none, backend.asarray(np.zeros(0)), 0.1, 0.1)
    backend.cg_step(L, LAM, state)
    assert backend.cg_active(state) == 0
    one = backend.asarray(np.ones((1, 4), "float32"))
    assert backend.edge_scores(L, one, one, LAM).shape == (0,)
    for shape in ((0,), (0, 3), (2, 0)):
        C, B = (backend.asarray(np.zeros(s)) for s in ((shape[0], shape[0]), shape))
        assert backend.solve_triangular(C, B, trans=True).shape == shape


def check_unaligned(backend: Any) -> None:
    """A block of the caller that does not begin where 16 bytes may be read at once."""
    L = backend.laplacian(graph("tail"), "float32")
    X = block(L.n, 4, "float32")
    flat = backend.asarray(np.concatenate([np.zeros(1, "float32"), X.ravel()]))
    unaligned = flat[1:].reshape(L.n, 4)
    taken = backend.asarray(unaligned)
    expected = CPU.apply_H(CPU.laplacian(graph("tail"), "float32"), LAM, X)
    close(backend, backend.apply_H(L, LAM, taken), expected, "float32")
    rows = backend.asarray(block(5, 1, "float64"))[1:]
    assert backend.asarray(rows) is rows  # columns one by one may begin anywhere: no copy
    pairs = backend.asarray(X)[3:]
    assert backend.asarray(pairs) is pairs


def check_streaming(backend: Any) -> None:
    """A matrix that stays on the host comes through whole, in any parts, and a second time.

    Three columns of twenty are cut out of whole rows on the device, one is gathered on the host.
    """
    order = np.random.default_rng(0).permutation(103)
    with TemporaryDirectory() as folder:
        for dtype, order_or_none, in_file in (
            *[("float32", None, False), ("float64", order, False)],
            *[("float32", order, True), ("int64", None, True)],
        ):
            X = (100 * block(103, 20, "float64")).astype(dtype)
            expected = X if order_or_none is None else X[order_or_none]
            if in_file:
                path = Path(folder) / dtype
                X.tofile(path)
                X = np.memmap(path, dtype, "r", shape=X.shape)
            blocks = backend.host_blocks(X, order_or_none)
            for rows, columns in ((10, slice(0, 20)), (40, slice(2, 5)), (60, slice(6, 7))):
                cuts = [slice(a, min(a + rows, 103)) for a in range(0, 103, rows)]
                wanted = [(at, columns) for at in cuts]
                for _ in blocks.parts(wanted[::-1]):
                    break  # a caller that stops early leaves nothing broken behind
                found = backend.xp.zeros((103, columns.stop - columns.start))
                for at, part in blocks.parts(wanted):
                    found[at] = part * 2.0
                assert np.array_equal(backend.to_numpy(found), 2.0 * expected[:, columns])
            assert list(blocks.parts([])) == []


def check_upload(backend: Any, chunk: int = 100) -> None:
    """In chunks: whole, of any layout, as another type, and from a file."""
    if backend.xp is np:
        return  # nothing is uploaded here
    X, uploads = block(31, 6, "float64"), sys.modules["herta_gpu.backends.cuda.uploads"]
    with TemporaryDirectory() as folder, mock.patch.object(uploads, "CHUNK_BYTES", chunk):
        path = Path(folder) / "X"
        X.tofile(path)
        for x in (X, X[:, ::2], X.T, X[3], np.memmap(path, "float64", "r", shape=X.shape)):
            for dtype in (None, "float32"):
                found = backend.asarray(x, dtype)
                assert found.flags.c_contiguous
                assert np.array_equal(backend.to_numpy(found), x.astype(dtype or x.dtype))
        M = sp.random_array((40, 30), density=0.3, rng=np.random.default_rng(0), format="csr")
        assert np.array_equal(backend.csr(M).get().toarray(), M.toarray())


def check_all(backend: Any) -> None:
    """Every primitive, once or twice: what a mutant has to face."""
    check_kernels(backend)
    for dtype in ("float32", "float64"):
        check_reference(backend, graph("hub", True), dtype)
        check_reference(backend, graph("tail").reordered("degree"), dtype)


def check_kernels(backend: Any) -> None:
    """Every primitive that a backend has of its own, on any device."""
    for name, weighted, k, dtype in (
        *[("tail", True, 3, "float32"), ("hub", False, 8, "float32")],
        *[("one", False, 1, "float64"), ("hub", True, 2, "float64")],
    ):
        g = graph(name, weighted)
        check_products(backend, g, k, dtype)
        check_residual(backend, g, k, dtype)
        check_cg(backend, g, k, dtype)
        check_sketches(backend, g, k, dtype)
    check_half(backend, graph("hub", True), 6)
    check_sampling(backend, graph("hub", True))
    check_srht(backend, 600, 3, "float32")
    check_dense(backend)
    check_empty(backend)
    check_unaligned(backend)
    check_streaming(backend)
    check_upload(backend)


# ---- fits -------------------------------------------------------------------------------------


def _inputs(kind: str) -> tuple[Graph, Any, Any]:
    rng = np.random.default_rng(0)
    g = graph("hub" if "hub" in kind else "fit", weighted="weighted" in kind)
    if "reordered" in kind:
        g = g.reordered("degree")
    n = g.num_nodes
    X = rng.standard_normal((n, 6))
    if "dependent" in kind:
        X = np.hstack([X, X[:, :2] - X[:, 2:4]])
    if "sparse" in kind:
        X = sp.random_array((n, 20), density=0.3, rng=rng, format="csr")
    if "wide" in kind:
        X = rng.standard_normal((n, 50))
    return g, X, rng.integers(0, 3, n)


FITS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{loss} {optimizer} {strategy}": (
        "plain",
        # A rough P for MSE: with the exact one there is nothing left to optimise.
        {"loss": loss, "optimizer": optimizer, "strategy": strategy, "max_iter": 5}
        | ({"ridge": 0.1} if loss == "ce" else {"sketch": 16}),
    )
    for loss in ("mse", "ce")
    for optimizer in ("cg", "gd", "lbfgs", "adam", "momentum")
    for strategy in ("herta", "direct")
} | {
    "Algorithms 1 and 2 as printed": ("plain", {"sparsify": True, "sketch": True}),
    "Algorithm 2 on a weighted graph": ("weighted", {"sparsify": True}),
    "few samples": ("weighted", {"sparsify": 100, "max_iter": 8}),
    "mixed": ("weighted", {"sparsify": "mixed", "tol": 0.3}),
    "hubs": ("hub", {"strategy": "herta"}),
    "sparse X, reordered graph": ("sparse reordered", {"strategy": "herta", "ridge": 0.1}),
    "dependent columns": ("dependent weighted", {"strategy": "herta"}),
    "no preconditioner": ("plain", {"precondition": False, "optimizer": "gd", "max_iter": 5}),
    "fewer rows than columns": ("wide", {"ridge": 0.1}),
    "fewer rows than columns, no ridge": ("wide", {"strategy": "direct"}),
    "weights and an intercept": (
        "plain",
        {"class_weight": "balanced", "fit_intercept": True, "strategy": "herta"},
    ),
    "cross entropy with both": (
        "plain",
        {"class_weight": "balanced", "fit_intercept": True, "loss": "ce", "ridge": 0.1},
    ),
    "several lam": ("plain", {"lam": [0, 1, 5], "ridge": 0.1, "fit_intercept": True}),
}


def check_fit(name: str, dtype: str, devices: tuple[str, str] = ("cuda", "cpu")) -> HERTA:
    """The fit on the first device is that of the second."""
    kind, options = FITS[name]
    g, X, y = _inputs(kind)
    train = np.arange(0, g.num_nodes, 2)
    ours, theirs = (
        HERTA(**{"lam": 5.0, **options}, dtype=dtype, device=device, random_state=1)
        for device in devices
    )
    ours.fit(g, X, y, train)
    theirs.fit(g, X, y, train)
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


def check_sampled_edges_end_to_end(devices: tuple[str, str] = ("cuda", "cpu")) -> None:
    """Algorithm 2 from scores to edges: rounding may move a draw, not more than one in 100."""
    for scores, least in (("sketch", 0.99), ("degree", 1.0)):
        g = graph("fit", weighted=True)
        ours, theirs = (
            Sparsifier(lam=5.0, n_samples=120, scores=scores, device=device).fit(g)
            for device in devices
        )
        a, b = ({*zip(*s.graph_.edges()[:2], strict=True)} for s in (ours, theirs))
        assert len(a & b) >= least * len(a | b)
        np.testing.assert_allclose(ours.scores_, theirs.scores_, rtol=1e-4)


# ---- what only a GPU has ----------------------------------------------------------------------


@contextmanager
def _changed(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of a module or an object, for a while (`unittest.mock` takes long to import)."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def check_X_in_pinned_memory(backend: Any) -> None:
    """A fit whose X counts as too large for the device, and comes in parts of seven rows."""
    check_streaming(backend)
    with _changed(herta_gpu.features, fits=lambda *_: False, _CHUNK_BYTES=8 * 6 * 7):
        check_fit("mse cg herta", "float64")


def check_edges_on_the_device(backend: Any, weighted: bool) -> None:
    """Through RAPIDS where it is installed, else through the host: the same graph."""
    expected = graph("fit", weighted)  # without self-loops, which `edges` leaves out
    u, v, w = expected.edges()
    edges = backend.asarray(np.stack([u, v]))
    g = Graph.from_edges(edges, 60, None if w is None else backend.asarray(w))
    L, L_hat = backend.laplacian_csr(backend.laplacian(g, "float64")), expected.to_csr()
    np.testing.assert_allclose(L.get().toarray(), L_hat.toarray(), atol=1e-14)
    assert g.num_components == expected.num_components


def check_tensors_of_torch(backend: Any) -> str | None:
    """A tensor goes in and comes out; or why there is none to try."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "this torch has no CUDA"
    g, X = graph("tail"), block(33, 3, "float32")
    solver = SDDSolver(g, lam=3.0, device="cuda")
    Z = solver.solve(torch.from_numpy(X).cuda())
    assert Z.is_cuda
    np.testing.assert_array_equal(Z.cpu().numpy(), solver.solve(X))
    return None


def check_captured_steps(backend: Any) -> None:
    """Steps of CG that are captured and replayed give the same bits as launched ones."""
    solutions = []
    for capture in (False, True):
        with (
            _changed(backend, capture=capture),
            backend.xp.cuda.Stream(non_blocking=True) as stream,
        ):
            solver = SDDSolver(graph("hub"), lam=50.0, device="cuda")
            solutions.append(solver.solve(block(605, 8, "float32")))
            stream.synchronize()
    assert np.array_equal(*solutions)


def check_callers_stream(backend: Any) -> None:
    with backend.xp.cuda.Stream(non_blocking=True) as stream:
        check_products(backend, graph("tail"), 3, "float32")
        stream.synchronize()
