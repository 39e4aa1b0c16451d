"""One kernel for Apple's GPUs: its source and what its launch asks for."""

from __future__ import annotations

from dataclasses import dataclass

from k3tvm.bundle.manifest import DeviceKernel
from k3tvm.compiler.launch import Launch

SLOT = 8  # bytes of each argument by value


@dataclass(frozen=True)
class MetalKernel:
    """Source as it is compiled for the device, and the launch.

    compiled: Apple's compiler has made a library of it; else the device's system does.
    """

    launch: Launch
    text: str
    compiled: bool = False

    @property
    def name(self) -> str:
        """The function's name in the source."""
        return self.launch.name

    def entry(self) -> DeviceKernel:
        """What the manifest says of it."""
        launch = self.launch
        values = sum(p != "handle" for p in launch.parameters)
        features = ("simdgroup_matrix",) if "simdgroup_load(" in self.text else ()
        return DeviceKernel(
            launch.name, launch.threads, launch.shared_bytes, values * SLOT, features
        )
