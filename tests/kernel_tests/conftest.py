"""Kernels run on the GPU where there is one, else in Triton's interpreter (`../conftest.py` asks for it)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from colocate.kernels import decode_attention, prefixes

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # engine_models

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def loops_up_to_loaded_counts():
    """numpy 2.4 makes no number of an array of one element any more; triton 3.6's interpreter asks for it."""
    if HAS_CUDA:
        yield
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched)
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
