"""Philox-4x32-10 in NumPy: random numbers as a function of a counter and a key, without a state.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).  The CUDA
kernels hold the same generator in ``kernels/common.cuh``; the published test vectors are checked
for both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int]
) -> tuple[NDArray[np.uint64], ...]:
    """Ten rounds of Philox on broadcast counters: four words of 32 bits each, held in uint64."""
    c0, c1, c2, c3 = (
        np.asarray(c, dtype=np.uint64) for c in np.broadcast_arrays(*counter, subok=False)
    )
    k0, k1 = int(key[0]) & 0xFFFFFFFF, int(key[1]) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> _32) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> _32) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def seed_key(seed: int) -> tuple[int, int]:
    """The two key words of a 64-bit seed."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def gaussians(
    row_lo: NDArray[np.integer], row_hi: NDArray[np.integer], k: int, seed: int, stream: int
) -> NDArray[np.float64]:
    """Standard normals, len(rows) x k: column j of a row is a function of (seed, row, j) alone.

    They come from uniform numbers of 24 bits by Box and Muller's formula.  float32 holds such
    numbers exactly, so that every backend starts from the same bits.
    """
    groups = -(-k // 4)
    words = philox4x32(
        (row_lo[:, None], row_hi[:, None], np.arange(groups)[None, :], np.uint64(stream)),
        seed_key(seed),
    )
    out = np.empty((row_lo.shape[0], groups, 4))
    for pair in (0, 2):
        u1 = ((words[pair] >> np.uint64(8)) + np.uint64(1)).astype(np.float64) * 2.0**-24
        u2 = (words[pair + 1] >> np.uint64(8)).astype(np.float64) * 2.0**-24
        radius = np.sqrt(-2.0 * np.log(u1))
        out[:, :, pair] = radius * np.cos(2.0 * np.pi * u2)
        out[:, :, pair + 1] = radius * np.sin(2.0 * np.pi * u2)
    return out.reshape(row_lo.shape[0], 4 * groups)[:, :k]


def words64(start: int, stop: int, seed: int, stream: int) -> NDArray[np.uint64]:
    """The random 64-bit words of a stream with the numbers start, ..., stop - 1."""
    index = np.arange(start, stop, dtype=np.uint64)
    w0, w1, _, _ = philox4x32((index & _MASK, index >> _32, 0, stream), seed_key(seed))
    return (w1 << _32) | w0


def multiply_high(a: NDArray[np.uint64], b: int) -> NDArray[np.uint64]:
    """floor(a b / 2^64), which maps a random word a to 0, ..., b - 1."""
    a_lo, a_hi = a & _MASK, a >> _32
    b_lo, b_hi = np.uint64(b & 0xFFFFFFFF), np.uint64(b >> 32)
    middle = a_hi * b_lo + ((a_lo * b_lo) >> _32)
    middle2 = a_lo * b_hi + (middle & _MASK)
    return a_hi * b_hi + (middle >> _32) + (middle2 >> _32)
