"""The trainer's LoRA adapters in vLLM's own buffers. Holds for vLLM 0.25 to 0.33.

With `enable_lora` a linear layer of vLLM has buffers for A and B beside its weight and adds B (A x) to W x
as it generates, t = A x in float32. W is the trainer's own (see `shared_weights`); after each optimizer step
A and scaling * B are copied into the buffers, on the device. vLLM hears of an adapter once, from a file that
says nothing: what its layers read is what `AdapterSlot.copy` wrote last.

Of vLLM's inside this uses the model's `lora_manager` (`modules`, `packed_modules_mapping` and
`lora_index_to_id`) and its layers' `set_lora`, `reset_lora`, `lora_a_stacked` and `lora_b_stacked`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from colocate.engines.vllm.shared_weights import fused_projections
from colocate.weights.adapters import active_adapters, base_linear
from colocate.weights.layouts import causal_lm, layout_for

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `max_lora_rank`."""

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""vLLM's layers of several projections, in the order in which they take those projections' adapters."""

_ADAPTER_ID = 1
_ADVICE = "Set vllm_weights='buckets', with which vLLM has a copy that the adapters are merged into."


def has_adapters(model: nn.Module) -> bool:
    """Whether a model is inside a PEFT wrapper, and so may have adapters now or later."""
    return hasattr(model, "peft_config")


def why_no_slot(model: nn.Module) -> str | None:
    """Why vLLM cannot add the adapters of a model with a layout to weights that it shares; None if it can."""
    layout = layout_for(model)
    if (rank := _max_rank(model)) == 0:
        return "the PEFT model has no active adapter"
    if rank > RANKS[-1]:
        return f"the adapters of one matrix have rank {rank} together, and vLLM takes {RANKS[-1]} at most"
    if any(adapter.bias is not None for module in _projections(model) for adapter in active_adapters(module)):
        return "the adapters have biases (lora_bias=True), for which vLLM has no place"
    if layout.device.type == "cuda" and layout.dtype == torch.float32:
        return "vLLM's LoRA kernels compute in 16 bits, and the model is in float32"
    return None


def slot_arguments(model: nn.Module) -> dict[str, Any]:
    """vLLM's arguments for one adapter, of the policy's rank, in those layers that the policy has adapted."""
    rank = _max_rank(model)
    targets = {
        name.rpartition(".")[-1]
        for name, modules in fused_projections(layout_for(model))
        if any(active_adapters(module) for module in modules)
    }
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(size for size in RANKS if size >= rank),
        "lora_target_modules": sorted(targets),
    }


class AdapterSlot:
    """Room for the policy's adapters in a running vLLM that was started with `slot_arguments`.

    Several active adapters of a matrix become one, A_1 above A_2 and B_1 beside B_2, whose product is the
    sum of theirs.

    Attributes:
        request: vLLM's `LoRARequest`, for everything that is to be generated with the adapters.
        num_bytes: memory of the buffers.
        copied_bytes: written by the last `copy`, without what pads adapters to a rank that vLLM has.

    Raises:
        RuntimeError: this vLLM keeps adapters in another way than is known here.
    """

    def __init__(self, llm: Any, model: nn.Module) -> None:
        from vllm.lora.request import LoRARequest

        self._model = model
        self._max_rank = slot_arguments(model)["max_lora_rank"]
        self._manager: Any = llm.apply_model(lambda module: getattr(module, "lora_manager", None))[0]
        self._check_manager()
        with tempfile.TemporaryDirectory(prefix="colocate-adapter-") as directory:
            _write_nothing(model, Path(directory))
            self.request = LoRARequest("policy", _ADAPTER_ID, directory)
            try:
                llm.llm_engine.add_lora(self.request)
                self.copy()
            except Exception as error:  # whatever a vLLM raises that takes them in another way
                raise RuntimeError(f"vLLM does not take the adapters: {error}") from error
        self.num_bytes = sum(
            buffer.nbytes
            for layer in self._manager.modules.values()
            for buffer in (*layer.lora_a_stacked, *layer.lora_b_stacked)
        )

    @torch.inference_mode()
    def copy(self) -> None:
        """Write the adapters as they are now, A and scaling * B each rounded once to vLLM's type.

        Raises:
            RuntimeError: the adapters no longer fit what vLLM was started for, or vLLM has dropped its own.
        """
        self._check_registered()
        self.copied_bytes = sum(
            self._copy_layer(name, [_factors(module) for module in modules])
            for name, modules in fused_projections(layout_for(self._model))
        )

    def _copy_layer(self, name: str, factors: Sequence[tuple[Tensor, Tensor] | None]) -> int:
        present = [pair for pair in factors if pair is not None]
        layer = self._manager.modules.get(name)
        if layer is None:
            if present:
                raise RuntimeError(f"{name} has got an adapter since vLLM started. {_ADVICE}")
            return 0
        if not present:
            layer.reset_lora(0)
            return 0
        if (rank := max(len(a) for a, _ in present)) > self._max_rank:
            raise RuntimeError(
                f"The adapters of {name} have rank {rank} together, and vLLM was started for "
                f"{self._max_rank}. {_ADVICE}"
            )
        if len(factors) == 1:
            layer.set_lora(0, *present[0])
        else:
            layer.set_lora(0, [pair and pair[0] for pair in factors], [pair and pair[1] for pair in factors])
        item_bytes = layer.lora_a_stacked[0].itemsize
        return sum((a.numel() + b.numel()) * item_bytes for a, b in present)

    def _check_manager(self) -> None:
        layers: dict[str, Any] = getattr(self._manager, "modules", {})
        used = ("set_lora", "reset_lora", "lora_a_stacked", "lora_b_stacked")
        packed = getattr(self._manager, "packed_modules_mapping", {})
        for name, modules in fused_projections(layout_for(self._model)):
            if not any(active_adapters(module) for module in modules):
                continue
            if not all(hasattr(layers.get(name), attribute) for attribute in used):
                raise RuntimeError(f"vLLM has no place that is known here for the adapters of {name}")
            last = name.rpartition(".")[-1]
            if packed.get(last) != PACKED.get(last):
                raise RuntimeError(f"vLLM takes the adapters of {last} as {packed.get(last)}")

    def _check_registered(self) -> None:
        if (present := getattr(self._manager, "lora_index_to_id", None)) != [_ADAPTER_ID]:
            raise RuntimeError(f"vLLM should have the policy's adapter alone, and has {present}. {_ADVICE}")


def _projections(model: nn.Module) -> list[nn.Module]:
    return [module for _, modules in fused_projections(layout_for(model)) for module in modules]


def _max_rank(model: nn.Module) -> int:
    """Largest rank of one matrix's active adapters together; 0 without any."""
    return max(sum(len(adapter.a) for adapter in active_adapters(module)) for module in _projections(model))


def _factors(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """A [r, in] and scaling * B [out, r] of a projection's active adapters together; None without any."""
    adapters = active_adapters(module)
    if not adapters:
        return None
    a = [adapter.a for adapter in adapters]
    b = [adapter.scaling * adapter.b.float() for adapter in adapters]
    return torch.cat(a), torch.cat(b, dim=1)


def _write_nothing(model: nn.Module, directory: Path) -> None:
    """A PEFT checkpoint of rank 1 whose product is zero: the least that vLLM can load."""
    adapted = next(module for module in _projections(model) if active_adapters(module))
    name = next(name for name, module in causal_lm(model).named_modules() if module is adapted)
    linear = base_linear(adapted)
    prefix = f"base_model.model.{name}"
    save_file(
        {
            f"{prefix}.lora_A.weight": torch.zeros(1, linear.in_features),
            f"{prefix}.lora_B.weight": torch.zeros(linear.out_features, 1),
        },
        directory / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [name.rpartition(".")[-1]]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
