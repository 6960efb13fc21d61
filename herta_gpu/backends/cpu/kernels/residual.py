"""B - H Z in float64, whatever Z, B and the result are stored in: `residual` of laplacian.cu.

Rows are cut into vectors as in `laplacian`, but a vector of Z is widened when it is read: its sum
then fills two registers where Z is float32.  The result is rounded once, when it is stored; its
column dots are those of what was not rounded yet.  With dots, which certificates are made of,
neighbours are summed in the runs of `laplacian`, so that hubs round less; without, one by one.
"""

from numba import float64

from herta_gpu.backends.cpu.kernels.laplacian import AHEAD, FAR, RUN, scale
from herta_gpu.backends.cpu.kernels.simd import (
    REGISTER_BYTES,
    VECTOR_BYTES,
    add,
    add_product,
    count,
    fma,
    inline,
    kernel,
    load_wide,
    load_wide_quarter,
    mul,
    peek,
    prefetch,
    splat_wide,
    splat_wide_quarter,
    store,
)

TILE = 4 * REGISTER_BYTES // 64  # vectors of a row held in registers at once


@inline
def _run_sum(vectors, Z, k, j, tail, indices, weights, s, first, last, end, far):  # type: ignore[no-untyped-def]
    """sum over the neighbours e of a run of w_e s_e Z[e, j:], in `vectors` float64 vectors."""
    lanes = VECTOR_BYTES // Z.itemsize
    n0, n1 = tail if vectors < 2 else lanes, tail if vectors == 2 else lanes
    n2 = tail if vectors == 3 else lanes
    a0 = splat_wide(0.0, Z)
    a1, a2, a3 = a0, a0, a0
    for e in range(first, last):
        v, ahead = peek(indices, e), peek(indices, min(e + AHEAD, end))
        f, at, soon = splat_wide(scale(s, weights, v, e), Z), v * k + j, ahead * k + j
        if far:
            prefetch(s, ahead)
        prefetch(Z, soon)
        prefetch(Z, soon + (vectors - 1) * lanes + tail - 1)
        a0 = fma(load_wide(Z, at, n0, Z), f, a0)
        if vectors > 1:
            prefetch(Z, soon + lanes)
            a1 = fma(load_wide(Z, at + lanes, n1, Z), f, a1)
        if vectors > 2:
            prefetch(Z, soon + 2 * lanes)
            a2 = fma(load_wide(Z, at + 2 * lanes, n2, Z), f, a2)
        if vectors > 3:
            prefetch(Z, soon + 3 * lanes)
            a3 = fma(load_wide(Z, at + 3 * lanes, tail, Z), f, a3)
    return a0, a1, a2, a3


@inline
def _wide_rows(vectors, Z, k, j, tail, L, lam, B, start, up, R, dots, chunk, a, b):  # type: ignore[no-untyped-def]
    """Rows a..b of B - H Z, columns j.. of a tile of `vectors` vectors, in float64."""
    indptr, indices, weights, s, diagonal = L
    lanes = VECTOR_BYTES // Z.itemsize
    n0, n1 = tail if vectors < 2 else lanes, tail if vectors == 2 else lanes
    n2, end = tail if vectors == 3 else lanes, indptr[-1] - 1
    far = s.size * s.itemsize > FAR
    for i in range(a, b):
        t0 = splat_wide(0.0, Z)
        t1, t2, t3, last = t0, t0, t0, peek(indptr, i + 1)
        if dots is not None:
            for run in range(peek(indptr, i), last, RUN):
                a0, a1, a2, a3 = _run_sum(
                    vectors, Z, k, j, tail, indices, weights, s, run, min(run + RUN, last), end, far
                )
                t0, t1, t2, t3 = add(t0, a0), add(t1, a1), add(t2, a2), add(t3, a3)
        else:  # the loop of `_run_sum`, written out: a call for each row costs some per cent
            for e in range(peek(indptr, i), last):
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
        h = splat_wide(-1.0 - lam * peek(diagonal, i), Z)
        c = splat_wide(lam * peek(s, i), Z)
        at, into = i * k, (i - start) * k
        _subtract(Z, B, R, up, dots, chunk, k, at, into, j, n0, t0, h, c)
        if vectors > 1:
            _subtract(Z, B, R, up, dots, chunk, k, at, into, j + lanes, n1, t1, h, c)
        if vectors > 2:
            _subtract(Z, B, R, up, dots, chunk, k, at, into, j + 2 * lanes, n2, t2, h, c)
        if vectors > 3:
            _subtract(Z, B, R, up, dots, chunk, k, at, into, j + 3 * lanes, tail, t3, h, c)


@inline
def _subtract(Z, B, R, up, dots, chunk, k, at, into, j, n, total, h, c):  # type: ignore[no-untyped-def]
    """One vector of a row of B - H Z, and its shares of the column dots."""
    z, b = load_wide(Z, at + j, n, Z), load_wide(B, into + j, n, Z)
    r = fma(total, c, fma(z, h, b))
    if dots is not None:
        add_product(dots, 2 * chunk * k + j, n, r, r)
        add_product(dots, (2 * chunk + 1) * k + j, n, add(b, r), z)
    store(R, into + j, n, r if up is None else mul(r, load_wide(up, j, n, Z)))


@inline
def _narrow_wide_rows(vectors, Z, k, L, lam, B, start, up, R, dots, chunk, a, b):  # type: ignore[no-untyped-def]
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
        h = splat_wide_quarter(-1.0 - lam * peek(diagonal, i), Z)
        c = splat_wide_quarter(lam * peek(s, i), Z)
        at, into = i * k, (i - start) * k
        _narrow_subtract(Z, B, R, up, dots, chunk, k, at, into, 0, n0, t0, h, c)
        if vectors > 1:
            _narrow_subtract(Z, B, R, up, dots, chunk, k, at, into, lanes, n1, t1, h, c)


@inline
def _narrow_subtract(Z, B, R, up, dots, chunk, k, at, into, j, n, total, h, c):  # type: ignore[no-untyped-def]
    """`_subtract` of a quarter vector."""
    z, b = load_wide_quarter(Z, at + j, n, Z), load_wide_quarter(B, into + j, n, Z)
    r = fma(total, c, fma(z, h, b))
    if dots is not None:
        add_product(dots, 2 * chunk * k + j, n, r, r)
        add_product(dots, (2 * chunk + 1) * k + j, n, add(b, r), z)
    store(R, into + j, n, r if up is None else mul(r, load_wide_quarter(up, j, n, Z)))


@kernel
def residual(Z, B, R, start, up, dots, L, lam, cuts, counter):  # type: ignore[no-untyped-def]
    """R <- (B - H Z) diag(up), B and R being the rows from `start` on; R may be B.

    L holds (indptr, indices, w, s, diagonal), the last three in float64; w may be None.  `dots` of
    each chunk are ||r||^2 and <b + r, z> by column.  What is None is compiled away.
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
                _narrow_wide_rows(1, Z, k, L, lam, B, start, up, R, dots, chunk, a, b)
            elif k <= lanes // 2:
                _narrow_wide_rows(2, Z, k, L, lam, B, start, up, R, dots, chunk, a, b)
            elif vectors == 1:
                _wide_rows(1, Z, k, j, tail, L, lam, B, start, up, R, dots, chunk, a, b)
            elif vectors == 2:
                _wide_rows(2, Z, k, j, tail, L, lam, B, start, up, R, dots, chunk, a, b)
            elif vectors == 3:
                _wide_rows(3, Z, k, j, tail, L, lam, B, start, up, R, dots, chunk, a, b)
            else:
                _wide_rows(4, Z, k, j, tail, L, lam, B, start, up, R, dots, chunk, a, b)
        chunk = count(counter, 0)


@kernel
def residual_column(Z, B, R, start, up, dots, L, lam, cuts, counter):  # type: ignore[no-untyped-def]
    """`residual` for one column."""
    indptr, indices, weights, s, diagonal = L
    chunk = count(counter, 0)
    while chunk < cuts.shape[0] - 1:
        for i in range(cuts[chunk], cuts[chunk + 1]):
            total = 0.0
            for e in range(peek(indptr, i), peek(indptr, i + 1)):
                v = peek(indices, e)
                total += scale(s, weights, v, e) * float64(peek(Z, v))
            z, b = float64(peek(Z, i)), float64(B[i - start, 0])
            r = b - ((1.0 + lam * peek(diagonal, i)) * z - lam * peek(s, i) * total)
            if dots is not None:
                dots[chunk, 0, 0] += r * r
                dots[chunk, 1, 0] += (b + r) * z
            R[i - start, 0] = r if up is None else r * up[0]
        chunk = count(counter, 0)
