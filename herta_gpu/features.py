"""The feature matrix X: dense or sparse, in memory or on disk, in the graph's row order.

The algorithm needs three things of X: a block of its columns, X W, and X^T V.  Products run in
float64 over chunks of rows, so that a float32 or float16 X, even a memory-mapped one, is never
copied whole and no digit is lost to the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.backends.base import Array, Backend, Blocks, Part
from herta_gpu.interop import on_device, take_rows

_CHUNK_BYTES = 16 << 20  # of float64 copies of rows of X at most, and a small part of the budget


class Features:
    """X (n x d) behind one interface, rows in the order of the graph's storage.

    On a GPU a sparse X, or a dense one that fits, is uploaded once; a larger one stays on the host
    and streams through the device in parts, for every product again.
    """

    def __init__(self, X: Any, backend: Backend, order: Any = None, budget: int = 0) -> None:
        self.backend, self.shape = backend, X.shape
        self._chunk_bytes = chunk_bytes(budget)
        self.sparse = sp.issparse(X)
        if self.sparse:
            rows = sp.csr_array(X)
            rows = (rows if order is None else rows[order]).astype(np.float64)
            # X^T by rows as well: no product with a transposed matrix, whose sums would need
            # atomics on a GPU, and a block of columns is a run of rows.
            self._rows, self._transposed = backend.csr(rows), backend.csr(rows.T.tocsr())
        elif on_device(X) or fits(X, backend, budget):
            self._dense = Blocks(backend.asarray(take_rows(X, order, backend)))
        else:
            self._dense = backend.host_blocks(X, order)

    def column_block(self, start: int, stop: int, dtype: str) -> Array:
        """X[:, start:stop] as a dense block."""
        if self.sparse:
            return self.backend.asarray(self._transposed[start:stop].toarray().T, dtype)
        block = self.backend.empty((self.shape[0], stop - start), dtype)
        for rows, part in self._dense.parts(self._parts(start, stop)):
            block[rows] = part
        return block

    def times(self, W: Array) -> Array:
        """X W in float64 (n x c)."""
        if self.sparse:
            return self.backend.asarray(self._rows @ W)
        out = self.backend.xp.empty((self.shape[0], W.shape[1]))
        for rows, part in self._chunks():
            out[rows] = self.backend.matmul(part, W)
        return out

    def transpose_times(self, V: Array) -> Array:
        """X^T V in float64 (d x c)."""
        V = V.astype("float64", copy=False)
        if self.sparse:
            return self.backend.asarray(self._transposed @ V)
        out = self.backend.xp.zeros((self.shape[1], V.shape[1]))
        for rows, part in self._chunks():
            out += self.backend.matmul(part.T, V[rows])
        return out

    def norm_bound(self) -> float:
        """A proven bound of ||X||_2: the smaller of ||X||_F and sqrt(||X||_1 ||X||_inf)."""
        xp, (n, d) = self.backend.xp, self.shape
        squares, by_row, by_column = xp.zeros(()), xp.zeros(()), xp.zeros(d)
        if self.sparse:
            squares = (self._rows.data**2).sum()
            by_row = (abs(self._rows) @ xp.ones((d, 1))).max()
            by_column = abs(self._transposed) @ xp.ones((n, 1))
        else:
            for _, part in self._chunks():
                part = abs(part)
                squares = squares + (part**2).sum()
                by_row = xp.maximum(by_row, part.sum(axis=1).max())
                by_column = by_column + part.sum(axis=0)
        mixed = xp.sqrt(by_row * by_column.max())
        return float(xp.minimum(xp.sqrt(squares), mixed)) * (1 + 1e-10)  # synchronize!

    def column_norms(self) -> Array:
        """(d,) Euclidean norms of the columns: their units."""
        xp, (n, d) = self.backend.xp, self.shape
        if self.sparse:
            squared = abs(self._transposed)
            squared.data *= squared.data
            return xp.sqrt(squared @ xp.ones((n, 1)))[:, 0]
        squares = xp.zeros(d)
        for _, part in self._chunks():
            squares = squares + (part**2).sum(axis=0)
        return xp.sqrt(squares)

    def _chunks(self) -> Iterator[tuple[slice, Array]]:
        """Rows of X in float64, made so on the device: fewer bytes to send."""
        wide = in_float64(self.backend.xp)
        for rows, part in self._dense.parts(self._parts(0, self.shape[1])):
            yield rows, wide(part)

    def _parts(self, start: int, stop: int) -> list[Part]:
        """X[:, start:stop] in runs of rows that are not too large as float64."""
        n, rows = self.shape[0], _rows_at_once(stop - start, self._chunk_bytes)
        return [(slice(a, min(a + rows, n)), slice(start, stop)) for a in range(0, n, rows)]


def in_float64(xp: Any) -> Callable[[Array], Array]:
    """A function that gives chunks in float64, each in the place of the one before.

    Fresh memory for every chunk would cost more than the conversion does.
    """
    buffer = xp.empty((0, 0))

    def converted(part: Array) -> Array:
        nonlocal buffer
        if part.dtype == buffer.dtype:
            return part
        if buffer.shape[0] < part.shape[0] or buffer.shape[1] != part.shape[1]:
            buffer = xp.empty(part.shape)
        out = buffer[: part.shape[0]]
        out[...] = part
        return out

    return converted


def _rows_at_once(columns: int, chunk_bytes: int) -> int:
    return max(1, chunk_bytes // (8 * max(columns, 1)))


def fits(X: Any, backend: Backend, budget: int) -> bool:
    """Whether a dense X of the host is uploaded to a GPU: if half the budget holds it."""
    return backend.xp is not np and X.nbytes <= budget // 2


def chunk_bytes(budget: int) -> int:
    """Bytes of a chunk of rows in float64; a budget of 0 stands for none."""
    return min(_CHUNK_BYTES, budget // 16) if budget else _CHUNK_BYTES


def bytes_held(X: Any, backend: Backend, budget: int) -> int:
    """What `Features` allocates for X: a sparse one twice, a dense one on a GPU, or two buffers
    that it streams through and a float64 copy of what is in one of them."""
    if sp.issparse(X):
        return 24 * X.nnz
    if on_device(X) or backend.xp is np:
        return 0  # it is there already
    if fits(X, backend, budget):
        return X.nbytes
    n, d = X.shape
    chunk = max(min(n, _rows_at_once(c, chunk_bytes(budget))) * c for c in (1, d))
    return (2 * X.itemsize + 8) * chunk


def has_hidden_columns(X: Any, rows: Any, backend: Backend) -> bool:
    """Whether some column of X is zero on `rows` but not everywhere."""
    if sp.issparse(X):
        X = sp.csr_array(X)
        seen = np.zeros((2, X.shape[1]), dtype=bool)
        for filled, M in zip(seen, (X[rows], X)):
            filled[M.indices if M.data.all() else M.indices[M.data != 0]] = True
        return bool(seen[0].sum() < seen[1].sum())
    step = _rows_at_once(X.shape[1], _CHUNK_BYTES)
    xp = backend.xp if on_device(X) else np
    train = xp.zeros(X.shape[0], dtype=bool)
    train[backend.asarray(rows) if on_device(X) else rows] = True
    inside, everywhere = (xp.zeros(X.shape[1], dtype=bool) for _ in range(2))
    for a in range(0, X.shape[0], step):
        filled = X[a : a + step] != 0
        everywhere |= filled.any(axis=0)
        inside |= filled[train[a : a + step]].any(axis=0)
        if bool(inside.all()):  # synchronize!
            return False
    return bool((everywhere & ~inside).any())  # synchronize!
