"""Philox counters and the Gaussian sketches of Algorithm 2, as in sketch.cu."""

import math

import numpy as np
from numba import njit

from herta_gpu.backends.base import STREAM_IDENTITY, STREAM_INCIDENCE
from herta_gpu.backends.cpu.kernels.simd import chunks, inline, kernel
from herta_gpu.backends.cpu.philox import MASK, philox4x32

_8, _32 = np.uint64(8), np.uint64(32)
_LN2, _TURN = math.log(2.0), 2.0 * math.pi


_philox = inline(philox4x32)


@inline
def word64(index, key, stream):  # type: ignore[no-untyped-def]
    i = np.uint64(index)
    w0, w1, _, _ = _philox(i & MASK, i >> _32, np.uint64(0), np.uint64(stream), key[0], key[1])
    return (w1 << _32) | w0


@njit
def _normals(lo, hi, groups, key, stream, u, turn, out):  # type: ignore[no-untyped-def]
    """out[: 4 * groups]: Box-Muller of a row, as `philox.gaussians`.

    Logarithm, sine and cosine are polynomials without branches, good to the last bit or two: the
    compiler turns these loops into vector code, which it cannot do with library calls.
    """
    bits = u.view(np.int64)
    for g in range(groups):
        w0, w1, w2, w3 = _philox(lo, hi, np.uint64(g), np.uint64(stream), key[0], key[1])
        u[g], u[groups + g] = np.int64(w0 >> _8) + 1, np.int64(w2 >> _8) + 1
        turn[g], turn[groups + g] = np.int64(w1 >> _8), np.int64(w3 >> _8)
    for t in range(2 * groups):
        # u = 2^e f with f in [0.7, 1.42): ln f = 2 atanh((f - 1) / (f + 1)).
        e = (bits[t] + 0x95F6400000000 >> 52) - 1023
        bits[t] -= e << 52
        z = (u[t] - 1.0) / (u[t] + 1.0)
        y = z * z
        p = 1 / 17 + y * (1 / 19 + y * (1 / 21))
        p = 1 / 9 + y * (1 / 11 + y * (1 / 13 + y * (1 / 15 + y * p)))
        p = 1 / 3 + y * (1 / 5 + y * (1 / 7 + y * p))
        u[t] = math.sqrt(-2.0 * ((e - 24) * _LN2 + 2.0 * (z + z * y * p)))
    for t in range(2 * groups):
        quarter = (turn[t] + (1 << 21)) >> 22
        a = (turn[t] - (quarter << 22)) * (_TURN / (1 << 24))  # within an eighth of a turn of 0
        y = a * a
        p = -1 / 39916800 + y * (1 / 6227020800 - y / 1307674368000)
        sine = a + a * y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880 + y * p))))
        p = -1 / 3628800 + y * (1 / 479001600 - y * (1 / 87178291200 - y / 20922789888000))
        cosine = 1.0 + y * (-0.5 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320 + y * p))))
        odd = (quarter & 1) == 1
        c, s = (sine, cosine) if odd else (cosine, sine)
        c = -c if ((quarter + 1) & 2) == 2 else c
        s = -s if (quarter & 2) == 2 else s
        at = 4 * t if t < groups else 4 * (t - groups) + 2
        out[at], out[at + 1] = u[t] * c, u[t] * s


@inline
def root_weight(weights, e):  # type: ignore[no-untyped-def]
    return math.sqrt(np.float64(weights[e if weights.shape[0] > 1 else 0]))


@inline
def named(names, row):  # type: ignore[no-untyped-def]
    """The name of a row; without a list of names they are the same."""
    return np.int64(row) if names is None else np.int64(names[row])


@kernel
def incidence_rows(out, L, order, key, cuts, counter):  # type: ignore[no-untyped-def]
    """Rows of (Pi_1 B_hat)^T.  Both ends of an edge draw it: twice the draws, no conflicts."""
    indptr, indices, weights, s, _ = L
    k = out.shape[1]
    groups = (k + 3) // 4
    u, turn = np.empty(2 * groups), np.empty(2 * groups, np.int64)
    normal, total = np.empty(4 * groups), np.empty(4 * groups)
    for chunk in chunks(counter, cuts.shape[0] - 1):
        for i in range(cuts[chunk], cuts[chunk + 1]):
            total[:] = 0.0
            node = named(order, i)
            for e in range(indptr[i], indptr[i + 1]):
                v = named(order, indices[e])
                lo, hi = np.uint64(min(node, v)), np.uint64(max(node, v))
                _normals(lo, hi, groups, key, STREAM_INCIDENCE, u, turn, normal)
                f = root_weight(weights, e)
                f = f if v > node else -f
                for j in range(4 * groups):
                    total[j] += f * normal[j]
            f = s[i] / math.sqrt(k)
            for j in range(k):
                out[i, j] = f * total[j]


@kernel
def identity_rows(out, L, order, key, cuts, counter):  # type: ignore[no-untyped-def]
    k = out.shape[1]
    groups = (k + 3) // 4
    u, turn, normal = np.empty(2 * groups), np.empty(2 * groups, np.int64), np.empty(4 * groups)
    for chunk in chunks(counter, cuts.shape[0] - 1):
        for i in range(cuts[chunk], cuts[chunk + 1]):
            node = np.uint64(named(order, i))
            _normals(node & MASK, node >> _32, groups, key, STREAM_IDENTITY, u, turn, normal)
            for j in range(k):
                out[i, j] = normal[j] / math.sqrt(k)
