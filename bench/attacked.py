"""How many nodes are right when an attacker has added edges, and what weights of edges give back?

    HERTA_DATA=... python bench/attacked.py

Mettack's graphs; lam and ridge are chosen on the validation nodes, anew for every row.  Rows of X
have length 1.  "similarity": edges count min(1, 5 Jaccard); "attention": PseudoHuber, four rounds.
"""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import scipy.sparse as sp

from herta_gpu import HERTA, Attention, similarity
from herta_gpu.datasets import load

LAMS, RIDGES = (1.0, 3.0, 10.0, 30.0), (0.1, 0.3, 1.0, 3.0)


def main() -> None:
    warnings.simplefilter("ignore")  # rounds that end before an equilibrium
    print("| data | edges added | HERTA | similarity | attention | both |")
    print("|---|---|---|---|---|---|")
    for name, share in product(("cora", "citeseer"), ("00", "10", "20")):
        data = load(f"{name}-mettack-{share}")
        X = sp.csr_array(data.X, dtype=np.float64)
        X = sp.csr_array(sp.diags_array(1 / sp.linalg.norm(X, axis=1)) @ X)
        weighted = data.graph.reweighted(np.minimum(1, 5 * similarity(data.graph, X)))
        cells = []
        for attention, graph in product((False, True), (data.graph, weighted)):
            found = []
            for lam, ridge in product(LAMS, RIDGES):
                model = HERTA(lam=lam, ridge=ridge, fit_intercept=True)
                model = Attention(model) if attention else model
                model.fit(graph, X, data.y, data.split["train"])
                parts = (data.split["valid"], data.split["test"])
                found.append([model.score(graph, X, data.y, part) for part in parts])
            cells.append(f"{100 * max(found, key=lambda pair: pair[0])[1]:.1f}")
        print(f"| {name} | {int(share)}% | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
