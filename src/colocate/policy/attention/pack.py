"""The tokens of a micro-batch end to end, without padding, and the prompt of a group only once.

A group of G completions of one prompt lies in the pack as G + 1 *runs*: the prompt, then the completions,
whose positions go on where the prompt's end. Every run attends causally to itself; a completion's tokens also
attend to the whole prompt. This computes exactly what G sequences with a copy of the prompt each would
compute, at 1/G of the prompt's cost, and its gradients are also exact: the prompt's keys and values collect
the gradients of all its completions.

    prompts              completions of these prompts                sequences that share no prompt
    p p p p  q q q       a a a  b b  c c c c  d d   e e e            s s s s s s  t t t t t

Where an episode's history forked, its rows may share more than the prompt (`Sample.fork`): then what they all
begin with takes the prompt's place, and some of the tokens that are trained on lie in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from colocate.types import Sample


@dataclass(frozen=True, eq=False)
class Runs:
    """N runs of queries and N runs of keys in a pack; run n of the queries attends to run n of the keys."""

    queries: slice
    """The tokens of the pack that the runs of queries fill one after the other; `keys`: those of the keys."""
    keys: slice
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    is_causal: bool
    """Whether queries and keys are the same tokens, of which token i of a run sees tokens 0 to i. If not, a
    query sees all keys of its run."""
    cu_queries: Tensor = field(repr=False)  # [N + 1] int32, where the runs begin, from 0
    cu_keys: Tensor = field(repr=False)  # [N + 1] int32

    @classmethod
    def of(
        cls,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int] | None,
        device: torch.device,
        *,
        queries_start: int = 0,
    ) -> Runs:
        """Runs of queries that begin at token `queries_start` of the pack. With `key_lengths` None they
        attend causally to themselves; else to runs of these lengths at the beginning of the pack."""
        keys = query_lengths if key_lengths is None else key_lengths
        stop = queries_start + sum(query_lengths)
        return cls(
            queries=slice(queries_start, stop),
            keys=slice(queries_start, stop) if key_lengths is None else slice(0, sum(keys)),
            query_lengths=tuple(query_lengths),
            key_lengths=tuple(keys),
            is_causal=key_lengths is None,
            cu_queries=_cumulative(query_lengths, device),
            cu_keys=_cumulative(keys, device),
        )


@dataclass(frozen=True)
class Pack:
    """A micro-batch of T tokens that are read, which predict N completion tokens."""

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    own: Runs
    """Every run, attending causally to itself."""
    to_prompts: Runs | None
    """Runs for each shared prompt: one of queries, all its completions together, and a run of keys, the
    prompt. None: no prompt is shared."""
    predicting: Tensor  # [N] int64: the tokens whose hidden states predict completion tokens, by sample

    @classmethod
    def of(cls, samples: Sequence[Sample], *, share_prompts: bool = True) -> Pack:
        """Lay out `samples`. If `share_prompts`, those with an equal `shared_key` share their beginning, here
        called their prompt.

        The pack has three parts: the shared prompts, one after the other; their completions, group by group,
        so that all completions of a prompt are one run of queries in `to_prompts`; and whole sequences that
        share no prompt.

        A token's hidden state predicts the token after it. So the states that predict a completion are those
        of the prompt's last token and of all completion tokens but the last, which need not be read. For a
        shared prompt the first of these (after a fork, several) lies in the first part of the pack and serves
        every completion of the group; `predicting` collects them sample by sample, in the order of `samples`.
        """
        device = samples[0].prompt_ids.device
        groups = groups_of(samples, share_prompts=share_prompts)
        shared = [group for group in groups if len(group) > 1]
        alone = [group[0] for group in groups if len(group) == 1]
        members = [number for group in shared for number in group]
        # The number of each sample's tokens that lie in the first part of the pack, not in its own run.
        num_shared = dict.fromkeys(alone, 0) | {number: samples[number].num_shared for number in members}
        pieces = [_beginning(samples[group[0]]) for group in shared]
        pieces += [_rest(samples[number], num_shared[number]) for number in (*members, *alone)]
        lengths = [len(piece) for piece in pieces]

        starts = list(itertools.accumulate(lengths, initial=0))
        starts_of = dict(zip((*members, *alone), starts[len(shared) :], strict=False))
        prompt_starts = {number: starts[n] for n, group in enumerate(shared) for number in group}
        predicting: list[tuple[int, int]] = []  # ranges of tokens, by sample
        for number, sample in enumerate(samples):
            # The states from `first` to `last` predict the completion; from `own` on they are in its run.
            first, own, last = len(sample.prompt_ids) - 1, num_shared[number], sample.num_tokens - 1
            in_prompt, in_run = prompt_starts.get(number, 0), starts_of[number] - own
            predicting.append((first + in_prompt, max(first, own) + in_prompt))
            predicting.append((max(first, own) + in_run, last + in_run))

        num_prompt_tokens = sum(lengths[: len(shared)])
        to_prompts = None
        if shared:
            to_prompts = Runs.of(
                [sum(samples[i].num_tokens - 1 - num_shared[i] for i in group) for group in shared],
                lengths[: len(shared)],
                device,
                queries_start=num_prompt_tokens,
            )
        firsts = [0] * len(shared) + [num_shared[number] for number in (*members, *alone)]
        positions = [(first, first + n) for first, n in zip(firsts, lengths, strict=True)]
        return cls(
            token_ids=torch.cat(pieces),
            position_ids=to_device(_numbers_in(positions), device),
            # A completion of one token is never read: its run is empty and left out.
            own=Runs.of([length for length in lengths if length], None, device),
            to_prompts=to_prompts,
            predicting=to_device(_numbers_in(predicting), device),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def longest_sequence(self) -> int:
        """The number of tokens of the longest sequence; with shared prompts an upper bound of it."""
        longest = max(self.own.query_lengths)
        return longest + (max(self.to_prompts.key_lengths) if self.to_prompts is not None else 0)


def padded(sequences: Sequence[Tensor]) -> Tensor:
    """[N, longest] N sequences of numbers, each with zeros behind it; differentiable.

    PyTorch's `pad_sequence` launches a copy for each sequence, which for a thousand short ones takes the host
    longer than their forward pass takes a GPU.
    """
    longest = max(len(sequence) for sequence in sequences)
    flat = torch.cat(list(sequences))
    places = _numbers_in([(n * longest, n * longest + len(part)) for n, part in enumerate(sequences)])
    rows = flat.new_zeros(len(sequences) * longest).index_copy(0, to_device(places, flat.device), flat)
    return rows.view(len(sequences), longest)


def _numbers_in(ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The numbers in all ranges, one range after the other, int64."""
    starts, stops = np.array(ranges, dtype=np.int64).T
    lengths = stops - starts
    # Number i of the result is i plus how far its range begins from where it lies in the result.
    offsets = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return torch.from_numpy(np.arange(len(offsets)) + offsets)


def _beginning(sample: Sample) -> Tensor:
    """The tokens that the sample shares with others."""
    if (num_further := sample.num_shared - len(sample.prompt_ids)) == 0:
        return sample.prompt_ids
    if num_further < 0:
        return sample.prompt_ids[: sample.num_shared]
    return torch.cat([sample.prompt_ids, sample.completion_ids[:num_further]])


def _rest(sample: Sample, first: int) -> Tensor:
    """The tokens read from number `first` on: all but the last, from which nothing is predicted."""
    completion_ids = sample.completion_ids[max(0, first - len(sample.prompt_ids)) : -1]
    if first >= len(sample.prompt_ids):
        return completion_ids  # without a copy, as the prompt of most samples is shared
    return torch.cat([sample.prompt_ids[first:], completion_ids])


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy host tensor `x` to the device, without waiting for the device's work.

    The host would wait for a copy from pageable memory, and the device would then have nothing to do while
    the host prepares the next micro-batch. So `x` is pinned first.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def groups_of(samples: Sequence[Sample], *, share_prompts: bool) -> list[list[int]]:
    """The samples' indices in groups that share their beginning, ordered by first occurrence; unless
    `share_prompts`, every sample is a group of its own."""
    groups: dict[object, list[int]] = {}
    for number, sample in enumerate(samples):
        is_alone = sample.shared_key is None or not share_prompts
        key = ("alone", number) if is_alone else sample.shared_key
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _cumulative(lengths: Iterable[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), device)
