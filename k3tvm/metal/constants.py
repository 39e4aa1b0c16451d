"""Float constants keep all their digits on the way through TVM's Metal generator.

It prints seven digits, and a float32 needs nine: 12582912 would become 12582910. So a constant that
seven digits do not say goes through as the call of a function with its bits in the name, and comes
out as a number.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from k3tvm._ffi import tvm_ffi
from k3tvm._tvm import T, tvm

PREFIX = "k3_float_"
CALL = re.compile(rf"\b{PREFIX}([0-9a-f]{{8}})\(\)")


def hidden(module: Any) -> Any:
    """The module with calls in the place of constants that seven digits do not say."""
    return tvm_ffi.structural_map(module, (tvm.tirx.FloatImm, _hidden))


def shown(text: str) -> str:
    """The source with nine digits of every constant in the place of its call."""
    return CALL.sub(lambda m: f"{_float(int(m[1], 16)):.8e}f", text)


def _hidden(constant: Any) -> Any:
    value = float(constant.value)
    if str(constant.ty) != "float32" or _float(_bits(value)) == _single(float(f"{value:e}")):
        return constant
    return T.call_pure_extern("float32", f"{PREFIX}{_bits(value):08x}")


def _bits(value: float) -> int:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits)


def _float(bits: int) -> float:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(value)


def _single(value: float) -> float:
    """The nearest float32."""
    return _float(_bits(value))
