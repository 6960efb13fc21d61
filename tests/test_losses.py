"""The losses: values and derivatives against closed forms and finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special

from herta_gpu.losses import LOSSES, Loss
from herta_gpu.optimizers import make_optimizer

NAMES = list(LOSSES)


def data(rows: int = 7, classes: int = 4, seed: int = 0) -> tuple[Any, Any, Any]:
    """(F, a direction, one-hot Y)."""
    rng = np.random.default_rng(seed)
    F, D = rng.standard_normal((2, rows, classes))
    return F, D, np.eye(classes)[rng.integers(0, classes, rows)]


def gradient_by_differences(loss: Loss, F: Any, Y: Any, h: float = 1e-6) -> Any:
    G = np.zeros_like(F)
    for at in np.ndindex(*F.shape):
        E = np.zeros_like(F)
        E[at] = h
        G[at] = (loss.value(np, F + E, Y) - loss.value(np, F - E, Y)) / (2 * h)
    return G


def test_cross_entropy_survives_outputs_that_overflow_exp() -> None:
    F, Y = np.array([[1e4, 0.0], [0.0, -1e4]]), np.eye(2)
    loss = LOSSES["ce"]
    assert loss.value(np, F, Y) == pytest.approx(1e4)  # the first row is right, the second wrong
    np.testing.assert_allclose(loss.residual(np, F, Y), [[0, 0], [1, -1]])


@pytest.mark.parametrize("name", NAMES)
def test_the_residual_is_the_gradient(name: str) -> None:
    F, _, Y = data()
    loss = LOSSES[name]
    expected = gradient_by_differences(loss, F, Y)
    np.testing.assert_allclose(loss.residual(np, F, Y), expected, atol=1e-8)


def second_derivatives(loss: Loss, F: Any, h: float = 1e-6) -> Any:
    """(rows, c, c) Hessians of the rows with respect to their outputs, by central differences."""
    Y, found = np.eye(F.shape[1])[np.zeros(len(F), dtype=int)], []
    for b in range(F.shape[1]):
        E = np.zeros_like(F)
        E[:, b] = h  # rows are independent of each other
        found.append((loss.residual(np, F + E, Y) - loss.residual(np, F - E, Y)) / (2 * h))
    return np.stack(found, axis=2)


@pytest.mark.parametrize("name", NAMES)
def test_the_curvature_is_the_mean_diagonal_of_the_hessian(name: str) -> None:
    F, _, _ = data()
    loss = LOSSES[name]
    expected = np.trace(second_derivatives(loss, F), axis1=1, axis2=2).mean() / 4
    assert loss.curvature(np, F) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_curvature_at_the_start_is_that_of_outputs_of_zero(name: str, classes: int) -> None:
    loss = LOSSES[name]
    assert loss.start_curvature(classes) == pytest.approx(
        loss.curvature(np, np.zeros((5, classes)))
    )
    assert LOSSES["ce"].start_curvature(1) == 1.0  # one class has none, but P needs some


@pytest.mark.parametrize("name", NAMES)
def test_centred_keeps_every_gradient_and_is_a_projection(name: str) -> None:
    F, D, Y = data()
    loss = LOSSES[name]
    residual = loss.residual(np, F, Y)
    np.testing.assert_allclose(loss.centre(np, residual), residual, atol=1e-15)
    once = loss.centre(np, D)
    np.testing.assert_allclose(loss.centre(np, once), once, atol=1e-15)
    # The part that `centred` removes changes no value.
    assert loss.value(np, F + D - once, Y) == pytest.approx(loss.value(np, F, Y), rel=1e-13)


@pytest.mark.parametrize("ridge", [0.0, 0.7])
def test_the_step_of_mse_is_optimal_for_every_column(ridge: float) -> None:
    F, D, Y = data()
    W, V = np.random.default_rng(1).standard_normal((2, 5, 4))
    slope, curvature = ridge * (W * V).sum(axis=0), ridge * (V * V).sum(axis=0)
    eta = LOSSES["mse"].step(np, F, D, Y, (slope, curvature))
    nothing = LOSSES["mse"].step(np, F, 0 * D, Y, (np.zeros(4), np.zeros(4)))
    assert not nothing.any()
    for j in range(4):

        def along(t: float, j: int = j) -> float:
            w = W[:, j] + t * V[:, j]
            return 0.5 * ((F[:, j] + t * D[:, j] - Y[:, j]) ** 2).sum() + 0.5 * ridge * (w @ w)

        assert eta[j] == pytest.approx(scipy.optimize.minimize_scalar(along).x, abs=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("ridge", [0.0, 0.7])
def test_the_step_of_cross_entropy_is_optimal(ridge: float, scale: float) -> None:
    F, _, Y = data(rows=60)
    D = -LOSSES["ce"].residual(np, F, Y) * scale + scale * data(60, seed=3)[1]
    D *= -np.sign((LOSSES["ce"].residual(np, F, Y) * D).sum())  # a direction of descent
    curvature = np.full(4, ridge * scale**2)
    eta = LOSSES["ce"].step(np, F, D, Y, (np.zeros(4), curvature))
    assert np.unique(eta).size == 1  # the columns of cross entropy share one step

    def slope(t: float) -> float:
        return (LOSSES["ce"].residual(np, F + t * D, Y) * D).sum() + t * curvature.sum()

    assert slope(0) < 0
    best = scipy.optimize.brentq(slope, 0, 100 / scale, xtol=1e-14 / scale)
    assert eta[0] == pytest.approx(best, rel=1e-5)


def test_separable_classes_have_a_long_step_and_not_an_endless_one() -> None:
    Y = np.eye(2)
    eta = LOSSES["ce"].step(np, 0 * Y, Y, Y, (np.zeros(2), np.zeros(2)))
    assert 10 < eta[0] < np.inf
    assert LOSSES["ce"].value(np, eta * Y, Y) < 1e-4


def test_a_step_may_end_where_the_slope_is_small_enough() -> None:
    F, _, Y = data(rows=60)
    loss = LOSSES["ce"]
    D = -loss.residual(np, F, Y)

    def slope(t: float) -> float:
        return float((loss.residual(np, F + t * D, Y) * D).sum())

    none = (np.zeros(4), np.zeros(4))
    enough = 0.3 * abs(slope(0))
    rough = loss.step(np, F, D, Y, none, enough)[0]
    assert abs(slope(rough)) <= enough
    assert abs(slope(loss.step(np, F, D, Y, none)[0])) <= 1e-5 * abs(slope(0)) < abs(slope(rough))


def test_cross_entropy_of_shares_that_do_not_add_up_to_one() -> None:
    F, _, Y = data()
    Y = 0.3 * Y
    expected = (scipy.special.logsumexp(F, axis=1) - (F * Y).sum(axis=1)).sum()
    assert LOSSES["ce"].value(np, F, Y) == pytest.approx(expected, rel=1e-13)


def test_cross_entropy_of_rows_that_are_all_but_certain_keeps_its_digits() -> None:
    Y, gap = np.eye(3), 20.0
    F = 1e5 + gap * Y  # the same number for all classes changes nothing
    exact = 3 * np.log1p(2 * np.exp(-gap))
    assert LOSSES["ce"].value(np, F, Y) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_curvature_of_a_row_is_the_mean_of_its_eigenvalues(name: str) -> None:
    F, _, Y = data()
    loss = LOSSES[name]
    found = loss.row_curvature(np, loss.residual(np, F, Y), Y)
    values = np.linalg.eigvalsh(second_derivatives(loss, F))
    expected = values[:, 1:] if name == "ce" else values  # one is 0 in "ce"
    np.testing.assert_allclose(found, expected.mean(axis=1), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_rounding_of_a_value_is_within_its_bound(name: str) -> None:
    F, _, Y = data(rows=200)
    F = 1e3 * F
    loss = LOSSES[name]
    with np.errstate(over="ignore"):
        top = F.max(axis=1, keepdims=True).astype(np.longdouble)
        sums = np.log(np.exp(F - top).sum(axis=1)) + top[:, 0]
        exact = (sums - (F * Y).sum(axis=1, dtype=np.longdouble)).sum()
    if name == "bce":
        exact = (np.logaddexp(0, F.astype(np.longdouble)) - F.astype(np.longdouble) * Y).sum()
    if name == "mse":
        assert loss.rounding(F) == 0.0
    else:
        assert abs(np.longdouble(loss.value(np, F, Y)) - exact) <= loss.rounding(F)
        assert loss.rounding(F) < 1e-9 * float(exact)  # the bound is not only true but small


@pytest.mark.parametrize("name", NAMES)
def test_what_a_loss_says_of_itself(name: str) -> None:
    """A separable loss has no second derivative across columns; a quadratic one, constant ones."""
    F, D, _ = data()
    loss = LOSSES[name]
    second, there = second_derivatives(loss, F), second_derivatives(loss, D)
    across = np.abs(second * (1 - np.eye(4))).max()
    assert loss.separable == (across < 1e-8)
    assert loss.quadratic == (np.abs(second - there).max() < 1e-8)
    assert make_optimizer("cg", None, np, loss.separable).searches


# ---- weights and an intercept --------------------------------------------------------------
WEIGHTS = np.random.default_rng(9).uniform(0.05, 1.0, 7)


def reference(name: str, F, Y, w) -> float:
    """The weighted loss, straight from its definition."""
    if name == "mse":
        return float((w[:, None] * (F - Y) ** 2).sum() / 2)
    if name == "ce":
        return float((w * (np.logaddexp.reduce(F, axis=1) - (F * Y).sum(axis=1))).sum())
    return float((w[:, None] * (np.logaddexp(0, F) - F * Y)).sum())


@pytest.mark.parametrize("name", NAMES)
def test_weights_count_rows(name: str) -> None:
    F, _, Y = data()
    loss = LOSSES[name].bind(WEIGHTS, False)
    for one, w in ((loss, WEIGHTS), (LOSSES[name], np.ones(7))):
        assert one.value(np, F, Y) == pytest.approx(reference(name, F, Y, w), rel=1e-13)
    E = loss.residual(np, F, Y)
    np.testing.assert_allclose(E, WEIGHTS[:, None] * LOSSES[name].residual(np, F, Y), atol=1e-14)
    D = -E
    eta = loss.step(np, F, D, Y, (np.zeros(4), np.zeros(4)))
    slope = (loss.residual(np, F + eta * D, Y) * D).sum()
    assert abs(slope) <= 1e-5 * (E * D).sum() ** 2 + 1e-5
    part = loss.of_rows(slice(2, 5))
    assert part.value(np, F[2:5], Y[2:5]) == pytest.approx(
        reference(name, F[2:5], Y[2:5], WEIGHTS[2:5])
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_an_intercept_is_the_best_constant(name: str, weighted: bool) -> None:
    F, _, _ = data()
    Y = np.eye(4)[[0, 1, 2, 3, 0, 1, 2]]  # each class, and each column has zeros and ones
    w = WEIGHTS if weighted else np.ones(7)
    loss = LOSSES[name].bind(WEIGHTS if weighted else None, True)
    found = scipy.optimize.minimize(
        lambda b: reference(name, F + b, Y, w), np.zeros(4), method="BFGS", options={"gtol": 1e-9}
    )
    assert loss.value(np, F, Y) == pytest.approx(found.fun, rel=1e-9)
    assert loss.value(np, F, Y) <= found.fun * (1 + 1e-13)
    E = loss.residual(np, F, Y)
    np.testing.assert_allclose(E.sum(axis=0), 0, atol=1e-12)
    assert loss.imbalance(np, E) <= 1e-12
    np.testing.assert_allclose(loss.residual(np, F + np.arange(4), Y), E, atol=1e-11)
    # The gradient is that of the smallest value, by differences.
    h = 1e-6
    for at in ((0, 0), (3, 2), (6, 1)):
        ahead, behind = F.copy(), F.copy()
        ahead[at] += h
        behind[at] -= h
        slope = (loss.value(np, ahead, Y) - loss.value(np, behind, Y)) / (2 * h)
        assert slope == pytest.approx(E[at], abs=1e-7)


@pytest.mark.parametrize("name", ["ce", "bce"])
def test_constants_of_the_optimum_are_within_reach(name: str) -> None:
    """The bound behind the certificate: b of the optimum is no farther than `reach`."""
    rng = np.random.default_rng(4)
    A, Y = rng.standard_normal((30, 3)) + 2, np.eye(3)[rng.integers(0, 3, 30)]
    w, ridge = rng.uniform(0.1, 1, 30), 0.05

    def value(t):
        W, b = t[:9].reshape(3, 3), t[9:]
        return reference(name, A @ W + b, Y, w) + ridge / 2 * (W**2).sum()

    found = scipy.optimize.minimize(value, np.zeros(12), method="BFGS")
    loss, b = LOSSES[name].bind(w, True), rng.standard_normal(3)
    X_norm = float(np.linalg.norm(A, 2))
    reach = loss.intercept_distance(np, Y, b, value(np.append(np.zeros(9), b)), ridge, X_norm)
    apart = found.x[9:] - found.x[9:].mean() * (name == "ce") - (b - b.mean() * (name == "ce"))
    assert np.sqrt(w.sum()) * np.linalg.norm(apart) <= reach < 1e4


def test_unknown_labels_and_columns_of_one_kind() -> None:
    F, _, _ = data()
    Y = np.array([[1, 0, 1, -1], [1, -1, 0, -1]] * 3 + [[1, 0, 1, -1]], dtype=float)
    loss, known = LOSSES["bce"], Y >= 0
    expected = (np.logaddexp(0, F) - F * Y)[known].sum()
    assert loss.value(np, F, Y) == pytest.approx(expected, rel=1e-13)
    assert (loss.residual(np, F, Y)[~known] == 0).all()
    free = loss.bind(None, True)  # columns 0 and 1 have one kind of label: no loss is left
    rest = free.value(np, F[:, 2:3], Y[:, 2:3])
    assert free.value(np, F, Y) == pytest.approx(rest, rel=1e-13)
    b = free.shift(np, F, Y)
    assert (b[0], b[1], b[3]) == (60.0, -60.0, 0.0)


@pytest.mark.parametrize("far", [0.0, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("name", ["ce", "bce"])
def test_constants_are_found_wherever_the_outputs_are(name: str, far: float) -> None:
    """Cause: Newton's method from where the outputs were not had no curvature to go by.

    Outputs that are `far` from 0, column by column, have the constants of those around 0 less that.
    """
    rng = np.random.default_rng(2)
    F, Y = 4 * rng.standard_normal((40, 3)), np.eye(3)[rng.integers(0, 3, 40)]
    loss = LOSSES[name].bind(rng.uniform(0.2, 1.0, 40), True)
    moved = F + far * np.array([1.0, -2.0, 0.5])
    assert loss.value(np, moved, Y) == pytest.approx(loss.value(np, F, Y), rel=1e-9)
    E = loss.residual(np, moved, Y)
    assert np.abs(E.sum(axis=0)).max() <= 1e-8 * (1 + far)


@pytest.mark.parametrize("name", ["ce", "bce"])
def test_the_best_constants_of_outputs_that_are_far_apart(name: str) -> None:
    """No constants of a fine grid are better: sizes up to 300, classes mixed."""
    rng = np.random.default_rng(3)
    for size in (10.0, 100.0, 300.0):
        F, Y = size * rng.standard_normal((30, 2)), np.eye(2)[rng.integers(0, 2, 30)]
        plain, loss = LOSSES[name], LOSSES[name].bind(None, True)
        found = loss.value(np, F, Y)
        if name == "bce":  # columns are problems of their own, in one number each
            best = 0.0
            for k in range(2):
                column = [
                    plain.value(np, F[:, [k]] + b, Y[:, [k]])
                    for b in np.linspace(-4 * size, 4 * size, 801)
                ]
                best += min(column)
        else:
            best = min(
                plain.value(np, F + np.array([b, 0.0]), Y)
                for b in np.linspace(-6 * size, 6 * size, 801)
            )
        assert found <= best * (1 + 1e-12)
