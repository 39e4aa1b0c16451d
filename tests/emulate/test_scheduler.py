"""The emulator itself: threads, barriers, exchanges, and the faults that it is there to find."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from k3tvm import emulate
from k3tvm._ffi import tvm_ffi
from k3tvm.compiler.launch import Launch
from k3tvm.cuda.device import device_functions
from k3tvm.emulate.build import compiled
from k3tvm.emulate.module import write_module
from k3tvm.emulate.text import Piece
from k3tvm.native import EmulationError
from tests.emulate.rig import SEEDS, kernel, on_device, room

NEIGHBOUR = """
    __shared__ alignas(64) float cells[64];
    cells[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    BARRIER
    out[blockIdx.x * 64 + threadIdx.x] = cells[(threadIdx.x + SHIFT) % 64];
"""
ARRAYS = {"x": "float*", "out": "float*"}


@pytest.fixture(autouse=True)
def forward():
    """Each test chooses its orders; later ones begin with the plain one."""
    yield
    emulate.set_seed(0)


def neighbours(barrier: str = "__syncthreads();", shift: int = 1, blocks: int = 5):
    """cells[i + shift] of each block, in every order of the threads."""
    run = kernel(NEIGHBOUR.replace("BARRIER", barrier).replace("SHIFT", str(shift)), ARRAYS)
    x = np.arange(64 * blocks, dtype=np.float32)
    results = []
    for seed in SEEDS:
        emulate.set_seed(seed)
        out = room(64 * blocks)
        run(on_device(x), out, blocks)
        results.append(out.numpy())
    return np.roll(x.reshape(blocks, 64), -shift, axis=1).ravel(), results


@pytest.mark.parametrize("blocks", [1, 5, 300])
def test_a_barrier_orders_writes_before_reads(blocks: int) -> None:
    want, results = neighbours(blocks=blocks)
    for got in results:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shift", [1, 63, 32])
def test_a_missing_barrier_is_seen(shift: int) -> None:
    """Threads read what others have not written yet: NaN, whichever way they lean."""
    want, results = neighbours(barrier="", shift=shift)
    assert any(np.isnan(got).any() for got in results)
    assert not all(np.array_equal(got, want) for got in results)


def test_a_race_gives_another_result_in_another_order() -> None:
    """An in-place scan that relies on lock step: right backward, wrong in the other orders."""
    run = kernel(
        """
        __shared__ alignas(64) float cells[64];
        cells[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        for (int step = 1; step < 64; step *= 2) {
          if ((int)threadIdx.x >= step) cells[threadIdx.x] += cells[threadIdx.x - step];
          __syncthreads();
        }
        out[threadIdx.x] = cells[threadIdx.x];
        """,
        ARRAYS,
    )
    x, results = np.ones(64, np.float32), []
    for seed in SEEDS:
        emulate.set_seed(seed)
        out = room(64)
        run(on_device(x), out, 1)
        results.append(out.numpy())
    np.testing.assert_array_equal(results[1], np.arange(1, 65))
    assert not np.array_equal(results[0], results[1]) and not np.array_equal(*results[1:])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_barrier_that_not_all_reach_is_an_error(seed: int) -> None:
    """It names the kernel and the block; the next launch works."""
    emulate.set_seed(seed)
    run = kernel("if (threadIdx.x < 40) __syncthreads();", {"x": "float*"})
    x = room(1)
    with pytest.raises(EmulationError, match=r"kernel probe: .*40 at a barrier.*24 have ended"):
        run(x, 1)
    with pytest.raises(EmulationError, match=r"block \d+, 0, 0"):
        run(x, 50)
    test_a_barrier_orders_writes_before_reads(1)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("if (threadIdx.x < 40) {\n__syncthreads();\n} else {\n__syncthreads();\n}", "barriers"),
        ("if (threadIdx.x % 2) {\n__syncwarp();\n} else {\n__syncwarp();\n}", "exchanges"),
        ("if (threadIdx.x % 2)\n__shfl_sync(~0, 1, 0);\nelse\n__ballot_sync(~0, 1);", "exchanges"),
    ],
)
def test_waits_at_different_places_do_not_count_as_one(body: str, what: str) -> None:
    """A device may let them pass, or hang: the language wants all threads at the same one."""
    run = kernel(body, {"out": "float*"})
    with pytest.raises(EmulationError, match=f"kernel probe: .* wait at different {what}"):
        run(room(64), 1)


def test_half_a_warp_waiting_for_the_other_half_is_an_error() -> None:
    run = kernel("if (threadIdx.x % 2) __syncwarp(); else __syncthreads();", {"x": "float*"})
    with pytest.raises(EmulationError, match="32 at a barrier of the block, 32 at an exchange"):
        run(room(1), 1)


def test_an_exchange_among_some_lanes_is_refused_not_guessed() -> None:
    run = kernel("x[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0);", {"x": "float*"})
    with pytest.raises(EmulationError, match="some lanes"):
        run(room(64), 1)


@pytest.mark.parametrize("index", ["64", "65", "(threadIdx.x ? 0 : 70)"])
def test_f28_writing_past_a_shared_array_is_an_error(index: str) -> None:
    run = kernel(f"__shared__ float cells[64]; cells[{index}] = 1.0f;", {"x": "float*"})
    with pytest.raises(EmulationError, match="kernel probe: wrote past the end of shared array 0"):
        run(room(1), 1)


@pytest.mark.parametrize("index", [-1, 7, 8])
def test_f28_writing_past_a_tensor_is_an_error(index: int) -> None:
    run = kernel(f"x[{index}] = 1.0f;", {"x": "float*"})
    where = "in front" if index < 0 else "past the end"
    with pytest.raises(EmulationError, match=f"kernel probe: wrote {where} of a tensor of 28"):
        run(room(7), 1)


def test_memory_is_nan_until_it_is_written() -> None:
    assert np.isnan(room(100).numpy()).all()
    run = kernel("__shared__ float cells[64]; out[threadIdx.x] = cells[threadIdx.x];", ARRAYS)
    out = on_device(np.zeros(128, np.float32))
    run(out, out, 2)
    assert np.isnan(out.numpy()[:64]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles_take_the_right_lane(seed: int) -> None:
    emulate.set_seed(seed)
    run = kernel(
        """
        int lane = threadIdx.x % 32, all = 0xffffffff;
        out[threadIdx.x] = __shfl_sync(all, (int)threadIdx.x, 5);
        out[64 + threadIdx.x] = __shfl_xor_sync(all, (int)threadIdx.x, 9);
        out[128 + threadIdx.x] = __shfl_down_sync(all, (int)threadIdx.x, 3);
        out[192 + threadIdx.x] = __shfl_up_sync(all, (int)threadIdx.x, 3);
        out[256 + threadIdx.x] = __shfl_sync(all, (int)threadIdx.x, 1, 4);
        out[320 + threadIdx.x] = __ballot_sync(all, lane % 3 == 0);
        """,
        {"out": "int*"},
    )
    out = room(384, "int32")
    run(out, 1)
    t, got = np.arange(64), out.numpy().reshape(6, 64)
    lane, warp = t % 32, t // 32 * 32
    want = [
        warp + 5,
        t ^ 9,
        np.where(lane < 29, t + 3, t),
        np.where(lane >= 3, t - 3, t),
        t // 4 * 4 + 1,
        np.full(64, sum(1 << i for i in range(0, 32, 3))),
    ]
    np.testing.assert_array_equal(got, np.array(want).astype(np.int32))


def test_grid_and_block_are_what_the_launch_says() -> None:
    run = kernel(
        "out[blockIdx.x * 33 + threadIdx.x] = "
        "blockIdx.x * 1000000 + gridDim.x * 10000 + blockDim.x * 100 + threadIdx.x;",
        {"out": "int*"},
        threads=33,
    )
    out = room(33 * 4, "int32")
    run(out, 4)
    want = [b * 1000000 + 4 * 10000 + 33 * 100 + t for b in range(4) for t in range(33)]
    assert out.numpy().tolist() == want


def test_float16_is_rounded_to_nearest_and_keeps_subnormals() -> None:
    run = kernel("out[threadIdx.x] = (float)(half)x[threadIdx.x];", ARRAYS)
    x = np.linspace(-3, 3, 64, dtype=np.float32) * np.float32(1e-5)
    x[:4] = [65520.0, 65519.9, np.inf, 2.0**-25]
    out = room(64)
    run(on_device(x), out, 1)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out.numpy(), x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("seed", SEEDS)
def test_everyone_gives_the_values_of_all_lanes(seed: int) -> None:
    """What named device functions are written with: the last exchange stays while one more runs."""
    emulate.set_seed(seed)
    functions = """
      struct Pair { float a, b; };
      inline float both(float x) {
        Pair mine = {x, 2 * x};
        const Pair* all = k3emu::everyone(mine);
        float last = all[31].a;
        const float* again = k3emu::everyone(all[3].b);
        return again[0] + last;
      }
    """
    run = kernel("out[threadIdx.x] = both((float)threadIdx.x);", {"out": "float*"}, 32, functions)
    out = room(32)
    run(out, 1)
    assert (out.numpy() == 37).all()


def test_many_modules_at_once_are_told_apart() -> None:
    """Libraries out of memory: the linker must not take one for another, and has room for all."""
    runs = [kernel(f"out[threadIdx.x] = {i};", {"out": "float*"}, 32) for i in range(3)]
    text = 'extern "C" __global__ void probe(float* out) { out[threadIdx.x] = 3; }'
    launch = Launch("probe", ("handle",), (), (32, 1, 1), (0, 1, 1), 0)
    blob = write_module("cuda", compiled("cuda", "", [Piece("probe", text)]), [launch])
    load = tvm_ffi.get_global_func("k3tvm.emulate.create_module")
    others = [load(blob) for _ in range(400)]
    out = room(32)
    for i, run in enumerate(runs):
        run(out, 1)
        assert (out.numpy() == i).all()
    others[-1]["probe"](ctypes.c_void_p(out.data_ptr()))
    assert (out.numpy() == 3).all()


COPIES = """
    __shared__ alignas(16) float cells[192];
    for (int i = 0; i < 3; ++i) {
      k3_copy4(&cells[64 * i + threadIdx.x], &x[64 * i + threadIdx.x]);
      k3_copies_sent();
    }
    k3_copies_done(LATER);
    __syncthreads();
    for (int i = 0; i < 3; ++i) out[64 * i + threadIdx.x] = cells[64 * i + (threadIdx.x ^ 1)];
"""


@pytest.mark.parametrize("later", [0, 1, 2])
def test_a_copy_that_was_not_waited_for_has_not_arrived(later: int) -> None:
    """As late as hardware may have it: a kernel that waits for too few groups reads NaN."""
    x, out = np.arange(192, dtype=np.float32), room(192)
    functions = device_functions("k3_copy4(); k3_copies_sent(); k3_copies_done();")
    kernel(COPIES.replace("LATER", str(later)), ARRAYS, functions=functions)(on_device(x), out, 1)
    want = x.reshape(96, 2)[:, ::-1].reshape(3, 64).copy()
    want[3 - later :] = np.nan
    np.testing.assert_array_equal(out.numpy().reshape(3, 64), want)
