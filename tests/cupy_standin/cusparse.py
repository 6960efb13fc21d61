"""A stand-in for the part of cuSPARSE that CuPy calls by addresses, on SciPy.

Arrays are found by their addresses alone, as on a device.  A product with the third algorithm and
no look at the matrix before, with another buffer, or after its descriptors are gone, raises.
"""

from __future__ import annotations

import ctypes
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse as sp

from tests.cuda_emulator import EmulatorError
from tests.cupy_standin.ledger import LEDGER

CUSPARSE_INDEX_32I, CUSPARSE_INDEX_64I, CUSPARSE_INDEX_BASE_ZERO = 2, 3, 0
CUSPARSE_ORDER_ROW, CUSPARSE_OPERATION_NON_TRANSPOSE = 2, 0
_HANDLE, _NEEDS_A_LOOK, _ALGORITHMS = 7, 12, (6, 12)
_KINDS = {0: np.float32, 1: np.float64}
_INDICES = {2: np.int32, 3: np.int64}

_made: dict[int, Any] = {}  # descriptors
_names = count(1000)
_looked: dict[tuple[Any, ...], int] = {}  # arguments of a product, and the buffer


def _at(address: int, size: int, dtype: Any) -> Any:
    if address % np.dtype(dtype).itemsize:
        raise EmulatorError(f"CUSPARSE_STATUS_INVALID_VALUE: {address} is not aligned")
    number = np.ctypeslib.as_ctypes_type(np.dtype(dtype))
    return np.ctypeslib.as_array((number * size).from_address(address))


def _described(thing: Any) -> int:
    name = next(_names)
    _made[name] = thing
    return name


def createCsr(
    rows: int,
    cols: int,
    nnz: int,
    csrRowOffsets: int,
    csrColind: int,
    csrValues: int,
    csrRowOffsetsType: int,
    csrColIndType: int,
    idxBase: int,
    valueType: int,
) -> int:
    indptr = _at(csrRowOffsets, rows + 1, _INDICES[csrRowOffsetsType])
    indices = _at(csrColind, nnz, _INDICES[csrColIndType])
    assert (indptr[0], indptr[-1], idxBase) == (0, nnz, 0)
    values = _at(csrValues, nnz, _KINDS[valueType])
    return _described(sp.csr_array((values, indices, indptr), shape=(rows, cols)))


def createDnMat(rows: int, cols: int, ld: int, values: int, valueType: int, order: int) -> int:
    if order != CUSPARSE_ORDER_ROW or ld != cols:
        raise EmulatorError("the stand-in takes dense blocks by rows only")
    return _described(_at(values, rows * cols, _KINDS[valueType]).reshape(rows, cols))


def destroySpMat(desc: int) -> None:
    del _made[desc]


def destroyDnMat(desc: int) -> None:
    del _made[desc]


def setStream(handle: int, stream: int) -> None:
    assert handle == _HANDLE


def spMM_bufferSize(
    handle: int,
    opA: int,
    opB: int,
    alpha: int,
    matA: int,
    matB: int,
    beta: int,
    matC: int,
    computeType: int,
    alg: int,
) -> int:
    assert (handle, opA, opB) == (_HANDLE, 0, 0)
    assert alg in _ALGORITHMS
    assert _made[matB].dtype == _made[matA].dtype == _made[matC].dtype == _KINDS[computeType]
    return 64


def spMM(
    handle: int,
    opA: int,
    opB: int,
    alpha: int,
    matA: int,
    matB: int,
    beta: int,
    matC: int,
    computeType: int,
    alg: int,
    externalBuffer: int,
) -> None:
    args = (handle, opA, opB, alpha, matA, matB, beta, matC, computeType, alg)
    if alg == _NEEDS_A_LOOK and _looked.get(args) != externalBuffer:
        raise EmulatorError("CUSPARSE_SPMM_CSR_ALG3 without cusparseSpMM_preprocess")
    LEDGER.add("calls")
    factors = [_at(address, 1, _KINDS[computeType])[0] for address in (alpha, beta)]
    Y = _made[matC]
    Y[...] = factors[0] * (_made[matA] @ _made[matB]) + factors[1] * Y


class _Look:
    """cusparseSpMM_preprocess, as ctypes finds it."""

    argtypes: list[Any]

    def __call__(self, *args: Any) -> int:
        if len(args) != len(self.argtypes):
            raise ctypes.ArgumentError(f"{len(args)} arguments")
        for value, kind in zip(args, self.argtypes, strict=True):
            kind.from_param(value)
        _looked[args[:-1]] = args[-1]
        return 0


def library(name: str) -> Any:
    """What ctypes.CDLL gives."""
    assert name.startswith("libcusparse.so.")
    return SimpleNamespace(cusparseSpMM_preprocess=_Look())
