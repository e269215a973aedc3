"""Parameters that transformers keeps in float32 in a model of bfloat16.

Routers of mixtures of experts choose by differences that bfloat16 rounds away, and so do the decay rates of
some recurrent layers. Their classes say so in `_keep_in_fp32_modules_strict`, which `from_pretrained` heeds.
Names in `_keep_in_fp32_modules` stay in float32 in models of float16 only, so they do not count here.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from colocate.weights.layouts import causal_lm


def kept_in_float32(model: nn.Module) -> set[nn.Parameter]:
    """The base model's parameters that `from_pretrained(dtype=torch.bfloat16)` leaves in float32, whichever
    type they have now. Adapters' are never among them."""
    lm: Any = causal_lm(model)
    patterns = [name.replace("*", ".*") for name in getattr(lm, "_keep_in_fp32_modules_strict", None) or ()]
    if not patterns:
        return set()
    kept = re.compile("|".join(patterns))
    # PEFT moves what it wraps one module down, and keeps the weights of its adapters beside it.
    return {
        parameter
        for name, parameter in lm.named_parameters()
        if kept.search(name.replace(".base_layer.", ".")) and not _IS_ADAPTERS.search(name)
    }


_IS_ADAPTERS = re.compile(r"\.(lora_|modules_to_save\.)")
