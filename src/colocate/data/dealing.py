"""Deals sequences over ranks, so that all ranks have about equally many tokens to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

CLOSE_ENOUGH = 1.01
"""The largest rank's tokens over the mean up to which sequences are left where they are: a step waits no
longer for it than for other noise, and each cut of a group makes a prompt be computed twice."""


def deal(
    groups: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    owners: Sequence[int],
    num_ranks: int,
) -> list[int]:
    """The rank that each sequence goes to; a prompt counts once on each rank that has a part of its group.

    While the largest rank has more than `CLOSE_ENOUGH` times the mean, one sequence, or its whole part of a
    group, moves to the smallest rank. The move is the one after which the larger of the two ranks is
    smallest, prompt included. All moves below that bound are equally good, and of these the one with the
    fewest sequences is taken. In the end each sequence goes back that makes the largest rank no larger.

    If it stops early, the largest rank has at most one sequence and its prompt more than the smallest. Each
    rank gets a sequence unless there are fewer sequences than ranks. The result depends on the numbers only,
    so every rank can compute it for itself.

    Args:
        groups: for each prompt, the indices of the sequences that share it; every index occurs once.
        prompt_lengths: tokens of each sequence's prompt, by index; 1 or more.
        lengths: tokens of each sequence, its prompt included, by index; more than its prompt's.
        owners: the rank that has each sequence now, by index.
    """
    own = [length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)]
    prompts = [prompt_lengths[group[0]] for group in groups]
    hands = [_Hand() for _ in range(num_ranks)]
    for group, members in enumerate(groups):
        for index in members:
            hands[owners[index]].take(group, index, own[index], prompts[group])
    while move := _best_move(hands, prompts, own):
        giver, taker, group, moved = move
        for index in moved:
            giver.give(group, index, own[index], prompts[group])
            taker.take(group, index, own[index], prompts[group])
    _take_back(hands, prompts, own, owners)
    ranks = [0] * len(lengths)
    for rank, hand in enumerate(hands):
        for members in hand.parts.values():
            for index in members:
                ranks[index] = rank
    return ranks


@dataclass(eq=False)
class _Hand:
    """A rank's tokens, and its part of each group by the group's number."""

    num_tokens: int = 0
    parts: dict[int, list[int]] = field(default_factory=dict)

    @property
    def has_several(self) -> bool:
        return len(self.parts) > 1 or any(len(members) > 1 for members in self.parts.values())

    def take(self, group: int, index: int, own_tokens: int, prompt_tokens: int) -> None:
        self.num_tokens += own_tokens + (0 if group in self.parts else prompt_tokens)
        self.parts.setdefault(group, []).append(index)

    def give(self, group: int, index: int, own_tokens: int, prompt_tokens: int) -> None:
        self.parts[group].remove(index)
        if not self.parts[group]:
            del self.parts[group]
        self.num_tokens -= own_tokens + (0 if group in self.parts else prompt_tokens)


def _largest(hands: Sequence[_Hand]) -> int:
    return max(hand.num_tokens for hand in hands)


def _close_enough(hands: Sequence[_Hand]) -> float:
    """The tokens up to which no rank is too large."""
    return CLOSE_ENOUGH * sum(hand.num_tokens for hand in hands) / len(hands)


def _best_move(
    hands: Sequence[_Hand], prompts: Sequence[int], own: Sequence[int]
) -> tuple[_Hand, _Hand, int, list[int]] | None:
    """The best move: the rank that gives, the rank that takes, the group, and its sequences; None if no move
    helps."""
    smallest = min(hands, key=lambda hand: hand.num_tokens)
    givers = [hand for hand in hands if hand.has_several]
    if not givers:
        return None
    giver = max(givers, key=lambda hand: hand.num_tokens)
    largest, close_enough = _largest(hands), _close_enough(hands)
    if smallest.parts and (largest <= close_enough or giver.num_tokens < largest):
        return None
    best: tuple[float, int, int, int, list[int]] | None = None
    for group, members in giver.parts.items():
        added_prompt = 0 if group in smallest.parts else prompts[group]
        for moved in [members, *([index] for index in members if len(members) > 1)]:
            freed_prompt = prompts[group] if len(moved) == len(members) else 0
            tokens = sum(own[index] for index in moved)
            left = giver.num_tokens - tokens - freed_prompt
            larger = max(left, smallest.num_tokens + tokens + added_prompt)
            if larger < giver.num_tokens:
                # Of moves that are equally good for the clock and as short, the one that leaves the fewest
                # tokens in all.
                move = max(larger, close_enough), len(moved), added_prompt - freed_prompt, group, moved
                best = move if best is None else min(best, move)
    return None if best is None else (giver, smallest, best[3], list(best[4]))


def _take_back(
    hands: Sequence[_Hand], prompts: Sequence[int], own: Sequence[int], owners: Sequence[int]
) -> None:
    """Give each sequence back to the rank that it came from, if that stays within the bound."""
    has_changed = True
    while has_changed:
        has_changed = False
        bound = max(_largest(hands), _close_enough(hands))
        for hand in hands:
            for group, index in [(g, i) for g, members in hand.parts.items() for i in members]:
                first = hands[owners[index]]
                if first is hand or not hand.has_several:
                    continue
                back = group, index, own[index], prompts[group]
                hand.give(*back)
                first.take(*back)
                if first.num_tokens <= bound:
                    has_changed = True
                else:
                    first.give(*back)
                    hand.take(*back)
