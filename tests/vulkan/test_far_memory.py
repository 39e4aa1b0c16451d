"""Long buffers, addresses beyond 4 GiB, many rows (F26, F29)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from k3tvm._tvm import IRBuilder, T, tvm
from k3tvm.errors import K3Error
from tests.vulkan.shaders import device, function, run, target

COUNT = 256


def far_reader(index: str, lanes: int) -> Any:
    """B[i] = A[offset + i], with indices of this type and so many lanes at a time."""
    with IRBuilder() as ib:
        with T.prim_func(s_tir=True):
            T.func_attr({"global_symbol": "kernel", "tirx.noalias": True})
            handles = T.arg("pa", T.handle()), T.arg("pb", T.handle())
            offset = T.arg("offset", tvm.tirx.Var("offset", "int32"))
            length = tvm.tirx.Var("n", index)
            a = IRBuilder.name("A", T.match_buffer(handles[0], (length,), "float32"))
            b = IRBuilder.name("B", T.match_buffer(handles[1], (COUNT,), "float32"))
            with T.launch_thread("threadIdx.x", COUNT // lanes) as tx:
                first = (T.cast(offset, index) + T.cast(tx, index)) * lanes
                if lanes == 1:
                    T.buffer_store(b, a[first], [tx])
                else:
                    T.buffer_store(b, a[T.Ramp(first, 1, lanes)], [T.Ramp(tx * lanes, 1, lanes)])
    return ib.get()


@pytest.fixture(scope="module")
def apart() -> Any:
    """Two buffers whose addresses are more than 4 GiB apart, the lower one first.

    One buffer cannot be that long on lavapipe (2 GiB), but a pointer to one and an index reach
    another. Nothing but a few elements is touched, so little memory is used.
    """
    buffers = [tvm.runtime.empty((500_000_000,), "float32", device()) for _ in range(4)]
    buffers.sort(key=lambda t: t.data_ptr())
    assert buffers[-1].data_ptr() - buffers[0].data_ptr() > 1 << 32
    return buffers[0], buffers[-1], buffers


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("lanes", [1, 4])
def test_addresses_beyond_four_gigabytes(apart, index, lanes):
    """Arithmetic in 32 bits, signed or not, would end up elsewhere."""
    low, high, _ = apart
    offset = (high.data_ptr() - low.data_ptr()) // (4 * lanes)
    values = np.arange(COUNT, dtype="float32") + lanes
    put(high, values)
    module = tvm.compile(tvm.IRModule({"kernel": far_reader(index, lanes)}), target=target())
    launch = module.mod.imports[0].get_function("kernel_kernel")
    b = tvm.runtime.tensor(values * 0, device())
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (low, b))
    launch(*pointers, offset, COUNT // lanes)
    device().sync()
    assert np.array_equal(b.numpy(), values)


def put(tensor: Any, values: Any) -> None:
    """Write the first elements of a tensor on the device."""

    def body(a: Any, b: Any) -> None:
        with T.launch_thread("threadIdx.x", COUNT) as tx:
            T.buffer_store(b, a[tx], [tx])

    short = function(body, ((COUNT,), "float32"), (tuple(tensor.shape), "float32"))
    module = tvm.compile(tvm.IRModule({"kernel": short}), target=target())
    module["kernel"](tvm.runtime.tensor(values, device()), tensor)


def test_buffer_of_192_megabytes():
    """More than maxStorageBufferRange, which bounds descriptors but not addresses."""
    size = 192 << 20

    def body(a: Any, b: Any) -> None:
        with T.launch_thread("threadIdx.x", 256) as tx:
            T.buffer_store(b, a[size - 256 + tx], [tx])

    data = np.zeros(size, "uint8")
    data[-256:] = np.arange(256)
    got = run(function(body, ((size,), "uint8"), ((256,), "uint8")), [data], np.zeros(256, "uint8"))
    assert np.array_equal(got, np.arange(256))


def row_sums(rows: int, rows_per_group: int) -> Any:
    """Sums of rows of three numbers."""

    def body(a: Any, b: Any) -> None:
        with T.launch_thread("blockIdx.x", -(-rows // rows_per_group)) as bx:
            with T.launch_thread("threadIdx.x", rows_per_group) as tx:
                row = bx * rows_per_group + tx
                with T.If(row < rows):
                    with T.Then():
                        T.buffer_store(b, a[row, 0] + a[row, 1] + a[row, 2], [row])

    return function(body, ((rows, 3), "float32"), ((rows,), "float32"))


def test_many_rows_share_workgroups():
    rows = 70001
    x = np.random.default_rng(5).integers(-9, 9, (rows, 3)).astype("float32")
    assert np.array_equal(run(row_sums(rows, 64), [x], np.zeros(rows, "float32")), x.sum(1))


def test_more_workgroups_than_a_dimension_has_is_an_error():
    """65535 is all that every device has; a launch beyond must not be cut short in silence."""
    rows = 70001
    with pytest.raises((K3Error, RuntimeError), match="65535"):
        run(row_sums(rows, 1), [np.zeros((rows, 3), "float32")], np.zeros(rows, "float32"))
