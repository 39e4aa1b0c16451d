"""Turns lowered TIR device functions into GLSL 4.60 compute shaders; `kernel.translate` does it.

`statements`, `expressions`, `memory`, `calls`, `reinterpret` and `cooperative` are tables from node
or function to text; `writer` is what one translation collects; `usage` and `exchange` look at a
kernel beforehand; `lanes` takes wide vectors apart; `library` has functions that GLSL lacks.

What kernels may rely on:
* Tensors begin at multiples of 16 bytes. Vectors of 2 or 4 lanes that provably begin at a multiple
  of their own size are one access, all others go lane by lane.
* `tvm_storage_sync("shared")` orders shared memory, and device memory through which threads hand
  values to each other. There is no barrier between workgroups.
* Subscripts are of 32 bits where TIR's index is; drivers compute the address in 64 (measured on
  lavapipe beyond 4 GiB). Indices of 64 bits become address arithmetic and need the feature int64.
* Products and sums are not `precise`: a driver may fuse them, which only makes them more exact, and
  `fma` need not be fused (on lavapipe neither is). What needs an exact product must split its
  factors, as `functions.EXP` does.
* exp, log, tanh, erf, pow and sigmoid are accurate to a few units of the last place over the whole
  range (`functions`); other functions are as exact as the driver's. In float16 they are computed in
  float32.
* One-element arrays of a thread are plain variables.
"""
