"""Sketches on the device: the launches of hadamard.cu (Algorithm 1) and sketch.cu (Algorithm 2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from herta_gpu.backends.base import STREAM_ROWS, Array, Laplacian
from herta_gpu.backends.cuda.device import (
    NULL,
    THREADS,
    DeviceLaplacian,
    blocks,
    column_shape,
    hadamard_passes,
    pointer,
    suffix,
)

I32, I64, U32, U64 = np.int32, np.int64, np.uint32, np.uint64


class Sketches:
    """Random matrices times a graph or a block, without being stored."""

    def __init__(self, xp: Any, launch: Any) -> None:
        self.xp, self._launch = xp, launch

    def incidence(self, L: DeviceLaplacian, k: int, seed: int) -> Array:
        """`Backend.sketch_incidence`."""
        dtype, longs = L.inv_sqrt_degree.dtype, L.long_rows.shape[0]
        x, y, tiles = column_shape(-(-k // 4) * 4, 4)
        out = self.xp.empty((L.n, k), dtype=dtype)
        graph = (I64(L.n), I64(k), L.indptr, L.indices, pointer(L.weights), L.inv_sqrt_degree)
        long_rows = (I32(L.segment), I32(longs), L.long_rows)
        self._launch(
            "sketch.cu",
            f"sketch_incidence_{L.suffix}",
            grid=(longs + blocks(L.n, y), tiles),
            block=(x, y),
            args=(*graph, pointer(L.order), *long_rows, dtype.type(k**-0.5), U64(seed), out),
        )
        return out

    def identity(self, L: Laplacian, k: int, seed: int) -> Array:
        """`Backend.sketch_identity`."""
        dtype = L.inv_sqrt_degree.dtype
        x, y, tiles = column_shape(-(-k // 4) * 4, 4)
        out = self.xp.empty((L.n, k), dtype=dtype)
        self._launch(
            "sketch.cu",
            f"sketch_identity_{suffix(dtype)}",
            grid=(blocks(L.n, y), tiles),
            block=(x, y),
            args=(I64(L.n), I64(k), dtype.type(k**-0.5), U64(seed), out),
        )
        return out if L.order is None else out[L.order]

    def srht(self, Q: Array, s: int, seed: int) -> Array:
        """`Backend.srht`, a few butterfly levels a pass."""
        n, k = Q.shape
        out = self.xp.zeros((s, k), dtype=Q.dtype)
        if not Q.size:
            return out
        log_n = max(0, n - 1).bit_length()
        padded, passes = 1 << log_n, hadamard_passes(log_n)
        place = self._chosen_rows(padded, s, seed)
        work = self.xp.empty((padded, k), dtype=Q.dtype) if len(passes) > 1 else out
        done = 0
        for number, levels in enumerate(passes):
            first, last = number == 0, number == len(passes) - 1
            grid = (1 << (log_n - levels), -(-k * Q.itemsize // 64))
            sizes = (I64(n if first else padded), I64(k), I32(levels), I32(done), I32(first))
            ends = (Q if first else work, out if last else work, place if last else NULL)
            self._launch(
                "hadamard.cu",
                f"hadamard_{suffix(Q.dtype)}",
                grid=grid,
                block=(512,),
                args=(*sizes, U64(seed), *ends, Q.dtype.type(s**-0.5 if last else 1)),
            )
            done += levels
        return out

    def _chosen_rows(self, padded: int, s: int, seed: int) -> Array:
        """(padded,) the place of each chosen row among them, -1 for the others."""
        keys = self.xp.empty(padded, dtype=U64)
        arguments = (I64(padded), U32(STREAM_ROWS), U64(seed), keys)
        shape = {"grid": (blocks(padded, THREADS),), "block": (THREADS,)}
        self._launch("hadamard.cu", "random_words", **shape, args=arguments)
        place = self.xp.full(padded, -1, dtype=I64)
        place[self.xp.sort(self.xp.argsort(keys)[:s])] = self.xp.arange(
            s
        )  # CuPy's sorts are stable
        return place
