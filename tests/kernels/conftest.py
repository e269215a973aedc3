"""Kernels run on the GPU where there is one, else in Triton's interpreter (`../conftest.py` asks for it)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(
    scope="session",
    params=[pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"],
)
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def poisoned_memory():
    """`torch.empty` fills with NaN, integers with their largest value: what a kernel does not write shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
