"""The native engine on 4-bit models, against transformers, PEFT and bitsandbytes themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from engine_models import (
    assert_logprobs_are_the_models,
    assert_refused,
    greedy_references,
    make_model,
    make_prompts,
    randomise_adapters,
)
from peft import LoraConfig, get_peft_model
from quantized_models import PROJECTIONS, make_4bit_model, quantized

from colocate.engines.native import engine as native_engine
from colocate.engines.native.engine import NativeEngine
from colocate.types import SamplingParams
from colocate.weights.layouts import has_layout, layout_for
from colocate.weights.quantized import dequantize
from colocate.weights.shared_views import fuse_parameters

PROMPTS = make_prompts([5, 9, 2], 2)
LONG = SamplingParams(max_tokens=15)
GREEDY = SamplingParams(max_tokens=15, temperature=0)


def qlora(name: str = "qwen2", *, dtype: torch.dtype = torch.float32, **options):
    """Random, not zero, adapters in float32 on a 4-bit model."""
    model = make_4bit_model(name, dtype=dtype)
    torch.manual_seed(1)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": list(PROJECTIONS), **options})
    model = get_peft_model(model, config)
    randomise_adapters(model)
    return model


@pytest.fixture(params=["copy", "one by one"])
def make_engine(request, monkeypatch) -> Callable[..., NativeEngine]:
    """Makes an engine that is awake, and has memory for a copy or has not."""
    is_copy = request.param == "copy"

    def take_weights(weights, cache, layout, **_):
        weights.allocate(layout, is_copy=is_copy)

    monkeypatch.setattr(native_engine, "take_weights", take_weights)

    def make(model, **options) -> NativeEngine:
        engine = NativeEngine(model, **{"max_num_seqs": 4, "page_size": 4, **options})
        engine.wake_up()
        return engine

    return make


def tokens(completions) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama-biases"])
def test_greedy_is_model_generate(make_engine, name):
    model = make_4bit_model(name)
    expected = greedy_references(model, PROMPTS, 15)
    assert tokens(make_engine(model).generate(PROMPTS, GREEDY)) == expected
    unquantised = make_model(name, hidden_size=64, intermediate_size=128)
    assert greedy_references(unquantised, PROMPTS, 15) != expected


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.bfloat16, 0.15)])
def test_logprobs_are_those_of_the_adapted_model(make_engine, dtype, atol):
    model = qlora(dtype=dtype)
    for prompt in make_prompts([6, 3]):
        completions = make_engine(model).generate([prompt], LONG)
        assert_logprobs_are_the_models(model, [prompt], completions, atol=atol, rtol=1e-5)


def test_adapters_are_read_in_place(make_engine):
    model = qlora()
    engine = make_engine(model)
    expected = greedy_references(model, PROMPTS, 15)
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1)
    changed = greedy_references(model, PROMPTS, 15)
    assert changed != expected
    assert tokens(engine.generate(PROMPTS, GREEDY)) == changed
    with model.disable_adapter():
        base = greedy_references(model, PROMPTS, 15)
        assert tokens(engine.generate(PROMPTS, GREEDY)) == base


def test_a_model_with_some_projections_in_4_bits(make_engine):
    model = make_4bit_model("qwen2", projections=("q_proj", "up_proj", "down_proj"))
    engine = make_engine(model)
    expected = greedy_references(model, PROMPTS, 15)
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected
    with torch.no_grad():  # what is trained beside a 4-bit weight is seen, too
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    expected = greedy_references(model, PROMPTS, 15)
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected


def test_a_weight_that_is_replaced_is_seen_in_the_next_rollout(make_engine):
    model = make_4bit_model("qwen2")
    engine = make_engine(model)
    before = tokens(engine.generate(PROMPTS, GREEDY))
    layer = model.model.layers[0].mlp
    layer.up_proj = quantized(torch.nn.Linear(64, 128, bias=False))
    expected = greedy_references(model, PROMPTS, 15)
    assert before != expected
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected


def test_sleep_frees_the_dequantised_weights_and_changes_none(make_engine):
    model = make_4bit_model("qwen3")
    codes = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = make_engine(model)
    before = engine.generate(PROMPTS, LONG)
    layout = layout_for(model)
    assert engine.rollout_weight_bytes == engine._weights.needed_bytes(
        layout, is_copy=bool(engine._weights.is_copy)
    )
    engine.sleep()
    assert engine.rollout_weight_bytes == engine.kv_cache_bytes == 0
    engine.wake_up()
    assert engine.generate(PROMPTS, LONG) == before
    now = model.state_dict()
    assert now.keys() == codes.keys()
    assert all(torch.equal(tensor, codes[name]) for name, tensor in now.items())


@pytest.mark.parametrize(
    ("pages_beside_the_copy", "is_copy"),
    [
        (26, True),  # all that the rollout can use
        (5, False),  # not the longest sequence's 6
        (7, False),  # that, but less than 0.8 of the copy
    ],
)
def test_the_copy_is_made_if_it_pays(monkeypatch, caplog, pages_beside_the_copy, is_copy):
    model = make_4bit_model("qwen2")
    engine = NativeEngine(model, max_num_seqs=4, page_size=4)
    layout = layout_for(model)
    page_bytes = engine._cache.page_bytes(torch.float32)
    copy_bytes = engine._weights.needed_bytes(layout, is_copy=True)
    assert 7 * page_bytes < 0.8 * copy_bytes
    budget = copy_bytes + pages_beside_the_copy * page_bytes
    monkeypatch.setattr("colocate.engines.native.capacity._usable_bytes", lambda held, device: budget)
    engine.wake_up()
    with caplog.at_level(logging.INFO, logger="colocate"):
        engine.generate(PROMPTS, SamplingParams(max_tokens=15))
    assert engine._weights.is_copy is is_copy
    assert ("decodes from a torch.float32 copy" in caplog.text) is is_copy
    assert ("one by one" in caplog.text) is not is_copy


def test_a_cache_as_large_as_the_copy_is_beside_it_even_if_it_is_less_than_of_use(monkeypatch):
    model = make_4bit_model("qwen2")
    engine = NativeEngine(model, max_num_seqs=64, page_size=4)
    copy_bytes = engine._weights.needed_bytes(layout_for(model), is_copy=True)
    monkeypatch.setattr(
        "colocate.engines.native.capacity._usable_bytes", lambda held, device: 1.85 * copy_bytes
    )
    engine.wake_up()
    wanted = make_prompts([9] * 60, 8)
    engine.generate(wanted, SamplingParams(max_tokens=15))
    assert engine._weights.is_copy


def test_fusing_leaves_codes_alone():
    model = make_4bit_model("llama-biases")
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    fuse_parameters(layout_for(model))
    moved = {name for name, p in model.named_parameters() if p.data_ptr() != before[name]}
    assert moved and all(name.endswith("bias") for name in moved), moved
    attention = model.model.layers[0].self_attn
    assert dequantize(attention.q_proj).shape == (64, 64)


def eight_bits(model) -> None:
    model.config.quantization_config.load_in_4bit = False
    model.config.quantization_config.load_in_8bit = True


def other_compute_type(model) -> None:
    model.model.layers[1].mlp.up_proj.compute_dtype = torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (eight_bits, r"quantised \(bitsandbytes, 8 bits\)"),
        (lambda m: setattr(m.config, "quantization_config", {"quant_method": "gptq"}), r"quantised \(gptq\)"),
        (lambda m: setattr(m, "lm_head", quantized(torch.nn.Linear(64, 97, bias=False))), "lm_head"),
        (other_compute_type, "computes in torch.bfloat16.*is in torch.float32.*bnb_4bit_compute_dtype"),
    ],
)
def test_other_quantisations_are_refused_by_name(change, message):
    model = make_4bit_model("qwen2", tie_word_embeddings=False)
    assert has_layout(model)
    change(model)
    assert_refused(model, message)
