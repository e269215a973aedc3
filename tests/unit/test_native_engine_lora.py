"""The native engine on PEFT models, against `generate` of the PEFT model itself."""

from __future__ import annotations

import pytest
import torch
from engine_models import (
    FAMILIES,
    addresses_of,
    assert_logprobs_are_the_models,
    assert_refused,
    greedy_completions,
    greedy_references,
    make_model,
    make_prompts,
    randomise_adapters,
    train_steps,
)
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model

from colocate.engines.native.engine import NativeEngine
from colocate.engines.transformers_engine import TransformersEngine
from colocate.types import SamplingParams

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = make_prompts([5, 9, 2], 2)


def lora(name: str = "qwen2", seed: int = 1, **options):
    """A model with random, not zero, adapters."""
    torch.manual_seed(seed)
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR, "lora_dropout": 0.5, **options}
    )
    model = get_peft_model(make_model(name), config).eval()
    randomise_adapters(model)
    return model


def greedy(engine) -> list[list[int]]:
    engine.wake_up()
    return greedy_completions(engine, PROMPTS, 15)


def expected(model) -> list[list[int]]:
    return greedy_references(model, PROMPTS, 15)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["up_proj", "o_proj"], "lora_bias": False, "use_rslora": True},
        {"target_modules": ["q_proj", "k_proj"], "lora_bias": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}, "layers_to_transform": [1]},
    ],
    ids=["all", "qv", "rslora", "bias", "patterns"],
)
def test_adapters_are_read_in_place(options):
    model = lora(**options)
    engine = NativeEngine(model, max_num_seqs=4, page_size=4)
    completions = greedy(engine)
    assert completions == expected(model)
    with model.disable_adapter():
        assert completions != expected(model), "the adapter must matter"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen2"])
@pytest.mark.share(2)
def test_adapters_of_every_family_are_read_in_place(name):
    model = lora(name, target_modules="all-linear", lora_bias=name != "phi3")
    is_packed = any("qkv_proj.lora_A" in parameter for parameter, _ in model.named_parameters())
    assert is_packed == (name == "phi3")
    assert greedy(NativeEngine(model, max_num_seqs=4, page_size=4)) == expected(model)


def test_logprobs_are_those_of_the_adapted_model():
    model = lora("qwen3")
    engine = NativeEngine(model, page_size=4)
    engine.wake_up()
    prompts = make_prompts([6, 3])
    completions = engine.generate(prompts, SamplingParams(max_tokens=12))
    assert_logprobs_are_the_models(model, prompts, completions, atol=1e-5, rtol=1e-5)


def test_the_adapters_state_is_that_of_the_moment():
    model = lora()
    check_that_the_adapters_state_is_that_of_the_moment(model, NativeEngine(model, page_size=4))


def check_that_the_adapters_state_is_that_of_the_moment(model, engine) -> None:
    adapted = greedy(engine)
    assert adapted == expected(model)
    with model.disable_adapter():
        base = greedy(engine)
        assert base == expected(model)
    assert base != adapted
    assert greedy(engine) == adapted

    model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"]))
    model.to(model.device)  # PEFT makes it on the CPU
    torch.manual_seed(9)
    randomise_adapters(model)
    adapted = greedy(engine)
    assert adapted == expected(model)
    model.set_adapter("other")
    other = greedy(engine)
    assert other == expected(model)
    assert other not in (adapted, base)


def test_merged_adapters():
    model = lora()
    engine = NativeEngine(model, page_size=4)
    adapted = greedy(engine)
    with model.disable_adapter():
        base = expected(model)
    model.merge_adapter()
    merged_weight = model.get_base_model().model.layers[0].self_attn.q_proj.weight.clone()
    assert greedy(engine) == adapted == expected(model)
    with model.disable_adapter():
        # Nothing un-merges in place behind the trainer's back, yet the output is the base model's.
        assert greedy(engine) == base
        assert torch.equal(model.get_base_model().model.layers[0].self_attn.q_proj.weight, merged_weight)
    model.unmerge_adapter()
    assert greedy(engine) == adapted


def test_after_an_optimizer_step_the_next_rollout_uses_the_new_adapter():
    model = lora(lora_dropout=0.0)
    engine = NativeEngine(model, page_size=4)
    before = greedy(engine)
    addresses = addresses_of(model)
    base_weights = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    train_steps(model, optimizer)
    after = greedy(engine)
    assert after == expected(model)
    assert after != before
    assert addresses_of(model) == addresses
    assert all(torch.equal(model.get_parameter(name), value) for name, value in base_weights.items())


def test_adapters_in_higher_precision_than_the_model():
    model = get_peft_model(
        make_model("qwen2").bfloat16(),
        LoraConfig(r=4, target_modules=ALL_LINEAR),
        autocast_adapter_dtype=True,
    ).eval()
    randomise_adapters(model)
    assert next(p for n, p in model.named_parameters() if "lora_A" in n).dtype == torch.float32
    engine = NativeEngine(model, page_size=4)
    engine.wake_up()
    prompts = make_prompts([7])
    completions = engine.generate(prompts, SamplingParams(max_tokens=12))
    assert_logprobs_are_the_models(model, prompts, completions, atol=0.25)


def test_transformers_engine_on_a_peft_model():
    model = lora()
    assert greedy(TransformersEngine(model, pad_token_id=0)) == expected(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "DoraLinearVariant"),
        (LoraConfig(target_modules=["q_proj", "embed_tokens"]), "adapter sits on model.embed_tokens"),
        (LoraConfig(target_modules=["q_proj", "lm_head"]), "adapter sits on lm_head"),
        (LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "own copy of lm_head"),
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "ia3.*not LoRA"),
    ],
    ids=["dora", "embedding", "head", "modules_to_save", "ia3"],
)
def test_other_peft_features_are_refused_by_name(config, message):
    model = get_peft_model(make_model("qwen2"), config)
    assert_refused(model, message)


def test_prompt_learning_is_refused_by_both_engines():
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = get_peft_model(make_model("qwen2"), config)
    with pytest.raises(ValueError, match="prompt learning"):
        TransformersEngine(model, pad_token_id=0)
    with pytest.raises(ValueError, match="prompt learning"):
        NativeEngine(model)
