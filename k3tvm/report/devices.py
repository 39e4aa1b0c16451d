"""Figures of some devices, as their makers publish them, against which kernels are held.

Rates are per second: bytes of memory; float32 operations, two in a fused multiply-add; dense 16-bit
products of the matrix units with float32 sums, operations counted the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3tvm.bundle.kernels import Traffic

LAUNCH = 2e-6  # seconds that a kernel takes at least, within a graph: an assumption, not a figure


@dataclass(frozen=True)
class Figures:
    """A device's rates; source: where they are published."""

    name: str
    bytes: float
    flops: float
    matrix_flops: float
    source: str


H200 = Figures("NVIDIA H200 SXM", 4.8e12, 66.9e12, 989e12, "NVIDIA H200 datasheet")
A100 = Figures("NVIDIA A100 SXM 80 GB", 2.039e12, 19.5e12, 312e12, "NVIDIA A100 datasheet")
A10 = Figures("NVIDIA A10", 600e9, 31.2e12, 125e12, "NVIDIA A10 datasheet")
L40S = Figures("NVIDIA L40S", 864e9, 91.6e12, 362e12, "NVIDIA L40S datasheet")
B200 = Figures("NVIDIA B200", 8.0e12, 80e12, 2250e12, "NVIDIA DGX B200 datasheet, an eighth")
RTX_5090 = Figures(
    "NVIDIA GeForce RTX 5090", 1.792e12, 104.8e12, 209.5e12, "NVIDIA RTX Blackwell whitepaper"
)
M1_MAX = Figures("Apple M1 Max", 400e9, 10.4e12, 10.4e12, "Apple newsroom, 18 October 2021")
RX_7900_XTX = Figures(
    "AMD Radeon RX 7900 XTX", 960e9, 61.4e12, 122.8e12, "AMD product page (dual issue)"
)

# CUDA architecture -> a device that has it, the first one found is taken
CUDA_DEVICES = {
    "sm_90a": H200,
    "sm_90": H200,
    "sm_100a": B200,
    "sm_80": A100,
    "sm_89": L40S,
    "sm_120": RTX_5090,
    "sm_86": A10,
}


def figures_for(kind: str, archs: set[str]) -> Figures:
    """The device that stands for a target."""
    if kind == "metal":
        return M1_MAX
    if kind == "vulkan":
        return RX_7900_XTX
    return next((device for arch, device in CUDA_DEVICES.items() if arch in archs), H200)


@dataclass(frozen=True)
class Estimate:
    """Seconds of one launch at best, and what takes them."""

    seconds: float
    bound: str


def estimate(t: Traffic, device: Figures) -> Estimate:
    """The longest of: moving the bytes, vector instructions, matrix instructions, a launch.

    An integer operation takes as long as two float operations (a fused multiply-add), which is true
    where integers have the full rate; address arithmetic is not counted.
    """
    times = {
        "memory": (t.read_bytes + t.written_bytes) / device.bytes,
        "compute": (t.flops + 2 * t.integer_ops) / device.flops,
        "matrix": t.matrix_flops / device.matrix_flops,
        "latency": LAUNCH,
    }
    bound = max(times, key=lambda name: times[name])
    return Estimate(times[bound], bound)
