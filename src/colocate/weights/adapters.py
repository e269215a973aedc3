"""LoRA adapters read where PEFT keeps them.

Nothing is merged or copied: a projection's output is W x + sum_i scaling_i * B_i (A_i x), Hu et al. 2021,
https://arxiv.org/abs/2106.09685, with the A_i and B_i that PEFT's own forward would use at this moment.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Adapter:
    """One low-rank update of a linear layer: x -> scaling * B(A x)."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    bias: Tensor | None  # [out]
    scaling: float
    dropout: float
    """Probability with which training drops an input; an engine drops none."""

    def add_to(self, output: Tensor, x: Tensor) -> None:
        """Add the update for `x` [T, in] to `output` [T, out] in place, in x's type.

        Of a 16-bit type: A and B are rounded to it, t = A x is, and so is output + scaling * B t. Sums are in
        float32. The trainer's forward rounds at the same places.
        """
        t = F.linear(x, self.a.to(x.dtype))
        output.addmm_(t, self.b.to(x.dtype).t(), alpha=self.scaling)
        if self.bias is not None:
            output.add_(self.bias.to(x.dtype), alpha=self.scaling)


def base_linear(module: nn.Module) -> Any:
    """The linear layer inside PEFT's wrapper, or the module itself."""
    get_base_layer = getattr(module, "get_base_layer", None)
    return get_base_layer() if get_base_layer is not None else module


def active_adapters(module: nn.Module) -> list[Adapter]:
    """The updates to add to the product with the base weight, given the wrapper's present state."""
    if not hasattr(module, "get_base_layer"):
        return []
    lora: Any = module
    if lora.disable_adapters:
        # The base weight still contains what was merged; PEFT would un-merge it in place, we subtract it.
        names, sign = lora.merged_adapters, -1.0
    elif lora.merged:
        return []
    else:
        names, sign = lora.active_adapters, 1.0
    return [
        Adapter(
            a=lora.lora_A[name].weight,
            b=lora.lora_B[name].weight,
            bias=lora.lora_B[name].bias,
            scaling=sign * lora.scaling[name],
            dropout=getattr(lora.lora_dropout[name], "p", 0.0),  # without dropout it is an nn.Identity
        )
        for name in names
        if name in lora.lora_A
    ]


def prompt_learning_adapter(model: nn.Module) -> str | None:
    """Describe a PEFT adapter that adds virtual tokens in the wrapper's own forward; None if there is none.

    No rollout engine calls that forward, so such an adapter would be left out silently.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            return (
                f"PEFT adapter {name!r} ({config.peft_type}) is prompt learning, which adds virtual tokens "
                "in the wrapper's forward; no rollout engine reproduces that. Use LoRA instead."
            )
    return None


def unsupported_adapters(base: nn.Module) -> str | None:
    """Name the first PEFT feature in `base` beyond LoRA on linear layers; None if there is none."""
    if "peft" not in sys.modules:  # no adapter without the library that makes them
        return None
    from peft.tuners.lora.layer import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds: list[type[BaseTunerLayer]] = [LoraLinear]
    if "bitsandbytes" in sys.modules:
        from peft.tuners.lora.bnb import Linear4bit as Lora4bitLinear

        kinds.append(Lora4bitLinear)
    for name, module in base.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            return f"PEFT keeps its own copy of {name} ({type(module).__name__}, see modules_to_save)"
        if not isinstance(module, BaseTunerLayer):
            continue
        if name.rsplit(".", 1)[-1] in ("lm_head", "embed_tokens"):
            return f"a PEFT adapter sits on {name}"
        if type(module) not in kinds:
            return f"{name} carries a {type(module).__module__}.{type(module).__name__} adapter, not LoRA"
        lora: Any = module
        if lora.lora_variant:
            variant = next(iter(lora.lora_variant.values()))
            return f"{name} uses the LoRA variant {type(variant).__name__}"
        if lora.fan_in_fan_out:
            return f"{name} uses fan_in_fan_out"
    return None
