"""How many steps do HERTA, gradient descent and Adam need?  (The paper's figures.)

    HERTA_DATA=... python bench/convergence.py [--quick] [--mse | --ce] [dataset ...]

Standard training starts from W = 0 on the mean loss, with the best of five learning rates.
Cross entropy has a ridge of 1 (the loss is a sum over rows), so that an optimum exists.
"""

from __future__ import annotations

import sys
import time

from baselines import LEVELS, Objective, best_rate, herta_gaps, optimum, solved_rows, steps_to
from common import QUICK, Data, Results

STEPS = 300 if QUICK else 1000
LARGE = 10**8  # rows times columns times classes from which a fifth of the steps must do
RIDGE = {"mse": 0.0, "ce": 1.0}


def thinned(gaps: list[float]) -> list[tuple[int, float]]:
    """A curve for a picture: every step at first, then ever fewer."""
    kept, at = [], 0.0
    while at < len(gaps):
        kept.append((int(at), gaps[int(at)]))
        at = max(at + 1, at * 1.1)
    return kept


def main() -> None:
    names = [a for a in sys.argv[1:] if not a.startswith("-")]
    names = names or (["cora"] if QUICK else ["cora", "citeseer", "pubmed", "ogbn-arxiv"])
    losses = [loss for loss in RIDGE if f"--{loss}" in sys.argv] or list(RIDGE)
    # Steps are the same on every machine.
    results = Results(
        "convergence",
        lambda row: row["data"] in names and row["loss"] in losses,
        any_machine=True,
    )
    for name in names:
        data = Data(name)
        for lam in (1.0, 20.0):
            A = solved_rows(data, lam)
            for loss in losses:
                objective = Objective(A, data.one_hot, loss, RIDGE[loss])
                best = optimum(data, objective, lam)
                curves = {}
                steps = STEPS if A.size * data.one_hot.shape[1] < LARGE else STEPS // 5
                for method in ("gd", "adam"):
                    started = time.perf_counter()
                    curves[method] = best_rate(objective, method, steps, best)
                    if time.perf_counter() - started > 600:
                        break
                for optimizer in ("cg", "gd") if loss == "mse" else ("lbfgs",):
                    gaps, _ = herta_gaps(data, lam, loss, RIDGE[loss], best, optimizer)
                    curves[f"herta {optimizer}"] = None, gaps
                for method, (rate, gaps) in curves.items():
                    results.add(
                        data=name, lam=lam, loss=loss, method=method, rate=rate, optimum=best,
                        steps={f"{level:g}": steps_to(gaps, level) for level in LEVELS},
                        last=gaps[-1], taken=len(gaps) - 1, curve=thinned(gaps),
                    )  # fmt: skip


if __name__ == "__main__":
    main()
