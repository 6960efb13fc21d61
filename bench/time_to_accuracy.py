"""How many seconds to a relative gap of 1e-2, 1e-4, 1e-6, against what a user has today?

    HERTA_DATA=... python bench/time_to_accuracy.py [--quick] [--mse] [dataset ...]

Fits are timed whole, certificate included, and their true gap is measured afterwards.  Step
methods are (steps, counted on a stored A) x (seconds of one step of the unrolled model, measured);
where the steps given did not suffice, the seconds are a lower bound and marked so.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from baselines import (
    LEVELS,
    Objective,
    best_rate,
    cgls,
    direct_cholesky,
    optimum,
    solved_rows,
    sparse_factors,
    steps_to,
    unrolled_step_seconds,
)
from common import QUICK, Data, Results, race

from herta_gpu import HERTA, SDDSolver

STEPS = {"mse": 300 if QUICK else 5000, "ce": 300 if QUICK else 2000}
STRATEGIES = ("auto", "herta", "direct")
RIDGE = {"mse": 0.0, "ce": 1.0}


def fitted(data: Data, lam: float, loss: str, strategy: str, tol: float, found: dict) -> Any:
    def run() -> None:
        optimizer = "cg" if loss == "mse" else "lbfgs"
        found[strategy] = HERTA(
            lam=lam, loss=loss, ridge=RIDGE[loss], tol=tol, strategy=strategy, optimizer=optimizer
        ).fit(data.graph, data.X, data.y, data.train)

    return run


def our_fits(results: Results, data: Data, lam: float, objective: Objective, best: float) -> Any:
    loss, seconds = objective.loss, {}
    for level in LEVELS[-1:] if QUICK else LEVELS:
        found: dict[str, Any] = {}
        runners = {s: fitted(data, lam, loss, s, level, found) for s in STRATEGIES}
        timed = race(runners, 2 if QUICK else 3, 20)
        for strategy, row in timed.items():
            model = found[strategy]
            gap = (objective(model.W_)[0] - best) / best
            results.add(
                data=data.name, lam=lam, loss=loss, method=f"herta_gpu {strategy}", level=level,
                **row, gap=gap, status=model.status_, certificate=model.certificate_.value,
                picked=model.plan_.strategy,
            )  # fmt: skip
        seconds[level] = timed["auto"]
    return seconds


def step_methods(
    results: Results, data: Data, lam: float, objective: Objective, best: float, ours: Any
) -> None:
    """Torch's Adam and gradient descent, and CGLS with two block solves a step."""
    step = unrolled_step_seconds(data, lam, objective.loss)
    runs = {
        f"torch {m}": (step, best_rate(objective, m, STEPS[objective.loss], best)[1])
        for m in ("adam", "gd")
    }
    if objective.loss == "mse":
        solver = SDDSolver(data.graph, lam, tol=1e-5)
        block = np.random.default_rng(0).standard_normal(
            (data.graph.num_nodes, objective.Y.shape[1])
        )
        solve = race({"solve": lambda: solver.solve(block)}, 3)["solve"]["seconds"]
        runs["CGLS"] = 2 * solve, cgls(objective, best, 5000)
    for method, (per_step, gaps) in runs.items():
        for level, row in ours.items():
            steps = steps_to(gaps, level)
            seconds = per_step * (len(gaps) - 1 if steps is None else steps)
            results.add(
                data=data.name, lam=lam, loss=objective.loss, method=method, level=level,
                seconds=seconds, step_seconds=per_step, steps=steps, at_least=steps is None,
                gap=min(gaps), ratio=seconds / row["seconds"],
            )  # fmt: skip


def direct_peers(
    results: Results, data: Data, lam: float, objective: Objective, best: float, ours: Any
) -> None:
    """One exact solve for Q; then Cholesky (MSE) or scikit-learn (cross entropy)."""
    W: dict[str, Any] = {}
    if objective.loss == "mse":

        def add(name: str, factored: Any) -> tuple[str, Any]:
            method, solve = f"{name} + Cholesky", direct_cholesky(data, lam, factored)
            return method, lambda: W.update({method: solve()})

        runners = dict(add(name, factored) for name, factored in sparse_factors().items())
    else:
        from sklearn.linear_model import LogisticRegression

        method = "Q given + LogisticRegression"  # the solve for Q is not even counted
        C = 1.0 / objective.ridge

        def logistic() -> None:
            model = LogisticRegression(C=C, fit_intercept=False, tol=1e-6, max_iter=5000)
            W[method] = model.fit(objective.A, data.y[data.train]).coef_.T

        runners = {method: logistic}
    for method, row in race(runners, 3, 40).items():
        gap = (objective(W[method])[0] - best) / best
        for level, mine in ours.items():
            results.add(
                data=data.name, lam=lam, loss=objective.loss, method=method, level=level, **row,
                gap=gap, at_least=gap > level, ratio=row["seconds"] / mine["seconds"],
            )  # fmt: skip


def main() -> None:
    names = [a for a in sys.argv[1:] if not a.startswith("-")] or ["cora", "pubmed"]
    results = Results("time_to_accuracy")
    for name in names:
        data = Data(name)
        for lam in (1.0, 20.0):
            A = solved_rows(data, lam)
            for loss in ("mse",) if QUICK or "--mse" in sys.argv else ("mse", "ce"):
                objective = Objective(A, data.one_hot, loss, RIDGE[loss])
                best = optimum(data, objective, lam)
                ours = our_fits(results, data, lam, objective, best)
                step_methods(results, data, lam, objective, best, ours)
                direct_peers(results, data, lam, objective, best, ours)


if __name__ == "__main__":
    main()
