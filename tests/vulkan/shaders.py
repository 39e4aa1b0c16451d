"""Turns small TIR functions into shaders, and runs functions on the first Vulkan device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, get_args

import numpy as np

from k3tvm._tvm import IRBuilder, T, tvm
from k3tvm.schedules.profile import FOREIGN, Feature, GpuProfile
from k3tvm.vulkan import build, plugin
from k3tvm.vulkan.glsl.kernel import Shader, translate

PROFILE = GpuProfile(
    "vulkan", "test", 1024, (1024, 1024, 64), features=frozenset(get_args(Feature)) - FOREIGN
)
Array = np.ndarray[Any, Any]


def target() -> Any:
    """The TVM target of `PROFILE`."""
    return tvm.target.Target(PROFILE.tvm_target())


def function(body: Callable[..., None], *arguments: tuple[tuple[int, ...], str]) -> Any:
    """A TIR function `kernel` with these buffers (shape, dtype), built by `body(*buffers)`."""
    with IRBuilder() as ib:
        with T.prim_func(s_tir=True):
            T.func_name("kernel")
            T.func_attr({"global_symbol": "kernel", "tirx.noalias": True})
            handles = [T.arg(f"p{i}", T.handle()) for i in range(len(arguments))]
            buffers = [
                T.match_buffer(h, shape, dtype)
                for h, (shape, dtype) in zip(handles, arguments, strict=True)
            ]
            body(*buffers)
    return ib.get()


def lowered(function: Any) -> Any:
    """The device function that TVM makes of a function with one kernel."""
    chosen = target()
    module = tvm.IRModule({"kernel": function})
    module = tvm.tirx.transform.BindTarget(chosen)(module)
    pipeline, _, finish = tvm.tirx.get_default_tir_pipeline(chosen)
    split = import_module("tvm.tirx.build").split_host_device_mods  # a function hides the module
    _, devices = split(pipeline(module))
    (device,) = (finish()(m) for m in devices.values())
    (kernel,) = device.functions.values()
    return kernel


def shader(function: Any, push_bytes: int = 128) -> Shader:
    """The shader of a function with one kernel."""
    return translate(lowered(function), push_bytes)


@cache
def device() -> Any:
    """The first Vulkan device, with the generator registered."""
    plugin.load()
    build.register()
    return tvm.device("vulkan", 0)


def run(function: Any, inputs: Sequence[Array], output: Array) -> Array:
    """Call a function of TIR with buffers (inputs..., output) and return the output."""
    where = device()
    compiled = tvm.compile(tvm.IRModule({"kernel": function}), target=target())
    tensors = [tvm.runtime.tensor(a, where) for a in (*inputs, output)]
    compiled["kernel"](*tensors)
    where.sync()
    return np.asarray(tensors[-1].numpy())
