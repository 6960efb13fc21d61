"""The loop of Algorithm 1: its steps, its limits and how it ends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.preconditioner import Preconditioner
from tests.conftest import closed_form, dense_H, minimum, problem, random_graph


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


def test_training_starts_from_what_Q_says_of_Z(monkeypatch):
    g, X, y, train = problem(n=2000)
    fit = HERTA(lam=20.0, strategy="herta")
    spent = [fit.fit(g, X, y, train).history_[0]["inner_iterations"]]
    monkeypatch.setattr(Preconditioner, "guess", lambda self, backend, at: None)
    spent.append(fit.fit(g, X, y, train).history_[0]["inner_iterations"])
    assert spent[0] < 0.8 * spent[1]


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_the_objective_never_grows_under_an_exact_line_search(loss):
    g, X, y, train = problem()
    model = HERTA(lam=5.0, loss=loss, ridge=0.1, strategy="herta", optimizer="gd", sketch=32)
    model.fit(g, X, y, train)
    losses = [entry["loss"] for entry in model.history_]
    assert len(losses) > 2
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(losses))


@pytest.mark.parametrize("max_iter", [1, 2, 5])
def test_more_steps_begin_with_the_same_ones(max_iter):
    g, X, y, train = problem()
    options = {"loss": "ce", "ridge": 0.1, "strategy": "herta", "tol": 1e-12, "random_state": 3}
    short = HERTA(**options, max_iter=max_iter).fit(g, X, y, train)
    long = HERTA(**options, max_iter=8).fit(g, X, y, train)
    assert short.status_ == "max_iter"
    assert len(short.history_) == max_iter + 1
    assert [h["loss"] for h in short.history_] == [h["loss"] for h in long.history_][: max_iter + 1]


def test_entries_of_the_histories_tell_what_they_are():
    g, X, y, train = problem()
    seen = []
    model = HERTA(loss="ce", ridge=0.1, strategy="direct")
    model.fit(g, X, y, train, callback=seen.append)
    assert seen == model.warm_history_ + model.history_
    assert all(entry["warm"] for entry in model.warm_history_)
    assert not any(entry["warm"] for entry in model.history_)
    for history in (model.warm_history_, model.history_):
        assert [entry["step"] for entry in history] == list(range(len(history)))
        assert sorted(entry["seconds"] for entry in history) == [e["seconds"] for e in history]
    # A model that stands in for the true one certifies nothing.
    assert {entry["certificate"] for entry in model.warm_history_} == {np.inf}
    assert model.history_[-1]["certificate"] == model.certificate_.value <= 1e-6


def test_a_warm_start_on_a_stored_A_leaves_next_to_nothing_to_do():
    g, X, y, train = problem()
    options = {"lam": 5.0, "loss": "ce", "ridge": 0.1}
    direct = HERTA(**options, strategy="direct").fit(g, X, y, train)
    herta = HERTA(**options, strategy="herta").fit(g, X, y, train)
    assert not herta.warm_history_
    assert len(direct.history_) <= 2 < len(herta.history_)
    assert direct.history_[0]["loss"] == pytest.approx(herta.history_[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize("strategy", ["herta", "direct"])
def test_the_last_entry_is_the_objective_of_W(strategy):
    g, X, y, train = problem()
    model = HERTA(lam=5.0, ridge=0.3, dtype="float64", strategy=strategy).fit(g, X, y, train)
    F = np.linalg.solve(dense_H(g, 5.0), X @ model.W_)[train]
    E = F - np.eye(3)[y[train]]
    objective = 0.5 * (E**2).sum() + 0.15 * (model.W_**2).sum()
    last = model.history_[-1]
    assert abs(last["loss"] - objective) <= last["loss_error"]
    # Stored rows alone know the objective a little less well than solves do.
    assert last["loss"] == pytest.approx(objective, rel=1e-9 if strategy == "herta" else 1e-6)
    A = np.linalg.solve(dense_H(g, 5.0), X)[train]
    size = np.linalg.norm(A.T @ E + 0.3 * model.W_)
    assert model.history_[-1]["grad_norm"] == pytest.approx(size, abs=1e-3)


def test_each_way_to_end_has_its_status():
    g, X, y, train = problem()
    ends = {
        "certified": HERTA(ridge=0.1),
        "certified-reduced": HERTA(lam=20.0),
        "converged": HERTA(lam=5.0, loss="ce", max_iter=300),
        "max_iter": HERTA(optimizer="adam", max_iter=2, precondition=False),
        "stagnated": HERTA(tol=1e-300, dtype="float64"),
    }
    for status, model in ends.items():
        mixed = np.hstack([X, X[:, :3] @ np.arange(1.0, 7.0).reshape(3, 2)])
        features = mixed if status == "certified-reduced" else X
        assert model.fit(g, features, y, train).status_ == status
        proven = model.certificate_.kind != "none" and model.certificate_.value <= model.tol
        assert proven == status.startswith("certified")


@pytest.mark.parametrize(
    ("loss", "ridge", "fit_intercept"), [("ce", 0.0, False), ("ce", 0.1, True), ("mse", 0.1, True)]
)
def test_one_class_is_trivially_optimal_and_says_so(loss, ridge, fit_intercept):
    """Cause: an optimum of 0 has no relative gap, and such fits ended "stagnated"."""
    graph, X, _, train = problem(60, 5)
    y = np.full(60, 7)
    model = HERTA(loss=loss, ridge=ridge, fit_intercept=fit_intercept).fit(graph, X, y, train)
    assert (model.status_, model.certificate_.gap, model.certificate_.value) == ("certified", 0, 0)
    assert "nothing to learn" in str(model.certificate_)
    assert len(model.history_) == 1
    assert (model.predict(graph, X) == 7).all()
    assert (model.W_ == 0).all()


def test_equal_labels_and_an_intercept_have_nothing_to_learn():
    graph, X, _, train = problem(60, 5)
    y = np.tile([1, 0], (60, 1))
    model = HERTA(loss="bce", ridge=0.1, fit_intercept=True).fit(graph, X, y, train)
    assert model.status_ == "converged"  # constants of 60 leave a loss of about 1e-25
    assert model.history_[-1]["loss"] <= model.certificate_.gap < 1e-20
    assert (model.predict(graph, X) == [1, 0]).all()
    flat = HERTA(ridge=0.1, fit_intercept=True).fit(graph, X, np.full(60, 0.3), train, loo=True)
    np.testing.assert_allclose(flat.loo_, 0.3, rtol=1e-12)
    np.testing.assert_allclose(flat.predict(graph, X), 0.3, rtol=1e-6)  # float32


@pytest.mark.parametrize("seed", [35, 61, 74])
def test_separable_classes_and_an_intercept_do_not_diverge(seed):
    """Cause: constants of outputs far from 0 were not found, and the loss seemed to explode."""
    rng = np.random.default_rng(seed)
    graph, X = random_graph(45, 120, seed), rng.standard_normal((45, 20)) * 10.0 ** (seed % 5 - 2)
    Z = np.linalg.solve(dense_H(graph, 20.0), X)
    scores = Z @ rng.standard_normal((20, 3)) + Z.std()
    for loss, y in (("ce", scores.argmax(axis=1)), ("bce", (scores > 0).astype(int))):
        for optimizer in ("cg", "lbfgs"):
            params = {"loss": loss, "optimizer": optimizer, "strategy": ("auto", "herta")[seed % 2]}
            model = HERTA(lam=20.0, fit_intercept=True, **params).fit(graph, X, y, np.arange(30))
            assert model.status_ == "converged"
            assert "separable" in model.certificate_.note or "nothing" in model.certificate_.note
            assert model.certificate_.gap <= 1e-5 * 30
            assert (model.predict(graph, X)[:30] == y[:30]).all()
