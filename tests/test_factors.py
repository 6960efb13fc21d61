"""Factors of P against dense algebra: C C^T = P^-1, and what a factor claims of ||E C||."""

import numpy as np
import pytest

from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.grams import DenseGram, LowRankGram, smallest_eigenvalue

CPU = CPUBackend()


def _gram(kind, rng):
    """Q, the Gram matrix made from it, and whether the factor is to be P^-1/2 itself."""
    Q = rng.standard_normal((60, 12)) * np.logspace(0, -3, 12)
    if kind == "low rank":
        Q = Q[:5]
        return Q, LowRankGram.of_rows(CPU, Q, 0.3)
    if kind == "pivoted cholesky":
        Q[:, 3], Q[:, 7] = 0.0, Q[:, 1] - 2 * Q[:, 5]
    return Q, DenseGram(CPU, Q.T @ Q, np.ones(Q.shape[1]), damped=False)


@pytest.mark.parametrize("kind", ["cholesky", "pivoted cholesky", "eigen", "low rank"])
def test_a_factor_inverts_P_and_bounds_what_errors_of_Q_become(kind):
    rng = np.random.default_rng(3)
    ridge = 0.3 if kind == "low rank" else 0.0
    Q, gram = _gram(kind, rng)
    factor = gram.factor(2.0, ridge, symmetric=kind == "eigen")
    assert factor.kind == kind
    C = factor.half(np.eye(factor.rank))
    P = 2.0 * Q.T @ Q + ridge * np.eye(12)
    # C^T P C is the projection on the kept subspace; in w it is the identity, or of lower rank.
    assert np.allclose(C.T @ P @ C, factor.project(np.eye(factor.rank)), atol=1e-7)
    assert factor.rank == (10 if kind == "pivoted cholesky" else 12)
    assert np.allclose(factor.half_T(np.eye(12)), C.T)
    w = factor.project(rng.standard_normal((factor.rank, 3)))
    assert np.allclose(factor.unhalf(factor.half(w)), w, atol=1e-6)
    for aim in (np.ones(12), np.linalg.svd(C)[0][:, 0]):  # the second is the worst direction
        E = rng.standard_normal((40, 1)) * aim[None, :]
        bound = factor.amplified(np.linalg.norm(E, axis=0))  # the worst direction reaches the bound
        assert np.linalg.norm(E @ C, 2) <= (1 + 1e-12) * bound


@pytest.mark.parametrize("condition", [1.0, 1e4, 1e9])
@pytest.mark.parametrize("repeated", [1, 30])
def test_the_provensmallest_eigenvalue_is_below_and_not_far(condition, repeated):
    rng = np.random.default_rng(int(condition) + repeated)
    values = np.geomspace(1.0, 1.0 / condition, 80)
    values[-repeated:] = 1.0 / condition
    V = np.linalg.qr(rng.standard_normal((80, 80)))[0]
    P = (V * values) @ V.T
    P = (P + P.T) / 2
    bound = smallest_eigenvalue(CPU, P, np.linalg.cholesky(P))
    smallest = np.linalg.eigvalsh(P)[0]
    assert smallest / 10 < bound < smallest


def test_an_eigenvalue_that_inverse_iteration_cannot_see_is_proven_all_the_same():
    """The start has no part of the smallest eigenvector, which only the second factor shows."""
    start = np.random.default_rng(0).standard_normal((50, 1))
    start /= np.linalg.norm(start)
    hidden = np.random.default_rng(1).standard_normal((50, 1))
    hidden -= start * (start.T @ hidden)
    hidden /= np.linalg.norm(hidden)
    P = np.eye(50) - (1 - 1e-12) * hidden @ hidden.T
    P = (P + P.T) / 2
    bound = smallest_eigenvalue(CPU, P, np.linalg.cholesky(P + 1e-13 * np.eye(50)))
    assert bound <= np.linalg.eigvalsh(P)[0] + 1e-14


def test_a_matrix_as_good_as_singular_claims_nothing():
    q = np.linspace(1, 2, 20)[:, None]
    P = q @ q.T + 1e-14 * np.eye(20)
    L = np.linalg.cholesky(P + 1e-13 * np.eye(20))
    assert smallest_eigenvalue(CPU, P, L) < 1e-200
