"""Theoretical occupancy: by hand, and as NVIDIA's own calculator has it where its header is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from k3tvm.cuda.occupancy import MULTIPROCESSORS, occupancy
from k3tvm.cuda.tools import find_toolkit
from tests.cuda.toolkit import require_toolkit

# Blocks, warps and what stops, worked out by hand.
CASES = [
    # 8 warps a block: 8 blocks are the 64 warps; 16 registers stop nothing
    (("sm_80", 256, 16, 0), (8, 64, 1.0, "warps")),
    # 1 warp a block: no more than 32 blocks (24 on Ada)
    (("sm_80", 32, 16, 0), (32, 32, 0.5, "blocks")),
    (("sm_89", 32, 16, 0), (24, 24, 0.5, "blocks")),
    # 255 registers: 8192 a warp, 2 warps in a partition of 16384, 8 in all, so 1 block of 8
    (("sm_90a", 256, 255, 0), (1, 8, 0.125, "registers")),
    # 65 registers: 2080 a warp becomes 2304, 7 in a partition, 28 in all, 7 blocks of 4
    (("sm_120", 128, 65, 0), (7, 28, 28 / 48, "registers")),
    # 48 KiB and the 1 KiB of the system: 3 in 164 KiB, 2 in 100, 4 in 228
    (("sm_80", 128, 32, 49152), (3, 12, 12 / 64, "shared memory")),
    (("sm_86", 128, 32, 49152), (2, 8, 8 / 48, "shared memory")),
    (("sm_100a", 128, 32, 49152), (4, 16, 0.25, "shared memory")),
    # 9 warps of 72 registers: 2304 each, 27648 for 12, for a launch counts whole partitions; but
    # 28 fit, which are 3 blocks of 9
    (("sm_80", 288, 72, 0), (3, 27, 27 / 64, "registers")),
    # 32 warps of 80 registers are 81920: not one block
    (("sm_80", 1024, 80, 0), (0, 0, 0.0, "registers")),
]


@pytest.mark.parametrize("kernel, expected", CASES, ids=str)
def test_by_hand(kernel, expected):
    found = occupancy(*kernel)
    assert (found.blocks, found.warps, found.share, found.limit) == expected


def test_unknown_architecture():
    assert occupancy("sm_88", 128, 32, 0) is None


PROGRAM = """
#include <cstdio>
#include <cstddef>
#include <cuda_occupancy.h>
int main() {
  int cc, sm_warps, shared, threads, registers, own;
  while (scanf("%d %d %d %d %d %d", &cc, &sm_warps, &shared, &threads, &registers, &own) == 6) {
    cudaOccDeviceProp p;
    p.computeMajor = cc / 10; p.computeMinor = cc % 10;
    p.maxThreadsPerBlock = 1024; p.maxThreadsPerMultiprocessor = sm_warps * 32;
    p.regsPerBlock = p.regsPerMultiprocessor = 65536; p.warpSize = 32;
    p.sharedMemPerBlock = 49152; p.sharedMemPerMultiprocessor = shared;
    p.sharedMemPerBlockOptin = shared - 1024; p.numSms = 100; p.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes f;
    f.maxThreadsPerBlock = 1024; f.numRegs = registers; f.sharedSizeBytes = own;
    cudaOccDeviceState s;
    cudaOccResult r;
    auto status = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &f, &s, threads, 0);
    printf("%d\\n", status == CUDA_OCC_SUCCESS ? r.activeBlocksPerMultiprocessor : -1);
  }
}
"""


def test_as_nvidia_counts(tmp_path: Path):
    """Blocks for every architecture and a grid of kernels, by the header that comes with nvcc."""
    header = find_header()
    kernels = [
        (threads, registers, shared)
        for threads in (32, 96, 128, 256, 288, 512, 1024)
        for registers in (16, 33, 64, 72, 96, 128, 168, 255)
        for shared in (0, 1000, 8192, 20000, 49152)
    ]
    rows = [(cc, sm, *kernel) for cc, sm in MULTIPROCESSORS.items() for kernel in kernels]
    lines = [f"{cc} {sm.warps} {sm.shared_bytes} {t} {r} {s}" for cc, sm, t, r, s in rows]
    (tmp_path / "a.cc").write_text(PROGRAM)
    command = ["g++", "-w", f"-I{header.parent}", str(tmp_path / "a.cc"), "-o", str(tmp_path / "a")]
    subprocess.run(command, check=True)
    said = subprocess.run([tmp_path / "a"], input="\n".join(lines), capture_output=True, text=True)
    ours = [occupancy(f"sm_{cc}", t, r, s).blocks for cc, _, t, r, s in rows]
    assert [int(n) for n in said.stdout.split()] == ours


def find_header() -> Path:
    require_toolkit()
    folder = find_toolkit().folder.resolve()
    places = [folder.parent / "include", Path("/usr/local/cuda/include")]
    places += sorted(Path("/usr/local").glob("cuda-*/include"))
    found = [p / "cuda_occupancy.h" for p in places if (p / "cuda_occupancy.h").exists()]
    if not found:
        pytest.skip("compares with NVIDIA's cuda_occupancy.h, which this toolkit lacks")
    return found[0]
