"""vLLM on a CPU as on a GPU: its kernels read the weights as they are, so that they can be the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from colocate.engines.vllm import shared_weights


@contextmanager
def unpacked() -> Iterator[None]:
    """While an engine starts: vLLM packs no weight, and sharing is tried."""
    import vllm._custom_ops as ops

    device, packs = shared_weights.SHARING_DEVICE, ops._supports_onednn
    shared_weights.SHARING_DEVICE, ops._supports_onednn = "cpu", False
    try:
        yield
    finally:
        shared_weights.SHARING_DEVICE, ops._supports_onednn = device, packs
