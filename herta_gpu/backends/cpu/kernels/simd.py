"""Explicit vectors for numba: values that stay in registers, with a mask for the remainder.

Left to itself the compiler keeps a sum over k columns in registers only when it knows k.  With
vectors of a fixed size, a row is so many whole ones and a masked one, whatever k is.
"""

# No `from __future__ import annotations`: numba reads the signatures of intrinsics at run time.
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

VECTOR_BYTES = 64  # one AVX-512 register, or two of AVX2
HALF = bool(llvm.get_host_cpu_features().get("f16c"))  # instructions for float16
REGISTER_BYTES = 64 if llvm.get_host_cpu_features().get("avx512f") else 32


def kernel(function: Any) -> Any:
    """Compile without the interpreter lock, and keep the code on disk where that is possible."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no directory to write to
        return numba.njit(nogil=True)(function)


inline = numba.njit(forceinline=True)  # constant arguments become constants of the caller's code


class Vec(types.Type):
    """So many numbers of one scalar type, held in registers."""

    def __init__(self, scalar: Any, lanes: int) -> None:
        self.scalar, self.lanes = scalar, lanes
        super().__init__(name=f"Vec({scalar} x {lanes})")


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _llvm(fe_type.scalar, fe_type.lanes))


def _llvm(scalar: Any, lanes: int) -> Any:
    """The vector as LLVM knows it; arrays of uint16 hold the bits of float16."""
    kind = {16: ir.IntType(16), 32: ir.FloatType(), 64: ir.DoubleType()}[scalar.bitwidth]
    return ir.VectorType(kind, lanes)


def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def _mask(builder: Any, lanes: int, n: Any) -> Any:
    """Lanes below n."""
    i32 = ir.IntType(32)
    count = _splat(builder, builder.trunc(n, i32), lanes)
    lane = ir.Constant(ir.VectorType(i32, lanes), list(range(lanes)))
    return builder.icmp_signed("<", lane, count)


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(value.type, lanes)
    zero = ir.IntType(32)(0)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, zero)
    order = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(first, first, order)


def _masked(builder: Any, name: str, result: Any, arguments: list[Any], vector: Any) -> Any:
    """Call of llvm.masked.load or store, whose names hold the vector's type."""
    kind = {2: "i16", 4: "f32", 8: "f64"}[_align(vector)]
    function = ir.FunctionType(result, [a.type for a in arguments])
    full = f"llvm.masked.{name}.v{vector.count}{kind}.p0"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, full), arguments)


def _read(builder: Any, pointer: Any, vector: Any, n: Any) -> Any:
    """The first n lanes, all if n is None."""
    pointer = builder.bitcast(pointer, vector.as_pointer())
    align = _align(vector)
    if n is None:
        return builder.load(pointer, align=align)
    mask = _mask(builder, vector.count, n)
    zeros = ir.Constant(vector, None)
    return _masked(builder, "load", vector, [pointer, ir.IntType(32)(align), mask, zeros], vector)


def _write(builder: Any, value: Any, pointer: Any, n: Any) -> None:
    """The first n lanes, all if n is None; masked only where needed: AMD takes 20 cycles for it."""
    vector = value.type
    pointer, align = builder.bitcast(pointer, vector.as_pointer()), _align(vector)
    if n is None:
        builder.store(value, pointer, align=align)
        return
    whole = builder.icmp_signed(">=", n, n.type(vector.count))
    with builder.if_else(whole, likely=True) as (then, otherwise):
        with then:
            builder.store(value, pointer, align=align)
        with otherwise:
            mask = _mask(builder, vector.count, n)
            parts = [value, pointer, ir.IntType(32)(align), mask]
            _masked(builder, "store", ir.VoidType(), parts, vector)


def _align(vector: Any) -> int:
    if isinstance(vector.element, ir.IntType):
        return 2
    return 4 if isinstance(vector.element, ir.FloatType) else 8


def _lanes_wanted(n: Any, value: Any) -> Any:
    """What `_read` and `_write` take, from the argument `n` of an intrinsic."""
    return None if isinstance(n, types.NoneType) else value


def _zeros(given: Any, vec: Vec) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_llvm(vec.scalar, vec.lanes), None)

    return vec(given), codegen


def _zeros_of_bytes(array: Any, size: int) -> Any:
    return _zeros(array, Vec(array.dtype, size * 8 // array.dtype.bitwidth))


@intrinsic
def vector(typing_context, array):  # type: ignore[no-untyped-def]
    """A vector of zeros, `VECTOR_BYTES` of the type of `array`."""
    return _zeros_of_bytes(array, VECTOR_BYTES)


@intrinsic
def quarter(typing_context, array):  # type: ignore[no-untyped-def]
    """One a quarter as long: its reads rarely straddle two cache lines."""
    return _zeros_of_bytes(array, VECTOR_BYTES // 4)


@intrinsic
def register(typing_context, array):  # type: ignore[no-untyped-def]
    """One register of this machine: for what needs many of them at once."""
    return _zeros_of_bytes(array, REGISTER_BYTES)


@intrinsic
def wide(typing_context, like):  # type: ignore[no-untyped-def]
    """As many zeros as the vector `like` has, in float64: several registers of it."""
    return _zeros(like, Vec(types.float64, like.lanes))


@intrinsic
def lanes(typing_context, like):  # type: ignore[no-untyped-def]
    """How many numbers a vector has, a constant."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.IntType(64)(like.lanes)

    return types.int64(like), codegen


@intrinsic
def load(typing_context, array, offset, n, like):  # type: ignore[no-untyped-def]
    """A vector like `like`: its first n lanes from array.flat[offset:], zeros behind them.

    All lanes if n is None.  Numbers of a narrower type are widened.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, array, args[0], args[1])
        stored = _llvm(array.dtype, like.lanes)
        value = _read(builder, pointer, stored, _lanes_wanted(n, args[2]))
        if array.dtype == types.uint16:
            value = builder.bitcast(value, ir.VectorType(ir.HalfType(), like.lanes))
        narrow = array.dtype.bitwidth < like.scalar.bitwidth
        return builder.fpext(value, _llvm(like.scalar, like.lanes)) if narrow else value

    return like(array, types.int64, n, like), codegen


@intrinsic
def store(typing_context, array, offset, n, value):  # type: ignore[no-untyped-def]
    """array.flat[offset : offset + n] = the first n lanes; all of them if n is None.

    What is wider than the array's numbers is rounded to them.  In float16 what is too large becomes
    the largest there is, and a NaN stays one.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, x = _address(context, builder, array, args[0], args[1]), args[3]
        if array.dtype == types.uint16:
            for sign, beyond in ((65504.0, ">"), (-65504.0, "<")):
                most = ir.Constant(x.type, [sign] * value.lanes)
                x = builder.select(builder.fcmp_ordered(beyond, x, most), most, x)
            half = builder.fptrunc(x, ir.VectorType(ir.HalfType(), value.lanes))
            x = builder.bitcast(half, _llvm(array.dtype, value.lanes))
        elif array.dtype.bitwidth < value.scalar.bitwidth:
            x = builder.fptrunc(x, _llvm(array.dtype, value.lanes))
        _write(builder, x, pointer, _lanes_wanted(n, args[2]))
        return context.get_dummy_value()

    return types.void(array, types.int64, n, value), codegen


@intrinsic
def splat(typing_context, number, like):  # type: ignore[no-untyped-def]
    """A vector like `like` of one number."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, context.cast(builder, args[0], number, like.scalar), like.lanes)

    return like(number, like), codegen


@intrinsic
def fma(typing_context, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c, in one rounding where the machine can."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = builder.fmul(args[0], args[1], flags=("contract",))
        return builder.fadd(product, args[2], flags=("contract",))

    return a(a, b, c), codegen


@intrinsic
def add(typing_context, a, b):  # type: ignore[no-untyped-def]
    return a(a, b), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def mul(typing_context, a, b):  # type: ignore[no-untyped-def]
    return a(a, b), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def sub(typing_context, a, b):  # type: ignore[no-untyped-def]
    return a(a, b), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def add_product(typing_context, sums, offset, n, a, b):  # type: ignore[no-untyped-def]
    """sums.flat[offset : offset + n] += a * b, in the float64 of `sums`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, sums, args[0], args[1])
        wide = ir.VectorType(ir.DoubleType(), a.lanes)
        x, y = args[3], args[4]
        if a.scalar.bitwidth == 32:
            x, y = builder.fpext(x, wide), builder.fpext(y, wide)
        lanes = _lanes_wanted(n, args[2])
        product = builder.fmul(x, y, flags=("contract",))
        total = builder.fadd(product, _read(builder, pointer, wide, lanes), flags=("contract",))
        _write(builder, total, pointer, lanes)
        return context.get_dummy_value()

    return types.void(sums, types.int64, n, a, b), codegen


@intrinsic
def peek(typing_context, array, i):  # type: ignore[no-untyped-def]
    """array[i] for an i that is known to be valid: no wrap-around, no check."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, array, args[0], args[1]))

    return array.dtype(array, types.int64), codegen


@intrinsic
def prefetch(typing_context, array, offset):  # type: ignore[no-untyped-def]
    """Ask for the cache line of array.flat[offset]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, array, args[0], args[1])
        pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
        hint = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
        builder.call(hint, [pointer, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@intrinsic
def count(typing_context, counter, i):  # type: ignore[no-untyped-def]
    """counter[i]++ for all threads at once; gives the old value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, counter, args[0], args[1])
        return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "monotonic")

    return types.int64(counter, types.int64), codegen


@numba.njit
def chunks(counter, total):  # type: ignore[no-untyped-def]
    """The chunks of 0..total-1 that fall to the thread that asks: each goes to one of them."""
    chunk = count(counter, 0)
    while chunk < total:
        yield chunk
        chunk = count(counter, 0)
