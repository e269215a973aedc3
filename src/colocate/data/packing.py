"""Which sequences share a micro-batch, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence


def pack(
    groups: Sequence[Sequence[int]], prompt_lengths: Sequence[int], lengths: Sequence[int], token_budget: int
) -> list[list[int]]:
    """Bins of at most `token_budget` tokens for a forward without padding, in which a prompt counts once.

    A group stays together if its prompt and completions fit a bin; else it is cut, longest completions first,
    into parts that each bring the prompt. Parts go largest first into the first bin with room (first-fit
    decreasing: at most 11/9 of the fewest possible bins, plus one; Dósa 2007). Equal sizes keep their order,
    so the result is a function of the lengths only. A sequence longer than the budget gets a bin of its own:
    cut, it would lose its context.

    Args:
        groups: indices of the sequences that share a prompt; every index once.
        prompt_lengths, lengths: tokens of each sequence's prompt, and of the sequence, by index.

    Returns:
        Bins of indices; every index occurs once.

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
    """Bins for a padded forward: `len(bin) * longest in bin` is what stays within `token_budget`.

    Neighbours in sorted order share a bin, which keeps padding low.
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
