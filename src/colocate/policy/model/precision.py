"""The types of a policy's weights: bfloat16 with float32 masters, or float32, never float16; and the 4 bits
of QLoRA's frozen ones (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from colocate.options.values import shown
from colocate.weights.float32_parameters import kept_in_float32
from colocate.weights.layouts import causal_lm

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def asked_dtype(model_init_kwargs: Mapping[str, Any], *, bf16: bool) -> Any:
    """The `dtype` for `from_pretrained`: the one asked for; else with `bf16` the checkpoint's own type,
    as `cast_to_bf16` follows, and without it float32, as in TRL."""
    dtype = model_init_kwargs.get("dtype", "auto" if bf16 else "float32")
    if not (dtype in (*DTYPES, "auto", None) or isinstance(dtype, torch.dtype)):
        raise ValueError(
            f"model_init_kwargs dtype={shown(dtype)}: use 'auto', a torch.dtype or one of "
            f"{', '.join(DTYPES)}."
        )
    return DTYPES.get(dtype, dtype)


def refuse_float16(name: str, asked: str = "") -> None:
    """Refuse to train `name` in float16."""
    raise ValueError(
        f"{name} would be trained in float16{asked}: its gradients need loss scaling, which rare large ones "
        "upset. Set bf16=True, which casts the weights to bfloat16 and keeps float32 masters, or "
        "model_init_kwargs={'dtype': 'float32'}; a model object takes model.float() or .to(torch.bfloat16)."
    )


def check_types(model: nn.Module) -> None:
    """Refuse a model with weights in float16, or in a format of torchao."""
    for name, parameter in model.named_parameters():
        if type(parameter.data).__module__.startswith("torchao."):
            raise ValueError(
                f"{name} of {type(causal_lm(model)).__name__} is in torchao's format "
                f"{type(parameter.data).__name__}, which is not supported: a run could not compare its "
                "weights with a checkpoint's. Load the model unquantised, or in bitsandbytes' 4 bits with an "
                "adapter (load_in_4bit=True and use_peft=True)."
            )
        if parameter.dtype == torch.float16:
            refuse_float16(f"{type(causal_lm(model)).__name__}", f" (as {name} is)")


@torch.no_grad()
def cast_to_bf16(model: nn.Module) -> dict[str, Tensor]:
    """Make the parameters bf16, in place, and return the trainable ones in fp32 for the optimizer's masters.

    Four kinds of tensors stay as they are: those that transformers keeps in float32 (`kept_in_float32`; its
    parameters become float32 if they are not); PEFT's adapters, which PEFT keeps in fp32 over a bf16 model;
    quantized weights; and buffers such as the rotary frequencies, which in bf16 could not tell positions
    apart.
    """
    adapters = {id(p) for p in _adapter_parameters(model)}
    kept = {id(p) for p in kept_in_float32(model)}
    originals = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in kept and parameter.is_floating_point():
            parameter.data = parameter.data.float()
        if id(parameter) in adapters | kept or parameter.dtype not in (torch.float32, torch.float16):
            continue
        if parameter.requires_grad:
            originals[name] = parameter.detach().float()
        parameter.data = parameter.data.to(torch.bfloat16)
    return originals


def _adapter_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if hasattr(module, "base_layer"):
            for name in module.adapter_layer_names:  # type: ignore[union-attr]
                yield from getattr(module, name).parameters()


def four_bit_config(
    compute_dtype: torch.dtype | str | None,
    *,
    quant_type: str = "nf4",
    double_quantized: bool = False,
    storage: str | None = None,
) -> BitsAndBytesConfig:
    """The configuration by which a model is put into 4 bits while it loads: `quant_type` is "nf4" or "fp4",
    `compute_dtype` the type that multiplies (None: float32), `storage` that which holds the bits (None:
    uint8)."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quantized,
        bnb_4bit_quant_storage=storage,
    )
