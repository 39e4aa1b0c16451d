"""Fixtures that more than one test file uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bundles import Bundles


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: for tiny tensors a second one only waits, long on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """Example checkpoints and bundles, made when first asked for."""
    return Bundles(tmp_path_factory.mktemp("bundles"))
