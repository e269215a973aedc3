"""The head of a language model, which makes logits of hidden states."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from colocate.weights.layouts import causal_lm

SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""The names that the soft cap has in Gemma's, RecurrentGemma's and xLSTM's configurations."""
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""The names of factors on the logits in Cohere's, Falcon-H1's and Muse's configurations."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""The names of divisors in Granite's and Inkling's. HyperCLOVA X multiplies by what has Granite's name."""


@dataclass(frozen=True)
class OutputHead:
    """The map from a hidden state h to logits: cap(scale * (weight @ h + bias)), with
    cap(x) = softcap * tanh(x / softcap)."""

    weight: Tensor  # [V, hidden]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None


def output_head(model: torch.nn.Module) -> OutputHead:
    """The model's head as it is now; with PEFT, the adapter decides which of its weights are active."""
    lm = causal_lm(model)
    module = lm.get_output_embeddings()
    if hasattr(module, "modules_to_save"):  # PEFT trains a copy of the whole head
        trained = bool(module.active_adapters) and not module.disable_adapters
        module = module.modules_to_save[module.active_adapters[0]] if trained else module.original_module
    if hasattr(module, "base_layer"):
        raise ValueError(
            "The LM head carries a PEFT adapter, which log-probabilities in chunks would ignore. Take "
            "'lm_head' out of target_modules; to train the whole head put it into modules_to_save."
        )
    if not isinstance(getattr(module, "weight", None), Tensor):
        raise ValueError(f"{type(lm).__name__} has no output embeddings: it is not a causal language model.")
    config = lm.config.get_text_config()
    scale = math.prod(getattr(config, name, None) or 1.0 for name in FACTORS)
    divisor = math.prod(getattr(config, name, None) or 1.0 for name in DIVISORS)
    scale = scale * divisor if config.model_type.startswith("hyperclovax") else scale / divisor
    softcaps = (getattr(config, name, None) for name in SOFTCAPS)
    softcap = next((cap for cap in softcaps if cap), None)
    weight, bias = module.weight, getattr(module, "bias", None)
    num_tokens = getattr(config, "unpadded_vocab_size", None)
    if num_tokens is not None and num_tokens < len(weight):  # Inkling has rows of padding
        weight, bias = weight[:num_tokens], None if bias is None else bias[:num_tokens]
    return OutputHead(weight, bias, float(scale), softcap)
