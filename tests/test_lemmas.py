"""Each lemma of the paper has a test, named after it, that fails if its claim is broken.

Those of Algorithm 2 (Johnson-Lindenstrauss, Lemma 5.3) are in test_sparsifier.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.linalg

from herta_gpu import HERTA, Graph, SDDSolver
from herta_gpu.backends import get_backend
from tests.conftest import dense_H, random_graph


def test_definition_linear_solver():
    """Definition 5.1: ||S(u) - H^-1 u||_H <= eps ||H^-1 u||_H, eigenvectors u included."""
    g, lam = random_graph(120, 300), 20.0
    H = dense_H(g, lam)
    _, vectors = np.linalg.eigh(H)
    U = np.hstack([vectors[:, ::10], np.random.default_rng(0).standard_normal((120, 5))])
    exact = np.linalg.solve(H, U)
    for method in ("cg", "chebyshev"):
        for eps in (0.5, 0.1, 1e-4):
            E = SDDSolver(g, lam, method=method, tol=eps).solve(U) - exact
            error = np.sqrt((E * (H @ E)).sum(axis=0))
            assert (error <= eps * np.sqrt((exact * (H @ exact)).sum(axis=0))).all()


def test_lemma_srht():
    """Lemma A.2: Q_tilde^T Q_tilde is within beta of Q^T Q, even if few rows hold all the mass."""
    rng = np.random.default_rng(0)
    n, d = 4096, 10
    Q = rng.standard_normal((n, d))
    Q[:d] += 1000 * np.eye(d)  # uniform row sampling alone would miss these
    s = 2000
    Q_tilde = get_backend("cpu").srht(Q, s, 1)
    values = scipy.linalg.eigvalsh(Q_tilde.T @ Q_tilde, Q.T @ Q)
    assert Q_tilde.shape == (s, d)
    assert values[0] > 0.75
    assert values[-1] < 1.25
    plain = Q[rng.choice(n, s, replace=False)] * np.sqrt(n / s)
    off = scipy.linalg.eigvalsh(plain.T @ plain, Q.T @ Q)
    assert off[0] < 0.1 or off[-1] > 1.9


def preconditioned_hessian(model: HERTA, g: Graph, X, lam: float, train, monkey_factor):
    """Eigenvalues of P^-1/2 T P^-1/2 by dense algebra from the factor that fit used."""
    A = np.linalg.solve(dense_H(g, lam), X)[train]
    C = monkey_factor.to_weights(np.eye(X.shape[1]))
    return np.linalg.eigvalsh(C.T @ (A.T @ A) @ C)


@pytest.mark.parametrize("lam", [1.0, 20.0])
@pytest.mark.parametrize("masked", [False, True])
def test_lemma_preconditioner(captured, lam, masked):
    """Lemma 5.4: P within 1/2 of the Hessian; here inside the interval that fit states."""
    g = random_graph(300, 1200, seed=4)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((300, 20)) * np.logspace(0, -3, 20)
    train = np.sort(rng.choice(300, 200, replace=False)) if masked else np.arange(300)
    model = HERTA(lam=lam, strategy="herta").fit(g, X, rng.integers(0, 3, 300), train=train)
    values = preconditioned_hessian(model, g, X, lam, train, captured["P"].factor)
    assert model.spectrum_.a <= values[0]
    assert values[-1] <= model.spectrum_.b
    assert 0.5 < values[0] <= values[-1] < 1.5
    if not masked:
        assert model.spectrum_.kind == "spectral-proven"
        assert model.spectrum_.kappa <= (1.11 / 0.89) ** 2


def test_lemma_preconditioner_on_a_sampled_graph_and_a_sketch(captured):
    """Every line of Algorithms 1 and 2: L_tilde, Q, SRHT, P on a dense graph."""
    g = random_graph(500, 60_000, seed=5)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((500, 10)) * np.logspace(0, -2, 10)
    model = HERTA(lam=1.0, strategy="herta", sparsify=25_000, sketch=400, optimizer="gd")
    model.fit(g, X, rng.integers(0, 3, 500))
    assert model.plan_.n_samples == 25_000
    assert model.plan_.sketch_rows == 400
    values = preconditioned_hessian(model, g, X, 1.0, np.arange(500), captured["P"].factor)
    assert values[0] >= 0.5
    assert values[-1] <= 1.5
    assert model.spectrum_.a <= values[0]
    assert values[-1] <= model.spectrum_.b
    assert model.status_ == "certified"


def test_lemma_well_conditioned_hessian(captured):
    """Lemma 5.5 (corrected): P within c0 of the Hessian gives kappa <= (1 + c0)/(1 - c0), however
    ill-conditioned X is."""
    g = random_graph(400, 1500, seed=6)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((400, 12)) @ np.diag(np.logspace(0, -4, 12))
    model = HERTA(lam=20.0, strategy="herta", dtype="float64").fit(g, X, rng.standard_normal(400))
    A = np.linalg.solve(dense_H(g, 20.0), X)
    assert np.linalg.cond(A.T @ A) > 1e6
    values = preconditioned_hessian(model, g, X, 20.0, np.arange(400), captured["P"].factor)
    c0 = 0.5  # what Lemma 5.4 promises of P; a Chebyshev error of 0.1 does better
    assert values[-1] / values[0] <= (1 + c0) / (1 - c0)
    assert values[-1] / values[0] <= (1.1 / 0.9) ** 2
    assert values[-1] / values[0] <= model.spectrum_.kappa < 1.6


@pytest.mark.parametrize("gamma_tol", [1e-2, 1e-4])
def test_lemma_convergence(gamma_tol):
    """Lemma 5.2: with inexact solves, gd contracts the gap at least by 1 - 1/(9 kappa) a step."""
    g = random_graph(300, 900, seed=7)
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((300, 6)), rng.standard_normal((300, 2))
    model = HERTA(lam=5.0, strategy="herta", optimizer="gd", sketch=40, tol=gamma_tol, max_iter=25)
    model.fit(g, X, Y)
    A = np.linalg.solve(dense_H(g, 5.0), X)
    best = 0.5 * ((A @ np.linalg.lstsq(A, Y, rcond=None)[0] - Y) ** 2).sum()
    gaps = np.array([h["loss"] - best for h in model.history_])
    rate = 1 - 1 / (9 * model.spectrum_.kappa)
    for before, after in itertools.pairwise(gaps):
        assert after <= rate * before + 1e-7 * best
    assert gaps[-1] <= gamma_tol * best


def test_theorem_main_steps_do_not_grow_with_the_condition_number():
    """Theorem 5.1: the number of outer steps is free of kappa(X) and of lam."""
    g = random_graph(300, 1000, seed=8)
    rng = np.random.default_rng(0)
    Y, base = rng.standard_normal((300, 2)), rng.standard_normal((300, 10))
    for lam in (1.0, 20.0, 200.0):
        for decades in (0, 2, 4):
            X = base * np.logspace(0, -decades, 10)
            model = HERTA(lam=lam, strategy="herta", dtype="float64").fit(g, X, Y)
            assert model.status_ == "certified"
            assert len(model.history_) - 1 <= 5
