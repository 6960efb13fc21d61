"""Checks of whole arrays: the largest entry, which also tells whether all are finite."""

from __future__ import annotations

import numpy as np
import pytest

from herta_gpu import Graph
from herta_gpu.plumbing.checks import check_rows

G = Graph.from_edges([[0], [1]], num_nodes=501)
KINDS = ("float16", "float32", "float64", ">f4", "longdouble", "int8", "uint8", "bool", "int64")


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_entry_is_that_of_long_doubles(kind: str) -> None:
    X = (50 * np.random.default_rng(0).standard_normal((501, 7))).astype(kind)
    assert check_rows("X", X, G) == np.abs(X.astype("longdouble")).max()
    assert check_rows("X", X[:, ::2], G) == np.abs(X[:, ::2].astype("longdouble")).max()
    assert check_rows("X", X[:, :0], G) == 0
    assert check_rows("X", np.zeros_like(X), G) == 0


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
    assert check_rows("X", X, g) == 3.5
