"""What must hold after a fit, whatever the problem was."""

from __future__ import annotations

import math
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.stats

from herta_gpu import HERTA, Graph, personalized_pagerank
from herta_gpu.conformal import SplitConformal
from herta_gpu.plumbing.checkpoint import Checkpoint
from herta_gpu.plumbing.checks import BudgetError
from tests.fuzz.problems import Problem
from tests.fuzz.reference import LD, Reference, System, adjacency, pagerank, system

WORDS = ("certified", "certified-reduced", "converged", "max_iter", "stagnated", "diverged")
SLACK = 1e-12  # of the objective: the package adds up its own objectives in float64
REPEATS = 3  # fits with other random starts before a bound that may fail by chance is called false
RIGHT = 1e-9  # relative gap from which a fit without a certificate counts as a lost one
RARE = 1e-9  # probability below which sets that miss too often are called false


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
    noise: float = math.inf  # what the reference may be off by, in the same unit
    lost: bool = False  # right, but not certified


def run(problem: Problem) -> Outcome:
    """Fit, and hold the result against the reference."""
    found = Outcome(problem)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CHECKS.get(problem.kind, check_fit)(problem, found)
    except (ValueError, TypeError, BudgetError) as error:
        found.status = "refused"
        if not one_sentence(error):
            found.faults.append(f"no sentence: {type(error).__name__}: {str(error)[:200]!r}")
    except ModuleNotFoundError as error:  # the layer needs torch
        found.status = f"no {error.name}"
    except Exception as error:  # whatever it is, a user would see a traceback
        found.status = "exception"
        found.faults.append(f"{type(error).__name__}: {str(error)[:200]!r}")
    return found


def graph_of(problem: Problem) -> Graph:
    graph = Graph.from_edges(problem.edges, problem.n, problem.weights)
    if problem.factor is None:
        return graph
    at = np.zeros((problem.n, problem.n))
    at[problem.edges[0], problem.edges[1]] = at[problem.edges[1], problem.edges[0]] = problem.factor
    u, v, _ = graph.edges()
    return graph.reweighted(at[u, v])


def fit(problem: Problem, **more: Any) -> HERTA:
    if problem.sample_weight is not None:
        more["sample_weight"] = problem.sample_weight
    if problem.before is not None:
        more["warm_start"] = fit(problem.before)
    model = HERTA(**problem.params)
    return model.fit(graph_of(problem), problem.X, problem.y, problem.train, **more)


def one_sentence(error: Exception) -> bool:
    """A message for a person: words and a full stop, no traceback and no repr of an array."""
    text = str(error)
    if isinstance(error, np.linalg.LinAlgError):  # a ValueError by birth, but no word to a caller
        return False
    return "\n" not in text and len(text) < 400 and text.strip().endswith(".") and " " in text


# ---- certificates --------------------------------------------------------------------------
def check_fit(problem: Problem, found: Outcome) -> None:
    model = resume(problem, found) if problem.later else fit(problem)
    if model is not None:
        judge(problem.later or problem, model, found)


def judge(problem: Problem, model: HERTA, found: Outcome) -> None:
    found.status, certificate = model.status_, model.certificate_
    found.faults += form_faults(model)
    if not np.isfinite(model.W_).all():
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
    return bound_faults(model, reference)


def reduced(model: HERTA) -> bool:
    """Whether its certificate speaks of some of the features only, and the status says so."""
    fewer = model.certificate_.kept < model.certificate_.features
    word = fewer or "optimum over" in model.certificate_.note
    return model.status_ != "certified" and word  # that word is for the problem as given


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
        if not (isinstance(c.kept, int) and 0 <= c.kept < c.features):
            faults.append(f"certified-reduced, but kept {c.kept!r} of {c.features!r} features")
        if not c.note:
            faults.append("certified-reduced without a note")
    return faults


def bound_faults(model: HERTA, reference: Reference, found: Outcome | None = None) -> list[str]:
    """Bounds that lie below what is certainly the truth, and a fit worse than none."""
    W = np.vstack([model.W_, model.intercept_]) if model.fit_intercept else model.W_
    here, best, c = reference.objective(W), reference.best, model.certificate_
    slack = SLACK * here.value + floor(reference)
    gap = here.low - best.high  # at most the true one
    if found is not None and best.high > 0:
        found.true_gap = float(max(gap, 0) / best.high)
        found.noise = float((here.error + best.error) / best.high)
        wrong = (here.high - best.value) / best.high  # at least the true one, if best is the best
        found.lost = model.status_ != "certified" and bool(wrong <= min(RIGHT, model.tol))
    faults = []
    nothing = reference.objective(np.zeros_like(W))
    if here.low - slack > nothing.high:
        faults.append(f"objective {float(here.value):.6g}, {float(nothing.value):.6g} without W")
    if reduced(model):
        return faults
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
    stated = max(last.get("loss_error", 0.0), 1e-6 * here.value) + here.error
    if off > stated + min(c.gap, here.value) + floor(reference):
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
    return 1e-30 * (reference.w * reference.Y * reference.Y).sum()


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
        try:
            model = fit(later, checkpoint=Checkpoint(folder, worth=0.0))
        except (ValueError, RuntimeError) as error:
            if problem.change in ("nothing", "max_iter"):
                found.faults.append(f"a resume with the same data is refused: {str(error)[:200]}")
            raise ValueError(str(error)) from error
    if problem.change == "nothing":
        found.faults += bit_faults(model, fit(problem))
    return model


def bit_faults(resumed: HERTA, whole: HERTA) -> list[str]:
    """A resumed fit ends with the bits of one that nobody interrupted."""
    if not np.array_equal(resumed.W_, whole.W_):
        return ["resumed with the same data, but W_ has other bits"]
    steps = [[{**h, "seconds": 0} for h in m.history_] for m in (resumed, whole)]
    return [] if steps[0] == steps[1] else ["resumed with the same data, but another history_"]


# ---- leave-one-out -------------------------------------------------------------------------
def check_left_out(problem: Problem, found: Outcome) -> None:
    """Leverages, and outputs without a row against a refit without it."""
    model = fit(problem, loo=True)
    judge(problem, model, found)
    if found.status != "certified":
        return  # weights that nothing decides have no leverages either
    reference = problem.reference
    some = np.random.default_rng(problem.n).permutation(len(model.loo_))[:8]
    truth, leverage = reference.left_out(some)
    off = abs(model.leverage_ - leverage).max()
    if not off <= 1e-6:
        found.faults.append(f"a leverage is {float(off):.1e} off")
    loo, free = model.loo_[some], (1 - leverage)[some]
    alone, said = free < 1e-8, np.isfinite(loo).all(axis=1)  # alone: no other row decides a weight
    if not (said | alone).all():
        found.faults.append("a row has no model without it, although others decide all weights")
    # Residuals follow from W, which is known up to the gap; each of them is divided by 1 - h.
    moved = np.sqrt(2 * model.certificate_.gap / reference.w[some, 0])
    moved /= np.where(alone, np.inf, free)
    size = abs(reference.Y).max() + abs(truth)
    allowed = np.where(alone, 1e-3, 1e-6)[:, None] * size + moved[:, None]
    worst = float((abs(loo - truth) / allowed)[said].max(initial=0))
    if worst > 1:
        found.faults.append(f"an output without its row is off by {worst:.1e} times what it may")


# ---- conformal sets ------------------------------------------------------------------------
def check_sets(problem: Problem, found: Outcome) -> None:
    """They miss the truth no more often than stated; what is no output or label is refused."""
    rng = np.random.default_rng(problem.n)
    model = fit(problem)
    found.status, Z = model.status_, model.transform(graph_of(problem), problem.X)
    others = rng.permutation(np.setdiff1d(np.arange(problem.n), problem.train))
    cut, coverage = len(others) // 2, float(rng.uniform(0.5, 0.95))
    known, asked, y = others[:cut], others[cut:], problem.y
    sets = SplitConformal(coverage).calibrate(Z[known], y[known], model.classes_)
    if model.classes_ is None:
        low, high = sets.intervals(Z[asked])
        Y = y[asked].reshape(len(asked), -1)
        hits = ((low <= Y) & (high >= Y)).sum(axis=0).min()
    else:
        hits = (sets.sets(Z[asked]) & (y[asked][:, None] == model.classes_)).sum()
    rank = math.ceil((cut + 1) * coverage - 1e-9)
    if rank <= cut:
        chance = scipy.stats.betabinom.cdf(hits, len(asked), rank, cut + 1 - rank) * Z.shape[1]
        if chance < RARE:
            found.faults.append(f"{hits} of {len(asked)} covered, coverage {coverage:.2f}")
    holes, wide = np.where(np.arange(problem.n)[:, None] == known[0], np.nan, Z), np.hstack([Z, Z])
    none = np.where(np.arange(problem.n) == known[0], -1, y) if y.ndim == 1 else y
    calls = {
        "NaN": lambda: SplitConformal().calibrate(holes[known], y[known], model.classes_),
        "NaN to ask for": lambda: ask(sets, holes[known]),
        "width": lambda: ask(sets, wide),
        "label": lambda: SplitConformal().calibrate(Z[known], none[known], model.classes_),
    }
    for what in list(calls)[: 3 if model.classes_ is None else 4]:
        try:
            calls[what]()
            found.faults.append(f"conformal sets accept a wrong {what}")
        except ValueError as error:
            found.faults += [] if one_sentence(error) else [f"no sentence: {error}"]


def ask(sets: SplitConformal, Z: Any) -> Any:
    return sets.intervals(Z) if sets.classes_ is None else sets.sets(Z)


# ---- the layer -----------------------------------------------------------------------------
def check_layer(problem: Problem, found: Outcome) -> None:
    """Both bounds of both passes, and of the gradient of the gradient."""
    import torch

    from herta_gpu.torch import UnfoldedLayer

    params = {k: v for k, v in problem.params.items() if k != "dtype"}
    layer = UnfoldedLayer(graph_of(problem), **params)
    dtype = getattr(torch, problem.params["dtype"])
    F, G = (torch.from_numpy(A).to(dtype).requires_grad_() for A in (problem.X, problem.y))
    Z = layer(F)
    claims = [layer.error_]
    (dF,) = torch.autograd.grad(Z, F, G, create_graph=True)
    claims.append(layer.backward_error_)
    (dG,) = torch.autograd.grad(dF, G, F)
    claims.append(layer.backward_error_)
    H = System(system(problem.n, problem.edges, problem.weights, problem.params["lam"]))
    pairs = [(F, Z), (G, dF), (F, dG)]
    true = [relative_error(H, *(A.detach().double().numpy() for A in pair)) for pair in pairs]
    within = max(claims) <= problem.params["tol"] + torch.finfo(dtype).eps
    found.status = "certified" if within else "said"
    found.claimed, found.true_gap, found.noise = claims[0], true[0], 1e-16
    for claim, one, what in zip(claims, true, ("Z", "dF", "dG"), strict=True):
        if one > claim * (1 + 1e-9) + 1e-16:
            found.faults.append(f"{what} is off by {one:.2e}, {claim:.2e} claimed")


def relative_error(H: System, B: Any, Z: Any) -> float:
    """The largest of a column of Z = H^-1 B, where the exact one is not 0."""
    exact = H.solve(B.astype(LD))[0]
    size, off = (np.sqrt((A * A).sum(axis=0)) for A in (exact, Z.astype(LD) - exact))
    return float(np.max(off[size > 0] / size[size > 0], initial=0.0))


# ---- personalised PageRank -----------------------------------------------------------------
def check_walk(problem: Problem, found: Outcome) -> None:
    """Every number within its bound; who is surely among the best is."""
    A = adjacency(problem.n, problem.edges, problem.weights)
    loops = np.where(A.diagonal() > 0, A.diagonal(), LD(1))
    np.fill_diagonal(A, loops if problem.params["self_loops"] else 0)
    exact = pagerank(A, problem.X.astype(LD), problem.params["damping"])
    got = personalized_pagerank(graph_of(problem), problem.X, **problem.params)
    off = abs(got.scores - exact)
    found.status = "certified" if got.error.max() <= problem.params["tol"] else "said"
    found.claimed, found.true_gap, found.noise = float(got.error.max()), float(off.max()), 1e-17
    if (off > got.error + 1e-18 * exact).any():
        worst = float((off - got.error).max())
        found.faults.append(f"a number is {worst:.1e} further off than its bound")
    count = max(1, problem.n // 5)
    for top, pi in zip(got.top(count), exact.T, strict=True):
        best, sure = np.sort(pi)[::-1], np.setdiff1d(top.nodes, top.undecided)
        never = np.setdiff1d(np.arange(problem.n), np.union1d(top.nodes, top.undecided))
        if (pi[sure] < best[count - 1]).any() or (pi[never] > best[count - 1]).any():
            found.faults.append("a node that is said to be among the best, or not to be, is not so")


def check_columns(problem: Problem, found: Outcome) -> None:
    """What the model makes of X is computed again, from V, R and b alone."""
    model = fit(problem)
    reference = Reference(
        [np.eye(problem.n)], made_columns(problem, model), problem.targets(), problem.rows(),
        problem.params["loss"], problem.params["ridge"], problem.row_weights(),
        problem.params["fit_intercept"],
    )  # fmt: skip
    found.status = model.status_
    found.faults += form_faults(model)
    if np.isfinite(model.W_).all():
        found.claimed = model.certificate_.value
        found.faults += bound_faults(model, reference, found)


def made_columns(problem: Problem, model: HERTA) -> Any:
    """(n, rows of W) in extended precision."""

    def unit(B: Any, least: float) -> Any:
        return B / np.maximum(np.sqrt((B * B).sum(axis=1, keepdims=True)), LD(least))

    def bent(U: Any) -> Any:
        return np.sqrt(LD(2) / problem.params["hidden"]) * np.maximum(U @ f["R"] + f["b"], 0)

    f = {name: np.asarray(value, dtype=LD) for name, value in model.fixed_.items()}
    X = problem.X.toarray() if hasattr(problem.X, "toarray") else np.asarray(problem.X)
    X, lam, hops = X.astype(LD), problem.params["lam"], problem.params["hops"] or []
    lams = lam if isinstance(lam, list) else [lam] * (not hops or lam != 1.0)
    systems = [System(system(problem.n, problem.edges, problem.weights, one)) for one in lams]
    S = 2 * np.eye(problem.n) - system(problem.n, problem.edges, problem.weights, 1.0)

    def diffused(B: Any) -> list[Any]:
        found = [one.solve(B)[0] for one in systems]
        for k in hops:
            H = B
            for _ in range(k):
                H = S @ H
            found.append(H)
        return found

    behind: list[Any] = []
    if problem.params.get("hidden"):
        U = unit(X @ f["V"], f["floor"])
        if problem.params["hidden_at"] == "after":
            inputs = [unit(Q, 1e-3) for Q in diffused(U)]
            behind = [bent(np.hstack(inputs) / np.sqrt(LD(len(inputs))))]
        else:
            X = np.hstack([X, bent(U)])
    blocks = diffused(X)
    if problem.params["row_norm"]:
        blocks = [unit(Q, f["row_floor"]) for Q in blocks]
    return np.hstack(blocks + behind)


CHECKS = {
    "made columns": check_columns,
    "leave one out": check_left_out, "conformal": check_sets, "layer": check_layer,
    "pagerank": check_walk,
}  # fmt: skip
