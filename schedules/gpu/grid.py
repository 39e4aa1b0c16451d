"""The vocabulary in which GPU kernels are written: workgroups, barriers, shared and local memory.

Kernels are plain Python that emits TIR; they know threads and workgroups, never subgroups, so that
they give the same results on every device. Indices are 32-bit; the first index into a tensor that
may have more elements than that is made 64-bit (`wide`). A Python `for` unrolls, `serial` is a loop
in the kernel. Barriers are only where a kernel writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from k3tvm._tvm import T
from k3tvm.schedules.profile import GpuProfile

Expr = Any  # a TIR expression; TVM's own types are not exported for annotation
Buffer = Any

AXES = "xyz"
FOLD = 32768  # workgroups along x before a long list of them continues along y


def int32(value: Expr | int) -> Expr:
    """A 32-bit TIR integer from a Python int; expressions pass through."""
    return T.int32(value) if isinstance(value, int) else value


def wide(value: Expr) -> Expr:
    """An index as 64-bit integer: for the leading axis of tensors of 2^31 elements and more."""
    return T.Cast("int64", value)


@contextmanager
def launch(
    blocks: Sequence[Expr | int], threads: Sequence[int]
) -> Iterator[tuple[list[Expr], list[Expr]]]:
    """A kernel over `blocks` workgroups (x, y, z) of `threads`; yields both kinds of index."""
    with ExitStack() as stack:

        def enter(kind: str, extents: Sequence[Expr | int]) -> list[Expr]:
            frames = [
                T.launch_thread(f"{kind}.{axis}", int32(e))
                for axis, e in zip(AXES, extents, strict=False)
            ]
            return [stack.enter_context(frame) for frame in frames]

        yield enter("blockIdx", blocks), enter("threadIdx", threads)


@contextmanager
def groups(count: Expr | int, threads: int) -> Iterator[tuple[Expr, Expr]]:
    """A kernel over any number of workgroups; yields (workgroup, thread).

    A grid has at most 65535 workgroups per dimension on some devices, so the list continues along
    y; workgroups past its end do nothing.
    """
    count = int32(count)
    x = T.min(count, T.int32(FOLD))
    y = (count + T.int32(FOLD - 1)) // T.int32(FOLD)
    with launch((x, y), (threads,)) as ((bx, by), (tx,)):
        # through memory: TVM would multiply FOLD out with the strides of tensors, and overflow
        group = let(variable(by * T.int32(FOLD) + bx, "int32")[0])
        with T.If(group < count), T.Then():
            yield group, tx


def resident(workgroups: int) -> AbstractContextManager[None]:
    """Inside of a launch: compilers for CUDA leave registers for so many workgroups at a time.

    Say it where a compiler would spill registers for the sake of even more; others do not heed it.
    0 leaves it to the compiler.
    """
    if not workgroups:
        return nullcontext()
    return T.attr(T.int32(0), "tirx.launch_bounds_min_blocks_per_sm", T.int32(workgroups))


@contextmanager
def each(count: Expr | int, threads: int = 256) -> Iterator[Expr]:
    """A kernel with one thread per item 0 <= i < count; yields i."""
    count = int32(count)
    with groups((count + T.int32(threads - 1)) // T.int32(threads), threads) as (group, tx):
        item = let(group * T.int32(threads) + tx)
        with T.If(item < count), T.Then():
            yield item


def serial(extent: Expr | int) -> AbstractContextManager[Expr]:
    """A sequential loop 0 <= i < extent."""
    return T.serial(T.int32(0), int32(extent))


def serial_range(start: Expr | int, stop: Expr | int) -> AbstractContextManager[Expr]:
    """A sequential loop start <= i < stop."""
    return T.serial(int32(start), int32(stop))


@contextmanager
def strided(first: Expr, width: Expr | int, step: int) -> Iterator[Expr]:
    """The share of one thread of 0 <= i < width: i = first, first + step, ...; yields i.

    Every thread makes the same number of turns; the last one is guarded where `step` does not
    divide the width. Do not place barriers inside.
    """
    if isinstance(width, int):
        turns, exact = -(-width // step), width % step == 0
    else:
        turns, exact = (width + T.int32(step - 1)) // T.int32(step), False
    with serial(turns) as turn:
        i = let(turn * T.int32(step) + first)
        if exact:
            yield i
        else:
            with T.If(i < int32(width)), T.Then():
                yield i


def when(condition: Expr) -> AbstractContextManager[None]:
    """The body runs only where the condition holds."""
    return _when(condition)


@contextmanager
def _when(condition: Expr) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


def shared(elements: int, dtype: str = "float32") -> Buffer:
    """Memory of the workgroup; declare it directly inside of the launch."""
    return T.alloc_buffer((elements,), dtype, scope="shared")


def local(elements: int, dtype: str = "float32") -> Buffer:
    """Memory of the thread: registers, when all indices are known at compile time."""
    return T.alloc_buffer((elements,), dtype, scope="local")


def workspace(shape: Sequence[Expr | int], dtype: str = "float32") -> Buffer:
    """Device memory between the launches of one operator; allocate it outside of launches."""
    return T.alloc_buffer(tuple(int32(s) for s in shape), dtype, scope="global")


def barrier() -> None:
    """All threads of the workgroup have come here, and see each other's shared memory.

    Every thread must come here equally often: never inside of a condition that differs by thread.
    """
    T.evaluate(T.tvm_storage_sync("shared"))


def let(value: Expr | int) -> Expr:
    """Evaluate once, here, and name the result.

    Floats pass through memory: TVM's analyzer would substitute the value of a pure binding into
    every later expression and rearrange it as if float algebra were exact.
    """
    if isinstance(value, int):
        return int32(value)
    dtype, _, lanes = str(value.ty).partition("x")
    if dtype.startswith("float") or lanes:
        cell = variable(value)
        return T.Bind(load(cell, 0, lanes=int(lanes or 1)))
    return T.Bind(value)


def variable(value: Expr | float, dtype: str = "float32") -> Buffer:
    """A variable of the thread with a first value: read it with `v[0]`, change it with `put`."""
    if isinstance(value, int | float):
        value = getattr(T, dtype)(value)
    dtype, _, lanes = str(value.ty).partition("x")
    cell = local(int(lanes or 1), dtype)
    store(cell, value, 0, lanes=int(lanes or 1))
    return cell


def put(cell: Buffer, value: Expr, index: int = 0) -> None:
    """Change a variable, or one element of a local array."""
    T.buffer_store(cell, value, [int32(index)])


def load(buffer: Buffer, *index: Expr | int, lanes: int = 1) -> Expr:
    """`lanes` consecutive elements of the last axis, from `index`."""
    head, last = [int32(i) for i in index[:-1]], int32(index[-1])
    return buffer[(*head, last if lanes == 1 else ramp(last, lanes))]


def store(buffer: Buffer, value: Expr, *index: Expr | int, lanes: int = 1) -> None:
    """Store `lanes` consecutive elements of the last axis at `index`."""
    head, last = [int32(i) for i in index[:-1]], int32(index[-1])
    T.buffer_store(buffer, value, [*head, last if lanes == 1 else ramp(last, lanes)])


def ramp(start: Expr, lanes: int) -> Expr:
    """start, start + 1, ..."""
    one = T.int64(1) if str(start.ty) == "int64" else T.int32(1)
    return T.Ramp(start, one, lanes)


def lane(vector: Expr, i: int) -> Expr:
    """One element of a vector."""
    return T.Shuffle([vector], [i])


def splat(value: Expr | float, lanes: int, dtype: str = "float32") -> Expr:
    """A vector with `lanes` copies of a scalar (or the scalar itself for one lane)."""
    scalar = getattr(T, dtype)(value) if isinstance(value, int | float) else value
    return scalar if lanes == 1 else T.Broadcast(scalar, lanes)


def cast(value: Expr, dtype: str, lanes: int = 1) -> Expr:
    """Convert lane by lane."""
    return T.Cast(dtype if lanes == 1 else f"{dtype}x{lanes}", value)


def bits(value: Expr, dtype: str, lanes: int = 1) -> Expr:
    """Reinterpret the same bits as another type of equal width."""
    return T.reinterpret(dtype if lanes == 1 else f"{dtype}x{lanes}", value)


def floats(value: float) -> Expr:
    """A float32 constant."""
    return T.float32(value)


def rounded(act: str, value: Expr) -> Expr:
    """A float32 value as the activation dtype holds it: unchanged for "float32"."""
    rounding = {"float32": lambda value: value, "bfloat16": round_bf16, "float16": round_f16}
    return rounding[act](value)


def round_bf16(value: Expr) -> Expr:
    """Round float32 to the nearest bfloat16, ties to even; infinities and NaN keep their kind."""
    u = let(bits(value, "uint32"))
    odd = T.bitwise_and(u >> T.uint32(16), T.uint32(1))
    nearest = T.bitwise_and(u + T.uint32(0x7FFF) + odd, T.uint32(0xFFFF0000))
    # infinities and NaN keep their bits; compared as signed, since TVM mistreats unsigned == 0
    exponent = cast(T.bitwise_and(u >> T.uint32(23), T.uint32(255)), "int32")
    return bits(T.Select(exponent < T.int32(255), nearest, u), "float32")


def round_f16(value: Expr) -> Expr:
    """Round float32 to the nearest float16, ties to even; infinities and NaN keep their kind.

    By integers, not by converting there and back: drivers may drop such a pair, and Mesa does.
    """
    u = let(bits(value, "uint32"))
    sign = T.bitwise_and(u, T.uint32(0x80000000))
    size = let(cast(T.bitwise_and(u, T.uint32(0x7FFFFFFF)), "int32"))
    # bits that float16 has no room for: 13, and more below 2^-14, where its numbers are fixed point
    tiny = T.max(T.int32(113) - (size >> T.int32(23)), T.int32(0))
    drop = let(T.int32(13) + T.min(tiny, T.int32(10)))
    odd = T.bitwise_and(size >> drop, T.int32(1))
    finite = T.min(size, T.int32(0x7F800000))  # a NaN's bits would overflow
    carried = let(finite + (T.int32(1) << (drop - T.int32(1))) - T.int32(1) + odd)
    near = let((carried >> drop) << drop)
    # below 2^-24 that or zero, a tie to zero
    smallest = T.Select(size > T.int32(0x33000000), T.int32(0x33800000), T.int32(0))
    near = let(T.Select(size < T.int32(0x33800000), smallest, near))
    near = let(T.Select(near >= T.int32(0x47800000), T.int32(0x7F800000), near))  # 2^16: infinity
    near = let(T.Select(size > T.int32(0x7F800000), size, near))  # NaN stays
    return bits(T.bitwise_or(cast(near, "uint32"), sign), "float32")


def sum_of(values: Buffer, thread: Expr, threads: int) -> Expr:
    """Sum of values[0 : threads] in shared memory, the same for every thread; threads = 2^i.

    Each thread has stored its value before the call. Ends with a barrier, so the memory may be
    used again.
    """
    return _fold(values, thread, threads, lambda a, b: a + b)


def max_of(values: Buffer, thread: Expr, threads: int) -> Expr:
    """Largest of values[0 : threads]; like `sum_of`."""
    return _fold(values, thread, threads, T.max)


def _fold(values: Buffer, thread: Expr, threads: int, join: Any) -> Expr:
    half = threads // 2
    while half:
        barrier()
        with when(thread < T.int32(half)):
            both = let(join(values[thread], values[thread + T.int32(half)]))
            T.buffer_store(values, both, [thread])
        half //= 2
    barrier()
    result = let(values[T.int32(0)])
    barrier()
    return result


def threads_for(profile: GpuProfile, width: int, most: int = 256) -> int:
    """A power of two of threads for a row of `width`: enough to share it, not more than `most`."""
    threads = 32
    while threads * 2 <= min(most, profile.threads) and threads < width:
        threads *= 2
    return threads
