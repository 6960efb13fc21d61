"""Several lam from one sequence of products, against dense algebra."""

from __future__ import annotations

import numpy as np
import pytest

from herta_gpu import Graph
from herta_gpu.backends import get_backend
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.more.sweep import Series, chebyshev_basis, inverse_rows
from tests.conftest import dense_H, random_graph

LAMS = [0.0, 0.3, 1.0, 20.0, 300.0]


@pytest.mark.parametrize("device", ["cpu", "cpu-scipy"])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_lam_is_within_its_bound(device, weighted):
    g = random_graph(150, 400, 1, weighted)
    H = RegularizedLaplacian(g, 1.0, get_backend(device), "float64")
    B = np.random.default_rng(0).standard_normal((150, 5))
    for tol in (1e-2, 1e-6, 1e-11):
        at = np.array([3, 140, 7])
        for lam, Z in zip(LAMS, inverse_rows(H, LAMS, B.copy(), at, tol)):
            true = np.linalg.solve(dense_H(g, lam), B)
            size = np.linalg.norm(B, axis=0)
            series = Series.of(lam, g.lambda_max_bound, tol)
            assert series.truncation <= tol
            bound = (series.truncation + series.rounding(H, "float64", 5)) * size
            assert (np.abs(Z - true[at]) <= bound).all()
            whole = inverse_rows(H, [lam], B.copy(), None, tol)[0]
            assert (np.linalg.norm(whole - true, axis=0) <= bound).all()


def test_the_truncation_bound_is_nearly_reached_on_some_graph():
    """A series that is one step shorter misses the bound of the next: it is no loose guess."""
    g = random_graph(60, 200, 4)
    H = RegularizedLaplacian(g, 1.0, get_backend("cpu"), "float64")
    true = np.linalg.inv(dense_H(g, 50.0))
    Z = inverse_rows(H, [50.0], np.eye(60), None, 1e-3)[0]
    off = np.linalg.norm(Z - true, 2)
    assert 0.02e-3 < off <= 1e-3


def test_float32_stays_within_the_rounding_bound():
    g = random_graph(200, 900, 2)
    H = RegularizedLaplacian(g, 1.0, get_backend("cpu"), "float32")
    B = np.random.default_rng(1).standard_normal((200, 40)).astype("float32")
    for lam, Z in zip(LAMS, inverse_rows(H, LAMS, B.copy(), None, 1e-6)):
        true = np.linalg.solve(dense_H(g, lam), B.astype(float))
        series = Series.of(lam, g.lambda_max_bound, 1e-6)
        bound = series.truncation + series.rounding(H, "float32", 40)
        assert (np.linalg.norm(Z - true, axis=0) <= bound * np.linalg.norm(B, axis=0)).all()
        assert bound < 0.5


def test_one_sequence_of_products_serves_all():
    g = random_graph(100, 300, 3)
    H = RegularizedLaplacian(g, 1.0, get_backend("cpu"), "float64")
    count, real = [], H.backend.chebyshev_step
    object.__setattr__(H.backend, "chebyshev_step", lambda *a: (count.append(1), real(*a)))
    try:
        inverse_rows(H, LAMS, np.eye(100), None, 1e-5)
    finally:
        object.__delattr__(H.backend, "chebyshev_step")
    assert len(count) == max(Series.of(lam, g.lambda_max_bound, 1e-5).degree for lam in LAMS)


def test_the_bits_of_a_column_do_not_depend_on_the_others():
    g = random_graph(80, 200, 5)
    H = RegularizedLaplacian(g, 1.0, get_backend("cpu"), "float32")
    B = np.random.default_rng(0).standard_normal((80, 6)).astype("float32")
    other = B.copy()
    other[:, 3:] *= 1e6
    first, second = (inverse_rows(H, LAMS, b.copy(), None, 1e-6) for b in (B, other))
    assert (first[:, :, :3] == second[:, :, :3]).all()


def test_a_graph_without_edges_is_the_identity():
    g = Graph.from_edges(np.zeros((2, 0), dtype=int), num_nodes=4)
    H = RegularizedLaplacian(g, 1.0, get_backend("cpu"), "float64")
    assert (inverse_rows(H, [0.0, 9.0], np.eye(4), None, 1e-9) == np.eye(4)).all()
    assert len(list(chebyshev_basis(H, np.eye(4), 0))) == 1
