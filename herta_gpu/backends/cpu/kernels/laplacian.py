"""The product with H = I + lam L, and B - H Z in float64, as in laplacian.cu.

A row is cut into at most four vectors, the last one masked: a few variants of one loop serve every
number of columns, none of them with a scalar remainder.  A row of at most half a vector is one or
two quarters instead: short reads win there; one column is a vector of one number.  Threads share a
counter of chunks.  A chunk is always computed whole, by one thread, in one order, and leaves its
own partial sums: results do not depend on how many threads there are.

B - H Z is computed in float64, whatever Z, B and the result are stored in: a vector of Z is widened
when it is read, and its sum then fills two registers where Z is float32.  The result is rounded
once, when it is stored; its column dots are those of what was not rounded yet.
"""

from herta_gpu.backends.cpu.kernels.simd import (
    REGISTER_BYTES,
    VECTOR_BYTES,
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
    splat,
    store,
    sub,
    vector,
    widened,
)

TILE = 4  # vectors of a row held in registers at once ...
WIDE_TILE = 4 * REGISTER_BYTES // 64  # ... and of a row that is widened
AHEAD = 40  # neighbours between the prefetch of a row and its use: a few rows of a graph
FAR = 8 << 20  # bytes from which on a random read is waited for
RUN = 32  # neighbours summed before the sum joins those before it: a hub then rounds far less
_QUARTER = VECTOR_BYTES // 4


@inline
def _scale(s, weights, v, e):  # type: ignore[no-untyped-def]
    """s_v w_e; what is None is 1, and costs nothing."""
    if s is None:
        return 1.0 if weights is None else peek(weights, e)
    return peek(s, v) if weights is None else peek(s, v) * peek(weights, e)


@inline
def _ask_for(s, v):  # type: ignore[no-untyped-def]
    if s is not None:
        prefetch(s, v, None, None)


@inline
def _row_sum(zero, short, runs, far, G, s, weights, k, j, tail, indices, first, last, end):  # type: ignore[no-untyped-def]
    """sum over neighbours e of w_e s_e G[e, j:] in vectors like `zero`.

    Constants of each call: `short`, for rows of less than a vector; `runs`, whether neighbours are
    summed in runs.  What is `far` is asked for before it is used.
    """
    total = zero
    while first < last:
        stop = min(first + RUN, last) if runs else last
        part = zero
        for e in range(first, stop):
            v = peek(indices, e)
            if far or not short:
                ahead = peek(indices, min(e + AHEAD, end))
                if far:
                    _ask_for(s, ahead)
                if short:
                    prefetch(G, ahead * k + j, None, zero)
                else:
                    prefetch(G, ahead * k + j, tail, zero)
            f = splat(_scale(s, weights, v, e), zero)
            part = fma(load(G, v * k + j, tail, zero), f, part)
        total = add(total, part)
        first = stop
    return total


@inline
def _rows(finish, zero, short, runs, far, G, X, L, lam, out, j, tail, a, b):  # type: ignore[no-untyped-def]
    """Rows a..b, columns j.. of a tile of vectors like `zero`; `finish` takes the sums from it."""
    indptr, indices, weights, s, post, own, diagonal = L
    k, end = X.shape[1], indptr[-1] - 1
    for i in range(a, b):
        first, last = peek(indptr, i), peek(indptr, i + 1)
        total = _row_sum(
            zero, short, runs, far, G, s, weights, k, j, tail, indices, first, last, end
        )
        f = _scale(own, None, i, 0)
        finish(X, i, k, j, tail, total, lam, peek(diagonal, i), peek(post, i) * f, f, *out)


@inline
def _chunk(finish, zeros, most, runs, far, G, X, L, lam, out, a, b):  # type: ignore[no-untyped-def]
    """Rows a..b in tiles of at most `most` vectors; `zeros` are of all the sizes that there are."""
    k, size, part = X.shape[1], lanes(zeros[3]), lanes(zeros[1])
    far_G = G.size * G.itemsize > FAR
    for j in range(0, k, most * size):
        vectors = min(most, (k - j + size - 1) // size)
        tail = min(size, k - j - (vectors - 1) * size)
        if k == 1:  # to ask for what is far costs more than it brings
            _rows(finish, zeros[0], True, False, False, G, X, L, lam, out, 0, None, a, b)
        elif k <= part:
            _rows(finish, zeros[1], True, False, far_G, G, X, L, lam, out, 0, k, a, b)
        elif k <= 2 * part:
            _rows(finish, zeros[2], True, False, far_G, G, X, L, lam, out, 0, k - part, a, b)
        elif vectors == 1:
            _rows(finish, zeros[3], False, runs, far, G, X, L, lam, out, j, tail, a, b)
        elif vectors == 2:
            _rows(finish, zeros[4], False, runs, far, G, X, L, lam, out, j, tail, a, b)
        elif vectors == 3:
            _rows(finish, zeros[5], False, runs, far, G, X, L, lam, out, j, tail, a, b)
        else:
            _rows(finish, zeros[6], False, runs, far, G, X, L, lam, out, j, tail, a, b)


@inline
def _zeros(X):  # type: ignore[no-untyped-def]
    """One number, one and two quarters of a vector, one to four vectors: of zeros."""
    few = (
        vector(X, 0, 1),
        vector(X, _QUARTER, 1),
        vector(X, _QUARTER, 2),
        vector(X, VECTOR_BYTES, 1),
    )
    return *few, vector(X, VECTOR_BYTES, 2), vector(X, VECTOR_BYTES, 3), vector(X, VECTOR_BYTES, 4)


@inline
def _step(X, i, k, j, n, total, lam, d, p, own, Y, B, dots, unit, c1, c2, into):  # type: ignore[no-untyped-def]
    """Columns j.. of row i of H X, from the sum of its neighbours, and what is fused with it."""
    at = i * k + j
    x = load(X, at, n, total)
    if unit is not None:
        total = mul(total, load(unit, j, n, total))
    y = fma(total, splat(-lam * p, total), mul(x, splat(1.0 + lam * d, total)))
    if dots is not None:
        add_product(dots, into + j, n, x, y)
    if B is not None:
        b, z = mul(load(B, at, n, x), splat(own, x)), sub(x, load(Y, at, n, x))
        y = fma(sub(b, y), splat(c2, x), fma(z, splat(c1, x), x))
    store(Y, at, n, y)


@inline
def _subtract(Z, i, k, j, n, total, lam, d, p, own, B, R, up, dots, start, into):  # type: ignore[no-untyped-def]
    """Columns j.. of row i of B - H Z, and their shares of the column dots."""
    at = (i - start) * k + j
    z, b = load(Z, i * k + j, n, total), load(B, at, n, total)
    r = fma(total, splat(lam * p, z), fma(z, splat(-1.0 - lam * d, z), b))
    if dots is not None:
        add_product(dots, into + j, n, r, r)
        add_product(dots, into + k + j, n, add(b, r), z)
    store(R, at, n, r if up is None else mul(r, load(up, j, n, r)))


@kernel
def apply(G, unit, X, Y, B, dots, L, lam, c1, c2, cuts, counter):  # type: ignore[no-untyped-def]
    """Y <- H X; with `dots`, column dots of X and Y by chunk; with B, a Chebyshev step into Y.

    L holds (indptr, indices, w, s, post, own, diagonal), and row i of H X is (1 + lam diagonal_i)
    X_i - lam post_i own_i sum_e w_e s_e G_e; B_i counts times own_i.  Plainly, G is X, s and post
    are D^-1/2, own is None; on large graphs `compiled._apply` has others.  What is None is
    compiled away; of w, s and own it stands for ones.  G may be float16 (its bits as uint16), each
    column in its own `unit`.
    """
    zeros = _zeros(X)
    for chunk in chunks(counter, cuts.shape[0] - 1):
        a, b = cuts[chunk], cuts[chunk + 1]
        out = (Y, B, dots, unit, c1, c2, chunk * X.shape[1])
        _chunk(_step, zeros, TILE, True, False, G, X, L, lam, out, a, b)


@kernel
def residual(Z, B, R, start, up, dots, L, lam, cuts, counter):  # type: ignore[no-untyped-def]
    """R <- (B - H Z) diag(up), B and R being the rows from `start` on; R may be B.

    L is that of `apply`, its numbers in float64.  `dots` of each chunk are ||r||^2 and <b + r, z>
    by column.  With them, which certificates are made of, neighbours are summed in runs, so that
    hubs round less; without, one by one.
    """
    a0, a1, a2, a3, a4, a5, a6 = _zeros(Z)
    zeros = (
        *(widened(a0), widened(a1), widened(a2), widened(a3)),
        *(widened(a4), widened(a5), widened(a6)),
    )
    far, runs = L[3].size * L[3].itemsize > FAR, dots is not None
    for chunk in chunks(counter, cuts.shape[0] - 1):
        a, b = cuts[chunk], cuts[chunk + 1]
        out = (B, R, up, dots, start, 2 * chunk * Z.shape[1])
        _chunk(_subtract, zeros, WIDE_TILE, runs, far, Z, Z, L, lam, out, a, b)


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
    one, small, zero = vector(X, 0, 1), vector(X, _QUARTER, 1), vector(X, VECTOR_BYTES, 1)
    size, part = lanes(zero), lanes(small)
    for chunk in chunks(counter, -(-n // rows)):
        for i in range(chunk * rows, min(n, (chunk + 1) * rows)):
            own = f / peek(s, i) if inverse else f * peek(s, i)
            for j in range(0, k - size + 1, size):
                _scale_part(X, i * k, None, own, up, j, Y, zero)
            for j in range(k // size * size, k - part + 1, part):
                _scale_part(X, i * k, None, own, up, j, Y, small)
            for j in range(k // part * part, k):
                _scale_part(X, i * k, None, own, up, j, Y, one)
