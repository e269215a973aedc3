"""`model.generate` in batches against the model's own uncached forward, where padding is read and not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_models import (
    MAX_POSITION,
    VOCAB_SIZE,
    assert_logprobs_are_the_models,
    make_gpt2,
    make_model,
    make_prompts,
)
from transformers import MiniMaxConfig, MiniMaxForCausalLM, RwkvConfig, RwkvForCausalLM

from colocate.engines import float32_weights
from colocate.engines.batching import ALONE, EQUAL_LENGTHS, PADDED, batches, choose_batching
from colocate.engines.logprob_noise import Rounding
from colocate.engines.transformers_engine import TransformersEngine
from colocate.types import Completion, SamplingParams


def wide(model):
    """Weights for which what is read matters."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return model.eval()


def make_rwkv():
    sizes = dict(hidden_size=32, attention_hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    return wide(RwkvForCausalLM(RwkvConfig(vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=0, **sizes)))


def make_minimax():
    config = MiniMaxConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=MAX_POSITION,
        block_size=8,
    )
    return wide(MiniMaxForCausalLM(config))


@pytest.mark.parametrize(
    ("make", "batching"),
    [
        (make_rwkv, "batches of one"),
        (make_minimax, "batches of prompts of one length"),
        (make_gpt2, None),
        (lambda: make_model("qwen3"), None),
    ],
    ids=["rwkv", "minimax", "gpt2", "qwen3"],
)
def test_completions_are_the_models_own(caplog, make, batching):
    model = make()
    engine = TransformersEngine(model, pad_token_id=0, max_num_seqs=4)
    engine.wake_up()
    prompts = make_prompts([3, 12, 7, 1, 7], 2)
    completions = engine.generate(prompts, SamplingParams(max_tokens=6, seed=1, temperature=0.8))
    assert_logprobs_are_the_models(model, prompts, completions, atol=1e-5, rtol=1e-5, temperature=0.8)
    said = [message for message in caplog.messages if "generates in" in message]
    assert [f"generates in {batching}," in message for message in said] == [True] * (batching is not None)
    engine.generate(prompts, SamplingParams(max_tokens=2))
    assert len([m for m in caplog.messages if "generates in" in m]) == len(said), "tried again without need"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (make_minimax, EQUAL_LENGTHS),
        (make_gpt2, PADDED),
        (lambda: reads_padding(make_model("qwen3"), 0.004), EQUAL_LENGTHS),
    ],
    ids=["minimax", "gpt2", "a little padding"],
)
def test_padding_that_is_read_shows_in_either_type(dtype, make, expected):
    model = make().to(dtype)
    before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    engine = TransformersEngine(model, pad_token_id=0, max_num_seqs=4)
    engine.wake_up()
    engine.generate(make_prompts([3, 5]), SamplingParams(max_tokens=2))
    assert engine._batching == expected
    for parameter, (place, values) in zip(model.parameters(), before, strict=True):
        assert parameter.data_ptr() == place and torch.equal(parameter, values) and parameter.dtype == dtype


def reads_padding(model, size: float):
    """The model, whose logits padding moves by `size` nats."""

    def shift(module, args, kwargs, output):
        mask = kwargs.get("attention_mask")
        if mask is not None and not mask.all():
            slope = torch.linspace(-1, 1, output.logits.shape[-1], dtype=output.logits.dtype)
            output.logits = output.logits + 4 * size * slope * (mask == 0).any(-1)[:, None, None]
        return output

    model.register_forward_hook(shift, with_kwargs=True)
    return model


def test_without_memory_for_float32_a_types_own_noise_is_the_measure(monkeypatch):
    monkeypatch.setattr(float32_weights, "available_bytes", lambda: 1000)
    for size, expected in ((0.0, PADDED), (0.08, EQUAL_LENGTHS)):
        engine = TransformersEngine(reads_padding(make_model("qwen3").bfloat16(), size), pad_token_id=0)
        engine.wake_up()
        engine.generate(make_prompts([3, 5]), SamplingParams(max_tokens=2))
        assert engine._batching == expected


@pytest.mark.parametrize(
    ("works", "expected"),
    [(lambda lengths: len(set(lengths)) == 1, EQUAL_LENGTHS), (lambda lengths: len(lengths) == 1, ALONE)],
)
def test_a_batch_that_model_generate_fails_at_is_not_the_end(caplog, works, expected):
    def generate(prompts):
        if not works([len(prompt.token_ids) for prompt in prompts]):
            raise IndexError("index 3 is out of bounds")
        return [Completion((1,), (-0.5,), "length", 0) for _ in prompts]

    options = dict(vocab_size=9, rounding=Rounding(1e-3, 1e-2), name="Fussy")
    chosen = choose_batching(generate, lambda prompt, completion: torch.tensor([-0.5]), **options)
    assert chosen == expected
    assert "nothing (IndexError: index 3 is out of bounds) in padded batches" in caplog.text


def test_a_model_that_cannot_generate_at_all_is_named():
    def generate(prompts):
        raise IndexError("index 3 is out of bounds")

    with pytest.raises(
        RuntimeError, match=r"Fussy cannot generate, not even for one prompt: IndexError: index"
    ):
        choose_batching(
            generate, lambda *_: torch.zeros(1), vocab_size=9, rounding=Rounding(0, 1), name="Fussy"
        )


def test_batches_hold_every_sequence_once():
    lengths = [3, 5, 3, 3, 5]
    assert list(batches(lengths, PADDED, 2)) == [[0, 1], [2, 3], [4]]
    assert list(batches(lengths, EQUAL_LENGTHS, 2)) == [[0, 2], [3], [1, 4]]
    assert list(batches(lengths, ALONE, 2)) == [[0], [1], [2], [3], [4]]


def test_a_poll_draws_one_batch():
    """What a batch has ended can go on in the next one, before turns that were asked for with it."""
    engine = TransformersEngine(make_model("qwen3"), pad_token_id=0, max_num_seqs=2)
    engine.wake_up()
    prompts, sampling = make_prompts([3, 6, 4, 9, 5]), SamplingParams(max_tokens=12)
    numbers = engine.submit([replace(prompt, max_tokens=(4,)) for prompt in prompts], sampling, keep=True)
    assert engine.poll().keys() == set(numbers[:2])
    engine.extend(numbers[1], [7, 8], 5)
    assert [list(engine.poll()) for _ in range(3)] == [numbers[1:3], numbers[3:], []]
