"""Where do the sparsifier and the SRHT pay, and does strategy="auto" know?

    python bench/sparsify.py [--quick] [degree ...]

Random graphs of n nodes by average degree, random features by width: not negative, as counts are
not, with labels that a model of this kind explains in part.  Every choice is run on the same data
in turn; the regret is the time of what auto picks over the best one's, less one.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from common import QUICK, Results, race, random_power_law

from herta_gpu import HERTA, Graph, SDDSolver

C = 5  # classes
CHOICES: dict[str, dict[str, Any]] = {
    "auto": {},
    "direct": {"strategy": "direct"},
    "herta": {"strategy": "herta", "sparsify": False, "sketch": False},
}


def choices(n: int, m: int, d: int, lam: float) -> dict[str, dict[str, Any]]:
    """With a sparsifier and a sketch of 16 d rows where they are smaller than what they stand for.

    Algorithm 2 gets a quarter of the edges; degree scores as many samples as auto would take.
    """
    found = dict(CHOICES)
    if m > 4 * n:
        found["herta, Algorithm 2"] = {"strategy": "herta", "sparsify": max(2 * n, m // 4)}
    by_degree = {"strategy": "herta", "sparsify": "degree"}
    if (HERTA(lam=lam, **by_degree).plan(n, m, d, C, n // 2).n_samples or m) < m:
        found["herta, degree scores"] = by_degree
    if 16 * d < n:
        found["herta, sketched"] = {"strategy": "herta", "sparsify": False, "sketch": 16 * d}
    return found


def planted_labels(graph: Graph, X: Any, rng: np.random.Generator) -> Any:
    """The largest output of a random unfolded model, with some noise."""
    Z = SDDSolver(graph, lam=1.0).solve(X @ rng.standard_normal((X.shape[1], C)))
    Z -= Z.mean(axis=0)
    return (Z / Z.std() + 0.5 * rng.standard_normal(Z.shape)).argmax(axis=1)


def main() -> None:
    degrees = [int(a) for a in sys.argv[1:] if not a.startswith("-")]
    degrees = degrees or ([4, 60, 600] if QUICK else [4, 14, 60, 200, 600, 2000])
    results = Results("sparsify", again=lambda row: row["wanted"] in degrees)
    for degree in degrees:
        for d in (32, 256) if QUICK else (32, 256, 1024, 4096):
            if d == 4096 and degree not in (4, 60, 2000):
                continue  # these take the longest
            n = max(2000 if QUICK else 4000, 5 * d // 2)  # half of them train: more than d
            graph = random_power_law(n, int(n * degree / 2 * 1.3))
            rng = np.random.default_rng(d)
            X = abs(rng.standard_normal((n, d), dtype=np.float32))
            y, train = planted_labels(graph, X, rng), np.arange(0, n, 2)
            for lam in (1.0, 20.0):
                models: dict[str, HERTA] = {}

                def fit(name: str, options: Any, lam: float = lam, X: Any = X, models: Any = models,
                        graph: Any = graph, y: Any = y, train: Any = train) -> None:  # fmt: skip
                    models[name] = HERTA(lam=lam, tol=1e-6, **options).fit(graph, X, y, train)

                options = choices(n, graph.num_edges, d, lam)
                laps = 9 if d < 4096 else 1
                runners = {k: (lambda k=k, o=o: fit(k, o)) for k, o in options.items()}
                timed = race(runners, laps, 10)
                cost = {k: row["seconds"] for k, row in timed.items()}
                plan = models["auto"].plan_
                picked = plan.strategy if plan.n_samples is None else "herta, degree scores"
                # auto's fit is that of another row: timing it twice would only measure noise.
                best = min((k for k in cost if k != "auto"), key=lambda k: cost[k])
                for name, row in timed.items():
                    results.add(
                        wanted=degree, degree=2 * graph.num_edges / n, d=d, lam=lam, choice=name,
                        **row,
                        best=best, regret=cost[picked] / cost[best] - 1,
                        picked=models[name].plan_.strategy, status=models[name].status_,
                        steps=len(models[name].history_) - 1,
                    )  # fmt: skip


if __name__ == "__main__":
    main()
