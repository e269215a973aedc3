"""Samples change ranks before they are trained on, so that no step waits for the rank with the most tokens.

Only as many move as evenness needs, and where the ranks are even to 1 % none does (`data.dealing`). A
completion is drawn alike and trained on alike wherever it is, and its loss weight is fixed before. The loss
of a step is the mean of the ranks' losses, a sum over all samples: it does not depend on which rank has
which. Later computations (reference, old log-probs, every pass) run where the samples are trained on, so
nothing is ever sent back.

    tokens of     rank 0       rank 1                    rank 0        rank 1
    group 0, 1    900 800      group 2, 3  100 200  →    group 0       group 1, 2, 3
                  = 1,700                  = 300         = 900         = 1,100
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colocate.data.dealing import deal
from colocate.experience import ranks
from colocate.policy.attention.pack import groups_of
from colocate.types import Sample

_PER_TOKEN = ("completion_mask", "advantage", "rollout_logprobs", "old_logprobs", "reference_logprobs")
"""The fields of a `Sample` that are [C] float32; the advantage may be a number, and the log-probs None."""
_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class _Card:
    """The parts of a sample that every rank knows: all but its tensors."""

    owner: int
    """The rank that has the sample now."""
    slice_number: int
    num_prompt: int
    num_completion: int
    per_token: tuple[str, ...]
    """The names in `_PER_TOKEN` under which the sample has a tensor."""
    sample: Sample
    """The sample with empty tensors."""

    @classmethod
    def of(cls, sample: Sample, owner: int, slice_number: int) -> _Card:
        per_token = tuple(name for name in _PER_TOKEN if isinstance(getattr(sample, name), Tensor))
        fields: dict[str, Any] = dict.fromkeys(("prompt_ids", "completion_ids", *per_token), _NOTHING)
        sizes = len(sample.prompt_ids), len(sample.completion_ids)
        return cls(owner, slice_number, *sizes, per_token, replace(sample, **fields))

    @property
    def num_shared(self) -> int:
        fork = self.sample.fork
        return self.num_prompt if fork is None else fork[2]

    @property
    def num_ids(self) -> int:
        return self.num_prompt + self.num_completion

    @property
    def num_words(self) -> int:
        return self.num_ids + self.num_completion * len(self.per_token)

    def with_tensors(self, words: Tensor) -> Sample:
        """The sample, from the int32 words of its token ids [P + C] and of its fields [C] one after the
        other."""
        ids, floats = words[: self.num_ids].long(), words[self.num_ids :].view(torch.float32)
        prompt_ids, completion_ids = ids.split([self.num_prompt, self.num_completion])
        per_token = floats.split([self.num_completion] * len(self.per_token))
        fields: dict[str, Any] = dict(zip(self.per_token, per_token, strict=True))
        return replace(self.sample, prompt_ids=prompt_ids, completion_ids=completion_ids, **fields)


def dealt(
    slices: Sequence[list[Sample]],
    *,
    num_together: int,
    share_prompts: bool,
    rank: int,
    num_ranks: int,
    device: torch.device,
) -> list[list[Sample]]:
    """The samples of the same slices that this rank is to train on; every rank must call it.

    Each sample stays in its slice. The tokens of `num_together` consecutive slices are evened out together,
    so a rank may have more of one slice and less, or nothing, of another.

    Args:
        slices: this rank's samples; all ranks have equally many slices.
        num_together: slices that are always part of one optimizer step.
        share_prompts: whether a prompt is computed once for the samples on a rank that share it.
        device: where the samples' tensors are.
    """
    if num_ranks == 1:
        return list(slices)
    own = [sample for samples in slices for sample in samples]
    cards = ranks.of_all_ranks(
        [_Card.of(sample, rank, number) for number, samples in enumerate(slices) for sample in samples]
    )
    owners = [card.owner for card in cards]
    new_owners = list(owners)
    for first in range(0, len(slices), num_together):
        together = range(first, first + num_together)
        numbers = [i for i, card in enumerate(cards) if card.slice_number in together]
        for number, owner in zip(
            numbers, _owners([cards[i] for i in numbers], share_prompts, num_ranks), strict=True
        ):
            new_owners[number] = owner
    if new_owners == owners:
        return list(slices)
    result: list[list[Sample]] = [[] for _ in slices]
    here = _exchanged(own, cards, new_owners, rank, num_ranks, device)
    for number in sorted(here):  # by number over all ranks, whoever it came from
        result[cards[number].slice_number].append(here[number])
    return result


def _owners(cards: Sequence[_Card], share_prompts: bool, num_ranks: int) -> list[int]:
    groups = groups_of([card.sample for card in cards], share_prompts=share_prompts)
    prompt_lengths, lengths = [card.num_shared for card in cards], [card.num_ids for card in cards]
    return deal(groups, prompt_lengths, lengths, [card.owner for card in cards], num_ranks)


def _exchanged(
    own: Sequence[Sample],
    cards: Sequence[_Card],
    new_owners: Sequence[int],
    rank: int,
    num_ranks: int,
    device: torch.device,
) -> dict[int, Sample]:
    """The samples that this rank is to have, by number over all ranks.

    One flat buffer goes through one collective, whatever the number of samples. All ranks know the sizes.
    """
    mine = dict(zip([i for i, card in enumerate(cards) if card.owner == rank], own, strict=True))
    sent = [[i for i in mine if new_owners[i] == to and to != rank] for to in range(num_ranks)]
    received = [
        [i for i, card in enumerate(cards) if card.owner == origin != rank and new_owners[i] == rank]
        for origin in range(num_ranks)
    ]
    outgoing = [i for numbers in sent for i in numbers]
    incoming = [i for numbers in received for i in numbers]
    # Token ids are below 2^31, and floats travel as their bits.
    words = [torch.empty(0, dtype=torch.int32, device=device)]
    for i in outgoing:
        words += [mine[i].prompt_ids.int(), mine[i].completion_ids.int()]
        words += [getattr(mine[i], name).view(torch.int32) for name in cards[i].per_token]
    flat = ranks.exchanged(
        torch.cat(words),
        [sum(cards[i].num_words for i in numbers) for numbers in sent],
        [sum(cards[i].num_words for i in numbers) for numbers in received],
    )
    arrived = flat.split([cards[i].num_words for i in incoming])
    here = {i: sample for i, sample in mine.items() if new_owners[i] == rank}
    return here | {i: cards[i].with_tensors(part) for i, part in zip(incoming, arrived, strict=True)}


def spread(
    members: Sequence[list[Sample]], *, rank: int, num_ranks: int, device: torch.device
) -> list[list[Sample]]:
    """This rank's equal share of all ranks' members of groups; every rank must call it.

    Args:
        members: the samples of each of this rank's episodes; ranks may have unequal numbers of them, and all
            together a multiple of `num_ranks`.
    """
    if num_ranks == 1:
        return list(members)
    cards = ranks.of_all_ranks(
        [_Card.of(sample, rank, number) for number, member in enumerate(members) for sample in member]
    )
    places = list(dict.fromkeys((card.owner, card.slice_number) for card in cards))
    numbers = {place: number for number, place in enumerate(places)}
    of_card = [numbers[card.owner, card.slice_number] for card in cards]
    per_rank = len(places) // num_ranks
    own = [sample for member in members for sample in member]
    here = _exchanged(own, cards, [number // per_rank for number in of_card], rank, num_ranks, device)
    result: dict[int, list[Sample]] = {}
    for index in sorted(here):
        result.setdefault(of_card[index], []).append(here[index])
    return list(result.values())
