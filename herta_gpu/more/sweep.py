"""Several lam at once: H_lam^-1 B for each of them, from one sequence of products with L.

With S_0 = B, S_1 = B - (2/Lmax) L B and S_{j+1} = 2 S_j - (4/Lmax) L S_j - S_{j-1}, which are
Chebyshev polynomials of L in turn added and subtracted, Lmax a bound of L's largest eigenvalue,

    H_lam^-1 B = K^-1/2 (S_0 + 2 sum_j q^j S_j),  K = 1 + lam Lmax,  q = (sqrt K - 1)/(sqrt K + 1),

and what is left out after S_k is at most q^(k+1) (1 + K^-1/2) ||b||, column by column.  The largest
lam takes the most products; the others take some of the same.  Each product costs two blocks of
n x k numbers and no right-hand side.  Only the rows `at` are summed up: TOGETHER products wait, so
that one small matrix product adds them to the sums of every lam.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from herta_gpu.backends.base import Array
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.planning.settings import TOGETHER
from herta_gpu.plumbing.progress import marked


class Series(NamedTuple):
    """The sum for one lam."""

    scale: float  # K^-1/2
    q: float
    degree: int  # the last S_j that counts

    @classmethod
    def of(cls, lam: float, top: float, tol: float) -> Series:
        """The shortest one whose error is at most tol; `top` is Lmax."""
        root = math.sqrt(1.0 + lam * top)
        q = (root - 1) / (root + 1)
        if q == 0:
            return cls(1.0, 0.0, 0)
        degree = math.ceil(math.log(tol / (1 + 1 / root)) / math.log(q) - 1e-9) - 1
        return cls(1 / root, q, max(0, degree))

    @property
    def truncation(self) -> float:
        """||H^-1 b - sum|| <= this ||b||, rounding apart."""
        return self.q ** (self.degree + 1) * (1 + self.scale) if self.q > 0 else 0.0

    def weight(self, j: int) -> float:
        """How much S_j counts."""
        if j > self.degree:
            return 0.0
        return self.scale * (1.0 if j == 0 else 2.0 * self.q**j)

    def rounding(self, H: RegularizedLaplacian, dtype: str, columns: int) -> float:
        """What rounding may add, relative to ||b||; a worst case.

        No S_j is larger than b.  A step adds up terms of at most 3 + 8/Lmax times that, each
        rounded as often as H has neighbours and a few times more; an error made at step m counts
        at most j - m + 1 times at step j, so that all of them make (j + 1) (j + 2)/2 of one.
        """
        top = H.laplacian(dtype).lambda_max
        terms = H.backend.roundings(H.most_neighbours, columns) + 8
        one = 0.5 * float(np.finfo(dtype).eps) * terms * (3 + (8 / top if top > 0 else 0.0))
        steps = sum(self.weight(j) * (j + 1) * (j + 2) / 2 for j in range(self.degree + 1))
        return one * steps


def chebyshev_basis(H: RegularizedLaplacian, B: Array, last: int) -> Iterator[Array]:
    """S_0, S_1, ..., S_last in turn; each is overwritten with the next but one.

    B is S_0 and is lost.  The lam of H does not matter.
    """
    backend, dtype = H.backend, str(B.dtype)
    L = H.laplacian(dtype)
    yield B
    if last == 0:
        return
    S, S_next, top = B, backend.zeros(B.shape, dtype), L.lambda_max
    # A step of Chebyshev with the right-hand side S itself and lam 1: S - (I + L) S is -L S.
    backend.chebyshev_step(L, 1.0, S, S_next, S, 0.0, 2.0 / top)
    for j in range(1, last + 1):
        S, S_next = S_next, S
        yield S
        if j < last:
            backend.chebyshev_step(L, 1.0, S, S_next, S, 1.0, 4.0 / top)


def inverse_rows(
    H: RegularizedLaplacian, lams: Sequence[float], B: Array, at: Array | None, tol: float
) -> Array:
    """(len(lams), rows, k): the rows `at` (None: all) of H_lam^-1 B for every lam, stored order.

    No column is further from the truth than tol times the norm of its column of B, rounding
    (`Series.rounding`) apart.  Columns do not see each other: the bits of one depend on nothing
    but itself and the width of the block.  B is lost.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu import Graph
    >>> from herta_gpu.backends import get_backend
    >>> from herta_gpu.more.sweep import inverse_rows
    >>> from herta_gpu.laplacian import RegularizedLaplacian
    >>> g = Graph.from_edges([[0, 1, 2], [1, 2, 3]])
    >>> H = RegularizedLaplacian(g, 1.0, get_backend("cpu"), "float64")
    >>> Z = inverse_rows(H, [0.0, 5.0], np.eye(4), None, 1e-10)
    >>> np.allclose((np.eye(4) + 5 * g.to_csr()) @ Z[1], np.eye(4)), bool((Z[0] == np.eye(4)).all())
    (True, True)
    """
    xp, dtype = H.backend.xp, str(B.dtype)
    series = [Series.of(lam, H.laplacian(dtype).lambda_max, tol) for lam in lams]
    rows, k = (B.shape[0] if at is None else at.shape[0]), B.shape[1]
    sums = xp.zeros((len(series), rows * k), dtype=dtype)
    last = max((s.degree for s in series), default=0)
    waiting = H.backend.empty((min(TOGETHER, last + 1), rows, k), dtype)
    with marked("several lam", columns=k, products=last):
        for j, S in enumerate(chebyshev_basis(H, B, last)):
            place = j % TOGETHER
            waiting[place] = S if at is None else S[at]
            if place + 1 < TOGETHER and j < last:
                continue
            first = j - place
            live = [i for i, s in enumerate(series) if s.degree >= first]
            weights = [[series[i].weight(t) for t in range(first, j + 1)] for i in live]
            added = xp.asarray(weights, dtype=dtype) @ waiting[: place + 1].reshape(place + 1, -1)
            for i, one in zip(live, added):
                sums[i] += one
    return sums.reshape(len(series), rows, k)


def all_rows(
    H: RegularizedLaplacian, lams: Sequence[float], B: Any, tol: float, width: int, rows: Any = None
) -> Any:
    """The same of the nodes `rows` (None: all) for a B of the host, dense or sparse.

    (len(lams), len(rows), k) in the caller's order, by `width` columns of B at a time.
    """
    order, inverse = H.graph.order, H.graph.inverse_order()
    at = None if rows is None else H.backend.asarray(H.graph.stored(rows))
    out = np.empty((len(lams), H.n if rows is None else len(rows), B.shape[1]), dtype=H.dtype)
    for a in range(0, B.shape[1], width):
        J = slice(a, min(a + width, B.shape[1]))
        block = B[:, J].toarray() if sp.issparse(B) else B[:, J]
        block = np.array(block if order is None else block[order], dtype=H.dtype, order="C")
        Z = H.backend.to_numpy(inverse_rows(H, lams, H.backend.asarray(block), at, tol))
        out[:, :, J] = Z if inverse is None or at is not None else Z[:, inverse]
    return out
