"""`WeightWorker`: TensorRT-LLM's GPU workers with it load the trainer's weights from a buffer on their GPU.

TensorRT-LLM imports `WeightWorker` in each worker by its name (`ray_worker_extension_cls`). Its own
`update_weights` does the loading, of any release:

    update_weights({GPU: [(name, (fn, args)), ...]})    a chunk: fn(*args) is the tensor, args[6] the device
    update_weights(None)                                the end of an update

It lacks an end to an update that failed between two chunks, which is here.
"""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

_UNDER_WAY = "first_pre_reload_weights"
"""The attribute of the model that TensorRT-LLM sets with an update's first chunk and deletes with its end."""


class WeightWorker(WorkerExtension):
    """Takes weights in chunks. The attributes `engine` and `device_id` are those of TensorRT-LLM's worker."""

    def gpu_uuid(self) -> str:
        """The worker's GPU, "GPU-" and its UUID."""
        return get_device_uuid(self.device_id)

    def receive_chunk(self, handles: dict[str, list[Any]]) -> int:
        """Load a chunk; it is copied when this returns.

        Args:
            handles: by GPU, the chunk's tensors as (name, (fn, args)).

        Returns:
            The number of tensors that were loaded.

        Raises:
            ValueError: there are no handles for this worker's GPU.
        """
        gpu = self.gpu_uuid()
        if gpu not in handles:
            raise ValueError(f"the worker's GPU is {gpu}, and handles came for {', '.join(sorted(handles))}")
        _synchronize()  # the overlap scheduler may have a forward pass under way
        self.update_weights({gpu: handles[gpu]})
        _synchronize()  # the trainer fills the buffer anew when it hears of this
        return len(handles[gpu])

    def finish_push(self) -> None:
        """Make the loaded weights ready, and forget prefixes that were computed with older ones."""
        self.update_weights(None)

    def abort_push(self) -> None:
        """Forget an update that will not be finished. What was loaded stays, and must be sent again."""
        model_engine = self.engine.model_engine
        if callable(abort := getattr(model_engine.model_loader, "abort_update_weights", None)):
            abort()  # releases up to 1.2.1 have none, and nothing that it would free
        if hasattr(model_engine.model, _UNDER_WAY):
            delattr(model_engine.model, _UNDER_WAY)

    def forget_prefixes(self) -> None:
        """Forget which prefixes the KV cache holds: they go with its memory."""
        self.engine.reset_prefix_cache()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
