"""The strategy "direct": train on the stored rows of Q, and prove it from Q alone.

With D = A - Q, A = M H^-1 X and Q the stored rows (both in coordinates u, W = C0 u), and
with bounds of the norms of D's columns, the true gradient at u is known up to

    ||C^T g|| <= ||C^T g_Q|| + rho ||E_Q|| + (1 + rho) ||D u||,      rho >= ||D C||,

for C C^T = P^-1 and g_Q, E_Q the gradient and the residual of the stored problem: no solve and no
array on all nodes is needed any more.  MSE has a Hessian of at least (1 - rho)^2 in these
coordinates, so its gap is at most ||C^T g||^2 / (2 (1 - rho)^2).  With a ridge any loss is strongly
convex in W, and the same difference seen from W gives

    ||g|| <= ||g_Q|| + ||D|| ||E_Q|| + beta ||X|| ||D u||,           gap <= ||g||^2 / (2 ridge),

beta the largest curvature of the loss; or, as E_Q is a gradient of the true loss as well, at
outputs that are off by D u, and the loss is convex and no steeper than beta,

    gap <= (||g_Q|| + ||D|| ||E_Q||)^2 / (2 ridge) + beta/2 ||D u||^2.

Rounding is counted where it happens, that of W = C0 u included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from herta_gpu.backends.base import Array, Backend, norm, unit_roundoff
from herta_gpu.certificate import Certificate, relative
from herta_gpu.descent import DenseProblem, minimise
from herta_gpu.factors import DenseGram, Spanned
from herta_gpu.losses import Loss
from herta_gpu.preconditioner import Preconditioner

Tell = Callable[[dict[str, Any]], None]

_UNIT = unit_roundoff()
_SLACK = 0.1  # departure of P from Q^T Q + ridge beyond which nothing is built on that form
_CHUNK_BYTES = 32 << 20  # outputs at a time
_LOSS_ERROR = 300.0  # times tol: the bound of what is not known of the objective
_LEAST_SHARE = 1e-12
_EXACT = 1e-4  # times tol: what a gradient may leave of the gap before it is worth another step
_REFINEMENTS = 3  # of least squares: each repairs what rounding did to the factor


@dataclass(frozen=True)
class Terms:
    """What a bound of the gap is made of; `share` scales what the solves left, D."""

    kind: str
    gradient: float  # of the stored problem, rounding included
    E: float  # ||E_Q||
    through: float  # how an error of the outputs reaches the gradient
    D: float  # ||D|| as the gradient sees it
    Du: float  # ||D u||
    other: float  # errors of the outputs that are rounding
    convexity: float  # strong convexity at D = 0, as a root
    bend: float = math.inf  # the largest curvature of the loss, where it need not be quadratic
    slip: float = 0.0  # what E is off by, beside being that of outputs which are off
    aside: Callable[[float], float] | None = None  # what is added to the gap, from such an error

    def gap(self, share: float = 1.0) -> float:
        D, error = share * self.D, share * self.Du + self.other
        aside = 0.0 if self.aside is None else self.aside(error)
        size = self.gradient + D * self.E + (self.through + D) * error
        root = self.convexity - D if self.kind == "residual" else self.convexity
        if root <= 0:
            return math.inf
        gap = size**2 / (2 * root**2)
        if self.bend < math.inf:
            # Rounding of E itself is seen through X.
            size = self.gradient + D * self.E + (self.through / self.bend + D) * self.slip
            gap = min(gap, size**2 / (2 * root**2) + 0.5 * self.bend * error**2)
        return math.inf if math.isnan(gap) else gap + aside


@dataclass(frozen=True)
class Proof:
    """What is known at one u."""

    objective: float
    rounding: float  # of the objective, at exact outputs
    slope: float  # ||E_Q||: how fast the objective changes with the outputs
    grad_norm: float
    choices: tuple[Terms, ...]
    Du: float  # ||D u|| ...
    other: float  # ... and errors of the outputs that are rounding
    note: str
    kept: int
    features: int
    unit: float = 0.0  # the loss of W = 0, where the optimum may be 0: a ridge forbids that

    def certificate(self, share: float = 1.0) -> Certificate:
        if not self.choices:
            return Certificate(
                math.inf, "none", note=self.note, kept=self.features, features=self.features
            )
        gap, best = min(((terms.gap(share), terms) for terms in self.choices), key=lambda c: c[0])
        error = share * best.Du + best.other
        below = self.objective - self.rounding - error * (self.slope + 0.5 * error) - gap
        spectral = best.kind == "residual"
        kept, note = (self.kept, self.note) if spectral else (self.features, "")
        value = relative(gap, below)
        return Certificate(value, best.kind, 0.0, gap, note, kept, self.features)

    def nonnegative(self) -> Certificate:
        """What the objective itself says: none is below 0."""
        gap, d = self.objective + self.error(), self.features
        return Certificate(math.inf, "nonnegative", 0.0, gap, self.note, d, d)

    def error(self, share: float = 1.0) -> float:
        """The objective is right up to this much."""
        off = min([share * self.Du, *(share * terms.Du for terms in self.choices)]) + self.other
        return self.rounding + off * (self.slope + 0.5 * off)

    def about_zero(self, tol: float, share: float = 1.0) -> bool:
        """Whether the optimum is about 0, which has no relative gap, and that is known."""
        near = self.near_zero(tol**2 if self.choices else tol)
        return near and self.objective + self.error(share) <= tol * self.unit

    def near_zero(self, share: float) -> bool:
        """Whether the objective is a small share of that of W = 0, without a ridge."""
        return self.objective <= share * self.unit

    def enough(self, tol: float, share: float = 1.0) -> bool:
        """Whether the gap is proven, and the objective known about as well as the gap.

        What D really does to the objective is orders of magnitude below its bound.
        """
        known = self.error(share) <= _LOSS_ERROR * tol * self.objective
        return (known and self.certificate(share).value <= tol) or self.about_zero(tol, share)

    def wanted(self, tol: float) -> float:
        """The share of what the solves left that would be small enough; 0: none would be."""
        low, high = 0.0, 1.0
        if not self.enough(tol, 0.0):
            return 0.0
        while not (low and high < 1.2 * low) and high > _LEAST_SHARE:
            middle = 0.5 * (low + high) if low else 0.1 * high
            low, high = (middle, high) if self.enough(tol, middle) else (low, middle)
        return low


@dataclass
class Sweep:
    """One look at all stored rows."""

    loss: float
    gradient: Array  # r x c, of the objective with respect to u
    E: float  # norm of the gradient of the loss with respect to the outputs
    F: float  # norm of the outputs ...
    Y: float  # ... and of what they should be
    rounding: float  # of the loss
    b: Array | None = None  # (c,) the constants of an intercept, in the coordinates of `Q` ...
    sums: Array | None = None  # ... and 1^T E, which they should make 0


class StoredProblem:
    """min over u of loss(Q u) + ridge/2 ||C0 u||^2 on the stored rows."""

    def __init__(
        self, backend: Backend, loss: Loss, P: Preconditioner, Y: Array, ridge: float, X_norm: float
    ) -> None:
        assert P.rows is not None
        assert P.basis is not None
        self.backend, self.loss, self.P, self.Y, self.ridge = backend, loss, P, Y, ridge
        self.Q = P.rows if loss.quadratic else P.rows.astype("float64", copy=False)
        self.basis, self.X_norm = P.basis, X_norm
        self.mean = loss.mean(backend.xp, self.Q) if loss.intercept else None
        if self.mean is not None:
            self.Q = self.Q - self.mean  # nothing but constants: the loss has its own
        self._swept: tuple[Array, Sweep] | None = None  # the last look, at this very u
        self._Y_mean: Array | None = None
        self.settled = True  # whether the optimum of the stored problem was found
        self.host: Backend | None = None  # where cross entropy is trained, if not on the device
        self.sizes = backend.xp.sqrt(backend.column_dots(self.Q, self.Q))

    def sweep(self, u: Array) -> Sweep:
        """Loss and gradient at u, over runs of rows: no other array of n_train x c is made."""
        if self._swept is not None and self._swept[0] is u:
            return self._swept[1]
        xp, matmul = self.backend.xp, self.backend.matmul
        found = Sweep(0.0, self.ridge * self._penalty(u), 0.0, 0.0, 0.0, 0.0)
        # Rows in float32 are widened on the way.
        numbers = u.shape[1] + (u.shape[0] if self.Q.dtype != u.dtype else 0)
        step, total = max(1, _CHUNK_BYTES // (8 * numbers)), 0.0
        if self.loss.intercept:
            found.b, found.sums = self._constants(u), xp.zeros(u.shape[1])
        for i in range(0, self.Y.shape[0], step):
            Q, Y = self.Q[i : i + step].astype("float64", copy=False), self.Y[i : i + step]
            loss = self._rows(i, step)
            F = matmul(Q, u)
            F = F if found.b is None else F + found.b
            E = loss.residual(xp, F, Y)
            total = total + matmul(Q.T, E)
            found.loss += loss.value(xp, F, Y)
            found.rounding += loss.rounding(F)
            if found.sums is not None:
                found.sums += E.sum(axis=0)
            found.E = math.hypot(found.E, norm(E))
            found.F = math.hypot(found.F, norm(F))
            found.Y = math.hypot(found.Y, norm(Y))
        found.gradient = self.loss.centre(xp, total) + found.gradient
        self._swept = (u, found)
        return found

    def _rows(self, start: int, count: int) -> Loss:
        return self.loss.of_rows(slice(start, start + count))

    def _constants(self, u: Array) -> Array:
        """The best constants of an intercept at u."""
        xp = self.backend.xp
        if not self.loss.quadratic:
            return self.loss.shift(xp, self.backend.matmul(self.Q, u), self.Y[:])
        if self._Y_mean is None:
            self._Y_mean = self._mean_of_Y()
        # Rows of Q are centred but for rounding.
        return self._Y_mean - self.loss.mean(xp, self.Q) @ u

    def _mean_of_Y(self) -> Array:
        """Weighted, over runs of rows: not all of Y need be there at once."""
        total, step = 0.0, 1 << 16
        for i in range(0, self.Y.shape[0], step):
            total = total + self._rows(i, step).weigh(self.Y[i : i + step]).sum(axis=0)
        return total / self.loss.total(self.Y.shape[0])

    def intercept(self, u: Array) -> Array | None:
        """(c,) the constants that belong to W = C0 u; None where there are none."""
        b = self.sweep(u).b
        return None if b is None or self.mean is None else b - self.mean @ u

    def _penalty(self, u: Array) -> Array:
        G = self.basis.ridge
        return G[:, None] * u if G.ndim == 1 else self.backend.matmul(G, u)

    def minimised(self, tol: float, start: Array | None, steps: int, tell: Tell) -> Array:
        """u at the optimum of the stored problem, or ten times closer to it than `tol`."""
        if self.loss.quadratic:
            return self.least_squares(tol)
        # It holds several arrays of n_train x c, which may be too much for a GPU, not for the host.
        backend = self.host or self.backend
        memory = int(self.backend.agreed(backend.memory_available()))

        def there(x: Array) -> Array:
            return x if self.host is None else self.backend.to_numpy(x)  # synchronize!

        gram = there(self.P.gram.QtQ) if isinstance(self.P.gram, DenseGram) else None
        problem = DenseProblem(
            backend, self.loss, there(self.Q), there(self.Y[:]), self.ridge,
            self.basis.metric().on(backend, there), gram,
        )  # fmt: skip
        begin = None if start is None else there(start)
        fitted = minimise(problem, 0.1 * tol, steps, begin, memory, tell)
        self.settled = fitted.status != "max_iter"
        return self.backend.asarray(fitted.u)

    def least_squares(self, tol: float) -> Array:
        """u = P^-1 Q^T Y, refined by gradients of the stored problem where that matters."""
        inner = self.P.inner
        u, last = inner.to_weights(self.P.w_start), math.inf
        for _ in range(_REFINEMENTS):
            found = self.sweep(u)
            w = inner.to_gradient(found.gradient)
            size = norm(w)
            if size**2 <= _EXACT * tol * found.loss or not size < 0.5 * last:
                break
            u, last = u - inner.to_weights(w), size
        return u

    def proof(self, u: Array, why_not: Callable[[float], str], at_zero: float = 0.0) -> Proof:
        """Everything that is known of the true problem at W = C0 u; the loss of W = 0 is given."""
        xp, P = self.backend.xp, self.P
        found, W = self.sweep(u), self.basis.weights(u)
        g, slope = found.gradient, found.E
        by_row = xp.sqrt((u * u).sum(axis=1))
        objective = found.loss + 0.5 * self.ridge * float(xp.sum(W * W))  # synchronize!
        # Rounding: of Q u and of E, of Q^T E and the ridge's part, and of W itself.
        r, count = u.shape[0], self.Y.shape[0]
        outputs = (r + 2) * _UNIT * float((self.sizes * by_row).sum())  # synchronize!
        outputs += 4 * _UNIT * (found.F + found.Y) / self.loss.steepest
        outputs += self.basis.weights_rounding(u)
        rows = (count + 4) * _UNIT * slope * self.sizes
        rows = rows + (r + 2) * _UNIT * xp.sqrt((g * g).sum(axis=1))  # of C^T g
        aside: Callable[[float], float] | None = None
        if found.b is not None:
            stray, shifted = self._stray(found), self._shift_rounding(u, by_row, found.b)
            outputs, slope = outputs + shifted, slope + stray
            rows = rows + count * _UNIT * stray * self.sizes  # Q is centred up to rounding only
            aside = self._aside(found, stray, objective + outputs * (slope + outputs))
        if self.ridge > 0:
            # C0^T C0, its product with u and W itself are sums of r terms, if C0 is not diagonal.
            terms = 8 if self.basis.ridge.ndim == 1 else 3 * r + 8
            rows = rows + terms * _UNIT * self.ridge * self.basis.ridge_size(by_row)
        Du = float((P.column_error * by_row).sum())  # synchronize!
        if isinstance(P.inner, Spanned):
            missed = P.inner.missed(u, self.sizes + P.column_error)
            outputs, aside = outputs + missed, _moved(missed, slope, aside)
        choices = []
        slack = P.inner.slack
        if self.loss.quadratic and slack < _SLACK:
            size = norm(P.inner.to_gradient(g)) + P.inner.amplified(rows)
            rho, top = P.inner.amplified(P.column_error), math.sqrt(1 + slack)
            choices.append(
                Terms("residual", size, slope, top, rho, min(Du, rho * self._length(u)), outputs,
                      math.sqrt(1 - slack), aside=aside)
            )  # fmt: skip
        if self.ridge > 0:
            size = self.basis.dual_norm(g) + self.basis.dual_bound(rows)
            D = self.basis.dual_bound(P.column_error)
            through = self.loss.steepest * self.X_norm
            choices.append(
                Terms("duality", size, slope, through, D, Du, outputs, math.sqrt(self.ridge),
                      self.loss.steepest, self.loss.gradient_rounding(found.E, self.Y), aside)
            )  # fmt: skip
        note = P.note if choices else why_not(objective)
        grad_norm = norm(self.basis.gradient(g))
        rounding = found.rounding + 8 * _UNIT * objective
        return Proof(
            objective, rounding, slope, grad_norm, tuple(choices), Du, outputs, note, P.kept,
            P.features, at_zero if self.ridge == 0 else 0.0,
        )  # fmt: skip

    def _stray(self, found: Sweep) -> float:
        """||1^T E|| over the root of all weights, rounding included."""
        assert found.sums is not None
        count = self.Y.shape[0]
        rounded = (count + 4) * _UNIT * math.sqrt(count) * (found.E + 4 * _UNIT * found.F)
        return (norm(found.sums) + rounded) / math.sqrt(self.loss.total(count))

    def _shift_rounding(self, u: Array, by_row: Array, b: Array) -> float:
        """What rounding of the constants, and of the rows less their mean, does to the outputs."""
        assert self.mean is not None
        terms = float((abs(self.mean) * by_row).sum()) + norm(b)  # synchronize!
        whole = (u.shape[0] + 4) * _UNIT * math.sqrt(self.Y.shape[0]) * terms
        return whole + _UNIT * float((self.sizes * by_row).sum())  # synchronize!

    def _aside(self, found: Sweep, stray: float, objective: float) -> Callable[[float], float]:
        """What the constants may add to the gap, given what the outputs are off by."""
        assert found.b is not None
        Y = self.Y[:0] if self.loss.quadratic else self.Y[:]
        known = (objective, self.ridge, self.X_norm)
        reach = self.loss.intercept_distance(self.backend.xp, Y, found.b, *known)
        return lambda error: self.loss.intercept_gap(stray, error, reach)

    def _length(self, u: Array) -> float:
        return norm(self.P.inner.from_weights(u))


def _moved(
    missed: float, slope: float, aside: Callable[[float], float] | None
) -> Callable[[float], float]:
    """What is added to the gap where W is not quite one of the weights that the proof speaks of.

    Its outputs are up to `missed` from those of one of them.
    """

    def added(error: float) -> float:
        before = 0.0 if aside is None else aside(error)
        return before + missed * (slope + error + missed)

    return added
