"""Kernels keep their numbers where the compiler takes floats for reals (F11, F27).

TVM's runtime on the Mac compiles Metal source with fast-math. Apple's compiler descends from clang,
so the emulated kernels are compiled here with clang and fast-math: sums in another order, no NaN,
no infinity, no sign of zero. The checks are those that all devices get.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k3tvm.compiler.targets.metal import metal_emulated_profile
from k3tvm.emulate import build
from k3tvm.metal.zig import find_zig
from k3tvm.relax_models.operators import Activation
from k3tvm.schedules.profile import GpuProfile
from tests import test_functions as functions
from tests import test_norms as norms
from tests import test_router as router
from tests import test_sample_kernel as sampling

FLAGS = ("-O2", "-ffast-math")
WRAPPER = """#!/bin/sh
# clang compiles; the system's compiler links, without what sets a mode of the processor
case " $* " in *" -shared "*) exec g++ "$@";; *" --version "*) exec g++ "$@";; esac
exec {zig} clang --target={machine}-linux-gnu -isystem {zig_lib}/include -x c++ "$@"
"""


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuProfile]:
    """A profile whose kernels are compiled by clang with fast-math, under a name of its own."""
    wrapper = tmp_path_factory.mktemp("clang") / "clang++"
    zig = find_zig()
    text = WRAPPER.format(zig=zig, machine=platform.machine(), zig_lib=zig.parent / "lib")
    wrapper.write_text(text)
    wrapper.chmod(0o755)
    kept = [f for f in build.FLAGS if f not in ("-O1", "-ffp-contract=off")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(wrapper))
        patch.setattr(build, "FLAGS", (*kept, *FLAGS))
        yield replace(metal_emulated_profile(), name="metal-emulated-fast")


def test_the_flags_do_what_they_say(fast: GpuProfile, tmp_path: Path) -> None:
    """With them clang forgets that there is a NaN, so the tests below mean something."""
    source, assembly = tmp_path / "probe.cc", tmp_path / "probe.s"
    source.write_text("bool probe(float x) { return x != x; }\n")
    command = [build.compiler(), "-S", str(source), "-o", str(assembly)]
    for flags, compares in (((), True), (FLAGS, False)):
        subprocess.run([*command, *flags], check=True)
        assert any(word in assembly.read_text() for word in ("ucomiss", "fcmp")) == compares


@pytest.mark.parametrize("name", sorted(functions.EXACT))
def test_functions(fast: GpuProfile, name: str) -> None:
    functions.test_error_in_units_of_the_last_place(fast, name)
    functions.test_subnormal_results_are_near_zero_and_never_nan(fast, name)
    functions.test_f11_extremes(fast, name)


def test_tanh_keeps_the_sign_of_zero(fast: GpuProfile) -> None:
    functions.test_tanh_keeps_the_sign_of_zero(fast)


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
def test_rounding(fast: GpuProfile, act: Activation) -> None:
    functions.test_f12_gpu_rounding_is_exact(fast, act)


def test_norms_add_up(fast: GpuProfile) -> None:
    norms.test_rms_norm(fast, "float32", 5, 100)


def test_router_and_its_ties(fast: GpuProfile) -> None:
    router.test_f15_the_lower_expert_and_group_win_ties(fast, 5, 2)
    for bad in ([0], range(21)):
        router.test_f11_a_row_with_nan_still_gives_distinct_valid_experts(fast, 3, 2, bad)


def test_sampling_never_takes_nan(fast: GpuProfile) -> None:
    sampling.test_greedy_takes_the_largest_and_the_lowest_id_on_a_tie(fast, 300)
    for temperature in (0.0, 1.0):
        check = sampling.test_f11_nan_is_never_chosen_unless_there_is_nothing_else
        check(fast, temperature)
    sampling.test_draws_are_those_of_the_reference(fast, 300, 50, 0.9)
