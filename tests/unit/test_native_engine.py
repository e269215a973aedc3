"""The native engine against `model.generate`, under pressure, and on weights that change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engine_models import (
    CONFIGS,
    MAX_POSITION,
    addresses_of,
    assert_logprobs_are_the_models,
    assert_refused,
    greedy_reference,
    greedy_references,
    make_gpt2,
    make_model,
    make_prompts,
    train_steps,
)
from engine_models import greedy_completions as greedy
from engine_pressure import Pressure, Windowed, awake
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.engines.native import capacity
from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.pages import pages_for
from colocate.types import SamplingParams
from colocate.weights.layouts import has_layout, layout_for
from colocate.weights.shared_views import fuse_parameters


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.share(2)
def test_greedy_is_model_generate_on_every_architecture(name):
    # Up to 60 tokens: within the original context of the long-context scalings, past every sliding window.
    model = make_model(name)
    prompts = make_prompts([1, 29, 4, 8, 17], 2)
    engine = awake(model, max_num_seqs=4, page_size=4)
    completions = engine.generate(prompts, SamplingParams(max_tokens=31, temperature=0))
    expected = greedy_references(model, prompts, 31)
    assert [list(completion.token_ids) for completion in completions] == expected
    assert_logprobs_are_the_models(model, prompts, completions, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama3", "llama-yarn", "llama-linear", "llama-dynamic"])
def test_scaled_rotary_embedding_matters_and_holds_over_the_whole_context(name):
    model = make_model(name)
    (prompt,) = make_prompts([MAX_POSITION - 20])
    (completion,) = greedy(awake(model), [prompt], 20)
    assert completion == greedy_reference(model, prompt.token_ids, 20)
    if name != "llama-dynamic":  # which scales only beyond max_position_embeddings
        plain = make_model(name, rope_parameters={"rope_theta": 1000.0, "rope_type": "default"})
        assert completion != greedy_reference(plain, prompt.token_ids, 20)


def test_bfloat16_follows_the_model():
    model = make_model("qwen3").bfloat16()
    prompts = make_prompts([6, 11], 3)
    completions = awake(model, page_size=4).generate(prompts, SamplingParams(max_tokens=12))
    # 8 bits of mantissa: logits of about 8 are rounded to 1/32.
    assert_logprobs_are_the_models(model, prompts, completions, atol=0.25)


@pytest.fixture
def pressure(monkeypatch):
    return Pressure(monkeypatch)


@pytest.mark.parametrize("spare_pages", [0, 1, 2, 5])
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.share(3)
def test_tiny_pools_preempt_and_change_nothing(pressure, spare_pages, page_size):
    model = make_model("qwen2")
    prompts = make_prompts([5, 12, 8, 1, 12], 3)
    needed = pages_for(12 + 20 - 1, page_size)
    engine = awake(
        model, max_num_seqs=5, page_size=page_size, kv_cache_tokens=(needed + spare_pages) * page_size
    )
    expected = greedy_references(model, prompts, 20)
    assert greedy(engine, prompts, 20) == expected
    assert pressure.num_preempted > 0
    sampling = SamplingParams(max_tokens=20, seed=2)
    roomy = awake(model, max_num_seqs=64)
    tight, free = engine.generate(prompts, sampling), roomy.generate(prompts, sampling)
    assert [c.token_ids for c in tight] == [c.token_ids for c in free]
    torch.testing.assert_close(
        torch.tensor([c.logprobs for c in tight]), torch.tensor([c.logprobs for c in free])
    )


def test_preempted_sequences_do_not_come_back_to_be_preempted_again(pressure):
    # 12 sequences of 8 + 24 tokens in 30 pages of 4 tokens: they cannot all run at once.
    engine = awake(make_model("qwen2"), max_num_seqs=12, page_size=4, kv_cache_tokens=120)
    engine.generate(make_prompts([8] * 12), SamplingParams(max_tokens=24))
    # Without a page in reserve for each running sequence a newcomer is sent back within a page's length.
    assert 0 < pressure.num_preempted <= 12


def test_prompts_are_prefilled_once_per_group_however_few_slots(pressure):
    prompts = make_prompts([5, 12, 8], 6)
    model = make_model("llama3")
    completions = greedy(awake(model, max_num_seqs=4, page_size=4), prompts, 9)
    assert pressure.num_prefilled_tokens == 5 + 12 + 8
    assert completions == greedy_references(model, prompts, 9)


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "expected"),
    [
        # 7 full pages shared by all 8; the last page, of 2 tokens, once per member. 2 tokens more fit in it.
        (30, 3, 7 + 8),
        # No partial page: 8 full pages shared, and a page of its own for each member's second token.
        (32, 2, 8 + 8),
        # The only token drawn is never fed back: nobody needs a page of its own.
        (32, 1, 8),
    ],
)
def test_prompt_pages_are_shared(pressure, prompt_length, max_tokens, expected):
    engine = awake(make_model("llama3"), max_num_seqs=8, page_size=4)
    engine.generate(make_prompts([prompt_length], 8), SamplingParams(max_tokens=max_tokens))
    assert pressure.most_pages_used == expected


MODEL = make_model("qwen3")
PROMPTS = make_prompts([1, 4, 9, 16, 6], 4)
SAMPLING = SamplingParams(max_tokens=10, seed=11)


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[int, int], tuple[int, ...]]:
    """Each completion as it comes out alone."""
    engine = awake(MODEL)
    return {
        (prompt.key, sample): engine.generate(
            [dataclasses.replace(prompt, samples=range(sample, sample + 1))], SAMPLING
        )[0].token_ids
        for prompt in PROMPTS
        for sample in prompt.samples
    }


@given(
    prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, unique=True),
    cuts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=5, max_size=5),
    num_slots=st.integers(1, 9),
    page_size=st.integers(1, 9),
    spare_pages=st.integers(0, 20),
)
@settings(max_examples=40)
def test_a_completion_is_the_same_whatever_else_is_in_the_batch(
    undisturbed, prompts, cuts, num_slots, page_size, spare_pages
):
    prompts = [
        dataclasses.replace(prompt, samples=range(first, min(first + count, 4)))
        for prompt, (first, count) in zip(prompts, cuts, strict=False)
    ]
    num_pages = pages_for(16 + 10 - 1, page_size) + spare_pages
    engine = awake(MODEL, max_num_seqs=num_slots, page_size=page_size, kv_cache_tokens=num_pages * page_size)
    completions = engine.generate(prompts, SAMPLING)
    requests = [(prompt.key, sample) for prompt in prompts for sample in prompt.samples]
    assert [c.token_ids for c in completions] == [undisturbed[request] for request in requests]


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_after_an_optimizer_step_the_next_rollout_uses_the_new_weights(optimizer_class):
    model = make_model("qwen2")
    optimizer = optimizer_class(model.parameters(), lr=0.02)
    engine = awake(model, page_size=4)
    prompts = make_prompts([5, 9])
    before = greedy(engine, prompts, 15)
    addresses = addresses_of(model)
    train_steps(model, optimizer)
    after = greedy(engine, prompts, 15)
    assert addresses_of(model) == addresses
    assert after == greedy_references(model, prompts, 15)
    assert after != before


def test_moved_parameters_are_fused_anew():
    model = make_model("qwen2")
    engine = awake(model, page_size=4, kv_cache_tokens=200)
    model.double()
    prompts = make_prompts([5, 9])
    assert greedy(engine, prompts, 15) == greedy_references(model, prompts, 15)


@pytest.mark.parametrize("name", ["qwen2", "llama-biases", "qwen3"])
def test_fused_parameters_are_the_same_parameters_in_one_storage(name):
    model = make_model(name)
    parameters = dict(model.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    fuse_parameters(layout_for(model))
    addresses = addresses_of(model)
    fuse_parameters(layout_for(model))
    assert addresses_of(model) == addresses
    for parameter_name, parameter in model.named_parameters():
        assert parameter is parameters[parameter_name]
        assert parameter.is_leaf and parameter.requires_grad
        assert torch.equal(parameter, values[parameter_name])
    for layer in layout_for(model).layers:
        for linears in layer.projection_groups():
            assert len({linear.weight.untyped_storage().data_ptr() for linear in linears}) == 1


@pytest.mark.parametrize("name", ["qwen2", "llama-biases", "llama-tied"])
def test_a_fused_model_saves_a_checkpoint_like_any_other(name, tmp_path):
    plain, fused = make_model(name), make_model(name)
    fuse_parameters(layout_for(fused))
    plain.save_pretrained(tmp_path / "plain")
    fused.save_pretrained(tmp_path / "fused")
    sizes = [(tmp_path / kind / "model.safetensors").stat().st_size for kind in ("plain", "fused")]
    assert sizes[0] == sizes[1]
    loaded = type(fused).from_pretrained(tmp_path / "fused")
    expected = plain.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, expected[key])


def test_longrope_beyond_its_original_context_is_refused_with_the_numbers():
    model = make_model("llama-longrope")
    with pytest.raises(ValueError, match=r"vllm_max_model_length=65.*longrope.* = 64"):
        NativeEngine(model, max_model_len=65)
    with pytest.raises(ValueError, match=r"66, more than the engine's context of 64.*longrope"):
        greedy(awake(model), make_prompts([60]), 6)


def test_max_model_len_lowers_the_context():
    engine = awake(make_model("llama3"), max_model_len=20)
    assert len(greedy(engine, make_prompts([12]), 8)[0]) == 8
    with pytest.raises(ValueError, match=r"21, more than.* 20 .*vllm_max_model_length = 20"):
        greedy(engine, make_prompts([12]), 9)


def test_a_sequence_that_cannot_fit_is_refused_with_the_arithmetic():
    engine = awake(make_model("llama3"), page_size=4, kv_cache_tokens=24)
    assert len(greedy(engine, make_prompts([16]), 9)[0]) == 9
    message = r"ceil\(25 / 4\) = 7 pages .* there are 6.* kv_cache_tokens to at least 28"
    with pytest.raises(ValueError, match=message):
        greedy(engine, make_prompts([16]), 10)
    with pytest.raises(ValueError, match="kv_cache_tokens=3 is less than one page of 4"):
        NativeEngine(make_model("llama3"), page_size=4, kv_cache_tokens=3)


def test_sleep_frees_the_cache_and_wake_up_takes_it():
    engine = NativeEngine(make_model("llama3"), page_size=4, kv_cache_tokens=64)
    assert engine._cache.num_pages == 0
    engine.wake_up()
    assert engine._cache.num_pages == 16
    engine.sleep()
    assert engine._cache.num_pages == 0


def test_what_has_no_layout_is_refused_by_name():
    assert has_layout(make_model("qwen2"))
    assert not has_layout(make_gpt2())
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no layout.*Qwen3ForCausalLM.*'transformers'"):
        NativeEngine(make_gpt2())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.config, "final_logit_softcapping", 30.0), "final_logit_softcapping=30.0"),
        (lambda m: setattr(m.config, "quantization_config", {"bits": 4}), "is quantised"),
        (lambda m: m.config.rope_parameters.update(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (lambda m: m.config.rope_parameters.update(rope_type="proportional"), "'proportional'"),
        (lambda m: setattr(m.model.layers[1], "mlp", torch.nn.Identity()), "layer 1 has Identity"),
        (
            lambda m: setattr(
                m.model.layers[0].mlp,
                "up_proj",
                torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(32, 48)),
            ),
            "layer 0 has a projection of type ParametrizedLinear",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(change, message):
    model = make_model("qwen2")
    change(model)
    assert_refused(model, message)


@settings(max_examples=12)
@given(
    steps_per_look=st.integers(1, 9),
    max_num_seqs=st.integers(1, 9),
    page_size=st.sampled_from([1, 3, 4, 16]),
    spare_pages=st.sampled_from([0, 1, 3, 100]),
    seed=st.integers(0, 5),
    num_stops=st.integers(0, 3),
)
def test_looking_at_the_host_less_often_changes_nothing(
    steps_per_look, max_num_seqs, page_size, spare_pages, seed, num_stops
):
    model = make_model("qwen3")
    prompts = make_prompts([5, 12, 8, 1, 12], 3)
    needed = pages_for(12 + 20 - 1, page_size) + spare_pages
    free = awake(model, max_num_seqs=4).generate(prompts, SamplingParams(max_tokens=20, seed=seed))
    stops = tuple(completion.token_ids[3 + 2 * i] for i, completion in enumerate(free[:num_stops]))
    sampling = SamplingParams(max_tokens=20, seed=seed, stop_token_ids=stops)
    engine = awake(model, max_num_seqs=max_num_seqs, page_size=page_size, kv_cache_tokens=needed * page_size)
    expected = engine.generate(prompts, sampling)
    engine._backend = Windowed(steps_per_look)
    engine.sleep()
    engine.wake_up()
    windowed = engine.generate(prompts, sampling)
    assert [c.token_ids for c in windowed] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in windowed] == [c.finish_reason for c in expected]


def test_a_cache_smaller_than_asked_for_is_said(monkeypatch):
    engine = NativeEngine(make_model("qwen2"), page_size=4, kv_cache_tokens=400)
    page_bytes = engine._cache.page_bytes(torch.float32)
    monkeypatch.setattr(capacity, "_usable_bytes", lambda cache, device: 10 * page_bytes)
    with pytest.warns(UserWarning, match=r"kv_cache_tokens=400 was asked for, and memory allows 40 "):
        engine.wake_up()
    assert engine.kv_cache_bytes == 10 * page_bytes
