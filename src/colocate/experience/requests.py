"""This rank's requests, from dataset rows: prompts, and the members of their groups that it completes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from colocate.data.prompts import all_prompts, check_context_length, row_name, tokenize_prompts
from colocate.data.sampler import PromptBatch, rank_slice
from colocate.experience.options import SelectionOptions
from colocate.types import Prompt


@dataclass(frozen=True)
class RolloutRequest:
    """This rank's share of a generation batch."""

    rows: list[dict[str, Any]]
    """The dataset row of each prompt."""
    prompts: list[Prompt]
    num_generations: int
    """G, completions of a group over all ranks; a request's prompt may ask for a part of its group only."""

    batch_keys: Sequence[int] = ()
    """The keys of the prompts of the whole batch, over all ranks, whose rows `SliceRows` keeps."""

    @property
    def is_held_out(self) -> bool:
        """Whether its prompts are evaluated and not trained on: their keys are negative."""
        return any(key < 0 for key in self.batch_keys)

    def per_completion(self) -> list[tuple[dict[str, Any], Prompt]]:
        """The row and the prompt of each completion, in the order in which the engine returns completions."""
        pairs = zip(self.rows, self.prompts, strict=True)
        return [(row, prompt) for row, prompt in pairs for _ in prompt.samples]


class RequestBuilder:
    """Tokenizes dataset rows into this rank's requests.

    Args:
        context_length: tokens that prompt and completion may have together.
        context_reason: the reason for that limit, for messages.
        schemas_of: the JSON schemas of the tools that a row's prompt is to describe; None: there are none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: SelectionOptions,
        context_length: int,
        schemas_of: Callable[[dict[str, Any]], list[dict[str, Any]] | None] = lambda row: None,
        *,
        context_reason: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self._schemas_of = schemas_of
        self._options = options
        self.context_length = context_length
        self._context_reason = context_reason

    def training(self, batch: PromptBatch) -> RolloutRequest:
        """This rank's equal share of the batch's completions; a group may span ranks.

        Raises:
            ValueError: a prompt cannot be tokenized, or leaves no room for `max_completion_length`.
        """
        options = self._options
        share = rank_slice(
            len(batch.rows), options.num_generations, options.process_index, options.world_size
        )
        rows = [batch.rows[index] for index, _ in share]
        keys = [batch.keys[index] for index, _ in share]
        # The dataset's own row numbers are gone by now: a stream has none, and the order is random.
        names = [f"The run's prompt {key} (from 0)" for key in keys]
        members = [members for _, members in share]
        return self._request(rows, keys, members, options.num_generations, names, batch.keys)

    def evaluation(self, rows: Sequence[dict[str, Any]]) -> RolloutRequest:
        """This rank's share of all held-out prompts, with their whole groups.

        Raises:
            ValueError: a prompt cannot be tokenized, or leaves no room for `max_completion_length`.
        """
        options = self._options
        num_generations = options.num_generations_eval or options.num_generations
        per_rank = math.ceil(len(rows) / options.world_size)
        share = range(len(rows))[options.process_index * per_rank :][:per_rank]
        # Negative keys: a held-out prompt never shares its random numbers with a training prompt.
        batch_keys = [-1 - index for index in range(len(rows))]
        keys = [batch_keys[index] for index in share]
        members = [range(num_generations)] * len(share)
        names = [row_name(index) for index in share]
        own_rows = [rows[index] for index in share]
        return self._request(own_rows, keys, members, num_generations, names, batch_keys)

    def check_extremes(self, dataset: datasets.Dataset | datasets.IterableDataset) -> None:
        """Find prompts too long for the context, or without a token, before anything is generated.

        Tokenizing a large dataset takes minutes; tokenizing its longest and shortest prompts by characters
        takes milliseconds, and in all but odd cases the longest and shortest by tokens are among them. The
        odd cases, and prompts of a stream, are found when their batch comes.

        Raises:
            ValueError: prompt and completion do not fit the context together, or there is no prompt.
        """
        if isinstance(dataset, datasets.IterableDataset):
            return
        lengths = [len(str(prompt)) for prompt in all_prompts(dataset)]
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        extremes = sorted({*by_length[:16], *by_length[-16:]})
        self._tokenize([dataset[row] for row in extremes], [row_name(row) for row in extremes])

    def tokenize(
        self, rows: Sequence[dict[str, Any]], names: Sequence[str] | None = None
    ) -> list[tuple[int, ...]]:
        """The prompt tokens of rows; `names` are the rows' names in errors.

        Raises:
            ValueError: a prompt cannot be tokenized, or leaves no room for `max_completion_length`.
        """
        if names is None:
            names = [f"Prompt {number} of the rollout (from 0)" for number in range(len(rows))]
        return self._tokenize(rows, names)

    def rendered(self, rows: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
        """The tokens of rows' whole prompts, however long they are."""
        return tokenize_prompts(
            rows,
            self.tokenizer,
            chat_template_kwargs=self._options.chat_template_kwargs,
            schemas=[self._schemas_of(row) for row in rows],
        )

    def _request(
        self,
        rows: list[dict[str, Any]],
        keys: list[int],
        members: list[range],
        num_generations: int,
        names: list[str],
        batch_keys: Sequence[int],
    ) -> RolloutRequest:
        parts = zip(self._tokenize(rows, names), keys, members, strict=True)
        prompts = [Prompt(ids, key, samples) for ids, key, samples in parts]
        return RolloutRequest(rows, prompts, num_generations, batch_keys)

    def _tokenize(self, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[tuple[int, ...]]:
        options = self._options
        token_ids = tokenize_prompts(
            rows,
            self.tokenizer,
            chat_template_kwargs=options.chat_template_kwargs,
            max_prompt_length=options.max_prompt_length,
            names=names,
            schemas=[self._schemas_of(row) for row in rows],
            context_length=self.context_length,
        )
        for ids in token_ids:
            check_context_length(
                len(ids), options.max_completion_length, self.context_length, self._context_reason
            )
        return token_ids
