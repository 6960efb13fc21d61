"""The emulator itself: it refuses what a device would get wrong without a word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cuda_emulator import ORDERS, EmulatorError, compiler, load
from tests.cuda_emulator.launches import Emulated

if compiler() is None:
    pytest.skip("no g++: the kernels cannot be emulated", allow_module_level=True)

from tests.backends.cuda.kernel_checks import LAM, block, check_cg, laplacian, snippet

BROKEN = {
    "divergent barrier": "if (threadIdx.x < 3) { __syncthreads(); } else {\n __syncthreads(); }",
    "left the kernel": "if (threadIdx.x == 5) return; __syncthreads();",
    "has left": "if (threadIdx.x == 5) return; __syncwarp();",
    "not in the mask": "__syncwarp(0xff);",
    "outside the mask": "if (threadIdx.x < 8) out[0] = __shfl_sync(0xffu, 1, 9);",
    "divergent warp": "if (threadIdx.x & 1) { __syncwarp(); } else {\n __ballot_sync(~0u, 1); }",
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_collectives_fail_loudly(message: str) -> None:
    text = f'extern "C" __global__ void broken(int* out) {{ {BROKEN[message]} }}'
    for order in ORDERS:
        with pytest.raises(EmulatorError, match=f"{message}|deadlock"):
            snippet(text).launch("broken", (1,), (32,), (np.zeros(32, np.int32),), order)


def test_shared_memory_is_poisoned_before_each_block() -> None:
    text = """template <class T> __device__ T peek() {
        __shared__ T x[7];
        const T found = x[3];
        x[3] = 1;
        return found;
    }
    extern "C" __global__ void poison(double* out) { out[blockIdx.x] = peek<double>(); }"""
    out = np.zeros(3)
    snippet(text).launch("poison", (3,), (1,), (out,))
    assert np.isnan(out).all()


def test_portable_fibers_do_the_same() -> None:
    check_cg(Emulated("portable", segment=64), laplacian("hub", True, "float64"), 3, "float64")


def test_launches_with_wrong_arguments_are_refused() -> None:
    module, a = load("cg.cu"), np.ones((4, 4), np.float32)
    scalars = (np.int64(4), np.int64(4))
    good = (*scalars, a.copy(), a.copy(), a.copy(), np.ones(4), np.ones(4))

    def launch(*args: Any) -> None:
        module.launch("cg_direction_f32_v4", (1,), (1, 4), args)

    launch(*good)
    wrong: list[tuple[Any, ...]] = [
        good[:-1],
        (np.int32(4), *good[1:]),  # a 64-bit size sent as 32 bits
        (4.0, *good[1:]),
        (*good[:2], a.astype(float), *good[3:]),
        (*good[:3], a[:, ::-1], *good[4:]),  # a view: the pointer alone says nothing of strides
        (*good[:6], np.float64(1)),
    ]
    for args in wrong:
        with pytest.raises(EmulatorError):
            launch(*args)
    with pytest.raises(EmulatorError, match="at least 1"):
        module.launch("cg_direction_f32_v4", (0,), (1, 4), good)


def test_wrong_scalar_type_is_refused() -> None:
    L, X = laplacian("33", False, "float32"), block(33, 8, "float32")

    class Careless(Emulated):
        def launch(self, file: str, kernel: str, grid: Any, block: Any, *args: Any) -> None:
            super().launch(file, kernel, grid, block, *args[:7], float(args[7]), *args[8:])

    with pytest.raises(EmulatorError, match="argument 7: f4 got float64"):
        Careless().apply_H(L, LAM, X)
