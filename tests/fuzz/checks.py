"""What must hold after a fit, whatever the problem was."""

from __future__ import annotations

import math
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from herta_gpu import HERTA, Graph
from herta_gpu.plumbing.checkpoint import Checkpoint
from herta_gpu.plumbing.checks import BudgetError
from tests.fuzz.problems import Problem
from tests.fuzz.reference import Reference

WORDS = ("certified", "certified-reduced", "converged", "max_iter", "stagnated", "diverged")
SLACK = 1e-12  # of the objective: the package adds up its own objectives in float64
REPEATS = 3  # fits with other random starts before a bound that may fail by chance is called false


class Crash(Exception):  # noqa: N818
    """What a resume goes on from."""


@dataclass
class Outcome:
    """What one problem led to."""

    problem: Problem
    status: str = ""
    faults: list[str] = field(default_factory=list)
    chance: float = 0.0  # that the certificate fails, by its own word
    unlucky: bool = False  # it did, and others for the same problem did not
    claimed: float = math.inf
    true_gap: float = math.nan  # a lower bound of it


def run(problem: Problem) -> Outcome:
    """Fit, and hold the result against the reference."""
    found = Outcome(problem)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = resume(problem, found) if problem.later else fit(problem)
    except (ValueError, TypeError, BudgetError) as error:
        found.status = "refused"
        if not one_sentence(error):
            found.faults.append(f"no sentence: {type(error).__name__}: {str(error)[:200]!r}")
        return found
    except Exception as error:  # whatever it is, a user would see a traceback
        found.status = "exception"
        found.faults.append(f"{type(error).__name__}: {str(error)[:200]!r}")
        return found
    if model is not None:
        judge(problem.later or problem, model, found)
    return found


def fit(problem: Problem, **more: Any) -> HERTA:
    graph = Graph.from_edges(problem.edges, problem.n, problem.weights)
    weight = problem.sample_weight
    if weight is not None:
        more["sample_weight"] = weight
    return HERTA(**problem.params).fit(graph, problem.X, problem.y, problem.train, **more)


def one_sentence(error: Exception) -> bool:
    """A message for a person: words and a full stop, no traceback and no repr of an array."""
    text = str(error)
    if isinstance(error, np.linalg.LinAlgError):  # a ValueError by birth, but no word to a caller
        return False
    return "\n" not in text and len(text) < 400 and text.strip().endswith(".") and " " in text


# ---- certificates --------------------------------------------------------------------------
def judge(problem: Problem, model: HERTA, found: Outcome) -> None:
    found.status, certificate = model.status_, model.certificate_
    found.faults += form_faults(model)
    if not np.isfinite(model.W_).all() or not claims(model):
        return
    reference = problem.reference
    faults = bound_faults(model, reference, found)
    found.claimed, found.chance = certificate.value, certificate.probability
    if faults and certificate.probability > 0:
        # It may fail with a probability of at most 1/n; four failures in a row are no bad luck.
        again = [other_start(problem, reference, i) for i in range(1, REPEATS + 1)]
        found.unlucky = not all(again)
        faults = [] if found.unlucky else faults
    found.faults += faults


def other_start(problem: Problem, reference: Reference, i: int) -> list[str]:
    params = {**problem.params, "random_state": problem.params["random_state"] + 1000 * i}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fit(replace(problem, params=params))
    return bound_faults(model, reference) if claims(model) else []


def reduced(model: HERTA) -> bool:
    """Whether its certificate speaks of some of the features only, and the status says so."""
    if model.status_ == "certified":
        return False  # that word is for the problem as given
    kept = getattr(model.certificate_, "kept", None)
    features = getattr(model.certificate_, "features", None)
    fewer = kept is not None and features is not None and kept < features
    return model.status_ != "certified" and (fewer or "optimum over" in model.certificate_.note)


def claims(model: HERTA) -> bool:
    """Whether anything is claimed about the full problem."""
    finite = math.isfinite(model.certificate_.value) or math.isfinite(model.certificate_.gap)
    steps = any(math.isfinite(h["certificate"]) for h in model.history_)
    return (finite or steps) and not reduced(model)


def form_faults(model: HERTA) -> list[str]:
    """What needs no optimum to be seen."""
    c, faults = model.certificate_, []
    if model.status_ not in WORDS:
        faults.append(f"unknown status {model.status_!r}")
    if not np.isfinite(model.W_).all():
        faults.append("W_ is not finite")
    if len(model.history_) - 1 > model.max_iter:
        faults.append(f"{len(model.history_) - 1} steps, but max_iter is {model.max_iter}")
    if math.isnan(c.value) or c.value < 0 or math.isnan(c.gap) or c.gap < 0:
        faults.append(f"a certificate of {c.value}, gap {c.gap}")
    if model.status_.startswith("certified") and not c.value <= model.tol:
        faults.append(f"{model.status_} at {c.value:.1e}, above tol {model.tol:.1e}")
    if model.status_ == "certified-reduced":
        kept, features = getattr(c, "kept", None), getattr(c, "features", None)
        if not (isinstance(kept, int) and isinstance(features, int) and 0 <= kept < features):
            faults.append(f"certified-reduced, but kept {kept!r} of {features!r} features")
        if not c.note:
            faults.append("certified-reduced without a note")
    return faults


def bound_faults(model: HERTA, reference: Reference, found: Outcome | None = None) -> list[str]:
    """Bounds that lie below what is certainly the truth."""
    W = np.vstack([model.W_, model.intercept_]) if model.fit_intercept else model.W_
    here, best, c = reference.objective(W), reference.best, model.certificate_
    slack = SLACK * here.value + floor(reference)
    gap = here.low - best.high  # at most the true one
    if found is not None and best.high > 0:
        found.true_gap = float(max(gap, 0) / best.high)
    faults = []
    # The optimum is at most best.high, and (objective - optimum) / optimum falls with it.
    if exceeds(gap - slack, c.value, best.high):
        faults.append(
            f"{model.status_} {c.value:.1e} ({c.kind}) but the gap is {float(gap / best.high):.1e}"
            f" (objective {float(here.value):.6g}, reached {float(best.value):.6g})"
        )
    elif gap - slack > c.gap:
        faults.append(f"gap <= {c.gap:.2e} ({c.kind}) but it is {float(gap):.2e}")
    # Steps are judged by the package's own objective, which says how far it may be off.  Weights
    # that cancel make it inexact: how much so is known where W_ is known, at the last step.
    off, last = abs(model.history_[-1]["loss"] - here.value), model.history_[-1]
    stated = last.get("loss_error", 0.0)
    if off > max(stated, 1e-6 * here.value) + here.error + min(c.gap, here.value) + floor(
        reference
    ):
        faults.append(f"loss {last['loss']:.8g}, but it is {float(here.value):.8g}")
        off = 0.0
    for h in model.history_:
        below = h["loss"] - best.high - SLACK * h["loss"] - 10 * off - floor(reference)
        if exceeds(below - h.get("loss_error", 0.0), h["certificate"], best.high):
            true = float((h["loss"] - best.high) / best.high)
            faults.append(f"step {h['step']} claims {h['certificate']:.1e}, the gap is {true:.1e}")
            break
    return faults


def exceeds(gap: Any, claimed: float, optimum: Any) -> bool:
    return math.isfinite(claimed) and bool(gap > claimed * optimum)


def floor(reference: Reference) -> Any:
    """What float64 leaves of an optimum of 0: residuals of Y's size times its rounding."""
    return 1e-30 * (reference.Y * reference.Y).sum()


# ---- resume --------------------------------------------------------------------------------
def resume(problem: Problem, found: Outcome) -> HERTA | None:
    """Interrupt a fit, change what is to be changed, fit again with the same folder."""

    stop = problem.stop if problem.stop >= 0 else len(fit(problem).history_) - 1

    def crash(record: dict[str, Any]) -> None:
        if record["step"] >= stop:
            raise Crash

    later = problem.later
    assert later is not None
    with tempfile.TemporaryDirectory() as folder:
        with suppress(Crash):
            fit(problem, callback=crash, checkpoint=Checkpoint(folder, worth=0.0))
        harmless = problem.change in ("nothing", "max_iter")
        try:
            model = fit(later, checkpoint=Checkpoint(folder, worth=0.0))
        except (ValueError, RuntimeError) as error:
            found.status = "refused"
            if harmless:
                found.faults.append(f"a resume with the same data is refused: {str(error)[:200]}")
            elif not one_sentence(error):
                found.faults.append(f"no sentence: {type(error).__name__}: {str(error)[:200]!r}")
            return None
    if problem.change == "nothing":
        found.faults += bit_faults(model, fit(problem))
    return model


def bit_faults(resumed: HERTA, whole: HERTA) -> list[str]:
    """A resumed fit ends with the bits of one that nobody interrupted."""
    if not np.array_equal(resumed.W_, whole.W_):
        return ["resumed with the same data, but W_ has other bits"]
    steps = [[{**h, "seconds": 0} for h in m.history_] for m in (resumed, whole)]
    return [] if steps[0] == steps[1] else ["resumed with the same data, but another history_"]
