"""Bundles for macOS and iOS, made on this machine: what is in their libraries, byte by byte."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from k3tvm.bundle.manifest import Manifest
from k3tvm.compiler import link
from k3tvm.compiler.compile import Options, compile_checkpoint
from k3tvm.compiler.targets.metal import metal_profile
from k3tvm.errors import BundleError, DeviceError, TargetError
from k3tvm.metal.macho import members, read
from k3tvm.metal.module import find_module, read_module
from k3tvm.relax_models.operators import RmsNorm
from k3tvm.runtime.engine import Engine
from tests.bundles import Bundles
from tests.kernels import compile_operator

OP = RmsNorm(100, 1e-5, "float32")


@pytest.fixture(scope="module")
def bundle(bundles: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metal") / "tiny.bundle"
    options = Options("metal,metal:ios", weights=False)
    compile_checkpoint(bundles.checkpoint("k3-tiny"), path, options)
    return path


def test_the_library_for_macos_is_a_dylib_with_msl_inside(bundle):
    """TVM's functions are found in what is loaded already, the rest is in Apple's libSystem."""
    data = (bundle / "code" / "metal.dylib").read_bytes()
    library = read(data)
    assert (library.cpu, library.kind) == ("arm64", "dylib")
    assert (library.platform, library.oldest) == ("macos", "11.0")
    assert library.name == "@rpath/metal.dylib"
    assert library.libraries == ["/usr/lib/libSystem.B.dylib"]
    assert "__tvm_ffi__library_bin" in library.defined  # where TVM finds the modules
    assert library.anywhere and all(name.startswith("TVMFFI") for name in library.anywhere)
    assert library.undefined - library.anywhere <= {
        "dyld_stub_binder",
        "__extendhfsf2",
        "__truncsfhf2",
    }
    check_kernels_inside(bundle, 0, data)


def test_the_archive_for_ios_registers_itself(bundle):
    """An app links it, so its symbols must be TVM's or its own."""
    data = (bundle / "code" / "metal-ios.a").read_bytes()
    objects = {name: read(body) for name, body in members(data)}
    assert set(objects) == {"lib0.o", "devc.o"}
    for made in objects.values():
        assert (made.cpu, made.kind) == ("arm64", "object")
        assert (made.platform, made.oldest) == ("ios", "14.0")
        assert "TVMFFIEnvModRegisterSystemLibSymbol" in made.undefined
        assert all(name.startswith(("TVMFFI", "TVMBackend")) for name in made.undefined)
    assert "__tvm_ffi__library_bin" in objects["devc.o"].defined
    check_kernels_inside(bundle, 1, data)


def check_kernels_inside(bundle: Path, entry: int, data: bytes) -> None:
    listed = {k.name: k for k in Manifest.load(bundle).code[entry].device_kernels}
    module = find_module(data)
    assert module.form == "metal"
    assert set(module.kernels) == set(module.rows) == set(listed)
    for name, source in module.kernels.items():
        assert source.startswith(b"#include <metal_stdlib>")
        assert f"kernel void {name}(".encode() in source
        x, y, z = listed[name].threads
        assert f"[[max_total_threads_per_threadgroup({x * y * z})]]".encode() in source


@pytest.mark.skipif(sys.platform == "darwin", reason="asks what a machine without Metal says")
def test_f25_metal_is_only_on_a_mac(bundle):
    with pytest.raises(DeviceError, match=r"this system is linux.*metal-emulated"):
        Engine.open(bundle)


def test_a_library_has_the_same_bytes_each_time(tmp_path):
    executable, _ = compile_operator(OP, metal_profile())
    for profile, name in ((metal_profile(), "metal"), (metal_profile("ios"), "metal")):
        paths = [tmp_path / str(i) / link.file_name(profile, name) for i in (1, 2)]
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            link.link(executable, profile, path)
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert paths[0].suffix == {"macos": ".dylib", "ios": ".a"}[profile.platform]


XCRUN = """#!/bin/sh
# Stands in for Apple's: says that it has a compiler, and "compiles" by copying.
[ "$3" = -find ] && exit 0
echo "$@" >> "$LOG"
case "$*" in *refused*) echo "x.metal:1:1: error: no" >&2; exit 1;; esac
for a in "$@"; do case "$a" in *.metal) source=$a;; *.metallib) library=$a;; esac; done
{ printf MTLB; cat "$source"; } > "$library"
"""


@pytest.fixture
def apple(tmp_path, monkeypatch):
    """A folder on PATH with a stand-in for xcrun; yields the log of its calls."""
    (tmp_path / "xcrun").write_text(XCRUN)
    (tmp_path / "xcrun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.mark.parametrize(("variant", "sdk"), [("", "macosx"), ("ios", "iphoneos")])
def test_apples_compiler_is_used_where_it_is(apple, tmp_path, variant, sdk):
    profile = metal_profile(variant)
    executable, kernels = compile_operator(OP, profile)
    path = tmp_path / link.file_name(profile, "metal")
    link.link(executable, profile, path)
    module = find_module(path.read_bytes())
    assert module.form == "metallib"
    assert module.kernels == {k.name: b"MTLB" + k.text.encode() for k in kernels}
    called = apple.read_text()
    assert f"-sdk {sdk} metal" in called and "-fno-fast-math" in called


def test_f27_what_apples_compiler_refuses_is_said(apple):
    with pytest.raises(TargetError, match=r"kernel refused.*Apple's compiler says: .*error: no"):
        from k3tvm.metal import xcode

        command = xcode.compiler("macos")
        assert command
        xcode.compile_all(command, "macos", {"refused": "x"})


def test_without_apples_compiler_the_source_is_shipped(tmp_path):
    executable, kernels = compile_operator(OP, metal_profile())
    link.link(executable, metal_profile(), tmp_path / "metal.dylib")
    module = find_module((tmp_path / "metal.dylib").read_bytes())
    assert module.kernels == {k.name: k.text.encode() for k in kernels}


def test_f25_a_kernel_beyond_a_profile_is_refused():
    small = replace(metal_profile(), name="small", shared_bytes=256)
    with pytest.raises(TargetError, match="512 bytes of shared memory, small has 256"):
        compile_operator(OP, small)


def test_damaged_files_are_refused(bundle):
    data = (bundle / "code" / "metal.dylib").read_bytes()
    with pytest.raises(BundleError, match="not a Mach-O file"):
        read(data[:100])
    with pytest.raises(BundleError, match="not a Mach-O file"):
        read(b"\x7fELF" + bytes(100))
    with pytest.raises(BundleError, match="not a static archive"):
        list(members(data))
    with pytest.raises(BundleError, match="no Metal module"):
        find_module(b"metal" * 100)
    with pytest.raises(BundleError, match="not a module of Metal kernels"):
        read_module(data[:50])
