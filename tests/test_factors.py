"""Factors of P against dense algebra: C C^T = P^-1, and what a factor claims of ||E C||."""

import numpy as np
import pytest

from herta_gpu.backends import get_backend
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.factors import (
    Cholesky,
    DenseGram,
    Eigen,
    LowRankGram,
    safe_cholesky,
    smallest_eigenvalue,
)
from herta_gpu.optimizers import factor_of

CPU = CPUBackend()


def _gram(kind, rng):
    """Q, the Gram matrix made from it, and whether the factor is to be P^-1/2 itself."""
    Q = rng.standard_normal((60, 12)) * np.logspace(0, -3, 12)
    if kind == "low rank":
        Q = Q[:5]
        return Q, LowRankGram(CPU, Q, 0.3)
    if kind == "pivoted cholesky":
        Q[:, 3], Q[:, 7] = 0.0, Q[:, 1] - 2 * Q[:, 5]
    return Q, DenseGram(CPU, Q.T @ Q, np.ones(Q.shape[1]), damped=False)


@pytest.mark.parametrize("kind", ["cholesky", "pivoted cholesky", "eigen", "low rank"])
def test_a_factor_inverts_P_and_bounds_what_errors_of_Q_become(kind):
    rng = np.random.default_rng(3)
    ridge = 0.3 if kind == "low rank" else 0.0
    Q, gram = _gram(kind, rng)
    factor = gram.factor(2.0, ridge, symmetric=kind == "eigen")
    assert isinstance(factor, Cholesky if "cholesky" in kind else Eigen)
    assert (getattr(factor, "J", None) is not None) == (kind == "pivoted cholesky")
    C = factor.to_weights(np.eye(factor.rank))
    P = 2.0 * Q.T @ Q + ridge * np.eye(12)
    # C^T P C is the projection on the kept subspace; in w it is the identity, or of lower rank.
    assert np.allclose(C.T @ P @ C, factor.project(np.eye(factor.rank)), atol=1e-7)
    assert factor.rank == (10 if kind == "pivoted cholesky" else 12)
    assert np.allclose(factor.to_gradient(np.eye(12)), C.T)
    w = factor.project(rng.standard_normal((factor.rank, 3)))
    assert np.allclose(factor.from_weights(factor.to_weights(w)), w, atol=1e-6)
    for aim in (np.ones(12), np.linalg.svd(C)[0][:, 0]):  # the second is the worst direction
        E = rng.standard_normal((40, 1)) * aim[None, :]
        bound = factor.product_bound(
            np.linalg.norm(E, axis=0)
        )  # the worst direction reaches the bound
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


@pytest.mark.parametrize("at", [(0, 0), (3, 3), (5, 5), (4, 1), (5, 0)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "device", ["cpu-scipy", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_numbers_that_are_none_have_no_factor_on_any_backend(device, bad, at):
    backend = get_backend(device)
    P = 2 * np.eye(6)
    P[at] = P[at[::-1]] = bad
    assert backend.cholesky(backend.asarray(P)) is None
    assert safe_cholesky(backend, backend.asarray(P)) is None
    assert safe_cholesky(backend, backend.asarray(P), first=1.0, proven=True) is None
    assert backend.cholesky(backend.asarray(2 * np.eye(6))) is not None


@pytest.mark.parametrize("lowest", [1e-3, 0.0, -1e-15, -1e-6])
@pytest.mark.parametrize("proven", [True, False])
def test_a_lifted_factor_says_what_was_added_and_proves_what_it_claims(lowest, proven):
    V = np.linalg.qr(np.random.default_rng(1).standard_normal((30, 30)))[0]
    P = (V * np.append(lowest, np.geomspace(1e-2, 1.0, 29))) @ V.T
    P = (P + P.T) / 2
    given = P.copy()
    L, added, smallest = safe_cholesky(CPU, P, proven=proven)
    np.testing.assert_allclose(L @ L.T, given + added * np.eye(30), atol=1e-14)
    np.testing.assert_allclose(P, given + added * np.eye(30), atol=1e-15)
    if lowest or proven:  # rounding decides whether a matrix with an eigenvalue 0 has a factor
        assert (added > 0) == (lowest <= 0)
    assert added <= 5 * max(-lowest, 1e-12)
    assert (0 < smallest <= np.linalg.eigvalsh(P)[0]) if proven else smallest == 0


def test_no_lift_goes_on_for_ever():
    """A matrix that no lift below its trace mends is none that a Gram matrix can be."""
    assert safe_cholesky(CPU, np.array([[1.0, 9.0], [9.0, 1.0]])) is None
    assert safe_cholesky(CPU, np.zeros((2, 2))) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gram_matrix_that_is_not_finite_ends_in_a_sentence(bad):
    """It was lifted for ever; and a Hessian of NaN had a factor that was called exact."""
    QtQ = np.eye(4)
    QtQ[2, 1] = QtQ[1, 2] = QtQ[2, 2] = bad
    for ridge, symmetric in ((0.1, False), (0.1, True), (0.0, False), (0.0, True)):
        with pytest.raises(ValueError, match=r"beyond the range of float64.*about 1\.$"):
            DenseGram(CPU, QtQ, np.ones(4), damped=False).factor(1.0, ridge, symmetric)
    QtQ[2, 2] = 1.0
    with pytest.raises(ValueError, match=r"beyond the range of float64.*about 1\.$"):
        DenseGram(CPU, QtQ, np.ones(4), damped=False).factor(1.0, 0.1, False)
    factor = factor_of(CPU, QtQ.copy(), 0.1)
    assert np.isfinite(factor.to_weights(np.ones((4, 1)))).all()
