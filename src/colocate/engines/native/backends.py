"""Which implementation of the operations a device gets."""

from __future__ import annotations

import torch

from colocate.engines.native.torch_backend import TorchBackend


def default_sizes(device_type: str) -> tuple[int, int]:
    """Sequences decoded side by side, and tokens per page of the KV cache.

    A GPU's matrix products take as long for 8 rows as for 64, and its reads reach full bandwidth on pieces of
    16 KiB, a page of 64 tokens of one head; on a CPU larger pages would mean more masked work.
    """
    return (512, 64) if device_type == "cuda" else (64, 16)


def backend_for(device: torch.device) -> TorchBackend:
    """Triton kernels on CUDA, PyTorch operations elsewhere.

    Raises:
        RuntimeError: the GPU is older than compute capability 8.0.
    """
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
