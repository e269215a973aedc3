"""Arguments that only transformers' `generate` knows, against `model.generate` itself, and in training."""

from __future__ import annotations

import logging

import pytest
import torch
from engine_models import make_model, make_prompts
from transformers import GenerationConfig

from colocate.engines.requests import derived_seed
from colocate.engines.transformers_engine import TransformersEngine
from colocate.types import SamplingParams
from tiny import changed_weights, make_trainer, sums, weights_of

BEAMS = {"num_beams": 2, "length_penalty": -0.1, "early_stopping": True}
STOPS = tuple(range(5, 18))


@pytest.mark.parametrize(
    "arguments", [BEAMS, {"typical_p": 0.8, "min_new_tokens": 3}], ids=["beams", "typical"]
)
@pytest.mark.parametrize("temperature", [3.0, 0.0], ids=["drawn", "greedy"])  # cool beams are alike
def test_tokens_are_those_of_model_generate(arguments, temperature):
    if temperature == 0.0:
        arguments = {name: value for name, value in arguments.items() if name != "typical_p"}
    model = make_model("qwen3")
    engine = TransformersEngine(model, pad_token_id=0, max_num_seqs=32, generation_kwargs=arguments)
    engine.wake_up()
    # Rounding differs from CPU to CPU, and so do draws: of 16, some end and some do not on any of them.
    prompts = make_prompts([3, 9], num_generations=8)
    sampling = SamplingParams(
        max_tokens=8, temperature=temperature, top_k=30, top_p=0.95, repetition_penalty=1.1, seed=4,
        stop_token_ids=STOPS,
    )  # fmt: skip
    state = torch.get_rng_state()
    completions = engine.generate(prompts, sampling)
    assert engine.generate(prompts, sampling) == completions, "a rollout can be repeated"
    assert torch.equal(torch.get_rng_state(), state)

    rows = [(prompt, member) for prompt in prompts for member in prompt.samples]
    ids = torch.tensor([[0] * (9 - len(prompt.token_ids)) + [*prompt.token_ids] for prompt, _ in rows])
    mask = torch.tensor([[0] * (9 - len(p.token_ids)) + [1] * len(p.token_ids) for p, _ in rows])
    drawn = {"temperature": temperature, "top_k": 30, "top_p": 0.95} if temperature else {}
    config = GenerationConfig(
        do_sample=temperature > 0, max_new_tokens=8, eos_token_id=list(STOPS), pad_token_id=0,
        repetition_penalty=1.1, **drawn, **arguments,
    )  # fmt: skip
    torch.manual_seed(derived_seed(4, *(n for p, member in rows for n in (p.key, member)), num_bits=63))
    expected = model.generate(ids, attention_mask=mask, generation_config=config)[:, 9:].tolist()
    for tokens, completion in zip(expected, completions, strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in STOPS), 8)
        assert completion.token_ids == tuple(tokens[:end])
        assert completion.finish_reason == ("stop" if tokens[end - 1] in STOPS else "length")
        assert completion.logprobs is None
    if temperature:
        assert {completion.finish_reason for completion in completions} == {"stop", "length"}
        assert len({completion.token_ids for completion in completions[:8]}) > 1, "members differ"


def test_beams_are_decoded_within_the_number_of_sequences():
    model = make_model("qwen3")
    engine = TransformersEngine(model, pad_token_id=0, max_num_seqs=4, generation_kwargs={"num_beams": 2})
    engine.wake_up()
    sizes = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, __: sizes.append(len(ids[0])))
    engine.generate(make_prompts([4, 4, 4]), SamplingParams(max_tokens=3))
    assert max(sizes) == 4


def test_a_step_is_trained_on_beams(tmp_path, caplog):
    asked = {"do_sample": True, "top_k": 50, "num_beams": 2, "length_penalty": -0.1}  # as in TRL's own tests

    def reward(completions, **kwargs):
        return [float(sum(map(ord, completion))) for completion in completions]

    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(
            tmp_path, max_steps=1, generation_kwargs=asked, reward_funcs=reward, eval_dataset=sums(1)
        )
    assert type(trainer.engine).__name__ == "TransformersEngine"
    said = [line for line in caplog.messages if "generation_kwargs asks for" in line]
    assert len(said) == 1 and "num_beams=2, length_penalty=-0.1, which the native engine" in said[0]
    before = weights_of(trainer.model)
    trainer.train()
    assert changed_weights(trainer.model, before) == set(before)
    assert not any("sampling" in name for entry in trainer.state.log_history for name in entry)
    assert trainer.evaluate()["eval_reward"] > 0
    assert not any("tells no log-probs of the policy" in line for line in caplog.messages)
