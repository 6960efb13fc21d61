"""Arrays of the host on their way to the device, through pinned memory that is given back.

CuPy stages a whole array in pinned memory, rounded up to a power of two, and its pool keeps that
for good: 12.9 GB of X would hold 16 GB of the host.  Here a large array passes through two pinned
buffers of a fixed size; while one is being copied, threads of the host fill the other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array
from herta_gpu.plumbing.reading import fill

CHUNK_BYTES = 64 << 20  # of a buffer; what is smaller goes CuPy's way


def empty_pinned(xp: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Pinned host memory, beside CuPy's pool; ordinary memory where the system pins no more.

    A copy from ordinary memory makes the host wait, and is right all the same.
    """
    try:
        memory = xp.cuda.PinnedMemory(math.prod(shape) * np.dtype(dtype).itemsize)
    except xp.cuda.runtime.CUDARuntimeError:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, buffer=xp.cuda.PinnedMemoryPointer(memory, 0))


def is_large(x: Any) -> bool:
    """Whether an array of the host is worth the two buffers."""
    return x.nbytes > CHUNK_BYTES


def upload(xp: Any, x: Any, dtype: Any = None) -> Array:
    """`x` in C order on the device, as `dtype`, chunk by chunk on the current stream."""
    dtype = np.dtype(x.dtype if dtype is None else dtype)
    out, stream = xp.empty(x.shape, dtype=dtype), xp.cuda.get_current_stream()
    source, target = (x.reshape(-1), out.reshape(-1)) if x.flags.c_contiguous else (x, out)
    size = max(1, CHUNK_BYTES // (dtype.itemsize * math.prod(source.shape[1:])))
    size = min(size, source.shape[0])
    buffers = [empty_pinned(xp, (size, *source.shape[1:]), dtype) for _ in range(2)]
    copied = [xp.cuda.Event(disable_timing=True) for _ in buffers]
    for i, start in enumerate(range(0, source.shape[0], size)):
        part = source[start : start + size]
        copied[i % 2].synchronize()  # synchronize!  the copy before the last may still read it
        chunk = buffers[i % 2][: part.shape[0]]
        fill(chunk, part)
        target[start : start + size].set(chunk, stream=stream)
        copied[i % 2].record(stream)
    stream.synchronize()  # synchronize!  the buffers are given back now
    return out


def give_back_pinned(xp: Any) -> None:
    """Wait for the current stream, then free what CuPy's own uploads have pinned."""
    xp.cuda.get_current_stream().synchronize()  # synchronize!
    xp.get_default_pinned_memory_pool().free_all_blocks()
