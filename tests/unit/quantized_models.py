"""Tiny models whose projections are bitsandbytes' 4-bit layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from engine_models import make_model
from transformers import BitsAndBytesConfig

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear4bit

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linear_4bit(
    num_out: int, num_in: int, *, dtype: torch.dtype, device: str = "cpu", seed: int = 0, **options: Any
) -> Linear4bit:
    """A random layer without bias, quantised."""
    torch.manual_seed(seed)
    return quantized(torch.nn.Linear(num_in, num_out, bias=False, dtype=dtype), device, **options)


def quantized(linear: torch.nn.Linear, device: str = "cpu", **options: Any) -> Linear4bit:
    from bitsandbytes.nn import Linear4bit  # the other tests of a file need no bitsandbytes

    dtype, (num_out, num_in) = linear.weight.dtype, linear.weight.shape
    options = {"quant_type": "nf4", "compute_dtype": dtype, **options}
    layer = Linear4bit(num_in, num_out, bias=linear.bias is not None, **options)
    layer.load_state_dict(linear.state_dict())
    # In evaluation mode its forward re-packs the weight on some CPUs.
    return layer.to(dtype).to(device).train()


def make_4bit_model(
    name: str,
    *,
    projections: tuple[str, ...] = PROJECTIONS,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **overrides: Any,
) -> Any:
    """A random model by the name of its configuration, with these projections in 4 bits."""
    # Rows of whole blocks: bitsandbytes' products warn of others.
    model = make_model(name, **{"hidden_size": 64, "intermediate_size": 128, **overrides}).to(dtype)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for child, linear in list(parent.named_children()):
                if child in projections:
                    setattr(parent, child, quantized(linear, device))
    model.config.quantization_config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    # What PEFT asks before it wraps a 4-bit layer.
    model.is_loaded_in_4bit, model.quantization_method = True, "bitsandbytes"
    return model.to(device).train()
