"""A symmetric, diagonally dominant matrix M as the I + L of a graph, up to a diagonal.

With C = diag(M) - |M off the diagonal| and a v > 0 such that C v > 0, the diagonal of V M V is
s = v * (C v) more than that of a Laplacian: M = T^-1 (I + L) T^-1 with T = sqrt(v / (C v)) and
L = S^-1/2 (Laplacian) S^-1/2.  So the M-norm is that of I + L, the bounds of a solve carry over,
and 1 + lambda_max(L) is a proven condition number.  Rows that are strictly dominant take v = 1;
otherwise v comes from a few steps of CG, and what is proven is that C v > 0.

Positive entries off the diagonal make two copies of every node, of opposite sign (Gremban).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as sla

_STEPS = 5000  # of CG, for a v
_UNIT = 0.5 * float(np.finfo(np.float64).eps)


class Dominant(NamedTuple):
    """What a solver needs of M."""

    n: int
    arrays: tuple[Any, Any, Any, Any]  # indptr, indices, weights and degrees of a graph
    scale: Any  # (n,) T
    copies: int  # of each node: 2 where M has positive entries off its diagonal
    often: float  # how often an entry was rounded on its way

    def spread(self, B: Any, guess: bool = False) -> Any:
        """B (n, k) as a right-hand side for the graph, or as a `guess` of what comes out."""
        B = B / self.scale[:, None] if guess else B * self.scale[:, None]
        return B if self.copies == 1 else np.concatenate([B, -B])

    def gathered(self, Z: Any) -> Any:
        """The solution for M from that for the graph."""
        n = self.n
        return self.scale[:, None] * (Z if self.copies == 1 else 0.5 * (Z[:n] - Z[n:]))

    def bound(self, bound: Any, kappa: float) -> Any:
        """That of the relative M-norm error, from that of the graph's I + L.

        The entries were rounded so often, relative to |M|, which is at most 2 kappa times what is
        left on the diagonal; so were B and Z, by which the norm moves by sqrt(kappa) at most.
        """
        lost = 2 * (self.often + 8) * _UNIT * kappa
        return (bound + 2 * lost) * (1 + 4 * lost) if lost < 0.1 else np.full(bound.shape, np.inf)


def dominant(M: Any) -> Dominant:
    """The parts of a SciPy matrix, or a sentence that says why it has none."""
    M = sp.csr_array(M, dtype=np.float64)
    n = M.shape[0]
    if M.shape != (n, n) or n == 0 or not np.isfinite(M.data).all():
        raise ValueError("The matrix must be square, not empty, and finite.")
    if (abs(M - M.T) - 16 * _UNIT * (abs(M) + abs(M.T))).max() > 0:
        raise ValueError("The matrix must be symmetric, at least up to rounding.")
    M = sp.csr_array(0.5 * (M + M.T))
    diagonal = M.diagonal()
    off = sp.csr_array(M - sp.diags_array(diagonal))
    off.eliminate_zeros()
    C = sp.csr_array(sp.diags_array(diagonal) - abs(off))
    often = float(np.diff(off.indptr).max(initial=0)) + 20  # symmetric up to 16 of it
    v, least = np.ones(n), 8 * often * _UNIT * diagonal
    if (diagonal > 0).all() and not (C @ v > least).all():
        with np.errstate(all="ignore"):
            inverse = sp.diags_array(1 / diagonal)
            v = sla.cg(C, v, rtol=0.3 / n**0.5, atol=0.0, maxiter=_STEPS, M=inverse)[0]
    left = C @ v
    if not ((v > 0).all() and (left > least * v).all() and np.isfinite(left).all()):
        raise ValueError(
            "The matrix is not diagonally dominant, not even after a scaling of its rows and "
            "columns, or too close to a singular one: SDDSolver needs M_ii >= sum |M_ij|, and more "
            "than that in a row of each part."
        )
    weights = sp.csr_array(sp.diags_array(v) @ off @ sp.diags_array(v))
    double = bool((weights.data > 0).any())
    if double:
        same, other = -weights.minimum(0), weights.maximum(0)
        A = sp.csr_array(sp.block_array([[same, other], [other, same]]))
    else:
        A = -weights
    A.eliminate_zeros()
    A.sort_indices()
    indices = A.indices.astype(np.int32 if A.shape[0] < 2**31 else np.int64)
    degree = np.tile(v * left, 2 if double else 1)
    return Dominant(
        n, (A.indptr.astype(np.int64), indices, A.data, degree), np.sqrt(v / left),
        1 + double, often,
    )  # fmt: skip
