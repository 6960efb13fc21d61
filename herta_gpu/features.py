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

from herta_gpu.backends.base import Array, Backend, Blocks, norm, unit_roundoff
from herta_gpu.planning.costs import chunk_bytes
from herta_gpu.plumbing.building import distinct
from herta_gpu.plumbing.interop import is_sparse, on_device, take_rows
from herta_gpu.plumbing.progress import marked
from herta_gpu.plumbing.reading import Reads

_SCHUR_STEPS = 4  # products with |X|^T |X|, each as cheap as one output
_UNIT = unit_roundoff()
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Features:
    """X (n x d) behind one interface, rows in the order of the graph's storage.  On a GPU a sparse
    X, or a dense one that fits, is uploaded once; a larger one stays on the host and streams
    through the device in parts, for every product again."""

    _sums: tuple[Array, Array, Array] | None = None  # what `norm_bound` needs of all rows

    def __init__(self, X: Any, backend: Backend, order: Any = None, budget: int = 0) -> None:
        self.backend, self.shape = backend, X.shape
        self.off: Any = 0.0  # what columns may be off by, in the 2-norm: those given are exact
        self._chunk_bytes = chunk_bytes(budget)
        self.sparse = is_sparse(X)
        if self.sparse:
            rows = take_rows(X.tocsr(), order, backend).astype(np.float64)
            # X^T by rows as well: no product with a transposed matrix, whose sums would need
            # atomics on a GPU, and a block of columns is a run of rows.
            self._rows, self._transposed = backend.csr(rows), backend.csr(rows.T.tocsr())
        elif on_device(X) or fits(X, backend, budget):
            self._dense = Blocks(backend.asarray(take_rows(X, order, backend)))
        else:
            self._dense = backend.host_blocks(X, order)

    @property
    def streamed(self) -> bool:
        """Whether each pass over X comes from the host to a GPU."""
        dense = vars(self).get("_dense")
        return dense is not None and self.backend.xp is not np and not on_device(dense.X)

    @property
    def reads(self) -> Reads | None:
        """Passes over a dense X so far, and what came from its file."""
        return None if self.sparse else self._dense.reads

    def dense_block(self, J: slice, scale: Array | None = None) -> Array:
        """Columns J of a sparse X in float64, scaled on the way."""
        columns = self._transposed[J]
        if scale is not None:
            columns.data *= scale[J].repeat(columns.indptr[1:] - columns.indptr[:-1])
        return self.backend.asarray(columns.toarray().T, "float64")

    def row_chunks(self, columns: slice | None = None) -> Iterator[tuple[slice, Array]]:
        """(rows, X[rows, columns]) in float64, dense, in turn; the next one overwrites a chunk."""
        n, d = self.shape
        J = slice(0, d) if columns is None else columns
        # Columns that are cut out of whole rows on a device need room for those.
        whole = not self.sparse and self._dense.whole_rows(J.stop - J.start)
        step = _rows_at_once(d if whole else J.stop - J.start, self._chunk_bytes)
        chunks = [slice(a, min(a + step, n)) for a in range(0, n, step)]
        if self.sparse:
            block = None if columns is None else self.dense_block(J)
            for rows in chunks:
                yield rows, self._rows[rows].toarray() if block is None else block[rows]
            return
        wide = in_float64(self.backend.xp)  # on the device: fewer bytes to send
        with marked("pass over X", columns=J.stop - J.start):
            for rows, part in self._dense.parts([(rows, J) for rows in chunks]):
                yield rows, wide(part)

    def gram(self, C: Array | None = None) -> Array:
        """C^T X^T X C in float64; without C, X^T X, with which the norms of the columns come."""
        backend, r = self.backend, self.shape[1] if C is None else C.shape[1]
        G = backend.xp.zeros((r, r))
        sums = self._no_sums() if C is None and self.streamed else None
        for _, part in self.row_chunks():
            backend.add_gram(G, part if C is None else backend.matmul(part, C))
            sums = sums and self._added(sums, part)  # what `norm_bound` would go through X for
        self._sums = sums or self._sums
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
        for rows, part in self.row_chunks():
            out[rows] = self.backend.matmul(part, W)
        return out

    def transpose_times(self, V: Array) -> Array:
        """X^T V in float64 (d x c)."""
        V = V.astype("float64", copy=False)
        if self.sparse:
            with marked("pass over X", columns=self.shape[1]):
                return self.backend.total(self.backend.asarray(self._transposed @ V))
        out = self.backend.xp.zeros((self.shape[1], V.shape[1]))
        for rows, part in self.row_chunks():
            out += self.backend.matmul(part.T, V[rows])
        return self.backend.total(out)

    @cached_property
    def norm_bound(self) -> float:
        """A proven bound of ||X||_2: the smaller of ||X||_F and a Schur test of |X|.  For every v >
        0, ||X||^2 <= max of (|X|^T |X| v) / v.  With v = 1 that is at most ||X||_1 ||X||_inf;
        powers of |X|^T |X| make it sharp where no sign is lost, as in counts."""
        xp, (n, d), backend = self.backend.xp, self.shape, self.backend
        rounding = 1e-10 + 2 * (int(backend.total(n)) + d) * _UNIT
        if self.sparse:
            squares, best, v = (self._rows.data**2).sum(), xp.asarray(xp.inf), xp.ones((d, 1))
            rows, columns = self._rows, self._transposed
            if not self._nonnegative:
                rows, columns = abs(rows), abs(columns)
            for _ in range(_SCHUR_STEPS):
                up = backend.total(columns @ (rows @ v))
                best = xp.minimum(best, (up / v).max())
                v = xp.maximum(up / xp.maximum(up.max(), 1e-300), 1e-3)  # an empty column stays > 0
        else:
            sums = self._sums or self._no_sums()
            for _, part in () if self._sums else self.row_chunks():
                sums = self._added(sums, part)
            squares, by_row, by_column = sums
            best = backend.largest(by_row) * backend.total(by_column).max()
        least = xp.sqrt(xp.minimum(backend.total(squares), best))
        return float(least) * (1 + rounding)  # synchronize!

    def _no_sums(self) -> tuple[Array, Array, Array]:
        xp = self.backend.xp
        return xp.zeros(()), xp.zeros(()), xp.zeros(self.shape[1])

    def _added(self, sums: tuple[Array, Array, Array], part: Array) -> tuple[Array, Array, Array]:
        """||X||_F^2, the largest sum of a row and the sums of columns of |X|, with more rows."""
        (squares, by_row, by_column), part = sums, abs(part)
        by_row = self.backend.xp.maximum(by_row, part.sum(axis=1).max())
        return squares + (part**2).sum(), by_row, by_column + part.sum(axis=0)

    @cached_property
    def column_norms(self) -> Array:
        """(d,) Euclidean norms of the columns: their units."""
        xp, (n, d) = self.backend.xp, self.shape
        if self.sparse:
            squared = abs(self._transposed)
            squared.data *= squared.data
            return xp.sqrt(self.backend.total(squared @ xp.ones((n, 1))))[:, 0]
        squares, sums = xp.zeros(d), self._no_sums() if self.streamed else None
        for _, part in self.row_chunks():
            squares = squares + (part**2).sum(axis=0)
            sums = sums and self._added(sums, part)
        self._sums = sums or self._sums
        return xp.sqrt(self.backend.total(squares))

    def row_norms(self) -> Array:
        """(n, 1) Euclidean norms of the rows."""
        xp = self.backend.xp
        if self.sparse:
            squared = abs(self._rows)
            squared.data *= squared.data
            return xp.sqrt(squared @ xp.ones((self.shape[1], 1)))
        found = xp.zeros((self.shape[0], 1))
        for rows, part in self.row_chunks():
            found[rows] = xp.sqrt((part * part).sum(axis=1, keepdims=True))
        return found

    @cached_property
    def _nonnegative(self) -> bool:
        return bool((self._rows.data >= 0).all())  # synchronize!

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

    @property
    def relative_off(self) -> float:
        """What a column may be off by, relative to its norm."""
        if isinstance(self.off, float) and self.off == 0:
            return 0.0
        sizes = self.column_norms
        return float((self.off / self.backend.xp.where(sizes > 0, sizes, 1.0)).max())

    def outputs_error(self, W: Array) -> float:
        """How far an output X W may be off as X itself is."""
        return 0.0

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
        equal with a probability of about 2^-64."""

        def bits_of(values: Array) -> Any:
            values = np.ascontiguousarray(self.backend.to_numpy(values) + 0.0)  # -0.0 is 0.0
            return scramble(values.astype(np.float64, copy=False).view(np.uint64))

        def keys(J: slice) -> Any:
            """One odd random number per row, the same on any process; 0 for those not in `at`."""
            first = self.backend.first_row + 1
            rows = np.arange(first + J.start, first + J.stop, dtype=np.uint64)
            return np.where(at[J], scramble(rows * _GOLDEN) | np.uint64(1), np.uint64(0))

        if self.sparse:
            X, get = self._transposed, self.backend.to_numpy
            sums = np.zeros(X.data.shape[0] + 1, dtype=np.uint64)
            np.cumsum(bits_of(X.data) * keys(slice(0, self.shape[0]))[get(X.indices)], out=sums[1:])
            hashes = np.diff(sums[get(X.indptr)])
        else:
            hashes = np.zeros(self.shape[1], dtype=np.uint64)
            for J, part in self.row_chunks():
                hashes += (bits_of(part) * keys(J)[:, None]).sum(axis=0)
        hashes = self.backend.total(hashes)
        return int(distinct(np, np.sort(hashes[hashes != 0])).shape[0])


def scramble(bits: Any) -> Any:
    """A bijection of 64-bit numbers that keeps 0 and scatters everything else (splitmix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def in_float64(xp: Any) -> Callable[[Array], Array]:
    """A function that gives chunks in float64, each in the place of the one before.  Fresh memory
    for every chunk would cost more than the conversion does."""
    buffer = xp.empty((0, 0))

    def convert(part: Array) -> Array:
        nonlocal buffer
        if part.dtype == buffer.dtype:
            return part
        if buffer.shape[0] < part.shape[0] or buffer.shape[1] != part.shape[1]:
            buffer = xp.empty(part.shape)
        out = buffer[: part.shape[0]]
        out[...] = part
        return out

    return convert


def _rows_at_once(columns: int, chunk_bytes: int) -> int:
    return max(1, chunk_bytes // (8 * max(columns, 1)))


def fits(X: Any, backend: Backend, budget: int) -> bool:
    """Whether a dense X of the host is uploaded to a GPU: if half the budget holds it."""
    return backend.xp is not np and X.nbytes <= budget // 2


def bytes_held(X: Any, backend: Backend, budget: int) -> int:
    """What `Features` allocates for X: a sparse one twice, a dense one on a GPU, or two buffers
    that it streams through and a float64 copy of what is in one of them."""
    if is_sparse(X):
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
    xp, (n, d) = backend.xp if on_device(X) else np, X.shape
    inside, everywhere = (xp.zeros(d, dtype=bool) for _ in range(2))
    if is_sparse(X):
        for filled, M in ((inside, take_rows(X.tocsr(), rows, backend)), (everywhere, X)):
            filled[M.indices if M.data.all() else M.indices[M.data != 0]] = True
    else:
        step, train = _rows_at_once(d, chunk_bytes(0)), xp.zeros(n, dtype=bool)
        train[backend.asarray(rows) if on_device(X) else rows] = True
        for a in range(0, n, step):
            filled = X[a : a + step] != 0
            everywhere |= filled.any(axis=0)
            inside |= filled[train[a : a + step]].any(axis=0)
            if bool(inside.all()):  # synchronize!
                break
    inside, everywhere = backend.largest(inside), backend.largest(everywhere)
    return bool((everywhere & ~inside).any())  # synchronize!
