"""The Walsh-Hadamard transform, as in hadamard.cu."""

import numpy as np

from herta_gpu.backends.cpu.kernels.simd import (
    add,
    chunks,
    inline,
    kernel,
    lanes,
    load,
    mul,
    register,
    splat,
    store,
    sub,
)

HADAMARD_BYTES = 512  # bytes of each row that one task of the transform works on ...
HADAMARD_BITS = 9  # ... and log2 of its rows: 256 KB, which an L2 cache holds


@inline
def _butterfly(radix, src, at, step, dst, into, stride, n, scale):  # type: ignore[no-untyped-def]
    """The transform of 2, 4 or 8 vectors `step` apart, in registers; `radix` is a constant."""
    a, b = load(src, at, n, scale), load(src, at + step, n, scale)
    a, b = add(a, b), sub(a, b)
    if radix > 2:
        c, d = load(src, at + 2 * step, n, scale), load(src, at + 3 * step, n, scale)
        c, d = add(c, d), sub(c, d)
        a, b, c, d = add(a, c), add(b, d), sub(a, c), sub(b, d)
        if radix > 4:
            e, f = load(src, at + 4 * step, n, scale), load(src, at + 5 * step, n, scale)
            g, h = load(src, at + 6 * step, n, scale), load(src, at + 7 * step, n, scale)
            e, f, g, h = add(e, f), sub(e, f), add(g, h), sub(g, h)
            e, f, g, h = add(e, g), add(f, h), sub(e, g), sub(f, h)
            store(dst, into + 4 * stride, n, mul(sub(a, e), scale))
            store(dst, into + 5 * stride, n, mul(sub(b, f), scale))
            store(dst, into + 6 * stride, n, mul(sub(c, g), scale))
            store(dst, into + 7 * stride, n, mul(sub(d, h), scale))
            a, b, c, d = add(a, e), add(b, f), add(c, g), add(d, h)
        store(dst, into + 2 * stride, n, mul(c, scale))
        store(dst, into + 3 * stride, n, mul(d, scale))
    store(dst, into, n, mul(a, scale))
    store(dst, into + stride, n, mul(b, scale))


@inline
def _stage(radix, span, size, src, base, row, dst, base2, row2, width, scale):  # type: ignore[no-untyped-def]
    """One radix-2, -4 or -8 stage over `size` rows of `width` columns."""
    f = splat(scale, register(src))
    wide, step, stride = lanes(f), span * row, span * row2
    for block in range(0, size, span * radix):
        for i in range(block, block + span):
            at, into = base + i * row, base2 + i * row2
            for c in range(0, width - wide + 1, wide):
                _butterfly(radix, src, at + c, step, dst, into + c, stride, None, f)
            c = width // wide * wide
            if c < width:
                _butterfly(radix, src, at + c, step, dst, into + c, stride, width - c, f)


@kernel
def hadamard_pass(Y, run, bits, scale, counter):  # type: ignore[no-untyped-def]
    """Y.flat seen as (.., 2^bits, run), transformed along the middle axis, times `scale`.

    A tile of columns is read once, worked on in a buffer that fits the L2 cache, written once.
    """
    tile = HADAMARD_BYTES // Y.itemsize
    tiles, size = (run + tile - 1) // tile, 1 << bits
    buffer = np.empty(size * tile, Y.dtype)
    for task in chunks(counter, Y.size // (run * size) * tiles):
        base = task // tiles * size * run + task % tiles * tile
        width = min(tile, run - task % tiles * tile)
        done = 0
        while done < bits:
            step = min(3, bits - done)
            src, b1, r1 = (Y, base, run) if done == 0 else (buffer, 0, tile)
            last = done + step == bits
            dst, b2, r2 = (Y, base, run) if last else (buffer, 0, tile)
            f = scale if last else 1.0
            if step == 3:
                _stage(8, 1 << done, size, src, b1, r1, dst, b2, r2, width, f)
            elif step == 2:
                _stage(4, 1 << done, size, src, b1, r1, dst, b2, r2, width, f)
            else:
                _stage(2, 1 << done, size, src, b1, r1, dst, b2, r2, width, f)
            done += step
