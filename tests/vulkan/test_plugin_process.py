"""The plug-in in a process: loading, ending, forking, its files, machines without (F28, F30)."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from k3tvm.errors import DeviceError
from k3tvm.native import library
from k3tvm.vulkan import plugin
from k3tvm.vulkan.devices import INSTALL
from tests.vulkan.rig import ROOT, USE, function, in_process, rig, told

RUN = USE + "x = rig().memory.put(np.zeros(64, 'uint32')); rig().run(mix(), x, x, 1, 64)"
# Two ways to ask for a device: by using one, and by listing them.
BOTH = """
import sys
import numpy as np
from k3tvm.errors import DeviceError
from tests.vulkan.rig import function, rig
for ask in (lambda: rig().memory.put(np.zeros(4, "uint32")), lambda: function("devices")()):
    try:
        ask()
    except DeviceError as error:
        sys.stdout.write(f"{error} ")
"""


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (
            {"K3TVM_VULKAN_LOADER": "/nowhere/libvulkan.so"},
            f"no Vulkan loader on this system (/nowhere/libvulkan.so); {INSTALL}",
        ),
        ({"K3TVM_VULKAN_LOADER": "libc.so.6"}, "libc.so.6 is no Vulkan loader"),
        (
            {"VK_DRIVER_FILES": "/nowhere", "VK_ICD_FILENAMES": "/nowhere"},
            f"no Vulkan driver is installed; {INSTALL}",
        ),
        (
            {"K3TVM_VULKAN_VALIDATION": "1", "VK_LAYER_PATH": "/nowhere"},
            "is not installed; apt install vulkan-validationlayers",
        ),
    ],
)
def test_a_machine_without_vulkan_is_told_why(environment, reason):
    assert told(in_process(BOTH, **environment)).count(reason) == 2


def test_kernels_can_be_compiled_without_a_loader():
    code = """
import sys
from tests.vulkan.rig import mix, plugin, load_kernel
plugin.load()
sys.stdout.write(str(load_kernel(mix()) is not None))
"""
    assert told(in_process(code, K3TVM_VULKAN_LOADER="/nowhere/libvulkan.so")) == "True"


@pytest.mark.parametrize("end", ["", "os._exit(0)", "sys.exit(3)", "raise SystemExit(0)"])
def test_a_process_ends_in_the_middle_of_work(end):
    """Static objects of driver, TVM and plug-in go in an order that nobody chooses."""
    code = f"""
import os, sys
import numpy as np
from tests.vulkan.rig import mix, rig, spin
x = rig().memory.put(np.zeros(4096, "uint32"))
rig().run(spin(), x, x, 1, 20000)
rig().run(mix(), x, x, 1, 64)
{end}
"""
    done = in_process(code)
    assert (done.returncode, done.stderr) == (3 if "3" in end else 0, "")


def test_a_forked_child_is_told_and_does_not_hang():
    code = """
import os, sys
import numpy as np
from tests.vulkan.rig import rig
x = rig().memory.put(np.zeros(64, "uint32"))
child = os.fork()
if not child:
    try:
        rig().sync()
    except Exception as error:
        del x
        os._exit(7 if "fork()" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
sys.stdout.write(str(rig().memory.get(x).sum()))
"""
    assert told(in_process(code)) == "0"


def cache_file(folder: Path) -> Path:
    (found,) = (folder / "vulkan").iterdir()
    return found


def test_compiled_kernels_are_kept_on_disk(tmp_path):
    environment = {"K3TVM_CACHE": str(tmp_path)}
    assert told(in_process(RUN, **environment)) == ""
    whole = cache_file(tmp_path).read_bytes()
    assert whole.startswith(b"K3PC") and len(whole) >= 16 + 32
    for damaged in (b"", whole[:20], whole[:-1] + bytes([whole[-1] ^ 1])):
        cache_file(tmp_path).write_bytes(damaged)
        assert told(in_process(RUN, **environment)) == ""
        assert cache_file(tmp_path).read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (str(tmp_path / "file"), "/proc/nowhere"):
        assert told(in_process(RUN, K3TVM_CACHE=folder)) == ""


def test_the_plugin_is_found_from_any_directory(tmp_path):
    code = USE + "import sys; sys.stdout.write(str(rig().stats()['dispatches']))"
    assert told(in_process(code, cwd=str(tmp_path))) == "0"


def test_loading_brings_neither_compiler_nor_driver_tools():
    code = """
import sys
from k3tvm.vulkan import plugin
plugin.load()
maps = open("/proc/self/maps").read()
sys.stdout.write(" ".join(n for n in ("libtvm_compiler", "libvulkan.so", "glslang") if n in maps))
sys.stdout.write(" ".join(n for n in ("tvm", "torch") if n in sys.modules))
"""
    assert told(in_process(code)) == ""


def test_a_library_for_another_tvm_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    other = tmp_path / "libk3tvm_vulkan.so"
    other.write_bytes(plugin.LIBRARY.read_bytes().replace(b"0.27.0.post1", b"0.26.0.post1"))
    with pytest.raises(DeviceError, match="was built for .*0.26.0.*here is .*0.27.0.*--build"):
        plugin._check(other)
    other.write_bytes(b"no library")
    with pytest.raises(DeviceError, match="built for something else"):
        plugin._check(other)
    with pytest.raises(DeviceError, match="was not built.*apt install libvulkan-dev"):
        plugin._check(tmp_path / "absent.so")


@pytest.mark.parametrize("part", [0.01, 0.72, 0.8, 0.99])
def test_f28_a_library_that_is_cut_short_is_refused(tmp_path: Path, part: float) -> None:
    """The linker maps what is there and the process dies when it reads the rest; TVM's too."""
    data = plugin.LIBRARY.read_bytes()
    cut = tmp_path / "libk3tvm_vulkan.so"
    cut.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(DeviceError, match="is damaged, here is .*--build"):
        plugin._check(cut)


def test_f28_a_library_that_cannot_be_linked_is_an_error_and_silent_for_tvm(tmp_path: Path) -> None:
    data = plugin.LIBRARY.read_bytes()
    (tmp_path / "odd.so").write_bytes(data.replace(b"libtvm_runtime.so", b"libtvm_nowhere.so"))
    code = f"""
import pathlib, sys
from k3tvm.errors import DeviceError
from k3tvm.vulkan import autoload, plugin
plugin.LIBRARY = pathlib.Path({str(tmp_path / "odd.so")!r})
autoload()
try:
    plugin.load()
except DeviceError as error:
    sys.stdout.write(str(error))
"""
    said = told(in_process(code))
    assert "cannot be loaded: libtvm_nowhere.so" in said and said.endswith("--build")


OWN = """
import sys
from k3tvm._ffi import tvm_ffi
tvm_ffi.register_global_func("device_api.vulkan", lambda: None)
from k3tvm.errors import DeviceError
from k3tvm.vulkan import autoload, plugin
autoload()
sys.stdout.write(plugin.provider() + " ")
try:
    plugin.load()
except DeviceError as error:
    sys.stdout.write(str(error))
sys.stdout.write(" " + plugin.provider())
"""


def test_a_tvm_with_its_own_vulkan_is_left_alone_unless_the_user_prefers_ours():
    said = told(in_process(OWN))
    assert said.startswith("TVM ") and said.endswith(" TVM")
    assert "K3TVM_VULKAN=own" in said
    assert told(in_process(OWN, K3TVM_VULKAN="own")) == "k3tvm  k3tvm"


def test_importing_tvm_brings_device_and_code_generation(tmp_path):
    """As the entry point of `tvm.backends` does in an installed k3tvm."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = tmp_path / "plugged-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in points["tvm.backends"].items()]
    (folder / "entry_points.txt").write_text("\n".join(["[tvm.backends]", *lines]))
    code = """
import sys
sys.modules["torch"] = None
import tvm
build = tvm.get_global_func("target.build.vulkan", allow_missing=True)
sys.stdout.write(f"{tvm.device('vulkan', 0).exist} {build is not None}")
"""
    path = f"{tmp_path}:{ROOT}"
    assert told(in_process(code, PYTHONPATH=path)) == "True True"
    assert told(in_process(code, PYTHONPATH=path, K3TVM_VULKAN="off")) == "False False"


def test_the_plugin_says_what_it_was_built_for():
    rig()
    assert function("abi")() == library.ABI == library.built_for(plugin.LIBRARY)
    assert ROOT in plugin.LIBRARY.parents
