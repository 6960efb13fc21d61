"""Training on stored rows, against dense algebra, SciPy and scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special

from herta_gpu import optimizers
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.factors import Map
from herta_gpu.losses import LOSSES
from herta_gpu.optimizers import ClassBlocks, RankOnes, rank_ones, row_space
from herta_gpu.problem import DenseProblem

CPU = CPUBackend()


def rows(n: int, r: int, c: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """(A, one-hot Y that A says something of, a d x r map C0)."""
    rng = np.random.default_rng(seed)
    A, C0 = rng.standard_normal((n, r)), rng.standard_normal((r + 3, r))
    scores = A @ rng.standard_normal((r, c)) + 2 * rng.standard_normal((n, c))
    return A, np.eye(c)[scores.argmax(axis=1)], C0


def minimise(
    backend: Any, loss: Any, A: Any, Y: Any, ridge: float, metric: Any = None, **options: Any
) -> Any:
    return optimizers.minimise(DenseProblem(backend, loss, A, Y, ridge, metric), **options)


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
    fit = minimise(CPU, LOSSES["ce"], A, Y, ridge, Map(CPU, C0, np.linalg.pinv(C0).T), goal=1e-9)
    assert fit.status == "certified"
    assert fit.gap <= 1e-9 * fit.objective
    value, gradient = objective(A, Y, ridge, C0.T @ C0)(fit.u.ravel())
    assert fit.objective == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(fit.point.g.ravel(), gradient, atol=1e-9 * np.abs(A).sum())
    assert fit.objective - best <= fit.gap + 1e-9 * best
    assert fit.objective >= best * (1 - 1e-9)


@pytest.mark.parametrize("ridge", [1e-4, 0.3])
def test_cross_entropy_agrees_with_scikit_learn(ridge: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    A, Y, _ = rows(150, 12, 4)
    theirs = linear_model.LogisticRegression(
        C=1 / ridge, fit_intercept=False, solver="newton-cg", tol=1e-12, max_iter=2000
    ).fit(A, Y.argmax(axis=1))
    fit = minimise(CPU, LOSSES["ce"], A, Y, ridge, goal=1e-12)
    assert fit.status == "certified"
    np.testing.assert_allclose(fit.u, theirs.coef_.T, atol=1e-4 * np.abs(theirs.coef_).max())


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
        fit = minimise(CPU, LOSSES["ce"], A, Y, ridge, goal=1e-7)
    assert np.isfinite(fit.u).all()
    assert fit.u.shape == (A.shape[1], Y.shape[1])
    scale = 1 / np.maximum(np.linalg.norm(A, axis=0), 1e-300)
    scale = np.where(np.linalg.norm(A, axis=0) > 0, scale, 1.0)
    G = np.diag(scale**2)  # the same problem in columns of norm 1, which SciPy can solve
    best = optimum(A * scale, Y, ridge, G) if A.shape[1] else fit.objective
    assert fit.objective <= best + 1e-5 * best + 1e-5 * LOSSES["ce"].value(np, 0 * Y, Y)
    if ridge == 1.0 and case != "units":
        assert fit.status == "certified"
    if fit.status == "certified":
        assert fit.objective - fit.gap <= best * (1 + 1e-9) + 1e-12


def test_separable_classes_without_a_ridge_come_to_an_end() -> None:
    A = np.vstack([np.eye(3) + 0.01 * k for k in range(5)])
    fit = minimise(CPU, LOSSES["ce"], A, np.vstack([np.eye(3)] * 5), 0.0, goal=1e-7)
    assert fit.status == "converged"
    assert fit.objective <= 1e-7 * 15 * np.log(3)
    assert fit.objective <= fit.gap <= 1.001 * fit.objective + 1e-9  # nothing is below 0


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


def test_the_metric_of_a_map_measures_W() -> None:
    rng = np.random.default_rng(3)
    C0, u, g = rng.standard_normal((6, 6)), *rng.standard_normal((2, 6, 2))
    W_gradient = np.linalg.norm(np.linalg.solve(C0.T, g))  # g = C0^T (gradient of W)
    metric = Map(CPU, C0, np.linalg.pinv(C0).T)
    assert (u * metric.times_ridge(u)).sum() == pytest.approx(((C0 @ u) ** 2).sum())
    assert np.linalg.norm(metric.gradient(g)) == pytest.approx(W_gradient)
    np.testing.assert_allclose(metric.weights(metric.coordinates(u)), u, atol=1e-10)


def test_a_start_near_the_optimum_saves_steps() -> None:
    A, Y, _ = rows(150, 12, 4)
    first = minimise(CPU, LOSSES["ce"], A, Y, 1e-3)
    again = minimise(CPU, LOSSES["ce"], A, Y, 1e-3, start=first.u)
    assert again.steps == 0
    few = minimise(CPU, LOSSES["ce"], A[:10], Y[:10], 1e-3)
    assert minimise(CPU, LOSSES["ce"], A[:10], Y[:10], 1e-3, start=few.u, goal=3e-7).steps == 0


def test_the_history_is_told_step_by_step() -> None:
    A, Y, _ = rows(150, 12, 4)
    told: list[dict[str, Any]] = []
    fit = minimise(CPU, LOSSES["ce"], A, Y, 1e-3, callback=told.append)
    assert told == fit.history
    assert [h["step"] for h in told] == list(range(fit.steps + 1))
    falling = np.diff([h["objective"] for h in told])
    assert (falling <= 1e-12 * told[0]["objective"]).all()
    best = optimum(A, Y, 1e-3, np.eye(12))
    assert all(h["objective"] - best <= h["gap"] + 1e-9 * best for h in told)
    assert minimise(CPU, LOSSES["ce"], A, Y, 1e-3, max_steps=3).status == "max_iter"


def hard_rows() -> tuple[Any, Any]:
    """Nearly separable classes in columns of very different sizes."""
    rng = np.random.default_rng(4)
    A = rng.standard_normal((400, 20)) * np.geomspace(1, 30, 20)
    scores = A @ rng.standard_normal((20, 4))
    scores += 0.05 * rng.standard_normal((400, 4)) * scores.std()
    return A, np.eye(4)[scores.argmax(axis=1)]


@pytest.mark.parametrize("kind", [ClassBlocks, RankOnes])
def test_the_whole_hessian_is_the_hessian(kind: Any) -> None:
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
    if kind is ClassBlocks:
        hessian = ClassBlocks(CPU, A, S, ridge, metric)
        tolerance = 1e-10
    else:
        terms = rank_ones(np, S, 180)
        assert terms is not None
        hessian = RankOnes(CPU, A, terms, ridge, metric)
        tolerance = 0.02  # what is not among the terms is spread over the classes
    found = hessian.inverse(g)
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def test_rank_one_terms_add_up_to_the_hessian_of_each_row() -> None:
    rng = np.random.default_rng(8)
    S = scipy.special.softmax(rng.standard_normal((30, 5)) * rng.choice([1, 5, 200], (30, 1)), 1)
    terms = rank_ones(np, S, 120)
    assert terms is not None
    at, q, rest = terms
    left = 0.0
    for i, p in enumerate(S):
        H = np.diag(p) - np.outer(p, p)
        missing = H - q[at == i].T @ q[at == i]
        left += np.trace(missing)
        assert np.linalg.eigvalsh(missing).min() >= -1e-12
        assert rest[i] * 4 == pytest.approx(np.trace(missing), abs=1e-12)
    assert left <= 0.001 * sum(1 - (p**2).sum() for p in S)
    assert rank_ones(np, S, at.shape[0] - 1) is None
    certain = rank_ones(np, np.eye(3), 6)  # no curvature at all, and no division by it
    assert certain is not None
    assert np.isfinite(certain[1]).all()


def test_a_goal_that_rounding_forbids_is_given_up_soon() -> None:
    A, Y = hard_rows()
    fit = minimise(CPU, LOSSES["ce"], A, Y, 1e-5, goal=1e-13)
    assert fit.status == "stagnated"
    assert 1e-13 * fit.objective < fit.gap < 1e-6 * fit.objective
    assert fit.steps < 150


def test_the_whole_hessian_takes_over_where_steps_are_many(monkeypatch: Any) -> None:
    A, Y = hard_rows()
    made = []
    for kind in (ClassBlocks, RankOnes):
        real = kind.__init__

        def told(self: Any, *args: Any, real: Any = real, kind: Any = kind) -> None:
            made.append(kind)
            real(self, *args)

        monkeypatch.setattr(kind, "__init__", told)
    fit = minimise(CPU, LOSSES["ce"], A, Y, 1e-5)
    assert made
    assert fit.status == "certified"
    made.clear()
    without = minimise(CPU, LOSSES["ce"], A, Y, 1e-5, memory_limit=0)
    assert not made
    assert without.status == "certified"
    assert without.passes > 2 * fit.passes
    assert without.objective == pytest.approx(fit.objective, rel=2e-7)


@pytest.mark.parametrize("shape", [(120, 6, 3), (8, 15, 3)])
def test_the_same_on_the_stand_in_for_cupy(backend: Any, shape: Any) -> None:
    A, Y, C0 = rows(*shape)
    place = backend.asarray
    for ridge in (0.0, 1e-4):
        ours = minimise(CPU, LOSSES["ce"], A, Y, ridge, Map(CPU, C0, np.linalg.pinv(C0).T))
        metric = Map(backend, place(C0), place(np.linalg.pinv(C0).T))
        fit = minimise(backend, LOSSES["ce"], place(A), place(Y), ridge, metric)
        assert fit.status == ours.status
        assert fit.objective == pytest.approx(ours.objective, rel=1e-6, abs=1e-9)


def test_a_step_into_a_narrow_valley_does_not_climb_the_slight_slope_behind_it() -> None:
    """One row pulls hard and is soon satisfied, seventy push back a little, for long."""
    A = np.array([[1000.0]] + [[1.0]] * 70)
    Y = np.eye(2)[[0] + [1] * 70]
    problem = DenseProblem(CPU, LOSSES["ce"], A, Y, 0.0, None)
    start, D = problem.start(None), np.array([[0.15, -0.15]])
    slopes = [(LOSSES["ce"].residual(np, t * A @ D, Y) * (A @ D)).sum() for t in (0.0, 1.0)]
    assert 0 < slopes[1] < -0.1 * slopes[0]  # the whole step looks flat enough
    assert LOSSES["ce"].value(np, A @ D, Y) > start.objective  # but is no good
    assert problem.move(start, D).objective < start.objective
