"""4-bit linear layers, against codes and scales taken apart by hand."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_blockwise, get_4bit_type
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig
from quantized_models import linear_4bit, make_4bit_model

from colocate.weights.quantized import compute_dtype, dequantize, is_4bit
from tiny import VOCAB_SIZE, logged, make_trainer, train, weights_of


def by_hand(linear: Linear4bit) -> torch.Tensor:
    """Code times scale in float64, [out, in]."""
    state = linear.weight.quant_state
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    packed = linear.weight.detach().flatten()
    codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
    values = get_4bit_type(state.quant_type, device="cpu", blocksize=64).double()[codes]
    return (values * scales.double().repeat_interleave(state.blocksize)[: len(values)]).view(state.shape)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_code_times_scale_rounded_once(quant_type, is_nested, dtype):
    linear = linear_4bit(40, 128, dtype=dtype, quant_type=quant_type, compress_statistics=is_nested)
    assert is_4bit(linear) and compute_dtype(linear) == dtype
    expected = by_hand(
        linear
    )  # rows of whole blocks: bitsandbytes' CPU kernel misplaces other blocks' scales
    weight = dequantize(linear)
    assert weight.dtype == dtype
    torch.testing.assert_close(weight.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
    # In place, and in another type than the layer's: rounded from the product, not from the other type.
    out = torch.empty(40, 128, dtype=torch.bfloat16)
    assert dequantize(linear, out=out) is out
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=0)


def test_what_has_no_codes_yet_says_so():
    linear = Linear4bit(32, 32)
    with pytest.raises(RuntimeError, match=r"has not been quantised.*model\.to\(device\)"):
        dequantize(linear)
    assert not is_4bit(torch.nn.Linear(32, 32))


def test_a_weight_that_was_repacked_says_so():
    linear = linear_4bit(32, 64, dtype=torch.float32)
    linear.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(RuntimeError, match=r"re-packed.*model\.train\(\)"):
        dequantize(linear)


def small_4bit_model(**options):
    model = make_4bit_model("qwen3", vocab_size=VOCAB_SIZE, **options)
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    return model


def test_a_quantised_model_without_an_adapter_is_refused(tmp_path):
    """Its linear layers would stay as they are, while embeddings, norms and head moved."""
    with pytest.raises(ValueError, match=r"quantised \(14, such as .*q_proj.*peft_config"):
        make_trainer(tmp_path, model=small_4bit_model())


def test_adapters_on_4_bits_train_where_rollouts_run_in_evaluation_mode(tmp_path):
    """On some CPUs bitsandbytes re-packs weights there, and no gradient passes through them any more."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    trainer = make_trainer(tmp_path, model=small_4bit_model(), engine="transformers", peft_config=config)
    changed = train(trainer)
    assert min(logged(trainer, "grad_norm")) > 0
    assert {name for name in weights_of(trainer.model) if "lora_B" in name} <= changed


def test_weights_that_were_re_packed_are_refused(tmp_path):
    model = small_4bit_model()
    model.model.layers[1].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"re-packed the 4-bit weight .*layers\.1\.mlp\.up_proj"):
        make_trainer(tmp_path, model=model, peft_config=config, engine="transformers")
