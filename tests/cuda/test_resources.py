"""What ptxas says is read whole; kernels that spill stop the compilation where it hurts (F21)."""

from __future__ import annotations

import pytest

from k3tvm.cuda.ptxas import Resources, resources
from k3tvm.cuda.spills import allowing_spills, check_spills, is_hot
from k3tvm.errors import TargetError

SAID = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kda_step_96_kernel' for 'sm_90a'
ptxas info    : Function properties for kda_step_96_kernel
    24 bytes stack frame, 20 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 768 bytes smem
ptxas info    : Compile time = 20.1 ms
ptxas info    : Compiling entry function 'embed_kernel' for 'sm_90a'
ptxas info    : Function properties for slow_path
    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for embed_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 0 barriers
"""
STEP = Resources("sm_90a", 168, 24, 20, 28, 768)


def test_numbers_belong_to_their_kernels():
    assert resources(SAID) == {
        "kda_step_96_kernel": STEP,
        "embed_kernel": Resources("sm_90a", 14, 0, 0, 0, 0),
    }
    assert STEP.spill_bytes == 48


@pytest.mark.parametrize("gone", ["Used 14 registers, used 0 barriers", "for embed_kernel"])
def test_a_part_that_is_missing_is_no_zero(gone):
    with pytest.raises(ValueError, match="embed_kernel"):
        resources(SAID.replace(gone, ""))


def test_hot_kernels_may_not_spill():
    with pytest.raises(TargetError, match="kda_step_96_kernel 48 bytes on sm_90a.*--allow-spills"):
        check_spills([("kda_step_96_kernel", STEP)])
    check_spills([("attn_res_norm_64_kernel", STEP)])


@pytest.mark.parametrize("patterns, allowed", [(["kda_*"], True), (["mla_*"], False), ([], False)])
def test_spills_are_allowed_by_name(patterns, allowed):
    with allowing_spills(patterns):
        if allowed:
            check_spills([("kda_step_96_kernel", STEP)])
        else:
            with pytest.raises(TargetError):
                check_spills([("kda_step_96_kernel", STEP)])
    with pytest.raises(TargetError):
        check_spills([("kda_step_96_kernel", STEP)])


def test_what_is_hot():
    names = ["linear_8_kernel", "expert_linear_8_kernel_1", "mla_attention_8_kernel"]
    assert all(is_hot(name) for name in names)
    assert not any(
        is_hot(name) for name in ("expert_sort_8_kernel", "mla_cache_8_kernel", "linearly")
    )
