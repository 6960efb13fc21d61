"""Checks of whole arrays: the extent of their entries, which also tells whether all are finite."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph
from herta_gpu.plumbing.checks import check_rows, parse_bytes
from herta_gpu.plumbing.machine import num_threads

G = Graph.from_edges([[0], [1]], num_nodes=501)
KINDS = ("float16", "float32", "float64", ">f4", "longdouble", "int8", "uint8", "bool", "int64")


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_entry_is_that_of_long_doubles(kind: str) -> None:
    X = (50 * np.random.default_rng(0).standard_normal((501, 7))).astype(kind)
    assert check_rows("X", X, G).largest == np.abs(X.astype("longdouble")).max()
    assert check_rows("X", X[:, ::2], G).largest == np.abs(X[:, ::2].astype("longdouble")).max()
    assert check_rows("X", X[:, :0], G).largest == 0
    assert check_rows("X", np.zeros_like(X), G).largest == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if np.dtype(kind).kind == "f"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_entry_that_is_not_finite_is_found(kind: str, bad: float) -> None:
    X = np.ones((501, 7), dtype=kind)
    X[500, 3] = bad
    with pytest.raises(ValueError, match="X holds NaN or infinity"):
        check_rows("X", X, G)


def test_large_arrays_are_looked_at_to_their_end() -> None:
    """More than one piece, the last of them short."""
    n = 100_003
    g = Graph.from_edges([[0], [1]], num_nodes=n)
    X = np.zeros((n, 16), dtype=np.float16)
    X[n - 1, 15] = -3.5
    assert check_rows("X", X, g).largest == 3.5


@pytest.mark.parametrize("kind", ["float64", ">f8", "longdouble"])
def test_the_least_entry_is_that_of_long_doubles(kind: str) -> None:
    X = (10.0 ** np.random.default_rng(0).uniform(-200, 200, (501, 7))).astype(kind)
    X[::3] = 0
    X[::2] *= -1
    assert check_rows("X", X, G).least == min(np.abs(X[X != 0]).min().astype(float), 1.0)
    X[5, 5] = 5e-324
    assert check_rows("X", X, G).least == 5e-324
    assert check_rows("X", np.zeros_like(X), G).least >= 1


@pytest.mark.parametrize("make", [np.asarray, sp.csr_array])
@pytest.mark.parametrize("ridge", [0.0, 1.0])
def test_a_column_whose_squares_vanish_is_named(make, ridge: float) -> None:
    """Cause: a column below 1e-154 was taken for an empty one, and dropped without a word."""
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((501, 4)), rng.standard_normal(501)
    X[:, 2] *= 1e-170
    model = HERTA(ridge=ridge, device="cpu-scipy")
    with pytest.raises(ValueError, match=r"Column 2 of X has no entry above .*e-170"):
        model.fit(G, make(X), y)
    X[0, 2] = 1e-90  # other entries may be as small as they like
    model.fit(G, make(X), y)
    assert model.status_ == "certified"
    assert model.W_[2, 0] != 0


@pytest.mark.parametrize(
    ("text", "value"), [("8GB", 8 * 2**30), ("512 MB", 2**29), ("1.5k", 1536), (77, 77), ("9", 9)]
)
def test_memory_budgets(text, value):
    assert parse_bytes(text) == value


def test_bad_thread_counts(monkeypatch):
    monkeypatch.setenv("HERTA_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="HERTA_NUM_THREADS"):
        num_threads()
