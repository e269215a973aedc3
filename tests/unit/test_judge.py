"""A rollout's groups: what each rank keeps of them, and the numbers that all ranks share."""

from __future__ import annotations

import itertools
import math
import statistics
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from colocate.algorithms.advantages import AdvantageOptions
from colocate.episodes.episode import Episode
from colocate.experience import ranks
from colocate.experience.judge import EpisodeFacts, Judge, RankShare, Rollout, _on_device
from colocate.experience.requests import RolloutRequest
from colocate.rewards.base import RewardFunctions, RewardTable
from colocate.types import Completion, Prompt, Sample
from colocate.users_code.errors import RewardError
from tiny import EOS, make_tokenizer

TOKENS = {"a": [8, 9, EOS], "b": [10, EOS], "c": [11, 12, 13, EOS]}


@pytest.mark.parametrize(
    ("first", "local", "groups"),
    [
        (0, [0, 1, 2, 3, 4, 5], [[0, 1, 2, 3], [4, 5], []]),
        (6, [6, 7, 8, 9, 10, 11], [[], [6, 7], [8, 9, 10, 11]]),
    ],
)
def test_ranks_keep_their_parts_of_the_groups(first, local, groups):
    assert ranks.by_group(local, first, num_groups=3, num_generations=4) == groups


def test_a_group_that_spans_ranks_has_the_numbers_of_both():
    """Two prompts of three; this rank, the second, has one completion of the first and all of the second."""

    def lengths(completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]

    request = RolloutRequest(
        [{"prompt": "1"}, {"prompt": "2"}],
        [Prompt((5,), 40, range(2, 3)), Prompt((6,), 41, range(3))],
        num_generations=3,
    )
    turns = [Completion(tuple(TOKENS[name]), None, "stop", 0) for name in "aabc"]
    episodes = [Episode.of_turn(p, turn) for p, turn in zip([(5,), (6,), (6,), (6,)], turns, strict=True)]
    judge = Judge(
        RewardFunctions(lengths),
        make_tokenizer(),
        torch.device("cpu"),
        rank=1,
        mask_truncated_completions=True,
    )
    scores = RewardTable(torch.tensor([[2.0], [7.0]]), {"note": ["p", "q"]}, {"logged": [1.0, 3.0]})
    facts = [EpisodeFacts(40, 1, n, n == 7, 0, 0, 0, 0.0, 0, False, (0.0,)) for n in (2, 7)]
    share = RankShare(scores, facts, ["1", "1"], ["b", "?"])
    with mock.patch.object(ranks, "gather_object", lambda local: [share, *local]):
        rollout = judge.score(request, episodes)
    assert rollout.table.completions[:2] == ["b", "?"] and len(rollout.table.completions) == 6
    assert rollout.table.extra == {"note": ["p", "q", None, None, None, None]}
    assert rollout.metrics["logged"] == 2.0 and rollout.metrics["completions/clipped_ratio"] == 1 / 6
    assert (rollout.num_tokens, rollout.num_loss_tokens) == (6 + 21, 14)  # less the 7 that were cut off
    first, second = rollout.groups
    assert (first.key, second.key) == (40, 41)
    assert first.rewards.tolist() == [[2.0], [7.0], [3.0]] and second.rewards.tolist() == [
        [3.0],
        [2.0],
        [4.0],
    ]
    deviations = torch.tensor([-2.0, 3.0, -1.0]).double()
    torch.testing.assert_close(first.advantages, deviations / (7**0.5 + 1e-4))
    assert [len(group.samples) for group in rollout.groups] == [1, 3]
    assert [sample.completion_ids.tolist() for sample in rollout.samples] == [TOKENS[name] for name in "aabc"]
    assert [sample.advantage for sample in second.samples] == pytest.approx(second.advantages.tolist())


def judged(tokenizer, *reward_functions, **options) -> tuple[Rollout, list[Episode]]:
    """Two groups of two. Of the first, one episode calls a tool twice and forks, the other is cut short in
    its second turn; of the second, one was given a prompt of its own by its environment."""

    def turn(*ids: int, reason: str = "stop", cached: int | None = None) -> Completion:
        logprobs = tuple(-float(x) for x in ids)
        return Completion(ids, logprobs, reason, 0, num_cached_tokens=cached)

    counts = dict(tool_calls=2, tool_failures=1, tool_timeouts=1, tool_s=2.5)
    forked = Episode(**counts, messages=[{"role": "assistant", "content": "a"}])
    forked.add(None, (5, 6), turn(20, 21))
    forked.add(0, (9,), turn(22, cached=4))
    forked.add(0, (9, 9), turn(23, 24, 25))
    cut = Episode(tool_calls=1, tool_s=0.5)
    cut.add(None, (5, 6), turn(30))
    cut.add(0, (9, 9, 9), turn(31, 32, reason="length", cached=2))
    alone = Episode(environment="room", prompt="a room", extra={"score": 3})
    alone.add(None, (7, 8), turn(40, 41))
    episodes = [forked, cut, alone, Episode.of_turn((7,), turn(42))]
    request = RolloutRequest(
        [{"prompt": "1", "label": "x"}, {"prompt": "2", "label": "y"}],
        [Prompt((5, 6), 0, range(2)), Prompt((7,), 1, range(2))],
        num_generations=2,
    )
    judge = Judge(RewardFunctions(list(reward_functions)), tokenizer, torch.device("cpu"), **options)
    return judge.score(request, episodes), episodes


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_rows_of_an_episode_are_one_member_of_its_group(mask_truncated):
    rollout, _ = judged(
        make_tokenizer(),
        lambda completion_ids, **_: [1.0, 3.0, 4.0, 2.0],
        has_turns=True,
        calls_tools=True,
        mask_truncated_completions=mask_truncated,
    )
    members = rollout.members
    assert [len(member) for member in members] == [2, 1, 1, 1]
    first, second = rollout.groups
    assert [len(group.members) for group in rollout.groups] == [2, 2]
    assert [s.advantage for s in first.samples] == [first.advantages[n].item() for n in (0, 0, 1)]
    assert first.advantages[0] < 0 < first.advantages[1] and second.advantages[1] < 0 < second.advantages[0]

    assert [s.completion_ids.tolist() for s in rollout.samples] == [
        *([20, 21, 9, 22], [20, 21, 9, 9, 23, 24, 25], [30, 9, 9, 9, 31, 32], [40, 41], [42])
    ]
    cut = [0.0] * 6 if mask_truncated else [1, 0, 0, 0, 1, 1]
    assert [s.completion_mask.tolist() for s in rollout.samples] == [
        *([1, 1, 0, 1], [0, 0, 0, 0, 1, 1, 1], cut, [1, 1], [1])
    ]
    told = torch.tensor([torch.nan] * 4 + [-23.0, -24.0, -25.0])
    torch.testing.assert_close(members[0][1].rollout_logprobs, told, equal_nan=True)
    # Samples of one key must have one prompt.
    assert [s.prompt_key for s in rollout.samples] == [0, 0, 0, None, 1]

    metrics = rollout.metrics  # six tokens, three, two and one were sampled; three are truncated's
    assert metrics["completions/mean_length"] == 3.0
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (1.0, 6.0)
    assert metrics["completions/clipped_ratio"] == 0.25
    assert metrics["completions/mean_terminated_length"] == 3.0
    assert metrics["tools/call_frequency"] == 0.75
    assert metrics["tools/failure_frequency"] == pytest.approx(1 / 3)
    assert (metrics["tools/timeouts"], metrics["tools/seconds"]) == (pytest.approx(1 / 3), 1.0)
    assert metrics["episodes/forks"] == 0.25
    # Of two calls it is known: 4 of 2 + 2 + 1 tokens, and 2 of 2 + 1 + 3.
    assert metrics["episodes/cached_tokens"] == (4 + 2) / (5 + 6)
    assert rollout.num_tokens == (2 + 6) + (2 + 3) + (2 + 2) + (1 + 1)


def test_reward_functions_see_messages_and_what_episodes_add():
    seen = {}

    def reward(prompts, completions, completion_ids, label, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, label=label)
        seen.update({name: columns[name] for name in ("environments", "score")})
        return [0.0] * 4

    tokenizer = make_tokenizer()
    rollout, episodes = judged(tokenizer, reward)
    assert seen["prompts"] == ["1", "1", "a room", "2"] == list(rollout.table.prompts)
    assert seen["completions"] == [
        *(episodes[0].messages, tokenizer.decode([30, 9, 9, 9, 31, 32])),
        *(tokenizer.decode([40, 41]), tokenizer.decode([42])),
    ]
    assert seen["ids"][:2] == [[20, 21, 9, 9, 23, 24, 25], [30, 9, 9, 9, 31, 32]]
    assert (seen["label"], seen["score"]) == (["x", "x", "y", "y"], [None, None, 3, None])
    assert seen["environments"] == [None, None, "room", None]
    assert not {"tools/call_frequency", "tools/seconds", "episodes/forks", "episodes/cached_tokens"} & set(
        rollout.metrics
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_turn_is_judged_by_what_was_earned_from_it_on(scale):
    """The turns of four episodes earn 1 and 2, nothing and 4, and 3; those of the last have no rewards."""
    ids = itertools.count(8)
    episodes = []
    for rewards in ([1.0, 2.0], [0.0, 4.0], [3.0], [None, None, None]):
        episode, node = Episode(turn_rewards={n: x for n, x in enumerate(rewards) if x is not None}), None
        for _ in rewards:
            given_ids = (5,) if node is None else (6, 7)
            node = episode.add(node, given_ids, Completion((next(ids),), None, "stop", 0))
        episodes.append(episode)
    request = RolloutRequest([{"prompt": "1"}], [Prompt((5,), 0, range(4))], num_generations=4)
    judge = Judge(
        RewardFunctions(lambda completions, **_: [0.5, None, 1.5, 1.0], reward_weights=[2.0]),
        make_tokenizer(),
        torch.device("cpu"),
        advantage_options=AdvantageOptions(scale_rewards=scale),
    )
    rollout = judge.score(request, episodes)

    def advantages(earned: list[float]) -> list[float]:
        std = 1.0 if scale == "none" else statistics.stdev(earned) + 1e-4
        return [(x - statistics.mean(earned)) / std for x in earned]

    first, second, third = (advantages(x) for x in ([1 + 3, 4, 3 + 3, 2], [1 + 2, 4, 3, 2], [1, 0, 3, 2]))
    expected = [
        [first[0], *[second[0]] * 3],
        [first[1], *[second[1]] * 3],
        [first[2]],
        [first[3], *[second[3]] * 3, *[third[3]] * 3],
    ]
    for sample, values in zip(rollout.samples, expected, strict=True):
        torch.testing.assert_close(sample.advantage, torch.tensor(values))
    assert rollout.groups[0].advantages.tolist() == pytest.approx(first)
    torch.testing.assert_close(
        rollout.groups[0].rewards,
        torch.tensor([[0.5, 3], [math.nan, 4], [1.5, 3], [1, 0]]).double(),
        equal_nan=True,
    )
    assert rollout.metrics["reward"] == pytest.approx((4 + 4 + 6 + 2) / 4)
    assert rollout.metrics["rewards/turn_rewards/mean"] == pytest.approx(10 / 4)
    assert rollout.table.rewards["turn_rewards"] == [3.0, 4.0, 3.0, 0.0]


def test_a_reward_function_is_not_called_as_turns_rewards_are():
    def turn_rewards(completions, **_):
        return [0.0] * len(completions)

    request = RolloutRequest([{"prompt": "1"}], [Prompt((5,), 0, range(2))], num_generations=2)
    episodes = [Episode.of_turn((5,), Completion((8,), None, "stop", 0)) for _ in range(2)]
    judge = Judge(RewardFunctions(turn_rewards), make_tokenizer(), torch.device("cpu"))
    judge.score(request, episodes)
    episodes[0].turn_rewards[0] = 1.0
    with pytest.raises(RewardError, match="A reward function is called 'turn_rewards'"):
        judge.score(request, episodes)


class Copies(TorchDispatchMode):
    """How many copies to another device are made."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_samples_arrive_on_the_device_in_one_copy_for_each_field():
    def sample(number: int, num_tokens: int, logprobs: torch.Tensor | None) -> Sample:
        tokens = torch.arange(num_tokens)
        return Sample(
            tokens + number, tokens * 2, torch.ones(num_tokens), 0.5 * number, logprobs, prompt_key=7
        )

    members = [[sample(0, 3, None), sample(1, 1, torch.tensor([-1.0]))], [], [sample(2, 2, torch.zeros(2))]]
    with Copies() as copies:
        moved = _on_device(members, torch.device("meta"))
    assert copies.num == 4  # the advantages are numbers here
    assert [len(member) for member in moved] == [2, 0, 1]
    flat = [x for member in moved for x in member]
    assert all(x.completion_ids.device.type == "meta" for x in flat)
    assert [len(x.prompt_ids) for x in flat] == [3, 1, 2]
    here = _on_device(members, torch.device("cpu"))
    for member, expected in zip(here, members, strict=True):
        for one, other in zip(member, expected, strict=True):
            for name, value in vars(other).items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(getattr(one, name), value)
                else:
                    assert getattr(one, name) == value
