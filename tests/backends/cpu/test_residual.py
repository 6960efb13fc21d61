"""Residuals in float64 chunk by chunk, and Chebyshev in blocks that the caller owns."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from herta_gpu.backends.base import Backend
from herta_gpu.backends.cpu import reference
from tests.backends.cpu.conftest import hub, memory_of, sparse_graph
from tests.conftest import dense_H, random_graph

LAM = 20.0
STEPS = [(0.3, 0.05), (0.4, 0.06), (0.1, 0.02)]


def chunks(backend: Backend, L: Any, Z: Any, B: Any, rows: int) -> Any:
    """All rows of B - H Z, so many at a time, each written over its own rows of B."""
    R = B.copy()
    for start in range(0, B.shape[0], rows):
        part = R[start : start + rows]
        assert backend.residual_rows(L, LAM, Z, part, start, out=part) is part
    return R


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("k", [0, 1, 2, 4, 7, 8, 16, 17, 33, 64, 100])
def test_residual_is_that_of_the_unrounded_matrix(backend: Backend, k: int, weighted: bool) -> None:
    g = hub(weighted)
    rng, H = np.random.default_rng(k), dense_H(g, LAM)
    B = rng.standard_normal((g.num_nodes, k))
    for stored in ("float32", "float64"):
        Z = rng.standard_normal((g.num_nodes, k)).astype(stored)
        # A term is rounded (neighbours + 8) times, and the dense product rounds as often.
        most = float(np.diff(g.indptr).max()) + 8
        bound = 2 * most * 2.0**-53 * (np.abs(B) + np.abs(H) @ np.abs(Z.astype("float64")))
        for working in ("float32", "float64"):
            L = backend.laplacian(g, working)
            found = backend.residual_rows(L, LAM, Z, B, 0)
            assert found.dtype == np.float64
            assert (np.abs(found - (B - H @ Z.astype("float64"))) <= bound).all()


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("k", [0, 1, 4, 7, 17, 64, 100])
def test_a_residual_comes_with_the_dots_of_what_was_not_rounded(
    backend: Backend, k: int, weighted: bool
) -> None:
    """Whatever Z, B and R are stored in; R counts in units of its own."""
    g = hub(weighted)
    rng, H, L = np.random.default_rng(k), dense_H(g, LAM), backend.laplacian(g, "float32")
    unit = 2.0 ** (np.arange(k) % 7 - 3)
    for of_Z, of_B, of_R in product(("float32", "float64"), repeat=3):
        Z, B = (rng.standard_normal((g.num_nodes, k)).astype(kind) for kind in (of_Z, of_B))
        R, dots = backend.residual(L, LAM, Z, B, of_R, unit)
        z, b = Z.astype("float64"), B.astype("float64")
        r, size = b - H @ z, np.abs(b) + np.abs(H) @ np.abs(z)
        most = backend.roundings(float(np.diff(g.indptr).max()), k) + 8
        # The dense product rounds as often as there are entries in a row.
        off = (most + 705) * 2.0**-53 * size
        assert R.dtype == of_R
        assert (np.abs(R * unit - r) <= off + float(np.finfo(of_R).eps) * np.abs(r)).all()
        shown = np.stack([(r * r).sum(axis=0), ((b + r) * z).sum(axis=0)])
        allowed = np.stack([(np.abs(r) * off).sum(axis=0), (np.abs(z) * off).sum(axis=0)])
        sums = 705 * 2.0**-53 * np.stack([shown[0], (np.abs(b + r) * np.abs(z)).sum(axis=0)])
        assert (np.abs(dots - shown) <= 2.1 * allowed + 4 * sums).all()


@pytest.mark.parametrize("k", [1, 4, 40])
def test_cuts_and_threads_change_no_bit(
    backend: Backend, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_ENTRY_CHUNK", 256)  # rows are cut there as well
    monkeypatch.setattr(reference, "_ROWS", 100)
    g = random_graph(600, 60_000)
    L, rng = backend.laplacian(g, "float32"), np.random.default_rng(0)
    Z, B = rng.standard_normal((600, k)).astype("float32"), rng.standard_normal((600, k))
    whole = backend.residual_rows(L, LAM, Z, B, 0)
    for threads in ("1", "3"):
        monkeypatch.setenv("HERTA_NUM_THREADS", threads)
        for rows in (1, 77, 256, 600):
            np.testing.assert_array_equal(chunks(backend, L, Z, B, rows), whole)


def test_residual_takes_any_layout(backend: Backend) -> None:
    g = random_graph(50, 200)
    L, rng = backend.laplacian(g, "float32"), np.random.default_rng(0)
    Z, B = rng.standard_normal((50, 6)).astype("float32"), rng.standard_normal((30, 6))
    want = backend.residual_rows(L, LAM, Z, B, 20)
    wide = np.zeros((30, 12))
    for odd in (np.asfortranarray(B), np.repeat(B, 2, axis=1)[:, ::2]):
        np.testing.assert_array_equal(backend.residual_rows(L, LAM, Z, odd, 20), want)
        backend.residual_rows(L, LAM, Z, odd, 20, out=wide[:, ::2])
        np.testing.assert_array_equal(wide[:, ::2], want)


@pytest.mark.parametrize("k", [1, 3, 40])
@pytest.mark.usefixtures("distance")
def test_chebyshev_in_the_callers_blocks(backend: Backend, k: int) -> None:
    g = random_graph(60, 200)
    L, B = backend.laplacian(g, "float32"), np.random.default_rng(0).standard_normal((60, k))
    B = B.astype("float32")
    work = tuple(np.full_like(B, np.nan) for _ in range(2))
    for count in range(4):
        want = backend.chebyshev(L, LAM, B, 0.1, STEPS[:count])
        found = backend.chebyshev(L, LAM, B, 0.1, STEPS[:count], work=work)
        assert found is work[count % 2]
        np.testing.assert_array_equal(found, want)
    for bad in (work[0][1:], work[0].astype("float64")):
        with pytest.raises(ValueError, match="work must be"):
            backend.chebyshev(L, LAM, B, 0.1, STEPS, work=(work[0], bad))


@pytest.mark.parametrize("k", [1, 32])
@pytest.mark.usefixtures("distance", "small_pieces")
def test_no_other_block_is_made(backend: Backend, k: int) -> None:
    """Beside the caller's blocks, passes and residuals take little memory."""
    n, rows = 40_000, 512
    L, B = backend.laplacian(sparse_graph(n), "float32"), np.ones((n, k), dtype="float32")
    work, R = (np.empty_like(B), np.empty_like(B)), np.ones((rows, k))

    def everything() -> None:
        Z = backend.chebyshev(L, LAM, B, 0.1, STEPS, work=work)
        for start in range(0, 4 * rows, rows):
            backend.residual_rows(L, LAM, Z, R, start, out=R)

    assert memory_of(everything)[1] < B.nbytes / 4 + 100_000
    assert sum(a.nbytes for a in L.exact if a is not None) == 16 * n
