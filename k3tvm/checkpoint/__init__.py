"""Checkpoint folders in the published format: reading, checking, MXFP4, random examples."""

from k3tvm.checkpoint.checkpoint import Checkpoint
from k3tvm.checkpoint.expected import TensorSpec, expected_tensors
from k3tvm.checkpoint.tensor_info import TensorInfo

__all__ = ["Checkpoint", "TensorInfo", "TensorSpec", "expected_tensors"]
