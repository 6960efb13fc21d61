"""Compiled products of a tall dense matrix with few columns: A W and A^T E, A read once.

BLAS packs A for such a product, which costs more than the product itself.  Four rows of A are
worked on together, so that W, or the sums, are read from the cache a quarter as often.  A chunk is
computed whole, by one thread, in one order: results do not depend on how many threads there are.
"""

import numpy as np

from herta_gpu.backends.cpu.kernels.simd import (
    count,
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
def _dot(A, at, Wt, of, d, sums):  # type: ignore[no-untyped-def]
    """sum_j A.flat[at + j] Wt.flat[of + j], by the lanes of a vector."""
    zero = vector(A)
    size, total = lanes(zero), zero
    for j in range(0, d - size + 1, size):
        total = fma(load(A, at + j, None, zero), load(Wt, of + j, None, zero), total)
    j = d // size * size
    if j < d:
        total = fma(load(A, at + j, d - j, zero), load(Wt, of + j, d - j, zero), total)
    store(sums, 0, None, total)
    return sums.sum()


@kernel
def times(A, Wt, F, rows, counter):  # type: ignore[no-untyped-def]
    """F = A W, from Wt = W^T; `rows` of A in a chunk."""
    (n, d), c = A.shape, Wt.shape[0]
    zero = vector(A)
    size = lanes(zero)
    sums = np.empty(size, A.dtype)
    chunk = count(counter, 0)
    while chunk * rows < n:
        last = min(n, (chunk + 1) * rows)
        i = chunk * rows
        while i + 4 <= last:
            for k in range(c):
                s, t, u, v = zero, zero, zero, zero
                for j in range(0, d - size + 1, size):
                    w, at = load(Wt, k * d + j, None, zero), i * d + j
                    s, t = (
                        fma(load(A, at, None, zero), w, s),
                        fma(load(A, at + d, None, zero), w, t),
                    )
                    u = fma(load(A, at + 2 * d, None, zero), w, u)
                    v = fma(load(A, at + 3 * d, None, zero), w, v)
                j = d // size * size
                if j < d:
                    w, at, rest = load(Wt, k * d + j, d - j, zero), i * d + j, d - j
                    s, t = (
                        fma(load(A, at, rest, zero), w, s),
                        fma(load(A, at + d, rest, zero), w, t),
                    )
                    u = fma(load(A, at + 2 * d, rest, zero), w, u)
                    v = fma(load(A, at + 3 * d, rest, zero), w, v)
                store(sums, 0, None, s)
                F[i, k] = sums.sum()
                store(sums, 0, None, t)
                F[i + 1, k] = sums.sum()
                store(sums, 0, None, u)
                F[i + 2, k] = sums.sum()
                store(sums, 0, None, v)
                F[i + 3, k] = sums.sum()
            i += 4
        while i < last:
            for k in range(c):
                F[i, k] = _dot(A, i * d, Wt, k * d, d, sums)
            i += 1
        chunk = count(counter, 0)


@inline
def _add_rows(A, at, E, i, k, taken, G, into, n):  # type: ignore[no-untyped-def]
    """G.flat[into:] += the sum of E[i', k] times row i' of A, over `taken` rows from i on."""
    d, zero = A.shape[1], vector(A)
    total = load(G, into, n, zero)
    for r in range(taken):
        total = fma(load(A, at + r * d, n, zero), splat(E[i + r, k], zero), total)
    store(G, into, n, total)


@inline
def _add_block(A, E, i, taken, G):  # type: ignore[no-untyped-def]
    """G += (A^T E)^T over `taken` rows from i on; `taken` is a constant."""
    d, c, size = A.shape[1], E.shape[1], lanes(vector(A))
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
    chunk = count(counter, 0)
    while chunk * rows < n:
        i, last = chunk * rows, min(n, (chunk + 1) * rows)
        while i + 4 <= last:
            _add_block(A, E, i, 4, sums[chunk])
            i += 4
        while i < last:
            _add_block(A, E, i, 1, sums[chunk])
            i += 1
        chunk = count(counter, 0)
