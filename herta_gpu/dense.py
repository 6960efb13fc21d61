"""Training on stored rows: min over u of loss(A u) + ridge/2 ||C0 u||^2 for a dense A.

The strategy "direct" keeps the training rows of Q as A (n_train x r), in coordinates u with
W = C0 u, and needs no solve from there on.  MSE is one factor of P = A^T A + ridge G, G = C0^T C0.
Cross entropy takes L-BFGS steps whose first guess of the inverse Hessian is P^-1, with each row of
A weighted by its curvature.  "Pass" is a product with A or A^T.
"""

from __future__ import annotations

from collections.abc import Callable

from herta_gpu.backends.base import Array, Backend, norm
from herta_gpu.descent import UNIT, Callback, DenseFit, DenseProblem, Descent, History, Point
from herta_gpu.factors import Factor
from herta_gpu.grams import ROW_CUT
from herta_gpu.hessians import Metric, factor_of, weighted_gram
from herta_gpu.losses import Loss

__all__ = ["DenseFit", "Metric", "minimise", "row_space"]

_REFINEMENTS = 3  # of the solution of MSE


def minimise(
    backend: Backend,
    loss: Loss,
    A: Array,
    Y: Array,
    ridge: float = 0.0,
    metric: Metric | None = None,
    *,
    goal: float = 1e-7,
    max_steps: int = 2000,
    start: Array | None = None,
    factor: Factor | None = None,
    memory_limit: int | None = None,
    callback: Callback | None = None,
    gram: Array | None = None,
) -> DenseFit:
    """Minimise loss(A u) + ridge/2 <u, G u> over u.

    Parameters
    ----------
    backend : Backend
    loss : Loss
        One of `herta_gpu.losses.LOSSES`.
    A : (n_train, r) float64 array of the backend
    Y : (n_train, c) float64 array of the backend
    ridge : float
    metric : Metric
        G; None is the identity.
    goal : float
        Stop once the gap is proven to be at most goal * objective.
    max_steps : int
        Of cross entropy; MSE takes none but refinements.
    start : (r, c) array
        Where to begin; 0 if None.
    factor : Factor
        C with C C^T = (A^T A + ridge G)^-1, for MSE; where it cuts directions, the optimum is the
        one over the others.  Made here if None.
    memory_limit : int
        Bytes that may be allocated beside A; None asks the backend.
    callback : function
        Called with each record of the history.
    gram : (r, r) array
        A^T A as the loss sees its rows, if that is known: cross entropy begins with it.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.backends import get_backend
    >>> from herta_gpu.losses import LOSSES
    >>> rng = np.random.default_rng(0)
    >>> A, Y = rng.standard_normal((50, 4)), np.eye(3)[rng.integers(0, 3, 50)]
    >>> fit = minimise(get_backend("cpu"), LOSSES["ce"], A, Y, ridge=0.1)
    >>> fit.status, bool(fit.gap <= 1e-7 * fit.objective)
    ('certified', True)
    """
    metric = metric or Metric(backend)
    problem = DenseProblem(backend, loss, A, Y, ridge, metric, gram)
    if A.shape[0] < A.shape[1] and factor is None:
        return _in_row_space(problem, goal, max_steps, start, memory_limit, callback)
    if loss.quadratic:
        return _least_squares(problem, goal, start, factor, callback)
    limit = backend.memory_available() if memory_limit is None else memory_limit
    return Descent(problem, goal, max_steps, limit, callback).run(problem.start(start))


def row_space(
    backend: Backend, A: Array, ridge: float, metric: Metric
) -> tuple[Array, Callable[[Array], Array], Callable[[Array], Array]]:
    """(T, lift, lower): the same problem in as few coordinates as A has rows.

    loss(A u) + ridge/2 <u, G u> is smallest at some u = lift(t), where it is
    loss(T t) + ridge/2 ||t||^2; lower(u) is the nearest t.  With G = K^-T K^-1 and u = K v the
    problem has the rows A K and the ridge of the identity; directions of v that no row has would
    only add to the ridge term.  Without a ridge they have no effect at all, and neither has G.
    """
    plain = metric if ridge > 0 else Metric(backend)
    B = plain.rows(A)
    if ridge > 0:
        V, R = backend.xp.linalg.qr(B.T)
        T = backend.xp.ascontiguousarray(R.T)
    else:
        V, _ = backend.row_space(B, ROW_CUT)
        T = backend.matmul(B, V)

    def lift(t: Array) -> Array:
        return plain.lift(backend.matmul(V, t))

    def lower(u: Array) -> Array:
        return backend.matmul(V.T, plain.lower(u))

    return T, lift, lower


def _in_row_space(
    whole: DenseProblem,
    goal: float,
    max_steps: int,
    start: Array | None,
    memory_limit: int | None,
    callback: Callback | None,
) -> DenseFit:
    """Fewer rows than columns: train where the rows are, measure in the whole space."""
    backend, ridge = whole.backend, whole.ridge
    T, lift, lower = row_space(backend, whole.A, ridge, whole.metric)
    fit = minimise(
        backend,
        whole.loss,
        T,
        whole.Y,
        ridge,
        goal=0.5 * goal,  # what rounding adds on the way back
        max_steps=max_steps,
        start=None if start is None else lower(start),
        memory_limit=memory_limit,
        callback=callback,
    )
    point = whole.start(lift(fit.u))
    gap = whole.gap(point) if ridge > 0 else fit.gap
    fit.u, fit.objective, fit.gradient, fit.gap = point.u, point.objective, point.g, gap
    fit.objective_error = whole.objective_error(point)
    if fit.status == "certified" and not gap <= goal * point.objective:
        fit.status = "stagnated"
    fit.passes += whole.passes
    return fit


def _least_squares(
    problem: DenseProblem,
    goal: float,
    start: Array | None,
    factor: Factor | None,
    callback: Callback | None,
) -> DenseFit:
    """MSE: u = P^-1 A^T Y, refined until the gradient is rounding."""
    history: History = []
    exact = factor is None or factor.slack < 0.1
    if factor is None:
        P = weighted_gram(problem.backend, problem.A)
        problem.metric.add_to(P, problem.ridge)
        factor, exact = factor_of(problem.backend, P, problem.ridge, measured=True)
    point = problem.start(start)
    size = norm(factor.half_T(point.g))
    problem.record(history, point, _quadratic_gap(problem, point, factor, size, exact), callback)
    for _ in range(_REFINEMENTS):
        ahead = problem.start(problem.move(point, -factor.half(factor.half_T(point.g))).u)
        left = norm(factor.half_T(ahead.g))
        if not left < size:
            break
        shrunk, size, point = left / size, left, ahead
        gap = _quadratic_gap(problem, point, factor, size, exact)
        problem.record(history, point, gap, callback)
        if shrunk > 0.5:
            break
    status = "certified" if history[-1]["gap"] <= goal * point.objective else "stagnated"
    if status == "stagnated" and point.objective <= goal**2 * problem.at_zero:
        status = "converged"  # an optimum of about 0 has no relative gap
    return problem.fit(point, size, history[-1]["gap"], status, history)


def _quadratic_gap(
    problem: DenseProblem, point: Point, factor: Factor, size: float, exact: bool
) -> float:
    """1/2 <g, P^-1 g>, or by duality where P is not the Hessian."""
    if not exact:
        return problem.gap(point)
    rounding = problem.forward_rounding(point)  # ||A C|| <= 1
    rows = (problem.A.shape[0] + 2) * UNIT * norm(point.E) * problem.columns
    return 0.5 * (size + rounding + factor.amplified(rows)) ** 2
