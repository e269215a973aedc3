"""The longest sequence of a model: alike in every engine, in training and in the check of the dataset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from test_policy import make_policy, make_samples
from transformers import AutoModelForCausalLM

from colocate.rewards.models import RewardModel
from colocate.rollout_server.trainer.fit import _check_context
from colocate.run.engine import context_length
from colocate.weights.context_length import longest_context
from colocate.weights.layouts import has_layout
from colocate_trtllm.arguments import max_len_of
from tiny import EOS, PAD, VOCAB_SIZE, make_reward_model, make_tokenizer, make_trainer, sums

ORIGINAL = 16
LONGROPE: dict[str, Any] = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0, 1.2, 1.5, 2.0],
    long_factor=[2.0, 3.0, 4.0, 8.0],
    original_max_position_embeddings=ORIGINAL,
)
SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, vocab_size=64, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
    initializer_range=0.2,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "with a layout": ("Llama", dict(rope_parameters=LONGROPE), True),
    "of a part of each head, as Phi-4-mini": (
        "Phi3",
        dict(
            rope_parameters=LONGROPE | dict(short_factor=[1.0, 2.0], long_factor=[4.0, 8.0]),
            partial_rotary_factor=0.5,
            original_max_position_embeddings=ORIGINAL,
        ),
        True,
    ),
    "of a mixture of experts": (
        "Qwen3Moe",
        dict(rope_parameters=LONGROPE, head_dim=8, num_experts=4, num_experts_per_tok=2,
             moe_intermediate_size=16),
        False,
    ),
}  # fmt: skip


def make_longrope(name: str) -> Any:
    family, options, has = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = AutoModelForCausalLM.from_config(config)
    assert has_layout(model) is has
    return model


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("Llama", {}, (64, False)),
        ("Llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), (64, False)),
        ("Llama", dict(rope_parameters=LONGROPE), (16, True)),
        ("GPT2", dict(n_positions=40), (40, False)),
        ("XLNet", {}, (None, False)),
        ("Gemma3Text", dict(rope_parameters={
            "sliding_attention": dict(rope_type="default", rope_theta=1e4),
            "full_attention": LONGROPE,
        }), (16, True)),
    ],
)  # fmt: skip
def test_what_a_configuration_says(family, options, expected):
    config = getattr(transformers, f"{family}Config")
    sizes = SIZES if family in ("Llama", "Gemma3Text") else {}
    found = longest_context(config(**{**sizes, **options}))
    assert (found.num_tokens, found.is_exact) == expected
    assert (f"= {expected[0]}" in found.reason) == (expected[0] is not None)


@pytest.mark.parametrize("name", MODELS)
def test_a_long_sequence_would_change_the_others_of_its_batch(name):
    """What the limit is for, of transformers alone: a row changes once a longer one is beside it."""
    model = make_longrope(name).eval()
    ids = torch.arange(24)[None] % VOCAB_SIZE
    with torch.no_grad():
        alone = model(ids[:, :12]).logits[0]
        beside = model(ids.repeat(2, 1)).logits[0, :12]
        within = model(ids[:, :ORIGINAL].repeat(2, 1)).logits[0, :12]
    torch.testing.assert_close(within, alone, atol=1e-4, rtol=0)
    assert (beside - alone).abs().max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_a_run_is_limited_at_its_start(tmp_path, name):
    rows = sums().map(lambda row: {"prompt": row["prompt"][:7]})  # "1 + 2 ="
    trainer = make_trainer(tmp_path, model=make_longrope(name), max_completion_length=9, train_dataset=rows)
    assert context_length(trainer.model, None)[0] == trainer.run.engine.max_len == ORIGINAL
    trainer.train()
    assert (
        max(entry.get("sampling/sampling_logp_difference/max", 0) for entry in trainer.state.log_history)
        < 1e-4
    )
    with pytest.raises(ValueError, match=r"7 tokens \+ max_completion_length=10 = 17.*longrope' = 16.*Lower"):
        make_trainer(tmp_path, model=make_longrope(name), max_completion_length=10, train_dataset=rows)
    with pytest.raises(ValueError, match=r"vllm_max_model_length=17 allows longer.*longrope' = 16.*to 16"):
        make_trainer(tmp_path, model=make_longrope(name), vllm_max_model_length=17, train_dataset=rows)


@pytest.mark.parametrize("name", MODELS)
def test_no_sample_is_longer_whoever_made_it(name):
    """A `rollout_func` or an agent brings samples that no engine has checked."""
    policy = make_policy(make_longrope(name))
    policy.logprobs(make_samples([(3, 5), (7, 9)]))
    for pass_ in (policy.logprobs, lambda samples: policy.update(samples, lambda *_: None)):
        with pytest.raises(
            ValueError, match=r"A sample has 17 tokens.* at most 16 consistently: .*longrope' = 16"
        ):
            pass_(make_samples([(3, 5), (7, 10)]))


def test_engines_elsewhere_get_no_longer_context():
    model = make_longrope("with a layout")
    assert max_len_of(model, None) == ORIGINAL
    worker = {"engine": "vllm"}
    _check_context(model, worker, ORIGINAL, "http://node7:8000")
    with pytest.raises(
        ValueError, match=r"node7:8000 takes sequences of 64.*--engine vllm -- --max-model-len 16"
    ):
        _check_context(model, worker, 64, "http://node7:8000")


def test_a_reward_model_reads_no_longer_sequence():
    model = make_reward_model()
    model.config.rope_parameters = LONGROPE
    score = RewardModel(model, make_tokenizer())
    assert len(score(["1 + 2 ="], ["3" * 9])) == 1
    with pytest.raises(ValueError, match=r"17 tokens together.* reads 16 \(original_max_position.*longrope"):
        score(["1 + 2 ="], ["3" * 10])


def test_the_limit_of_a_loaded_model():
    assert context_length(make_longrope("with a layout"), 12) == (12, "vllm_max_model_length=12")
