"""Does a fit reach the true optimum, and does its certificate hold?

For each data set the optimum is computed without the package: by a sparse LU and by an SVD in
float64, of which singular values above 1e-6 of the largest are kept.  It is compared with the
objective that HERTA reached and with the gap that HERTA certified.

    HERTA_DATA=folder python bench/optimum.py      # JSON lines, then a Markdown table
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as sla

from herta_gpu import HERTA, Graph, datasets


def load(name: str) -> tuple[Graph, sp.csr_array, np.ndarray, np.ndarray]:
    """Graph, row-normalised features in float64, labels and 80% random training rows."""
    data = datasets.load(name)
    data = replace(data, X=data.X.astype(np.float64)).normalized("row")
    n = data.graph.num_nodes
    train = np.sort(np.random.default_rng(0).permutation(n)[: int(0.8 * n)])
    # The 15 nodes of CiteSeer without a label count as class 0, as in all results here.
    return data.graph, data.X, np.maximum(data.y, 0), train


def optimum(
    graph: Graph, X: sp.csr_array, Y: np.ndarray, train: np.ndarray, lam: float
) -> tuple[np.ndarray, float]:
    """(M H^-1 X, optimum of the least squares problem), without the solvers of the package."""
    H = sp.csc_array(sp.eye_array(graph.num_nodes) + lam * graph.to_csr())
    symmetric = {"SymmetricMode": True}
    lu = sla.splu(H, "MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=symmetric)
    dense = X.toarray()
    Q = lu.solve(dense)
    Q += lu.solve(dense - H @ Q)
    A = Q[train]
    U, s, _ = np.linalg.svd(A, full_matrices=False)
    U = U[:, s > 1e-6 * s[0]]
    return A, 0.5 * float(((Y - U @ (U.T @ Y)) ** 2).sum())


def main() -> None:
    if not os.environ.get("HERTA_DATA"):
        sys.exit("Set HERTA_DATA to the folder that holds cora.npz, citeseer.npz and pubmed.npz.")
    rows = []
    for name in ("cora", "citeseer", "pubmed"):
        graph, X, y, train = load(name)
        Y = np.eye(y.max() + 1)[y[train]]
        for lam in (1.0, 20.0):
            A, best = optimum(graph, X, Y, train, lam)
            for optimizer in ("cg", "gd"):
                model = HERTA(lam=lam, optimizer=optimizer, strategy="herta")
                model.fit(graph, X, y, train=train)
                reached = 0.5 * float(((A @ model.W_ - Y) ** 2).sum())
                rows.append(
                    {
                        "data": name,
                        "lam": lam,
                        "optimizer": optimizer,
                        "steps": len(model.history_) - 1,
                        "status": model.status_,
                        "certificate": model.certificate_.value,
                        "kind": model.certificate_.kind,
                        "true_gap": reached / best - 1,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    print("\n| data | λ | optimizer | outer steps | certified gap | true gap | kind |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        claim = f"{r['certificate']:.1e}" if r["kind"] != "none" else f"none ({r['status']})"
        print(
            f"| {r['data']} | {r['lam']:g} | {r['optimizer']} | {r['steps']} | {claim} "
            f"| {r['true_gap']:.1e} | {r['kind']} |"
        )


if __name__ == "__main__":
    main()
