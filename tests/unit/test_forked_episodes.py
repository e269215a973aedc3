"""Episodes whose histories fork, from judge to gradient, against a sum over all calls of the engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_episodes import PROMPT, context_of, episodes
from test_policy import TEMPERATURE, VOCAB, make_model, make_policy

from colocate.algorithms.advantages import AdvantageOptions
from colocate.algorithms.objective import Objective
from colocate.algorithms.objective_params import ObjectiveParams
from colocate.episodes.episode import Episode
from colocate.experience.judge import Judge, Rollout
from colocate.experience.requests import RolloutRequest
from colocate.experience.weighting import shuffled_slices
from colocate.rewards.base import RewardFunctions
from colocate.types import Completion, Prompt
from tiny import make_tokenizer

MAX_COMPLETION_LENGTH = 20
NORMALISERS = {
    "dapo": lambda own, total, count: total,
    "grpo": lambda own, total, count: own * count,
    "dr_grpo": lambda own, total, count: MAX_COMPLETION_LENGTH * count,
}


def in_vocabulary(episode: Episode) -> Episode:
    def known(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(x % VOCAB for x in ids)

    nodes = [
        replace(node, given_ids=known(node.given_ids), sampled_ids=known(node.sampled_ids), logprobs=None)
        for node in episode.nodes
    ]
    return Episode(nodes, messages="")


def judged(played: list[Episode]) -> Rollout:
    """One group, whose episode number n earns n²."""
    request = RolloutRequest([{"prompt": "1"}], [Prompt(PROMPT, 0, range(len(played)))], len(played))
    rewards = RewardFunctions(lambda completions, **_: [float(n * n) for n in range(len(completions))])
    options = AdvantageOptions(scale_rewards="none")
    judge = Judge(rewards, make_tokenizer(), torch.device("cpu"), advantage_options=options)
    return judge.score(request, played)


def gradient_by_calls(model, played: list[Episode], loss_type: str) -> list[torch.Tensor]:
    """The gradient of −Σ A·log π over what each call sampled, given all that it had read, with A what the
    episode has earned as a whole and by its turns from this one on, less the mean of the group."""
    lengths = [sum(len(node.sampled_ids) for node in episode.nodes) for episode in played]
    loss = torch.zeros(())
    for n, (episode, own) in enumerate(zip(played, lengths, strict=True)):
        for number, node in enumerate(episode.nodes):
            earned = [
                i * i + sum(reward for turn, reward in other.turn_rewards.items() if turn >= number)
                for i, other in enumerate(played)
            ]
            advantage = earned[n] - sum(earned) / len(earned)
            weight = advantage / NORMALISERS[loss_type](own, sum(lengths), len(played))
            ids = torch.tensor(context_of(episode, number))
            log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE, -1)
            logprobs = log_p.gather(-1, ids[1:, None])[-len(node.sampled_ids) :]
            loss = loss - weight * logprobs.sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("loss_type", NORMALISERS)
@settings(max_examples=6, phases=[Phase.reuse, Phase.generate])  # shrinking takes minutes
@given(
    played=st.lists(episodes().map(in_vocabulary), min_size=2, max_size=3),
    turn_rewards=st.lists(st.dictionaries(st.integers(0, 7), st.integers(-3, 3)), min_size=3, max_size=3),
    budget=st.sampled_from([24, 400]),
)
def test_every_sampled_token_counts_once(loss_type, played, turn_rewards, budget):
    for episode, rewards in zip(played, turn_rewards, strict=False):
        episode.turn_rewards = {n: float(x) for n, x in rewards.items() if n < len(episode.nodes)}
    options = SimpleNamespace(
        seed=0, loss_type=loss_type, max_completion_length=MAX_COMPLETION_LENGTH, world_size=1,
        per_device_train_batch_size=len(played), gradient_accumulation_steps=1, steps_per_generation=1,
    )  # fmt: skip
    rollout, model = judged(played), make_model("qwen3")
    expected = gradient_by_calls(model, played, loss_type)
    (samples,) = shuffled_slices(rollout.members, options, 0, rollout.num_loss_tokens)
    before = [p.detach().clone() for p in model.parameters()]
    params = ObjectiveParams(loss_type=loss_type, vllm_importance_sampling_correction=False)
    make_policy(model, budget=budget).update(samples, Objective(params))
    largest = max(x.abs().max().item() for x in expected)
    for old, new, want in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(old - new, want, rtol=1e-3, atol=2e-6 + 2e-5 * largest)


def test_rows_share_what_costs_least():
    """Two rows share twenty tokens rather than a prompt of three; two that part early share the prompt."""

    def forked(num_tokens: int) -> Episode:
        turn = Completion(tuple(range(num_tokens)), None, "stop", 0)
        episode = Episode.of_turn(PROMPT, turn)
        episode.messages = ""
        episode.add(0, [5], turn)
        episode.add(0, [6], turn)
        return episode

    rollout = judged([forked(17), forked(2)])
    assert [[s.fork for s in member] for member in rollout.members] == [[(0, 0, 20)] * 2, [None] * 2]
    assert [s.prompt_key for s in rollout.samples] == [0] * 4
