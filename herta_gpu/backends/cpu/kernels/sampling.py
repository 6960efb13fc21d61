"""Scores and draws of edges, as in sampling.cu."""

import numpy as np
from numba import njit

from herta_gpu.backends.base import STREAM_SAMPLE
from herta_gpu.backends.cpu.kernels.simd import chunks, count, inline, kernel
from herta_gpu.backends.cpu.kernels.sketch import named, root_weight, word64
from herta_gpu.backends.cpu.philox import multiply_high

_CHUNK = 1 << 14  # draws that one thread takes at a time
_11 = np.uint64(11)
_multiply_high = inline(multiply_high)


@inline
def _upper(ids, i, v):  # type: ignore[no-untyped-def]
    """Whether row i holds the edge to v, and not v: the smaller one does, by `ids` if given."""
    return named(ids, v) > named(ids, i)


@kernel
def first_edges(indptr, indices, ids):  # type: ignore[no-untyped-def]
    """For each row the number of edges (lo, hi) with a smaller lo: where its scores start."""
    first = np.zeros(indptr.shape[0], np.int64)
    for i in range(indptr.shape[0] - 1):
        upper = 0
        for e in range(indptr[i], indptr[i + 1]):
            upper += _upper(ids, i, indices[e])
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
def edge_scores(scores, first, B_S, Pi_S, lam, L, ids, cuts, counter):  # type: ignore[no-untyped-def]
    indptr, indices, weights, s, _ = L
    for chunk in chunks(counter, cuts.shape[0] - 1):
        for i in range(cuts[chunk], cuts[chunk + 1]):
            at = first[i]
            for e in range(indptr[i], indptr[i + 1]):
                v = indices[e]
                if _upper(ids, i, v):
                    f = root_weight(weights, e)
                    a, b = f * s[i], f * s[v]
                    scores[at] = _squared(B_S, i, v, a, b) + _squared(Pi_S, i, v, a, b) / lam
                    at += 1


@kernel
def draw(q, prefix, total, guide, shift, s, counts, key, counter):  # type: ignore[no-untyped-def]
    """s draws with replacement among numbers that add up to `total`.

    `prefix` holds the sums of the q up to each edge, and `guide` where each range of targets starts
    in it.  Not all edges need be here: what falls between two of them is another's.
    """
    total = np.uint64(total)
    for chunk in chunks(counter, -(-s // _CHUNK)):
        for i in range(chunk * _CHUNK, min(s, (chunk + 1) * _CHUNK)):
            target = np.int64(_multiply_high(word64(i, key, STREAM_SAMPLE), total))
            edge = guide[target >> shift]
            while edge < q.shape[0] and prefix[edge] <= target:
                edge += 1
            if edge < q.shape[0] and prefix[edge] - q[edge] <= target:
                count(counts, edge)


@kernel
def bernoulli(p, factors, numbers, key, counter):  # type: ignore[no-untyped-def]
    """Edge i is kept with probability p[i]; its random word is that of its number."""
    for chunk in chunks(counter, -(-p.shape[0] // _CHUNK)):
        for i in range(chunk * _CHUNK, min(p.shape[0], (chunk + 1) * _CHUNK)):
            uniform = np.int64(word64(named(numbers, i), key, STREAM_SAMPLE) >> _11) * 2.0**-53
            factors[i] = 1.0 / p[i] if uniform < p[i] else 0.0
