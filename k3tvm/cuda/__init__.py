"""CUDA: the toolchain that makes device code, and what reads it back."""
