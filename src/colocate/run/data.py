"""The datasets of a run file: they are read, their rows become prompts, and some rows are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import datasets
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from colocate.config.grpo_config import GRPOConfig
from colocate.config.run_config import RunConfig
from colocate.data.mixture import AnyDataset, DatasetEntry, mix, read_entries
from colocate.data.prompt_lengths import within_lengths
from colocate.data.prompts import as_conversations
from colocate.data.splits import EvalDataset, TrainDataset
from colocate.options.values import shown
from colocate.weights.model_files import naming_damage

TEST_SEED = 42
"""The seed that `test_split_size` draws rows with: every rank must draw the same."""
_OF_ONE_DATASET = ("dataset_name", "dataset_config", "dataset_options")
_OWN_OF_DATASETS = {
    "name": "dataset_name",
    "config": "dataset_config",
    "split": "dataset_train_split or dataset_test_split",
}


@dataclass
class RunData:
    """The datasets that a run file names; options that contradict each other are refused before loading."""

    run: RunConfig
    config: GRPOConfig
    left_out: list[str] = field(default_factory=list)
    """Sentences about the rows that `load` has left out, one for each dataset."""

    def __post_init__(self) -> None:
        self._check_options()
        self._train, self._eval = self._train_entries(), self._eval_entries()

    @property
    def weights(self) -> dict[str, float] | None:
        """The share of each training dataset by its label; None: there are no weights."""
        return {entry.label: entry.weight for entry in self._train if entry.weight is not None} or None

    @property
    def names(self) -> list[str]:
        """The datasets to train on, as the run names them."""
        return [entry.name for entry in self._train]

    @property
    def is_evaluated(self) -> bool:
        """True if the run evaluates."""
        return self.config.eval_strategy != "no" or bool(self.config.eval_on_start)

    def load(self) -> tuple[TrainDataset, EvalDataset | None]:
        """The rows to train on, and those to evaluate on where the run evaluates."""
        run = self.run
        parts = {entry.label: self._loaded(entry) for entry in self._train}
        if len(parts) > 1 or run.datasets:
            train: Any = mix(parts, is_weighted=self.weights is not None)
        else:
            (train,) = parts.values()
        if not self.is_evaluated:
            return train, None
        if run.test_split_size is not None:
            return self._split(train)
        held_out = {entry.label: self._loaded(entry) for entry in self._eval}
        if run.eval_datasets:
            return train, held_out
        (dataset,) = held_out.values()
        return train, dataset

    def _loaded(self, entry: DatasetEntry) -> AnyDataset:
        run, config = self.run, self.config
        dataset = entry.load()
        if config.apply_chat_template:
            dataset = as_conversations(dataset)
        if run.min_prompt_tokens is None and run.max_prompt_tokens is None:
            return dataset
        dataset, left_out = within_lengths(
            dataset,
            self._tokenizer,
            name=shown(entry.label),
            min_tokens=run.min_prompt_tokens,
            max_tokens=run.max_prompt_tokens,
            chat_template_kwargs=config.chat_template_kwargs,
        )
        if left_out is not None:
            self.left_out.append(left_out)
        return dataset

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        run = self.run
        assert run.model_name_or_path is not None, "a run file names its model"
        with naming_damage(run.model_name_or_path, run.model_revision):
            return AutoTokenizer.from_pretrained(
                run.model_name_or_path,
                revision=run.model_revision,
                trust_remote_code=self.config.trust_remote_code,
            )

    def _split(self, train: AnyDataset) -> tuple[TrainDataset, EvalDataset]:
        size = self.run.test_split_size
        assert size is not None
        if isinstance(train, datasets.IterableDataset):
            raise ValueError(
                f"test_split_size={size:g} needs the number of rows, and the training data is a stream. Name "
                "held-out data with eval_dataset_name, or load it without streaming."
            )
        try:
            parts = train.train_test_split(test_size=int(size) if size >= 1 else size, seed=TEST_SEED)
        except ValueError as error:
            raise ValueError(
                f"test_split_size={size:g} of {len(train):,} rows leaves none to train or none to evaluate "
                f"on: {error}"
            ) from error
        return parts["train"], parts["test"]

    # ── Which datasets ───────────────────────────────────────────────────────────────────────────────────

    def _train_entries(self) -> list[DatasetEntry]:
        run = self.run
        if run.datasets:
            return read_entries("datasets", run.datasets, self._defaults(run.max_rows))
        return [self._entry(run.dataset_name, run.dataset_train_split, run.dataset_options, run.max_rows)]

    def _eval_entries(self) -> list[DatasetEntry]:
        """The held-out datasets; one of them unless `eval_datasets` names several."""
        run, limit = self.run, self.run.max_eval_rows
        if not self.is_evaluated or run.test_split_size is not None:
            return []
        if run.eval_datasets:
            entries = read_entries("eval_datasets", run.eval_datasets, self._defaults(limit))
            if any(entry.weight is not None for entry in entries):
                raise ValueError(
                    "eval_datasets has weights, but each of its datasets is evaluated by itself."
                )
            return entries
        if run.eval_dataset_name:
            return [self._entry(run.eval_dataset_name, "train", run.eval_dataset_options, limit)]
        if run.datasets:
            raise ValueError(
                "The run evaluates, and `datasets` says only what it trains on. Set eval_datasets, "
                "eval_dataset_name or test_split_size."
            )
        return [self._entry(run.dataset_name, run.dataset_test_split, run.dataset_options, limit)]

    def _entry(
        self, name: str | None, split: str, options: dict[str, Any], max_rows: int | None
    ) -> DatasetEntry:
        config = self.run.dataset_config
        return DatasetEntry(
            str(name), config=config, split=split, options=options, **self._defaults(max_rows)
        )

    def _defaults(self, max_rows: int | None) -> dict[str, Any]:
        run = self.run
        return {
            "prompt_column": run.prompt_column,
            "prompt_template": run.prompt_template,
            "system_prompt": run.system_prompt,
            "columns": run.columns,
            "max_rows": max_rows,
        }

    def _check_options(self) -> None:
        run = self.run
        for name in ("dataset_options", "eval_dataset_options"):
            for key in getattr(run, name):
                if key in _OWN_OF_DATASETS:
                    raise ValueError(f"{name} has {key!r}: set {_OWN_OF_DATASETS[key]} instead")
        if run.datasets:
            _refuse_both("datasets", [name for name in _OF_ONE_DATASET if getattr(run, name)])
            if self.config.dataset_weights is not None:
                raise ValueError(
                    "dataset_weights and `datasets` both give weights: set `weight` in each dataset."
                )
        held_out = ("eval_datasets", "eval_dataset_name", "test_split_size")
        given = [name for name in held_out if getattr(run, name)]
        if len(given) > 1:
            _refuse_both(given[0], given[1:])
        if self.config.apply_chat_template is False and run.system_prompt is not None:
            raise ValueError(
                "system_prompt is a message, which only a chat template puts before the prompt, and "
                "apply_chat_template=False. Set one of them, or write the text into prompt_template."
            )


def _refuse_both(one: str, others: Sequence[str]) -> None:
    if others:
        raise ValueError(f"{one} and {' and '.join(others)} both name the data. Set one of them.")
