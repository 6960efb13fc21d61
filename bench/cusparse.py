"""Products of cuSPARSE with row-major blocks: what the kernel `apply_H` is compared with.

CuPy's own product with a CSR matrix takes blocks by columns and chooses the algorithm itself.  For
rows, cuSPARSE recommends its second and its third algorithm, and the third one wants to look at the
matrix beforehand.  CuPy calls everything that is needed but that look.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array

ALGORITHMS = {"ALG2": 6, "ALG3": 12}  # CUSPARSE_SPMM_CSR_..., for which CuPy has no names
_LIBRARY = "libcusparse.so.12"  # with CUDA 12 and 13; CuPy has loaded it already
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int
# Handle, two operations, 1, the matrix, X, 0, Y, the type, the algorithm, a buffer.
_ARGUMENTS: Any = [_POINTER, *[_NUMBER] * 2, *[_POINTER] * 5, *[_NUMBER] * 2, _POINTER]


class RowMajorProduct:
    """Y <- M X for a CSR matrix and row-major blocks; called again and again.

    M, X and Y stay where they are; their numbers may change.
    """

    def __init__(self, xp: Any, M: Any, X: Array, Y: Array, algorithm: str) -> None:
        from cupy_backends.cuda.libs import cusparse  # needs the library itself

        assert X.flags.c_contiguous
        assert Y.flags.c_contiguous
        runtime, self._xp, self._cusparse = xp.cuda.runtime, xp, cusparse
        kind = {4: runtime.CUDA_R_32F, 8: runtime.CUDA_R_64F}[M.dtype.itemsize]
        index = {4: cusparse.CUSPARSE_INDEX_32I, 8: cusparse.CUSPARSE_INDEX_64I}
        parts = (M.indptr, M.indices, M.data)
        matrix = cusparse.createCsr(
            *(*M.shape, M.nnz, *(part.data.ptr for part in parts)),
            *(index[part.dtype.itemsize] for part in parts[:2]),
            *(cusparse.CUSPARSE_INDEX_BASE_ZERO, kind),
        )
        row, (x, y) = cusparse.CUSPARSE_ORDER_ROW, (X, Y)
        blocks = [cusparse.createDnMat(*b.shape, b.shape[1], b.data.ptr, kind, row) for b in (x, y)]
        weakref.finalize(self, _destroy, cusparse, matrix, blocks).atexit = False
        one, zero = np.ones(1, M.dtype), np.zeros(1, M.dtype)
        plain, handle = cusparse.CUSPARSE_OPERATION_NON_TRANSPOSE, xp.cuda.device
        ends = (one.ctypes.data, matrix, blocks[0], zero.ctypes.data, blocks[1])
        self._handle = handle.get_cusparse_handle()
        self._args = (self._handle, plain, plain, *ends, kind, ALGORITHMS[algorithm])
        size = cusparse.spMM_bufferSize(*self._args)
        self._held = (M, X, Y, one, zero)  # cuSPARSE has their addresses only
        self._buffer = xp.empty(max(size, 1), dtype="int8")
        self._look()

    def _look(self) -> None:
        """What cuSPARSE wants to know of the matrix goes into the buffer."""
        look = ctypes.CDLL(_LIBRARY).cusparseSpMM_preprocess
        look.argtypes = _ARGUMENTS
        self._cusparse.setStream(self._handle, self._xp.cuda.get_current_stream().ptr)
        status = look(*self._args, self._buffer.data.ptr)
        if status:
            raise RuntimeError(f"cusparseSpMM_preprocess ended with status {status}.")

    def __call__(self) -> None:
        self._cusparse.spMM(*self._args, self._buffer.data.ptr)


def _destroy(cusparse: Any, matrix: int, blocks: list[int]) -> None:
    cusparse.destroySpMat(matrix)
    for block in blocks:
        cusparse.destroyDnMat(block)
