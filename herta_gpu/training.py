"""The loop of Algorithm 1: two block solves per gradient, a certificate per step."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, norm, unit_roundoff
from herta_gpu.certificate import (
    Certificate,
    Proof,
    Spectrum,
    StoredProblem,
    certify,
    gradient_error,
    joined,
    ritz_interval,
)
from herta_gpu.factors import Factor
from herta_gpu.leave_one_out import LeftOut
from herta_gpu.losses import Loss
from herta_gpu.optimizers import (
    GradientDescent,
    Momentum,
    Newton,
    Optimizer,
    make_optimizer,
)
from herta_gpu.planning.plan import Decision, Recipe
from herta_gpu.planning.settings import NEWTON_SIZE
from herta_gpu.plumbing.progress import marked_steps
from herta_gpu.preconditioner import Preconditioner
from herta_gpu.problem import Point, Problem, UnfoldedMap
from herta_gpu.task import Context, Task

_TIGHTENINGS = 6  # how often one outer step may tighten the inner tolerance
_DIVERGED = 1e6  # growth of the objective over its least value, and over that at W = 0
_FLATTER = 3.0  # loss of curvature after which P is factored again
_LEAST_INNER = 1e-10  # inner tolerance of a loop that no certificate watches
_ALIKE, _LEAST_ALIKE = 0.01, 1e-11  # of tol, at least: objectives as good as each other
_NOTHING = (16 * unit_roundoff()) ** 2  # of ||Y||^2: a loss that is rounding


@dataclass(frozen=True)
class Preconditioned:
    """P, the interval that holds the eigenvalues of the preconditioned Hessian, and the recipe that
    finally worked."""

    P: Preconditioner
    spectrum: Spectrum | None
    recipe: Recipe
    changes: list[Decision]  # what turned out otherwise than planned
    left_out: LeftOut | None = None  # leave-one-out, where that was asked for
    spread: Any = None  # (len(evaluate),) a^T P^-1 a of the nodes beside
    known: Any = None  # outputs of the nodes beside, where P is no longer that of the weights ...
    steps: int = 0  # ... which were found in so many steps

    def outputs(self, W: Array) -> Any:
        """The outputs of W on the rows of Q that were kept for evaluation, on the host."""
        stored = self.P.stored
        if self.known is not None or stored is None:
            return self.known
        backend, rows = stored.backend, stored.eval_rows
        u = stored.basis.coordinates(W).astype(rows.dtype)
        return backend.to_numpy(backend.matmul(rows, u))  # synchronize!


@dataclass(frozen=True)
class Kept:
    """The best weights so far: those with the smallest loss + loss_error, or proven ones."""

    W: Array
    intercept: Array | None
    loss: float
    most: float  # loss + loss_error
    certificate: Certificate
    status: str
    steps: int  # of the history by then ...
    proven: int  # ... and of the certificates


class Training:
    """The loop of Algorithm 1, its history and its certificate."""

    def __init__(
        self, task: Task, run: Context, made: Preconditioned, A: UnfoldedMap, Y: Array
    ) -> None:
        settings, backend = task.settings, run.backend
        self.settings, self.backend, self.xp, self.Y = settings, backend, backend.xp, Y
        # The loss has the weights of the rows divided by `unit`: what is told is multiplied by it.
        self.P, self.loss, self.unit, self.intercept = made.P, A.loss, task.targets.unit, None
        self.A = A
        self.spectrum, self.stages, self.callback = made.spectrum, run.stages, run.callback
        self.X_norm = A.X_norm() if settings.ridge > 0 else math.inf  # of all features together
        self.curvature, self.symmetric = made.recipe.curvature, made.recipe.symmetric
        self.history: list[dict[str, Any]] = []
        self.warm_history: list[dict[str, Any]] = []  # steps on a model that stood in for the true
        self.records = self.history  # the history of the loop that runs
        self.certificate = Certificate(math.inf, "none")
        self.proven: list[Certificate] = []  # that of each step with true gradients
        self.before: list[Certificate] = []  # those of outputs that were finished before these
        self.status = "max_iter"
        self.kept: Kept | None = None
        self.first = 0  # where the history of these outputs begins
        self.changes: list[Decision] = []  # what turned out otherwise than planned
        self.started = time.perf_counter()
        self.loss_at_zero, size = loss_at_zero(self.loss, self.xp, Y)
        # One class, say, or equal targets and an intercept: W = 0 is an optimum.
        self.nothing_to_learn = self.loss_at_zero <= _NOTHING * size
        self.first_gradient = math.inf
        self.phase = -1  # which call of `loop`

    def loop(
        self,
        A: UnfoldedMap,
        w: Array,
        certified: bool,
        Z: Array | None = None,
        most: int | None = None,
    ) -> Point:
        """From w (and a guess of H^-1 X W there) to the optimum of A; `certified`: the true one.

        `most` limits the steps, if max_iter does not.
        """
        # These coordinates amplify what the solves leave over, and no certificate watches it.
        blind = self.P.fragile or not self.settings.precondition
        inner = min(1e-3, math.sqrt(self.settings.tol) / 10) * (0.1 if blind else 1.0)
        problem = Problem(
            A, self.loss, self.Y, self.settings.ridge, self.P.factor, self.xp, inner, self.X_norm
        )
        optimizer = self._optimizer(A)
        limit = self.settings.max_iter - len(self.history)  # where stored rows went first
        limit = limit if most is None else min(limit, most)
        self.status = "max_iter"
        self.phase += 1
        point = problem.start(w, Z)
        self.records = self.history if certified else self.warm_history
        for step in marked_steps(range(limit + 1)):
            if certified:
                point = self._sharpened(problem, point)
            self.certificate = self._certify(point, certified)
            self._record(point, certified)
            done = self._stop(point, certified)
            if certified:
                self.keep(point.W, partial(self._intercept_at, problem, point))
            if done or step == limit:
                break
            if self.P.fragile and len(self.records) > 3 and self._settled(point.objective):
                # Nothing left to gain but a gradient: what the solves leave over hides the rest.
                problem.tighten(_LEAST_INNER)
            if self._newton_is_due(point.w):
                if not isinstance(optimizer, Newton):
                    optimizer = self._newton(problem.factor, point.w.shape[0])
            elif self._flatter(problem, point):
                point, optimizer = self._rescaled(problem, point), self._optimizer(A)
            direction = optimizer.direction(point.w, point.g)
            ahead = problem.move(point, direction, optimizer.searches)
            least = min(h["loss"] for h in self.records)
            if not ahead.objective <= _DIVERGED * max(self.loss_at_zero, least):
                warnings.warn(
                    "Training diverged: lower learning_rate, or use optimizer='cg'.",
                    stacklevel=3,
                )
                self.status = "diverged"
                break
            if optimizer.searches and not ahead.objective < point.objective:
                # An exact line search that finds no way down: what the solves leave over hides it.
                problem.tighten(_LEAST_INNER)
            point = ahead
        self.intercept = self._intercept_at(problem, point)
        return point

    def _intercept_at(self, problem: Problem, point: Point) -> Array | None:
        if not self.loss.intercept:
            return None
        return self.loss.shift(self.xp, problem.map.rows(point.Z), self.Y)

    def keep(self, W: Array, intercept: Callable[[], Array | None]) -> None:
        """Remember the point that was just told, if it is better than those before."""
        loss, error = self.history[-1]["loss"], self.history[-1]["loss_error"]
        if self.kept is not None and not (self.status == "certified" or self._lower(loss + error)):
            return
        known = (loss, loss + error, self.certificate, self.status)
        self.kept = Kept(W, intercept(), *known, len(self.history), len(self.proven))

    def _lower(self, most: float) -> bool:
        assert self.kept is not None
        # Of two that are as good as each other the later one, which is what the status is about.
        most -= max(_ALIKE * self.settings.tol, _LEAST_ALIKE) * abs(most)
        return self.kept.status != "certified" and (
            most < self.kept.most or math.isnan(self.kept.most)
        )

    def settle(self, W: Array) -> Array:
        """The weights that a fit returns, from its last ones W: the best that it has seen.

        History, certificate, intercept and status are those of the same weights from now on.  Of
        weights that are worse than none at all, W = 0 is left.
        """
        kept = self.kept
        if kept is None or self.nothing_to_learn:
            return W
        if not kept.status.startswith("certified") and not self._beats_zero(kept):
            return self._settle_for_zero()
        behind = len(self.history) - kept.steps
        if behind == 0:
            return W
        why = f"{behind} later steps were no better"
        self.changes.append(Decision("weights", f"of step {kept.steps - 1}", why))
        certificate = kept.certificate
        if self.status == "converged" and self.certificate.kind == "nonnegative":
            certificate = replace(self.certificate, gap=kept.most)
        if kept.status != "max_iter" and self.status != "diverged":
            self.status = kept.status
        elif self.status.startswith("certified"):  # over fewer directions than there are
            self.status = "stagnated"
        del self.history[kept.steps :], self.proven[kept.proven :]
        self.intercept, self.certificate = kept.intercept, certificate
        return kept.W

    def _beats_zero(self, kept: Kept) -> bool:
        """Whether weights are better than none; measured by solves where a bound leaves it open."""
        if kept.most <= self.loss_at_zero or not kept.loss <= self.loss_at_zero:
            return kept.most <= self.loss_at_zero
        A, W, width = self.A, kept.W, self.A.width
        # A few columns at a time: whoever trains on stored rows may have no room for all outputs.
        F = self.xp.concatenate(
            [A.outputs(W[:, j : j + width]) for j in range(0, W.shape[1], width)], axis=1
        )
        F = F if kept.intercept is None else F + kept.intercept
        loss = self.loss.of_rows(slice(None)).value(self.xp, F, self.Y[:])
        loss += 0.5 * self.settings.ridge * norm(W) ** 2
        return loss <= self.loss_at_zero

    def _settle_for_zero(self) -> Array:
        """W = 0 with the best intercept, where every step was worse."""
        why = f"the best of {len(self.history)} steps was worse than W = 0"
        self.changes.append(Decision("weights", "0", why))
        end = "stagnated" if self.status.startswith("c") else self.status
        del self.history[self.first :], self.proven[:]
        loss, W = self._zero()
        error = 8 * self.Y.shape[0] * unit_roundoff() * loss
        d = self.P.features
        self.certificate = Certificate(math.inf, "nonnegative", 0.0, loss + error, why, d, d)
        self.proven.append(self.certificate)
        self.status, self.kept, self.records = end, None, self.history
        self._tell(math.inf, loss, error, math.inf, 0, warm=False)
        return W

    def _zero(self) -> tuple[float, Array]:
        """(the loss of W = 0 with the best intercept, which is set, and these weights)."""
        xp, F = self.xp, self.xp.zeros_like(self.Y[:])
        if self.loss.intercept:
            self.intercept = self.loss.shift(xp, F, self.Y[:])
            F = F + self.intercept
        loss = self.loss.of_rows(slice(None)).value(xp, F, self.Y[:])
        return loss, xp.zeros((self.P.features, self.Y.shape[1]))

    def at_zero(self) -> Array:
        """W = 0, where the loss is 0 and so is the ridge term; without a step."""
        loss, W = self._zero()
        note, d = "the loss of W = 0 is 0: there is nothing to learn", self.P.features
        # What is not exactly 0 is rounding, of constants or of a loss that is 0 at infinity only.
        gap = 2 * loss
        value = 0.0 if gap == 0 else math.inf
        self.certificate = Certificate(value, "nonnegative", 0.0, gap, note, d, d)
        self.status, self.records = "certified" if gap == 0 else "converged", self.history
        self._tell(value, loss, gap, 0.0, 0, warm=False)
        return W

    def constants(self) -> Any:
        """(c,) the intercept on the host; zeros if there is none."""
        if self.intercept is None:
            return np.zeros(self.Y.shape[1])
        return self.backend.to_numpy(self.intercept)  # synchronize!

    def result(self) -> tuple[list[dict[str, Any]], Certificate, str]:
        """(history, certificate, status) in the caller's units."""
        self.history = [self.told(h) for h in self.history]
        self.warm_history = [self.told(h) for h in self.warm_history]
        certificate = replace(self.certificate, gap=self.unit * self.certificate.gap)
        return self.history, certificate, self.status

    def together(self, records: list[dict[str, Any]], value: float) -> None:
        """A step of outputs that were trained apart, from those of each; `value` is proven."""
        self.records = self.history
        loss, error = (sum(r[name] for r in records) for name in ("loss", "loss_error"))
        size = math.hypot(*(r["grad_norm"] for r in records))
        inner = max(r["inner_iterations"] for r in records)
        self._tell(value, loss, error, size, inner, False, max(r["seconds"] for r in records))

    def warm(self, record: dict[str, Any]) -> None:
        """A step of training on stored rows, which proves nothing of the true model yet."""
        self.records = self.warm_history
        known = (record["objective"], math.inf, record["grad_norm"])
        self._tell(math.inf, *known, 0, warm=True)

    def direct(self, problem: StoredProblem, u: Array) -> Proof:
        """A step of the strategy "direct": weights from stored rows, and what is proven of them."""
        proof = problem.proof(u, self._no_proof, self.loss_at_zero)
        self.intercept = problem.intercept(u)
        self.certificate, self.records = proof.certificate(), self.history
        value = self.certificate.value
        known = (proof.objective, proof.error(), proof.grad_norm)
        self._tell(value, *known, 0, warm=False)
        self.status = "stagnated" if problem.settled else "max_iter"
        tol = self.settings.tol
        if value <= tol:
            self.status = "certified-reduced" if self.certificate.reduced else "certified"
        elif proof.about_zero(tol):
            self.status, self.certificate = "converged", proof.nonnegative()
        elif problem.settled and not proof.choices:
            self.status = "converged"
        self.keep(problem.basis.weights(u), lambda: self.intercept)
        return proof

    def _newton_is_due(self, w: Array) -> bool:
        """Whether cross entropy has had as many steps as a few of Newton's would cost.

        Nearly separable classes make the curvature of each row so different that no multiple of
        Q^T Q has the shape of the Hessian.
        """
        asked_for = self.settings.optimizer in ("cg", "lbfgs")
        if self.loss.quadratic or self.P.rows is None or not asked_for or w.size > NEWTON_SIZE:
            return False
        if self.loss.intercept:
            return False  # its Hessian has one more part
        return max(len(self.warm_history), len(self.records)) > 10 + w.size // 10

    def _newton(self, factor: Factor, size: int) -> Newton:
        assert self.P.rows is not None
        rows = self.P.rows if self.P.basis is None else self.P.basis.rows(self.P.rows)
        return Newton(self.backend, self.loss, rows, factor, size, self.settings.ridge)

    def _flatter(self, problem: Problem, point: Point) -> bool:
        """Cross entropy loses curvature as it learns, the ridge does not: P must follow."""
        if self.loss.quadratic or self.settings.ridge == 0 or not self.settings.precondition:
            return False
        now = self.loss.curvature(self.xp, problem.map.rows(point.Z))
        return now < self.curvature / _FLATTER

    def _rescaled(self, problem: Problem, point: Point) -> Point:
        """The same point in the coordinates of a P with the present curvature."""
        self.curvature = self.loss.curvature(self.xp, problem.map.rows(point.Z))
        self.P = self.P.rescale(self.curvature, self.settings.ridge, self.symmetric)
        factor = problem.factor = self.P.factor
        return replace(point, w=factor.from_weights(point.W), g=factor.to_gradient(point.gradient))

    def _optimizer(self, A: UnfoldedMap) -> Optimizer:
        asked, rate = self.settings, self.settings.learning_rate
        spectral = rate == "spectral" or (asked.optimizer == "momentum" and rate is None)
        if spectral:
            a, b = ritz_interval(self.P, A, asked.ridge, asked.seed)
            if asked.optimizer == "momentum":
                return Momentum.for_spectrum(a, b)
            if asked.optimizer == "gd":
                return GradientDescent(2.0 / (a + b))
        number = None if isinstance(rate, str) else rate
        return make_optimizer(asked.optimizer, number, self.xp, self.loss.quadratic)

    def _certify(self, point: Point, certified: bool) -> Certificate:
        spectrum = self.spectrum if certified else None
        why_not = self._why_not(point)
        ridge, steepest = self.settings.ridge, self.loss.steepest
        return certify(point, spectrum, self.P, ridge, self.X_norm, steepest, why_not)

    def _why_not(self, point: Point) -> str:
        return self._no_proof(point.objective)

    def _no_proof(self, objective: float) -> str:
        """Why there is no certificate, for the user."""
        if not self.settings.precondition:
            return "precondition=False gives no bound on the spectrum"
        if self.loss.quadratic:
            return f"{self.P.note or 'P misses too much of the Hessian'}; a ridge would help"
        if objective < math.log(2):  # every training row has more than half of the softmax
            return "the training classes are separable, so there is no minimiser; a ridge gives one"
        return "cross entropy without a ridge is not strongly convex"

    def _sharpened(self, problem: Problem, point: Point) -> Point:
        """Solve tighter while the solves' errors, not the gradient, dominate the certificate."""
        for _ in range(_TIGHTENINGS):
            size, error, goal = self._sizes(point)
            if point.stagnated or error <= 0.3 * max(size, goal):
                break
            if self._enough(self._certify(point, True), self.settings.tol):
                break  # good enough as it is
            problem.tol *= max(0.01, 0.2 * max(size, goal) / error)
            point = problem.point(point.w, point.Z, point.V, point.inner_iterations)
        return point

    def _sizes(self, point: Point) -> tuple[float, float, float]:
        """(||gradient||, its possible error, the norm that would be good enough)."""
        goal = 2 * self.settings.tol * max(point.objective, 0.0)
        if self.spectrum is not None:
            error = gradient_error(point, self.spectrum)
            size = norm(point.g)
            return size, error, math.sqrt(goal * self.spectrum.a)
        if self.settings.ridge > 0:
            forward = self.loss.steepest * point.forward_residual
            error = self.X_norm * (forward + point.adjoint_residual)
            size = norm(point.gradient)
            return size, error, math.sqrt(goal * self.settings.ridge)
        return 1.0, 0.0, 1.0

    def _stop(self, point: Point, certified: bool) -> bool:
        tol, size = self.settings.tol, norm(point.g)
        if self.certificate.kind != "none":
            # A model that only stands in for the true one is solved a little further.
            if self._enough(self.certificate, tol if certified else 0.1 * tol):
                self.status = "certified-reduced" if self.certificate.reduced else "certified"
            elif self.settings.ridge == 0 and point.objective <= tol**2 * self.loss_at_zero:
                self.status = "converged"  # an optimum of about 0 has no relative gap
            elif point.stagnated and self._sizes(point)[1] > self._sizes(point)[0]:
                self.status = "stagnated"  # rounding hides the gradient
            elif self._at_rounding():
                self.status = "stagnated"
            return self.status != "max_iter"
        if point.objective <= tol * self.loss_at_zero:
            # No objective is below 0, so what is left of this one bounds the gap.
            self.status, left = "converged", point.objective + point.objective_error
            self.certificate = replace(self.certificate, kind="nonnegative", gap=left)
            return True
        if self.settings.precondition:
            a = 0.5 if self.spectrum is None else self.spectrum.a
            done = size**2 <= 2 * a * tol * point.objective and self._settled(point.objective)
        else:
            if len(self.records) == 1:
                self.first_gradient = size
            done = size <= math.sqrt(tol) / 10 * self.first_gradient
        if done:
            self.status = "converged"
        return done

    def _enough(self, found: Certificate, tol: float) -> bool:
        """Whether these outputs are proven, alone or together with those finished before them."""
        if found.value <= tol or not self.before:
            return found.value <= tol
        return joined([*self.before, found]).value <= tol

    def _at_rounding(self) -> bool:
        """Whether more steps cannot help: the gap is at the level of float64, or nothing moves."""
        gaps = [h["certificate"] for h in self.records]
        if len(gaps) > 5 and min(gaps) < 1e-13 and min(gaps[-5:]) > 0.5 * min(gaps[:-5]):
            return True
        if len(gaps) <= 10 or min(gaps[-10:]) < 0.9 * min(gaps[:-10]):
            return False
        losses = [h["loss"] for h in self.records[-10:]]
        return max(losses) - min(losses) <= 1e-3 * self.settings.tol * abs(losses[-1])

    def _settled(self, objective: float) -> bool:
        """Whether the last steps, too, say that next to nothing is left to gain.

        Without a certificate a small gradient is not enough: a damped P makes slow directions look
        small, and cross entropy changes its curvature.
        """
        losses = [h["loss"] for h in self.records[-4:]]
        allowed = self.settings.tol * objective
        if self.loss.quadratic:
            if len(losses) < 3:
                return True
            before, last = losses[-3] - losses[-2], losses[-2] - losses[-1]
            rate = min(max(last / before, 0.0), 0.999) if before > 0 else 0.0
            return last * rate / (1 - rate) <= allowed  # the rest of a geometric series
        return len(losses) == 4 and losses[0] - objective <= 0.3 * allowed

    def _record(self, point: Point, certified: bool) -> None:
        value = self.certificate.value if certified else math.inf
        if certified:
            self.proven.append(self.certificate)
        size = norm(point.gradient)
        known = (point.objective, point.objective_error, size)
        self._tell(value, *known, point.inner_iterations, warm=not certified)

    def _tell(
        self,
        value: float,
        objective: float,
        error: float,
        grad_norm: float,
        inner_iterations: int,
        warm: bool,
        seconds: float | None = None,
    ) -> None:
        step = len(self.records)
        self.backend.same((value, objective, error, grad_norm), f"numbers of step {step}")
        self.records.append(
            {
                "step": step,
                "loss": objective,
                "loss_error": error,
                "grad_norm": grad_norm,
                "certificate": value,
                "inner_iterations": inner_iterations,
                "seconds": time.perf_counter() - self.started if seconds is None else seconds,
                "warm": warm,
            }
        )
        told = self.told(self.records[-1])
        self.stages.step(step, value, self.settings.tol, told["loss"], warm=warm)
        if self.callback is not None:
            self.callback(told)

    def told(self, record: dict[str, Any]) -> dict[str, Any]:
        """A record in the caller's units."""
        if self.unit == 1:
            return record
        sizes = {name: self.unit * record[name] for name in ("loss", "loss_error", "grad_norm")}
        return {**record, **sizes}


def loss_at_zero(loss: Loss, xp: Any, Y: Any) -> tuple[float, float]:
    """(the loss of W = 0, ||Y||^2), over runs of rows: not all of Y need be there at once."""
    total, squares, step = 0.0, 0.0, 1 << 16
    if loss.intercept:
        return loss.value(xp, xp.zeros_like(Y[:]), Y[:]), norm(Y[:]) ** 2
    for i in range(0, Y.shape[0], step):
        part = Y[i : i + step]
        total += loss.of_rows(slice(i, i + step)).value(xp, xp.zeros_like(part), part)
        squares += norm(part) ** 2
    return total, squares
