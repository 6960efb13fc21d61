"""Compiled products of a tall dense matrix with few columns: A W and A^T E, A read once.

BLAS packs A for such a product, which costs more than the product itself.  Four rows of A are
worked on together, so that W, or the sums, are read from the cache a quarter as often.  A chunk is
computed whole, by one thread, in one order: results do not depend on how many threads there are.
"""

import numpy as np

from herta_gpu.backends.cpu.kernels.simd import (
    VECTOR_BYTES,
    chunks,
    fma,
    inline,
    kernel,
    lanes,
    load,
    splat,
    store,
    vector,
)

NARROW = 10  # columns up to which these beat BLAS ...
LEAST = 1 << 18  # ... for an A of so many numbers or more
CHUNKS = 64  # that A is cut into, at most; each leaves its own sums of A^T E


@inline
def _sum(total, sums):  # type: ignore[no-untyped-def]
    store(sums, 0, None, total)
    return sums.sum()


@inline
def _add_four(A, at, d, Wt, of, n, zero, sums):  # type: ignore[no-untyped-def]
    """The sums of four rows of A, with n more products each."""
    w, (s, t, u, v) = load(Wt, of, n, zero), sums
    s, t = fma(load(A, at, n, zero), w, s), fma(load(A, at + d, n, zero), w, t)
    u, v = fma(load(A, at + 2 * d, n, zero), w, u), fma(load(A, at + 3 * d, n, zero), w, v)
    return s, t, u, v


@kernel
def times(A, Wt, F, rows, counter):  # type: ignore[no-untyped-def]
    """F = A W, from Wt = W^T; `rows` of A in a chunk, four at least in A.

    The last four of a chunk may reach back to rows that are done: they come out the same.
    """
    (n, d), c = A.shape, Wt.shape[0]
    zero = vector(A, VECTOR_BYTES, 1)
    size = lanes(zero)
    sums, tail = np.empty(size, A.dtype), d // size * size
    for chunk in chunks(counter, -(-n // rows)):
        last = min(n, (chunk + 1) * rows)
        for start in range(chunk * rows, last, 4):
            i = max(0, min(start, last - 4))
            for k in range(c):
                four = (zero, zero, zero, zero)
                for j in range(0, tail, size):
                    four = _add_four(A, i * d + j, d, Wt, k * d + j, None, zero, four)
                if tail < d:
                    four = _add_four(A, i * d + tail, d, Wt, k * d + tail, d - tail, zero, four)
                s, t, u, v = four
                F[i, k], F[i + 1, k] = _sum(s, sums), _sum(t, sums)
                F[i + 2, k], F[i + 3, k] = _sum(u, sums), _sum(v, sums)


@inline
def _add_rows(A, at, E, i, k, taken, G, into, n):  # type: ignore[no-untyped-def]
    """G.flat[into:] += the sum of E[i', k] times row i' of A, over `taken` rows from i on."""
    d, zero = A.shape[1], vector(A, VECTOR_BYTES, 1)
    total = load(G, into, n, zero)
    for r in range(taken):
        total = fma(load(A, at + r * d, n, zero), splat(E[i + r, k], zero), total)
    store(G, into, n, total)


@inline
def _add_block(A, E, i, taken, G):  # type: ignore[no-untyped-def]
    """G += (A^T E)^T over `taken` rows from i on; `taken` is a constant."""
    d, c, size = A.shape[1], E.shape[1], lanes(vector(A, VECTOR_BYTES, 1))
    for k in range(c):
        for j in range(0, d - size + 1, size):
            _add_rows(A, i * d + j, E, i, k, taken, G, k * d + j, None)
        j = d // size * size
        if j < d:
            _add_rows(A, i * d + j, E, i, k, taken, G, k * d + j, d - j)


@kernel
def transposed_times(A, E, sums, rows, counter):  # type: ignore[no-untyped-def]
    """sums[chunk] = (A^T E)^T over the chunk's rows; `sums` comes as zeros, (chunks, c, d)."""
    n = A.shape[0]
    for chunk in chunks(counter, -(-n // rows)):
        i, last = chunk * rows, min(n, (chunk + 1) * rows)
        while i + 4 <= last:
            _add_block(A, E, i, 4, sums[chunk])
            i += 4
        while i < last:
            _add_block(A, E, i, 1, sums[chunk])
            i += 1
