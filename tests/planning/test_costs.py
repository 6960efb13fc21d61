"""Predicted costs: what they must grow with, and that tolerances are those of the theorems."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu.backends import get_backend
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.planning.costs import (
    EXACT_TOL,
    Case,
    Q_goal,
    Q_tolerance,
    Sizes,
    case_of,
    certificate_costs,
    direct_costs,
    least_degree,
    row_tolerance,
    sampling_pays,
    strategy_costs,
    worth_reordering,
    worth_whitening,
)
from herta_gpu.planning.settings import Settings
from herta_gpu.plumbing.targets import make_targets
from herta_gpu.task import count_sizes
from tests.conftest import random_graph

SIZES = Sizes(n=10**5, m=10**6, d=100, c=10, n_train=5 * 10**4, word=4, X_bytes=0)


def settings(**params: Any) -> Settings:
    from herta_gpu import HERTA

    return Settings.of(HERTA(**params).get_params())


def at(lam: float, **changed: Any) -> Sizes:
    return replace(SIZES, top=1 + 2 * lam, **changed)


def test_the_sizes_of_an_unseen_graph_bound_every_graph():
    for lam in (0.1, 1.0, 50.0):
        for seed in range(3):
            graph = random_graph(60, 150, seed)
            H = RegularizedLaplacian(graph, lam, get_backend("cpu"), "float64")
            values = np.linalg.eigvalsh(np.eye(60) + lam * graph.to_csr().toarray())
            assert values[-1] <= H.lambda_max <= 1 + 2 * lam
            n_lambda = (1 - 1 / values).sum()
            assert n_lambda <= at(lam, n=60).n_lambda()


def test_degrees_are_those_of_the_design():
    """Steps per factor of ten, and the polynomial's own error: 1/cosh(k acosh sigma)."""
    for lam, steps in ((0.1, 0.75), (1.0, 1.75), (5.0, 3.7), (20.0, 7.3), (50.0, 11.5)):
        top = 1 + 2 * lam
        many = least_degree(top, 1e-12) - least_degree(top, 1e-4)
        assert many / 8 == pytest.approx(steps, rel=0.1)
        k, sigma = least_degree(top, 1e-6), (top + 1) / (top - 1)
        assert 1 / math.cosh(k * math.acosh(sigma)) <= 1e-6 * (1 + 1e-9)
        assert k == 1 or 1 / math.cosh((k - 1) * math.acosh(sigma)) > 1e-6


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize("ridge", [0.0, 1e-3, 1.0])
def test_a_tighter_fit_asks_for_smaller_residuals(loss, ridge):
    goals = [
        Q_goal(at(5.0), settings(tol=tol, loss=loss, ridge=ridge), whiten=True)
        for tol in (1e-2, 1e-4, 1e-6, 1e-8, 1e-10)
    ]
    assert goals == sorted(goals, reverse=True)
    assert all(1e-13 <= goal <= 0.1 for goal in goals)
    if loss == "mse":
        assert goals[-1] < goals[0]


def test_what_a_goal_depends_on():
    one = Q_goal(SIZES, settings(tol=1e-4), True)
    assert Q_goal(at(50.0), settings(tol=1e-4), True) <= one
    assert Q_goal(replace(SIZES, n_train=500), settings(tol=1e-4), True) <= one
    assert Q_goal(SIZES, settings(tol=1e-4), False) <= one


def test_features_that_training_rows_do_not_have_need_an_exact_Q():
    hidden = replace(SIZES, hidden=True)
    assert Q_tolerance(hidden, settings(), direct=False) == EXACT_TOL
    assert Q_tolerance(SIZES, settings(), direct=False) > 1e-3
    few = replace(hidden, n_train=50)
    assert Q_tolerance(few, settings(), direct=False) > EXACT_TOL
    assert Q_tolerance(replace(SIZES, n_train=SIZES.n), settings(), direct=False) == 0.1


def test_rows_of_the_inverse_must_span_the_space_without_a_ridge():
    assert row_tolerance(settings()) == 1e-10
    assert row_tolerance(settings(ridge=1.0, tol=1e-6)) == pytest.approx(1e-7)
    assert row_tolerance(settings(ridge=1.0, tol=1e-10)) < 1e-8
    # Softmax asks for more; where the true model is looked at, less will do.
    assert row_tolerance(settings(ridge=1.0, tol=1e-6, loss="ce")) == pytest.approx(1e-9)
    assert row_tolerance(settings(ridge=1.0, tol=1e-6), look=True) == pytest.approx(1e-4)


@pytest.mark.parametrize("strategy", ["herta", "direct"])
@pytest.mark.parametrize("more", [{"m": 10**7}, {"d": 1000}, {"c": 1000}, {"n": 10**6}])
def test_more_of_anything_costs_more(strategy, more):
    asked = settings(loss="ce", ridge=1.0)
    now = strategy_costs(SIZES, asked)[strategy]
    assert strategy_costs(replace(SIZES, **more), asked)[strategy] > now
    assert strategy_costs(at(50.0), asked)[strategy] > now


def test_stored_rows_pay_for_many_outputs_and_not_for_few():
    many, few = replace(SIZES, c=172, d=128), replace(SIZES, c=1, d=2000)
    for sizes, best in ((many, "direct"), (few, "herta")):
        cost = strategy_costs(replace(sizes, top=41.0), settings())
        assert min(cost, key=lambda s: cost[s]) == best


def test_a_proof_without_strong_convexity_is_not_offered():
    few = replace(SIZES, n_train=50)
    assert direct_costs(few, settings())[0] == math.inf
    assert direct_costs(few, settings(ridge=1.0))[0] < math.inf
    assert direct_costs(SIZES, settings())[1] == math.inf  # MSE needs no look
    alone, looked = direct_costs(SIZES, settings(loss="ce", ridge=1.0))
    assert alone < math.inf
    assert looked < math.inf


def test_whitening_is_for_least_squares_on_graphs_that_cost_more_than_X():
    assert worth_whitening(SIZES, settings())
    assert not worth_whitening(SIZES, settings(ridge=1.0))
    assert not worth_whitening(SIZES, settings(loss="ce"))
    assert not worth_whitening(replace(SIZES, n_train=50), settings())
    thin = replace(SIZES, m=10**5, d=3000)
    assert not worth_whitening(thin, settings())


def test_sampling_pays_for_many_features_on_a_dense_graph():
    dense = replace(SIZES, m=10**8, d=10**4, c=1)
    assert sampling_pays(replace(dense, top=41.0), settings(), 10**6)
    assert not sampling_pays(replace(dense, d=10, top=41.0), settings(), 10**6)
    assert not sampling_pays(replace(dense, top=41.0), settings(), dense.m)


def test_certificates_cost_more_the_more_they_prove():
    proven, measured, _ = certificate_costs(SIZES)
    assert 0 < proven < measured
    whole = replace(SIZES, n_train=SIZES.n)
    assert certificate_costs(whole)[0] == 0.0  # no row is outside training


def test_reordering_is_for_many_products():
    assert worth_reordering(settings(lam=20.0), 500, 40, 1000)
    assert not worth_reordering(settings(lam=0.1), 2, 1, 1000)
    # On a GPU products are so much faster that only long fits pay for it.
    assert not worth_reordering(settings(lam=20.0), 100, 47, 65_000)
    assert worth_reordering(settings(lam=1e4), 500, 40, 65_000)


def test_sizes_are_those_of_the_data():
    graph, rng = random_graph(50, 120), np.random.default_rng(0)
    X, y = rng.standard_normal((50, 4)), rng.integers(0, 3, 50)
    X[:20, 2] = 0.0
    backend = get_backend("cpu")
    laplacian = RegularizedLaplacian(graph, 1.0, backend, "float32")
    targets = make_targets(y, np.arange(20), 50, "mse")
    for given in (X, sp.csr_array(X)):
        found = count_sizes(laplacian, given, targets, settings(), 10**9, evaluated=7)
        assert (found.n, found.m, found.d, found.c) == (50, 120, 4, 3)
        assert (found.n_train, found.word, found.beside, found.hidden) == (20, 4, 7, True)
        assert found.dtype == "float32"
    assert found.nonzeros == 4 * 50 - 20
    assert found.X_bytes == 24 * found.nonzeros
    seen = count_sizes(laplacian, X[:, :2], targets, settings(), 10**9)
    assert not seen.hidden
    assert seen.nonzeros is None


@pytest.mark.parametrize(
    ("n_train", "ridge", "known", "rows", "case"),
    [
        (10, 0.0, False, None, Case.DENSE),
        (10, 0.0, True, 4, Case.DENSE),
        (5, 0.1, True, None, Case.DENSE),
        (4, 0.1, False, None, Case.FEW_ROWS),
        (10, 0.1, False, 4, Case.FEW_ROWS),
        (9, 0.0, True, None, Case.ROW_SPACE),
        (4, 0.0, True, None, Case.ROW_SPACE),
        (9, 0.0, False, None, Case.DAMPED),
        (9, 0.0, False, 4, Case.DAMPED_FEW_ROWS),
        (4, 0.0, False, None, Case.DAMPED_FEW_ROWS),
    ],
)
def test_how_P_is_made_of_ten_features(n_train, ridge, known, rows, case):
    assert case_of(n_train, 10, ridge, known, rows) is case
