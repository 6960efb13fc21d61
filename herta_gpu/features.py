"""The feature matrix X: dense or sparse, in memory or on disk, in the graph's row order.

The algorithm needs three things of X: a block of its columns, X W, and X^T V.  Products run in
float64 over chunks of rows, so that a float32 or float16 X, even a memory-mapped one, is never
copied whole and no digit is lost to the sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.backends.base import Array, Backend

_CHUNK_BYTES = 64 << 20  # of float64 copies of rows of X


class Features:
    """X (n x d) behind one interface, rows in the order of the graph's storage."""

    def __init__(self, X: Any, backend: Backend, order: Any = None) -> None:
        self.backend, self.shape = backend, X.shape
        self.sparse = sp.issparse(X)
        self._order = None
        if self.sparse:
            rows = sp.csr_array(X)
            self._rows = (rows if order is None else rows[order]).astype(np.float64)
            self._columns = self._rows.tocsc()
        else:
            self._dense, self._order = X, order

    def column_block(self, start: int, stop: int, dtype: str) -> Array:
        """X[:, start:stop] as a dense block."""
        if self.sparse:
            block = self._columns[:, start:stop].toarray()
        else:
            block = self._dense[:, start:stop]
            block = block if self._order is None else block[self._order]
        return self.backend.asarray(block, dtype)

    def times(self, W: Array) -> Array:
        """X W in float64 (n x c)."""
        W = self.backend.to_numpy(W)
        if self.sparse:
            return self.backend.asarray(self._rows @ W)
        out = np.empty((self.shape[0], W.shape[1]))
        for at in self._chunks():
            out[at] = self._chunk(at) @ W
        return self.backend.asarray(out)

    def transpose_times(self, V: Array) -> Array:
        """X^T V in float64 (d x c)."""
        V = np.asarray(self.backend.to_numpy(V), dtype=np.float64)
        if self.sparse:
            return self.backend.asarray(self._rows.T @ V)
        out = np.zeros((self.shape[1], V.shape[1]))
        for at in self._chunks():
            out += self._chunk(at).T @ V[at]
        return self.backend.asarray(out)

    def norm_bound(self) -> float:
        """A proven bound of ||X||_2: the smaller of ||X||_F and sqrt(||X||_1 ||X||_inf)."""
        squares, by_row, by_column = 0.0, 0.0, np.zeros(self.shape[1])
        if self.sparse:
            size = abs(self._rows)
            squares = float((self._rows.data**2).sum())
            by_row = float(np.max(size.sum(axis=1), initial=0.0))
            by_column = np.asarray(size.sum(axis=0)).ravel()
        else:
            for at in self._chunks():
                part = np.abs(self._chunk(at))
                squares += float((part**2).sum())
                by_row = max(by_row, float(part.sum(axis=1).max(initial=0.0)))
                by_column += part.sum(axis=0)
        mixed = np.sqrt(by_row * float(by_column.max(initial=0.0)))
        return float(min(np.sqrt(squares), mixed) * (1 + 1e-10))

    def _chunks(self) -> list[slice]:
        n, d = self.shape
        rows = max(1, _CHUNK_BYTES // (8 * max(d, 1)))
        return [slice(a, min(a + rows, n)) for a in range(0, n, rows)]

    def _chunk(self, at: slice) -> Any:
        rows = self._dense[at] if self._order is None else self._dense[self._order[at]]
        return np.asarray(rows, dtype=np.float64)


def has_hidden_columns(X: Any, rows: Any) -> bool:
    """Whether some column of X is zero on `rows` but not everywhere."""
    if sp.issparse(X):
        X = sp.csr_array(X)
        inside, everywhere = (np.unique(M.indices[M.data != 0]) for M in (X[rows], X))
        return inside.shape[0] < everywhere.shape[0]
    step = max(1, _CHUNK_BYTES // (8 * max(X.shape[1], 1)))
    train = np.zeros(X.shape[0], dtype=bool)
    train[rows] = True
    inside, everywhere = np.zeros((2, X.shape[1]), dtype=bool)
    for a in range(0, X.shape[0], step):
        filled = np.asarray(X[a : a + step]) != 0
        everywhere |= filled.any(axis=0)
        inside |= filled[train[a : a + step]].any(axis=0)
        if inside.all():
            return False
    return bool((everywhere & ~inside).any())
