"""Attention, PageRank and matrices on the device: what the CPU gives."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import (
    HERTA,
    Attention,
    AttentionSolver,
    Power,
    PseudoHuber,
    SDDSolver,
    personalized_pagerank,
    similarity,
)
from tests.conftest import problem, random_graph

pytestmark = [pytest.mark.gpu, pytest.mark.once]


@pytest.mark.parametrize("penalty", [PseudoHuber(0.3), Power(0.3, p=1.2)])
def test_the_minimum_of_the_energy(backend: Any, penalty: Any) -> None:
    g, F = (
        random_graph(60, 200, weighted=True).reordered("rcm"),
        np.random.default_rng(0).random((60, 3)),
    )
    here, there = (AttentionSolver(g, 5.0, penalty, 1e-9, device=d) for d in ("cpu", "cuda"))
    np.testing.assert_allclose(there.solve(F), here.solve(F), atol=1e-8)
    assert there.info_ is not None
    assert there.info_.status == "converged"
    Z = there.solve(backend.asarray(F))
    assert not isinstance(Z, np.ndarray)
    np.testing.assert_allclose(there.weights(Z), here.weights(here.solve(F)), atol=1e-7)


def test_rounds_of_attention(backend: Any) -> None:
    g, X, y, train = problem(n=80)
    found = []
    for device in ("cpu", "cuda"):
        model = Attention(HERTA(lam=3.0, ridge=0.5, dtype="float64", device=device), rounds=2)
        model.fit(g, X, y, train)
        found.append([model.edge_weight_, model.transform(g, X), model.error_])
    for here, there in zip(*found, strict=True):
        np.testing.assert_allclose(there, here, rtol=1e-4, atol=1e-6)


def test_pagerank_and_matrices(backend: Any) -> None:
    cupyx = pytest.importorskip("cupyx.scipy.sparse") and sys.modules["cupyx"]
    g = random_graph(60, 200, weighted=True)
    seeds = [[0], [3, 5], {7: 2.0}]
    here, there = (personalized_pagerank(g, seeds, device=d) for d in ("cpu", "cuda"))
    assert (abs(here.scores - there.scores) <= here.error + there.error).all()
    assert there.error.max() <= 1e-9
    M = sp.csr_array(2 * sp.eye_array(60) + g.to_csr())
    B = np.random.default_rng(0).standard_normal((60, 2))
    solver = SDDSolver(M, tol=1e-10, device="cuda")
    np.testing.assert_allclose(M @ solver.solve(B), B, atol=1e-8)
    there_M = cupyx.scipy.sparse.csr_matrix(M)
    Z = SDDSolver(there_M, tol=1e-10, device="cuda").solve(backend.asarray(B))
    assert not isinstance(Z, np.ndarray)
    np.testing.assert_allclose((there_M @ Z).get(), B, atol=1e-8)
    words = sp.random_array((60, 9), density=0.3, rng=0).tocsr()
    found = similarity(g, cupyx.scipy.sparse.csr_matrix(words))
    np.testing.assert_array_equal(found, similarity(g, words))
