"""Training on stored rows, against dense algebra, SciPy and scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special

from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.dense import Metric, minimise
from herta_gpu.losses import LOSSES

CPU = CPUBackend()


def rows(n: int, r: int, c: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """(A, one-hot Y that A says something of, a d x r map C0)."""
    rng = np.random.default_rng(seed)
    A, C0 = rng.standard_normal((n, r)), rng.standard_normal((r + 3, r))
    scores = A @ rng.standard_normal((r, c)) + 2 * rng.standard_normal((n, c))
    return A, np.eye(c)[scores.argmax(axis=1)], C0


def objective(A: Any, Y: Any, loss: str, ridge: float, G: Any) -> Any:
    """The function of a flat u and its gradient, without the package's own code."""

    def at(flat: Any) -> tuple[float, Any]:
        u = flat.reshape(A.shape[1], -1)
        F = A @ u
        if loss == "mse":
            value, E = 0.5 * ((F - Y) ** 2).sum(), F - Y
        else:
            logs = scipy.special.log_softmax(F, axis=1)
            value, E = -(Y * logs).sum(), np.exp(logs) - Y
        return value + 0.5 * ridge * (u * (G @ u)).sum(), (A.T @ E + ridge * G @ u).ravel()

    return at


def optimum(A: Any, Y: Any, loss: str, ridge: float, G: Any) -> float:
    at = objective(A, Y, loss, ridge, G)
    start = np.zeros(A.shape[1] * Y.shape[1])
    options = {"maxiter": 20000, "maxfun": 40000, "ftol": 1e-16, "gtol": 1e-10, "maxcor": 100}
    found = scipy.optimize.minimize(at, start, jac=True, method="L-BFGS-B", options=options)
    return float(found.fun)


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize("ridge", [1e-3, 1.0])
@pytest.mark.parametrize("shape", [(60, 5, 3), (12, 30, 3), (40, 40, 2)])
def test_the_optimum_is_that_of_scipy(loss: str, ridge: float, shape: Any) -> None:
    A, Y, C0 = rows(*shape)
    best = optimum(A, Y, loss, ridge, C0.T @ C0)
    fit = minimise(CPU, LOSSES[loss], A, Y, ridge, Metric.of_map(CPU, C0), goal=1e-9)
    assert fit.status == "certified"
    assert fit.gap <= 1e-9 * fit.objective
    value, gradient = objective(A, Y, loss, ridge, C0.T @ C0)(fit.u.ravel())
    assert fit.objective == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(fit.gradient.ravel(), gradient, atol=1e-9 * np.abs(A).sum())
    assert fit.objective - best <= fit.gap + 1e-9 * best
    assert fit.objective >= best * (1 - 1e-9)
