"""`WeightWorker`: TensorRT-LLM's GPU workers with it load the trainer's weights from a buffer on their GPU.

TensorRT-LLM imports `WeightWorker` in each worker by its name (`ray_worker_extension_cls`). Its own
`update_weights` does the loading, of any release:

    update_weights({GPU: [(name, (fn, args)), ...]})    a chunk: fn(*args) is the tensor, args[6] the device
    update_weights(None)                                the end of an update

What it lacks is here: tensors that came in parts, and an end to an update that failed between two chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from torch import Tensor

DEVICE_ARGUMENT = 6
"""The place of the device's number among the arguments of torch's `rebuild_cuda_tensor`."""

_UNDER_WAY = "first_pre_reload_weights"
"""The attribute of the model that TensorRT-LLM sets with an update's first chunk and deletes with its end."""


class WeightWorker(WorkerExtension):
    """Takes weights in chunks. The attributes `engine` and `device_id` are those of TensorRT-LLM's worker."""

    _parts_of_tensors: dict[str, Tensor]

    def gpu_uuid(self) -> str:
        """The worker's GPU, "GPU-" and its UUID."""
        return get_device_uuid(self.device_id)

    def receive_chunk(
        self, handles: dict[str, list[Any]], parts: dict[str, tuple[int, tuple[int, ...]]]
    ) -> int:
        """Load a chunk; it is copied when this returns.

        Args:
            handles: by GPU, the chunk's tensors as (name, (fn, args)).
            parts: for each name that stands for a part of a tensor, the number of the part's first element
                and the tensor's shape. The parts of a tensor come in order.

        Returns:
            The number of tensors that are complete and loaded.

        Raises:
            ValueError: there are no handles for this worker's GPU.
        """
        gpu = self.gpu_uuid()
        if gpu not in handles:
            raise ValueError(f"the worker's GPU is {gpu}, and handles came for {', '.join(sorted(handles))}")
        _synchronize()  # the overlap scheduler may have a forward pass under way
        whole = [entry for entry in handles[gpu] if entry[0] not in parts]
        for name, (rebuild, arguments) in handles[gpu]:
            if name in parts:
                arguments = [*arguments]
                arguments[DEVICE_ARGUMENT] = self.device_id
                if (tensor := self._with_part(name, rebuild(*arguments), *parts[name])) is not None:
                    whole.append((name, (_first_of, (tensor, *[None] * DEVICE_ARGUMENT))))
        if whole:
            self.update_weights({gpu: whole})
        _synchronize()  # the trainer fills the buffer anew when it hears of this
        return len(whole)

    def finish_push(self) -> None:
        """Make the loaded weights ready, and forget prefixes that were computed with older ones."""
        if missing := self.__dict__.pop("_parts_of_tensors", None):
            raise ValueError(f"only a part of {', '.join(sorted(missing))} has come")
        self.update_weights(None)

    def abort_push(self) -> None:
        """Forget an update that will not be finished. What was loaded stays, and must be sent again."""
        self.__dict__.pop("_parts_of_tensors", None)
        model_engine = self.engine.model_engine
        if callable(abort := getattr(model_engine.model_loader, "abort_update_weights", None)):
            abort()  # releases up to 1.2.1 have none, and nothing that it would free
        if hasattr(model_engine.model, _UNDER_WAY):
            delattr(model_engine.model, _UNDER_WAY)

    def forget_prefixes(self) -> None:
        """Forget which prefixes the KV cache holds: they go with its memory."""
        self.engine.reset_prefix_cache()

    def _with_part(self, name: str, part: Tensor, first: int, shape: tuple[int, ...]) -> Tensor | None:
        """Copy a part to its place; the tensor if it is complete."""
        open_tensors = self.__dict__.setdefault("_parts_of_tensors", {})
        if name not in open_tensors:
            open_tensors[name] = torch.empty(shape, dtype=part.dtype, device=part.device)
        flat = open_tensors[name].view(-1)
        flat[first : first + part.numel()].copy_(part.view(-1))
        return open_tensors.pop(name) if first + part.numel() == flat.numel() else None


def _first_of(tensor: Tensor, *_: object) -> Tensor:
    return tensor


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
