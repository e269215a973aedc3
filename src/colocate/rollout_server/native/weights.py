"""The `ServedWeights` of the native engine: a model's parameters, which a trainer's overwrite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colocate.engines.native.engine import NativeEngine
from colocate.rollout_server.wire.weight_wire import SHAPE


class NativeWeights:
    """The parameters of a model that a native engine reads, overwritten in place by those of a trainer.

    Args:
        model: a causal language model with a layout.
        can_sleep: whether the server gives its memory back between rollouts.
    """

    rank = 0

    def __init__(self, model: Any, engine: NativeEngine, *, can_sleep: bool = False) -> None:
        self._config = model.config.get_text_config()
        self._parameters = dict(model.named_parameters())  # each once, tied ones under their first name
        self._engine = engine
        self.can_sleep = can_sleep
        self._dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._loaded: set[str] = set()
        self._num_versions = 0
        self._dropped: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """Storages without memory and their bytes, by the addresses they had."""

    def facts(self) -> dict[str, Any]:
        return {
            "engine": "native",
            "num_replicas": 1,
            "can_sleep": self.can_sleep,
            "logprobs_mode": "policy",
            "dtype": str(self._dtype).removeprefix("torch."),
            "shape": {name: getattr(self._config, name, None) for name in SHAPE},
        }

    def begin(self, tied_head: str | None) -> None:
        """Begin as `ServedWeights.begin` says.

        Raises:
            RuntimeError: the engine is drawing, or the weights have no memory.
        """
        self._check_memory()
        if self._engine.is_busy:
            raise RuntimeError("new weights were begun while the engine draws: POST /pause first")
        self._loaded = set()

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy whole tensors over the parameters of their names.

        Raises:
            ValueError: a tensor is none of the model's, or has another shape. Those before it are copied.
            RuntimeError: the weights have no memory.
        """
        self._check_memory()
        with torch.no_grad():
            for name, tensor in tensors:
                parameter = self._parameters.get(name)
                if parameter is None or parameter.shape != tensor.shape:
                    own = "does not have it" if parameter is None else f"has {list(parameter.shape)} there"
                    raise ValueError(
                        f"the trainer sent {name!r} with the shape {list(tensor.shape)}, and the server's "
                        f"model {own}: the trainer's model is another one"
                    )
                parameter.copy_(tensor)
                self._loaded.add(name)

    def end(self) -> None:
        """Have the engine forget all keys and values of the weights before."""
        self._num_versions += 1
        self._engine.update_weights(self._num_versions)

    def missing(self) -> list[str]:
        return sorted(self._parameters.keys() - self._loaded)

    def _check_memory(self) -> None:
        if self._dropped:
            raise RuntimeError(
                "new weights came while the server sleeps and has no memory for them: POST "
                "/wake_up?tags=weights first"
            )

    def drop(self) -> None:
        """Give the memory of the weights back; their contents are lost."""
        for parameter in self._parameters.values():
            storage = parameter.untyped_storage()  # projections of one layer share one
            if storage.nbytes():
                self._dropped[storage.data_ptr()] = storage, storage.nbytes()
        for storage, _ in self._dropped.values():
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def take(self) -> None:
        """Take memory for the weights again, with undefined contents. Harmless if they have it."""
        for storage, num_bytes in self._dropped.values():
            storage.resize_(num_bytes)
        self._dropped.clear()
