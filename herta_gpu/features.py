"""The feature matrix X: dense or sparse, in memory or on disk, in the graph's row order.

The algorithm needs three things of X: a block of its columns, X W, and X^T V.  Products run in
float64 over chunks of rows, so that a float32 or float16 X, even a memory-mapped one, is never
copied whole and no digit is lost to the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.backends.base import Array, Backend, Blocks, Part, norm, unit_roundoff
from herta_gpu.planning.memory import chunk_bytes
from herta_gpu.plumbing.interop import on_device, take_rows
from herta_gpu.plumbing.progress import marked
from herta_gpu.plumbing.reading import Reads

_SCHUR_STEPS = 4  # products with |X|^T |X|, each as cheap as one output
_UNIT = unit_roundoff()


class Features:
    """X (n x d) behind one interface, rows in the order of the graph's storage.

    On a GPU a sparse X, or a dense one that fits, is uploaded once; a larger one stays on the host
    and streams through the device in parts, for every product again.
    """

    def __init__(self, X: Any, backend: Backend, order: Any = None, budget: int = 0) -> None:
        self.backend, self.shape = backend, X.shape
        self.off = 0.0  # what a column may be off by, in the 2-norm: features as given are exact
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

    @property
    def reads(self) -> Reads | None:
        """Passes over a dense X so far, and what came from its file."""
        return None if self.sparse else self._dense.reads

    def column_block(self, start: int, stop: int, dtype: str, scale: Array | None = None) -> Array:
        """X[:, start:stop] as a dense block; a sparse X may have its columns scaled on the way."""
        if self.sparse:
            columns = self._transposed[start:stop]
            if scale is not None:
                columns.data *= scale[start:stop].repeat(columns.indptr[1:] - columns.indptr[:-1])
            return self.backend.asarray(columns.toarray().T, dtype)
        block = self.backend.empty((self.shape[0], stop - start), dtype)
        with marked("pass over X", columns=stop - start):
            for rows, part in self._dense.parts(self._parts(start, stop)):
                block[rows] = part
        return block

    def row_chunks(self, columns: slice | None = None) -> Iterator[tuple[slice, Array]]:
        """(rows, X[rows, columns]) in float64, dense, in turn; the next one overwrites a chunk."""
        n, d = self.shape
        J = slice(0, d) if columns is None else columns
        if not self.sparse:
            yield from self._chunks(J)
            return
        step = _rows_at_once(J.stop - J.start, self._chunk_bytes)
        block = None if columns is None else self.column_block(J.start, J.stop, "float64")
        for a in range(0, n, step):
            rows = slice(a, min(a + step, n))
            yield rows, self._rows[rows].toarray() if block is None else block[rows]

    def gram(self, C: Array | None = None) -> Array:
        """C^T X^T X C in float64; without C, X^T X, with which the norms of the columns come."""
        backend, r = self.backend, self.shape[1] if C is None else C.shape[1]
        G = backend.xp.zeros((r, r))
        for _, part in self.row_chunks():
            backend.add_gram(G, part if C is None else backend.matmul(part, C))
        G, at = backend.total(G), backend.xp.arange(r)
        if C is None and "column_norms" not in vars(self):
            self.column_norms = backend.xp.sqrt(G[at, at])  # no pass of their own
        return G

    def times(self, W: Array) -> Array:
        """X W in float64 (n x c)."""
        if self.sparse:
            with marked("pass over X", columns=self.shape[1]):
                return self.backend.asarray(self._rows @ W)
        out = self.backend.xp.empty((self.shape[0], W.shape[1]))
        for rows, part in self._chunks():
            out[rows] = self.backend.matmul(part, W)
        return out

    def transpose_times(self, V: Array) -> Array:
        """X^T V in float64 (d x c)."""
        V = V.astype("float64", copy=False)
        if self.sparse:
            with marked("pass over X", columns=self.shape[1]):
                return self.backend.total(self.backend.asarray(self._transposed @ V))
        out = self.backend.xp.zeros((self.shape[1], V.shape[1]))
        for rows, part in self._chunks():
            out += self.backend.matmul(part.T, V[rows])
        return self.backend.total(out)

    @cached_property
    def norm_bound(self) -> float:
        """A proven bound of ||X||_2: the smaller of ||X||_F and a Schur test of |X|.

        For every v > 0, ||X||^2 <= max of (|X|^T |X| v) / v.  With v = 1 that is at most
        ||X||_1 ||X||_inf; powers of |X|^T |X| make it sharp where no sign is lost, as in counts.
        """
        xp, (n, d) = self.backend.xp, self.shape
        squares, by_row, by_column = xp.zeros(()), xp.zeros(()), xp.zeros(d)
        total, largest = self.backend.total, self.backend.largest
        rounding = 1e-10 + 2 * (int(total(n)) + d) * _UNIT
        if self.sparse:
            squares, mixed = (self._rows.data**2).sum(), self._schur()
        else:
            for _, part in self._chunks():
                part = abs(part)
                squares = squares + (part**2).sum()
                by_row = xp.maximum(by_row, part.sum(axis=1).max())
                by_column = by_column + part.sum(axis=0)
            mixed = xp.sqrt(largest(by_row) * total(by_column).max())
        squares = total(squares)
        return float(xp.minimum(xp.sqrt(squares), mixed)) * (1 + rounding)  # synchronize!

    def _schur(self) -> Array:
        """A bound of the norm of a sparse |X|: the best of a few vectors v, each closer to where
        the bound is sharp."""
        xp, d = self.backend.xp, self.shape[1]
        rows, columns = self._rows, self._transposed
        if not self._nonnegative:
            rows, columns = abs(rows), abs(columns)
        v, best = xp.ones((d, 1)), xp.asarray(xp.inf)
        for _ in range(_SCHUR_STEPS):
            up = self.backend.total(columns @ (rows @ v))
            best = xp.minimum(best, (up / v).max())
            v = xp.maximum(up / xp.maximum(up.max(), 1e-300), 1e-3)  # an empty column stays > 0
        return xp.sqrt(best)

    @cached_property
    def column_norms(self) -> Array:
        """(d,) Euclidean norms of the columns: their units."""
        xp, (n, d) = self.backend.xp, self.shape
        if self.sparse:
            squared = abs(self._transposed)
            squared.data *= squared.data
            return xp.sqrt(self.backend.total(squared @ xp.ones((n, 1))))[:, 0]
        squares = xp.zeros(d)
        for _, part in self._chunks():
            squares = squares + (part**2).sum(axis=0)
        return xp.sqrt(self.backend.total(squares))

    def times_rounding(self, W: Array) -> float:
        """A bound of ||computed X W - X W||_F: a number is a sum over the entries of its row."""
        sizes = self.backend.xp.sqrt((W * W).sum(axis=1))
        if self.sparse:
            X = self._rows if self._nonnegative else abs(self._rows)
            terms = X.indptr[1:] - X.indptr[:-1] + 2
            here = norm(terms * (X @ sizes[:, None])[:, 0])
            return _UNIT * float(self.backend.total(here**2)) ** 0.5 * (1 + 1e-10)
        total = float((self.column_norms * sizes).sum())  # synchronize!
        return (self.shape[1] + 2) * _UNIT * total

    @cached_property
    def _nonnegative(self) -> bool:
        return bool((self._rows.data >= 0).all())  # synchronize!

    @property
    def sum_rounding(self) -> float:
        """What a sum over the rows, chunk by chunk, rounds: relative to the sizes of its terms."""
        n, parts = int(self.backend.largest(self.shape[0])), self.backend.ranks
        more = 2 if self.backend.whole else 2 + parts  # the sums of other processes
        if self.sparse:
            return (n + more) * _UNIT
        chunk = _rows_at_once(self.shape[1], self._chunk_bytes)
        return (min(n, chunk) + -(-n // chunk) + more) * _UNIT

    def transpose_rounding(self) -> Array:
        """(d,) bounds of the row norms of (computed X^T V - X^T V), for ||V||_F = 1."""
        return self.sum_rounding * self.column_norms

    def distinct_columns(self, at: Any) -> int:
        """How many different columns X has on the rows `at` (a mask of the host), zeros apart.

        Columns are compared by 64-bit sums of scrambled bits: two different ones are taken for
        equal with a probability of about 2^-64.
        """
        if self.sparse:
            hashes = self._sparse_hashes(at)
        else:
            hashes = np.zeros(self.shape[1], dtype=np.uint64)
            for rows, part in self._chunks():
                bits = _scrambled(self.backend.to_numpy(part) + 0.0)  # -0.0 is 0.0
                keys = _row_keys(rows.start, rows.stop, at, self.backend.first_row)
                hashes += (bits * keys[:, None]).sum(axis=0)
        hashes = self.backend.total(hashes)
        return int(np.unique(hashes[hashes != 0]).shape[0])

    def _sparse_hashes(self, at: Any) -> Any:
        columns, get = self._transposed, self.backend.to_numpy
        values, rows, indptr = (get(a) for a in (columns.data, columns.indices, columns.indptr))
        sums = np.zeros(values.shape[0] + 1, dtype=np.uint64)
        keys = _row_keys(0, self.shape[0], at, self.backend.first_row)
        np.cumsum(_scrambled(values + 0.0) * keys[rows], out=sums[1:])
        return sums[indptr[1:]] - sums[indptr[:-1]]

    def _chunks(self, columns: slice | None = None) -> Iterator[tuple[slice, Array]]:
        """Rows of X in float64, made so on the device: fewer bytes to send."""
        J = slice(0, self.shape[1]) if columns is None else columns
        wide = in_float64(self.backend.xp)
        with marked("pass over X", columns=J.stop - J.start):
            for rows, part in self._dense.parts(self._parts(J.start, J.stop)):
                yield rows, wide(part)

    def _parts(self, start: int, stop: int) -> list[Part]:
        """X[:, start:stop] in runs of rows that are not too large as float64."""
        n, d = self.shape
        wide = d if self._dense.whole_rows(stop - start) else stop - start
        rows = _rows_at_once(wide, self._chunk_bytes)
        return [(slice(a, min(a + rows, n)), slice(start, stop)) for a in range(0, n, rows)]


def mixed(bits: Any) -> Any:
    """A bijection of 64-bit numbers that keeps 0 and scatters everything else (splitmix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _scrambled(values: Any) -> Any:
    return mixed(np.ascontiguousarray(values, dtype=np.float64).view(np.uint64))


def _row_keys(start: int, stop: int, at: Any, first: int) -> Any:
    """One odd random number per row; 0 for the rows that do not count.

    Row 0 here is row `first` of all processes'.
    """
    rows = np.arange(first + start + 1, first + stop + 1, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    return np.where(at[start:stop], mixed(rows) | np.uint64(1), np.uint64(0))


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
        inside, everywhere = backend.largest(seen)
        return bool(inside.sum() < everywhere.sum())
    step = _rows_at_once(X.shape[1], chunk_bytes(0))
    xp = backend.xp if on_device(X) else np
    train = xp.zeros(X.shape[0], dtype=bool)
    train[backend.asarray(rows) if on_device(X) else rows] = True
    inside, everywhere = (xp.zeros(X.shape[1], dtype=bool) for _ in range(2))
    for a in range(0, X.shape[0], step):
        filled = X[a : a + step] != 0
        everywhere |= filled.any(axis=0)
        inside |= filled[train[a : a + step]].any(axis=0)
        if bool(inside.all()):  # synchronize!
            break
    inside, everywhere = backend.largest(inside), backend.largest(everywhere)
    return bool((everywhere & ~inside).any())  # synchronize!
