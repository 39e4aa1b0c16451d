"""A bundle runs without Python, TVM's compiler and shader tools: a small C++ program does it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from k3tvm._ffi import load_runtime
from k3tvm.native.build import folder, includes
from k3tvm.runtime.device_memory import VULKAN
from k3tvm.runtime.engine import Engine
from k3tvm.vulkan import plugin
from tests.devices import require

SOURCE = Path(__file__).resolve().parents[1] / "native" / "run_bundle.cc"
NOT_NEEDED = ("libtvm_compiler", "libpython", "glslang", "libSPIRV-Tools", "libtorch")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, linked with the two libraries of TVM's runtime and nothing else of TVM."""
    made = tmp_path_factory.mktemp("native") / "run_bundle"
    folders = [folder("tvm") / "lib", folder("tvm_ffi") / "lib"]
    command = ["g++", "-std=c++17", "-O1", str(SOURCE), "-o", str(made)]
    command += [f"-I{p}" for p in includes()]
    command += [f"-L{p}" for p in folders] + [f"-Wl,-rpath,{p}" for p in folders]
    # TVM's virtual machine is looked up by name at run time, so it must not be left out.
    command += ["-Wl,--no-as-needed", "-ltvm_runtime", "-ltvm_ffi", "-ldl"]
    subprocess.run(command, check=True)
    return made


def description(engine: Engine, result: Path) -> Iterator[str]:
    manifest, device = engine.manifest, engine.device
    if device.type == VULKAN:
        yield f"plugin {plugin.LIBRARY}"
    yield f"library {engine.folder / device.code.file.path}"
    yield f"result {result}"
    yield f"device {device.type} {device.index}"
    yield f"ids {len(IDS)} {' '.join(map(str, IDS))}"
    yield f"seqs 1 0 0 {len(IDS)} 0"
    yield f"flags {manifest.sites} {engine.states.slots}"
    sizes = {"slots": engine.states.slots, "cap": engine.states.context}
    for state in manifest.states:
        shape = [sizes[d] if isinstance(d, str) else d for d in state.shape]
        yield f"state {state.dtype} {len(shape)} {' '.join(map(str, shape))}"
    for a in manifest.arrays:
        shape = " ".join(map(str, a.shape))
        yield f"array {a.dtype} {len(a.shape)} {shape} {a.offset} {engine.folder / a.file}"


@pytest.mark.parametrize("target", ["cpu", "vulkan:lavapipe"])
def test_a_bundle_runs_with_the_runtime_library_alone(target, bundles, program, tmp_path):
    require(target)
    load_runtime()
    engine = bundles.engine("k3-tiny", target=target)
    result, text = tmp_path / "logits", tmp_path / "description"
    text.write_text("\n".join(description(engine, result)))
    done = subprocess.run([program, text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    want = engine.logits(IDS)
    got = np.fromfile(result, np.float32).reshape(want.shape)
    assert np.array_equal(got, want)
    assert "libtvm_runtime" in done.stdout
    assert not [name for name in NOT_NEEDED if name in done.stdout]
