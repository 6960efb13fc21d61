"""X behind one interface: products, norms and hashes, whatever X is and wherever it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu.backends import get_backend
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.features import Features, bytes_held, has_hidden_columns
from herta_gpu.planning import costs
from herta_gpu.planning.costs import chunk_bytes

CPU = CPUBackend()
KINDS = ("float64", "float32", "float16", "int", "fortran", "memmap", "csr", "csc")
LD = np.longdouble


def values(n: int = 57, d: int = 6) -> Any:
    """Numbers that float16 holds exactly, with a column of zeros."""
    X = np.round(4 * np.random.default_rng(0).standard_normal((n, d)))
    X[:, 2] = 0
    return X


def given(kind: str, X: Any, folder: Path) -> Any:
    if kind in ("csr", "csc"):
        return sp.csr_array(X) if kind == "csr" else sp.csc_matrix(X)
    if kind == "fortran":
        return np.asfortranarray(X)
    if kind == "memmap":
        np.save(folder / "X.npy", X.astype(np.float16))
        return np.load(folder / "X.npy", mmap_mode="r")
    return X.astype(kind)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "CHUNK_BYTES", 8 * 6 * 10)  # ten rows of six columns


@pytest.mark.parametrize("ordered", [False, True], ids=["as given", "reordered"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_X_has_the_same_products(kind: str, ordered: bool, tmp_path: Path) -> None:
    X, rng = values(), np.random.default_rng(1)
    order = rng.permutation(57) if ordered else None
    F = Features(given(kind, X, tmp_path), get_backend("cpu") if ordered else CPU, order)
    X = X if order is None else X[order]
    W, V = rng.standard_normal((6, 3)), rng.standard_normal((57, 3))
    assert F.shape == (57, 6)
    np.testing.assert_allclose(F.times(W), X @ W, atol=1e-12)
    np.testing.assert_allclose(F.transpose_times(V), X.T @ V, atol=1e-12)
    V32 = V.astype(np.float32)
    found = F.transpose_times(V32)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, X.T @ V32.astype(float), atol=1e-12)
    np.testing.assert_allclose(F.column_norms, np.linalg.norm(X, axis=0), rtol=1e-14)
    block = np.empty((57, 3))
    for rows, part in F.row_chunks(slice(1, 4)):
        assert part.dtype == np.float64
        block[rows] = part
    np.testing.assert_array_equal(block, X[:, 1:4])


@pytest.mark.parametrize("kind", ["float64", "csr"])
@pytest.mark.parametrize("shape", ["rank one", "diagonal", "random"])
def test_the_norm_is_bounded_and_not_by_much(kind: str, shape: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    X = {
        "rank one": np.outer(rng.standard_normal(57), rng.standard_normal(6)),
        "diagonal": np.eye(57, 6),
        "random": rng.standard_normal((57, 6)),
    }[shape]
    true, bound = np.linalg.norm(X, 2), Features(given(kind, X, tmp_path), CPU).norm_bound
    assert true <= bound <= 3 * true
    if shape != "random":  # the Frobenius norm, or the product of the other two, is the true one
        assert bound == pytest.approx(true, rel=1e-9)


def test_the_norm_of_counts_is_known_closely() -> None:
    """Words of unequal frequency: neither the Frobenius norm nor sums of rows are close."""
    rng = np.random.default_rng(4)
    X = (rng.random((600, 80)) < np.linspace(0.02, 0.9, 80)) * rng.integers(1, 4, (600, 80))
    true, bound = np.linalg.norm(X, 2), Features(sp.csr_array(X.astype(float)), CPU).norm_bound
    assert true <= bound <= 1.01 * true
    usual = (abs(X).sum(axis=0).max() * abs(X).sum(axis=1).max()) ** 0.5
    assert min(usual, np.linalg.norm(X)) > 1.1 * true


# ---- different columns


def columns() -> Any:
    """Columns 0 and 3 are equal, 1 is zero but for the last row, 2 is -0.0, 4 and 5 differ late."""
    X = np.random.default_rng(3).standard_normal((57, 6))
    X[:, 3], X[:, 5] = X[:, 0], X[:, 4]
    X[:, 1], X[:, 2] = 0.0, -0.0
    X[56, 1] = 1.0
    X[55, 5] += 1.0
    return X


@pytest.mark.parametrize("kind", ["float64", "csr", "fortran"])
@pytest.mark.parametrize(
    ("rows", "distinct"),
    [(range(57), 4), (range(56), 3), (range(55), 2), (range(55, 56), 3), ([], 0)],
    ids=["all", "all but one", "all but two", "one", "none"],
)
def test_distinct_columns_are_counted_on_the_rows_that_count(
    kind: str, rows: Any, distinct: int, tmp_path: Path
) -> None:
    at = np.zeros(57, bool)
    at[list(rows)] = True
    X = columns()
    if np.count_nonzero(at):
        kept = X[at] + 0.0
        assert np.unique(kept[:, kept.any(axis=0)], axis=1).shape[1] == distinct  # by NumPy
    assert Features(given(kind, X, tmp_path), CPU).distinct_columns(at) == distinct


def test_equal_entries_in_other_rows_are_other_columns() -> None:
    X = np.eye(57, 6)
    assert Features(X, CPU).distinct_columns(np.ones(57, bool)) == 6
    assert Features(np.abs(X[:, [0, 0, 1]]), CPU).distinct_columns(np.ones(57, bool)) == 2


@pytest.mark.parametrize("kind", ["float64", "csr"])
def test_hidden_columns_are_zero_on_the_training_rows_only(kind: str, tmp_path: Path) -> None:
    X = given(kind, columns(), tmp_path)
    assert has_hidden_columns(X, np.arange(56), CPU)  # column 1
    assert not has_hidden_columns(X, np.arange(57), CPU)  # column 2 is zero everywhere
    assert not has_hidden_columns(X, np.array([56]), CPU)


# ---- rounding


@pytest.mark.parametrize("kind", ["float64", "csr"])
@pytest.mark.parametrize("scale", [0.0, 8.0], ids=["plain", "scramble units"])
def test_rounding_of_products_is_within_its_bounds(kind: str, scale: float, tmp_path: Path) -> None:
    if np.finfo(LD).eps >= np.finfo(float).eps:
        pytest.skip("longdouble is no longer than double here")
    rng = np.random.default_rng(4)
    X = rng.standard_normal((400, 30)) * np.logspace(0, scale, 30)
    F = Features(given(kind, X, tmp_path), CPU)
    W, V = rng.standard_normal((30, 3)), rng.standard_normal((400, 3))
    off = float(np.linalg.norm((F.times(W) - X.astype(LD) @ W.astype(LD)).astype(float)))
    assert 0 < off <= F.times_rounding(W)
    assert F.times_rounding(W) <= 1e-12 * np.linalg.norm(X) * np.linalg.norm(W)
    wrong = (F.transpose_times(V) - X.astype(LD).T @ V.astype(LD)).astype(float)
    bounds = F.transpose_rounding() * np.linalg.norm(V)
    assert (np.linalg.norm(wrong, axis=1) <= bounds).all()
    assert (bounds <= 1e-12 * np.linalg.norm(X, axis=0) * np.linalg.norm(V)).all()


# ---- bytes


def test_a_chunk_is_a_small_part_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "CHUNK_BYTES", 1 << 20)
    assert chunk_bytes(0) == 1 << 20  # no budget
    assert chunk_bytes(1 << 30) == 1 << 20
    assert chunk_bytes(1600) == 100


def test_a_sparse_X_is_held_twice_and_a_dense_one_of_the_host_not_at_all() -> None:
    X = values()
    assert bytes_held(X, CPU, 0) == 0
    S = sp.csr_array(X)
    held = Features(S, CPU)
    arrays = [getattr(m, a) for m in (held._rows, held._transposed) for a in ("data", "indices")]
    assert sum(a.nbytes for a in arrays) <= bytes_held(S, CPU, 0) == 24 * S.nnz
