"""A stand-in for cupyx.scipy.sparse.csr_matrix: what `herta_gpu.features` needs of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import scipy.sparse as sp

from tests.cupy_standin.device_array import ndarray, unwrap
from tests.cupy_standin.ledger import LEDGER


class _Sparse(ABC):
    """CuPy's constructor, the same for all formats."""

    def __init__(
        self,
        arg1: Any,
        shape: Any = None,
        dtype: Any = None,
        copy: bool = False,
        *,
        maxprint: Any = None,
    ) -> None:
        self._take(arg1, shape)

    @abstractmethod
    def _take(self, arg1: Any, shape: Any) -> None:
        """Keep what the matrix is made from, as `_matrix`."""


class csr_matrix(_Sparse):  # noqa: N801 - CuPy's name
    """CSR on the device; products come in Fortran order, as cuSPARSE gives them."""

    def _take(self, arg1: Any, shape: Any) -> None:
        if isinstance(arg1, tuple):
            if not all(isinstance(part, ndarray) for part in arg1):
                raise ValueError("(data, indices, indptr) must be device arrays")
            self._matrix = sp.csr_matrix(tuple(part._data for part in arg1), shape=shape)
        elif sp.issparse(arg1):
            self._matrix = sp.csr_matrix(arg1.tocsr(), copy=True)
            for part in (self._matrix.data, self._matrix.indices, self._matrix.indptr):
                LEDGER.uploaded(part.nbytes)
        else:
            raise TypeError(f"Unsupported type {type(arg1)}")
        if self._matrix.dtype.char not in "?fdFD":
            raise ValueError(
                f"Only bool, float32, float64, ... are supported: {self._matrix.dtype}"
            )
        parts = (self._matrix.data, self._matrix.indices, self._matrix.indptr)
        self.data, self.indices, self.indptr = map(ndarray, parts)
        self._checked = False

    shape = property(lambda self: self._matrix.shape)
    dtype = property(lambda self: self._matrix.dtype)
    nnz = property(lambda self: self._matrix.nnz)

    def get(self, stream: Any = None) -> Any:
        parts = (self.data, self.indices, self.indptr)
        return sp.csr_matrix(tuple(part.get() for part in parts), shape=self.shape)

    def _like(self, matrix: Any) -> csr_matrix:
        parts = (matrix.data, matrix.indices, matrix.indptr)
        return csr_matrix(tuple(ndarray(part) for part in parts), shape=matrix.shape)

    def __matmul__(self, other: Any) -> ndarray:
        if not isinstance(other, ndarray):
            return NotImplemented
        if not self._checked:
            LEDGER.add("syncs")  # is it sorted and without duplicates?
            self._checked = True
        if not other.flags.f_contiguous:
            LEDGER.add("calls")
        LEDGER.add("calls")
        unwrap(self.data)  # it is read, too
        return ndarray(np.asfortranarray(self._matrix @ unwrap(other)))

    def __abs__(self) -> csr_matrix:
        LEDGER.add("calls")
        return self._like(abs(self._matrix))

    def __getitem__(self, key: Any) -> csr_matrix:
        if not isinstance(key, slice):
            raise TypeError("The stand-in slices rows only.")
        LEDGER.add("syncs")  # how many entries do they have?
        LEDGER.add("calls")
        return self._like(self._matrix[key])

    def toarray(self, order: Any = None, out: Any = None) -> ndarray:
        LEDGER.add("calls")
        return ndarray(self._matrix.toarray(order=order))


class coo_matrix(_Sparse):  # noqa: N801 - CuPy's name
    """Entries in any order; those of the same place add up in `tocsr`."""

    def _take(self, arg1: Any, shape: Any) -> None:
        data, (row, col) = arg1
        if not all(isinstance(part, ndarray) for part in (data, row, col)):
            raise ValueError("(data, (row, col)) must be device arrays")
        if data.dtype.char not in "?fdFD":
            raise ValueError(f"Only bool, float32, float64, ... are supported: {data.dtype}")
        ends = (unwrap(row), unwrap(col))
        self._matrix = sp.coo_matrix((unwrap(data), ends), shape=shape)

    def tocsr(self, copy: bool = False) -> csr_matrix:
        LEDGER.add("syncs")  # how many places are there?
        LEDGER.add("calls")
        found = self._matrix.tocsr()
        parts = (found.data, found.indices, found.indptr)
        return csr_matrix(tuple(ndarray(part) for part in parts), shape=found.shape)
