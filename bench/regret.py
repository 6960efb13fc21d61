"""Does strategy="auto" pick the faster of "direct" and "herta" on real data?

    HERTA_DATA=... python bench/regret.py [dataset ...]

Every dataset with features, lam 1 and 20, tol 1e-6; 80% of the nodes train (ogbn-arxiv: its own
split).  The regret is the time of the strategy that auto picks over that of the better one, less
one: where both are the same fit, timing it twice would only measure noise.
"""

from __future__ import annotations

import sys
from typing import Any

from common import Data, Results, race

from herta_gpu import HERTA

NAMES = ("cora", "citeseer", "pubmed", "amazon-photo", "amazon-computers", "ogbn-arxiv",
         "coauthor-physics")  # fmt: skip
STRATEGIES = ("direct", "herta")
LARGE = 10**12  # multiply-adds of a Gram matrix from which a fit takes minutes: one will do


def main() -> None:
    names = [a for a in sys.argv[1:] if not a.startswith("-")] or NAMES
    results = Results("regret", again=lambda row: row["data"] in names)
    for name in names:
        data = Data(name)
        for lam in (1.0, 20.0):
            plan = HERTA(lam=lam).plan(
                data.graph.num_nodes, data.graph.num_edges, data.X.shape[1],
                data.one_hot.shape[1], len(data.train), getattr(data.X, "nnz", None),
            )  # fmt: skip
            models: dict[str, Any] = {}

            def fit(
                strategy: str, lam: float = lam, data: Data = data, models: Any = models
            ) -> None:
                models[strategy] = HERTA(lam=lam, strategy=strategy).fit(
                    data.graph, data.X, data.y, data.train
                )

            laps = 5 if len(data.train) * data.X.shape[1] ** 2 < LARGE else 1
            timed = race({s: (lambda s=s: fit(s)) for s in STRATEGIES}, laps, 20)
            best = min(STRATEGIES, key=lambda s: timed[s]["seconds"])
            for strategy, row in timed.items():
                model = models[strategy]
                results.add(
                    data=name, lam=lam, strategy=strategy, **row, status=model.status_,
                    certificate=model.certificate_.value, steps=len(model.history_) - 1,
                    picked=plan.strategy, best=best,
                    regret=timed[plan.strategy]["seconds"] / timed[best]["seconds"] - 1,
                )  # fmt: skip


if __name__ == "__main__":
    main()
