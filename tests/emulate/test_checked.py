"""Checked kernels: each access is inside of an array, and ordered with those of other threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from k3tvm import emulate
from k3tvm.emulate.build import CHECK
from k3tvm.native import EmulationError
from tests.emulate.rig import SEEDS, kernel, on_device, room

ARRAYS = {"x": "float*", "out": "float*"}
CELLS = "__shared__ float cells[64];\n"


@pytest.fixture(autouse=True, params=SEEDS, ids="seed{}".format)
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are compiled with checks; what they find does not depend on the order."""
    monkeypatch.setenv(CHECK, "1")
    emulate.set_seed(request.param)
    yield
    emulate.set_seed(0)


def run(body: str, blocks: int = 2, functions: str = "") -> np.ndarray:
    """What a kernel makes of 0 ... 127, in an array of NaN as long."""
    out = room(128)
    kernel(body, ARRAYS, functions=functions)(
        on_device(np.arange(128, dtype="float32")), out, blocks
    )
    return out.numpy()


def test_what_barriers_order_is_no_race() -> None:
    """Through shared memory and through device memory, over two barriers, in both directions."""
    got = run(
        CELLS
        + """
        int at = blockIdx.x * 64 + threadIdx.x, mirror = blockIdx.x * 64 + 63 - threadIdx.x;
        cells[threadIdx.x] = x[at];
        __syncthreads();
        out[at] = cells[63 - threadIdx.x];
        __syncthreads();
        cells[threadIdx.x] = out[mirror];
        __syncthreads();
        x[at] = cells[63 - threadIdx.x] + x[at];
        """
    )
    np.testing.assert_array_equal(got, np.arange(128).reshape(2, 64)[:, ::-1].ravel())


def test_an_exchange_orders_the_threads_of_a_warp() -> None:
    """And only those."""
    body = CELLS + "cells[threadIdx.x] = x[threadIdx.x];\n__syncwarp();\n"
    run(body + "out[blockIdx.x * 64 + threadIdx.x] = cells[threadIdx.x ^ 31];")
    with pytest.raises(EmulationError, match="race: thread .* no barrier stands between"):
        run(body + "out[blockIdx.x * 64 + threadIdx.x] = cells[threadIdx.x ^ 32];")


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (CELLS + "cells[threadIdx.x] = 1;\nout[threadIdx.x] = cells[threadIdx.x ^ 1];", "race"),
        (CELLS + "cells[threadIdx.x / 2] = 1;", "writes what thread \\d+ wrote"),
        (
            CELLS + "cells[threadIdx.x] = 1;\n__syncthreads();\n"
            "float y = cells[threadIdx.x ^ 1];\ncells[threadIdx.x] = y;",
            "writes what .* read|reads what .* wrote",
        ),
        (
            CELLS + "cells[threadIdx.x] = 1;\n__syncthreads();\n"
            "out[blockIdx.x * 64 + threadIdx.x] = cells[7];\nif (threadIdx.x == 63) cells[7] = 2;",
            "writes what several threads read|reads what thread 63 wrote",
        ),
        ("out[threadIdx.x] = 1;", "writes what thread \\d+ of block . wrote in another block"),
        ("out[blockIdx.x * 64 + threadIdx.x / 2] = 1;", "no barrier .*tensor of 512 bytes"),
        (CELLS + "out[threadIdx.x] = cells[threadIdx.x + 1];", "reads byte 256 of a shared array"),
        ("out[blockIdx.x * 64 + threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x + 1];",
         "reads byte 512 of a tensor of 512"),
        ("if (blockIdx.x + threadIdx.x == 0) out[-1] = 1;", "writes byte -4 of a tensor of 512"),
    ],
)  # fmt: skip
def test_a_fault_is_named(body: str, what: str) -> None:
    """Though results may be right: the other threads happen to be in time."""
    with pytest.raises(EmulationError, match=f"kernel probe: .*({what})"):
        run(body)


def test_bytes_beside_each_other_are_no_race() -> None:
    body = "((unsigned char*)out)[blockIdx.x * 64 + threadIdx.x] = 1;"
    assert (run(body).view(np.uint8)[:128] == 1).all()


def test_launches_follow_each_other() -> None:
    """What one wrote the next may read, and overwrite."""
    launch = kernel("out[threadIdx.x] = x[threadIdx.x ^ 1] + 1;", ARRAYS)
    first, second = on_device(np.zeros(64, np.float32)), room(64)
    launch(first, second, 1)
    launch(second, first, 1)
    assert (first.numpy() == 2).all()
