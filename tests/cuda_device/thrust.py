"""In place of cupy.cuda.thrust, which holds compiled kernels: sorts in the device's memory.

It is imported under that name; `libthrust.so` of the build does the work, in the current stream.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.cuda_device.build import build

available = True
_library = ctypes.CDLL(str(build() / "libthrust.so"))
_pointer, _number = ctypes.c_void_p, ctypes.c_int64
for _function in (_library.device_sort, _library.device_lexsort):
    _function.argtypes = [ctypes.c_char, _pointer, _pointer, _number, _number, _pointer]


def get_build_version() -> int:
    return 300000


def sort(dtype: Any, data: int, keys: int, shape: Sequence[int]) -> None:
    _call(_library.device_sort, dtype, data, None, math.prod(shape[:-1]), shape[-1])


def argsort(dtype: Any, order: int, data: int, keys: int, shape: Sequence[int]) -> None:
    _call(_library.device_sort, dtype, data, order, math.prod(shape[:-1]), shape[-1])


def lexsort(dtype: Any, order: int, keys: int, count: int, n: int) -> None:
    _call(_library.device_lexsort, dtype, keys, order, count, n)


def _call(function: Any, dtype: Any, data: int, order: int | None, rows: int, n: int) -> None:
    import cupy

    stream = cupy.cuda.get_current_stream().ptr
    status = function(np.dtype(dtype).char.encode(), data, order, rows, n, stream)
    if status:
        raise RuntimeError(f"sorting {np.dtype(dtype)} ended with status {status}")
