"""Explicit vectors for numba: values that stay in registers, with a mask for the remainder.

Left to itself the compiler keeps a sum over k columns in registers only when it knows k.  With
vectors of a fixed size, a row is so many whole ones and a masked one, whatever k is.
"""

# No `from __future__ import annotations`: numba reads the signatures of intrinsics at run time.
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils, event
from numba.extending import intrinsic, models, register_model

from herta_gpu.plumbing.progress import compilation

VECTOR_BYTES = 64  # one AVX-512 register, or two of AVX2
HALF = bool(llvm.get_host_cpu_features().get("f16c"))  # instructions for float16
REGISTER_BYTES = 64 if llvm.get_host_cpu_features().get("avx512f") else 32


class _Watch(event.Listener):
    """Tells of every kernel that numba compiles, and of none that it reads from its cache."""

    def on_start(self, event: Any) -> None:
        compilation.start()

    def on_end(self, event: Any) -> None:
        compilation.end()


event.register("numba:compile", _Watch())


def kernel(function: Any) -> Any:
    """Compile without the interpreter lock, and keep the code on disk where that is possible."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no directory to write to
        return numba.njit(nogil=True)(function)


inline = numba.njit(forceinline=True)  # constant arguments become constants of the caller's code


class Vec(types.Type):
    """`parts` vectors of so many numbers of one scalar type, held in registers."""

    def __init__(self, scalar: Any, lanes: int, parts: int = 1) -> None:
        self.scalar, self.lanes, self.parts = scalar, lanes, parts
        super().__init__(name=f"Vec({scalar} x {lanes} x {parts})")


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _llvm_parts(fe_type))


def _llvm(scalar: Any, lanes: int) -> Any:
    """A vector as LLVM knows it; arrays of uint16 hold the bits of float16."""
    kind = {16: ir.IntType(16), 32: ir.FloatType(), 64: ir.DoubleType()}[scalar.bitwidth]
    return ir.VectorType(kind, lanes)


def _llvm_parts(vec: Vec) -> Any:
    return ir.ArrayType(_llvm(vec.scalar, vec.lanes), vec.parts)


def _build(builder: Any, vec: Vec, part: Callable[[int], Any]) -> Any:
    """A value of the type `vec`, part by part."""
    value = ir.Constant(_llvm_parts(vec), ir.Undefined)
    for p in range(vec.parts):
        value = builder.insert_value(value, part(p), p)
    return value


def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(value.type, lanes)
    zero = ir.IntType(32)(0)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, zero)
    order = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(first, first, order)


def _masked(builder: Any, name: str, result: Any, n: Any, vector: Any, arguments: Any) -> Any:
    """Call of llvm.masked.load or store on the lanes below n; names hold the vector's type."""
    i32, align = ir.IntType(32), _align(vector)
    lane = ir.Constant(ir.VectorType(i32, vector.count), list(range(vector.count)))
    mask = builder.icmp_signed("<", lane, _splat(builder, builder.trunc(n, i32), vector.count))
    before, behind = arguments
    every = [*before, i32(align), mask, *behind]
    function = ir.FunctionType(result, [a.type for a in every])
    kind = {2: "i16", 4: "f32", 8: "f64"}[align]
    full = f"llvm.masked.{name}.v{vector.count}{kind}.p0"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, full), every)


def _read(builder: Any, pointer: Any, vector: Any, n: Any) -> Any:
    """The first n lanes, all if n is None."""
    pointer = builder.bitcast(pointer, vector.as_pointer())
    if n is None:
        return builder.load(pointer, align=_align(vector))
    zeros = ir.Constant(vector, None)
    return _masked(builder, "load", vector, n, vector, ([pointer], [zeros]))


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
            _masked(builder, "store", ir.VoidType(), n, vector, ([value, pointer], []))


def _align(vector: Any) -> int:
    if isinstance(vector.element, ir.IntType):
        return 2
    return 4 if isinstance(vector.element, ir.FloatType) else 8


def _places(context: Any, builder: Any, array_type: Any, vec: Vec, args: Any, n: Any) -> Any:
    """(address, lanes) of part p, from the arguments (array, offset, n) of an intrinsic.

    All parts but the last are whole, and that one is if n is None.
    """

    def place(p: int) -> tuple[Any, Any]:
        offset = builder.add(args[1], args[1].type(p * vec.lanes))
        some = p == vec.parts - 1 and not isinstance(n, types.NoneType)
        return _address(context, builder, array_type, args[0], offset), args[2] if some else None

    return place


@intrinsic(prefer_literal=True)
def vector(typing_context, array, size, parts):  # type: ignore[no-untyped-def]
    """Zeros of the type of `array`: `parts` vectors of `size` bytes, or of one number if it is 0.

    Reads of a quarter of `VECTOR_BYTES` rarely straddle two cache lines.
    """
    width = array.dtype.bitwidth // 8
    vec = Vec(array.dtype, max(1, size.literal_value // width), parts.literal_value)
    return vec(array, size, parts), _zeros(vec)


def _zeros(vec: Vec) -> Any:
    return lambda context, builder, signature, args: ir.Constant(_llvm_parts(vec), None)


@intrinsic
def lanes(typing_context, like):  # type: ignore[no-untyped-def]
    """How many numbers a part of a vector has, a constant."""
    return types.int64(like), lambda *_: ir.IntType(64)(like.lanes)


@intrinsic
def load(typing_context, array, offset, n, like):  # type: ignore[no-untyped-def]
    """A vector like `like` from array.flat[offset:]: of its last part n lanes, zeros behind them.

    All lanes if n is None.  Numbers of a narrower type are widened.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _places(context, builder, array, like, args, n)
        stored = _llvm(array.dtype, like.lanes)

        def part(p: int) -> Any:
            pointer, some = place(p)
            value = _read(builder, pointer, stored, some)
            if array.dtype == types.uint16:
                value = builder.bitcast(value, ir.VectorType(ir.HalfType(), like.lanes))
            narrow = array.dtype.bitwidth < like.scalar.bitwidth
            return builder.fpext(value, _llvm(like.scalar, like.lanes)) if narrow else value

        return _build(builder, like, part)

    return like(array, types.int64, n, like), codegen


@intrinsic
def store(typing_context, array, offset, n, value):  # type: ignore[no-untyped-def]
    """array.flat[offset:] = value, of whose last part n lanes are written; all if n is None.

    What is wider than the array's numbers is rounded to them.  In float16 what is too large becomes
    the largest there is, and a NaN stays one.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _places(context, builder, array, value, args, n)
        for p in range(value.parts):
            x, (pointer, some) = builder.extract_value(args[3], p), place(p)
            if array.dtype == types.uint16:
                for sign, beyond in ((65504.0, ">"), (-65504.0, "<")):
                    most = ir.Constant(x.type, [sign] * value.lanes)
                    x = builder.select(builder.fcmp_ordered(beyond, x, most), most, x)
                half = builder.fptrunc(x, ir.VectorType(ir.HalfType(), value.lanes))
                x = builder.bitcast(half, _llvm(array.dtype, value.lanes))
            elif array.dtype.bitwidth < value.scalar.bitwidth:
                x = builder.fptrunc(x, _llvm(array.dtype, value.lanes))
            _write(builder, x, pointer, some)
        return context.get_dummy_value()

    return types.void(array, types.int64, n, value), codegen


@intrinsic
def splat(typing_context, number, like):  # type: ignore[no-untyped-def]
    """A vector like `like` of one number."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = context.cast(builder, args[0], number, like.scalar)
        return _build(builder, like, lambda p: _splat(builder, x, like.lanes))

    return like(number, like), codegen


def _by_parts(make: Callable[..., Any]) -> Any:
    """The code of an operation on vectors of one type, from that on their parts."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def part(p: int) -> Any:
            return make(builder, *(builder.extract_value(x, p) for x in args))

        return _build(builder, signature.return_type, part)

    return codegen


@intrinsic
def fma(typing_context, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c, in one rounding where the machine can."""

    def make(builder: Any, x: Any, y: Any, z: Any) -> Any:
        return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))

    return a(a, b, c), _by_parts(make)


@intrinsic
def add(typing_context, a, b):  # type: ignore[no-untyped-def]
    return a(a, b), _by_parts(ir.IRBuilder.fadd)


@intrinsic
def mul(typing_context, a, b):  # type: ignore[no-untyped-def]
    return a(a, b), _by_parts(ir.IRBuilder.fmul)


@intrinsic
def sub(typing_context, a, b):  # type: ignore[no-untyped-def]
    return a(a, b), _by_parts(ir.IRBuilder.fsub)


@intrinsic
def add_product(typing_context, sums, offset, n, a, b):  # type: ignore[no-untyped-def]
    """sums.flat[offset:] += a * b, in the float64 of `sums`; of the last part n lanes.

    An intrinsic: as a function of numba's it would count references to `sums` for each row.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, wide = _places(context, builder, sums, a, args, n), _llvm(types.float64, a.lanes)
        for p in range(a.parts):
            x, y = (builder.extract_value(value, p) for value in args[3:])
            if a.scalar != types.float64:
                x, y = builder.fpext(x, wide), builder.fpext(y, wide)
            pointer, some = place(p)
            product = builder.fmul(x, y, flags=("contract",))
            total = builder.fadd(product, _read(builder, pointer, wide, some), flags=("contract",))
            _write(builder, total, pointer, some)
        return context.get_dummy_value()

    return types.void(sums, types.int64, n, a, b), codegen


@intrinsic
def widened(typing_context, x):  # type: ignore[no-untyped-def]
    """The same numbers in float64."""
    vec = Vec(types.float64, x.lanes, x.parts)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def part(p: int) -> Any:
            value = builder.extract_value(args[0], p)
            return value if x == vec else builder.fpext(value, _llvm(vec.scalar, vec.lanes))

        return _build(builder, vec, part)

    return vec(x), codegen


@intrinsic
def peek(typing_context, array, i):  # type: ignore[no-untyped-def]
    """array[i] for an i that is known to be valid: no wrap-around, no check."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, array, args[0], args[1]))

    return array.dtype(array, types.int64), codegen


@intrinsic
def prefetch(typing_context, array, offset, n, like):  # type: ignore[no-untyped-def]
    """Ask for the lines in which `load` would begin a part, and for that of its last number.

    Without n not for the last one; without `like` for one line.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32, places = ir.IntType(32), [args[1]]
        if isinstance(like, Vec):
            step = max(1, 512 // (like.lanes * array.dtype.bitwidth))
            starts = [p * like.lanes for p in range(0, like.parts, step)]
            places = [builder.add(args[1], args[1].type(start)) for start in starts]
        if not isinstance(n, types.NoneType):
            behind = args[1].type((like.parts - 1) * like.lanes - 1)
            places.append(builder.add(builder.add(args[1], args[2]), behind))
        for place in places:
            pointer = _address(context, builder, array, args[0], place)
            pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
            function = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
            hint = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
            builder.call(hint, [pointer, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64, n, like), codegen


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
