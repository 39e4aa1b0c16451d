"""Turns lowered TIR device functions into GLSL 4.60 compute shaders; `kernel.translate` does it."""
