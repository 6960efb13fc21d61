"""The model as a linear map, against dense algebra; the problem through it, and on stored rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from herta_gpu.backends import get_backend
from herta_gpu.factors import Factor
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.losses import LOSSES
from herta_gpu.problem import Problem, StoredProblem, UnfoldedMap
from tests.conftest import dense_H, random_graph

N, D, C, LAM = 70, 5, 3, 4.0
BACKEND = get_backend("cpu")
TRAIN = np.arange(0, N, 2)


def case(
    dtype: str = "float64", width: int = 2, loss: str = "mse"
) -> tuple[UnfoldedMap, Any, Any, Any]:
    """(the map, H^-1 X by dense algebra, W, Y)."""
    graph, rng = random_graph(N, 200), np.random.default_rng(0)
    X, W = rng.standard_normal((N, D)), rng.standard_normal((D, C))
    H = RegularizedLaplacian(graph, LAM, BACKEND, dtype)
    Y = np.eye(C)[rng.integers(0, C, TRAIN.size)]
    return (
        UnfoldedMap(H, Features(X, BACKEND), TRAIN, width, LOSSES[loss]),
        np.linalg.solve(dense_H(graph, LAM), X), W, Y,
    )  # fmt: skip


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("tol", [1e-2, 1e-6, 1e-10])
def test_products_are_those_of_dense_algebra(tol, dtype, width):
    A, Q, W, Y = case(dtype, width)
    there = A.forward(W, tol)
    true = Q @ W
    assert np.linalg.norm(there.value - true) <= there.residual + 1e-6 * (dtype == "float32")
    assert there.residual <= 3 * tol * np.linalg.norm(true) * (1 + 2 * LAM)
    assert (A.rows(there.value) == there.value[TRAIN]).all()
    back = A.adjoint(Y, tol, None)
    assert np.linalg.norm(back.value - Q[TRAIN].T @ Y) <= 1.1 * tol * 30 * np.linalg.norm(Y)
    assert back.block.shape == (N, C)


def test_a_guess_that_is_good_enough_is_kept():
    A, Q, W, _ = case()
    Z = A.forward(W, 1e-6).value
    kept = A.correct(W, Z, limit=1e-2)
    assert kept.value is Z
    assert kept.iterations == 0
    R = dense_H(A.H.graph, LAM) @ (Q @ W - Z)
    assert kept.residual == pytest.approx(np.linalg.norm(R), rel=1e-6)
    better = A.correct(W, Z, limit=1e-11)
    assert better.iterations > 0
    assert better.residual <= 1e-10


def test_rounding_is_bounded_for_solutions_of_any_size():
    A, _, W, Y = case()
    Z, V = A.forward(W, 1e-12).value, A.adjoint(Y, 1e-12, None).block
    small, large = A.forward_rounding(W, Z), A.forward_rounding(1e3 * W, 1e3 * Z)
    assert 0 < small < 1e-11
    assert large == pytest.approx(1e3 * small)
    assert A.adjoint_rounding(1e3 * V) == pytest.approx(1e3 * A.adjoint_rounding(V))


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_objective_and_gradient(loss, ridge):
    A, Q, W, Y = case(loss=loss)
    problem = Problem(A, Y, ridge, Factor(D), 1e-10)
    point = problem.start(W)

    def value(W: Any) -> float:
        F = Q[TRAIN] @ W
        if loss == "mse":
            return 0.5 * ((F - Y) ** 2).sum() + 0.5 * ridge * (W**2).sum()
        return (np.log(np.exp(F).sum(axis=1)) - (F * Y).sum(axis=1)).sum() + 0.5 * ridge * (
            W**2
        ).sum()

    assert point.objective == pytest.approx(value(W), rel=1e-8)
    step = 1e-5
    for i, j in ((0, 0), (3, 2), (4, 1)):
        E = np.zeros_like(W)
        E[i, j] = step
        slope = (value(W + E) - value(W - E)) / (2 * step)
        assert point.gradient[i, j] == pytest.approx(slope, rel=1e-5, abs=1e-6)


def test_a_step_goes_down_and_is_measured():
    A, Q, W, Y = case()
    problem = Problem(A, Y, 0.0, Factor(D), 1e-8)
    point = problem.start(W)
    ahead = problem.move(point, -point.g, True)
    assert ahead.objective < point.objective
    F = Q[TRAIN] @ ahead.W
    assert ahead.objective == pytest.approx(0.5 * ((F - Y) ** 2).sum(), rel=1e-7)
    # An exact search: the new gradient has nothing left along the direction, column by column.
    along = (ahead.gradient * point.g).sum(axis=0)
    assert (abs(along) <= 1e-5 * (point.g**2).sum(axis=0)).all()


def test_a_step_into_a_narrow_valley_does_not_climb_the_slight_slope_behind_it() -> None:
    """One row pulls hard and is soon satisfied, seventy push back a little, for long."""
    A = np.array([[1000.0]] + [[1.0]] * 70)
    Y = np.eye(2)[[0] + [1] * 70]
    problem = StoredProblem(BACKEND, LOSSES["ce"], A, Y, 0.0, None)
    start, D = problem.start(None), np.array([[0.15, -0.15]])
    slopes = [(LOSSES["ce"].residual(np, t * A @ D, Y) * (A @ D)).sum() for t in (0.0, 1.0)]
    assert 0 < slopes[1] < -0.1 * slopes[0]  # the whole step looks flat enough
    assert LOSSES["ce"].value(np, A @ D, Y) > start.objective  # but is no good
    assert problem.move(start, D).objective < start.objective
