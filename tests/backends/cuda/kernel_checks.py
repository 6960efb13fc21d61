"""What each kernel file must do, on small graphs that cut every loop short: for mutants, sanitizers
and any order of threads.

Through the CUDA backend, against the plain one of the CPU.  `herta selftest` asks less: a kernel
may be wrong only where a grid is too small for its work, a tile is full, or a number is too large
for float16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise, product
from typing import Any
from unittest import mock

import numpy as np

from herta_gpu import Graph
from tests.backends.cuda import primitive_checks as checks
from tests.backends.cuda.kernel_sources import kernel_text

CPU, LAM, SEED = checks.CPU, checks.LAM, checks.SEED


@contextmanager
def few_blocks(backend: Any, most: int) -> Iterator[Any]:
    """A backend whose grids have so many blocks at most, so that each has several turns.

    It is a new one: scratch memory of another size must not outlive this.
    """
    with ExitStack() as stack:
        for name, module in [*sys.modules.items()]:
            for constant in ("MAX_BLOCKS", "MOST_BLOCKS"):
                if name.startswith("herta_gpu.backends.cuda") and hasattr(module, constant):
                    stack.enter_context(mock.patch.object(module, constant, most))
        yield type(backend)()


def wide(g: Graph) -> Graph:
    """The same graph with indices of 64 bits, as of a very large one."""
    return Graph(g.indptr, g.indices.astype(np.int64), g.weights, g.degree)


def kernel(xp: Any, file: str, name: str) -> Any:
    """A kernel on its own."""
    return xp.RawModule(code=kernel_text(file), options=("-std=c++17",)).get_function(name)


def check_chunks(backend: Any, g: Graph, k: int, dtype: str) -> None:
    """A residual in chunks, the last one short: the same bits as at once."""
    L, B = backend.laplacian(g, dtype), backend.asarray(checks.block(g.num_nodes, k, "float64", 1))
    Z = backend.asarray(checks.block(L.n, k, dtype))
    whole = backend.to_numpy(backend.residual_rows(L, LAM, Z, B, 0))
    cuts = [*range(0, L.n, max(1, L.n // 3)), L.n]
    parts = [backend.residual_rows(L, LAM, Z, B[a:b], a) for a, b in pairwise(cuts)]
    assert np.concatenate([backend.to_numpy(part) for part in parts]).tobytes() == whole.tobytes()


def check_residual_of_any_kind(backend: Any, g: Graph, k: int, dtype: str) -> None:
    """Of any precision in and out, in units of its own; the dots are those of float64."""
    L, L_cpu = backend.laplacian(g, dtype), CPU.laplacian(g, dtype)
    unit, Z = 2.0 ** np.arange(-k // 2, k - k // 2)[:k], checks.block(L.n, k, dtype)
    for kind, out in product(("float32", "float64"), repeat=2):
        B = checks.block(L.n, k, kind, 1)
        given = (backend.asarray(x) for x in (Z, B))
        R, dots = backend.residual(L, LAM, *given, out, backend.asarray(unit))
        expected = CPU.residual_rows(L_cpu, LAM, Z, B.astype("float64"), 0)
        checks.close(backend, R * backend.asarray(unit).astype(out), expected, out)
        shown = np.stack([(expected**2).sum(0), ((B + expected) * Z).sum(0)])
        checks.close(backend, dots, shown, "float64", factor=10)


def check_halves(backend: Any, g: Graph, k: int, dtype: str) -> None:
    """The bits of float16 are NumPy's; a step from them is that of the reference."""
    Z, before, B = (checks.block(g.num_nodes, k, "float32", seed) for seed in range(3))
    for X in (Z, before, B):
        X[:, ::3] *= 1e30  # columns of other units
    Z[len(Z) // 2 :: 7] *= 100.0  # too large for float16
    Z[len(Z) // 3 :: 7] *= 2.0**-30  # below its smallest normal number

    def run(b: Any) -> tuple[Any, Any]:
        L, z, there, rhs = b.laplacian(g, "float32"), *(b.asarray(x.copy()) for x in (Z, before, B))
        halves = b.halves(L, rhs)
        b.chebyshev_step(L, LAM, z, there, rhs, 0.3, 0.2, halves)
        return b.to_numpy(there * halves.up), b.to_numpy(halves.G)

    (found, ours), (expected, theirs) = run(backend), run(CPU)
    assert np.array_equal(ours, theirs)
    checks.close(CPU, found, expected, "float32")


def check_scores(backend: Any, g: Graph, k: int, dtype: str) -> None:
    B_S, Pi_S = (checks.block(g.num_nodes, k, dtype, seed) for seed in range(2))
    expected = CPU.edge_scores(CPU.laplacian(g, dtype), B_S, Pi_S, LAM)
    given = (backend.asarray(x) for x in (B_S, Pi_S))
    found = backend.edge_scores(backend.laplacian(g, dtype), *given, LAM)
    checks.close(backend, found, expected, dtype)


def check_sampling(backend: Any, g: Graph, k: int, dtype: str) -> None:
    if g.num_edges:
        checks.check_sampling(backend, g)


def check_pair_bounds(backend: Any, g: Graph, k: int, dtype: str) -> None:
    """Against the dense matrix, where most ends of the largest pair lie beyond the first 32."""
    L, ratio = CPU.laplacian(g, dtype), np.random.default_rng(k).random(g.num_nodes) + 0.1
    A = np.zeros((L.n, L.n), bool)
    A[np.repeat(np.arange(L.n), np.diff(L.indptr)), L.indices] = True
    expected = np.where(A, ratio[:, None] + ratio, 0.0).max(axis=1)
    there = backend.laplacian(g, dtype)
    found = backend.pair_bounds(there.indptr, there.indices, backend.asarray(ratio))
    assert np.array_equal(backend.to_numpy(found), expected)


def check_scan(backend: Any, g: Graph, k: int, dtype: str) -> None:
    """Three turns of the one block; a graph whose edges need two has four million."""
    totals = np.random.default_rng(k).integers(0, 1 << 38, 5000)
    there = backend.asarray(totals)
    kernel(backend.xp, "sampling.cu", "scan_totals")((1,), (256,), (np.int64(5000), there))
    assert np.array_equal(backend.to_numpy(there), np.cumsum(totals) - totals)


def check_srht(backend: Any, g: Graph, k: int, dtype: str) -> None:
    for n in {g.num_nodes, 500}:  # of 512 rows: one full tile
        checks.check_srht(backend, n, k, dtype)


def check_half(backend: Any, g: Graph, k: int, dtype: str) -> None:
    checks.check_half(backend, g, k)


Check = Callable[[Any, Graph, int, str], None]
CHECKS: dict[str, list[Check]] = {
    "laplacian.cu": [
        *(checks.check_products, checks.check_residual, check_chunks),
        *(check_residual_of_any_kind, check_halves, check_half, checks.check_cg),
    ],
    "cg.cu": [checks.check_cg, checks.check_products],
    "sketch.cu": [checks.check_sketches],
    "sampling.cu": [check_scores, check_sampling, check_scan, check_pair_bounds],
    "hadamard.cu": [check_srht],
}


def check_kernels(backend: Any, only: str = "") -> None:
    """All files, or one of them."""
    with few_blocks(backend, 3) as backend:
        for name, weighted, k, dtype in (
            *[("tail", True, 3, "float32"), ("hub", False, 8, "float32")],
            *[("hub", True, 40, "float32"), ("tail", False, 16, "float64")],
            *[("one", False, 1, "float64")],
        ):
            g = checks.graph(name, weighted)
            g = wide(g) if k in (3, 16) else g
            for file, of_file in CHECKS.items():
                for check in of_file if only in ("", file) else []:
                    check(backend, g, k, dtype)
