"""A rollout's groups: what each rank keeps of them, and the numbers that all ranks share."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from colocate.experience import ranks
from colocate.experience.judge import Judge
from colocate.experience.requests import RolloutRequest
from colocate.rewards.base import RewardFunctions
from colocate.types import Completion, Prompt
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
    completions = [Completion(tuple(TOKENS[name]), None, "stop", 0) for name in "aabc"]
    judge = Judge(
        RewardFunctions(lengths), make_tokenizer(), torch.device("cpu"), stop_token_ids=(EOS,), rank=1
    )
    # What rank 0 sends: how many it has, their rewards, (key, prompt, length, cut off), metrics, texts.
    others = iter(
        [[2], [[2.0], [7.0]], [(40, 1, 2, False), (40, 1, 7, False)], [{}], ["1", "1"], ["b", "?"], [{}]]
    )
    with mock.patch.object(ranks, "gather_object", lambda local: [*next(others), *local]):
        rollout = judge.score(request, completions)
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
