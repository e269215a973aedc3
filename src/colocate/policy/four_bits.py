"""The 4-bit format of QLoRA's frozen weights (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig


def four_bit_config(
    compute_dtype: torch.dtype | str | None,
    *,
    quant_type: str = "nf4",
    double_quantized: bool = False,
    storage: str | None = None,
) -> BitsAndBytesConfig:
    """How a model is put into 4 bits while it loads.

    Args:
        compute_dtype: the type in which the weights are multiplied: that of the model's other weights. None:
            float32.
        quant_type: "nf4" or "fp4".
        double_quantized: whether the scales of the weights are quantised, too.
        storage: the type of the tensors that hold the bits. None: uint8.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quantized,
        bnb_4bit_quant_storage=storage,
    )
