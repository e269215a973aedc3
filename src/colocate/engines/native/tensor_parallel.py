"""Ranks that decode together, each on its own part of the weights (`weights.weight_parts`).

Every rank runs the same scheduler on the same prompts, those of all ranks, and launches the same steps. It
multiplies with its own heads, its own columns of the MLP and its own tokens of the vocabulary, and its KV
cache holds the keys and values of its own heads. Two sums a layer make the hidden states whole, and one
exchange of four numbers per row draws the token (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053; Pope et
al. 2022, arXiv:2211.05102). No rank directs the others: decisions depend only on values that are equal on all
ranks (prompts, tokens, the number of pages); values that may differ are agreed on before a rollout.

A rank that runs out of memory may not leave the others waiting in a sum. Within `attempt` it goes on with
results that mean nothing, and the next `least` raises the error on all ranks. This holds where much memory is
taken: for the cache, prefills and graphs. Elsewhere a shortage ends the rank, and with it the run
(`together`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from colocate.engines.native.all_reduce import GroupSum, make_sum
from colocate.memory.arena import ArenaExhausted
from colocate.types import Prompt, SamplingParams
from colocate.weights.layouts import Layout

Result = TypeVar("Result")


class Shortage(torch.OutOfMemoryError):
    """Memory ran out on one of the ranks that decode together, and all of them know."""


class OneRank:
    """A rank that holds all weights: nothing is split, and nothing travels."""

    num_parts = 1
    part = 0

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """The embeddings [T, hidden] of token ids [T], from this rank's rows of the embedding."""
        return F.embedding(token_ids, weight)

    def room(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor | None:
        """The buffer [num_rows, num_columns] for a product that will be summed; None: there is none."""
        return None

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over ranks of `partial` [T, hidden]; it may be overwritten by the next one."""
        return partial

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' `x` in the order of ranks, [t, *x.shape]."""
        return x[None]

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """The logits of all tokens, [B, V], from those of this rank's, [B, V / t]."""
        return logits

    def attempt(self, work: Callable[[], Result], instead: Result) -> Result:
        """The result of `work`; where ranks decode together, `instead` if memory runs out (see `least`)."""
        return work()

    def least(self, value: int) -> int:
        """The least `value` of all ranks.

        Raises:
            Shortage: memory ran out on a rank since the last call; every rank raises.
        """
        return value

    def together(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, in which all ranks take part."""
        return work()

    def share(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> tuple[list[Prompt], slice]:
        """The prompts of all ranks, in the order of ranks, and where this rank's completions are."""
        return list(prompts), slice(None)


ONE_RANK = OneRank()


class TensorParallel(OneRank):
    """One of t ranks that decode together.

    Args:
        sum_: how partial results are summed over these ranks.
        device: where the ranks' flags are exchanged.
    """

    def __init__(self, sum_: GroupSum, device: torch.device) -> None:
        self._sum = sum_
        self._device = device
        self.num_parts, self.part = sum_.num_parts, sum_.part
        self._shortage: str | None = None
        """The purpose for which memory was lacking since the last `least`; None: it has sufficed."""

    @property
    def group(self) -> ProcessGroup:
        return self._sum.group

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        own = token_ids - self.part * len(weight)
        is_others = (own < 0) | (own >= len(weight))
        rows = F.embedding(own.masked_fill(is_others, 0), weight).masked_fill_(is_others[:, None], 0)
        # A copy, because the embeddings are the first residual, which outlives the next sum.
        return self.sum(rows).clone()

    def room(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor | None:
        return self._sum.room(num_rows, num_columns, dtype)

    def sum(self, partial: Tensor) -> Tensor:
        return self._sum.sum(partial)

    def gather(self, x: Tensor) -> Tensor:
        return self._sum.gather(x)

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        return self._sum.gather(logits.contiguous()).transpose(0, 1).flatten(1)

    def attempt(self, work: Callable[[], Result], instead: Result) -> Result:
        if self._shortage is None:
            try:
                return work()
            except (torch.OutOfMemoryError, ArenaExhausted) as error:
                self._shortage = str(error)
        return instead

    def least(self, value: int) -> int:
        shortage, self._shortage = self._shortage, None
        values = torch.tensor([shortage is None, value], dtype=torch.int64, device=self._device)
        dist.all_reduce(values, dist.ReduceOp.MIN, group=self.group)
        is_enough, least = values.tolist()
        if not is_enough:
            raise Shortage(shortage or "another rank of the rollout ran out of memory")
        return least

    def together(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except Shortage:
            raise
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"Memory ran out in a rollout of {self.num_parts} ranks that wait for each other, which can "
                "therefore not be repeated. Lower max_num_seqs or kv_cache_tokens."
            ) from error

    def share(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> tuple[list[Prompt], slice]:
        shares: list[tuple[list[Prompt], SamplingParams]] = [None] * self.num_parts  # type: ignore[list-item]
        dist.all_gather_object(shares, (list(prompts), sampling), group=self.group)
        if any(theirs != shares[0][1] for _, theirs in shares):
            raise ValueError(
                f"The {self.num_parts} ranks that share the weights decode together, and ask for different "
                f"sampling: {', '.join(str(theirs) for _, theirs in shares)}. Ask for the same on all."
            )
        counts = [sum(len(prompt.samples) for prompt in theirs) for theirs, _ in shares]
        first = sum(counts[: self.part])
        union = [prompt for theirs, _ in shares for prompt in theirs]
        return union, slice(first, first + counts[self.part])


def joined_groups(prompts: Sequence[Prompt], max_tokens: int) -> list[Prompt]:
    """The prompts, with groups that ranks share (neighbours, so that completions keep their order) put
    together again, so that their prompt is read once."""
    joined: list[Prompt] = []
    for prompt in prompts:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.key, last.token_ids) == (prompt.key, prompt.token_ids)
            and (last.samples.step, last.samples.stop) == (prompt.samples.step, prompt.samples.start)
        ):
            samples = range(last.samples.start, prompt.samples.stop, last.samples.step)
            limits = last.limits(max_tokens) + prompt.limits(max_tokens)
            joined[-1] = Prompt(prompt.token_ids, prompt.key, samples, limits)
        else:
            joined.append(prompt)
    return joined


def parallel_for(layout: Layout, group: ProcessGroup | None, capacity: int) -> OneRank:
    """The ranks that decode together with this one, in steps of up to `capacity` rows."""
    num_ranks = 1 if group is None else group.size()
    rank = 0 if group is None else group.rank()
    part = layout.part
    if (part.index, part.count) != (rank, num_ranks):
        raise ValueError(
            f"The model holds part {part.index} of {part.count} of its weights, and this is rank {rank} of "
            f"{num_ranks} that decode together. Pass as `group` the ranks that hold its {part.count} parts, "
            "or None for a model that was not split."
        )
    if group is None:
        return ONE_RANK
    num_bytes = capacity * layout.embed_tokens.embedding_dim * layout.dtype.itemsize
    sums = make_sum(group, layout.device, num_bytes=num_bytes, num_rows=capacity)
    return TensorParallel(sums, layout.device)
