"""One kernel for Apple's GPUs: its source and what its launch asks for."""

from __future__ import annotations

from dataclasses import dataclass

from k3tvm.bundle.manifest import DeviceKernel
from k3tvm.compiler.launch import Launch


@dataclass(frozen=True)
class MetalKernel:
    """Source as it is compiled for the device, and the launch."""

    launch: Launch
    text: str

    @property
    def name(self) -> str:
        """The function's name in the source."""
        return self.launch.name

    def entry(self) -> DeviceKernel:
        """What the manifest says of it."""
        launch = self.launch
        features = ("simdgroup_matrix",) if "simdgroup_load(" in self.text else ()
        return DeviceKernel(launch.name, launch.threads, launch.shared_bytes, features=features)
