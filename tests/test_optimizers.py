"""Optimizers against closed forms: on a quadratic everything about them is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from herta_gpu import Graph
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.factors import DenseGram, Factor, Identity
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.losses import LOSSES
from herta_gpu.optimizers import (
    LBFGS,
    LBFGS_MEMORY,
    Adam,
    ConjugateGradients,
    GradientDescent,
    Momentum,
    Newton,
    make_optimizer,
)
from herta_gpu.planning.settings import OPTIMIZER_NAMES
from herta_gpu.problem import Problem, UnfoldedMap

CPU = CPUBackend()


def quadratic(d: int = 8, c: int = 3, kappa: float = 50.0) -> tuple[Any, Any, Any]:
    """(Hessian, right-hand sides, minimiser) of 1/2 <w, T w> - <b, w>, eigenvalues 1 to kappa."""
    rng = np.random.default_rng(0)
    U = np.linalg.qr(rng.standard_normal((d, d)))[0]
    T = (U * np.linspace(1, kappa, d)) @ U.T
    b = rng.standard_normal((d, c))
    return T, b, np.linalg.solve(T, b)


def descend(optimizer: Any, steps: int, by_column: bool = True, **size: Any) -> list[Any]:
    """The iterates from 0, with the exact line search where the optimizer wants one."""
    T, b, _ = quadratic(**size)
    w, axis, path = np.zeros_like(b), 0 if by_column else None, []
    for _ in range(steps):
        path.append(w)
        g = T @ w - b
        direction = optimizer.direction(w, g)
        eta = 1.0
        if optimizer.searches:
            eta = -(g * direction).sum(axis=axis) / (direction * (T @ direction)).sum(axis=axis)
        w = w + eta * direction
    return [*path, w]


def test_cg_is_exact_after_as_many_steps_as_dimensions() -> None:
    best = quadratic()[2]
    path = descend(ConjugateGradients(np, by_column=True), 8)
    np.testing.assert_allclose(path[8], best, atol=1e-10)
    assert np.abs(path[7] - best).max() > 1e-4  # and not before


def test_cg_minimises_over_the_krylov_space() -> None:
    T, b, _ = quadratic(c=1)
    path = descend(ConjugateGradients(np, by_column=True), 4, c=1)
    for k in range(1, 5):
        K = np.linalg.qr(np.hstack([np.linalg.matrix_power(T, i) @ b for i in range(k)]))[0]
        np.testing.assert_allclose(path[k], K @ np.linalg.solve(K.T @ T @ K, K.T @ b), atol=1e-9)


def test_cg_turns_back_to_the_gradient_where_its_direction_leads_up() -> None:
    cg = ConjugateGradients(np, by_column=False)
    first = np.array([[1.0], [0.0]])
    cg.direction(first, first)
    uphill = np.array([[-3.0], [0.1]])  # a gradient that the old direction agrees with
    np.testing.assert_array_equal(cg.direction(first, uphill), -uphill)


def test_gradient_descent_goes_down_the_gradient() -> None:
    g = np.array([[2.0, -1.0]])
    np.testing.assert_array_equal(GradientDescent().direction(0 * g, g), -g)
    np.testing.assert_array_equal(GradientDescent(0.5).direction(0 * g, g), -0.5 * g)
    assert GradientDescent().searches
    assert not GradientDescent(0.5).searches


def test_gradient_descent_contracts_as_kantorovich_says() -> None:
    T, _, best = quadratic(kappa=10.0)
    path = descend(GradientDescent(), 30, kappa=10.0)
    gaps = np.array([((w - best) * (T @ (w - best))).sum(axis=0) for w in path])
    assert (gaps[1:] <= (9 / 11) ** 2 * gaps[:-1] * (1 + 1e-9)).all()


def test_lbfgs_is_exact_after_as_many_steps_as_dimensions() -> None:
    """With exact steps on a quadratic it makes the steps of CG."""
    best = quadratic(c=1)[2]
    path = descend(LBFGS(np), 8, c=1)
    np.testing.assert_allclose(path[8], best, atol=1e-9)
    cg = descend(ConjugateGradients(np, by_column=True), 8, c=1)
    for ours, theirs in zip(path, cg, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-8)


def test_lbfgs_remembers_so_many_pairs_and_meets_the_last_one() -> None:
    lbfgs, (T, b, _) = LBFGS(np), quadratic(d=40)
    rng = np.random.default_rng(1)
    for _ in range(LBFGS_MEMORY + 5):
        w = rng.standard_normal(b.shape)
        direction = lbfgs.direction(w, T @ w - b)
    assert lbfgs.pairs == LBFGS_MEMORY
    S, Y, _, _ = lbfgs._stored()
    s, y = S[-1].reshape(b.shape), Y[-1].reshape(b.shape)
    lbfgs._last = None
    np.testing.assert_allclose(lbfgs.direction(w, y), -s, atol=1e-10)  # the secant equation
    assert (direction * (T @ w - b)).sum() < 0


def two_loops(pairs: list[Any], g: Any, H_0: Any) -> Any:
    """Nocedal's two loops as the books print them."""
    q, kept = g.copy(), []
    for s, y in reversed(pairs):
        a = (s * q).sum() / (s * y).sum()
        q = q - a * y
        kept.append(a)
    q = H_0(q)
    for (s, y), a in zip(pairs, reversed(kept), strict=True):
        q = q + s * (a - (y * q).sum() / (s * y).sum())
    return -q


@pytest.mark.parametrize("memory", [0, 1, 5, 40])
def test_the_compact_form_of_lbfgs_is_that_of_two_loops(memory: int) -> None:
    """With any guess of the inverse Hessian, whichever pairs are forgotten."""
    T, b, _ = quadratic(d=12)
    rng = np.random.default_rng(2)
    lbfgs, points = LBFGS(np, memory), []
    for k in range(60):
        w = rng.standard_normal(b.shape)
        points.append((w, T @ w - b))
        scale = np.linspace(1, 2 + k, 12)[:, None]  # another guess at every step
        found = lbfgs.direction(*points[-1], lambda v, scale=scale: v / scale, scaled=False)
        pairs = [(w1 - w0, g1 - g0) for (w0, g0), (w1, g1) in itertools.pairwise(points)]
        pairs = pairs[-memory:] if memory else []
        expected = two_loops(pairs, points[-1][1], lambda v, scale=scale: v / scale)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())
    lbfgs.forget()
    np.testing.assert_array_equal(lbfgs.direction(*points[-1]), -points[-1][1])


def test_lbfgs_does_not_believe_a_pair_without_curvature() -> None:
    lbfgs, g = LBFGS(np), np.ones((3, 1))
    lbfgs.direction(0 * g, g)
    assert np.array_equal(lbfgs.direction(g, g), -g)  # the gradient has not changed
    assert lbfgs.pairs == 0


def test_momentum_for_a_spectrum_has_polyaks_rate() -> None:
    kappa = 50.0
    rate = (np.sqrt(kappa) - 1) / (np.sqrt(kappa) + 1)
    momentum = Momentum.for_spectrum(1.0, kappa)
    assert momentum.momentum == pytest.approx(rate**2)
    assert momentum.learning_rate == pytest.approx(4 / (1 + np.sqrt(kappa)) ** 2)
    best = quadratic(kappa=kappa)[2]
    errors = [np.linalg.norm(w - best) for w in descend(momentum, 80, kappa=kappa)]
    measured = (errors[80] / errors[40]) ** (1 / 40)
    assert measured == pytest.approx(rate, abs=0.03)  # times a factor that grows like the step
    assert measured < (kappa - 1) / (kappa + 1) - 0.1  # gradient descent with its best step


def test_momentum_of_one_eigenvalue_is_one_step_of_newton() -> None:
    momentum = Momentum.for_spectrum(4.0, 4.0)
    g = np.array([[3.0]])
    assert momentum.direction(0 * g, g)[0, 0] == pytest.approx(-0.75)
    assert momentum.momentum == 0


def test_adams_first_step_is_the_learning_rate_whatever_the_gradient() -> None:
    g = np.array([[1e-3, -5.0, 1e4]])
    np.testing.assert_allclose(Adam(0.1, np).direction(0 * g, g), [[-0.1, 0.1, -0.1]], rtol=1e-4)


def test_adams_second_step_is_its_formula() -> None:
    adam, g = Adam(0.1, np), np.array([[2.0]])
    adam.direction(g, g)
    m, v = (0.09 * 2 + 0.1 * 6) / (1 - 0.81), (0.000999 * 4 + 0.001 * 36) / (1 - 0.998001)
    expected = -0.1 * m / (np.sqrt(v) + 1e-8)
    assert adam.direction(g, 3 * g)[0, 0] == pytest.approx(expected)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_every_name_makes_its_optimizer(name: str) -> None:
    kinds = {"cg": ConjugateGradients, "gd": GradientDescent, "lbfgs": LBFGS, "adam": Adam,
             "momentum": Momentum}  # fmt: skip
    found = make_optimizer(name, None, np, by_column=True)
    assert type(found) is kinds[name]
    assert found.searches == (name in ("cg", "gd", "lbfgs"))
    if name in ("gd", "adam", "momentum"):
        assert make_optimizer(name, 0.3, np, True).learning_rate == 0.3  # type: ignore[attr-defined]


# ---- Newton


def logistic(ridge: float) -> tuple[Problem, Callable[[Factor], Newton]]:
    rng = np.random.default_rng(5)
    A, Y = rng.standard_normal((60, 5)), np.eye(3)[rng.integers(0, 3, 60)]
    factor = DenseGram(CPU, A.T @ A, np.linalg.norm(A, axis=0), damped=False).factor(
        0.2, ridge, False
    )
    loss = LOSSES["ce"]
    nobody = Graph.from_edges(np.zeros((2, 0), dtype=int), num_nodes=60)  # H = I: A is X
    H = RegularizedLaplacian(nobody, 1.0, CPU, "float64")
    map_ = UnfoldedMap(H, Features(A, CPU), np.arange(60), 8)
    problem = Problem(map_, loss, Y, ridge, factor, np, 1e-10)
    return problem, lambda factor: Newton(CPU, loss, A, factor, 5, ridge)


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_newton_finds_a_gradient_of_zero_in_a_few_steps(ridge: float) -> None:
    problem, newton = logistic(ridge)
    optimizer, point, sizes = newton(problem.factor), problem.start(np.zeros((5, 3))), []
    for _ in range(6):
        sizes.append(np.linalg.norm(point.gradient))
        point = problem.move(point, optimizer.direction(point.w, point.g), search=True)
    assert np.linalg.norm(point.gradient) < 1e-9 * sizes[0]
    assert sizes[2] < 0.05 * sizes[1] < 0.05 * sizes[0]


def test_newtons_direction_solves_with_the_hessian_by_finite_differences() -> None:
    problem, newton = logistic(0.5)
    optimizer, w = newton(problem.factor), np.random.default_rng(6).standard_normal((5, 3))

    def gradient(w: Any) -> Any:
        return problem.start(w).g

    direction, h = optimizer.direction(w, gradient(w)), 1e-5
    change = (gradient(w + h * direction) - gradient(w - h * direction)) / (2 * h)
    np.testing.assert_allclose(problem.loss.centre(np, change + gradient(w)), 0, atol=1e-6)


def test_newtons_step_is_the_same_in_all_coordinates() -> None:
    problem, newton = logistic(0.5)
    W = problem.loss.centre(np, np.random.default_rng(7).standard_normal((5, 3)))
    steps = []
    for factor in (problem.factor, Identity(5)):
        problem.factor = factor
        w = factor.from_weights(W)
        steps.append(factor.to_weights(newton(factor).direction(w, problem.start(w).g)))
    np.testing.assert_allclose(steps[0], steps[1], atol=1e-10)


def test_newton_goes_downhill_where_no_curvature_is_left() -> None:
    """Separable classes at last have a Hessian of zeros, which nothing can be solved with."""
    A, Y = np.array([[1.0], [-1.0]]), np.eye(2)
    w, g = np.array([[1e3, -1e3]]), np.array([[-1e-9, 1e-9]])
    direction = Newton(CPU, LOSSES["ce"], A, Identity(1), 1, 0.0).direction(w, g)
    assert LOSSES["ce"].value(np, A @ w, Y) == 0.0
    np.testing.assert_allclose(direction, -g)
