"""Kernels run on CUDA where there is one, else in Triton's interpreter, which takes tensors of the CPU."""

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def loops_up_to_loaded_counts():
    """numpy 2.4 makes no number of an array of one element; the interpreter of triton 3.6 asks for it."""
    if HAS_CUDA:
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        yield


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason="the kernels are compiled for CUDA")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs CUDA")]),
    ],
)
def device(request) -> torch.device:
    return torch.device(request.param)
