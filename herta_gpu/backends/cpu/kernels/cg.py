"""The vectors of a step of block CG, as in cg.cu; `laplacian.apply` with dots comes before them."""

from numba import float64

from herta_gpu.backends.cpu.kernels.simd import (
    VECTOR_BYTES,
    add_product,
    chunks,
    fma,
    inline,
    kernel,
    lanes,
    load,
    mul,
    store,
    sub,
    vector,
)


@inline
def _residual_part(zero, R, HP, alpha, dots, at, j, into, n):  # type: ignore[no-untyped-def]
    r = sub(load(R, at, n, zero), mul(load(alpha, j, n, zero), load(HP, at, n, zero)))
    store(R, at, n, r)
    add_product(dots, into, n, r, r)


@inline
def _direction_part(zero, Z, P, R, alpha, beta, at, j, n):  # type: ignore[no-untyped-def]
    p = load(P, at, n, zero)
    store(Z, at, n, fma(load(alpha, j, n, zero), p, load(Z, at, n, zero)))
    store(P, at, n, fma(load(beta, j, n, zero), p, load(R, at, n, zero)))


@kernel
def cg_residual(R, HP, alpha, dots, rows, counter):  # type: ignore[no-untyped-def]
    """R -= alpha HP, and the squared column norms of R by chunk of `rows` rows."""
    (n, k), zero = R.shape, vector(R, VECTOR_BYTES, 1)
    size = lanes(zero)
    for chunk in chunks(counter, dots.shape[0]):
        for i in range(chunk * rows, min(n, (chunk + 1) * rows)):
            for j in range(0, k - size + 1, size):
                _residual_part(zero, R, HP, alpha, dots, i * k + j, j, chunk * k + j, None)
            j = k // size * size
            if j < k:
                _residual_part(zero, R, HP, alpha, dots, i * k + j, j, chunk * k + j, k - j)


@kernel
def cg_direction(Z, P, R, alpha, beta, rows, counter):  # type: ignore[no-untyped-def]
    """Z += alpha P; P = R + beta P: P is read once for both."""
    (n, k), zero = P.shape, vector(P, VECTOR_BYTES, 1)
    size = lanes(zero)
    for chunk in chunks(counter, -(-n // rows)):
        for i in range(chunk * rows, min(n, (chunk + 1) * rows)):
            for j in range(0, k - size + 1, size):
                _direction_part(zero, Z, P, R, alpha, beta, i * k + j, j, None)
            j = k // size * size
            if j < k:
                _direction_part(zero, Z, P, R, alpha, beta, i * k + j, j, k - j)


@kernel
def column_dots(X, Y, dots, rows, counter):  # type: ignore[no-untyped-def]
    """Column dots of X and Y by chunk of `rows` rows, in float64."""
    n, k = X.shape
    for chunk in chunks(counter, dots.shape[0]):
        sums = dots[chunk]
        for i in range(chunk * rows, min(n, (chunk + 1) * rows)):
            for j in range(k):
                sums[j] += float64(X[i, j]) * float64(Y[i, j])
