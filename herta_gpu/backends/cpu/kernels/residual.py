"""B - H Z in float64, whatever Z is stored in: `residual` of laplacian.cu.

Rows are cut into vectors as in `laplacian`, but a vector of Z is widened when it is read: its sum
then fills two registers where Z is float32.  With float64 there is no need for runs.
"""

from numba import float64

from herta_gpu.backends.cpu.kernels.laplacian import AHEAD, FAR, scale
from herta_gpu.backends.cpu.kernels.simd import (
    REGISTER_BYTES,
    VECTOR_BYTES,
    count,
    fma,
    inline,
    kernel,
    load_wide,
    load_wide_quarter,
    peek,
    prefetch,
    splat_wide,
    splat_wide_quarter,
    store,
)

TILE = 4 * REGISTER_BYTES // 64  # vectors of a row held in registers at once


@inline
def _wide_rows(vectors, Z, k, j, tail, L, lam, B, start, R, a, b):  # type: ignore[no-untyped-def]
    """Rows a..b of B - H Z, columns j.. of a tile of `vectors` vectors, in float64."""
    indptr, indices, weights, s, diagonal = L
    lanes = VECTOR_BYTES // Z.itemsize
    n0, n1 = tail if vectors < 2 else lanes, tail if vectors == 2 else lanes
    n2, end = tail if vectors == 3 else lanes, indptr[-1] - 1
    far = s.size * s.itemsize > FAR
    for i in range(a, b):
        t0 = splat_wide(0.0, Z)
        t1, t2, t3 = t0, t0, t0
        for e in range(peek(indptr, i), peek(indptr, i + 1)):
            v, ahead = peek(indices, e), peek(indices, min(e + AHEAD, end))
            f, at, soon = splat_wide(scale(s, weights, v, e), Z), v * k + j, ahead * k + j
            if far:
                prefetch(s, ahead)
            prefetch(Z, soon)
            prefetch(Z, soon + (vectors - 1) * lanes + tail - 1)
            t0 = fma(load_wide(Z, at, n0, Z), f, t0)
            if vectors > 1:
                prefetch(Z, soon + lanes)
                t1 = fma(load_wide(Z, at + lanes, n1, Z), f, t1)
            if vectors > 2:
                prefetch(Z, soon + 2 * lanes)
                t2 = fma(load_wide(Z, at + 2 * lanes, n2, Z), f, t2)
            if vectors > 3:
                prefetch(Z, soon + 3 * lanes)
                t3 = fma(load_wide(Z, at + 3 * lanes, tail, Z), f, t3)
        at, into = i * k + j, (i - start) * k + j
        h = splat_wide(-1.0 - lam * peek(diagonal, i), Z)
        c = splat_wide(lam * peek(s, i), Z)
        _subtract(Z, B, R, at, into, n0, t0, h, c)
        if vectors > 1:
            _subtract(Z, B, R, at + lanes, into + lanes, n1, t1, h, c)
        if vectors > 2:
            _subtract(Z, B, R, at + 2 * lanes, into + 2 * lanes, n2, t2, h, c)
        if vectors > 3:
            _subtract(Z, B, R, at + 3 * lanes, into + 3 * lanes, tail, t3, h, c)


@inline
def _narrow_wide_rows(vectors, Z, k, L, lam, B, start, R, a, b):  # type: ignore[no-untyped-def]
    """`_wide_rows` of a block of one or two quarter vectors."""
    indptr, indices, weights, s, diagonal = L
    lanes = VECTOR_BYTES // Z.itemsize // 4
    n0, n1 = min(k, lanes), k - lanes
    far, end = Z.size * Z.itemsize > FAR, indptr[-1] - 1
    for i in range(a, b):
        t0 = splat_wide_quarter(0.0, Z)
        t1 = t0
        for e in range(peek(indptr, i), peek(indptr, i + 1)):
            v = peek(indices, e)
            if far:
                ahead = peek(indices, min(e + AHEAD, end))
                prefetch(Z, ahead * k)
                prefetch(s, ahead)
            f = splat_wide_quarter(scale(s, weights, v, e), Z)
            t0 = fma(load_wide_quarter(Z, v * k, n0, Z), f, t0)
            if vectors > 1:
                t1 = fma(load_wide_quarter(Z, v * k + lanes, n1, Z), f, t1)
        at, into = i * k, (i - start) * k
        h = splat_wide_quarter(-1.0 - lam * peek(diagonal, i), Z)
        c = splat_wide_quarter(lam * peek(s, i), Z)
        z, r = load_wide_quarter(Z, at, n0, Z), load_wide_quarter(B, into, n0, Z)
        store(R, into, n0, fma(t0, c, fma(z, h, r)))
        if vectors > 1:
            at, into = at + lanes, into + lanes
            z, r = load_wide_quarter(Z, at, n1, Z), load_wide_quarter(B, into, n1, Z)
            store(R, into, n1, fma(t1, c, fma(z, h, r)))


@inline
def _subtract(Z, B, R, at, into, n, total, h, c):  # type: ignore[no-untyped-def]
    """One vector of row i of B - H Z."""
    z, b = load_wide(Z, at, n, Z), load_wide(B, into, n, Z)
    store(R, into, n, fma(total, c, fma(z, h, b)))


@kernel
def residual(Z, B, R, start, L, lam, cuts, counter):  # type: ignore[no-untyped-def]
    """R <- B - H Z in float64, B and R being the rows from `start` on; R may be B.

    L holds (indptr, indices, w, s, diagonal), the last three in float64; w may be None.
    """
    k = Z.shape[1]
    lanes = VECTOR_BYTES // Z.itemsize
    chunk = count(counter, 0)
    while chunk < cuts.shape[0] - 1:
        a, b = cuts[chunk], cuts[chunk + 1]
        for j in range(0, k, TILE * lanes):
            vectors = min(TILE, (k - j + lanes - 1) // lanes)
            tail = min(lanes, k - j - (vectors - 1) * lanes)
            if k <= lanes // 4:
                _narrow_wide_rows(1, Z, k, L, lam, B, start, R, a, b)
            elif k <= lanes // 2:
                _narrow_wide_rows(2, Z, k, L, lam, B, start, R, a, b)
            elif vectors == 1:
                _wide_rows(1, Z, k, j, tail, L, lam, B, start, R, a, b)
            elif vectors == 2:
                _wide_rows(2, Z, k, j, tail, L, lam, B, start, R, a, b)
            elif vectors == 3:
                _wide_rows(3, Z, k, j, tail, L, lam, B, start, R, a, b)
            else:
                _wide_rows(4, Z, k, j, tail, L, lam, B, start, R, a, b)
        chunk = count(counter, 0)


@kernel
def residual_column(Z, B, R, start, L, lam, cuts, counter):  # type: ignore[no-untyped-def]
    """`residual` for one column."""
    indptr, indices, weights, s, diagonal = L
    chunk = count(counter, 0)
    while chunk < cuts.shape[0] - 1:
        for i in range(cuts[chunk], cuts[chunk + 1]):
            total = 0.0
            for e in range(peek(indptr, i), peek(indptr, i + 1)):
                v = peek(indices, e)
                total += scale(s, weights, v, e) * float64(peek(Z, v))
            Hz = (1.0 + lam * peek(diagonal, i)) * float64(peek(Z, i)) - lam * peek(s, i) * total
            R[i - start, 0] = B[i - start, 0] - Hz
        chunk = count(counter, 0)
