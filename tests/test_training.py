"""The loop of Algorithm 1: its steps, its limits and how it ends."""

from __future__ import annotations

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.preconditioner import Preconditioner
from tests.conftest import closed_form, dense_H, minimum, problem


@pytest.mark.parametrize("strategy", ["direct", "herta"])
def test_there_are_never_more_steps_than_max_iter(strategy):
    g, X, y, train = problem()
    model = HERTA(loss="ce", optimizer="gd", ridge=1e-6, max_iter=3, tol=1e-300, strategy=strategy)
    model.fit(g, X, y, train=train)
    assert model.status_ == "max_iter"
    assert len(model.history_) == 3 + 1  # and the start
    # Steps on a stored A cost no solve and have a limit of their own.
    least, most = (10, 20 * 3 + 1) if strategy == "direct" else (0, 0)
    assert least <= len(model.warm_history_) <= most


def test_tolerances_below_rounding_stagnate():
    g, X, y, train = problem()
    model = HERTA(tol=1e-300, dtype="float64").fit(g, X, y, train=train)
    assert model.status_ == "stagnated"
    assert len(model.history_) < 30


def test_a_learning_rate_that_is_too_large_warns_and_keeps_the_last_good_point():
    g, X, y, train = problem()
    model = HERTA(optimizer="gd", learning_rate=1e6, precondition=False)
    with pytest.warns(UserWarning, match="lower learning_rate"):
        model.fit(g, X, y, train=train)
    assert model.status_ == "diverged"
    assert np.isfinite(model.W_).all()


def test_a_step_from_the_spectral_estimate():
    g, X, y, train = problem()
    model = HERTA(optimizer="gd", learning_rate="spectral", strategy="herta").fit(g, X, y, train)
    assert model.status_ == "certified"


def test_standard_training_is_slow_on_ill_conditioned_features():
    """What the paper is about: the same optimizer, with and without the preconditioner."""
    g, X, y, train = problem()
    X = X * np.logspace(0, -3, 8)
    _, best = closed_form(g, X, np.eye(3)[y[train]], train, 1.0)
    fast = HERTA(optimizer="gd", strategy="herta", max_iter=100).fit(g, X, y, train=train)
    slow = HERTA(optimizer="gd", precondition=False, max_iter=100).fit(g, X, y, train=train)
    assert len(fast.history_) <= 5
    assert fast.history_[-1]["loss"] <= best * (1 + 1e-6)
    assert slow.history_[-1]["loss"] > best * (1 + 1e-4)
    assert slow.status_ == "max_iter"
    assert slow.certificate_.kind == "none"


@pytest.mark.parametrize("optimizer", ["gd", "momentum", "adam", "cg", "lbfgs"])
@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_every_optimizer_reaches_the_optimum(optimizer, loss):
    g, X, y, train = problem()
    model = HERTA(
        lam=5.0, loss=loss, optimizer=optimizer, ridge=1.0, strategy="herta", max_iter=600, tol=1e-5
    ).fit(g, X, y, train=train)
    A = np.linalg.solve(dense_H(g, 5.0), X)[train]
    best = minimum(A, np.eye(3)[y[train]], loss, ridge=1.0)
    assert model.status_ == "certified"
    assert model.history_[-1]["loss"] <= best * (1 + 1e-5)


@pytest.mark.parametrize("strategy", ["herta", "direct"])
def test_training_starts_from_what_Q_says_of_Z(strategy, monkeypatch):
    g, X, y, train = problem(n=2000)
    fit = HERTA(lam=20.0, strategy=strategy)
    spent = [fit.fit(g, X, y, train).history_[0]["inner_iterations"]]
    monkeypatch.setattr(Preconditioner, "for_training", lambda self, backend: self)
    spent.append(fit.fit(g, X, y, train).history_[0]["inner_iterations"])
    assert spent[0] < 0.8 * spent[1]
