"""The product with H = I + lam L, as in laplacian.cu.

A row is cut into at most `TILE` vectors, the last one masked: a few variants of each loop serve
every number of columns, none of them with a scalar remainder.  Threads share a counter of chunks.
A chunk is always computed whole, by one thread, in one order, and leaves its own partial sums:
results do not depend on how many threads there are.
"""

from numba import float64

from herta_gpu.backends.cpu.kernels.simd import (
    VECTOR_BYTES,
    add,
    add_product,
    count,
    fma,
    inline,
    kernel,
    load,
    load_as,
    load_as_quarter,
    load_quarter,
    mul,
    peek,
    prefetch,
    splat,
    splat_quarter,
    store,
    store_half,
    sub,
)

TILE = 4  # vectors of a row held in registers at once
AHEAD = 40  # neighbours between the prefetch of a row and its use: a few rows of a graph
FAR = 8 << 20  # bytes from which on a random read is waited for
RUN = 32  # neighbours summed before the sum joins those before it: a hub then rounds far less


@inline
def scale(s, weights, v, e):  # type: ignore[no-untyped-def]
    """s_v w_e; what is None is 1, and costs nothing."""
    if s is None:
        return 1.0 if weights is None else peek(weights, e)
    return peek(s, v) if weights is None else peek(s, v) * peek(weights, e)


@inline
def _post(post, own, i):  # type: ignore[no-untyped-def]
    return peek(post, i) if own is None else peek(post, i) * peek(own, i)


@inline
def _row_sum(G, X, k, j, vectors, tail, indices, weights, s, first, last, end):  # type: ignore[no-untyped-def]
    """sum over neighbours e of w_e s_e G[e, j:] in `vectors` registers."""
    lanes = VECTOR_BYTES // X.itemsize
    n0, n1 = tail if vectors < 2 else lanes, tail if vectors == 2 else lanes
    n2 = tail if vectors == 3 else lanes
    whole = G.itemsize == X.itemsize  # a vector of float16 is half a cache line
    zero = splat(X, 0.0)
    t0, t1, t2, t3 = zero, zero, zero, zero
    for run in range(first, last, RUN):
        a0, a1, a2, a3 = zero, zero, zero, zero
        for e in range(run, min(run + RUN, last)):
            v = peek(indices, e)
            f, at = splat(X, scale(s, weights, v, e)), v * k + j
            # Rows are random reads: ask early, also for the line that a row's end may touch.
            soon = peek(indices, min(e + AHEAD, end)) * k + j
            prefetch(G, soon)
            prefetch(G, soon + (vectors - 1) * lanes + tail - 1)
            a0 = fma(load_as(G, at, n0, X), f, a0)
            if vectors > 1:
                if whole:
                    prefetch(G, soon + lanes)
                a1 = fma(load_as(G, at + lanes, n1, X), f, a1)
            if vectors > 2:
                prefetch(G, soon + 2 * lanes)
                a2 = fma(load_as(G, at + 2 * lanes, n2, X), f, a2)
            if vectors > 3:
                if whole:
                    prefetch(G, soon + 3 * lanes)
                a3 = fma(load_as(G, at + 3 * lanes, tail, X), f, a3)
        t0, t1, t2, t3 = add(t0, a0), add(t1, a1), add(t2, a2), add(t3, a3)
    return t0, t1, t2, t3


@inline
def _narrow_rows(vectors, G, X, Y, B, dots, k, L, lam, c1, c2, a, b, into):  # type: ignore[no-untyped-def]
    """Rows a..b of a block of one or two quarter vectors, not of float16: short reads win."""
    indptr, indices, weights, s, post, own, diagonal = L
    lanes = VECTOR_BYTES // X.itemsize // 4
    n0, n1 = min(k, lanes), k - lanes
    f1, f2 = splat_quarter(X, c1), splat_quarter(X, c2)
    far, end = G.size * G.itemsize > FAR, indptr[-1] - 1
    for i in range(a, b):
        t0 = splat_quarter(X, 0.0)
        t1 = t0
        for e in range(peek(indptr, i), peek(indptr, i + 1)):
            v = peek(indices, e)
            if far:
                prefetch(G, peek(indices, min(e + AHEAD, end)) * k)
            f = splat_quarter(X, scale(s, weights, v, e))
            t0 = fma(load_as_quarter(G, v * k, n0, X), f, t0)
            if vectors > 1:
                t1 = fma(load_as_quarter(G, v * k + lanes, n1, X), f, t1)
        h = splat_quarter(X, 1.0 + lam * peek(diagonal, i))
        c, at = splat_quarter(X, -lam * _post(post, own, i)), i * k
        f = splat_quarter(X, scale(own, None, i, 0))
        x = load_quarter(X, at, n0)
        y = fma(t0, c, mul(x, h))
        if dots is not None:
            add_product(dots, into, n0, x, y)
        if B is not None:
            z = sub(x, load_quarter(Y, at, n0))
            y = fma(sub(mul(load_quarter(B, at, n0), f), y), f2, fma(z, f1, x))
        store(Y, at, n0, y)
        if vectors > 1:
            at += lanes
            x = load_quarter(X, at, n1)
            y = fma(t1, c, mul(x, h))
            if dots is not None:
                add_product(dots, into + lanes, n1, x, y)
            if B is not None:
                z = sub(x, load_quarter(Y, at, n1))
                y = fma(sub(mul(load_quarter(B, at, n1), f), y), f2, fma(z, f1, x))
            store(Y, at, n1, y)


@inline
def _finish(X, Y, B, dots, unit, row, j, into, n, total, h, c, f, c1, c2):  # type: ignore[no-untyped-def]
    """Columns j.. of a row: H X from the neighbours' sum, and what is fused with it."""
    at = row + j
    x = load(X, at, n)
    if unit is not None:
        total = mul(total, load(unit, j, n))
    y = fma(total, c, mul(x, h))
    if dots is not None:
        add_product(dots, into + j, n, x, y)
    if B is not None:
        b = mul(load(B, at, n), f)
        y = fma(sub(b, y), c2, fma(sub(x, load(Y, at, n)), c1, x))
    store(Y, at, n, y)


@inline
def _rows(vectors, G, unit, X, Y, B, dots, k, j, tail, L, lam, c1, c2, a, b, into):  # type: ignore[no-untyped-def]
    """Rows a..b, columns j.. of a tile of `vectors` vectors, a constant of each call."""
    indptr, indices, weights, s, post, own, diagonal = L
    lanes = VECTOR_BYTES // X.itemsize
    end = indptr[-1] - 1
    f1, f2 = splat(X, c1), splat(X, c2)
    for i in range(a, b):
        first, last, at = peek(indptr, i), peek(indptr, i + 1), i * k
        t0, t1, t2, t3 = _row_sum(G, X, k, j, vectors, tail, indices, weights, s, first, last, end)
        h = splat(X, 1.0 + lam * peek(diagonal, i))
        c, f = splat(X, -lam * _post(post, own, i)), splat(X, scale(own, None, i, 0))
        n = tail if vectors < 2 else lanes
        _finish(X, Y, B, dots, unit, at, j, into, n, t0, h, c, f, f1, f2)
        if vectors > 1:
            n = tail if vectors == 2 else lanes
            _finish(X, Y, B, dots, unit, at, j + lanes, into, n, t1, h, c, f, f1, f2)
        if vectors > 2:
            n = tail if vectors == 3 else lanes
            _finish(X, Y, B, dots, unit, at, j + 2 * lanes, into, n, t2, h, c, f, f1, f2)
        if vectors > 3:
            _finish(X, Y, B, dots, unit, at, j + 3 * lanes, into, tail, t3, h, c, f, f1, f2)


@kernel
def apply(G, unit, X, Y, B, dots, L, lam, c1, c2, cuts, counter):  # type: ignore[no-untyped-def]
    """Y <- H X; with `dots`, column dots of X and Y by chunk; with B, a Chebyshev step into Y.

    L holds (indptr, indices, w, s, post, own, diagonal), and row i of H X is (1 + lam diagonal_i)
    X_i - lam post_i own_i sum_e w_e s_e G_e; B_i counts times own_i.  Plainly, G is X, s and post
    are D^-1/2, own is None; on large graphs `compiled._apply` has others.  What is None is
    compiled away; of w, s and own it stands for ones.  G may be float16 (its bits as uint16), each
    column in its own `unit`.
    """
    k = X.shape[1]
    lanes = VECTOR_BYTES // X.itemsize
    chunk = count(counter, 0)
    while chunk < cuts.shape[0] - 1:
        a, b = cuts[chunk], cuts[chunk + 1]
        for j in range(0, k, TILE * lanes):
            vectors = min(TILE, (k - j + lanes - 1) // lanes)
            tail = min(lanes, k - j - (vectors - 1) * lanes)
            into = chunk * k
            if k <= lanes // 4:
                _narrow_rows(1, G, X, Y, B, dots, k, L, lam, c1, c2, a, b, into)
            elif k <= lanes // 2:
                _narrow_rows(2, G, X, Y, B, dots, k, L, lam, c1, c2, a, b, into)
            elif vectors == 1:
                _rows(1, G, unit, X, Y, B, dots, k, j, tail, L, lam, c1, c2, a, b, into)
            elif vectors == 2:
                _rows(2, G, unit, X, Y, B, dots, k, j, tail, L, lam, c1, c2, a, b, into)
            elif vectors == 3:
                _rows(3, G, unit, X, Y, B, dots, k, j, tail, L, lam, c1, c2, a, b, into)
            else:
                _rows(4, G, unit, X, Y, B, dots, k, j, tail, L, lam, c1, c2, a, b, into)
        chunk = count(counter, 0)


@inline
def _product(x, weights, e):  # type: ignore[no-untyped-def]
    return x if weights is None else x * peek(weights, e)


@kernel
def apply_column(G, X, Y, B, dots, L, lam, c1, c2, cuts, counter):  # type: ignore[no-untyped-def]
    """`apply` for one column and an s of 1."""
    indptr, indices, weights, _, post, own, diagonal = L
    chunk = count(counter, 0)
    while chunk < cuts.shape[0] - 1:
        for i in range(cuts[chunk], cuts[chunk + 1]):
            total = lam - lam  # 0 of the type of X
            first, last = peek(indptr, i), peek(indptr, i + 1)
            for e in range(first, last):
                total += _product(peek(G, peek(indices, e)), weights, e)
            x = peek(X, i)
            y = x + lam * (peek(diagonal, i) * x - _post(post, own, i) * total)
            if dots is not None:
                dots[chunk, 0] += float64(x) * float64(y)
            if B is not None:
                y = x + c1 * (x - peek(Y, i)) + c2 * (_product(peek(B, i), own, i) - y)
            Y[i, 0] = y
        chunk = count(counter, 0)


@kernel
def scale_rows(X, s, f, Y, inverse, rows, counter):  # type: ignore[no-untyped-def]
    """Y <- diag(f s) X, or diag(f / s) X if `inverse`, in chunks of `rows` rows; Y may be X."""
    n, k = X.shape
    lanes = VECTOR_BYTES // X.itemsize
    quarter, whole = lanes // 4, k // lanes * lanes
    chunk = count(counter, 0)
    while chunk * rows < n:
        for i in range(chunk * rows, min(n, (chunk + 1) * rows)):
            own = f / peek(s, i) if inverse else f * peek(s, i)
            for j in range(i * k, i * k + whole, lanes):
                store(Y, j, None, mul(load(X, j, None), splat(X, own)))
            for j in range(i * k + whole, (i + 1) * k - quarter + 1, quarter):
                store(Y, j, None, mul(load_quarter(X, j, None), splat_quarter(X, own)))
            for j in range(i * k + k // quarter * quarter, (i + 1) * k):
                store(Y, j, 1, mul(load_quarter(X, j, 1), splat_quarter(X, own)))
        chunk = count(counter, 0)


@kernel
def largest_entries(X, s, largest, rows, counter):  # type: ignore[no-untyped-def]
    """largest[c] <- the largest entry of |diag(s) X| by column, of chunk c of `rows` rows."""
    n, k = X.shape
    chunk = count(counter, 0)
    while chunk * rows < n:
        top = largest[chunk]
        for i in range(chunk * rows, min(n, (chunk + 1) * rows)):
            own = peek(s, i)
            for j in range(k):
                top[j] = max(top[j], abs(X[i, j]) * own)
        chunk = count(counter, 0)


@kernel
def halve(Z, s, up, G, rows, counter):  # type: ignore[no-untyped-def]
    """G <- diag(s) Z diag(up) in float16, in chunks of `rows` rows."""
    n, k = Z.shape
    lanes = VECTOR_BYTES // Z.itemsize
    quarter, whole = lanes // 4, k // lanes * lanes
    chunk = count(counter, 0)
    while chunk * rows < n:
        for i in range(chunk * rows, min(n, (chunk + 1) * rows)):
            f, q, at = splat(Z, peek(s, i)), splat_quarter(Z, peek(s, i)), i * k
            for j in range(0, whole, lanes):
                x = mul(load(Z, at + j, None), f)
                store_half(G, at + j, None, mul(x, load(up, j, None)))
            for j in range(whole, k - quarter + 1, quarter):
                x = mul(load_quarter(Z, at + j, None), q)
                store_half(G, at + j, None, mul(x, load_quarter(up, j, None)))
            for j in range(k // quarter * quarter, k):
                x = mul(load_quarter(Z, at + j, 1), q)
                store_half(G, at + j, 1, mul(x, load_quarter(up, j, 1)))
        chunk = count(counter, 0)
