"""LoRA adapters read in place by decode steps that were captured before they changed."""

from __future__ import annotations

import statistics
from functools import partial

import pytest
import torch
from engine_models import greedy_completions, greedy_references, make_prompts, train_steps
from test_native_engine_lora import check_that_the_adapters_state_is_that_of_the_moment
from test_native_engine_lora import lora as make_lora

from colocate.kernels.matmul import lora as kernels
from colocate.types import SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = make_prompts([5, 40, 17], 3)


def lora(**options):
    return make_lora(lora_dropout=0.0, **options).cuda()


greedy = partial(greedy_completions, prompts=PROMPTS, max_tokens=15)
expected = partial(greedy_references, prompts=PROMPTS, max_tokens=15)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": ["q_proj", "up_proj"], "use_rslora": True},
        {"target_modules": ["q_proj", "k_proj"], "lora_bias": True},
    ],
    ids=["all", "some", "bias"],
)
def test_after_optimizer_steps_the_captured_graphs_use_the_new_adapter(start_engine, options):
    model = lora(**options)
    engine = start_engine(model)
    before = greedy(engine)
    assert before == expected(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    train_steps(model, optimizer)
    engine.update_weights(version=1)
    after = greedy(engine)
    assert after == expected(model)
    assert after != before
    assert after == greedy(start_engine(model)), "an engine without a past differs"


def test_the_adapters_state_is_that_of_the_moment(start_engine):
    model = lora()
    check_that_the_adapters_state_is_that_of_the_moment(model, start_engine(model))


@pytest.mark.parametrize("options", [{}, {"r": 32}, {"rank_pattern": {"v_proj": 64, "down_proj": 3}}])
def test_kernels_and_matrix_products_round_alike_in_bfloat16(start_engine, monkeypatch, options):
    model = lora(**options).bfloat16()
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # as PEFT keeps them beside a model in bfloat16
            parameter.data = parameter.data.float()
    sampling = SamplingParams(max_tokens=3, temperature=1, seed=2)
    prompts = make_prompts([5, 40, 17, 60], 8)
    ours = start_engine(model).generate(prompts, sampling)
    monkeypatch.setattr(kernels, "MAX_ROWS", 0)
    theirs = start_engine(model).generate(prompts, sampling)
    # The same places are rounded: what differs are sums in float32, which rarely round the other way.
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.token_ids == b.token_ids]
    assert len(pairs) >= 24
    differences = [abs(x - y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    assert max(differences) < 0.2 and statistics.median(differences) < 0.03
