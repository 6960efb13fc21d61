"""Compiled kernels: random numbers, and what Algorithm 2 does with each edge."""

import math

import numpy as np
from numba import njit

from herta_gpu.backends.base import (
    STREAM_IDENTITY,
    STREAM_INCIDENCE,
    STREAM_ROWS,
    STREAM_SAMPLE,
    STREAM_SIGNS,
)
from herta_gpu.backends.simd import count, inline, kernel

_CHUNK = 1 << 14  # draws that one thread takes at a time
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_MASK, _8, _32 = np.uint64(0xFFFFFFFF), np.uint64(8), np.uint64(32)
_LN2, _TURN = math.log(2.0), 2.0 * math.pi


@inline
def _philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """Philox-4x32-10, word for word as in `philox.py`."""
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _MASK, (p0 >> _32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@inline
def _word64(index, key, stream):  # type: ignore[no-untyped-def]
    i = np.uint64(index)
    w0, w1, _, _ = _philox(i & _MASK, i >> _32, np.uint64(0), np.uint64(stream), key[0], key[1])
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
def _root_weight(weights, e):  # type: ignore[no-untyped-def]
    return math.sqrt(np.float64(weights[e if weights.shape[0] > 1 else 0]))


@kernel
def incidence_rows(out, L, key, cuts, counter):  # type: ignore[no-untyped-def]
    """Rows of (Pi_1 B_hat)^T.  Both ends of an edge draw it: twice the draws, no conflicts."""
    indptr, indices, weights, s, _ = L
    k = out.shape[1]
    groups = (k + 3) // 4
    u, turn = np.empty(2 * groups), np.empty(2 * groups, np.int64)
    normal, total = np.empty(4 * groups), np.empty(4 * groups)
    chunk = count(counter, 0)
    while chunk < cuts.shape[0] - 1:
        for i in range(cuts[chunk], cuts[chunk + 1]):
            total[:] = 0.0
            for e in range(indptr[i], indptr[i + 1]):
                v = np.int64(indices[e])
                lo, hi = np.uint64(min(i, v)), np.uint64(max(i, v))
                _normals(lo, hi, groups, key, STREAM_INCIDENCE, u, turn, normal)
                f = _root_weight(weights, e)
                f = f if v > i else -f
                for j in range(4 * groups):
                    total[j] += f * normal[j]
            f = s[i] / math.sqrt(k)
            for j in range(k):
                out[i, j] = f * total[j]
        chunk = count(counter, 0)


@kernel
def identity_rows(out, L, key, cuts, counter):  # type: ignore[no-untyped-def]
    k = out.shape[1]
    groups = (k + 3) // 4
    u, turn, normal = np.empty(2 * groups), np.empty(2 * groups, np.int64), np.empty(4 * groups)
    chunk = count(counter, 0)
    while chunk < cuts.shape[0] - 1:
        for i in range(cuts[chunk], cuts[chunk + 1]):
            node = np.uint64(i)
            _normals(node & _MASK, node >> _32, groups, key, STREAM_IDENTITY, u, turn, normal)
            for j in range(k):
                out[i, j] = normal[j] / math.sqrt(k)
        chunk = count(counter, 0)


@kernel
def first_edges(indptr, indices):  # type: ignore[no-untyped-def]
    """For each row the number of edges (lo, hi) with a smaller lo: where its scores start."""
    first = np.zeros(indptr.shape[0], np.int64)
    for i in range(indptr.shape[0] - 1):
        upper = 0
        for e in range(indptr[i], indptr[i + 1]):
            upper += indices[e] > i
        first[i + 1] = first[i] + upper
    return first


@njit(fastmath={"reassoc", "contract"})
def _squared(S, u, v, a, b):  # type: ignore[no-untyped-def]
    """||a S[u] - b S[v]||^2; the sum may be split over the lanes of a vector."""
    total = 0.0
    for j in range(S.shape[1]):
        d = a * S[u, j] - b * S[v, j]
        total += d * d
    return total


@kernel
def edge_scores(scores, first, B_S, Pi_S, lam, L, cuts, counter):  # type: ignore[no-untyped-def]
    indptr, indices, weights, s, _ = L
    chunk = count(counter, 0)
    while chunk < cuts.shape[0] - 1:
        for i in range(cuts[chunk], cuts[chunk + 1]):
            at = first[i]
            for e in range(indptr[i], indptr[i + 1]):
                v = indices[e]
                if v > i:
                    f = _root_weight(weights, e)
                    a, b = f * s[i], f * s[v]
                    scores[at] = _squared(B_S, i, v, a, b) + _squared(Pi_S, i, v, a, b) / lam
                    at += 1
        chunk = count(counter, 0)


@kernel
def draw(prefix, guide, shift, s, counts, key, counter):  # type: ignore[no-untyped-def]
    """s draws with replacement; `guide` holds where each range of targets starts in `prefix`."""
    total = np.uint64(prefix[-1])
    b_lo, b_hi = total & _MASK, total >> _32
    chunk = count(counter, 0)
    while chunk * _CHUNK < s:
        for i in range(chunk * _CHUNK, min(s, (chunk + 1) * _CHUNK)):
            word = _word64(i, key, STREAM_SAMPLE)
            low, high = word & _MASK, word >> _32  # floor(word * total / 2^64)
            middle = high * b_lo + ((low * b_lo) >> _32)
            second = low * b_hi + (middle & _MASK)
            target = np.int64(high * b_hi + (middle >> _32) + (second >> _32))
            edge = guide[target >> shift]
            while prefix[edge] <= target:
                edge += 1
            count(counts, edge)
        chunk = count(counter, 0)


@kernel
def bernoulli(p, factors, key, counter):  # type: ignore[no-untyped-def]
    chunk = count(counter, 0)
    while chunk * _CHUNK < p.shape[0]:
        for i in range(chunk * _CHUNK, min(p.shape[0], (chunk + 1) * _CHUNK)):
            uniform = np.int64(_word64(i, key, STREAM_SAMPLE) >> np.uint64(11)) * 2.0**-53
            factors[i] = 1.0 / p[i] if uniform < p[i] else 0.0
        chunk = count(counter, 0)


@kernel
def signed_rows(Q, Y, keys, key, counter):  # type: ignore[no-untyped-def]
    """Y <- R Q padded with zeros, and the random keys by which rows are chosen."""
    n, k = Q.shape
    rows = max(1, _CHUNK // max(k, 1))
    chunk = count(counter, 0)
    while chunk * rows < Y.shape[0]:
        for i in range(chunk * rows, min(Y.shape[0], (chunk + 1) * rows)):
            keys[i] = _word64(i, key, STREAM_ROWS)
            if i < n:
                if _word64(i, key, STREAM_SIGNS) & np.uint64(1):
                    Y[i] = -Q[i]
                else:
                    Y[i] = Q[i]
            else:
                Y[i] = 0
        chunk = count(counter, 0)
