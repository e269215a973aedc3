"""Fast kernels that do not run here, and why: each is one line in the log, once per process.

A `why_not_*` function gives the reason, or None where the fast way is taken.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from colocate.kernels.checks.kernel_check import CheckOutcome
from colocate.kernels.definitions import has_gate_kernels

TESTED = {
    "PyTorch": ("2.11", "2.15"),
    "Triton": ("3.6", "3.9"),
}
"""Releases (major and minor number: patches change no interface) with which the kernels' tests have passed on
a GPU, as `benchmarks/results/today-h100.json` records. With any other release the engine first tries its fast
kernels (`kernel_check.py`)."""


logger = logging.getLogger(__name__)


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
    capability: tuple[int, int],
) -> list[Fallback]:
    """The slower ways that the native engine takes on a GPU of this compute capability."""
    no_gate = why_not_gate(activation)
    no_products = None if no_gate else why_not_fast_products(capability, dtype)
    no_flash = why_not_flash(dtype, head_size)
    return _found(
        ("Attention in rollouts takes padded products and small tiles", no_flash, True),
        ("The gate in rollouts is not a kernel", no_gate, False),
        (
            "In rollouts SwiGLU and the output head are two kernels each, and few rows take cuBLAS",
            no_products,
            False,
        ),
    )


def of_versions(
    torch_version: str, triton_version: str | None, outcome: CheckOutcome | None = None
) -> list[Fallback]:
    """The warning for a PyTorch and a Triton that the kernels were never tested with.

    Args:
        triton_version: None: there is no Triton.
        outcome: what the fast kernels have done here; None: they are not tried, or not yet.
    """
    said = []
    if not is_tested("PyTorch", torch_version):
        said.append(Fallback(f"PyTorch {torch_version} was never tested with these kernels on a GPU."))
    if triton_version is None or is_tested("Triton", triton_version):
        return said
    untested = f"Triton {triton_version} was never tested with these kernels on a GPU"
    if outcome is None:
        return [*said, Fallback(f"{untested}.")]
    if not outcome.failures:
        agree = f"the fast ones of rollouts agree with PyTorch here ({outcome.seconds:.0f} s)"
        return [*said, Fallback(f"{untested}; {agree}.")]
    failed = "; ".join(f"{kernel}: {reason}" for kernel, reason in outcome.failures.items())
    return [*said, Fallback(f"{untested}, and rollouts do without those that failed here: {failed}.", True)]


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
            `policy.attention.cudnn_attention` gives it; None: they can.
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
    """The fallbacks among the ways, each (what happens, why, whether it is costly): those with a reason."""
    return [Fallback(f"{way}: {why}.", is_costly) for way, why, is_costly in ways if why is not None]


def why_not_flash(dtype: torch.dtype, head_size: int) -> str | None:
    """The reason why PyTorch's flash attention cannot run heads of this type and size on a GPU; None: it
    can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention takes bfloat16 and float16, and the model is in {dtype}"
    if head_size % 8 or head_size > 256:
        return f"flash attention takes heads of up to 256 values, a multiple of 8, and these have {head_size}"
    return None


def why_not_gate(activation: Callable[[Tensor], Tensor]) -> str | None:
    """The reason why the gate's kernels do not compute this activation; None: they do."""
    name = getattr(activation, "__name__", type(activation).__name__)
    if has_gate_kernels(activation):
        return None
    return f"its kernels compute SiLU and the tanh approximation of GELU, and the model has {name}"


def why_not_fast_products(capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """The reason why all products of a rollout are cuBLAS's on this GPU, with any version of Triton; None:
    some are kernels."""
    if capability[0] != 9:
        have = ".".join(map(str, capability))
        return f"one kernel needs compute capability 9.0 (H100, H200), and this GPU has {have}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"one kernel takes bfloat16 and float16, and the model is in {dtype}"
    return None


def is_tested(package: str, version: str) -> bool:
    """Whether this version, such as "2.15.0+cu132", is of a release in `TESTED[package]`."""
    return release(version) in TESTED[package]


def release(version: str) -> str:
    """Major and minor number: "3.9" of "3.9.0+git1234"."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version
