"""`k3tvm doctor`: what it says of tools, devices and bundles is so, and its exit status follows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tvm import native, survey
from k3tvm._ffi import PINS
from k3tvm.cli.doctor import LABEL
from k3tvm.cli.main import main
from k3tvm.cuda import runtime
from k3tvm.cuda.runtime import CudaDevice
from k3tvm.errors import DeviceError
from k3tvm.runtime import cpu
from k3tvm.vulkan import plugin, tools
from k3tvm.vulkan.devices import Device
from tests.devices import require
from tests.vulkan.machines import NVIDIA, bundle, code, device

ROOT = Path(__file__).parents[2]
GPU = device(0, "Big GPU")
SMALL = device(1, "Small GPU", shared_bytes=16384, features=["float16"])
OLD = device(2, "Old GPU", usable=False, why_not="lacks bufferDeviceAddress")
Doctor = Callable[..., tuple[int, str]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the command on a machine with these devices of Vulkan, CUDA's; status and text."""

    def run(
        *args: str, found: tuple[Device, ...] = (), cuda: tuple[CudaDevice, ...] | None = None
    ) -> tuple[int, str]:
        def gpus() -> list[CudaDevice]:
            if cuda is None:
                raise DeviceError("there is no NVIDIA driver", where="CUDA")
            return list(cuda)

        monkeypatch.setattr(plugin, "load", lambda *_, **__: None)
        monkeypatch.setattr(survey, "devices", lambda: found)
        monkeypatch.setattr(runtime, "devices", gpus)
        status = main(["doctor", *args])
        return status, capsys.readouterr().out

    return run


WIDTH = LABEL + 2  # of the labels


def rows(text: str) -> dict[str, str]:
    """What stands beside each label, on one line."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        label = line[:WIDTH].strip()
        if label and line.startswith("  "):
            found[label] = line[WIDTH:]
        elif found and line.startswith("  "):
            found[list(found)[-1]] += f" {line.strip()}"
    return found


# --- this machine ---------------------------------------------------------------------------------


def test_devices_are_described_and_unusable_ones_say_why(doctor: Doctor) -> None:
    status, text = doctor(found=(GPU, SMALL, OLD))
    assert status == 0
    assert all(len(line) <= 100 or len(line.split()) == 1 for line in text.splitlines())  # a path
    said = rows(text)
    assert "Big GPU: GPU driver Test 1.2.3, Vulkan 1.3.0 8 GiB of memory" in said["vulkan:0"]
    assert "1024 threads, 48 KiB shared" in said["vulkan:0"]
    assert "lacks cooperative_matrix" in said["vulkan:0"]
    assert "has float16 lacks cooperative_matrix float64 int16" in said["vulkan:1"]
    assert "Old GPU: GPU NOT USABLE: lacks bufferDeviceAddress" in said["vulkan:2"]
    assert "GPU code can run here, with --device vulkan:0 or --device vulkan:1" in text


@pytest.mark.parametrize("found", [(), (OLD,)], ids=["none", "old"])
def test_without_a_usable_device_it_exits_1_and_says_what_to_install(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, found: tuple[Device, ...]
) -> None:
    monkeypatch.setattr(survey, "loader", lambda: survey.Part("loader", "1.3.0", "libvulkan.so.1"))
    status, text = doctor(found=found)
    assert status == 1
    assert text.endswith("apt install libvulkan1 mesa-vulkan-drivers\n")


def test_without_a_loader(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "LOADER", "libno-such-loader.so.9")
    status, text = doctor()
    assert status == 1
    assert "PROBLEM: libno-such-loader.so.9 is not installed" in rows(text)["loader"]
    assert "GPU code cannot run here: loader: libno-such-loader.so.9 is not installed" in text


def test_a_plugin_that_was_not_built_is_the_problem_named(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> tuple[Device, ...]:
        raise DeviceError("was not built", where="the Vulkan plug-in", cure="k3tvm doctor --build")

    monkeypatch.setattr(survey, "devices", missing)
    part, found = survey._devices()
    assert found == () and "was not built; k3tvm doctor --build" in part.problem


def test_tools_are_listed_with_versions_or_with_the_cure(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {
        "glslang": "13.1.1 (/opt/my tools/glslang)",
        "spirv-val": "spirv-val: was not found; x",
    }
    monkeypatch.setattr(tools, "tools", lambda: found)
    said = rows(doctor(found=(GPU,))[1])
    assert said["glslang"] == "13.1.1 /opt/my tools/glslang"
    assert said["spirv-val"] == "PROBLEM: was not found; x"


def test_compilers_of_every_kind_are_listed(doctor: Doctor) -> None:
    said = rows(doctor(found=(GPU,))[1])
    assert {"glslang", "spirv-opt", "spirv-val", "nvcc", "zig"} <= set(said)


def test_a_cuda_device_is_named_and_is_enough(doctor: Doctor) -> None:
    status, text = doctor(cuda=(CudaDevice(0, "Big GPU", (9, 0)),))
    assert status == 0 and rows(text)["cuda"] == "cuda:0 Big GPU (9.0)"
    assert text.endswith("GPU code can run here, with --device cuda\n")


@pytest.mark.parametrize(
    ("found", "why"), [((), "there is no device"), (None, "CUDA: there is no NVIDIA driver")]
)
def test_without_a_cuda_device_it_says_why(
    doctor: Doctor, found: tuple[CudaDevice, ...] | None, why: str
) -> None:
    status, text = doctor(cuda=found)
    assert status == 1 and rows(text)["cuda"] == f"none: {why}"


def test_build_compiles_the_libraries_first(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    monkeypatch.setattr(plugin, "build", lambda: built.append("plug-in"))
    monkeypatch.setattr(native, "build", lambda: built.append("native"))
    assert doctor(found=(GPU,))[0] == 0 and not built
    assert doctor("--build", found=(GPU,))[0] == 0 and sorted(built) == ["native", "plug-in"]


def test_the_real_machine_is_judged_in_a_process_that_has_no_compiler() -> None:
    """Neither TVM's compiler nor torch nor the engine is loaded; a usable device is status 0."""
    require("vulkan")
    program = (
        "import sys; from k3tvm.cli.main import main; status = main(['doctor', '--json']); "
        "print(sorted({'tvm', 'torch', 'k3tvm.runtime'} & set(sys.modules)), file=sys.stderr); "
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and facts["runs"]
    assert done.stderr == "[]\n"
    assert [p["problem"] for p in facts["parts"]] == ["", "", ""]
    assert any(d["usable"] and "storage8" in d["features"] for d in facts["devices"])


# --- bundles --------------------------------------------------------------------------------------


def test_a_bundle_is_judged_for_every_device(doctor: Doctor, tmp_path: Path) -> None:
    path = bundle(tmp_path / "b", NVIDIA, code("cpu:portable", "portable"))
    status, text = doctor(path, found=(GPU, SMALL, OLD))
    assert status == 0
    gpu, cpu = text.partition(f"{path}, compiled for vulkan-nvidia")[2].split("compiled for cpu")
    said = rows(gpu)
    assert "512 threads, 44 KiB shared, 64 bytes pushed; float16 int64 storage8" in said["needs"]
    assert said["vulkan:0"] == "runs"
    assert "28 KiB of shared memory more" in said["vulkan:1"]
    assert "it has no int64, storage8" in said["vulkan:1"]
    assert said["vulkan:2"].startswith("DOES NOT RUN: lacks bufferDeviceAddress")
    assert rows(cpu)["cpu"] == "runs"
    assert f"{path} can run here, with --device vulkan:0 or --device cpu" in text


def test_a_bundle_that_no_device_runs_exits_1_with_the_cure(doctor: Doctor, tmp_path: Path) -> None:
    path = bundle(tmp_path / "b", NVIDIA)
    status, text = doctor(path, found=(SMALL,))
    assert status == 1 and text.endswith("compile it with --target vulkan:from-device\n")


@pytest.mark.parametrize("kind", ["cuda", "metal"])
def test_a_bundle_for_an_absent_kind_of_gpu_names_the_emulation(
    doctor: Doctor, tmp_path: Path, kind: str
) -> None:
    path = bundle(tmp_path / "b", code(kind))
    status, text = doctor(path, found=(GPU,))
    assert status == 1 and f"add --target {kind}-emulated" in text.splitlines()[-1]


def test_f28_a_bundle_of_another_tvm_runs_nowhere(doctor: Doctor, tmp_path: Path) -> None:
    versions = PINS | {"apache-tvm": "0.99"}
    path = bundle(tmp_path / "b", NVIDIA, versions=versions)
    status, text = doctor(path, found=(GPU,))
    assert status == 1
    assert f"DOES NOT RUN: apache-tvm 0.99, here is {PINS['apache-tvm']}" in text


def test_a_cpu_bundle_for_another_cpu(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "host_features", lambda: frozenset({"avx2"}))
    path = bundle(tmp_path / "b", code("cpu:avx2", "avx2"))
    status, text = doctor(path, found=(GPU,))
    assert status == 1 and rows(text)["cpu"] == "DOES NOT RUN: fma"
    assert text.endswith("or with --target cpu:portable\n")


def test_json_says_the_same(doctor: Doctor, tmp_path: Path) -> None:
    path = bundle(tmp_path / "b", NVIDIA)
    status, text = doctor(path, "--json", found=(SMALL,))
    facts = json.loads(text)
    assert status == 1 and facts["runs"] is False and facts["bundle"] == path
    assert facts["devices"][0]["features"] == ["float16"]
    assert facts["libraries"][0]["needs"]["features"] == ["float16", "int64", "storage8"]
    assert facts["libraries"][0]["verdicts"][0]["device"] == "vulkan:1"


def test_something_else_than_a_bundle_exits_2(
    doctor: Doctor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("file", ["code/vulkan.so", "manifest.json"])
@pytest.mark.parametrize("harm", ["missing", "cut", "changed"])
def test_f28_a_damaged_bundle_exits_2(
    doctor: Doctor, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, harm: str
) -> None:
    """No device is said to run what would be refused when it is opened."""
    path = bundle(tmp_path / "b", NVIDIA)
    victim = Path(path, file)
    data = victim.read_bytes()
    victim.unlink()
    if harm != "missing":
        changed = data.replace(b"45056", b"256") if file == "manifest.json" else b"y"
        victim.write_bytes(data[: len(data) // 2] if harm == "cut" else changed)
    assert main(["doctor", path]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_code_without_weights_is_judged_as_such(doctor: Doctor, tmp_path: Path) -> None:
    path = bundle(tmp_path / "b", NVIDIA, has_weights=False)
    text = doctor(path, found=(GPU,))[1]
    assert f"the code of {path} (it has no weights) can run here" in text


def test_a_loader_that_the_environment_names_is_the_one_judged(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3TVM_VULKAN_LOADER", "libno-such-loader.so.9")
    status, text = doctor()
    assert status == 1
    assert "PROBLEM: libno-such-loader.so.9 is not installed" in rows(text)["loader"]


def test_help_lists_every_profile(capsys: pytest.CaptureFixture[str]) -> None:
    from k3tvm.compiler.targets.vulkan import FROM_DEVICE, PROFILES

    assert main(["doctor", "--help"]) == 0
    text = capsys.readouterr().out
    named = {*PROFILES, FROM_DEVICE} - {"baseline"}
    assert {n for n in named if f"  vulkan:{n}" not in text} == set()
    page = (ROOT / "docs" / "targets" / "vulkan.md").read_text()
    assert {n for n in named if f"| `vulkan:{n}" not in page} == set()


@pytest.mark.parametrize("name", ["nvidia", "amd", "intel", "apple", "lavapipe", "mobile"])
def test_the_page_has_the_numbers_of_the_profiles(name: str) -> None:
    from k3tvm.compiler.targets.vulkan import PROFILES

    profile = PROFILES[name]
    page = (ROOT / "docs" / "targets" / "vulkan.md").read_text()
    line = next(x for x in page.splitlines() if x.startswith(f"| `vulkan:{name}`"))
    cells = [c.strip() for c in line.split("|")[3:7]]
    assert cells == [
        str(profile.threads),
        f"{profile.shared_bytes // 1024} KiB",
        f"{profile.push_bytes} B",
        str(profile.subgroup),
    ]
