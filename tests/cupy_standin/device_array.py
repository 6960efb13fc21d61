"""A device array: a NumPy array inside an object that the host cannot read by accident.

It refuses what CuPy refuses: implicit conversion to NumPy, NumPy operands, NumPy indices.  Whatever
would make a real device wait is counted in the ledger.
"""

from __future__ import annotations

import weakref
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.cuda_emulator import EmulatorError
from tests.cupy_standin.ledger import LEDGER
from tests.cupy_standin.streams import Clock, Stream, host_waited, order

_SCALARS = (bool, int, float, np.generic)


def unwrap(x: Any) -> Any:
    """The NumPy array inside a device array; scalars as they are; nothing else."""
    if isinstance(x, ndarray):
        return x._data
    if isinstance(x, _SCALARS):
        return x
    raise TypeError(f"Unsupported type {type(x)}: only device arrays and scalars may be operands.")


def wrap(x: Any) -> ndarray:
    return ndarray(np.asarray(x))


def call(function: Any, *args: Any, **kwargs: Any) -> ndarray:
    """One operation of CuPy: device arrays in, a device array out."""
    LEDGER.add("calls")
    LEDGER.swept += sum(a.nbytes for a in args if isinstance(a, ndarray))
    if kwargs.get("out") is not None:
        kwargs["out"] = unwrap(kwargs["out"])
        function(*map(unwrap, args), **kwargs)
        made = ndarray(kwargs["out"])
    else:
        made = wrap(function(*map(unwrap, args), **kwargs))
    LEDGER.swept += made.nbytes
    return made


allocator: list[Any] = []  # all memory comes from the last one
traces: list[list[tuple[int, int]]] = []  # who wants to know of allocations (pool.py)
_uses: dict[int, Clock] = {}  # which work used each piece of memory last
_places: dict[int, tuple[int, int, Any]] = {}  # address, bytes and a weak reference to each


def _memory(data: Any) -> Any:
    """The array that `data` is a view of."""
    while isinstance(data.base, np.ndarray):
        data = data.base
    return data


def _track(data: Any) -> None:
    """Count the memory behind `data`, once, until its last view is gone."""
    data = _memory(data)
    if id(data) not in _uses:
        if Stream.recording is not None:
            raise EmulatorError("memory is allocated while a stream captures")
        _uses[id(data)] = {}
        _places[id(data)] = (data.ctypes.data, data.nbytes, weakref.ref(data))
        order(_uses[id(data)])
        if data.base is None and allocator:  # not the memory of another library
            allocator[-1](data.nbytes)
        LEDGER.allocated(data.nbytes)
        for trace in traces:
            trace.append((id(data), data.nbytes))
        weakref.finalize(data, _forget, id(data), data.nbytes).atexit = False


def _forget(key: int, size: int) -> None:
    del _uses[key], _places[key]
    LEDGER.freed(size)
    for trace in traces:
        trace.append((key, -1))


def live(address: int, size: int) -> Any:
    """The memory of the device that holds these bytes, as an array; None: there is none."""
    for start, length, array in list(_places.values()):
        if start <= address and address + size <= start + length:
            return array()
    return None


def uses_of(memory: Any) -> Clock:
    return _uses[id(memory)]


def poison(data: Any) -> Any:
    """Fill fresh memory with NaN (77 in whole numbers): nothing may rely on its content."""
    data.fill(np.nan if data.dtype.kind == "f" else data.dtype.type(77))
    return data


_pinned: set[int] = set()


def pinned(data: Any) -> Any:
    """`data`, from now on memory that a copy can read while the host goes on."""
    _pinned.add(id(data))
    weakref.finalize(data, _pinned.discard, id(data)).atexit = False
    return data


def _index(key: Any, reading: bool) -> Any:
    if isinstance(key, tuple):
        return tuple(_index(k, reading) for k in key)
    if isinstance(key, ndarray):
        if key.dtype == bool and reading:
            LEDGER.add("syncs")  # the size of the result must be known
        return key._data
    if isinstance(key, list):  # CuPy makes an array of it on the device
        LEDGER.uploaded(8 * len(key))
        return key
    if key is None or key is Ellipsis or isinstance(key, (slice, int, np.integer)):
        return key
    raise TypeError(f"Unsupported index {type(key)}: index with device arrays.")


def _binary(name: str) -> Any:
    ufunc = getattr(np, name)

    def forward(self: ndarray, other: Any) -> Any:
        if not isinstance(other, (ndarray, np.ndarray, *_SCALARS)):
            return NotImplemented
        return call(ufunc, self, other)

    def backward(self: ndarray, other: Any) -> Any:
        if not isinstance(other, (ndarray, np.ndarray, *_SCALARS)):
            return NotImplemented
        return call(ufunc, other, self)

    def inplace(self: ndarray, other: Any) -> Any:
        call(ufunc, self, other, out=self)
        return self

    return forward, backward, inplace


class ndarray:  # noqa: N801 - CuPy's name
    """A stand-in for cupy.ndarray."""

    __array_priority__ = 100

    def __init__(self, data: Any) -> None:
        self._raw = data
        _track(data)

    @property
    def _data(self) -> Any:
        """What is inside, for work of the current stream."""
        order(_uses[id(_memory(self._raw))])
        return self._raw

    # ---- what NumPy would like to do with it --------------------------------------------
    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed: use .get().")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            raise TypeError(f"{ufunc.__name__}.{method} does not exist on the device.")
        return call(ufunc, *inputs, **kwargs)  # a NumPy scalar on the left, say

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} was called on a device array.")

    # ---- properties ---------------------------------------------------------------------
    shape = property(lambda self: self._raw.shape)
    dtype = property(lambda self: self._raw.dtype)
    ndim = property(lambda self: self._raw.ndim)
    size = property(lambda self: self._raw.size)
    nbytes = property(lambda self: self._raw.nbytes)
    itemsize = property(lambda self: self._raw.itemsize)
    strides = property(lambda self: self._raw.strides)
    flags = property(lambda self: self._raw.flags)
    data = property(lambda self: SimpleNamespace(ptr=self._raw.ctypes.data))
    T = property(lambda self: ndarray(self._raw.T))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self._raw.__array_interface__)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA

    def __dlpack__(
        self, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        return self._data.__dlpack__()

    def __len__(self) -> int:
        return len(self._raw)

    # ---- what waits for the device ------------------------------------------------------
    def get(
        self, stream: Any = None, order: str = "C", out: Any = None, blocking: Any = True
    ) -> Any:
        LEDGER.downloaded(self.nbytes)
        found = np.array(self._data, order=order)
        host_waited()
        return found

    def item(self) -> Any:
        LEDGER.downloaded(self.itemsize)
        found = self._data.item()
        host_waited()
        return found

    def tolist(self) -> Any:
        return self.get().tolist()

    def __float__(self) -> float:
        return float(self._single())

    def __int__(self) -> int:
        return int(self._single())

    def _single(self) -> Any:
        if self.ndim:  # NumPy 2.4, which CuPy asks, takes no array with axes
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
        return self.item()

    def __bool__(self) -> bool:
        return bool(self.item())

    # ---- indexing -----------------------------------------------------------------------
    def __getitem__(self, key: Any) -> ndarray:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(k, (ndarray, list)) for k in keys):
            LEDGER.add("calls")  # a gather; basic slices are views and cost nothing
            return wrap(self._data[_index(keys, reading=True)])
        if Ellipsis not in keys:
            keys = (*keys, Ellipsis)  # a single number, too, is a view
        return ndarray(self._raw[_index(keys, reading=True)])

    def __setitem__(self, key: Any, value: Any) -> None:
        LEDGER.add("calls")
        LEDGER.swept += 2 * value.nbytes if isinstance(value, ndarray) else 0
        self._data[_index(key, reading=False)] = unwrap(value)

    # ---- operators ----------------------------------------------------------------------
    __add__, __radd__, __iadd__ = _binary("add")
    __sub__, __rsub__, __isub__ = _binary("subtract")
    __mul__, __rmul__, __imul__ = _binary("multiply")
    __truediv__, __rtruediv__, __itruediv__ = _binary("true_divide")
    __floordiv__, __rfloordiv__, __ifloordiv__ = _binary("floor_divide")
    __mod__, __rmod__, __imod__ = _binary("remainder")
    __pow__, __rpow__, __ipow__ = _binary("power")
    __and__, __rand__, __iand__ = _binary("bitwise_and")
    __or__, __ror__, __ior__ = _binary("bitwise_or")
    __matmul__, __rmatmul__, _ = _binary("matmul")
    __lt__, __le__ = _binary("less")[0], _binary("less_equal")[0]
    __gt__, __ge__ = _binary("greater")[0], _binary("greater_equal")[0]
    __eq__, __ne__ = _binary("equal")[0], _binary("not_equal")[0]
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> ndarray:
        return call(np.negative, self)

    def __abs__(self) -> ndarray:
        return call(np.absolute, self)

    def __invert__(self) -> ndarray:
        return call(np.invert, self)

    # ---- methods, with CuPy's parameters ------------------------------------------------
    def astype(
        self,
        dtype: Any,
        order: str = "K",
        casting: Any = None,
        subok: Any = None,
        copy: bool = True,
    ) -> ndarray:
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return call(lambda a: a.astype(dtype, order=order), self)

    def copy(self, order: str = "C") -> ndarray:
        return call(lambda a: a.copy(order=order), self)

    def reshape(self, *shape: Any) -> ndarray:
        if not self._raw.flags.c_contiguous:
            LEDGER.add("calls")  # it takes a copy
            return ndarray(self._data.reshape(*shape))
        return ndarray(self._raw.reshape(*shape))

    def set(self, arr: Any, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray) or arr.dtype != self.dtype or arr.shape != self.shape:
            raise TypeError(f"{type(arr)} of another shape or type than the device array")
        if not (self.flags.c_contiguous and arr.flags.c_contiguous):
            raise RuntimeError("Only whole runs of memory are copied as they are.")
        LEDGER.uploaded(arr.nbytes)
        pinned = id(_memory(arr)) in _pinned
        if stream is None or stream is Stream.current:
            np.copyto(self._data, arr)  # whatever comes next on this stream sees it
            if pinned:
                Stream.current.reads(arr)
            return
        if not pinned and LEDGER.most_pinned == inf:
            raise TypeError("A copy from memory that is not pinned makes the host wait.")
        if not pinned:
            order(_uses[id(_memory(self._raw))], stream)
            np.copyto(self._raw, arr)
            stream.synchronize()
            return
        LEDGER.add("bytes_streamed", arr.nbytes)
        order(_uses[id(_memory(self._raw))], stream)
        poison(self._raw)
        stream.later(lambda: np.copyto(self._raw, arr))
        stream.reads(arr)

    def fill(self, value: Any) -> None:
        LEDGER.add("calls")
        self._data.fill(unwrap(value))

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> ndarray:
        return call(np.diagonal, self, offset=offset, axis1=axis1, axis2=axis2)

    def argmax(
        self, axis: Any = None, out: Any = None, dtype: Any = None, keepdims: bool = False
    ) -> ndarray:
        return call(np.argmax, self, axis=axis)

    def sum(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> ndarray:
        return call(np.sum, self, axis=axis, dtype=dtype, out=out, keepdims=keepdims)

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return call(np.max, self, axis=axis, out=out, keepdims=keepdims)

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return call(np.min, self, axis=axis, out=out, keepdims=keepdims)

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return call(np.any, self, axis=axis, out=out, keepdims=keepdims)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return call(np.all, self, axis=axis, out=out, keepdims=keepdims)
