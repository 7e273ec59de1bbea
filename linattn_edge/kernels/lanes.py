"""SIMD lanes: one value of type Lanes is `width` neighbouring numbers, kept in vector registers.

LLVM splits a wide lane into the machine's own registers (4 AVX2, 2 AVX-512 or 8 NEON registers for 32 floats), so a
loop written with lanes keeps its accumulators out of memory, which plain loops over arrays do not achieve: LLVM can't
prove that a state and its inputs do not overlap. With the JIT off, a lane is a short NumPy array.

`operations(width)` gives load and store; `fma`, `mul` and `zero` serve every width. Offsets are into flat
arrays, in numbers, and are not checked. A GPU thread is a lane of width 1: the same loops, scalar loads (cuda.py).
"""

import ctypes
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, overload, register_model

from linattn_edge.kernels import maths
from linattn_edge.kernels.jit import DISABLED, device

# Numba has no half precision on the CPU: such numbers are stored as integers of these types, float32 in registers.
FLOAT16, BFLOAT16 = types.uint16, types.int16
HALVES = (FLOAT16, BFLOAT16)

_SUFFIX = {types.float32: "f32", types.float64: "f64"}
_ELEMENT = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}


class Lanes(types.Type):
    """Numba type of `width` numbers of one dtype."""

    def __init__(self, scalar: Any, width: int) -> None:
        self.scalar = scalar
        self.suffix = f"v{width}{_SUFFIX[scalar]}"
        self.vector = ir.VectorType(_ELEMENT[scalar], width)
        super().__init__(f"Lanes({scalar}, {width})")


@register_model(Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, lanes.vector)


class Operations(NamedTuple):
    """What a rule's loop is written with: see `rules.py`."""

    load: Any  # load(a, at): lanes from a[at:at + width]
    store: Any  # store(a, at, lanes)
    fma: Any  # fma(x, y, z): x * y + z, rounded once where the machine can; x a number or lanes
    mul: Any  # mul(x, y): x * y; x a number or lanes
    sub: Any  # sub(x, y): x - y, both lanes
    zero: Any  # zero(y): lanes of zeros like y
    add: Any  # add(x, y): x + y, both lanes
    join: Any  # join(x, y, column): the sum of x over all that share these columns; here nobody else does


def _address(context: Any, builder: Any, source: Any, value: Any, at: Any) -> Any:
    """Where number `at` of an array, or from a pointer on, lies."""
    if isinstance(source, types.Array):
        value = context.make_array(source)(context, builder, value).data
    return builder.gep(value, [at])


def _spread(builder: Any, value: Any, vector: Any) -> Any:
    """A number as lanes; lanes as they are."""
    if value.type == vector:
        return value
    index = ir.IntType(32)
    empty = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(empty, value, ir.Constant(index, 0))
    return builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(index, vector.count), [0] * vector.count))


@intrinsic
def _fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = args[2].type
        name = f"llvm.fmuladd.{z.suffix}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)
        return builder.call(function, [_spread(builder, args[0], vector), args[1], args[2]])

    return z(x if isinstance(x, Lanes) else z.scalar, y, z), code


@intrinsic
def _mul(typing: Any, x: Any, y: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(_spread(builder, args[0], args[1].type), args[1])

    return y(x if isinstance(x, Lanes) else y.scalar, y), code


@intrinsic
def _sub(typing: Any, x: Any, y: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fsub(*args)

    return x(x, y), code


@intrinsic
def _add(typing: Any, x: Any, y: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return x(x, y), code


@intrinsic
def _zero(typing: Any, y: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(args[0].type, None)

    return y(y), code


@intrinsic
def _total(typing: Any, x: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = _ELEMENT[x.scalar]
        name = f"llvm.vector.reduce.fadd.{x.suffix}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(element, [element, x.vector]), name)
        return builder.call(function, [ir.Constant(element, -0.0), args[0]], fastmath=("reassoc",))

    return x.scalar(x), code


total = np.sum if DISABLED else _total  # total(lanes): their sum


@device
def alone(x, y, column):
    """x: no other thread has rows of these columns."""
    return x


def _compiled(width: int) -> Operations:
    shorts = ir.VectorType(ir.IntType(16), width)
    words = ir.VectorType(ir.IntType(32), width)
    bytes_ = ir.VectorType(ir.IntType(8), width)

    def number(value: int) -> Any:
        return ir.Constant(words, [value] * width)

    @intrinsic
    def load(typing: Any, array: Any, at: Any) -> Any:
        stored = array.dtype
        lanes = Lanes(stored if stored in _SUFFIX else types.float32, width)

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = shorts if stored in HALVES else bytes_ if stored == types.int8 else lanes.vector
            value = builder.load(
                builder.bitcast(_address(context, builder, signature.args[0], args[0], args[1]), vector.as_pointer())
            )
            value.align = stored.bitwidth // 8
            if stored == types.int8:
                return builder.sitofp(value, lanes.vector)
            if stored == FLOAT16:
                return builder.fpext(builder.bitcast(value, ir.VectorType(ir.HalfType(), width)), lanes.vector)
            if stored == BFLOAT16:
                return builder.bitcast(builder.shl(builder.zext(value, words), number(16)), lanes.vector)
            return value

        return lanes(array, types.intp), code

    @intrinsic
    def store(typing: Any, array: Any, at: Any, value: Any) -> Any:
        stored = array.dtype

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = args[2]
            if stored == FLOAT16:
                data = builder.bitcast(builder.fptrunc(data, ir.VectorType(ir.HalfType(), width)), shorts)
            elif stored == BFLOAT16:  # to the nearest, ties to even
                bits = builder.bitcast(data, words)
                odd = builder.and_(builder.lshr(bits, number(16)), number(1))
                rounded = builder.add(bits, builder.add(odd, number(0x7FFF)))
                high = builder.lshr(rounded, number(16))
                nan = builder.fcmp_unordered("uno", data, data)  # rounding could carry a NaN over into -0
                data = builder.trunc(builder.select(nan, number(0x7FC0), high), shorts)
            target = _address(context, builder, signature.args[0], args[0], args[1])
            builder.store(data, builder.bitcast(target, data.type.as_pointer())).align = stored.bitwidth // 8
            return context.get_dummy_value()

        return types.void(array, types.intp, value), code

    return Operations(load, store, _fma, _mul, _sub, _zero, _add, alone)


def _interpreted(width: int) -> Operations:
    def load(array: Any, at: int) -> Any:
        data = array[at : at + width].copy()
        if data.dtype == np.int8:
            return data.astype(np.float32)
        if data.dtype == np.uint16:
            return data.view(np.float16).astype(np.float32)
        if data.dtype == np.int16:
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return data

    def store(array: Any, at: int, value: Any) -> None:
        if array.dtype == np.uint16:
            value = value.astype(np.float16).view(np.uint16)
        elif array.dtype == np.int16:
            bits = value.view(np.uint32)
            rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
            value = np.where(np.isnan(value), np.uint32(0x7FC0), rounded).astype(np.uint16).view(np.int16)
        array[at : at + width] = value

    return Operations(
        load,
        store,
        fma=lambda x, y, z: x * y + z,
        mul=lambda x, y: x * y,
        sub=lambda x, y: x - y,
        zero=np.zeros_like,
        add=lambda x, y: x + y,
        join=alone,
    )


def operations(width: int) -> Operations:
    """Lane operations, `width` numbers at a time, on arrays of float32, float64 or stored halves."""
    return _interpreted(width) if DISABLED else _compiled(width)


def _borrow(context: Any, builder: Any, result: Any, pointer: Any, count: Any) -> Any:
    """A 1-D array over memory that somebody else keeps alive: no reference counting."""
    array = context.make_array(result)(context, builder)
    itemsize = context.get_constant(types.intp, result.dtype.bitwidth // 8)
    context.populate_array(
        array,
        data=builder.bitcast(pointer, array.data.type),
        shape=cgutils.pack_array(builder, [count]),
        strides=cgutils.pack_array(builder, [itemsize]),
        itemsize=itemsize,
        meminfo=None,
    )
    return array._getvalue()


@intrinsic
def _flat(typing: Any, array: Any) -> Any:
    result = types.Array(array.dtype, 1, "C")

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(signature.args[0])(context, builder, args[0])
        return _borrow(context, builder, result, source.data, source.nitems)

    return result(array), code


@intrinsic
def _pointer(typing: Any, array: Any, at: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _address(context, builder, signature.args[0], args[0], args[1])

    return types.CPointer(array.dtype)(array, types.intp), code


@intrinsic
def _at_address(typing: Any, address: Any, count: Any, dtype: Any) -> Any:
    result = types.Array(dtype.dtype, 1, "C")

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        return _borrow(context, builder, result, pointer, args[1])

    return result(types.int64, types.intp, dtype), code


@intrinsic
def _address_of(typing: Any, array: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), code


@intrinsic
def _part(typing: Any, array: Any, at: Any, count: Any) -> Any:
    result = types.Array(array.dtype, 1, "C")

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _address(context, builder, signature.args[0], args[0], args[1])
        return _borrow(context, builder, result, data, args[2])

    return result(array, types.intp, types.intp), code


@intrinsic
def _prefetch(typing: Any, array: Any, at: Any, count: Any) -> Any:
    """Ask for the cache lines of array[at:at + count]."""
    item = array.dtype.bitwidth // 8

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        start = builder.bitcast(
            _address(context, builder, signature.args[0], args[0], args[1]), ir.IntType(8).as_pointer()
        )
        name = "llvm.prefetch.p0"
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        size = builder.mul(args[2], ir.Constant(args[2].type, item))
        with cgutils.for_range_slice(builder, ir.Constant(args[2].type, 0), size, ir.Constant(args[2].type, 64)) as (
            i,
            _,
        ):
            builder.call(
                function, [builder.gep(start, [i]), ir.Constant(word, 0), ir.Constant(word, 3), ir.Constant(word, 1)]
            )
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), code


def _interpreted_at(address: int, count: int, dtype: Any) -> Any:
    if count <= 0:
        return np.empty(0, dtype)
    return np.frombuffer((ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(int(address)), dtype)


# Arrays that borrow their memory from one that the caller keeps alive. All of them are writable to the compiler, so
# that a function is not compiled twice for inputs and scratch; nothing writes to an input.
#
# at_address(address, count, dtype): numbers at a memory address; address(array) gives one; part(array, at, count):
# array[at:at + count]; flat(array): a C-contiguous array in one axis; pointer(array, at): array[at:] without a length,
# cheapest to pass. NumPy's own slices count references, 5 ns each, and its methods compile their error messages into
# every kernel.
if DISABLED:
    at_address = _interpreted_at
    address = lambda array: array.ctypes.data  # noqa: E731
    part = lambda array, at, count: array[at : at + count]  # noqa: E731
    flat = lambda array: array.reshape(-1)  # noqa: E731
    pointer = lambda array, at: array[at:]  # noqa: E731
    prefetch = lambda array, at, count: None  # noqa: E731
else:
    at_address, address, part, flat, pointer = _at_address, _address_of, _part, _flat, _pointer
    prefetch = _prefetch


@overload(maths.dot, jit_options={"forceinline": True})
def _dot(weights, at, x):
    def dot(weights, at, x):
        row = pointer(weights, at)
        total = x.dtype.type(0)
        for i in range(x.size):
            total += row[i] * x[i]
        return total

    return dot


@overload(maths.multiply, jit_options={"forceinline": True})
def _multiply(y, to, factor, at, count):
    def multiply(y, to, factor, at, count):
        source, target = pointer(y, at), pointer(y, to)
        for i in range(count):
            target[i] = factor * source[i]

    return multiply
