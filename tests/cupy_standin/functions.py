"""The functions of cupy and cupyx that the backend uses, with CuPy's parameters.

`tests/backends/cuda/test_cuda.py` compares every name and signature here with the installed CuPy.
To use another function of CuPy, add it here: a name that is missing raises AttributeError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.linalg

from tests.cuda_emulator import EmulatorError
from tests.cupy_standin.device_array import allocator as asked
from tests.cupy_standin.device_array import call, ndarray, pinned, poison, unwrap, wrap
from tests.cupy_standin.ledger import LEDGER

inf = np.inf
UFUNCS = (
    "sqrt", "exp", "log", "exp2", "log2", "floor", "maximum", "minimum", "subtract", "multiply",
    "divide", "isfinite", "log1p",
)  # fmt: skip


def ufunc(name: str) -> Any:
    function = getattr(np, name)

    def run(*args: Any, out: Any = None) -> ndarray:
        return call(function, *args, out=out)

    return run


# ---- making arrays ----------------------------------------------------------------------------


def asarray(
    a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False
) -> ndarray:
    if isinstance(a, ndarray):
        made = np.asarray(a._raw, dtype=dtype, order=order)
        if made is a._raw:
            return a
        LEDGER.add("calls")
        return ndarray(np.asarray(a._data, dtype=dtype, order=order))
    if hasattr(a, "__cuda_array_interface__"):  # of another library: no copy
        holder = SimpleNamespace(__array_interface__=a.__cuda_array_interface__, keep=a)
        return asarray(ndarray(np.asarray(holder)), dtype, order)
    made = np.array(a, dtype=dtype, order=order)
    if made.dtype.kind not in "biuf":
        raise ValueError(f"Unsupported dtype {made.dtype}")
    LEDGER.uploaded(made.nbytes)
    LEDGER.staged += 1 << (made.nbytes - 1).bit_length() if made.nbytes else 0
    return ndarray(made)


def from_dlpack(array: Any, *, device: Any = None, copy: Any = None) -> ndarray:
    # The tensor is an imitation: NumPy can take its memory for the host's.
    holder = SimpleNamespace(__dlpack__=array.__dlpack__, __dlpack_device__=lambda: (1, 0))
    return ndarray(np.from_dlpack(holder))


def asnumpy(
    a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True
) -> Any:
    return a.get(order=order) if isinstance(a, ndarray) else np.asarray(a)


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(poison(np.empty(shape, dtype=dtype, order=order)))


def set_allocator(allocator: Any = None) -> None:
    asked[:] = [allocator or (lambda size: None)]


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class PinnedMemory:
    """Host memory that a copy can read while the host goes on."""

    def __init__(self, size: int, flags: int = 0) -> None:
        if not LEDGER.may_pin(size):
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.bytes = pinned(np.full(size, 0xFF, np.uint8))  # NaN, read as floats


def PinnedMemoryPointer(mem: PinnedMemory, offset: int) -> Any:
    return mem.bytes[offset:]


def empty_like(
    prototype: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> ndarray:
    like = prototype._raw  # its values are not read
    return ndarray(poison(np.empty_like(like, dtype=dtype, order=order, shape=shape)))


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    LEDGER.add("calls")
    return ndarray(np.zeros(shape, dtype=dtype, order=order))


def zeros_like(
    a: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> ndarray:
    return call(np.zeros_like, a, dtype=dtype, order=order, shape=shape)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    LEDGER.add("calls")
    return ndarray(np.ones(shape, dtype=dtype, order=order))


def eye(N: int, M: int | None = None, k: int = 0, dtype: Any = float, order: str = "C") -> ndarray:
    LEDGER.add("calls")
    return ndarray(np.eye(N, M, k, dtype=dtype, order=order))


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    LEDGER.add("calls")
    return ndarray(np.full(shape, unwrap(fill_value), dtype=dtype, order=order))


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    LEDGER.add("calls")
    ends = (0, start) if stop is None else (start, stop)
    return ndarray(np.arange(*ends, step, dtype=dtype))


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    if not isinstance(a, ndarray):
        raise TypeError(f"Argument 'a' has incorrect type (expected ndarray, got {type(a)})")
    return asarray(a if a.ndim else a.reshape(1), dtype=dtype, order="C")  # as CuPy does


# ---- working on arrays ------------------------------------------------------------------------


def where(condition: Any, x: Any = None, y: Any = None) -> ndarray:
    if x is None:
        raise TypeError("where(condition) makes the host wait: say nonzero.")
    return call(np.where, condition, x, y)


def clip(a: Any, a_min: Any, a_max: Any, out: Any = None) -> ndarray:
    return call(np.clip, a, a_min, a_max, out=out)


def take(a: Any, indices: Any, axis: Any = None, out: Any = None) -> ndarray:
    return call(lambda x, i: np.take(x, i, axis=axis), a, indices)


def concatenate(
    tup: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind"
) -> ndarray:
    return call(lambda *parts: np.concatenate(parts, axis=axis), *tup)


def stack(
    tup: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind"
) -> ndarray:
    return call(lambda *parts: np.stack(parts, axis=axis), *tup)


def diag(v: Any, k: int = 0) -> ndarray:
    return ndarray(np.diag(unwrap(v), k)) if v.ndim == 2 else call(np.diag, v, k)


def diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> ndarray:
    return call(lambda x: np.diff(x, n, axis), a)


def flatnonzero(a: Any) -> ndarray:
    LEDGER.add("syncs")  # the size of the result must be known
    return call(np.flatnonzero, a)


def bincount(x: Any, weights: Any = None, minlength: Any = None) -> ndarray:
    LEDGER.add("syncs")  # the largest decides on the size
    if weights is None:
        return call(lambda a: np.bincount(a, minlength=minlength or 0), x)
    return call(lambda a, w: np.bincount(a, w, minlength or 0), x, weights)


def cumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> ndarray:
    return call(np.cumsum, a, axis=axis, dtype=dtype, out=out)


def searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> ndarray:
    return call(lambda x, y: np.searchsorted(x, y, side), a, v)


def tril(m: Any, k: int = 0) -> ndarray:
    return call(np.tril, m, k)


def sort(a: Any, axis: int = -1, kind: Any = None) -> ndarray:
    return call(lambda x: np.sort(x, axis=axis, kind="stable"), a)


def argsort(a: Any, axis: int = -1, kind: Any = None) -> ndarray:
    return call(lambda x: np.argsort(x, axis=axis, kind="stable"), a)


def argmax(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
) -> ndarray:
    return call(np.argmax, a, axis=axis)


def argmin(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
) -> ndarray:
    return call(np.argmin, a, axis=axis)


def count_nonzero(a: Any, axis: Any = None) -> ndarray:
    return call(np.count_nonzero, a, axis=axis)


def sum(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
) -> ndarray:
    return call(np.sum, a, axis=axis, dtype=dtype, out=out, keepdims=keepdims)


def mean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
) -> ndarray:
    return call(np.mean, a, axis=axis, dtype=dtype, out=out, keepdims=keepdims)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    assert kind == 3  # between addresses of the device
    ctypes.memmove(dst, src, size)


# ---- linear algebra ---------------------------------------------------------------------------


def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> ndarray:
    return call(np.linalg.norm, x, ord=ord, axis=axis, keepdims=keepdims)


def eigh(a: Any, UPLO: str = "L") -> tuple[ndarray, ndarray]:
    LEDGER.add("calls")
    values, vectors = np.linalg.eigh(unwrap(a), UPLO=UPLO)
    return ndarray(values), ndarray(np.asfortranarray(vectors))


def qr(a: Any, mode: str = "reduced") -> Any:
    LEDGER.add("calls")
    found = np.linalg.qr(unwrap(a), mode=mode)  # type: ignore[call-overload]
    return ndarray(found) if mode == "r" else tuple(ndarray(part) for part in found)


def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True) -> tuple[ndarray, ...]:
    LEDGER.add("calls")
    return tuple(ndarray(part) for part in np.linalg.svd(unwrap(a), full_matrices=full_matrices))


def solve(a: Any, b: Any) -> ndarray:
    return call(np.linalg.solve, a, b)


def inv(a: Any) -> ndarray:
    return call(np.linalg.inv, a)


_linalg_errors = ["ignore"]


@contextmanager
def errstate(
    *,
    divide: Any = None,
    over: Any = None,
    under: Any = None,
    invalid: Any = None,
    linalg: Any = None,
) -> Iterator[None]:
    _linalg_errors.append(linalg or _linalg_errors[-1])
    try:
        yield
    finally:
        _linalg_errors.pop()


def cholesky(a: Any) -> ndarray:
    LEDGER.add("calls")
    watched = _linalg_errors[-1] == "raise"
    if watched:
        LEDGER.add("syncs")
    try:
        return wrap(np.linalg.cholesky(unwrap(a)))
    except np.linalg.LinAlgError:
        if watched:
            raise
        return wrap(np.tril(unwrap(a)))  # as cuSOLVER leaves it: half done, and without an error


def solve_triangular(
    a: Any,
    b: Any,
    trans: Any = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    overwrite_b: bool = False,
    check_finite: bool = False,
) -> ndarray:
    LEDGER.add("calls")
    if not a.size or not b.size:
        raise EmulatorError("CUBLAS_STATUS_INVALID_VALUE")  # SciPy takes an empty matrix
    found = scipy.linalg.solve_triangular(
        unwrap(a), unwrap(b), trans, lower, unit_diagonal, check_finite=False
    )
    return ndarray(np.array(found, order="F"))  # cuBLAS counts by columns
