"""Turns GLSL compute shaders into validated SPIR-V with glslang and SPIRV-Tools, and caches it."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from k3tvm.errors import TargetError
from k3tvm.vulkan import spirv_cache
from k3tvm.vulkan.tools import CURE, Tool, find_tools

# -O halves the modules; lavapipe runs both equally fast and compiles the smaller ones sooner.
ENVIRONMENT = "vulkan1.2"
FLAGS = {
    "glslang": ["-V", "--quiet", "--target-env", ENVIRONMENT],
    "spirv-opt": ["-O", f"--target-env={ENVIRONMENT}"],
    "spirv-val": ["--target-env", ENVIRONMENT, "--scalar-block-layout"],
}
# Extensions that not every glslang knows that `tools.py` accepts
NEWER = {"GL_KHR_cooperative_matrix": (13,)}
OP_CAPABILITY = 17

# Capability of SPIR-V -> feature of a device (`schedules.profile`); "" what every device here has.
CAPABILITIES = {
    1: "",  # Shader
    5347: "",  # PhysicalStorageBufferAddresses
    61: "",  # GroupNonUniform
    9: "float16",
    39: "int8",
    22: "int16",
    11: "int64",
    10: "float64",
    4448: "storage8",
    4449: "storage8",
    4450: "storage8",
    4433: "storage16",
    4434: "storage16",
    4435: "storage16",
    63: "subgroup_arithmetic",
    65: "subgroup_shuffle",
    66: "subgroup_shuffle",
    5345: "cooperative_matrix",  # VulkanMemoryModel, which cooperative matrices bring along
    6022: "cooperative_matrix",
}


def compile_all(sources: Mapping[str, str]) -> dict[str, bytes]:
    """SPIR-V of GLSL sources by kernel name, several at a time.

    TargetError when a tool is missing, there is no room for temporary files, or with the kernel,
    the tool's message and the line.
    """
    tools = find_tools()
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = pool.map(lambda item: _cached(tools, *item), sources.items())
        try:
            return dict(zip(sources, results, strict=True))
        except OSError as error:
            raise TargetError(
                f"cannot be written: {error}",
                where=f"temporary files of the SPIR-V compiler in {tempfile.gettempdir()}",
                cure="make room there, or set TMPDIR",
            ) from None


def compile_one(source: str, name: str) -> bytes:
    """SPIR-V of one GLSL source; see `compile_all`."""
    return compile_all({name: source})[name]


def features(spirv: bytes, name: str) -> frozenset[str]:
    """What a module needs of a device, from the capabilities that it declares."""
    found = list(_capabilities(spirv))
    unknown = [c for c in found if c not in CAPABILITIES]
    if unknown:
        raise TargetError(f"needs the SPIR-V capability {unknown[0]}", where=f"kernel {name}")
    return frozenset(CAPABILITIES[c] for c in found) - {""}


def _capabilities(spirv: bytes) -> Sequence[int]:
    words = struct.unpack(f"<{len(spirv) // 4}I", spirv)
    at, found = 5, []
    while at < len(words) and words[at] & 0xFFFF == OP_CAPABILITY:
        found.append(words[at + 1])
        at += words[at] >> 16
    return found


def _cached(tools: Mapping[str, Tool], name: str, source: str) -> bytes:
    key = hashlib.sha256("\0".join([source, _stamp()]).encode()).hexdigest()
    known = spirv_cache.read(key)
    if known is not None:
        return known
    spirv = _compile(tools, name, source)
    spirv_cache.write(key, spirv)
    return spirv


@cache
def _stamp() -> str:
    """Everything besides the source that decides about the result."""
    versions = [f"{name} {tool.version}" for name, tool in sorted(find_tools().items())]
    return "\n".join([*versions, repr(FLAGS)])


def _compile(tools: Mapping[str, Tool], name: str, source: str) -> bytes:
    _check_extensions(tools["glslang"], name, source)
    with tempfile.TemporaryDirectory(prefix="k3tvm-") as directory:
        shader, module = Path(directory, "kernel.comp"), Path(directory, "kernel.spv")
        shader.write_text(source)
        paths = {
            "glslang": [str(shader), "-o", str(module)],
            "spirv-opt": [str(module), "-o", str(module)],
            "spirv-val": [str(module)],
        }
        for step, arguments in paths.items():
            done = tools[step].run([*FLAGS[step], *arguments])
            if done.returncode:
                raise _failure(name, step, source, done)
        return module.read_bytes()


def _check_extensions(glslang: Tool, name: str, source: str) -> None:
    for extension, version in NEWER.items():
        if extension in source and glslang.number() < version:
            raise TargetError(
                f"needs {extension}, which glslang {glslang.version} does not know",
                where=f"kernel {name}",
                cure=CURE,
            )


def _failure(
    name: str, step: str, source: str, done: subprocess.CompletedProcess[str]
) -> TargetError:
    """An error with the first message that is one, and the source line that it points to."""
    lines = [text for text in (done.stdout + done.stderr).splitlines() if text.strip()]
    message = next((text for text in lines if "ERROR" in text or "error" in text), "".join(lines))
    message = message or f"nothing, and ended with status {done.returncode}"
    cited = re.search(r":(\d+):", message)
    row = int(cited.group(1)) if cited and step == "glslang" else 0
    texts = source.splitlines()
    line = f" [line {row}: {texts[row - 1].strip()}]" if 0 < row <= len(texts) else ""
    return TargetError(
        f"{step} says: {message}{line}",
        where=f"kernel {name}",
        cure="this is a fault of k3tvm or of the tools; compile with --dump DIR to see the GLSL",
    )
