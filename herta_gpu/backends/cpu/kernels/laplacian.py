"""The product with H = I + lam L, and B - H Z in float64, as in laplacian.cu.

A row is cut into at most four vectors, the last one masked: a few variants of one loop serve every
number of columns, none of them with a scalar remainder.  A row of at most half a vector is one or
two quarters instead: short reads win there.  Threads share a counter of chunks.  A chunk is always
computed whole, by one thread, in one order, and leaves its own partial sums: results do not depend
on how many threads there are.

B - H Z is computed in float64, whatever Z, B and the result are stored in: a vector of Z is widened
when it is read, and its sum then fills two registers where Z is float32.  The result is rounded
once, when it is stored; its column dots are those of what was not rounded yet.
"""

from numba import float64

from herta_gpu.backends.cpu.kernels.simd import (
    REGISTER_BYTES,
    add,
    add_product,
    chunks,
    fma,
    inline,
    kernel,
    lanes,
    load,
    mul,
    peek,
    prefetch,
    quarter,
    splat,
    store,
    sub,
    vector,
    wide,
)

TILE = 4  # vectors of a row held in registers at once ...
WIDE_TILE = 4 * REGISTER_BYTES // 64  # ... and of a row that is widened
AHEAD = 40  # neighbours between the prefetch of a row and its use: a few rows of a graph
FAR = 8 << 20  # bytes from which on a random read is waited for
RUN = 32  # neighbours summed before the sum joins those before it: a hub then rounds far less


@inline
def _scale(s, weights, v, e):  # type: ignore[no-untyped-def]
    """s_v w_e; what is None is 1, and costs nothing."""
    if s is None:
        return 1.0 if weights is None else peek(weights, e)
    return peek(s, v) if weights is None else peek(s, v) * peek(weights, e)


@inline
def _product(x, factors, i):  # type: ignore[no-untyped-def]
    return x if factors is None else x * peek(factors, i)


@inline
def _ask_for(s, v):  # type: ignore[no-untyped-def]
    if s is not None:
        prefetch(s, v)


@inline
def _row_sum(zero, vectors, short, runs, far, G, s, weights, k, j, tail, indices, first, last, end):  # type: ignore[no-untyped-def]
    """sum over neighbours e of w_e s_e G[e, j:] in `vectors` vectors like `zero`.

    Constants of each call: `vectors`; `short`, for quarters; `runs`, whether neighbours are summed
    in runs.  What is `far` is asked for before it is used.
    """
    size = lanes(zero)
    n0, n1 = tail if vectors < 2 else size, tail if vectors == 2 else size
    n2 = tail if vectors == 3 else size
    lines = G.itemsize * size == 64  # a vector of float16 is half a cache line
    t0, t1, t2, t3 = zero, zero, zero, zero
    while first < last:
        stop = min(first + RUN, last) if runs else last
        a0, a1, a2, a3 = zero, zero, zero, zero
        for e in range(first, stop):
            v = peek(indices, e)
            f, at = splat(_scale(s, weights, v, e), zero), v * k + j
            if far or not short:
                ahead = peek(indices, min(e + AHEAD, end))
                soon = ahead * k + j
                if far:
                    _ask_for(s, ahead)
                prefetch(G, soon)
                if not short:  # the line that a row's end may touch
                    prefetch(G, soon + (vectors - 1) * size + tail - 1)
                    if vectors > 1 and lines:
                        prefetch(G, soon + size)
                    if vectors > 2:
                        prefetch(G, soon + 2 * size)
                    if vectors > 3 and lines:
                        prefetch(G, soon + 3 * size)
            a0 = fma(load(G, at, n0, zero), f, a0)
            if vectors > 1:
                a1 = fma(load(G, at + size, n1, zero), f, a1)
            if vectors > 2:
                a2 = fma(load(G, at + 2 * size, n2, zero), f, a2)
            if vectors > 3:
                a3 = fma(load(G, at + 3 * size, tail, zero), f, a3)
        t0, t1, t2, t3 = add(t0, a0), add(t1, a1), add(t2, a2), add(t3, a3)
        first = stop
    return t0, t1, t2, t3


@inline
def _rows(finish, zero, vectors, short, runs, far, G, X, L, lam, out, j, tail, a, b):  # type: ignore[no-untyped-def]
    """Rows a..b, columns j.. of a tile of `vectors` vectors; `finish` is what is made of H X."""
    indptr, indices, weights, s, post, own, diagonal = L
    k, size, end = X.shape[1], lanes(zero), indptr[-1] - 1
    for i in range(a, b):
        first, last = peek(indptr, i), peek(indptr, i + 1)
        t0, t1, t2, t3 = _row_sum(
            zero, vectors, short, runs, far, G, s, weights, k, j, tail, indices, first, last, end
        )
        d, p, f = peek(diagonal, i), _product(peek(post, i), own, i), _scale(own, None, i, 0)
        n = tail if vectors < 2 else size
        finish(zero, X, i, k, j, n, t0, lam, d, p, f, *out)
        if vectors > 1:
            n = tail if vectors == 2 else size
            finish(zero, X, i, k, j + size, n, t1, lam, d, p, f, *out)
        if vectors > 2:
            n = tail if vectors == 3 else size
            finish(zero, X, i, k, j + 2 * size, n, t2, lam, d, p, f, *out)
        if vectors > 3:
            finish(zero, X, i, k, j + 3 * size, tail, t3, lam, d, p, f, *out)


@inline
def _chunk(finish, zero, small, most, runs, far, G, X, L, lam, out, a, b):  # type: ignore[no-untyped-def]
    """Rows a..b in tiles of at most `most` vectors like `zero`, or in one or two like `small`."""
    k, size, part = X.shape[1], lanes(zero), lanes(small)
    far_G = G.size * G.itemsize > FAR
    for j in range(0, k, most * size):
        vectors = min(most, (k - j + size - 1) // size)
        tail = min(size, k - j - (vectors - 1) * size)
        if k <= part:
            _rows(finish, small, 1, True, False, far_G, G, X, L, lam, out, 0, k, a, b)
        elif k <= 2 * part:
            _rows(finish, small, 2, True, False, far_G, G, X, L, lam, out, 0, k - part, a, b)
        elif vectors == 1:
            _rows(finish, zero, 1, False, runs, far, G, X, L, lam, out, j, tail, a, b)
        elif vectors == 2:
            _rows(finish, zero, 2, False, runs, far, G, X, L, lam, out, j, tail, a, b)
        elif vectors == 3:
            _rows(finish, zero, 3, False, runs, far, G, X, L, lam, out, j, tail, a, b)
        else:
            _rows(finish, zero, 4, False, runs, far, G, X, L, lam, out, j, tail, a, b)


@inline
def _step(zero, X, i, k, j, n, total, lam, d, p, own, Y, B, dots, unit, c1, c2, into):  # type: ignore[no-untyped-def]
    """Columns j.. of row i of H X, from the sum of its neighbours, and what is fused with it."""
    at = i * k + j
    x = load(X, at, n, zero)
    if unit is not None:
        total = mul(total, load(unit, j, n, zero))
    y = fma(total, splat(-lam * p, zero), mul(x, splat(1.0 + lam * d, zero)))
    if dots is not None:
        add_product(dots, into + j, n, x, y)
    if B is not None:
        b, z = mul(load(B, at, n, zero), splat(own, zero)), sub(x, load(Y, at, n, zero))
        y = fma(sub(b, y), splat(c2, zero), fma(z, splat(c1, zero), x))
    store(Y, at, n, y)


@inline
def _subtract(zero, Z, i, k, j, n, total, lam, d, p, own, B, R, up, dots, start, into):  # type: ignore[no-untyped-def]
    """Columns j.. of row i of B - H Z, and their shares of the column dots."""
    at = (i - start) * k + j
    z, b = load(Z, i * k + j, n, zero), load(B, at, n, zero)
    r = fma(total, splat(lam * p, zero), fma(z, splat(-1.0 - lam * d, zero), b))
    if dots is not None:
        add_product(dots, into + j, n, r, r)
        add_product(dots, into + k + j, n, add(b, r), z)
    store(R, at, n, r if up is None else mul(r, load(up, j, n, zero)))


@kernel
def apply(G, unit, X, Y, B, dots, L, lam, c1, c2, cuts, counter):  # type: ignore[no-untyped-def]
    """Y <- H X; with `dots`, column dots of X and Y by chunk; with B, a Chebyshev step into Y.

    L holds (indptr, indices, w, s, post, own, diagonal), and row i of H X is (1 + lam diagonal_i)
    X_i - lam post_i own_i sum_e w_e s_e G_e; B_i counts times own_i.  Plainly, G is X, s and post
    are D^-1/2, own is None; on large graphs `compiled._apply` has others.  What is None is
    compiled away; of w, s and own it stands for ones.  G may be float16 (its bits as uint16), each
    column in its own `unit`.
    """
    zero, small = vector(X), quarter(X)
    for chunk in chunks(counter, cuts.shape[0] - 1):
        a, b = cuts[chunk], cuts[chunk + 1]
        out = (Y, B, dots, unit, c1, c2, chunk * X.shape[1])
        _chunk(_step, zero, small, TILE, True, False, G, X, L, lam, out, a, b)


@kernel
def residual(Z, B, R, start, up, dots, L, lam, cuts, counter):  # type: ignore[no-untyped-def]
    """R <- (B - H Z) diag(up), B and R being the rows from `start` on; R may be B.

    L is that of `apply`, its numbers in float64.  `dots` of each chunk are ||r||^2 and <b + r, z>
    by column.  With them, which certificates are made of, neighbours are summed in runs, so that
    hubs round less; without, one by one.
    """
    zero, small = wide(vector(Z)), wide(quarter(Z))
    far, runs = L[3].size * L[3].itemsize > FAR, dots is not None
    for chunk in chunks(counter, cuts.shape[0] - 1):
        a, b = cuts[chunk], cuts[chunk + 1]
        out = (B, R, up, dots, start, 2 * chunk * Z.shape[1])
        _chunk(_subtract, zero, small, WIDE_TILE, runs, far, Z, Z, L, lam, out, a, b)


@kernel
def apply_column(G, X, Y, B, dots, L, lam, c1, c2, cuts, counter):  # type: ignore[no-untyped-def]
    """`apply` for one column and an s of 1."""
    indptr, indices, weights, _, post, own, diagonal = L
    for chunk in chunks(counter, cuts.shape[0] - 1):
        for i in range(cuts[chunk], cuts[chunk + 1]):
            total = lam - lam  # 0 of the type of X
            first, last = peek(indptr, i), peek(indptr, i + 1)
            for e in range(first, last):
                total += _product(peek(G, peek(indices, e)), weights, e)
            x = peek(X, i)
            y = x + lam * (peek(diagonal, i) * x - _product(peek(post, i), own, i) * total)
            if dots is not None:
                dots[chunk, 0] += float64(x) * float64(y)
            if B is not None:
                y = x + c1 * (x - peek(Y, i)) + c2 * (_product(peek(B, i), own, i) - y)
            Y[i, 0] = y


@kernel
def residual_column(Z, B, R, start, up, dots, L, lam, cuts, counter):  # type: ignore[no-untyped-def]
    """`residual` for one column."""
    indptr, indices, weights, s, _, _, diagonal = L
    for chunk in chunks(counter, cuts.shape[0] - 1):
        for i in range(cuts[chunk], cuts[chunk + 1]):
            total = 0.0
            for e in range(peek(indptr, i), peek(indptr, i + 1)):
                v = peek(indices, e)
                total += _scale(s, weights, v, e) * float64(peek(Z, v))
            z, b = float64(peek(Z, i)), float64(B[i - start, 0])
            r = b - ((1.0 + lam * peek(diagonal, i)) * z - lam * peek(s, i) * total)
            if dots is not None:
                dots[chunk, 0, 0] += r * r
                dots[chunk, 1, 0] += (b + r) * z
            R[i - start, 0] = r if up is None else r * up[0]


@inline
def _scale_part(X, at, n, own, up, j, Y, zero):  # type: ignore[no-untyped-def]
    x = mul(load(X, at + j, n, zero), splat(own, zero))
    store(Y, at + j, n, x if up is None else mul(x, load(up, j, n, zero)))


@kernel
def scale_rows(X, s, f, up, Y, inverse, rows, counter):  # type: ignore[no-untyped-def]
    """Y <- diag(f s) X diag(up), or diag(f / s) X if `inverse`, in chunks of `rows` rows.

    Y may be X, or hold the bits of float16; an `up` of None is all ones.
    """
    n, k = X.shape
    zero, small = vector(X), quarter(X)
    size, part = lanes(zero), lanes(small)
    for chunk in chunks(counter, -(-n // rows)):
        for i in range(chunk * rows, min(n, (chunk + 1) * rows)):
            own = f / peek(s, i) if inverse else f * peek(s, i)
            for j in range(0, k - size + 1, size):
                _scale_part(X, i * k, None, own, up, j, Y, zero)
            for j in range(k // size * size, k - part + 1, part):
                _scale_part(X, i * k, None, own, up, j, Y, small)
            for j in range(k // part * part, k):
                _scale_part(X, i * k, 1, own, up, j, Y, small)
