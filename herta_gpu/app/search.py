"""What `herta tune` computes: rows of the features for every lam, and what a ridge makes of them.

All lam come from one sequence of products (`sweep`); what does not depend on the ridge, the
singular directions of the training rows, is done once per set of features.  A ridge is then a small
dense problem: for MSE in closed form, leave-one-out included, for cross entropy a fit that is
proven to be within _GAP of its optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.backends import get_backend
from herta_gpu.factors import RANK_CUT
from herta_gpu.graph import Graph
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.losses import LOSSES
from herta_gpu.more.leave_one_out import DualRows
from herta_gpu.more.sweep import all_rows
from herta_gpu.optimizers import minimise
from herta_gpu.planning.costs import BLOCK_WIDTH
from herta_gpu.plumbing.checks import memory_budget
from herta_gpu.problem import DenseProblem

SOLVE_TOL = 1e-5  # of the rows, relative to the columns of X
_GAP = 1e-3  # of cross entropy, relative


def rows_for_each(
    graph: Graph,
    X: Any,
    rows: Any,
    lams: Sequence[float],
    device: str = "auto",
    budget: int | str | None = None,
    tol: float = SOLVE_TOL,
) -> Any:
    """(lams, len(rows), d) float32: the rows of H_lam^-1 X; by len(rows) columns or by d.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.app.search import rows_for_each
    >>> from herta_gpu.datasets import load
    >>> data = load("digits")
    >>> rows_for_each(data.graph, data.X, np.arange(5), [1.0, 20.0]).shape
    (2, 5, 65)
    """
    backend = get_backend(device)
    H = RegularizedLaplacian(graph, 1.0, backend, "float32")
    (n, d), count, sparse = X.shape, rows.shape[0], sp.issparse(X)
    # 16 products wait on the rows that are added up, and each lam has its sum of them.
    allowed = memory_budget(budget, backend.memory_available()) // 4
    summed = (16 + 2 * len(lams)) * (count if count > d else n)
    width = int(min(BLOCK_WIDTH, max(1, allowed // (4 * (3 * n + summed)))))
    if count > d:
        return all_rows(H, lams, sp.csc_array(X) if sparse else X, tol, width, rows)
    X_T = sp.csr_array(X.T) if sparse else np.asarray(X, dtype="float32").T
    out = np.empty((len(lams), count, d), dtype=np.float32)
    for a in range(0, count, width):
        part = rows[a : a + width]
        unit = np.zeros((n, len(part)), dtype="float32")
        unit[part, np.arange(len(part))] = 1
        # H is symmetric: these columns of H^-1 are the rows that are wanted, before X.
        for i, Z in enumerate(all_rows(H, lams, unit, tol, width)):
            out[i, a : a + width] = (X_T @ Z).T
    return out


@dataclass
class Outcome:
    """What one loss, ridge and intercept make of one set of features."""

    train: Any  # outputs on the training nodes
    valid: Any  # ... and on the validation nodes
    W: Any  # p x c
    b: Any  # (c,)
    loo: Any = None  # outputs on the training nodes by models that left each of them out


class Directions:
    """Features in the coordinates w of W = V w, with V from the training rows A = U S V^T.

    Nothing is lost: with a ridge the best W lies in the span of V.  With an intercept, rows and
    targets are taken less their means over the training nodes.
    """

    def __init__(self, train: Any, valid: Any, Y: Any, intercept: bool) -> None:
        self.rows, self.Y, self.intercept = train, np.asarray(Y), intercept
        self.mean = train.mean(axis=0) if intercept else np.zeros(train.shape[1])
        self.Y_mean = self.Y.mean(axis=0) if intercept else np.zeros(self.Y.shape[1])
        A = train - self.mean
        self.few = A.shape[0] <= A.shape[1]
        squares, V = np.linalg.eigh(A @ A.T if self.few else A.T @ A)
        keep = squares > RANK_CUT * squares[-1]
        self.squares, V = squares[keep], V[:, keep]
        self.V = (A.T @ V) / np.sqrt(self.squares) if self.few else V
        self.train, self.valid = A @ self.V, (valid - self.mean) @ self.V
        self._w: dict[str, Any] = {}  # where the last ridge ended

    def fit(self, loss: str, ridge: float, loo: bool = False) -> Outcome:
        """The optimum for one ridge; those of a loss are best asked for from the largest down."""
        if loss == "mse":
            w = (self.train.T @ (self.Y - self.Y_mean)) / (self.squares + ridge)[:, None]
        else:  # each search starts where the one before it ended
            problem = DenseProblem(get_backend("cpu"), LOSSES[loss], self.train, self.Y, ridge)
            w = self._w[loss] = minimise(problem, _GAP, 300, self._w.get(loss)).u
        W, b = self.V @ w, self.Y_mean
        left = self.leave_one_out(ridge) if loo else None
        return Outcome(self.train @ w + b, self.valid @ w + b, W, b - self.mean @ W, left)

    def leave_one_out(self, ridge: float) -> Any:
        """n_train x c: row i is the output at node i of the least squares that left it out.

        e_i / (1 - h_i) is what the residual of node i becomes, h_i its leverage; of fewer rows than
        features, where 1 - h_i would lose its digits, `DualRows` has it without that difference.
        """
        if self.few:
            weights = np.ones(self.rows.shape[0])
            return self.Y - DualRows(self.rows, weights, ridge, self.intercept).missed(self.Y)[0]
        T, Y = self.train / (self.squares + ridge), self.Y - self.Y_mean
        h = (T * self.train).sum(axis=1) + self.intercept / self.train.shape[0]
        residual = Y - T @ (self.train.T @ Y)
        return self.Y - residual / np.maximum(1.0 - h, 1e-12)[:, None]
