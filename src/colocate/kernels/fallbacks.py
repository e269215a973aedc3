"""Fast kernels that do not run here, and why: each is one line in the log, once per process.

A `why_not_*` function gives the reason, or None where the fast way is taken.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from colocate.kernels.definitions import is_silu

logger = logging.getLogger(__name__)

GLUON_TRITON = "3.6."
"""Prefixes of the Triton versions that may run the kernels written in Gluon, Triton's lower-level language:
Gluon is experimental, so its kernels run only with versions that they were tested with on a GPU. They compile
with later ones, too, up to 3.9."""


class Fallback(NamedTuple):
    """A slower way that is taken, and why."""

    line: str
    is_costly: bool = False
    """Whether the slower way makes a run much slower, and not just by a few per cent."""


def tell(fallbacks: Iterable[Fallback]) -> None:
    """Log each line that this process has not logged yet, the costly ones as warnings."""
    for line, is_costly in fallbacks:
        _log_once(logging.WARNING if is_costly else logging.INFO, line)


@functools.cache
def _log_once(level: int, line: str) -> None:
    logger.log(level, line)


def of_rollout(
    dtype: torch.dtype,
    head_size: int,
    activation: Callable[[Tensor], Tensor],
    triton_version: str,
    capability: tuple[int, int],
) -> list[Fallback]:
    """The slower ways that the native engine takes on a GPU of this compute capability."""
    no_gate = why_not_gate(activation)
    no_gluon = None if no_gate else why_not_gluon(triton_version, capability, dtype)
    no_flash = why_not_flash(dtype, head_size)
    return _found(
        ("Attention in rollouts takes padded products and small tiles", no_flash, True),
        ("The gate in rollouts is not a kernel", no_gate, False),
        (
            "In rollouts SwiGLU and the output head are two kernels each, and few rows take cuBLAS",
            no_gluon,
            False,
        ),
    )


def of_products_8bit(dtype: torch.dtype) -> list[Fallback]:
    """The slower way that products of a rollout in 8 bits take on a GPU."""
    is_wide = dtype == torch.float32
    no_product = f"cuBLAS has them for 16-bit models, and this one is in {dtype}" if is_wide else None
    return _found(("Products in 8 bits are multiplied out in float32", no_product, True))


def of_training(
    dtype: torch.dtype,
    head_size: int,
    activation: Callable[[Tensor], Tensor],
    norm_dtype: torch.dtype,
    has_windows: bool,
    why_not_cudnn: str | None,
) -> list[Fallback]:
    """The slower ways that the trainer's packed stack takes on a GPU.

    Args:
        norm_dtype: type of the norms' weights.
        has_windows: whether a layer has a sliding window.
        why_not_cudnn: why layers without a sliding window cannot use cuDNN's attention, as
            `policy.cudnn_attention` gives it; None: they can.
    """
    no_flash = why_not_flash(dtype, head_size)
    no_cudnn = why_not_cudnn or ("cuDNN's has no sliding windows" if has_windows else None)
    no_norms = None if norm_dtype == dtype else f"their weights are {norm_dtype} and the model is in {dtype}"
    return _found(
        ("Attention in training takes padded matrix products", no_flash, True),
        ("Attention in training is FlashAttention", None if no_flash else no_cudnn, False),
        ("The gate in training is not a kernel", why_not_gate(activation), False),
        ("The norms in training are not kernels", no_norms, True),
    )


def _found(*ways: tuple[str, str | None, bool]) -> list[Fallback]:
    """Fallbacks for those of the ways (what happens, why, whether it is costly) that have a reason."""
    return [Fallback(f"{way}: {why}.", is_costly) for way, why, is_costly in ways if why is not None]


def why_not_flash(dtype: torch.dtype, head_size: int) -> str | None:
    """Why PyTorch's flash attention cannot run heads of this type and size on a GPU; None: it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention takes bfloat16 and float16, and the model is in {dtype}"
    if head_size % 8 or head_size > 256:
        return f"flash attention takes heads of up to 256 values, a multiple of 8, and these have {head_size}"
    return None


def why_not_gate(activation: Callable[[Tensor], Tensor]) -> str | None:
    """Why the gate's kernels do not compute this activation; None: they do."""
    name = getattr(activation, "__name__", type(activation).__name__)
    return None if is_silu(activation) else f"its kernel computes SiLU, and the model has {name}"


def why_not_gluon(triton_version: str, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Why the kernels written in Gluon do not run here; None: they do."""
    if capability[0] != 9:
        have = ".".join(map(str, capability))
        return f"one kernel needs compute capability 9.0 (H100, H200), and this GPU has {have}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"one kernel takes bfloat16 and float16, and the model is in {dtype}"
    if not triton_version.startswith(GLUON_TRITON):
        return f"one kernel needs Triton {GLUON_TRITON}x, and this is {triton_version}"
    return None
