"""One kernel for NVIDIA's GPUs: its launch, and what it takes on each architecture."""

from __future__ import annotations

import re
from dataclasses import dataclass

from k3tvm.bundle.kernel_table import Row
from k3tvm.bundle.manifest import DeviceKernel
from k3tvm.compiler.launch import Launch
from k3tvm.cuda.ptxas import Resources


@dataclass(frozen=True)
class CudaKernel:
    """A launch, the kernel's own text, and its resources, one for each architecture."""

    launch: Launch
    text: str
    resources: tuple[Resources, ...] = ()

    @property
    def name(self) -> str:
        """The function's name in the code."""
        return self.launch.name

    def entry(self) -> DeviceKernel:
        """What the manifest says of it."""
        launch = self.launch
        features = ("tensor_core",) if "k3_mma_" in self.text else ()
        return DeviceKernel(
            launch.name,
            launch.threads,
            launch.shared_bytes,
            features=features,
            resources=self.resources,
        )

    def row(self) -> Row:
        """What TVM's module says of it."""
        return Row(self.name, self.launch.parameters, self.launch.tags)


def kernel_texts(text: str) -> dict[str, str]:
    """The definition of each kernel in TVM's text, by name."""
    parts = re.split(r'(?=^extern "C" __global__ )', text, flags=re.MULTILINE)
    bodies = [part for part in parts if re.match(r'extern "C"[^;]*?\)\s*\{', part)]
    return {_name(body): body.strip() for body in bodies}


def _name(body: str) -> str:
    match = re.search(r"(\w+)\s*\((?![\d, ]+\))", body)  # not that of __launch_bounds__
    return match[1] if match else ""
