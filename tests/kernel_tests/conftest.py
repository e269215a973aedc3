"""Kernels run on the GPU where there is one, else in Triton's interpreter (`../conftest.py` asks for it)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from colocate.kernels.decode import attention as decode_attention
from colocate.kernels.decode import prefixes

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # engine_models

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def mended_interpreter():
    """The interpreter does what a GPU does, where there is none."""
    if HAS_CUDA:
        yield
        return
    import interpreter  # which imports Triton's

    with interpreter.mended():
        yield


@pytest.fixture(
    scope="session",
    params=[pytest.param("cuda", marks=pytest.mark.gpu) if HAS_CUDA else "cpu"],
)
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def few_programs(monkeypatch):
    """Attention is cut into few programs: those that fill a GPU take the interpreter a minute."""
    for module in (prefixes, decode_attention):
        monkeypatch.setattr(module, "TARGET_PROGRAMS", 24)


@pytest.fixture
def poisoned_memory():
    """`torch.empty` fills with NaN, integers with their largest value: what a kernel does not write shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
