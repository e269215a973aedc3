"""The fast kernels that a planned run would do without on a GPU, and why, as its log would say it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from colocate.kernels import fallbacks
from colocate.kernels.fallbacks import Fallback
from colocate.policy.cudnn_attention import why_not_cudnn_on
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

    Triton and cuDNN are taken to be those that are installed here; without a Triton, which a build of PyTorch
    for CPUs has not, the version that the kernels were tested with.

    Args:
        layout: of the model, which may be on the meta device.
        dtype: the type in which it will be trained.
        is_native: whether the native engine generates, whose kernels count then.
    """
    head_size, activation = layout.head_dim, layout.layers[0].activation
    windows = [layer.sliding_window for layer in layout.layers if layer.sliding_window is not None]
    no_cudnn = why_not_cudnn_on(capability, dtype, head_size)
    # Norms have the type of the other weights: a model is loaded in one type, and cast as a whole.
    found = fallbacks.of_training(dtype, head_size, activation, dtype, bool(windows), no_cudnn)
    if is_native:
        found += fallbacks.of_rollout(dtype, head_size, activation, _triton_version(), capability)
    if rollout_precision == "fp8":
        found += fallbacks.of_products_8bit(dtype)
    return found


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return fallbacks.GLUON_TRITON
