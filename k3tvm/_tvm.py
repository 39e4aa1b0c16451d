"""TVM with its compiler, imported in one place; see `k3tvm._ffi` for why not simply imported."""

from __future__ import annotations

from k3tvm._ffi import PINS, without_torch

with without_torch():
    import tvm
    from tvm import relax
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script import builder as T

__all__ = ["PINS", "IRBuilder", "T", "relax", "tvm"]
