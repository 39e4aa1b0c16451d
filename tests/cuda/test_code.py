"""Compiled CUDA code holds what was asked for, and TVM's own runtime reads it (F24, F25)."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from k3tvm.compiler.targets.cuda import cuda_profile
from k3tvm.cuda import fatbin, nvcc
from k3tvm.cuda.module import find_module, read_module
from k3tvm.cuda.runtime import CudaDevice, cudart_candidates
from k3tvm.errors import BundleError, TargetError
from k3tvm.relax_models.operators import RmsNorm
from tests.cuda.toolkit import require_toolkit, shared_library
from tests.kernels import compile_operator

ARCHS = ("sm_80", "sm_90a", "sm_120")
NORM = RmsNorm(64, 1e-5, "float32")
KERNEL = f"{NORM.key}_kernel"
PLAIN = 'extern "C" __global__ void probe(float* x) { x[threadIdx.x] = BODY; }\n'


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A norm for three architectures as a library."""
    require_toolkit()
    made, kernels = compile_operator(NORM, cuda_profile("+".join(ARCHS)))
    assert [k.name for k in kernels] == [KERNEL]
    assert [r.arch for r in kernels[0].resources] == list(ARCHS)
    assert all(0 < r.registers <= 255 for r in kernels[0].resources)
    path = tmp_path_factory.mktemp("cuda") / "norm.so"
    made.export_library(str(path))
    return path.read_bytes()


def test_library_has_machine_code_for_every_architecture_and_ptx_of_the_newest(library):
    found = fatbin.images(find_module(library).code)
    assert [(i.kind, i.arch) for i in found] == [*(("ELF", a) for a in ARCHS), ("PTX", "sm_120")]
    assert all(i.kernels() == (KERNEL,) for i in found)
    for image in found[:-1]:  # what ptxas left in its notes, a witness for our reading
        assert f"-arch {image.arch} ".encode() in image.data
    assert b".target sm_120" in found[-1].data


def test_ptx_of_an_architecture_of_its_own_runs_on_later_devices():
    """Machine code for sm_90a does not, and PTX for it alone would not either."""
    toolkit = require_toolkit()
    text = PLAIN.replace("BODY", "1.0f")
    found = fatbin.images(nvcc.fatbin_of(toolkit, nvcc.compile_all(toolkit, text, ["sm_90a"])))
    assert [(i.kind, i.arch) for i in found] == [("ELF", "sm_90a"), ("PTX", "sm_90")]
    hopper, blackwell = CudaDevice(0, "", (9, 0)), CudaDevice(0, "", (12, 0))
    assert [hopper.runs(i) for i in found] == [True, True]
    assert [blackwell.runs(i) for i in found] == [False, True]


def test_library_has_no_source(library):
    """TVM's own library, for which the driver's compiler is needed, has it."""
    assert not fatbin.has_source(library)
    assert not any(fatbin.has_source(i.data) for i in fatbin.images(find_module(library).code))
    assert b"norm.cu" not in library and b"/tmp/" not in find_module(library).code
    assert fatbin.has_source(PLAIN.encode())


def test_table_says_what_a_launch_needs(library):
    row = find_module(library).kernels[KERNEL]
    pointers = sum(p == "handle" for p in row.parameters)
    assert pointers == len(NORM.arguments())
    assert set(row.parameters) == {"handle", "int32"}
    assert set(row.tags) >= {"blockIdx.x", "threadIdx.x"}


LOADER = """
import sys
from k3tvm._ffi import tvm_ffi
from k3tvm.cuda import runtime
from k3tvm.errors import DeviceError
cudart = runtime.load()
module = tvm_ffi.get_global_func("ffi.Module.load_from_bytes.cuda")(sys.stdin.buffer.read())
print(module.kind, module.implements_function(sys.argv[1]), module.implements_function("other"))
print(module.get_function(sys.argv[1]) is not None)
try:
    runtime.devices()
except DeviceError as error:
    print(error)
"""
DRIVER = ("DeviceGetName", "FuncSetAttribute", "GetErrorName", "GetErrorString", "LaunchKernelEx")
DRIVER += ("ModuleGetFunction", "ModuleLoadData", "ModuleUnload", "TensorMapEncodeTiled")


def in_process_with_driver(
    folder: Path, program: str, argument: str, given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run a program where a driver is, which knows no device: TVM's CUDA runtime loads then."""
    cudart = [c for c in cudart_candidates() if "/" in c]
    cudart += [str(p) for p in sorted(Path("/usr/local").glob("cuda*/lib*/libcudart.so.13"))]
    if not cudart:
        pytest.skip("TVM's CUDA runtime needs libcudart: pip install 'k3tvm[cuda]'")
    functions = "\n".join(f"int cu{name}() {{ return 100; }}" for name in DRIVER)
    shared_library(functions, folder / "libcuda.so.1")
    folders = [str(folder), str(Path(cudart[0]).parent), os.environ.get("LD_LIBRARY_PATH", "")]
    return subprocess.run(
        [sys.executable, "-c", program, argument],
        input=given,
        capture_output=True,
        env={**os.environ, "LD_LIBRARY_PATH": ":".join(folders)},
        cwd=Path(__file__).parents[2],
    )


def test_tvm_reads_the_module(library, tmp_path):
    """TVM's runtime only parses it, for there is no device."""
    done = in_process_with_driver(tmp_path, LOADER, KERNEL, library_module(library))
    said = done.stdout.decode().splitlines()
    assert said[:2] == ["cuda True False", "True"], done.stderr.decode()
    assert "CUDA: cudaGetDeviceCount: " in said[2]


def library_module(library: bytes) -> bytes:
    """The bytes of the module as they stand in a library."""
    at = library.index(struct.pack("<Q", 6) + b"fatbin")
    return library[at : at + struct.unpack_from("<Q", library, at - 8)[0]]


@pytest.mark.parametrize("cut", [0, 7, 40, -1])
def test_module_that_is_cut_short_is_refused(library, cut):
    module = library_module(library)
    assert read_module(module).kernels.keys() == {KERNEL}
    with pytest.raises(BundleError, match="is not a module of CUDA kernels"):
        read_module(module[:cut])


@pytest.mark.parametrize("harm", ["magic", "cut", "kind"])
def test_fat_binary_that_is_damaged_is_refused(library, harm):
    code = bytearray(find_module(library).code)
    if harm == "cut":
        del code[-100:]
    else:
        code[{"magic": 0, "kind": 16}[harm]] ^= 0x40
    with pytest.raises(BundleError, match="is not a fat binary"):
        fatbin.images(bytes(code))


def test_library_without_a_module():
    with pytest.raises(BundleError, match="has no CUDA module"):
        find_module(b"nothing")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("K3TVM_CACHE", str(tmp_path))


def test_results_are_kept_by_text_and_architecture(empty_cache, monkeypatch):
    toolkit, text = require_toolkit(), PLAIN.replace("BODY", "1.f")
    first = nvcc.compile_all(toolkit, text, ["sm_80"])
    runs = []
    compile_ = nvcc._compile
    monkeypatch.setattr(nvcc, "_compile", lambda *a: runs.append(a[2]) or compile_(*a))
    steps = []
    assert nvcc.compile_all(toolkit, text, ["sm_80"], steps.append) == first
    assert not runs and steps == ["compiled for sm_80"]
    again = nvcc.compile_all(toolkit, text, ["sm_80", "sm_86"])
    assert runs == ["sm_86"] and again[0] == first[0]
    nvcc.compile_all(toolkit, text + "\n", ["sm_80"])
    assert runs == ["sm_86", "sm_80"]


def test_what_the_compiler_refuses_is_said_in_one_line(empty_cache):
    with pytest.raises(
        TargetError, match=r'compute_80.*nvcc says: kernels.cu\(1\): error: .*"nope"'
    ):
        nvcc.compile_all(require_toolkit(), PLAIN.replace("BODY", "nope"), ["sm_80"])


def test_arithmetic_is_exact(empty_cache):
    """Divisions and square roots are rounded correctly, subnormal numbers stay."""
    body = "x[1] / x[2] + sqrtf(x[3])"
    (built,) = nvcc.compile_all(require_toolkit(), PLAIN.replace("BODY", body), ["sm_80"])
    assert b"div.rn.f32" in built.ptx and b"sqrt.rn.f32" in built.ptx
    assert b".ftz" not in built.ptx and b".approx" not in built.ptx


COMPILER = """
import sys
from k3tvm._tvm import tvm
from k3tvm.compiler.targets.cuda import cuda_profile
from tests.cuda.test_code import NORM
from tests.kernels import compile_operator
assert tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None
made, _ = compile_operator(NORM, cuda_profile("sm_80"))
made.export_library(sys.argv[1])
"""


def test_text_is_ours_where_tvm_has_its_own_runtime(tmp_path):
    """Then TVM compiles what it generates right away, with a compiler that is not here."""
    require_toolkit()
    path = tmp_path / "norm.so"
    done = in_process_with_driver(tmp_path, COMPILER, str(path))
    assert done.returncode == 0, done.stderr.decode()
    found = fatbin.images(find_module(path.read_bytes()).code)
    assert [(i.kind, i.arch, i.kernels()) for i in found] == [
        ("ELF", "sm_80", (KERNEL,)),
        ("PTX", "sm_80", (KERNEL,)),
    ]
