"""The vocabulary in which CPU kernels are written: loops, scratch, vector loads, stores and sums.

Kernels are plain Python that emits TIR. Loop variables are 64-bit, since an expert tensor has more
than 2^31 elements. A Python `for` unrolls; `serial` and `parallel` are loops in the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.profile import CpuProfile

Expr = Any  # a TIR expression; TVM's own types are not exported for annotation
Buffer = Any

LANES = 16  # rows of a packed weight block, and the vector width kernels are written in


def int64(value: Expr | int) -> Expr:
    """A 64-bit TIR integer from a Python int; expressions pass through."""
    return T.int64(value) if isinstance(value, int) else value


def serial(extent: Expr | int) -> AbstractContextManager[Expr]:
    """A sequential loop 0 <= i < extent with a 64-bit variable."""
    return T.serial(int64(0), int64(extent))


def serial_range(start: Expr | int, stop: Expr | int) -> AbstractContextManager[Expr]:
    """A sequential loop start <= i < stop with a 64-bit variable."""
    return T.serial(int64(start), int64(stop))


def parallel(extent: Expr | int) -> AbstractContextManager[Expr]:
    """A loop whose iterations are split over the threads in contiguous, equal parts."""
    return T.parallel(int64(0), int64(extent))


def let(value: Expr | int) -> Expr:
    """Evaluate once, here, and name the result."""
    if isinstance(value, int):
        return int64(value)
    dtype = str(value.ty)
    return opaque(value) if dtype.startswith("float") or "x" in dtype else T.Bind(value)


def opaque(value: Expr) -> Expr:
    """`let` through memory, also for scalar integers: where long chains of them feed indices.

    TVM's analyzer substitutes the value of a pure binding into every later expression, again and
    again: compile time grows exponentially with the length of a chain of bindings, and float
    algebra that is exact only for reals gets applied. It does not look through memory; LLVM does,
    and keeps the value in a register.
    """
    dtype, _, lanes = str(value.ty).partition("x")
    cell = scratch(int(lanes or 1), dtype)
    store(cell, value, 0, lanes=int(lanes or 1))
    return T.Bind(load(cell, 0, lanes=int(lanes or 1)))


def scratch(elements: int, dtype: str = "float32") -> Buffer:
    """A small array private to the current iteration; on the stack, so registers when possible.

    Above 1 KiB TVM takes it from the thread's workspace instead: allocate it outside hot loops.
    """
    return T.alloc_buffer((elements,), dtype, scope="global")


def workspace(shape: Sequence[Expr | int], dtype: str = "float32") -> Buffer:
    """A larger temporary array of the current scope, from the workspace pool."""
    return T.alloc_buffer(tuple(int64(s) for s in shape), dtype, scope="global")


def load(buffer: Buffer, *index: Expr | int, lanes: int = LANES) -> Expr:
    """`lanes` consecutive elements of the last axis, from `index`."""
    if lanes == 1:
        return buffer[tuple(int64(i) for i in index)]
    head = tuple(int64(i) for i in index[:-1])
    return buffer[(*head, T.Ramp(int64(index[-1]), int64(1), lanes))]


def store(buffer: Buffer, value: Expr, *index: Expr | int, lanes: int = LANES) -> None:
    """Store `lanes` consecutive elements of the last axis at `index`."""
    head = [int64(i) for i in index[:-1]]
    last = int64(index[-1])
    T.buffer_store(buffer, value, [*head, last if lanes == 1 else T.Ramp(last, int64(1), lanes)])


def splat(value: Expr | float, lanes: int = LANES, dtype: str = "float32") -> Expr:
    """A vector with `lanes` copies of a scalar (or the scalar itself for one lane)."""
    scalar = getattr(T, dtype)(value) if isinstance(value, int | float) else value
    return scalar if lanes == 1 else T.Broadcast(scalar, lanes)


def vector_type(dtype: str, lanes: int) -> str:
    """TVM's spelling of a vector type: ("float32", 16) -> "float32x16"."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def intrinsic(name: str, dtype: str, lanes: int, *args: Expr) -> Expr:
    """A pure LLVM intrinsic, e.g. ("llvm.fabs.v16f32", "float32", 16, x)."""
    return T.call_llvm_pure_intrin(vector_type(dtype, lanes), name, *args)


def float_intrinsic(stem: str, lanes: int, *args: Expr) -> Expr:
    """An LLVM intrinsic overloaded on float32 vectors: stem "fma" -> llvm.fma.v16f32."""
    return intrinsic(
        f"llvm.{stem}." + ("f32" if lanes == 1 else f"v{lanes}f32"), "float32", lanes, *args
    )


def fma(profile: CpuProfile, a: Expr, b: Expr, c: Expr, lanes: int = LANES) -> Expr:
    """a * b + c: fused where the target has the instruction, else two roundings."""
    return float_intrinsic("fma", lanes, a, b, c) if profile.fma else a * b + c


def cast(value: Expr, dtype: str, lanes: int = LANES) -> Expr:
    """Convert lane by lane."""
    return T.Cast(vector_type(dtype, lanes), value)


def bits(value: Expr, dtype: str, lanes: int = LANES) -> Expr:
    """Reinterpret the same bits as another type of equal width."""
    return T.reinterpret(vector_type(dtype, lanes), value)


def reduce_add(value: Expr, lanes: int = LANES) -> Expr:
    """Sum of the lanes, pairwise (halves added until one is left)."""
    return fold_add(value, lanes, 1)


def fold_add(value: Expr, lanes: int, left: int) -> Expr:
    """Halves added until `left` lanes are left: lane i is the sum of lanes i, i + left, ..."""
    while lanes > left:
        half = lanes // 2
        low = T.Shuffle([value], list(range(half)))
        high = T.Shuffle([value], list(range(half, lanes)))
        value, lanes = let(low + high), half
    return value


def round_bf16(value: Expr, lanes: int = LANES) -> Expr:
    """Round float32 to the nearest bfloat16, ties to even; infinities and NaN keep their kind."""
    u = let(bits(value, "uint32", lanes))
    one, bias = splat(1, lanes, "uint32"), splat(0x7FFF, lanes, "uint32")
    odd = T.bitwise_and(u >> splat(16, lanes, "uint32"), one)
    rounded = T.bitwise_and(u + bias + odd, splat(0xFFFF0000, lanes, "uint32"))
    finite = T.bitwise_and(u, splat(0x7F800000, lanes, "uint32")) != splat(
        0x7F800000, lanes, "uint32"
    )
    return bits(T.Select(finite, rounded, u), "float32", lanes)


def round_f16(value: Expr, lanes: int = LANES) -> Expr:
    """Round float32 to the nearest float16, ties to even; infinities and NaN keep their kind.

    In float32 arithmetic, so that it is the same on machines without half precision.
    """
    u = let(bits(value, "uint32", lanes))
    size = let(T.bitwise_and(u, splat(0x7FFFFFFF, lanes, "uint32")))
    odd = T.bitwise_and(u >> splat(13, lanes, "uint32"), splat(1, lanes, "uint32"))
    nearest = let(
        T.bitwise_and(u + splat(0xFFF, lanes, "uint32") + odd, splat(0xFFFFE000, lanes, "uint32"))
    )
    # subnormals of float16 are multiples of 2^-24, the last place of float32 values around 0.75
    shifted = let(value + splat(0.75, lanes))
    tiny = bits(let(shifted - splat(0.75, lanes)), "uint32", lanes)
    sign = T.bitwise_and(u, splat(0x80000000, lanes, "uint32"))
    infinity = T.bitwise_or(sign, splat(0x7F800000, lanes, "uint32"))
    normal = T.Select(size < splat(0x38800000, lanes, "uint32"), T.bitwise_or(tiny, sign), nearest)
    large = T.Select(size < splat(0x477FF000, lanes, "uint32"), normal, infinity)  # 65520
    return bits(T.Select(size < splat(0x7F800001, lanes, "uint32"), large, u), "float32", lanes)


def rounded(act: str, value: Expr, lanes: int = LANES) -> Expr:
    """The value as the activation dtype holds it: unchanged for "float32"."""
    rounding = {"float32": lambda value, lanes: value, "bfloat16": round_bf16, "float16": round_f16}
    return rounding[act](value, lanes)


def bf16_pair(word: Expr, lanes: int = 8) -> tuple[Expr, Expr]:
    """The two bfloat16 halves (low, high) of uint32 words, as float32 vectors."""
    low = bits(word << splat(16, lanes, "uint32"), "float32", lanes)
    high = bits(T.bitwise_and(word, splat(0xFFFF0000, lanes, "uint32")), "float32", lanes)
    return low, high


def concat(low: Expr, high: Expr, lanes: int) -> Expr:
    """Two vectors of `lanes` as one of 2*lanes."""
    return T.Shuffle([low, high], list(range(2 * lanes)))


def chunks(width: int, lanes: int = LANES) -> list[tuple[int, int]]:
    """(offset, lanes) pieces that cover a static width: full vectors, then powers of two."""
    pieces, at = [], 0
    while at < width:
        while lanes > width - at:
            lanes //= 2
        pieces.append((at, lanes))
        at += lanes
    return pieces


def prefetch(buffer: Buffer, *index: Expr | int) -> None:
    """Ask for the cache line of an element, into L2; harmless past the end of the buffer.

    Into L1 it would compete with the loads for the few misses that L1 can have under way: measured
    on Zen 4, one core streams MXFP4 weights at 27 GB/s this way and at 20 GB/s with L1 as target.
    """
    address = T.address_of(buffer[tuple(int64(i) for i in index)])
    T.evaluate(
        T.call_llvm_intrin("void", "llvm.prefetch.p0", address, T.int32(0), T.int32(1), T.int32(1))
    )


def reduce_max(value: Expr, lanes: int = LANES) -> Expr:
    """Largest of the float32 lanes that are not NaN; NaN when all are."""
    return _halved("maxnum", "float32", value, lanes)


def reduce_int(stem: str, value: Expr, lanes: int = LANES) -> Expr:
    """Largest ("smax") or smallest ("smin") of the int32 lanes."""
    return _halved(stem, "int32", value, lanes)


def _halved(stem: str, dtype: str, value: Expr, lanes: int) -> Expr:
    short = {"float32": "f32", "int32": "i32"}[dtype]
    while lanes > 1:
        half = lanes // 2
        low = T.Shuffle([value], list(range(half)))
        high = T.Shuffle([value], list(range(half, lanes)))
        name = f"llvm.{stem}." + (short if half == 1 else f"v{half}{short}")
        value, lanes = let(intrinsic(name, dtype, half, low, high)), half
    return value


def lane_numbers(lanes: int = LANES) -> Expr:
    """The int32 vector (0, 1, ..., lanes - 1)."""
    return T.Ramp(T.int32(0), T.int32(1), lanes)


def transpose(rows: Sequence[Expr]) -> list[Expr]:
    """Vectors as the rows of a square matrix -> its columns; as many vectors as lanes."""
    rows, size = list(rows), len(rows)
    half = size // 2
    while half:
        low = [lane if not lane & half else size + lane - half for lane in range(size)]
        high = [lane + half if not lane & half else size + lane for lane in range(size)]
        for i in (i for i in range(size) if not i & half):
            pair = [rows[i], rows[i + half]]
            rows[i], rows[i + half] = let(T.Shuffle(pair, low)), let(T.Shuffle(pair, high))
        half //= 2
    return rows
