"""vLLM's workers as receivers of weights: a worker extension that vLLM mixes into each of them.

    vllm serve MODEL --worker-extension-cls colocate.rollout_server.vllm.weight_receiver.WeightReceiver ...

`--worker-extension-cls` and `/collective_rpc` are vLLM's public interface. Internal to vLLM, and checked with
0.25 to 0.33, are the worker's attributes `device`, `rank`, `vllm_config` and `get_model()`, and the contents
of `internals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colocate.engines.vllm.internals import end_reload, has_packed_head, load_weights, start_reload
from colocate.rollout_server.wire.receiver import Receiver
from colocate.rollout_server.wire.weight_wire import SHAPE


class WeightReceiver:
    """Base class that vLLM adds to its worker; `/collective_rpc` calls `colocate_receive`."""

    def colocate_receive(self, message: str, signature: str) -> dict[str, Any]:
        """Do what a signed message asks. See `Receiver.answer`; vLLM would answer an exception of this method
        with an error 500 without a text."""
        receiver = self.__dict__.get("_colocate_receiver")
        if receiver is None:
            receiver = self.__dict__["_colocate_receiver"] = Receiver(VLLMWeights(self))
        return receiver.answer(message, signature)


class VLLMWeights:
    """The weights of one of vLLM's workers. See `receiver.ServedWeights`.

    Args:
        worker: vLLM's worker.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._is_reloading = False
        self._copy_as_head: str | None = None
        self._parameter_names: set[str] = set()
        self._loaded_names: set[str] | None = set()

    @property
    def device(self) -> torch.device:
        return self._worker.device

    @property
    def rank(self) -> int:
        return self._worker.rank

    def facts(self) -> dict[str, Any]:
        config = self._worker.vllm_config
        model_config, text_config = config.model_config, config.model_config.hf_text_config
        return {
            "engine": "vllm",
            "num_replicas": config.parallel_config.data_parallel_size,
            "can_sleep": bool(model_config.enable_sleep_mode),
            "logprobs_mode": str(getattr(model_config.logprobs_mode, "value", model_config.logprobs_mode)),
            "generation_config": model_config.generation_config,
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "shape": {name: getattr(text_config, name, None) for name in SHAPE},
        }

    def begin(self, tied_head: str | None) -> None:
        model = self._worker.get_model()
        self._parameter_names = {name for name, _ in model.named_parameters()}
        self._loaded_names = set()
        # This must come before the layers are unpacked: an unpacked head looks like any other.
        self._copy_as_head = tied_head if has_packed_head(model) else None
        start_reload(self._worker)
        self._is_reloading = True

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        copies = [("lm_head.weight", tensor) for name, tensor in tensors if name == self._copy_as_head]
        loaded = load_weights(self._worker, iter([*tensors, *copies]))
        if loaded is None or self._loaded_names is None:
            self._loaded_names = None  # this model does not say which weights it has loaded
        else:
            self._loaded_names |= loaded

    def end(self) -> None:
        if self._is_reloading:
            end_reload(self._worker)
        self._is_reloading = False

    def missing(self) -> list[str]:
        model_config = self._worker.vllm_config.model_config
        # Quantised models have scales as further parameters, which no trainer sends.
        if self._loaded_names is None or model_config.quantization is not None:
            return []
        missing = self._parameter_names - self._loaded_names
        if getattr(model_config.hf_text_config, "tie_word_embeddings", False):
            missing = {name for name in missing if not name.endswith("lm_head.weight")}
        return sorted(missing)
