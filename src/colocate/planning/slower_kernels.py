"""The fast kernels that a planned run would do without on a GPU, and why, as its log would say it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from colocate.kernels.checks import fallbacks
from colocate.kernels.checks.fallbacks import TESTED, Fallback, is_tested
from colocate.policy.attention.cudnn_attention import why_not_cudnn_on
from colocate.weights.layouts import Layout


def slower_kernels(
    layout: Layout,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    is_native: bool,
    rollout_precision: str = "bf16",
) -> list[Fallback]:
    """The fallbacks of trainer and engine on a GPU of this compute capability, wherever it is.

    Triton and cuDNN are taken to be those that are installed here. A build of PyTorch for CPUs has no Triton;
    then nothing is said of its version.

    Args:
        layout: of the model, which may be on the meta device.
        dtype: the type in which it will be trained.
        is_native: whether the native engine generates; its kernels count then.
    """
    head_size, activation = layout.head_dim, layout.layers[0].activation
    windows = [layer.sliding_window for layer in layout.layers if layer.sliding_window is not None]
    no_cudnn = why_not_cudnn_on(capability, dtype, head_size)
    # Norms have the type of the other weights: a model is loaded in one type, and cast as a whole.
    found = fallbacks.of_training(dtype, head_size, activation, dtype, bool(windows), no_cudnn)
    if is_native:
        found += fallbacks.of_rollout(dtype, head_size, activation, capability)
        if fallbacks.why_not_fast_products(capability, dtype) is None:
            found += _of_triton()
    if rollout_precision == "fp8":
        found += fallbacks.of_products_8bit(dtype)
    return found


def _of_triton() -> list[Fallback]:
    """The remark on a Triton that was never tested: whether its kernels run will show on the GPU."""
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return []
    if is_tested("Triton", installed):
        return []
    return [
        Fallback(
            f"Rollouts may do without their fast products: Triton {installed} was never tested with them "
            f"({', '.join(TESTED['Triton'])} were), and a run tries them at its start."
        )
    ]
