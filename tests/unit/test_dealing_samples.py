"""Dealing sequences over ranks, against every possible way to deal them."""

from __future__ import annotations

import itertools
import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.data.dealing import CLOSE_ENOUGH, deal

Groups = list[tuple[int, list[int]]]
"""(prompt tokens, completion tokens of each member) of each group."""


def groups_of(max_groups: int, max_members: int) -> st.SearchStrategy[Groups]:
    completions = st.lists(st.integers(1, 300), min_size=1, max_size=max_members)
    return st.lists(st.tuples(st.integers(1, 200), completions), max_size=max_groups)


def arguments(groups: Groups) -> tuple[list[list[int]], list[int], list[int]]:
    numbers = itertools.count()
    indices = [[next(numbers) for _ in completions] for _, completions in groups]
    prompts = [prompt for prompt, completions in groups for _ in completions]
    lengths = [prompt + completion for prompt, completions in groups for completion in completions]
    return indices, prompts, lengths


def tokens_of(groups: Groups, ranks: list[int], num_ranks: int) -> list[int]:
    """The tokens on each rank, a prompt once where any of its completions is."""
    owners = iter(ranks)
    tokens = [0] * num_ranks
    for prompt, completions in groups:
        own = [next(owners) for _ in completions]
        for rank, completion in zip(own, completions, strict=True):
            tokens[rank] += completion
        for rank in set(own):
            tokens[rank] += prompt
    return tokens


@given(groups=groups_of(12, 8), num_ranks=st.integers(1, 9))
def test_no_rank_has_much_more_than_the_mean_and_none_is_idle(groups, num_ranks):
    indices, prompts, lengths = arguments(groups)
    ranks = deal(indices, prompts, lengths, num_ranks)
    assert len(ranks) == len(lengths) and set(ranks) <= set(range(num_ranks))
    assert len(set(ranks)) == min(num_ranks, len(lengths))
    tokens = tokens_of(groups, ranks, num_ranks)
    assert max(tokens) <= CLOSE_ENOUGH * sum(tokens) / num_ranks + max(lengths, default=0)


@settings(max_examples=60)
@given(
    groups=groups_of(3, 3).filter(lambda groups: sum(len(c) for _, c in groups) <= 7),
    num_ranks=st.integers(2, 3),
)
def test_the_largest_rank_is_within_one_sequence_of_the_best_deal(groups, num_ranks):
    indices, prompts, lengths = arguments(groups)
    every = itertools.product(range(num_ranks), repeat=len(lengths))
    best = min(max(tokens_of(groups, list(ranks), num_ranks)) for ranks in every)
    largest = max(tokens_of(groups, deal(indices, prompts, lengths, num_ranks), num_ranks))
    assert best <= largest <= CLOSE_ENOUGH * best + max(lengths, default=0)


def test_groups_stay_together_where_that_is_balanced():
    groups = [(100, [50, 60, 70, 80])] * 6
    ranks = deal(*arguments(groups), 3)
    assert [set(ranks[first : first + 4]) for first in range(0, 24, 4)] == [{0}, {1}, {2}] * 2


def test_a_group_is_cut_only_where_the_largest_rank_gets_smaller_with_the_second_prompt():
    # 210 and 15 tokens become 110 and 125; 500 and 160 would become 400 and 560.
    assert deal(*arguments([(10, [100, 100]), (10, [5])]), 2) == [1, 0, 1]
    assert deal(*arguments([(300, [100, 100]), (10, [150])]), 2) == [0, 0, 1]


def test_a_realistic_rollout_is_even():
    """512 completions in groups of 8, log-normal within a group and between groups."""
    rng = random.Random(0)
    groups: Groups = []
    for _ in range(64):
        median = 600 * math.exp(rng.gauss(0, 0.7))
        completions = [min(8192, math.ceil(median * math.exp(rng.gauss(0, 0.7)))) for _ in range(8)]
        groups.append((math.ceil(200 * math.exp(rng.gauss(0, 0.6))), completions))
    static = sum(prompt + sum(completions) for prompt, completions in groups)
    for num_ranks in (2, 4, 8):
        tokens = tokens_of(groups, deal(*arguments(groups), num_ranks), num_ranks)
        assert max(tokens) <= 1.015 * static / num_ranks
        assert sum(tokens) <= 1.005 * static  # few prompts are computed twice
