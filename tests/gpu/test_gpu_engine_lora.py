"""LoRA adapters read in place by decode steps that were captured before they changed."""

from __future__ import annotations

import statistics

import pytest
import torch
from engine_models import greedy_reference, make_model, make_prompts
from peft import LoraConfig, get_peft_model
from test_native_engine_lora import ALL_LINEAR, randomise_adapters

from colocate.kernels import lora as kernels
from colocate.types import SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = make_prompts([5, 40, 17], 3)


def lora(**options):
    torch.manual_seed(1)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR, **options})
    model = get_peft_model(make_model("qwen2"), config).eval()
    randomise_adapters(model)
    return model.cuda()


def greedy(engine):
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=15, temperature=0))
    return [list(completion.token_ids) for completion in completions]


def expected(model):
    return [greedy_reference(model, prompt.token_ids, 15) for prompt in PROMPTS for _ in prompt.samples]


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
    token_ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1)).cuda()
    for _ in range(3):
        optimizer.zero_grad()
        model(token_ids, labels=token_ids).loss.backward()
        optimizer.step()
    engine.update_weights([], version=1)
    after = greedy(engine)
    assert after == expected(model)
    assert after != before
    assert after == greedy(start_engine(model)), "an engine without a past differs"


def test_the_adapters_state_is_that_of_the_moment(start_engine):
    model = lora()
    engine = start_engine(model)
    adapted = greedy(engine)
    assert adapted == expected(model)
    with model.disable_adapter():
        base = greedy(engine)
        assert base == expected(model)
    assert base != adapted
    assert greedy(engine) == adapted
    model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"]))
    model.cuda()
    torch.manual_seed(9)
    randomise_adapters(model)
    model.set_adapter("other")
    other = greedy(engine)
    assert other == expected(model)
    assert other not in (adapted, base)


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
