"""Deals sequences over ranks, so that all ranks have about equally many tokens to compute."""

from __future__ import annotations

from collections.abc import Sequence

CLOSE_ENOUGH = 1.01
"""The largest rank's tokens over the mean from which on groups are left as they are: a step waits no longer
for it than for other noise, and each cut of a group makes a prompt be computed twice."""


def deal(
    groups: Sequence[Sequence[int]], prompt_lengths: Sequence[int], lengths: Sequence[int], num_ranks: int
) -> list[int]:
    """The rank that each sequence goes to; a prompt counts once on each rank that has a part of its group.

    Whole groups, the largest first, go to the rank with the fewest tokens (LPT, Graham 1969). Then, while the
    largest rank is more than `CLOSE_ENOUGH` times the mean, a sequence or its rank's part of a group moves
    from there to the smallest rank: the one that leaves the larger of both ranks smallest, prompt included.
    So where it stops early, the largest rank has at most one sequence with its prompt more than the smallest.
    No rank stays without a sequence unless there are fewer sequences than ranks. The result depends on the
    numbers only, so every rank can compute it for itself.

    Args:
        groups: for each prompt, the indices of the sequences that share it; every index occurs once.
        prompt_lengths: tokens of each sequence's prompt, by index; 1 or more.
        lengths: tokens of each sequence, its prompt included, by index; more than its prompt's.
    """
    hands = [_Hand() for _ in range(num_ranks)]
    own = [length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)]
    prompts = [prompt_lengths[group[0]] for group in groups]
    sizes = [prompt + sum(own[i] for i in group) for prompt, group in zip(prompts, groups, strict=True)]
    for group in sorted(range(len(groups)), key=lambda number: -sizes[number]):
        smallest = min(hands, key=lambda hand: hand.num_tokens)
        smallest.parts[group] = list(groups[group])
        smallest.num_tokens += sizes[group]
    while _even_out(hands, prompts, own):
        pass
    ranks = [0] * len(lengths)
    for rank, hand in enumerate(hands):
        for members in hand.parts.values():
            for index in members:
                ranks[index] = rank
    return ranks


class _Hand:
    """What a rank has: its tokens, and its part of each group by the group's number."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.parts: dict[int, list[int]] = {}

    @property
    def has_several(self) -> bool:
        return len(self.parts) > 1 or any(len(members) > 1 for members in self.parts.values())


def _even_out(hands: list[_Hand], prompts: Sequence[int], own: Sequence[int]) -> bool:
    """Move the best part from the largest rank to the smallest; False if nothing is to be gained."""
    smallest = min(hands, key=lambda hand: hand.num_tokens)
    givers = [hand for hand in hands if hand.has_several]
    if not givers:
        return False
    giver = max(givers, key=lambda hand: hand.num_tokens)
    largest = max(hand.num_tokens for hand in hands)
    mean = sum(hand.num_tokens for hand in hands) / len(hands)
    if smallest.parts and (largest <= CLOSE_ENOUGH * mean or giver.num_tokens < largest):
        return False
    best: tuple[int, int, int, list[int]] | None = None
    for group, members in giver.parts.items():
        added_prompt = 0 if group in smallest.parts else prompts[group]
        for moved in [members, *([index] for index in members if len(members) > 1)]:
            freed_prompt = prompts[group] if len(moved) == len(members) else 0
            tokens = sum(own[index] for index in moved)
            left = giver.num_tokens - tokens - freed_prompt
            larger = max(left, smallest.num_tokens + tokens + added_prompt)
            # Of moves that are equally good for the clock, the one that leaves the fewest tokens in all.
            move = larger, added_prompt - freed_prompt, group, moved
            best = move if best is None else min(best, move)
    if best is None or best[0] >= giver.num_tokens:
        return False
    _, _, group, moved = best
    members = giver.parts.pop(group)
    tokens = sum(own[index] for index in moved)
    smallest.num_tokens += tokens + (0 if group in smallest.parts else prompts[group])
    giver.num_tokens -= tokens + (prompts[group] if len(moved) == len(members) else 0)
    smallest.parts.setdefault(group, []).extend(moved)
    if kept := [index for index in members if index not in moved]:
        giver.parts[group] = kept
    return True
