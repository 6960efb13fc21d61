"""Training: P, the loop of Algorithm 1, and the attempts on stored rows of Q.

A `Loop` takes steps with two block solves per gradient and a certificate each.  Where n x c numbers
do not fit, it takes a block of outputs after the other: those of MSE are independent problems with
one Hessian, so each block is finished, its certificate included, before the next begins, and d x c
and n_train x c numbers stay.  With G_J bounding the gap of the block J and O_J its optimum from
below,

    (objective - optimum) / optimum <= sum of G_J / sum of O_J.

A `Journal` holds what there is to tell of a fit, and the best weights that it has seen.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from herta_gpu.backends import get_backend
from herta_gpu.backends.base import Array, norm, unit_roundoff
from herta_gpu.certificate import (
    Certificate,
    Proof,
    Spectrum,
    certify,
    choose_spectrum,
    judge,
    least_squares,
    merge_certificates,
    prove,
    relative,
    ritz_interval,
)
from herta_gpu.diffusion import Arrays
from herta_gpu.factors import DenseGram
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.more.leave_one_out import LeftOut, leave_one_out
from herta_gpu.optimizers import Newton, Optimizer, make_optimizer, minimise
from herta_gpu.planning.plan import Chosen, Decision, Plan, Recipe
from herta_gpu.planning.settings import NEWTON_SIZE, Kind, Settings, Status, Strategy
from herta_gpu.plumbing.models import from_plain, to_plain
from herta_gpu.plumbing.progress import marked_steps
from herta_gpu.plumbing.targets import OneHot
from herta_gpu.preconditioner import Preconditioner, build, no_preconditioner, tighten
from herta_gpu.problem import Point, Problem, StoredPoint, StoredProblem, UnfoldedMap
from herta_gpu.task import Context, Task, stored_rows

_TIGHTENINGS = 6  # how often one outer step may tighten the inner tolerance
_DIVERGED = 1e6  # growth of the objective over its least value, and over that at W = 0
_FLATTER = 3.0  # loss of curvature after which P is factored again
_LEAST_INNER = 1e-10  # inner tolerance of a loop that no certificate watches
_ALIKE, _LEAST_ALIKE = 0.01, 1e-11  # of tol, at least: objectives as good as each other
_NOTHING = (16 * unit_roundoff()) ** 2  # of ||Y||^2: a loss that is rounding
_CHEAP_STEPS = 20  # steps on stored rows, without a solve, that count as one of max_iter
_FEW = 2  # steps with true gradients after which a tighter Q is the better way
_ATTEMPTS = 4  # how often Q is solved for more tightly when a certificate asks for it
_QUICK = 1 << 26  # numbers in X: with fewer, Q is solved again until the loss is known as well
_ROWS = 1 << 16  # rows of Y at a time
_BEST = (Status.CONVERGED, Status.STAGNATED, Status.MAX_ITER, Status.DIVERGED)  # and so on down


# ---- lines 3 to 8: P --------------------------------------------------------------------------
@dataclass(frozen=True)
class Preconditioned:
    """P, the interval that holds the eigenvalues of the preconditioned Hessian, and the recipe that
    finally worked."""

    P: Preconditioner
    spectrum: Spectrum | None
    recipe: Recipe

    def outputs(self, W: Array) -> Any:
        """The outputs of W on the rows of Q that were kept for evaluation, on the host."""
        stored = self.P.stored
        if stored is None:
            return None
        u = stored.basis.from_weights(W).astype(stored.eval_rows.dtype)
        return stored.backend.to_numpy(stored.backend.matmul(stored.eval_rows, u))  # synchronize!


def precondition(
    plan: Plan, task: Task, H_tilde: RegularizedLaplacian, A: UnfoldedMap, Y: Array, run: Context
) -> Preconditioned:
    """P^-1/2 and bounds of the Hessian it leaves; without any, Q is solved tighter once."""
    settings, stages, recipe = task.settings, run.stages, plan.recipe
    others = stored_rows(task.graph, task.eval_nodes, run.backend)
    if not settings.precondition:
        none = no_preconditioner(run.backend, A.X.shape[1], Y.shape[1])
        return Preconditioned(none, None, recipe)
    while True:
        with stages("preconditioner"):
            tell = stages.progress("Q", "columns")
            P = build(recipe, H_tilde, A, Y, settings.ridge, run.cache, others, tell)
        with stages("spectrum"):
            # A Hessian that is not the same everywhere has no bounds.
            known = (plan.certificate, P, A, settings.ridge, settings.seed)
            spectrum = choose_spectrum(*known) if A.loss.quadratic else None
        missed = spectrum is not None and spectrum.kind == Kind.ESTIMATE
        rough = H_tilde is not A.H or recipe.sketch_rows is not None  # on purpose
        if P.kept < P.features and not (recipe.whiten or rough or P.fragile):
            again = recipe.orthogonalise()
        elif missed and not rough and not recipe.exact:
            again = recipe.tighten(A.H.lambda_max)
        else:
            P = P.for_training(run.backend, blocks=plan.outputs < Y.shape[1])
            return Preconditioned(P, spectrum, recipe)
        recipe = run.change(again)


# ---- what is minimised, and what there is to tell of it -----------------------------------------
@dataclass(frozen=True)
class Objective:
    """loss(A W) + ridge/2 ||W||^2 for the targets Y, of which runs of rows may be all there is."""

    settings: Settings
    A: UnfoldedMap
    Y: Any
    X_norm: float  # of all features together
    at_zero: float  # the loss of W = 0
    size: float  # ||Y||^2

    @classmethod
    def of(
        cls, settings: Settings, A: UnfoldedMap, Y: Any, X_norm: float | None = None
    ) -> Objective:
        """What it is at W = 0 is added up over runs of rows: not all of Y need be there at once."""
        loss, xp, at_zero, size = A.loss, A.H.backend.xp, 0.0, 0.0
        if X_norm is None:
            X_norm = A.X_norm() if settings.ridge > 0 else math.inf
        step = max(1, Y.shape[0]) if loss.intercept else _ROWS  # constants are those of all rows
        for i in range(0, Y.shape[0], step):
            part, rows = Y[i : i + step], slice(i, i + step)
            of_part = loss if loss.intercept else loss.of_rows(rows)
            at_zero += of_part.value(xp, xp.zeros_like(part), part)
            size += norm(part) ** 2
        return cls(settings, A, Y, X_norm, at_zero, size)

    def columns(self, at: Any) -> Objective:
        """That of the outputs `at` alone."""
        Y = self.Y.columns(at) if isinstance(self.Y, OneHot) else self.Y[:, at]
        return Objective.of(self.settings, self.A, Y, self.X_norm)

    @property
    def trivial(self) -> bool:
        """Whether W = 0 is an optimum: of one class, say, or equal targets and an intercept."""
        return self.at_zero <= _NOTHING * self.size

    def measure(self, W: Array, b: Array | None) -> float:
        """The objective by solves to the last digit."""
        A, width, xp = self.A, self.A.width, self.A.H.backend.xp
        # A few columns at a time: whoever trains on stored rows may have no room for all outputs.
        parts = [A.outputs(W[:, j : j + width]) for j in range(0, W.shape[1], width)]
        F = xp.concatenate(parts, axis=1) + (0.0 if b is None else b)
        loss = A.loss.of_rows(slice(None)).value(xp, F, self.Y[:])
        return loss + 0.5 * self.settings.ridge * norm(W) ** 2

    def explain(self, P: Preconditioner, objective: float) -> str:
        """Why there is no certificate, for the user."""
        if not self.settings.precondition:
            return "precondition=False gives no bound on the spectrum"
        if self.A.loss.quadratic:
            return f"{P.note or 'P misses too much of the Hessian'}; a ridge would help"
        if objective < math.log(2):  # every training row has more than half of the softmax
            return "the training classes are separable, so there is no minimiser; a ridge gives one"
        return "cross entropy without a ridge is not strongly convex"


class Step(NamedTuple):
    """One entry of a history."""

    loss: float  # the objective
    loss_error: float  # it is right up to this much
    grad_norm: float
    certificate: float  # the relative gap that is proven
    gap: float  # the gap that is proven
    inner_iterations: int
    seconds: float  # since training began

    @property
    def optimum(self) -> float:
        """The optimum is at least this."""
        return self.gap / self.certificate if 0 < self.certificate < math.inf else 0.0


class Solution(NamedTuple):
    """Weights and what is known of them."""

    W: Array
    intercept: Array | None
    certificate: Certificate
    status: Status
    loss: float
    most: float  # loss + loss_error
    steps: int  # of the history by then


class Journal:
    """The steps of a fit, told as soon as they exist, and the best weights so far."""

    def __init__(self, objective: Objective, run: Context, unit: float) -> None:
        # The loss has the weights of the rows divided by `unit`: what is told is multiplied by it.
        self.objective, self.run, self.unit, self.callback = objective, run, unit, run.callback
        self.steps: list[Step] = []
        self.warm_steps: list[Step] = []  # on a model that stood in for the true one
        self.changes: list[Decision] = run.changes
        self.first = 0  # where the history of these outputs begins
        self.status, self.certificate = Status.MAX_ITER, Certificate(math.inf, Kind.NONE)
        self.intercept: Array | None = None
        self.best: Solution | None = None  # of the smallest loss + loss_error, or proven
        self.started = time.perf_counter()

    def of_columns(self, at: Any) -> Journal:
        """The journal of some outputs, which goes on from this one and is told with the others."""
        part = Journal(self.objective.columns(at), self.run, self.unit)
        part.steps, part.warm_steps, part.first = [*self.steps], self.warm_steps, len(self.steps)
        part.callback, part.changes, part.started = None, [], self.started
        return part

    def tell(
        self, known: Sequence[float], found: Certificate | None = None, inner: int = 0
    ) -> None:
        """A step with the known (objective, its error, norm of the gradient, seconds if spent).
        Without a certificate it is one on a model that stands in for the true one."""
        loss, error, size, *spent = known
        steps = self.warm_steps if found is None else self.steps
        value, gap = (math.inf, math.inf) if found is None else (found.value, found.gap)
        number, run, tol = len(steps), self.run, self.objective.settings.tol
        run.backend.same((value, loss, error, size), f"numbers of step {number}")
        seconds = spent[0] if spent else time.perf_counter() - self.started
        steps.append(Step(loss, error, size, value, gap, inner, seconds))
        entry = self.history(found is None, number)[0]
        run.stages.step(number, value, tol, entry["loss"], warm=found is None)
        if self.callback is not None:
            self.callback(entry)

    def hear(self, record: dict[str, Any]) -> None:
        """A step of training on stored rows, which proves nothing of the true model yet."""
        self.tell((record["objective"], math.inf, record["grad_norm"]))

    def history(self, warm: bool = False, first: int = 0) -> list[dict[str, Any]]:
        """All steps from `first` on, for the user and in the user's units."""
        steps, told = self.warm_steps if warm else self.steps, []
        for number, step in enumerate(steps[first:], first):
            entry = {"step": number, **step._asdict(), "warm": warm}
            del entry["gap"]
            units = {name: self.unit * entry[name] for name in ("loss", "loss_error", "grad_norm")}
            told.append(entry | units)
        return told

    def keep(
        self, W: Array, intercept: Callable[[], Array | None], found: Certificate, status: Status
    ) -> None:
        """Remember the weights that were just told, if they are better than those before.  Of two
        that are as good as each other the later ones, which the status is about."""
        self.certificate, self.status, best = found, status, self.best
        loss, most = self.steps[-1].loss, self.steps[-1].loss + self.steps[-1].loss_error
        if best is not None and status is not Status.CERTIFIED:
            less = most - max(_ALIKE * self.objective.settings.tol, _LEAST_ALIKE) * abs(most)
            if best.status is Status.CERTIFIED or not (less < best.most or math.isnan(best.most)):
                return
        self.best = Solution(W, intercept(), found, status, loss, most, len(self.steps))

    def settle(self) -> Array:
        """The weights that a fit returns: the best that it has seen.  History, certificate,
        intercept and status are those of the same weights from now on.  Of weights that are worse
        than none at all, W = 0 is left."""
        assert self.best is not None
        best, at_zero = self.best, self.objective.at_zero
        behind, better = len(self.steps) - best.steps, best.most <= at_zero
        if not best.status.proven:
            if not better and best.loss <= at_zero:  # a bound leaves it open: measured by solves
                better = self.objective.measure(best.W, best.intercept) <= at_zero
            if not better:
                return self.settle_for_zero(worse=True)
        self.intercept = best.intercept
        if behind == 0:
            return best.W
        why = f"{behind} later steps were no better"
        self.changes.append(Decision("weights", f"of step {best.steps - 1}", why))
        certificate = best.certificate
        if self.status is Status.CONVERGED and self.certificate.kind == Kind.NONNEGATIVE:
            certificate = replace(self.certificate, gap=best.most)
        if best.status is not Status.MAX_ITER and self.status is not Status.DIVERGED:
            self.status = best.status
        elif self.status.proven:  # over fewer directions than there are
            self.status = Status.STAGNATED
        del self.steps[best.steps :]
        self.certificate = certificate
        return best.W

    def settle_for_zero(self, worse: bool = False) -> Array:
        """W = 0 with the best intercept: there is nothing to learn, or every step was `worse`."""
        o, xp = self.objective, self.run.backend.xp
        loss, W, Y = o.at_zero, xp.zeros((o.A.features, o.Y.shape[1])), o.Y
        d, value, size = W.shape[0], math.inf, math.inf
        self.intercept = None
        if o.A.loss.intercept:
            b = self.intercept = o.A.loss.shift(xp, xp.zeros_like(Y[:]), Y[:])
            loss = o.A.loss.of_rows(slice(None)).value(xp, xp.zeros_like(Y[:]) + b, Y[:])
        if worse:
            why = f"the best of {len(self.steps)} steps was worse than W = 0"
            self.changes.append(Decision("weights", "0", why))
            if self.status.proven or self.status is Status.CONVERGED:
                self.status = Status.STAGNATED
            error = 8 * Y.shape[0] * unit_roundoff() * loss
            gap = loss + error
            del self.steps[self.first :]
        else:
            why, size = "the loss of W = 0 is 0: there is nothing to learn", 0.0
            # What is not exactly 0 is rounding, of constants or of a loss that is 0 at infinity.
            gap = error = 2 * loss
            value = 0.0 if gap == 0 else math.inf
        found = Certificate(value, Kind.NONNEGATIVE, 0.0, gap, why, d, d)
        self.certificate, self.best = found, None
        self.status = self.status if worse else judge(found, 0.0, zero=True)
        self.tell((loss, error, size), self.certificate)
        return W


@dataclass(frozen=True)
class Fitted:
    """The weights of a fit, and what stored rows say beside them."""

    W: Array
    spectrum: Spectrum | None
    outputs: Any = None  # of the nodes that were kept for evaluation
    left_out: LeftOut | None = None  # leave-one-out, where that was asked for


# ---- the loop -------------------------------------------------------------------------------
class Loop:
    """The loop of Algorithm 1 in the coordinates of one P, which it may scale anew."""

    def __init__(
        self, journal: Journal, made: Preconditioned, stand_in: UnfoldedMap | None = None
    ) -> None:
        """`stand_in` is a cheaper model in place of the true one: it proves nothing."""
        o = self.objective = journal.objective
        settings, loss, backend = o.settings, o.A.loss, o.A.H.backend
        self.journal, self.made, self.settings, self.loss = journal, made, settings, loss
        self.backend, self.map, self.is_true = backend, stand_in or o.A, stand_in is None
        self.steps = journal.steps if self.is_true else journal.warm_steps
        # Without a certificate nothing shows what errors of the solves do in such coordinates.
        unwatched = made.P.fragile or not settings.precondition
        inner = min(1e-3, math.sqrt(settings.tol) / 10) * (0.1 if unwatched else 1.0)
        self.problem = Problem(self.map, o.Y[:], settings.ridge, made.P.factor, inner, o.X_norm)
        self.first_gradient = math.inf

    def run(self, w: Array, Z: Array | None = None, most: int | None = None) -> Point:
        """From w (and a guess of H^-1 X W there) to the optimum; `most` limits the steps, too."""
        journal, problem = self.journal, self.problem
        optimizer: Optimizer | Newton = self._optimizer()
        limit = self.settings.max_iter - len(journal.steps)  # where stored rows went first
        limit = limit if most is None else min(limit, most)
        point = problem.start(w, Z)
        if not point.objective <= self.objective.at_zero and w.any():  # no start at all is better
            point = problem.start(problem.xp.zeros_like(w))
        for step in marked_steps(range(limit + 1)):
            point = self._sharpen(point) if self.is_true else point
            found = self._certify(point)
            known = (point.objective, point.objective_error, norm(point.gradient))
            journal.tell(known, found if self.is_true else None, point.inner_iterations)
            status, found = self._judge(point, found)
            if self.is_true:
                journal.keep(point.W, partial(problem.intercept, point), found, status)
            if status is not Status.MAX_ITER or step == limit:
                break
            if self.made.P.fragile and len(self.steps) > 3 and self._has_settled(point.objective):
                # Nothing left to gain but a gradient: what the solves leave over hides the rest.
                problem.tighten(_LEAST_INNER)
            if not isinstance(optimizer, Newton):
                newton = self._newton(point.w)
                point, flatter = self._rescale(point) if newton is None else (point, False)
                optimizer = newton or (self._optimizer() if flatter else optimizer)
            ahead = problem.move(point, optimizer.direction(point.w, point.g), optimizer.searches)
            least = min(step.loss for step in self.steps)
            if not ahead.objective <= _DIVERGED * max(self.objective.at_zero, least):
                why = "Training diverged: lower learning_rate, or use optimizer='cg'."
                warnings.warn(why, stacklevel=3)
                journal.status = Status.DIVERGED
                break
            if optimizer.searches and not ahead.objective < point.objective:
                # An exact line search that finds no way down: what the solves leave over hides it.
                problem.tighten(_LEAST_INNER)
            point = ahead
        return point

    def _newton(self, w: Array) -> Newton | None:
        """Newton's method once cross entropy has had as many steps as a few of its would cost.
        Nearly separable classes make the curvature of each row so different that no multiple of Q^T
        Q has the shape of the Hessian."""
        P, s, loss = self.made.P, self.settings, self.loss
        steps = max(len(self.journal.warm_steps), len(self.steps))
        if loss.quadratic or (loss.intercept and loss.separable) or P.rows is None:
            return None
        few = w.size <= NEWTON_SIZE and s.optimizer in ("cg", "lbfgs")
        if not few or steps <= 10 + w.size // 10:
            return None
        A = (P.rows if P.basis is None else P.basis.rows(P.rows)).astype("float64")
        rows = StoredProblem(self.backend, loss, A, self.problem.Y, s.ridge)
        return Newton(rows, self.problem.factor, w.shape[0])

    def _rescale(self, point: Point) -> tuple[Point, bool]:
        """The same point in the coordinates of a P with the present curvature, if that has changed.
        Cross entropy loses curvature as it learns, the ridge does not: P must follow."""
        if self.loss.quadratic or self.settings.ridge == 0 or not self.settings.precondition:
            return point, False
        curvature = self.loss.curvature(self.backend.xp, self.map.rows(point.Z))
        if not curvature < self.made.recipe.curvature / _FLATTER:
            return point, False
        recipe = replace(self.made.recipe, curvature=curvature)
        P = self.made.P.rescale(curvature, self.settings.ridge, recipe.symmetric)
        self.made, self.problem.factor = replace(self.made, P=P, recipe=recipe), P.factor
        w, g = P.factor.from_weights(point.W), P.factor.to_gradient(point.gradient)
        return replace(point, w=w, g=g), True

    def _optimizer(self) -> Optimizer:
        s, rate, interval = self.settings, self.settings.learning_rate, None
        if rate == "spectral" or (s.optimizer == "momentum" and rate is None):
            interval = ritz_interval(self.made.P, self.map, s.ridge, s.seed)
        rate = None if isinstance(rate, str) else rate
        return make_optimizer(s.optimizer, rate, self.backend.xp, self.loss.quadratic, interval)

    def _certify(self, point: Point) -> Certificate:
        spectrum, P, o = self.made.spectrum if self.is_true else None, self.made.P, self.objective
        known = (self.settings.ridge, o.X_norm, self.loss.steepest)
        return certify(point, spectrum, P, *known, o.explain(P, point.objective))

    def _sharpen(self, point: Point) -> Point:
        """Solve tighter while the solves' errors, not the gradient, dominate the certificate."""
        for _ in range(_TIGHTENINGS):
            size, error, goal = self._sizes(point)
            if point.stagnated or error <= 0.3 * max(size, goal):
                break
            if self._certify(point).value <= self.settings.tol:
                break  # good enough as it is
            self.problem.tol *= max(0.01, 0.2 * max(size, goal) / error)
            point = self.problem.point(point.w, point.Z, point.V, point.inner_iterations)
        return point

    def _sizes(self, point: Point) -> tuple[float, float, float]:
        """(||gradient||, its possible error, the norm that would be good enough)."""
        goal, spectrum = 2 * self.settings.tol * max(point.objective, 0.0), self.made.spectrum
        if spectrum is not None:
            return norm(point.g), spectrum.gradient_error(point), math.sqrt(goal * spectrum.a)
        if self.settings.ridge > 0:
            error = self.loss.steepest * point.forward_residual + point.adjoint_residual
            size, error = norm(point.gradient), self.objective.X_norm * error
            return size, error, math.sqrt(goal * self.settings.ridge)
        return 1.0, 0.0, 1.0

    def _judge(self, point: Point, found: Certificate) -> tuple[Status, Certificate]:
        """(what the point is: MAX_ITER if the loop is to go on; its certificate)."""
        tol, stuck, settled = self.settings.tol, False, False
        proven, size = found.kind != Kind.NONE, norm(point.g)
        # An optimum of about 0 has no relative gap.
        zero = self.settings.ridge == 0
        zero &= point.objective <= (tol**2 if proven else tol) * self.objective.at_zero
        if proven:
            before, error, _ = self._sizes(point)
            # Rounding hides the gradient, or more.
            stuck = (point.stagnated and error > before) or self._is_at_rounding()
        elif zero:
            # No objective is below 0, so what is left of this one bounds the gap.
            left = point.objective + point.objective_error
            found = replace(found, kind=Kind.NONNEGATIVE, gap=left)
        elif self.settings.precondition:
            a = 0.5 if self.made.spectrum is None else self.made.spectrum.a
            settled = size**2 <= 2 * a * tol * point.objective and self._has_settled(
                point.objective
            )
        else:
            self.first_gradient = size if len(self.steps) == 1 else self.first_gradient
            settled = size <= math.sqrt(tol) / 10 * self.first_gradient
        # A model that only stands in for the true one is solved a little further.
        return judge(found, tol if self.is_true else 0.1 * tol, zero, stuck, settled), found

    def _is_at_rounding(self) -> bool:
        """Whether more steps cannot help: the gap is at the level of float64, or nothing moves."""
        gaps = [step.certificate for step in self.steps]
        if len(gaps) > 5 and min(gaps) < 1e-13 and min(gaps[-5:]) > 0.5 * min(gaps[:-5]):
            return True
        if len(gaps) <= 10 or min(gaps[-10:]) < 0.9 * min(gaps[:-10]):
            return False
        losses = [step.loss for step in self.steps[-10:]]
        return max(losses) - min(losses) <= 1e-3 * self.settings.tol * abs(losses[-1])

    def _has_settled(self, objective: float) -> bool:
        """Whether the last steps, too, say that next to nothing is left to gain.  Without a
        certificate a small gradient is not enough: a damped P makes slow directions look small, and
        cross entropy changes its curvature."""
        losses = [step.loss for step in self.steps[-4:]]
        allowed = self.settings.tol * objective
        if self.loss.quadratic:
            if len(losses) < 3:
                return True
            before, last = losses[-3] - losses[-2], losses[-2] - losses[-1]
            rate = min(max(last / before, 0.0), 0.999) if before > 0 else 0.0
            return last * rate / (1 - rate) <= allowed  # the rest of a geometric series
        return len(losses) == 4 and losses[0] - objective <= 0.3 * allowed


def descend(journal: Journal, plan: Plan, made: Preconditioned, task: Task) -> Fitted:
    """W, by true gradients or on one tight Q in place of two solves per step."""
    if not journal.objective.trivial:
        return (_train_on_rows if plan.stored else _train_with_solves)(journal, plan, made, task)
    # There is nothing to learn: stored rows are asked for leave-one-out only.
    found = Fitted(None, made.spectrum)
    if task.settings.loo:
        found = _train_on_rows(journal, replace(plan, outputs=0), made, replace(task, W_start=None))
    W = journal.settle_for_zero()
    return replace(found, W=W, outputs=made.outputs(W))


def _train_with_solves(journal: Journal, plan: Plan, made: Preconditioned, task: Task) -> Fitted:
    """Lines 9 to 15: steps with true gradients, from least squares on Q or a cheaper model."""
    s, P, o, xp = task.settings, made.P, journal.objective, task.H.backend.xp
    warm = s.quadratic and s.precondition  # P solves least squares
    w = P.w_start if warm else xp.zeros_like(P.w_start)
    if task.W_start is not None and not warm:
        w = P.factor.from_weights(task.W_start)
    elif plan.strategy == Strategy.DIRECT and P.rows is not None:
        problem = pose_on_rows(o, P)
        u = solve_on_rows(journal, problem, P)[0].u
        w = P.factor.from_weights(problem.C0.to_weights(u))
    elif plan.loop_samples is not None:
        H = task.sample(plan.loop_samples, journal.run.budget)
        loop = Loop(journal, made, UnfoldedMap(H, o.A.X, o.A.train, o.A.width, o.A.loss))
        w, made = loop.run(w).w, loop.made
    train_outputs(journal, made, w, plan.outputs)
    return Fitted(journal.settle(), made.spectrum)


def train_outputs(
    journal: Journal, made: Preconditioned, w: Array, width: int, most: int | None = None
) -> Array:
    """W from w by true gradients, `width` outputs at a time; `most` limits the steps."""
    c, run, settings, P = w.shape[1], journal.run, journal.objective.settings, made.P

    def guess(at: Any) -> Array | None:
        """H^-1 X W, about, of outputs that start where least squares on Q ended."""
        return P.guess(run.backend, at) if w is P.w_start else None

    if width >= c:
        return Loop(journal, made).run(w, guess(slice(None)), most).W
    W, b = (run.backend.xp.empty((rows, c)) for rows in (journal.objective.A.features, 1))
    parts: list[Journal] = []
    tell, size = run.stages.progress("outputs", "outputs"), -(-c // -(-c // width))  # about equal
    for i, first in enumerate(range(0, c, size)):
        tell(first, c)
        at = np.arange(first, min(first + size, c))
        part = journal.of_columns(at)

        def finish(part: Journal = part, at: Any = at) -> Arrays:
            Loop(part, made).run(w[:, at], guess(at), most)
            return _pack(part, part.settle())

        # Every pass over the outputs adds steps: their number tells one from another.
        name = f"outputs-{len(journal.steps)}-{i}-{settings.max_iter}"
        stored = run.cache(name, finish, together=True)
        _unpack(part, stored)
        W[:, at], b[:, at] = stored["W"], stored["b"]
        parts.append(part)
    tell(c, c)
    _join(journal, parts)
    intercept = b[0] if journal.objective.A.loss.intercept else None
    journal.keep(W, lambda: intercept, journal.certificate, journal.status)
    return W


def _pack(part: Journal, W: Array) -> Arrays:
    """A finished part as arrays and words: what a checkpoint stores."""
    xp = part.run.backend.xp
    b = xp.zeros(W.shape[1]) if part.intercept is None else part.intercept
    steps = xp.asarray(np.array(part.steps[part.first :]))
    words = {"status": str(part.status), "certificate": json.dumps(to_plain(part.certificate))}
    return {"W": W, "b": b, "steps": steps, **words}


def _unpack(part: Journal, stored: Arrays) -> None:
    """The journal of a finished part, from what a checkpoint stores."""
    part.certificate = from_plain(Certificate, json.loads(stored["certificate"]), "certificate")
    part.status = Status(stored["status"])
    rows = part.run.backend.to_numpy(stored["steps"]).tolist()
    part.steps[part.first :] = [Step(*row)._replace(inner_iterations=int(row[5])) for row in rows]


def _join(journal: Journal, parts: Sequence[Journal]) -> None:
    """History, certificate and status of all outputs.  A part that took fewer steps than others
    stays at its last one."""
    done = [part.steps[part.first :] for part in parts]
    found = merge_certificates([part.certificate for part in parts])
    for i in range(max(map(len, done))):
        at = [steps[min(i, len(steps) - 1)] for steps in done]
        loss, error, sizes, _, gaps, inner, seconds = zip(*at)
        gap = sum(gaps)
        proof = replace(found, value=relative(gap, sum(step.optimum for step in at)), gap=gap)
        known = (sum(loss), sum(error), math.hypot(*sizes), max(seconds))
        journal.tell(known, proof, max(inner))
    words = {part.status for part in parts}
    status = judge(found, journal.objective.settings.tol)
    worst = max((_BEST.index(word) for word in words if not word.proven), default=1)
    journal.certificate, journal.status = found, status if status.proven else _BEST[worst]


# ---- the strategy "direct": stored rows -----------------------------------------------------
def pose_on_rows(o: Objective, P: Preconditioner) -> StoredProblem:
    """The problem on the stored rows of Q."""
    gram = P.gram.QtQ if isinstance(P.gram, DenseGram) else None
    known = (P.rows, o.Y, o.settings.ridge, P.basis, gram)
    return StoredProblem.of_rows(o.A.H.backend, o.A.loss, *known)


def solve_on_rows(
    journal: Journal,
    problem: StoredProblem,
    P: Preconditioner,
    W: Array | None = None,
    on_host: bool = False,
) -> tuple[StoredPoint, bool]:
    """(the optimum of the stored problem, or ten times closer to it than tol; whether it is that).
    W is where to begin, if it is of any use."""
    s, backend, start = journal.objective.settings, problem.backend, None
    if problem.loss.quadratic:
        return least_squares(problem, P, s.tol), True
    if W is not None:
        start = problem.C0.from_weights(W)
        start = start if problem.at(start).objective <= journal.objective.at_zero else None
    # It holds several arrays of n_train x c, which may be too much for a GPU, not for the host.
    here = get_backend("cpu") if on_host else backend.for_steps()
    if here.xp is not backend.xp and start is not None:
        start = backend.to_numpy(start)  # synchronize!
    memory = int(backend.agreed(here.memory_available()))
    steps = _CHEAP_STEPS * s.max_iter
    fitted = minimise(problem.whole(here), 0.1 * s.tol, steps, start, memory, journal.hear)
    return problem.at(backend.asarray(fitted.u)), fitted.status is not Status.MAX_ITER


def _train_on_rows(journal: Journal, plan: Plan, made: Preconditioned, task: Task) -> Fitted:
    """Training on stored rows; Q is solved for more tightly while that helps to prove W.  Where it
    does not, the true model has the last word, if there is memory for it."""
    s, o, run, W = task.settings, journal.objective, journal.run, task.W_start
    look, attempts, kept = plan.look, min(_ATTEMPTS, s.max_iter), None
    while True:
        P, best = made.P, journal.best
        problem = pose_on_rows(o, P)
        at, settled = solve_on_rows(journal, problem, P, W, plan.on_host)
        W, again = problem.C0.to_weights(at.u), None
        if look:
            W = train_outputs(journal, made, P.factor.from_weights(W), plan.outputs, most=_FEW)
            if journal.status is Status.MAX_ITER and len(journal.steps) <= s.max_iter:
                again = made.recipe.measure_residuals(s)
        else:
            proof = _prove(journal, problem, at, P, settled)
            attempts -= 1
            again = _ask_again(journal, proof, made) if attempts else None
            # Rows from which nothing follows for MSE, so alike they are, do not make it unprovable.
            weak = s.quadratic and journal.certificate.kind in (Kind.NONE, Kind.NONNEGATIVE)
            unproven = journal.status is Status.STAGNATED or (weak and not P.fragile)
            if again is None and unproven and plan.outputs and len(journal.steps) <= s.max_iter:
                why = "Q alone could not prove the fit"
                run.changes.append(Decision("proof", "true gradients", why))
                if s.quadratic:
                    known = (Kind.DETERMINISTIC, P, o.A, s.ridge, s.seed)
                    made = replace(made, spectrum=choose_spectrum(*known))
                W = train_outputs(journal, made, P.factor.from_weights(W), plan.outputs)
        # Rows in other coordinates may not hold the best weights: what theirs say is kept.
        if kept is None or journal.best is not best or kept[1].C0 is problem.C0:
            kept = made, problem
        if again is None:
            break
        look, recipe = False, run.change(again)
        P = tighten(P, recipe, o.A, o.Y, s.ridge, run.cache)
        made = Preconditioned(P, made.spectrum, recipe)
    W = W if o.trivial else journal.settle()
    spectrum, (made, problem), left_out = made.spectrum, kept, None
    if s.loo and journal.best is None:  # W = 0, which is no optimum: leave-one-out is about those
        left_out = LeftOut.unknown(*o.Y.shape)
    elif s.loo:
        others = None if made.P.stored is None else made.P.stored.eval_rows
        at = problem.at(problem.C0.from_weights(W))
        left_out = leave_one_out(problem, at, made.P, others)
    return Fitted(W, spectrum, made.outputs(W), left_out)


def _prove(
    journal: Journal, problem: StoredProblem, at: StoredPoint, P: Preconditioner, settled: bool
) -> Proof:
    """Weights from stored rows, and what is proven of them, as one step."""
    o, tol = journal.objective, journal.objective.settings.tol
    proof = prove(problem, at, P, o.X_norm, partial(o.explain, P), o.at_zero)
    found, b = proof.certificate(), problem.intercept(at)
    journal.tell((proof.objective, proof.error(), proof.grad_norm), found)
    zero = not found.value <= tol and proof.about_zero(tol)
    found = proof.nonnegative() if zero else found
    status = judge(found, tol, zero, stuck=settled and proof.choices != (), settled=settled)
    journal.keep(problem.C0.to_weights(at.u), lambda: b, found, status)
    return proof


def _ask_again(journal: Journal, proof: Proof, made: Preconditioned) -> Chosen | None:
    """How to solve for Q again so that stored rows prove more; None if they do, or never will."""
    P, recipe, A, tol = made.P, made.recipe, journal.objective.A, journal.objective.settings.tol
    certified = journal.status.proven
    if certified and (proof.enough(tol) or A.H.n * A.features > _QUICK):
        return None
    # Of separable classes, too, the objective can be known: it is about 0.
    unknown = journal.certificate.kind == Kind.NONE and proof.objective <= tol * proof.unit
    if journal.status is Status.MAX_ITER or (journal.status is Status.CONVERGED and not unknown):
        return None
    worst = None if P.stored is None else P.stored.worst
    again = recipe.leave_less(worst, proof.needed_share(0.7 * tol))
    if again is not None or certified or recipe.whiten or worst is None or P.fragile or unknown:
        return again
    return recipe.orthogonalise()
