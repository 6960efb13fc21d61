"""The whole of Algorithm 1 on real data, against closed forms and independent optimisers."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

from herta_gpu import HERTA
from herta_gpu.datasets import digits
from tests.conftest import shared


@pytest.mark.parametrize("lam", [1.0, 20.0])
@pytest.mark.parametrize(("optimizer", "steps"), [("cg", 10), ("gd", 15)])
@pytest.mark.parametrize("name", ["cora", "pubmed"])
def test_planetoid_reaches_the_closed_form(name, optimizer, steps, lam):
    data = shared(name)
    model = HERTA(lam=lam, optimizer=optimizer, strategy="herta")
    model.fit(data.graph, data.X, data.y, train=data.train)
    assert model.status_ == "certified"
    assert len(model.history_) - 1 <= steps
    assert model.history_[-1]["loss"] == pytest.approx(data.optimum(lam), rel=1e-6)
    independent = 0.5 * ((data.A(lam) @ model.W_ - data.Y) ** 2).sum()
    assert independent <= data.optimum(lam) * (1 + 1e-6)


@pytest.mark.parametrize("lam", [1.0])  # lam 20: bench/optimum.py; the SVD takes half a minute
def test_citeseer_with_fewer_rows_than_features(lam):
    data = shared("citeseer")
    assert data.train.size < data.X.shape[1]
    model = HERTA(lam=lam, strategy="herta").fit(data.graph, data.X, data.y, train=data.train)
    assert model.status_ == "converged"
    assert "fewer train rows than features" in model.certificate_.note
    assert len(model.history_) - 1 <= 15
    independent = 0.5 * ((data.A(lam) @ model.W_ - data.Y) ** 2).sum()
    assert independent <= data.optimum(lam) * (1 + 1e-6)
    slow = HERTA(lam=lam, strategy="herta", optimizer="gd", max_iter=15)
    slow.fit(data.graph, data.X, data.y, train=data.train)
    # The errors of its solves must not keep it from noticing that it has converged.
    assert slow.status_ == "converged"
    assert slow.history_[-1]["loss"] <= data.optimum(lam) * (1 + 1e-6)


def test_cross_entropy_on_pubmed_matches_a_long_independent_lbfgs():
    data = shared("pubmed")
    A, Y = data.A(1.0), data.Y
    R = np.linalg.qr(A, mode="r")
    whitened = np.linalg.solve(R.T, A.T).T

    def objective(w):
        F = whitened @ w.reshape(-1, 3)
        top = F.max(axis=1, keepdims=True)
        S = np.exp(F - top)
        total = S.sum(axis=1, keepdims=True)
        return np.log(total).sum() + (top - F)[Y > 0].sum(), (whitened.T @ (S / total - Y)).ravel()

    options = {"maxiter": 5000, "maxfun": 5000, "ftol": 1e-14, "gtol": 1e-8, "maxcor": 50}
    best = scipy.optimize.minimize(
        objective, np.zeros(1500), jac=True, method="L-BFGS-B", options=options
    )
    model = HERTA(loss="ce", optimizer="lbfgs", strategy="herta", max_iter=120)
    model.fit(data.graph, data.X, data.y, train=data.train)
    assert model.status_ == "converged"
    assert model.history_[-1]["loss"] == pytest.approx(best.fun, rel=1e-6)


def test_digits_learns():
    data = digits()
    model = HERTA(lam=20.0, ridge=1e-3).fit(data.graph, data.X, data.y, data.split["train"])
    assert model.status_ == "certified"
    assert model.score(data.graph, data.X, data.y, data.split["test"]) > 0.95
