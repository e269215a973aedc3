"""Samples change ranks before they are trained on, so that no step waits for the rank with the most tokens.

A completion is drawn alike and trained on alike wherever it is, and its loss weight is fixed before. The loss
of a step is the mean of the ranks' losses, a sum over all samples: it does not depend on who has which. What
comes later (reference, old log-probs, every pass) finds the samples where they are trained on, so nothing is
ever sent back.

    tokens of     rank 0       rank 1                    rank 0        rank 1
    group 0, 1    900 800      group 2, 3  100 200  →    group 0, 3    group 1, 2
                  = 1,700                  = 300         = 1,100       = 900
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colocate.data.dealing import deal
from colocate.experience import ranks
from colocate.policy.pack import groups_of
from colocate.types import Sample

_PER_TOKEN = ("completion_mask", "advantage", "rollout_logprobs", "old_logprobs", "reference_logprobs")
"""The fields of a `Sample` that are [C] float32; the advantage may be a number, and the log-probs None."""
_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class _Card:
    """What every rank knows of a sample: all but its tensors."""

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
    def num_floats(self) -> int:
        return self.num_completion * len(self.per_token)

    def with_tensors(self, ids: Tensor, floats: Tensor) -> Sample:
        """The sample, from its token ids [P + C] and its fields [C] one after the other."""
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
    new_owners = [0] * len(cards)
    for first in range(0, len(slices), num_together):
        together = range(first, first + num_together)
        numbers = [i for i, card in enumerate(cards) if card.slice_number in together]
        for number, owner in zip(
            numbers, _owners([cards[i] for i in numbers], share_prompts, num_ranks), strict=True
        ):
            new_owners[number] = owner
    result: list[list[Sample]] = [[] for _ in slices]
    moved = _exchanged(own, cards, new_owners, rank, num_ranks, device)
    for number in sorted(moved):  # by number over all ranks, whoever it came from
        result[cards[number].slice_number].append(moved[number])
    return result


def _owners(cards: Sequence[_Card], share_prompts: bool, num_ranks: int) -> list[int]:
    groups = groups_of([card.sample for card in cards], share_prompts=share_prompts)
    return deal(groups, [card.num_shared for card in cards], [card.num_ids for card in cards], num_ranks)


def _exchanged(
    own: Sequence[Sample],
    cards: Sequence[_Card],
    new_owners: Sequence[int],
    rank: int,
    num_ranks: int,
    device: torch.device,
) -> dict[int, Sample]:
    """The samples that come to this rank, its own among them, by number over all ranks.

    Two flat buffers go through two collectives, whatever the number of samples. All ranks know the sizes.
    """
    mine = dict(zip([i for i, card in enumerate(cards) if card.owner == rank], own, strict=True))
    sent = [[i for i in mine if new_owners[i] == to] for to in range(num_ranks)]
    received = [
        [i for i, card in enumerate(cards) if card.owner == origin and new_owners[i] == rank]
        for origin in range(num_ranks)
    ]
    outgoing = [i for numbers in sent for i in numbers]
    incoming = [i for numbers in received for i in numbers]
    ids = [torch.empty(0, dtype=torch.int64, device=device)]
    ids += [x for i in outgoing for x in (mine[i].prompt_ids, mine[i].completion_ids)]
    floats = [torch.empty(0, device=device)]
    floats += [getattr(mine[i], name) for i in outgoing for name in cards[i].per_token]
    all_ids = ranks.exchanged(
        torch.cat(ids),
        [sum(cards[i].num_ids for i in numbers) for numbers in sent],
        [sum(cards[i].num_ids for i in numbers) for numbers in received],
    ).split([cards[i].num_ids for i in incoming])
    all_floats = ranks.exchanged(
        torch.cat(floats),
        [sum(cards[i].num_floats for i in numbers) for numbers in sent],
        [sum(cards[i].num_floats for i in numbers) for numbers in received],
    ).split([cards[i].num_floats for i in incoming])
    return {
        i: cards[i].with_tensors(*tensors) for i, *tensors in zip(incoming, all_ids, all_floats, strict=True)
    }


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
    first = ranks.own_part(len(members), rank).start
    cards = ranks.of_all_ranks(
        [_Card.of(sample, rank, first + n) for n, member in enumerate(members) for sample in member]
    )
    # Every member has a sample at least, so the last card has the last member's number.
    per_rank = (cards[-1].slice_number + 1) // num_ranks
    own = [sample for member in members for sample in member]
    new_owners = [card.slice_number // per_rank for card in cards]
    here = _exchanged(own, cards, new_owners, rank, num_ranks, device)
    result: dict[int, list[Sample]] = {}
    for number in sorted(here):
        result.setdefault(cards[number].slice_number, []).append(here[number])
    return list(result.values())
