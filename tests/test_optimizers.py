"""Optimizers against closed forms; training on stored rows against dense algebra and SciPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special

from herta_gpu import Graph
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.factors import DenseGram, Factor, Map
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.losses import LOSSES
from herta_gpu.optimizers import (
    LBFGS,
    Adam,
    ConjugateGradients,
    GradientDescent,
    Newton,
    class_blocks,
    make_optimizer,
    minimise,
    row_space,
)
from herta_gpu.planning.settings import OPTIMIZER_NAMES
from herta_gpu.problem import Problem, StoredProblem, UnfoldedMap
from tests.conftest import on_device

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


def test_lbfgs_and_cg_are_exact_after_as_many_steps_as_dimensions() -> None:
    """With exact steps on a quadratic L-BFGS makes the steps of CG."""
    best = quadratic(c=1)[2]
    path = descend(LBFGS(np), 8, c=1)
    np.testing.assert_allclose(path[8], best, atol=1e-9)
    cg = descend(ConjugateGradients(np, by_column=True), 8, c=1)
    for ours, theirs in zip(path, cg, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-8)
    assert np.abs(cg[7] - best).max() > 1e-4  # and not before


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
    momentum: Any = make_optimizer("momentum", None, np, True, (1.0, kappa))
    assert momentum.momentum == pytest.approx(rate**2)
    assert momentum.learning_rate == pytest.approx(4 / (1 + np.sqrt(kappa)) ** 2)
    best = quadratic(kappa=kappa)[2]
    errors = [np.linalg.norm(w - best) for w in descend(momentum, 80, kappa=kappa)]
    measured = (errors[80] / errors[40]) ** (1 / 40)
    assert measured == pytest.approx(rate, abs=0.03)  # times a factor that grows like the step
    assert measured < (kappa - 1) / (kappa + 1) - 0.1  # gradient descent with its best step


def test_adams_second_step_is_its_formula() -> None:
    adam, g = Adam(0.1, np), np.array([[2.0]])
    adam.direction(g, g)
    m, v = (0.09 * 2 + 0.1 * 6) / (1 - 0.81), (0.000999 * 4 + 0.001 * 36) / (1 - 0.998001)
    expected = -0.1 * m / (np.sqrt(v) + 1e-8)
    assert adam.direction(g, 3 * g)[0, 0] == pytest.approx(expected)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_every_name_makes_its_optimizer(name: str) -> None:
    kinds = {"cg": ConjugateGradients, "gd": GradientDescent, "lbfgs": LBFGS, "adam": Adam,
             "momentum": GradientDescent}  # fmt: skip
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
    map_ = UnfoldedMap(H, Features(A, CPU), np.arange(60), 8, loss)
    problem = Problem(map_, Y, ridge, factor, 1e-10)
    return problem, lambda factor: Newton(StoredProblem(CPU, loss, A, Y, ridge), factor, 5)


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
    for factor in (problem.factor, Factor(5)):
        problem.factor = factor
        w = factor.from_weights(W)
        steps.append(factor.to_weights(newton(factor).direction(w, problem.start(w).g)))
    np.testing.assert_allclose(steps[0], steps[1], atol=1e-10)


def test_newton_goes_downhill_where_no_curvature_is_left() -> None:
    """Separable classes at last have a Hessian of zeros, which nothing can be solved with."""
    A, Y = np.array([[1.0], [-1.0]]), np.eye(2)
    w, g = np.array([[1e3, -1e3]]), np.array([[-1e-9, 1e-9]])
    newton = Newton(StoredProblem(CPU, LOSSES["ce"], A, Y, 0.0), Factor(1), 1)
    direction = newton.direction(w, g)
    assert LOSSES["ce"].value(np, A @ w, Y) == 0.0
    np.testing.assert_allclose(direction, -g)


# ---- stored rows -----------------------------------------------------------------------------


def rows(n: int, r: int, c: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """(A, one-hot Y that A says something of, a d x r map C0)."""
    rng = np.random.default_rng(seed)
    A, C0 = rng.standard_normal((n, r)), rng.standard_normal((r + 3, r))
    scores = A @ rng.standard_normal((r, c)) + 2 * rng.standard_normal((n, c))
    return A, np.eye(c)[scores.argmax(axis=1)], C0


def fit_rows(
    backend: Any, loss: Any, A: Any, Y: Any, ridge: float, metric: Any = None, **options: Any
) -> Any:
    return minimise(StoredProblem(backend, loss, A, Y, ridge, metric), **options)


def objective(A: Any, Y: Any, ridge: float, G: Any) -> Any:
    """The function of a flat u and its gradient, without the package's own code."""

    def at(flat: Any) -> tuple[float, Any]:
        u = flat.reshape(A.shape[1], -1)
        F = A @ u
        logs = scipy.special.log_softmax(F, axis=1)
        value, E = -(Y * logs).sum(), np.exp(logs) - Y
        return value + 0.5 * ridge * (u * (G @ u)).sum(), (A.T @ E + ridge * G @ u).ravel()

    return at


def optimum(A: Any, Y: Any, ridge: float, G: Any) -> float:
    at = objective(A, Y, ridge, G)
    start = np.zeros(A.shape[1] * Y.shape[1])
    options = {"maxiter": 20000, "maxfun": 40000, "ftol": 1e-16, "gtol": 1e-10, "maxcor": 100}
    found = scipy.optimize.minimize(at, start, jac=True, method="L-BFGS-B", options=options)
    return float(found.fun)


@pytest.mark.parametrize("ridge", [1e-3, 1.0])
@pytest.mark.parametrize("shape", [(60, 5, 3), (12, 30, 3), (40, 40, 2)])
def test_the_optimum_is_that_of_scipy(ridge: float, shape: Any) -> None:
    A, Y, C0 = rows(*shape)
    best = optimum(A, Y, ridge, C0.T @ C0)
    fit = fit_rows(CPU, LOSSES["ce"], A, Y, ridge, Map(CPU, C0, np.linalg.pinv(C0).T), goal=1e-9)
    assert fit.status == "converged"
    gap = fit.history[-1]["gap"]
    assert gap <= 1e-9 * fit.objective
    value, gradient = objective(A, Y, ridge, C0.T @ C0)(fit.u.ravel())
    assert fit.objective == pytest.approx(value, rel=1e-12)
    point = StoredProblem(CPU, LOSSES["ce"], A, Y, ridge, Map(CPU, C0, np.linalg.pinv(C0).T)).start(
        fit.u
    )
    np.testing.assert_allclose(point.g.ravel(), gradient, atol=1e-9 * np.abs(A).sum())
    assert fit.objective - best <= gap + 1e-9 * best
    assert fit.objective >= best * (1 - 1e-9)


@pytest.mark.parametrize("ridge", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize(
    "case", ["one row", "one class", "missing class", "two outputs", "one output", "zero columns",
             "units", "repeated columns", "no columns that matter"]
)  # fmt: skip
def test_awkward_rows_end_in_an_optimum(case: str, ridge: float) -> None:
    A, Y, _ = rows(40, 6, 3)
    if case == "one row":
        A, Y = A[:1], Y[:1]
    elif case == "one class":
        Y = np.eye(3)[np.zeros(40, dtype=int)]
    elif case == "missing class":
        Y = np.eye(4)[Y.argmax(axis=1)]
    elif case == "two outputs":
        Y = np.eye(2)[(A @ np.arange(6.0) + np.sin(np.arange(40)) * 9 > 0).astype(int)]
    elif case == "one output":
        Y = np.ones((40, 1))
    elif case == "zero columns":
        A[:, [0, 3]] = 0
    elif case == "units":
        A = A * 10.0 ** np.array([-8, -4, 0, 2, 5, 8])
    elif case == "repeated columns":
        A[:, 4:] = A[:, :2]
    else:
        A = A[:, :0]
    with np.errstate(over="ignore"):
        fit = fit_rows(CPU, LOSSES["ce"], A, Y, ridge, goal=1e-7)
    assert np.isfinite(fit.u).all()
    assert fit.u.shape == (A.shape[1], Y.shape[1])
    scale = 1 / np.maximum(np.linalg.norm(A, axis=0), 1e-300)
    scale = np.where(np.linalg.norm(A, axis=0) > 0, scale, 1.0)
    G = np.diag(scale**2)  # the same problem in columns of norm 1, which SciPy can solve
    best = optimum(A * scale, Y, ridge, G) if A.shape[1] else fit.objective
    assert fit.objective <= best + 1e-5 * best + 1e-5 * LOSSES["ce"].value(np, 0 * Y, Y)
    if ridge == 1.0 and case != "units":
        assert fit.status == "converged"
    if fit.status == "converged":
        assert fit.objective - fit.history[-1]["gap"] <= best * (1 + 1e-9) + 1e-12


def test_separable_classes_without_a_ridge_come_to_an_end() -> None:
    A = np.vstack([np.eye(3) + 0.01 * k for k in range(5)])
    fit = fit_rows(CPU, LOSSES["ce"], A, np.vstack([np.eye(3)] * 5), 0.0, goal=1e-7)
    assert fit.status == "converged"
    assert fit.objective <= 1e-7 * 15 * np.log(3)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_the_row_space_holds_the_optimum(ridge: float) -> None:
    A, Y, C0 = rows(7, 20, 3)
    metric = Map(CPU, C0, np.linalg.pinv(C0).T)
    T, lift, lower = row_space(CPU, A, ridge, metric)
    t = np.random.default_rng(2).standard_normal((7, 3))
    np.testing.assert_allclose(A @ lift(t), T @ t, atol=1e-10)
    if ridge > 0:
        assert (np.square(C0 @ lift(t))).sum() == pytest.approx((t**2).sum())
        P = A.T @ A + ridge * C0.T @ C0
        best = np.linalg.solve(P, A.T @ Y)  # in the whole space
        inside = np.linalg.solve(T.T @ T + ridge * np.eye(7), T.T @ Y)
        np.testing.assert_allclose(lift(inside), best, atol=1e-9)
        np.testing.assert_allclose(lower(best), inside, atol=1e-9)
    else:
        np.testing.assert_allclose(lower(lift(t)), t, atol=1e-10)


def hard_rows() -> tuple[Any, Any]:
    """Nearly separable classes in columns of very different sizes."""
    rng = np.random.default_rng(4)
    A = rng.standard_normal((400, 20)) * np.geomspace(1, 30, 20)
    scores = A @ rng.standard_normal((20, 4))
    scores += 0.05 * rng.standard_normal((400, 4)) * scores.std()
    return A, np.eye(4)[scores.argmax(axis=1)]


def test_the_whole_hessian_is_the_hessian() -> None:
    A, Y = hard_rows()
    A, Y, ridge = A[:60, :5], Y[:60], 0.2
    C0 = np.random.default_rng(5).standard_normal((8, 5))
    metric = Map(CPU, C0, np.linalg.pinv(C0).T)
    u = 0.05 * np.random.default_rng(6).standard_normal((5, 4))
    S = scipy.special.softmax(A @ u, axis=1)
    H = ridge * np.kron(C0.T @ C0, np.eye(4))
    for a, p in zip(A, S, strict=True):
        H += np.kron(np.outer(a, a), np.diag(p) - np.outer(p, p))
    g = LOSSES["ce"].centre(np, np.random.default_rng(7).standard_normal((5, 4)))
    expected = np.linalg.solve(H, g.ravel()).reshape(5, 4)
    problem = StoredProblem(CPU, LOSSES["ce"], A, Y, ridge, metric)
    found = class_blocks(problem, S)(g)
    assert np.linalg.norm(found - expected) <= 1e-10 * np.linalg.norm(expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_whole_hessian_knows_of_an_intercept(weighted: bool) -> None:
    """Against differences of the gradient, at whose points the constants are the best ones."""
    A, Y = hard_rows()
    A, Y = A[:60, :5], Y[:60]
    weights = np.random.default_rng(8).uniform(0.1, 1.0, 60) if weighted else None
    loss = LOSSES["ce"].bind(weights, True)
    problem = StoredProblem.of_rows(CPU, loss, A + 3.0, Y, 0.2)
    u = 0.05 * np.random.default_rng(6).standard_normal((5, 4))
    g = loss.centre(np, np.random.default_rng(7).standard_normal((5, 4)))
    S = loss.probabilities(np, problem.start(u).E, Y)
    step, h = class_blocks(problem, S)(g), 1e-4
    found = (problem.start(u + h * step).g - problem.start(u - h * step).g) / (2 * h)
    np.testing.assert_allclose(found, g, atol=1e-6)


def test_a_goal_that_rounding_forbids_is_given_up_soon() -> None:
    A, Y = hard_rows()
    fit = fit_rows(CPU, LOSSES["ce"], A, Y, 1e-5, goal=1e-13)
    assert fit.status != "max_iter"
    assert fit.history[-1]["gap"] < 1e-6 * fit.objective
    assert len(fit.history) < 151


def test_the_whole_hessian_takes_over_where_steps_are_many(monkeypatch: Any) -> None:
    A, Y = hard_rows()
    made = []

    def told(*args: Any) -> Any:
        made.append(args)
        return class_blocks(*args)

    monkeypatch.setattr("herta_gpu.optimizers.class_blocks", told)
    fit = fit_rows(CPU, LOSSES["ce"], A, Y, 1e-5)
    assert made
    assert fit.status == "converged"
    made.clear()
    without = fit_rows(CPU, LOSSES["ce"], A, Y, 1e-5, memory_limit=0)
    assert not made
    assert without.status == "converged"
    assert len(without.history) > 2 * len(fit.history)
    assert without.objective == pytest.approx(fit.objective, rel=2e-7)


@on_device
@pytest.mark.parametrize("shape", [(120, 6, 3), (8, 15, 3)])
def test_the_same_on_the_device(backend: Any, shape: Any) -> None:
    A, Y, C0 = rows(*shape)
    place = backend.asarray
    for ridge in (0.0, 1e-4):
        ours = fit_rows(CPU, LOSSES["ce"], A, Y, ridge, Map(CPU, C0, np.linalg.pinv(C0).T))
        metric = Map(backend, place(C0), place(np.linalg.pinv(C0).T))
        fit = fit_rows(backend, LOSSES["ce"], place(A), place(Y), ridge, metric)
        assert fit.status == ours.status
        assert fit.objective == pytest.approx(ours.objective, rel=1e-6, abs=1e-9)


def test_the_history_is_told_and_a_start_near_the_optimum_saves_steps() -> None:
    A, Y, _ = rows(150, 12, 4)
    told: list[dict[str, Any]] = []
    fit = fit_rows(CPU, LOSSES["ce"], A, Y, 1e-3, callback=told.append)
    assert told == fit.history
    assert [h["step"] for h in told] == list(range(len(fit.history)))
    falling = np.diff([h["objective"] for h in told])
    assert (falling <= 1e-12 * told[0]["objective"]).all()
    best = optimum(A, Y, 1e-3, np.eye(12))
    assert all(h["objective"] - best <= h["gap"] + 1e-9 * best for h in told)
    assert fit_rows(CPU, LOSSES["ce"], A, Y, 1e-3, max_steps=3).status == "max_iter"
    for count in (150, 10):
        first = fit_rows(CPU, LOSSES["ce"], A[:count], Y[:count], 1e-3)
        known = {"start": first.u, "goal": 3e-7}
        again = fit_rows(CPU, LOSSES["ce"], A[:count], Y[:count], 1e-3, **known)
        assert len(again.history) == 1
