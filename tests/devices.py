"""Which devices tests run on; Vulkan is Mesa's lavapipe where there is no GPU."""

from __future__ import annotations

import os
from functools import cache

import pytest

from k3tvm.errors import K3Error

TARGETS = ("cpu", "vulkan:lavapipe")


@cache
def _why_no_vulkan() -> str:
    from k3tvm.vulkan.devices import find

    try:
        find()
    except K3Error as error:
        return str(error)
    return ""


def require(target: str) -> None:
    """Skip the test where the machine has no Vulkan device; in CI that is an error instead."""
    if target.startswith("vulkan") and _why_no_vulkan():
        reason = f"no Vulkan device: {_why_no_vulkan()} (.ci/vulkan installs one)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
