"""Numbers at an address: typed arrays, and blocks of any float dtype as float32."""

import ctypes
import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from .compiling import inner

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
FLOAT32, FLOAT16 = 0, 1
ALWAYS_MAPPED = 32 << 20  # bytes; glibc takes each larger block anew from the system, even if it has freed one


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor: a large one in huge pages, since its first writes would mostly wait for page faults."""
    x = torch.empty(shape, dtype=dtype, device="cpu")
    if math.prod(shape) * dtype.itemsize >= ALWAYS_MAPPED and hasattr(mmap, "MADV_HUGEPAGE"):
        start = x.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = x.data_ptr() + x.nbytes - start
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return x


@intrinsic
def _pointer(typing, address):  # noqa: ANN001
    def generate(context, builder, signature, arguments):  # noqa: ANN001
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic
def as_bits(typing, number):  # noqa: ANN001, ANN201
    """Return the bits of a float32 as an int32."""

    def generate(context, builder, signature, arguments):  # noqa: ANN001
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def as_float(typing, bits):  # noqa: ANN001, ANN201
    """Return the float32 with the bits of an int32."""

    def generate(context, builder, signature, arguments):  # noqa: ANN001
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@inner
def array_at(address: int, count: int, dtype: type) -> np.ndarray:
    """Return the `count` numbers of a NumPy dtype that lie at an address."""
    return carray(_pointer(address), count, dtype)


# float16 is converted by integers, without branches: LLVM's own conversion needs a processor that has one.
HALF_INF, FLOAT_INF = np.int32(0x7C00), np.int32(0x7F800000)
REBIAS = np.int32((127 - 15) << 23)  # between the exponents of float16 and float32
SMALLEST_HALF, TOO_LARGE = np.int32(113 << 23), np.int32(143 << 23)  # 2^-14 and 2^16 as float32
ALIGNER = np.int32(126 << 23)  # 0.5: its last bit is worth 2^-24, as that of a subnormal float16


@inner
def half_to_float(half: int) -> float:
    """Return the float32 of these uint16 bits of a float16."""
    magnitude = np.int32(half & np.uint16(0x7FFF))
    number = np.int32((magnitude << np.int32(13)) + REBIAS)
    special = np.int32(number + REBIAS)
    subnormal = as_bits(as_float(np.int32(number + np.int32(1 << 23))) - as_float(SMALLEST_HALF))
    number = special if magnitude >= HALF_INF else number
    number = subnormal if magnitude < np.int32(0x400) else number
    return as_float(np.int32(number | np.int32(half & np.uint16(0x8000)) << np.int32(16)))


@inner
def float_to_half(number: float) -> np.uint16:
    """Return the uint16 bits of the float16 nearest to a float32, halves to even."""
    bits = as_bits(number)
    magnitude = np.int32(bits & np.int32(0x7FFFFFFF))
    odd = magnitude >> np.int32(13) & np.int32(1)
    half = np.int32((magnitude - REBIAS + np.int32(0xFFF) + odd) >> np.int32(13))
    subnormal = np.int32(as_bits(as_float(magnitude) + as_float(ALIGNER)) - ALIGNER)
    half = subnormal if magnitude < SMALLEST_HALF else half
    half = HALF_INF if magnitude >= TOO_LARGE else half
    half = np.int32(0x7E00) if magnitude > FLOAT_INF else half
    return np.uint16(half | bits >> np.int32(16) & np.int32(0x8000))


@inner
def load(kind: int, source: int, start: int, count: int, values: np.ndarray) -> None:
    """Write elements start ... start + count of the tensor at `source` into `values`, float32; `kind` as in KINDS."""
    if kind == FLOAT32:
        singles = array_at(source + 4 * start, count, np.float32)
        for i in range(count):
            values[i] = singles[i]
    elif kind == FLOAT16:
        halves = array_at(source + 2 * start, count, np.uint16)
        for i in range(count):
            values[i] = half_to_float(halves[i])
    else:
        halves, bits = array_at(source + 2 * start, count, np.uint16), array_at(values.ctypes.data, count, np.uint32)
        for i in range(count):
            bits[i] = np.uint32(halves[i]) << np.uint32(16)


@inner
def loaded(kind: int, source: int, start: int, count: int, room: np.ndarray) -> np.ndarray:
    """Return elements start ... start + count of the tensor at `source` as float32: where they lie, or in `room`."""
    if kind == FLOAT32:
        return array_at(source + 4 * start, count, np.float32)
    values = array_at(room.ctypes.data, count, np.float32)
    load(kind, source, start, count, values)
    return values


@inner
def storable(kind: int, target: int, start: int, count: int, room: np.ndarray) -> np.ndarray:
    """Return where to write float32 elements start ... start + count of the tensor at `target`.

    It is where they lie, or `room`; `store` then takes them there.
    """
    if kind == FLOAT32:
        return array_at(target + 4 * start, count, np.float32)
    return array_at(room.ctypes.data, count, np.float32)


@inner
def store(kind: int, target: int, start: int, count: int, values: np.ndarray) -> None:
    """Round `values`, float32, to elements start ... start + count of the tensor at `target`: to the nearest, halves
    to even; `kind` as in KINDS. Those of a float32 tensor are there already: see `storable`."""
    if kind == FLOAT16:
        halves = array_at(target + 2 * start, count, np.uint16)
        for i in range(count):
            halves[i] = float_to_half(values[i])
    elif kind != FLOAT32:
        halves, bits = array_at(target + 2 * start, count, np.uint16), array_at(values.ctypes.data, count, np.uint32)
        for i in range(count):
            rounded = (bits[i] + np.uint32(0x7FFF) + (bits[i] >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
            halves[i] = np.uint16(0x7FC0) if values[i] != values[i] else np.uint16(rounded)
