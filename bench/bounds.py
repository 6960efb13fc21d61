"""How many products with H does a proof take, against the sharpest bound there is?

    python bench/bounds.py [--quick]

Block models with 2% of their nodes for training, MSE to a certified 1e-6 from Q alone.  "Ours" are
the products that a fit spends on each column, residuals included.  The sharpest bound that needs no
more than Q knows ||H^-1 X C|| (C C^T = P^-1) by dense algebra and multiplies it with the error of
the polynomial: that many steps it would take, and one residual.  With D = H^-1 X - Q itself, which
nobody knows, it would be fewer still.  The goal: ours are at most 1.6 times those of that bound.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from common import QUICK, Results

from herta_gpu import HERTA, diffusion
from herta_gpu.datasets import load
from herta_gpu.laplacian import chebyshev, chebyshev_error
from herta_gpu.solver import SDDSolver

N, SHARE, TOL = 4_000 if QUICK else 20_000, 0.02, 1e-6
LAMS, WIDTHS = (0.1, 1.0, 5.0, 20.0, 50.0), (32, 128) if not QUICK else (8, 32)


def ours(lam: float, data: Any, train: Any) -> dict[str, Any]:
    """Products that a fit spends on each column of Q, on average, and what it proves."""
    passes, usual = [], diffusion.chebyshev

    def counted(H: Any, B: Any, degree: int, *rest: Any) -> Any:
        passes.append((degree, B.shape[1]))  # degree - 1 products, and one for the residual
        return usual(H, B, degree, *rest)

    diffusion.chebyshev = counted
    try:
        model = HERTA(lam=lam, tol=TOL, strategy="direct").fit(data.graph, data.X, data.y, train)
    finally:
        diffusion.chebyshev = usual
    return {
        "status": model.status_, "certificate": model.certificate_.value,
        "products": sum(degree * columns for degree, columns in passes) / data.X.shape[1],
        "degrees": sorted({degree for degree, _ in passes}, reverse=True),
        "changes": [change.choice for change in model.changes_],
        "whitened": model.plan_.recipe.whiten,
    }  # fmt: skip


def sharpest(lam: float, data: Any, train: Any) -> dict[str, int]:
    """Steps of Chebyshev with which Theorem 1 holds, for the sharpest rho and for the true one."""
    solver = SDDSolver(data.graph, lam, tol=1e-12, dtype="float64", device="cpu")
    X = np.asarray(data.X, dtype=np.float64)
    Z = np.hstack([solver.solve(X[:, j : j + 32]) for j in range(0, X.shape[1], 32)])
    A, Y = Z[train], np.eye(int(data.y.max()) + 1)[data.y[train]]
    C = np.linalg.inv(np.linalg.cholesky(A.T @ A)).T
    W = C @ (C.T @ (A.T @ Y))
    E, size = np.linalg.norm(A @ W - Y), np.linalg.norm(C.T @ (A.T @ (A @ W)))
    theta = float(np.linalg.norm(Z @ C, 2))

    def enough(rho: float) -> bool:
        gap = (rho * (E + (1 + rho) * size)) ** 2 / (2 * (1 - rho) ** 2) if rho < 1 else math.inf
        below = 0.5 * max(0.0, E - rho * size) ** 2 - gap
        return below > 0 and gap <= TOL * below

    H, found = solver.H, {}
    k = 1
    while len(found) < 2:
        if "true" not in found:
            off = A - chebyshev(H, X, k)[train]
            if enough(float(np.linalg.norm(off @ C, 2))):
                found["true"] = k
        if enough(chebyshev_error(H, k) * theta):
            found["bound"] = k
            found.setdefault("true", k)
        k += 1
    return found


def main() -> None:
    results = Results("bounds")
    for d in WIDTHS:
        data = load(f"synthetic:n={N},m={10 * N},d={d},c=10", random_state=0)
        train = np.sort(np.random.default_rng(0).choice(N, int(SHARE * N), replace=False))
        for lam in LAMS:
            row = {**ours(lam, data, train), **sharpest(lam, data, train)}
            ratio = row["products"] / row["bound"]
            results.add(n=N, d=d, lam=lam, ratio=ratio, **row)


if __name__ == "__main__":
    main()
