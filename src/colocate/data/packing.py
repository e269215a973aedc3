"""Which sequences share a micro-batch, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Group whole sequences into bins of at most `token_budget` tokens, for a forward without padding.

    First-fit decreasing: longest first, each into the first bin with room; at most 11/9 of the fewest
    possible bins, plus one (Dósa 2007). Equal lengths keep their order, so the result is a function of the
    lengths only. A sequence longer than the budget gets a bin of its own: cut, it would lose its context.

    Returns:
        Bins of indices into `lengths`; every index occurs once.

    Raises:
        ValueError: `token_budget` is not positive.
    """
    _check_budget(token_budget)
    bins: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        for number, free in enumerate(room):
            if lengths[index] <= free:
                bins[number].append(index)
                room[number] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(token_budget - lengths[index])
    return bins


def pack_padded(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Like `pack`, for a padded forward: `len(bin) * longest in bin` is what stays within `token_budget`.

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
