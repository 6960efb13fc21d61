"""The loop of Algorithm 1 where n x c numbers do not fit: a block of outputs after the other.

The outputs of MSE are independent problems with one Hessian.  So each block is finished, its
certificate included, before the next begins: d x c and n_train x c numbers stay, and of n x c no
more than a block exists.  With G_J bounding the gap of the block J and O_J its optimum from below,

    (objective - optimum) / optimum <= sum of G_J / sum of O_J.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array
from herta_gpu.certificate import Certificate, joined
from herta_gpu.diffusion import Arrays, Cache
from herta_gpu.plumbing.targets import OneHot
from herta_gpu.problem import UnfoldedMap
from herta_gpu.training import Training, loss_at_zero

Guess = Callable[[Any], Array | None]

_WORST = ("diverged", "max_iter", "stagnated", "converged")  # what a fit is, from the worst on


def trained(
    run: Training,
    A: UnfoldedMap,
    Y: Any,
    w: Array,
    width: int,
    cache: Cache,
    guess: Guess | None = None,
    most: int | None = None,
) -> Array:
    """W from w by true gradients, `width` outputs at a time; `most` as in `Training.loop`.

    `guess` gives H^-1 X W at w of some outputs, about.
    """
    c = w.shape[1]
    if width >= c:
        run.Y, Z = Y[:], None if guess is None else guess(slice(None))
        return run.loop(A, w, certified=True, Z=Z, most=most).W
    first, W = run.phase + 1, run.xp.empty((A.X.shape[1], c))
    b = run.xp.zeros(c)
    parts: list[Training] = []
    tell = run.stages.progress("outputs", "outputs")
    tell(0, c)
    blocks = _blocks(run, Y, width)
    for phase, at in enumerate(blocks, start=first):
        part = _part(run, _columns(Y, at), phase, [p.certificate for p in parts])

        def finished(part: Training = part, at: Any = at) -> Arrays:
            Z = None if guess is None else guess(at)
            found = part.settle(part.loop(A, w[:, at], certified=True, Z=Z, most=most).W)
            made = {"W": found, "told": _journal(run, part)}
            return made if part.intercept is None else {**made, "b": part.intercept}

        made = cache(f"outputs-{phase}-{run.settings.max_iter}", finished, together=True)
        W[:, at] = made["W"]
        if "b" in made:
            b[at] = made["b"]
        _read_journal(run, part, made["told"])
        parts.append(part)
        tell(sum(block.shape[0] for block in blocks[: len(parts)]), c)
    run.phase = first + len(blocks) - 1
    run.intercept = b if run.loss.intercept else None
    _join(run, parts)
    run.keep(W, lambda: run.intercept)
    return W


def _blocks(run: Training, Y: Any, width: int) -> list[Any]:
    """Outputs in blocks of about the same size, those first that cannot be fitted well.

    Their optimum leaves room for the gaps of others, whose optimum may be next to nothing.
    """
    c = Y.shape[1]
    fitted = run.backend.to_numpy((run.P.w_start**2).sum(axis=0))  # synchronize!
    size = -(-c // -(-c // width))
    order = np.argsort(fitted - _squares(run, Y), kind="stable")
    return [order[i : i + size] for i in range(0, c, size)]


def _squares(run: Training, Y: Any) -> Any:
    """||y||^2 of each output, on the host."""
    if isinstance(Y, OneHot):
        return np.bincount(run.backend.to_numpy(Y.codes), minlength=Y.shape[1])  # synchronize!
    return run.backend.to_numpy((Y**2).sum(axis=0))  # synchronize!


def _columns(Y: Any, at: Any) -> Array:
    return Y.columns(at) if isinstance(Y, OneHot) else Y[:, at]


def _part(run: Training, Y: Array, phase: int, before: list[Certificate]) -> Training:
    """Training of some of the outputs, after what `run` has told so far."""
    part = copy(run)
    part.Y, part.loss_at_zero = Y, loss_at_zero(run.loss, run.xp, Y)[0]
    part.history, part.proven, part.before = list(run.history), [], before
    part.first_gradient, part.callback, part.phase = math.inf, None, phase - 1
    part.kept, part.changes, part.first = None, [], len(run.history)
    return part


def _journal(run: Training, part: Training) -> str:
    """The steps, certificates and status of a finished part, as JSON for a checkpoint."""
    proven = [vars(found) for found in [*part.proven, part.certificate]]
    told = (part.history[len(run.history) :], proven, part.status)
    return json.dumps(told)


def _read_journal(run: Training, part: Training, told: str) -> None:
    history, proven, part.status = json.loads(told)
    part.history = [*run.history, *history]
    *part.proven, part.certificate = (Certificate(**found) for found in proven)


def _join(run: Training, parts: list[Training]) -> None:
    """History, certificate and status of all outputs.

    A part that took fewer steps than others stays at its last one.
    """
    before, count = len(run.history), max(len(part.proven) for part in parts)
    for i in range(count):
        at = [min(i, len(part.proven) - 1) for part in parts]
        found = joined([part.proven[j] for part, j in zip(parts, at, strict=True)])
        run.together([p.history[before + j] for p, j in zip(parts, at, strict=True)], found.value)
    run.certificate = joined([part.certificate for part in parts])
    if run.certificate.value <= run.settings.tol:
        run.status = "certified-reduced" if run.certificate.reduced else "certified"
    else:
        words = {part.status for part in parts}
        run.status = next((word for word in _WORST if word in words), "stagnated")
