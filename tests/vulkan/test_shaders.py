"""Whole shaders of small kernels: memory, loops, barriers, arguments; all accepted by glslang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from k3tvm._tvm import IRBuilder, T, tvm
from k3tvm.vulkan.glsl.types import UnsupportedError
from k3tvm.vulkan.spirv import compile_all, features
from tests.vulkan.shaders import device, function, run, shader, target

N = 64
F32 = ((N,), "float32")


def ramp(base: Any, lanes: int) -> Any:
    return tvm.tirx.Ramp(base, 1, lanes)


def threads(body: Callable[..., None], count: int = N) -> Callable[..., None]:
    """A kernel body of one workgroup, given its thread index before its buffers."""

    def whole(*buffers: Any) -> None:
        with T.launch_thread("threadIdx.x", count) as tx:
            body(tx, *buffers)

    return whole


def local(kind: str, size: int, scope: str = "local") -> Any:
    return T.alloc_buffer((size,), kind, scope=scope)


def scalars(tx: Any, a: Any, b: Any) -> None:
    total = IRBuilder.name("total", local("float32", 1))
    T.buffer_store(total, T.float32(0), [0])
    with T.serial(0, 3) as i:
        T.buffer_store(total, total[0] + a[(tx + i) % N], [0])
    T.buffer_store(b, total[0], [tx])


def shared_sum(tx: Any, a: Any, b: Any) -> None:
    part = local("float32", N, "shared")
    T.buffer_store(part, a[tx], [tx])
    T.evaluate(T.tvm_storage_sync("shared"))
    T.buffer_store(b, part[tx] + part[N - 1 - tx], [tx])


def through_memory(tx: Any, a: Any, b: Any) -> None:
    T.buffer_store(b, a[tx], [tx])
    T.evaluate(T.tvm_storage_sync("shared"))
    other = local("float32", 1)
    T.buffer_store(other, b[N - 1 - tx], [0])
    T.evaluate(T.tvm_storage_sync("shared"))
    T.buffer_store(b, other[0] * T.float32(2), [tx])


def state(tx: Any, a: Any, b: Any) -> None:
    kept = local("float32", 1)
    T.buffer_store(kept, b[tx], [0])
    part = local("float32", N, "shared")
    with T.serial(0, 3) as i:
        T.buffer_store(part, a[(tx + i) % N], [tx])
        T.evaluate(T.tvm_storage_sync("shared"))
        T.buffer_store(kept, kept[0] + part[tx], [0])
        T.evaluate(T.tvm_storage_sync("shared"))
    T.buffer_store(b, kept[0], [tx])


def around_a_loop(tx: Any, a: Any, b: Any) -> None:
    with T.serial(0, 2) as i:
        before = local("float32", 1)
        T.buffer_store(before, b[N - 1 - tx], [0])
        T.evaluate(T.tvm_storage_sync("shared"))
        T.buffer_store(b, before[0] + a[tx] * T.cast(i, "float32"), [tx])
        T.evaluate(T.tvm_storage_sync("shared"))


def vectors(tx: Any, a: Any, b: Any) -> None:
    T.buffer_store(b, a[ramp(tx * 4, 4)] * T.broadcast(T.float32(3), 4), [ramp(tx * 4, 4)])


def wide_vectors(tx: Any, a: Any, b: Any) -> None:
    T.buffer_store(b, a[ramp(tx * 8, 8)] + a[ramp(tx * 8, 8)], [ramp(tx * 8, 8)])


def unaligned(tx: Any, a: Any, b: Any) -> None:
    T.buffer_store(b, a[ramp((tx * 4 + 1) % (N - 4), 4)], [ramp(tx * 4, 4)])


def collatz(tx: Any, a: Any, b: Any) -> None:
    left, steps = local("int32", 1), local("int32", 1)
    T.buffer_store(left, a[tx], [0])
    T.buffer_store(steps, T.int32(0), [0])
    with T.While(left[0] > 1):
        odd = T.truncmod(left[0], 2) == 1
        T.buffer_store(left, T.Select(odd, left[0] * 3 + 1, left[0] // 2), [0])
        T.buffer_store(steps, steps[0] + 1, [0])
    T.buffer_store(b, steps[0], [tx])


def guarded(tx: Any, a: Any, b: Any) -> None:
    T.buffer_store(b, T.if_then_else(tx < 4, a[tx], T.float32(-1)), [tx])


def flags(tx: Any, a: Any, b: Any) -> None:
    T.buffer_store(b, a[tx] > T.float32(0), [tx])


def counted(tx: Any, a: Any, b: Any) -> None:
    T.evaluate(T.call_intrin("int32", "tirx.atomic_add", T.address_of(b[a[tx]]), T.int32(1)))


def changing_end(tx: Any, a: Any, b: Any) -> None:
    end, rounds = local("int32", 1), local("int32", 1)
    T.buffer_store(end, T.int32(5), [0])
    T.buffer_store(rounds, T.int32(0), [0])
    with T.serial(0, end[0]):
        T.buffer_store(end, T.int32(2), [0])
        T.buffer_store(rounds, rounds[0] + 1, [0])
    T.buffer_store(b, T.cast(rounds[0], "float32") + a[tx], [tx])


def by_threes(tx: Any, a: Any, b: Any) -> None:
    total = local("float32", 1)
    T.buffer_store(total, a[tx], [0])
    with T.serial(0, 10, step=3) as i:
        with T.If(i == 9):
            with T.Then():
                T.evaluate(T.break_loop())
        T.buffer_store(total, total[0] + T.cast(i, "float32"), [0])
    T.buffer_store(b, total[0], [tx])


def shared_vectors(tx: Any, a: Any, b: Any) -> None:
    part = local("float32x4", N // 4, "shared")
    with T.If(tx < N // 4):
        with T.Then():
            T.buffer_store(part, a[ramp(tx * 4, 4)], [tx])
    T.evaluate(T.tvm_storage_sync("shared"))
    T.buffer_store(b, T.Shuffle([part[tx // 4]], [1]), [tx])


def triples(tx: Any, a: Any, b: Any) -> None:
    T.buffer_store(b, a[ramp(tx * 3, 3)], [ramp(tx * 3, 3)])


def remainders(tx: Any, a: Any, b: Any) -> None:
    seven = T.broadcast(T.int32(7), 4)
    T.buffer_store(b, T.floormod(a[ramp(tx * 4, 4)] - 20, seven), [ramp(tx * 4, 4)])


def half_pairs(tx: Any, a: Any, b: Any) -> None:
    pair = T.reinterpret("float16x2", a[tx])
    T.buffer_store(b, T.cast(pair, "float32x2"), [ramp(tx * 2, 2)])


def _collatz_steps(start: int) -> int:
    steps = 0
    while start > 1:
        start, steps = (start * 3 + 1 if start % 2 else start // 2), steps + 1
    return steps


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Kernel:
    """A kernel, its arguments, what its shader must and must not say, and what it computes."""

    body: Callable[..., None]
    says: tuple[str, ...]
    want: Callable[[Array], Array]
    arguments: tuple[tuple[tuple[int, ...], str], ...] = (F32, F32)
    count: int = N
    never: tuple[str, ...] = ()

    @property
    def function(self) -> Any:
        return function(threads(self.body, self.count), *self.arguments)


LOOKUP = (np.arange(16) * 4 + 1)[:, None] % (N - 4) + np.arange(4)
I32 = ((N,), "int32")
KERNELS = {
    "one_element_arrays_are_variables": Kernel(
        scalars, ("float total;",), lambda x: x + np.roll(x, -1) + np.roll(x, -2), never=("total[",)
    ),
    "shared": Kernel(
        shared_sum, ("shared float", "barrier();"), lambda x: x + x[::-1], never=("memoryBarrier",)
    ),
    "device_memory_between_threads": Kernel(
        through_memory,
        ("coherent buffer At_float32", "memoryBarrierBuffer();\n  barrier();"),
        lambda x: 2 * x[::-1],
    ),
    "device_memory_around_a_loop": Kernel(
        around_a_loop, ("coherent buffer At_float32", "memoryBarrierBuffer"), lambda x: x
    ),
    "state_is_no_exchange": Kernel(
        state,
        ("barrier();",),
        lambda x: x + np.roll(x, -1) + np.roll(x, -2),
        never=("coherent", "memoryBarrier"),
    ),
    "aligned_vectors": Kernel(vectors, ("R_float32x4(",), lambda x: 3 * x, count=N // 4),
    "wide_vectors": Kernel(
        wide_vectors, ("In_float32x4(",), lambda x: 2 * x, count=N // 8, never=("float32x8",)
    ),
    "unaligned_vectors": Kernel(
        unaligned, ("vec4(",), lambda x: x[LOOKUP].ravel(), count=N // 4, never=("In_float32x4",)
    ),
    "while": Kernel(
        collatz,
        ("while (true) {", "break;"),
        lambda x: np.vectorize(_collatz_steps)(x),
        (I32, I32),
    ),
    "guard": Kernel(
        guarded,
        ("(threadIdx_x < 4) ?",),
        lambda x: np.where(np.arange(N) < 4, x, -1),
        (((4,), "float32"), F32),
    ),
    "flags_are_bytes": Kernel(flags, ("uint8_t d[]",), lambda x: x > 0, (F32, ((N,), "bool"))),
    "loop_bounds_are_evaluated_once": Kernel(changing_end, (), lambda x: x + 5),
    "steps_and_break": Kernel(by_threes, ("break;",), lambda x: x + 9),
    "shared_vectors": Kernel(
        shared_vectors, ("shared vec4", ".y"), lambda x: np.repeat(x[1::4], 4)
    ),
    "three_lanes": Kernel(
        triples, ("vec3(",), lambda x: x[:63], (((63,), "float32"), ((63,), "float32")), 21
    ),
    "vector_helpers": Kernel(remainders, ("ivec4(7)",), lambda x: (x - 20) % 7, (I32, I32), N // 4),
    "half_pairs": Kernel(
        half_pairs,
        ("unpackFloat2x16(",),
        lambda x: x[: N // 2].view("float16").astype("float32"),
        (((N // 2,), "uint32"), F32),
        N // 2,
    ),
    "atomic": Kernel(counted, ("atomicAdd(",), lambda x: np.bincount(x, minlength=N), (I32, I32)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_shader_says(name):
    kernel = KERNELS[name]
    source = shader(kernel.function).source
    assert [words for words in kernel.says if words not in source] == []
    assert [words for words in kernel.never if words in source] == []


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_computes(name):
    kernel = KERNELS[name]
    (shape, kind), (out_shape, out_kind) = kernel.arguments
    numbers = np.arange(shape[0]) % 11 - (0 if kind == "int32" else 5)
    x, y = numbers.astype(kind), np.zeros(out_shape, out_kind)
    got = run(kernel.function, [x], y)
    want = kernel.want(np.resize(x, N) if x.size < 9 else x)
    np.testing.assert_array_equal(got, want)  # NaN equals NaN


def test_arguments_beyond_the_push_limit_travel_by_address():
    """128 bytes are all that every device has: seventeen pointers need a block in memory."""

    def body(tx: Any, *buffers: Any) -> None:
        T.buffer_store(buffers[-1], sum((b[tx] for b in buffers[1:-1]), buffers[0][tx]), [tx])

    many = [function(threads(body), *[F32] * count) for count in (16, 17)]
    small, large = (shader(f) for f in many)
    assert (small.block, large.block) == (False, True)
    assert "uniform Arguments" in small.source
    assert "buffer Arguments" in large.source
    x = np.arange(N, dtype="float32")
    assert np.array_equal(run(many[1], [x] * 16, x * 0), 16 * x)
    assert features(compile_all({"k": large.source})["k"], "k") == frozenset()


def test_scalars_of_every_type_arrive():
    """Each at its own alignment, in the order that the launch writes them."""
    kinds = ["int8", "uint8", "int16", "int32", "int64"]
    kinds += ["float32", "float16", "bool", "float64", "uint32"]
    with IRBuilder() as ib:
        with T.prim_func(s_tir=True):
            T.func_attr({"global_symbol": "kernel", "tirx.noalias": True})
            handle = T.arg("p", T.handle())
            numbers = [T.arg(f"s_{k}", tvm.tirx.Var(f"s_{k}", k)) for k in kinds]
            out = T.match_buffer(handle, (len(kinds),), "float32")
            with T.launch_thread("threadIdx.x", 1):
                for i, number in enumerate(numbers):
                    T.buffer_store(out, T.cast(number, "float32"), [i])
    assert sorted(shader(ib.get()).kinds) == sorted("PcCwilfhbdI")
    module = tvm.compile(tvm.IRModule({"kernel": ib.get()}), target=target())
    got = tvm.runtime.tensor(np.zeros(len(kinds), "float32"), device())
    sent = [-3, 200, -300, 70000, -(2**33), 1.5, 2.5, True, 0.25, 4_000_000_000]
    module["kernel"](got, *sent)
    assert np.array_equal(got.numpy(), np.array(sent, "float32"))


def test_kinds_and_access_tell_what_is_written():
    made = shader(function(threads(shared_sum), F32, F32))
    assert sorted(made.kinds) == ["P", "p"]
    assert (made.local_size, made.grid) == ((N, 1, 1), (1, 1, 1))
    assert made.shared_bytes == 4 * N
    assert "readonly restrict buffer In_float32" in made.source


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        ("float32", set()),
        ("float16", {"float16", "storage16"}),
        ("int8", {"int8", "storage8"}),
        ("int64", {"int64"}),
        ("float64", {"float64"}),
    ],
)
def test_features_come_from_the_types(kind, needed):
    """A kernel must not be refused for what it does not use, nor pass for what it does."""

    def body(tx: Any, a: Any, b: Any) -> None:
        T.buffer_store(b, a[tx] + a[tx], [tx])

    made = shader(function(threads(body), ((N,), kind), ((N,), kind)))
    assert features(compile_all({"k": made.source})["k"], "k") == needed


def _memory_of_scope(scope: str, size: Any = 4) -> Callable[..., None]:
    def body(tx: Any, a: Any, b: Any) -> None:
        scratch = T.alloc_buffer((size,), "float32", scope=scope)
        T.buffer_store(scratch, a[tx], [0])
        T.buffer_store(b, scratch[0], [tx])

    return body


def test_memory_that_vulkan_lacks_is_refused():
    with pytest.raises(UnsupportedError, match="kernel .*shared.dyn"):
        shader(function(threads(_memory_of_scope("shared.dyn")), F32, F32))


def test_punned_views_of_shared_memory_are_refused():
    def body(tx: Any, a: Any, b: Any) -> None:
        scratch = T.alloc_buffer((N,), "float32", scope="shared")
        view = T.decl_buffer((N,), "uint32", data=scratch.data, scope="shared")
        T.buffer_store(scratch, a[tx], [tx])
        T.buffer_store(b, T.cast(view[tx], "float32"), [tx])

    with pytest.raises(UnsupportedError, match="view as uint32 of shared memory"):
        shader(function(threads(body), F32, F32))
