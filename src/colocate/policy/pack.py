"""The tokens of a micro-batch end to end, without padding, and the prompt of a group only once.

A group of G completions of one prompt lies in the pack as G + 1 *runs*: the prompt, then the completions,
whose positions go on where the prompt's end. Every run attends causally to itself; a completion's tokens
attend to the whole prompt besides. That is what G copies of the prompt would compute, at 1/G of the cost, and
its gradients are exact: the prompt's keys and values collect those of all its completions.

    prompts              completions of these prompts                sequences that share no prompt
    p p p p  q q q       a a a  b b  c c c c  d d   e e e            s s s s s s  t t t t t
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colocate.types import Sample


@dataclass(frozen=True, eq=False)
class Runs:
    """Run n of the queries attends to run n of the keys."""

    queries: slice
    """The tokens of the pack that the runs of queries fill, one after the other."""
    keys: slice
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    is_causal: bool
    """Then the two are the same tokens, and token i of a run sees tokens 0 to i."""
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
        """Runs from `queries_start` on, of their own tokens causally (`key_lengths` None) or of the keys that
        the pack begins with."""
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
    """A micro-batch of N completion tokens in T tokens."""

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    own: Runs
    """Every run with itself."""
    to_prompts: Runs | None
    """The completions of each shared prompt, as one run, with the prompt. None: nothing is shared."""
    predicting: Tensor  # [N] int64: the tokens whose hidden states predict completion tokens, by sample

    @classmethod
    def of(cls, samples: Sequence[Sample], *, share_prompts: bool = True) -> Pack:
        """Lay out `samples`; those with an equal `prompt_key` share the prompt if `share_prompts`."""
        device = samples[0].prompt_ids.device
        groups = groups_of(samples, share_prompts=share_prompts)
        shared = [group for group in groups if len(group) > 1]
        alone = [group[0] for group in groups if len(group) == 1]
        # Nothing is predicted from a completion's last token, so it is not read.
        inputs = [sample.completion_ids[:-1] for sample in samples]
        prompts = [samples[group[0]].prompt_ids for group in shared]
        members = [number for group in shared for number in group]
        pieces = [*prompts, *(inputs[number] for number in members)]
        offsets = [0] * len(prompts) + [len(samples[number].prompt_ids) for number in members]
        pieces += [torch.cat([samples[number].prompt_ids, inputs[number]]) for number in alone]
        offsets += [0] * len(alone)
        lengths = [len(piece) for piece in pieces]

        starts = dict(zip([*(-1 - n for n in range(len(prompts))), *members, *alone],
                          itertools.accumulate(lengths, initial=0), strict=False))  # fmt: skip
        predicting: list[Tensor] = [torch.empty(0)] * len(samples)
        for index, group in enumerate(shared):
            last_of_prompt = torch.tensor([starts[-1 - index] + len(prompts[index]) - 1])
            for number in group:
                run = torch.arange(starts[number], starts[number] + len(inputs[number]))
                predicting[number] = torch.cat([last_of_prompt, run])
        for number in alone:
            first = starts[number] + len(samples[number].prompt_ids) - 1
            predicting[number] = torch.arange(first, first + len(inputs[number]) + 1)

        num_prompt_tokens = sum(lengths[: len(prompts)])
        to_prompts = None
        if shared:
            to_prompts = Runs.of(
                [sum(len(inputs[number]) for number in group) for group in shared],
                lengths[: len(prompts)],
                device,
                queries_start=num_prompt_tokens,
            )
        positions = [torch.arange(o, o + n) for o, n in zip(offsets, lengths, strict=True)]
        return cls(
            token_ids=torch.cat(pieces),
            position_ids=to_device(torch.cat(positions), device),
            # A completion of one token is read nowhere: its run is empty.
            own=Runs.of([length for length in lengths if length], None, device),
            to_prompts=to_prompts,
            predicting=to_device(torch.cat(predicting), device),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def longest_sequence(self) -> int:
        """In tokens; for a shared prompt an upper bound."""
        longest = max(self.own.query_lengths)
        return longest + (max(self.to_prompts.key_lengths) if self.to_prompts is not None else 0)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Host tensor `x` on the device, without waiting for what the device is still computing.

    From pageable memory a copy is waited for: the device would have nothing to do while the host prepares
    the next micro-batch.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def groups_of(samples: Sequence[Sample], *, share_prompts: bool) -> list[list[int]]:
    """Indices of the samples that share a prompt, by first occurrence; of each alone, if none may share."""
    groups: dict[object, list[int]] = {}
    for number, sample in enumerate(samples):
        is_alone = sample.prompt_key is None or not share_prompts
        key = ("alone", number) if is_alone else sample.prompt_key
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _cumulative(lengths: Iterable[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), device)
