"""Steps of Algorithm 1 that may take more than one try: P, and training on stored rows.

Each carries a plan out; `Preconditioned.changes` tells what turned out otherwise than planned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from herta_gpu.backends import get_backend
from herta_gpu.backends.base import Array
from herta_gpu.blockwise import Guess, trained
from herta_gpu.certificate import Proof, Spectrum, StoredProblem, choose_spectrum
from herta_gpu.diffusion import Cache
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.leave_one_out import LeftOut, dual_rows, left_out, spread
from herta_gpu.losses import LOSSES
from herta_gpu.planning.plan import (
    Chosen,
    Decision,
    Plan,
    Recipe,
    measured,
    orthonormal,
    tighter,
    with_less_left,
)
from herta_gpu.planning.settings import Settings
from herta_gpu.preconditioner import Preconditioner, build, no_preconditioner, tighten
from herta_gpu.problem import UnfoldedMap
from herta_gpu.sparsifier import sparsify
from herta_gpu.task import Context, Task, stored_rows
from herta_gpu.training import Preconditioned, Training

_CHEAP_STEPS = 20  # steps on stored rows, without a solve, that count as one of max_iter
_FEW = 2  # steps with true gradients after which a tighter Q is the better way
_ATTEMPTS = 4  # how often Q is solved for more tightly when a certificate asks for it


def sampled(
    H: RegularizedLaplacian, n_samples: int | None, settings: Settings, budget: int
) -> RegularizedLaplacian:
    """I + lam L_tilde: Algorithm 2 when it was asked for, its cheap relative otherwise."""
    if n_samples is None:
        return H
    faithful = settings.scores == "sketch"
    found = sparsify(H, n_samples, 0.0, settings.scores, faithful, settings.seed, budget)
    return H.on(found.graph)


def preconditioned(
    plan: Plan, task: Task, H_tilde: RegularizedLaplacian, A: UnfoldedMap, Y: Array, run: Context
) -> Preconditioned:
    """P^-1/2 and bounds of the Hessian it leaves; without any, Q is solved tighter once."""
    settings, stages, recipe = task.settings, run.stages, plan.recipe
    others = stored_rows(task.graph, task.eval_nodes, run.backend)
    changes: list[Decision] = []
    if not settings.precondition:
        none = no_preconditioner(A.H.backend, A.X.shape[1], Y.shape[1])
        return Preconditioned(none, None, recipe, changes)
    while True:
        with stages("preconditioner"):
            tell = stages.progress("Q", "columns")
            P = build(recipe, H_tilde, A, Y, settings.ridge, run.cache, others, tell)
        with stages("spectrum"):
            spectrum = _spectrum(plan.certificate, P, A, settings)
        missed = spectrum is not None and spectrum.kind == "estimate"
        rough = H_tilde is not A.H or recipe.sketch_rows is not None  # on purpose
        alike = P.kept < P.features and not (recipe.whiten or rough or P.fragile)
        if alike:
            recipe, why = orthonormal(recipe)
        elif missed and not rough and not recipe.exact:
            recipe, why = tighter(recipe, A.H.lambda_max)
        else:
            blocks = plan.outputs < Y.shape[1]
            return Preconditioned(P.for_training(A.H.backend, blocks), spectrum, recipe, changes)
        changes.append(why)


def _spectrum(kind: str, P: Preconditioner, A: UnfoldedMap, settings: Settings) -> Spectrum | None:
    """Bounds of the Hessian that P leaves; one that is not the same everywhere has none."""
    if not LOSSES[settings.loss].quadratic:
        return None
    return choose_spectrum(kind, P, A, settings.ridge, settings.seed)


def on_stored_rows(
    run: Training,
    plan: Plan,
    made: Preconditioned,
    task: Task,
    A: UnfoldedMap,
    Y: Array,
    context: Context,
) -> tuple[Preconditioned, Array]:
    """W from the stored rows of Q, the best of several attempts, and all that belongs to it."""
    settings = task.settings
    rows = _StoredRows(run, plan, settings, A, Y, context.cache)
    made, found, u = rows.attempts(made, task.W_start)
    W = run.settle(found)
    if settings.loo and run.kept is None and not run.nothing_to_learn:  # W = 0 was the best
        return replace(made, left_out=LeftOut.unknown(*Y.shape)), W
    for one in rows.former:  # rows in other coordinates may not hold these weights
        if run.kept is not None and run.kept.steps <= one.steps:
            own = {"left_out": one.left_out, "spread": one.spread, "known": one.known}
            return replace(made, **own), W
    if settings.loo:
        made = _without_each(made, rows.problem, u if W is found else rows.coordinates(W))
    return made, W


@dataclass
class _StoredRows:
    """Attempts to train on stored rows of Q, in one set of coordinates after another."""

    run: Training
    plan: Plan
    settings: Settings
    A: UnfoldedMap
    Y: Array
    cache: Cache

    def __post_init__(self) -> None:
        self.former: list[Preconditioned] = []  # what was found in coordinates that were given up

    def pose(self, made: Preconditioned) -> StoredProblem:
        A, run = self.A, self.run
        ridge = self.settings.ridge
        problem = StoredProblem(A.H.backend, A.loss, made.P, self.Y, ridge, run.X_norm)
        problem.host = get_backend("cpu") if self.plan.on_host else None
        self.problem = problem
        return problem

    def coordinates(self, W: Array) -> Array:
        return self.problem.basis.coordinates(W)

    def attempts(
        self, made: Preconditioned, W_start: Array | None
    ) -> tuple[Preconditioned, Array, Array]:
        """(P, W, its coordinates): Q is solved for more tightly while that helps to prove W.

        Where it does not, the true model has the last word, if there is memory for it.
        """
        run, plan, settings = self.run, self.plan, self.settings
        tol, steps, u = settings.tol, _CHEAP_STEPS * settings.max_iter, None
        if W_start is not None and made.P.basis is not None and not plan.look:
            u = made.P.basis.coordinates(W_start)
        if plan.look:
            problem = self.pose(made)
            W = problem.basis.weights(problem.minimised(tol, None, steps, run.warm))
            W = self._true_model(made, W, _FEW)
            u = self.coordinates(W)
            if run.status != "max_iter" or len(run.history) > settings.max_iter:
                return made, W, u
            made = self._lower(made, measured(made.recipe, settings))
        for left in reversed(range(min(_ATTEMPTS, settings.max_iter))):
            problem = self.pose(made)
            u = problem.minimised(tol, u, steps, run.warm)
            proof = run.direct(problem, u)
            again = _again(run, proof, made.P, made.recipe, settings) if left else None
            if again is None:
                break
            made, u = self._lower_from(made, again, u)
        W = problem.basis.weights(u)
        # Rows from which nothing follows for MSE, so alike they are, do not make it unprovable.
        weak = self.A.loss.quadratic and run.certificate.kind in ("none", "nonnegative")
        unproven = run.status == "stagnated" or (weak and not made.P.fragile)
        if not unproven or not plan.may_look or len(run.history) > settings.max_iter:
            return made, W, u
        told = Decision("proof", "true gradients", "Q alone could not prove the fit")
        spectrum = _spectrum("spectral-deterministic", made.P, self.A, settings)
        made = replace(made, spectrum=spectrum, changes=[*made.changes, told])
        W = self._true_model(made, W, None)
        return made, W, self.coordinates(W)

    def _lower(self, made: Preconditioned, again: Chosen) -> Preconditioned:
        """Q solved for once more, as `again` says."""
        P = tighten(made.P, again.value, self.A, self.Y, self.settings.ridge, self.cache)
        return replace(made, P=P, recipe=again.value, changes=[*made.changes, again.decision])

    def _lower_from(
        self, made: Preconditioned, again: Chosen, u: Array
    ) -> tuple[Preconditioned, Array]:
        """The same, and u in the coordinates of the new Q; what u gave is kept if they differ."""
        basis, lower = self.problem.basis, self._lower(made, again)
        if lower.P.basis is basis or lower.P.basis is None:
            return lower, u
        W = basis.weights(u)
        given_up = _without_each(made, self.problem, u) if self.settings.loo else made
        known = {"P": lower.P, "known": made.outputs(W), "steps": len(self.run.history)}
        self.former.append(replace(given_up, **known))
        return lower, lower.P.basis.coordinates(W)

    def _true_model(self, made: Preconditioned, W: Array, most: int | None) -> Array:
        """W after a few steps (or as many as are left) with true gradients, by solves."""
        run, w = self.run, made.P.factor.from_weights(W)
        run.P, run.spectrum = made.P, made.spectrum
        return trained(run, self.A, self.Y, w, self.plan.outputs, self.cache, most=most)


def at_zero(
    run: Training,
    plan: Plan,
    made: Preconditioned,
    task: Task,
    A: UnfoldedMap,
    Y: Array,
    context: Context,
) -> tuple[Preconditioned, Array]:
    """W = 0 where there is nothing to learn; stored rows are asked for leave-one-out only."""
    if task.settings.loo:
        task = replace(task, W_start=None)
        made, _ = on_stored_rows(run, replace(plan, outputs=0), made, task, A, Y, context)
    return made, run.at_zero()


def _without_each(made: Preconditioned, problem: StoredProblem, u: Array) -> Preconditioned:
    """With leave-one-out, and the spread of the rows outside training, if any are there."""
    others = None if made.P.stored is None else made.P.stored.eval_rows
    rows = dual_rows(problem)
    made = replace(made, left_out=left_out(problem, u, rows))
    if others is None:
        return made
    return replace(made, spread=spread(problem, others, rows))


def _again(
    run: Training, proof: Proof, P: Preconditioner, recipe: Recipe, settings: Settings
) -> Chosen | None:
    """How to solve for Q again so that stored rows prove more; None if they do, or never will."""
    certified, kept = run.status.startswith("certified"), recipe.keep_residual
    if certified and (proof.enough(settings.tol) or not kept):
        return None
    # Of separable classes, too, the objective can be known: it is about 0.
    unknown = run.certificate.kind == "none" and proof.near_zero(settings.tol)
    if run.status == "max_iter" or (run.status == "converged" and not unknown):
        return None
    worst = None if P.stored is None else P.stored.worst
    again = with_less_left(recipe, worst, proof.wanted(0.7 * settings.tol))
    if again is not None or certified or recipe.whiten or worst is None or P.fragile or unknown:
        return again
    return orthonormal(recipe)


def start(
    run: Training, plan: Plan, P: Preconditioner, task: Task, A: UnfoldedMap, context: Context
) -> tuple[Array, Guess | None]:
    """Where the loop starts, and what is known of Z there: a cheaper model may go first."""
    settings, W_start = task.settings, task.W_start
    warm = LOSSES[settings.loss].quadratic and settings.precondition  # P solves least squares
    if W_start is not None and not warm:
        return P.factor.from_weights(W_start), None
    w = P.w_start if warm else A.H.backend.xp.zeros_like(P.w_start)
    if plan.strategy == "direct" and P.rows is not None:
        problem = StoredProblem(A.H.backend, A.loss, P, run.Y, settings.ridge, run.X_norm)
        steps = _CHEAP_STEPS * settings.max_iter
        u = problem.minimised(settings.tol, None, steps, run.warm)
        return P.factor.from_weights(problem.basis.weights(u)), None
    if plan.loop_samples is not None:
        H_loop = sampled(A.H, plan.loop_samples, settings, context.budget)
        A_loop = UnfoldedMap(H_loop, A.X, A.train, A.width, A.loss)
        return run.loop(A_loop, w, certified=False).w, None
    return w, partial(P.guess, A.H.backend) if warm else None
