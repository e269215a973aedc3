"""The choice of a backend (PyTorch operations or Triton kernels) and of default sizes by device."""

from __future__ import annotations

import torch

from colocate.engines.native.torch_backend import TorchBackend


def default_sizes(device_type: str) -> tuple[int, int]:
    """Default number of sequences that decode at once, and of tokens per page of the KV cache.

    On a GPU a matrix product with 8 rows takes as long as one with 64, so many sequences decode at once, and
    reads reach full bandwidth from pieces of 16 KiB on: 64 tokens of one head (64 × 128 × 2 bytes). On a CPU
    a page of more than 16 tokens would add work on masked positions.
    """
    return (512, 64) if device_type == "cuda" else (64, 16)


def backend_for(device: torch.device) -> TorchBackend:
    """The backend for a device: Triton kernels on CUDA, PyTorch operations elsewhere."""
    if device.type != "cuda":
        return TorchBackend()
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise RuntimeError(
            f"The native engine's kernels need compute capability 8.0 (Ampere); {device} is a "
            f"{torch.cuda.get_device_name(device)} with {capability[0]}.{capability[1]}. Use engine="
            "'transformers'."
        )
    from colocate.engines.native.triton_backend import TritonBackend  # triton comes with CUDA builds of torch

    return TritonBackend()
