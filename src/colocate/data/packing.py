"""Distributes sequences over micro-batches of at most a given number of tokens."""

from __future__ import annotations

from collections.abc import Sequence


def pack(
    groups: Sequence[Sequence[int]], prompt_lengths: Sequence[int], lengths: Sequence[int], token_budget: int
) -> list[list[int]]:
    """Micro-batches of at most `token_budget` tokens for a forward pass without padding; a prompt counts once
    in each.

    A group stays together if its prompt and completions fit a micro-batch. Otherwise it is cut, longest
    completions first, into parts that each have the prompt. Then the parts, the largest first, go into the
    first micro-batch with room (first-fit decreasing: at most 11/9 of the fewest possible, plus one; Dósa
    2007). Parts of equal size keep their order, so the result depends on the lengths only. A sequence longer
    than the budget gets a micro-batch of its own, since it would lose its context if it were cut.

    Args:
        groups: for each prompt, the indices of the sequences that share it; every index occurs once.
        prompt_lengths: tokens of each sequence's prompt, by index.
        lengths: tokens of each sequence, its prompt included, by index.

    Returns:
        The indices of the sequences in each micro-batch; every index occurs once.

    Raises:
        ValueError: `token_budget` is not positive.
    """
    _check_budget(token_budget)
    parts: list[list[int]] = []
    sizes: list[int] = []
    for group in groups:
        parts_of_group = len(parts)
        for index in (group[i] for i in _longest_first([lengths[index] for index in group])):
            own = lengths[index] - prompt_lengths[index]
            if len(parts) > parts_of_group and sizes[-1] + own <= token_budget:
                parts[-1].append(index)
                sizes[-1] += own
            else:
                parts.append([index])
                sizes.append(lengths[index])
    bins: list[list[int]] = []
    room: list[int] = []
    for part in _longest_first(sizes):
        for number, free in enumerate(room):
            if sizes[part] <= free:
                bins[number] += parts[part]
                room[number] -= sizes[part]
                break
        else:
            bins.append(list(parts[part]))
            room.append(token_budget - sizes[part])
    return bins


def pack_padded(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Micro-batches for a padded forward pass: sequences × longest sequence in each is at most
    `token_budget`.

    Sequences of similar length share a micro-batch, which keeps padding low.
    """
    _check_budget(token_budget)
    bins: list[list[int]] = []
    for index in _longest_first(lengths):
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= token_budget:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def _check_budget(token_budget: int) -> None:
    if token_budget <= 0:
        raise ValueError(f"token_budget={token_budget}: a micro-batch must hold at least one token.")
