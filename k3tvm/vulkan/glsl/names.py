"""Turns TIR variables into GLSL identifiers that are unique and no words of the language."""

from __future__ import annotations

import re
from typing import Any

from k3tvm.vulkan.glsl.types import ELEMENTS

# Keywords, reserved words and the built-in functions that generated code calls or could shadow.
WORDS = """
Arguments Push abs acos active all and any asin asm atan atomicAdd atomic_uint attribute
barrier bitCount bool break buffer bvec2 bvec3 bvec4 case cast ceil centroid clamp class
coherent common const continue cos cosh cross default degrees discard distance do dot double
dvec2 dvec3 dvec4 else enum equal exp exp2 extern external false filter findLSB findMSB fixed
flat float floor fma for fract frexp goto greaterThan half highp hvec2 hvec3 hvec4 if in
inline inout input int interface invariant inverse inversesqrt isampler2D isinf isnan ivec2
ivec3 ivec4 layout ldexp length lessThan log log2 long lowp main mat2 mat3 mat4 max mediump
min mix mod modf namespace noinline noise normalize not or out output pack32 pack64 packed
partition patch pc pow precise precision public push radians readonly reflect resource
restrict return round roundEven sample sampler2D sampler3D shared short sign sin sinh sizeof
smooth sqrt static step struct subroutine superp switch tan tanh template texture this
transpose true trunc typedef uint uniform union unpack16 unpack32 unpack8 unsigned using uvec2
uvec3 uvec4 varying vec2 vec3 vec4 void volatile while workgroupcoherent writeonly xor
"""
RESERVED = frozenset(WORDS.split()) | {element.scalar for element in ELEMENTS.values()}


def identifier(text: str) -> str:
    """A legal identifier near `text`: GLSL reserves double underscores and the prefix gl_."""
    name = re.sub(r"_+", "_", re.sub(r"\W", "_", text, flags=re.ASCII)) or "v"
    name = "v" if name == "_" else name
    return f"v_{name.lstrip('_')}" if re.match(r"[0-9]|gl_|k3_|R_|In_|At_", name) else name


class Names:
    """Gives every variable one name, and every name to one variable only."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._used = set(RESERVED)

    def fresh(self, text: str) -> str:
        """A name that was not given before, near `text`."""
        base = name = identifier(text)
        count = 0
        while name in self._used:
            count += 1
            name = f"{base}_{count}".replace("__", "_")
        self._used.add(name)
        return name

    def of(self, variable: Any) -> str:
        """The name of a TIR variable."""
        if variable not in self._names:
            self._names[variable] = self.fresh(str(variable.name))
        return self._names[variable]

    def known(self, variable: Any) -> bool:
        """Whether the variable has a name already."""
        return variable in self._names

    def set(self, variable: Any, text: str) -> None:
        """Let a variable stand for an expression."""
        self._names[variable] = text
