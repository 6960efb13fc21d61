"""Philox-4x32-10: random numbers as a function of a counter and a key, without a state.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).  The CUDA
kernels hold the same generator in ``kernels/common.cuh``; the published test vectors are checked
for both.  `philox4x32` and `multiply_high` work on arrays of NumPy, and numba compiles
the same lines for one number at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
MASK, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Ten rounds on a counter, with a key: four words; all are 32 bits, held in uint64."""
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & MASK, (p0 >> _32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + _W0) & MASK, (k1 + _W1) & MASK
    return c0, c1, c2, c3


def multiply_high(a: Any, b: Any) -> Any:
    """floor(a b / 2^64) of uint64, which maps a random word a to 0, ..., b - 1."""
    a_lo, a_hi, b_lo, b_hi = a & MASK, a >> _32, b & MASK, b >> _32
    middle = a_hi * b_lo + ((a_lo * b_lo) >> _32)
    second = a_lo * b_hi + (middle & MASK)
    return a_hi * b_hi + (middle >> _32) + (second >> _32)


def seed_key(seed: int) -> tuple[np.uint64, np.uint64]:
    """The two key words of a 64-bit seed."""
    return np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)


def gaussians(
    row_lo: NDArray[Any], row_hi: NDArray[Any], k: int, seed: int, stream: int
) -> NDArray[np.float64]:
    """Standard normals, len(rows) x k: column j of a row is a function of (seed, row, j) alone.

    They come from uniform numbers of 24 bits by Box and Muller's formula.  float32 holds such
    numbers exactly, so that every backend starts from the same bits.
    """
    groups = np.arange(-(-k // 4), dtype=np.uint64)
    lo, hi = (x.astype(np.uint64)[:, None] for x in (row_lo, row_hi))
    words = philox4x32(lo, hi, groups[None, :], np.uint64(stream), *seed_key(seed))
    out = np.empty((row_lo.shape[0], groups.shape[0], 4))
    for pair in (0, 2):
        u1 = ((words[pair] >> np.uint64(8)) + np.uint64(1)).astype(np.float64) * 2.0**-24
        u2 = (words[pair + 1] >> np.uint64(8)).astype(np.float64) * 2.0**-24
        radius = np.sqrt(-2.0 * np.log(u1))
        out[:, :, pair] = radius * np.cos(2.0 * np.pi * u2)
        out[:, :, pair + 1] = radius * np.sin(2.0 * np.pi * u2)
    return out.reshape(row_lo.shape[0], 4 * groups.shape[0])[:, :k]


def words64(start: int, stop: int, seed: int, stream: int) -> NDArray[np.uint64]:
    """The random 64-bit words of a stream with the numbers start, ..., stop - 1."""
    index, zero = np.arange(start, stop, dtype=np.uint64), np.uint64(0)
    words = philox4x32(index & MASK, index >> _32, zero, np.uint64(stream), *seed_key(seed))
    return np.asarray((words[1] << _32) | words[0])
