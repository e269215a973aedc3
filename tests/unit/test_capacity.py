"""The size of the KV cache against rollouts in which nothing is computed: only pages come and go."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.engines.native.capacity import pages_of_longest, useful_pages
from colocate.engines.native.pages import PagePool
from colocate.engines.native.prefix_cache import PrefixCache
from colocate.engines.native.scheduler import Scheduler
from colocate.engines.native.sequences import Group, Sequence
from colocate.types import Prompt


@dataclass
class Pages:
    """What a rollout did with a pool of `num_pages`."""

    peak: int = 0
    has_waited: bool = False
    """A row was free, a sequence was waiting, and there was no page for it."""
    has_preempted: bool = False


def roll_out(
    prompts: list[Prompt],
    lengths: dict[tuple[int, int], int],
    *,
    num_pages: int,
    page_size: int,
    max_num_seqs: int,
    steps_per_look: int,
    windows_in_flight: int,
) -> Pages:
    """Every sequence stops after its length, which the host learns `windows_in_flight` windows later."""
    pool, pages = PagePool(num_pages), Pages()
    scheduler = Scheduler(PrefixCache(pool, page_size), max_num_seqs=max_num_seqs)
    sequences = []
    for prompt in prompts:
        group, limits = Group(prompt, len(prompt.samples)), prompt.limits(max(lengths.values()))
        sequences += [Sequence(group, *member) for member in zip(prompt.samples, limits, strict=True)]
    scheduler.wait(sequences)
    num_left = {s: lengths[s.group.prompt.key, s.sample] for s in sequences}
    num_unstarted = len(num_left)
    windows: deque[dict[Sequence, int]] = deque()

    def launch(sequences: list[Sequence], num_steps: int) -> None:
        windows.append({s: min(num_steps, num_left[s]) for s in sequences})
        for sequence, count in windows[-1].items():
            num_left[sequence] -= count

    def collect(max_in_flight: int) -> None:
        while len(windows) > max_in_flight:
            finished = []
            for sequence, count in windows.popleft().items():
                sequence.token_ids += [0] * count
                if count and len(sequence.token_ids) == lengths[sequence.group.prompt.key, sequence.sample]:
                    finished.append(sequence.row)
            if finished:
                scheduler.finish(finished)

    while scheduler.has_work:
        started = scheduler.admit().started
        num_unstarted -= len(started)
        pages.has_waited |= num_unstarted > 0 and len(scheduler.running) < max_num_seqs
        if started:
            launch(started, 1)
        collect(windows_in_flight)
        num_steps = min(steps_per_look, scheduler.num_steps_left)
        if not num_steps:
            collect(0)
            continue
        if scheduler.lacks_pages(num_steps):
            pages.has_preempted = True
            return pages
        scheduler.grow(num_steps)
        pages.peak = max(pages.peak, num_pages - pool.num_free)
        launch(list(scheduler.running), num_steps)
        scheduler.advance(num_steps)
        collect(windows_in_flight)
    assert pool.num_free == num_pages
    return pages


@st.composite
def rollouts(draw):
    """Prompts with limits, and lengths within them."""
    prompts, lengths = [], {}
    # Where all completions are short, the pages held in reserve are most of the cache.
    longest = draw(st.sampled_from([2, 8, 40]))
    for key in range(draw(st.integers(1, 5))):
        limits = draw(st.lists(st.integers(1, longest), min_size=1, max_size=5))
        length = draw(st.integers(1, 40))
        prompts.append(Prompt((0,) * length, key, range(len(limits)), tuple(limits)))
        for sample, limit in enumerate(limits):
            lengths[key, sample] = draw(st.one_of(st.just(limit), st.integers(1, limit)))
    return prompts, lengths


looks = st.sampled_from(
    [dict(steps_per_look=1, windows_in_flight=0), dict(steps_per_look=8, windows_in_flight=1)]
)
page_sizes = st.sampled_from([1, 2, 4, 5, 16])


@settings(max_examples=400)
@given(rollout=rollouts(), page_size=page_sizes, max_num_seqs=st.integers(1, 12), look=looks)
def test_with_its_useful_pages_no_rollout_waits_for_one(rollout, page_size, max_num_seqs, look):
    prompts, lengths = rollout
    num_pages = useful_pages(prompts, 40, page_size, max_num_seqs)
    assert num_pages >= pages_of_longest(prompts, 40, page_size)
    pages = roll_out(
        prompts, lengths, num_pages=num_pages, page_size=page_size, max_num_seqs=max_num_seqs, **look
    )
    assert not pages.has_waited and not pages.has_preempted


@settings(max_examples=100)
@given(
    prompt_lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    num_generations=st.integers(1, 5),
    num_tokens=st.integers(2, 40),
    page_size=page_sizes,
    look=looks,
)
def test_all_but_the_reserve_is_used_when_all_sequences_are_longest_at_once(
    prompt_lengths, num_generations, num_tokens, page_size, look
):
    prompts = [
        Prompt((0,) * length, key, range(num_generations)) for key, length in enumerate(prompt_lengths)
    ]
    lengths = {(p.key, sample): num_tokens for p in prompts for sample in p.samples}
    num_pages = useful_pages(prompts, num_tokens, page_size, len(lengths))
    pages = roll_out(
        prompts, lengths, num_pages=num_pages, page_size=page_size, max_num_seqs=len(lengths), **look
    )
    assert pages.peak == num_pages - len(lengths) - len(prompts)


@pytest.mark.parametrize(("num_missing", "waits"), [(0, False), (1, True)])
def test_the_rollouts_here_can_wait(num_missing, waits):
    # Two tokens of prompt and two to draw fill 3 pages of one token, so that two sequences hold 6; while the
    # second starts, one page stays in reserve for the first.
    prompts = [Prompt((0, 0), key) for key in range(2)]
    pages = roll_out(
        prompts, {(0, 0): 2, (1, 0): 2}, num_pages=5 - num_missing, page_size=1, max_num_seqs=2,
        steps_per_look=1, windows_in_flight=0,
    )  # fmt: skip
    assert pages.has_waited == waits
