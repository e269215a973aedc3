"""The trie of an episode: rows are paths, and every sampled span is trained on once."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocate.episodes.episode import Episode
from colocate.types import Completion

PROMPT = (1, 2, 3)


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    """Any shape of trie. Sampled tokens count up from 1000, so that each occurs once, and each has minus
    itself as its log-prob, unless its turn has none; given tokens are below 1000."""
    episode, tokens = Episode(), itertools.count(1000)
    given_ids = st.lists(st.integers(4, 9), max_size=3)
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        context = (
            draw(given_ids)
            if parent is not None
            else [*draw(st.sampled_from([PROMPT, (7,)])), *draw(given_ids)]
        )
        ids = tuple(itertools.islice(tokens, draw(st.integers(1, 4))))
        logprobs = draw(st.sampled_from([None, tuple(-float(x) for x in ids)]))
        reason = draw(st.sampled_from(["stop", "length"]))
        added = episode.add(parent, context if number else PROMPT, Completion(ids, logprobs, reason, number))
        assert added == number
    return episode


def context_of(episode: Episode, number: int | None) -> tuple[int, ...]:
    """All tokens up to the end of a node."""
    if number is None:
        return ()
    node = episode.nodes[number]
    return context_of(episode, node.parent) + node.given_ids + node.sampled_ids


@given(episodes())
def test_rows_are_the_paths_to_the_leaves(episode: Episode):
    parents = {node.parent for node in episode.nodes}
    leaves = [number for number in range(len(episode.nodes)) if number not in parents]
    rows = episode.rows()
    assert [row.prompt_ids + row.completion_ids for row in rows] == [context_of(episode, x) for x in leaves]
    for row in rows:
        starts_with_prompt = (row.prompt_ids + row.completion_ids)[: len(PROMPT)] == PROMPT
        assert (row.prompt_ids == PROMPT) == starts_with_prompt
        assert row.num_sampled == sum(row.is_sampled)
        per_token = (row.is_sampled, row.policy_versions, row.logprobs or row.completion_ids)
        assert {len(x) for x in per_token} == {len(row.completion_ids)}


@given(episodes())
def test_a_sampled_token_is_trained_once_in_the_first_row_that_has_it(episode: Episode):
    told = {x for node in episode.nodes if node.logprobs is not None for x in node.sampled_ids}
    version_of = {
        x: version
        for node in episode.nodes
        for x, version in zip(node.sampled_ids, node.policy_versions, strict=True)
    }
    seen: set[int] = set()
    for row in episode.rows():
        sampled = [x >= 1000 for x in row.completion_ids]
        expected = [
            is_sampled and x not in seen for x, is_sampled in zip(row.completion_ids, sampled, strict=True)
        ]
        assert list(row.is_sampled) == expected
        for n, x in enumerate(row.completion_ids):
            if sampled[n]:
                assert row.policy_versions[n] == version_of[x]
            if row.logprobs is None:
                assert x not in told
            elif expected[n] and x in told:
                assert row.logprobs[n] == -x
            else:
                assert math.isnan(row.logprobs[n])
        seen.update(x for x in row.completion_ids if x >= 1000)
    assert seen == set(version_of)


@given(episodes(), st.data(), st.lists(st.just(0), max_size=2))
def test_a_context_goes_on_from_the_longest_history_that_it_begins_with(episode: Episode, data, added):
    number = data.draw(st.integers(0, len(episode.nodes) - 1))
    context = context_of(episode, number)
    assert episode.find_parent([*context, *added]) == (number, tuple(added))
    # One token less, and the last span is no part of it.
    parent, given_ids = episode.find_parent(context[:-1])
    assert parent == episode.nodes[number].parent
    assert context_of(episode, parent) + given_ids == context[:-1]


def test_a_turn_is_an_episode_of_one_row():
    completion = Completion((8, 9), (-0.5, -0.25), "length", 3)
    episode = Episode.of_turn([5, 6], completion)
    (row,) = episode.rows()
    assert (row.prompt_ids, row.completion_ids, row.is_sampled) == ((5, 6), (8, 9), (True, True))
    assert (row.logprobs, row.policy_versions) == ((-0.5, -0.25), (3, 3))
    assert episode.is_truncated
    episode.add(0, [7], Completion((4,), None, "stop", 3))
    assert not episode.is_truncated


def test_calls_that_cannot_be():
    episode = Episode.of_turn([5], Completion((8,), None, "stop", 0))
    for parent, given_ids, logprobs, error in (
        (1, [2], None, "Node 1 cannot be gone on from: the episode has 1 nodes"),
        (-1, [2], None, "Node -1 cannot"),
        (None, [], None, "was given no tokens"),
        (0, [], (0.0, 0.0), "1 tokens has 2 log-probs"),
    ):
        with pytest.raises(ValueError, match=error):
            episode.add(parent, given_ids, Completion((8,), logprobs, "stop", 0))
    assert len(episode.nodes) == 1
