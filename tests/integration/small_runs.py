"""Runs of `GRPOTrainer` that take a second: a two-layer model over an alphabet, a few steps."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerFast

import tiny
from colocate import GRPOConfig, GRPOTrainer

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
SPECIAL_TOKENS = ("<pad>", "<eos>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + len(ALPHABET)
TIMINGS = (
    *("time", "step_time", "wall_s", "rank_wait_s", "phases", "memory"),
    *("train_runtime", "runtime", "per_second"),
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter."""
    return tiny.character_tokenizer(SPECIAL_TOKENS, ALPHABET)


def make_model(name: str = "llama", **options: Any) -> Any:
    """A random model: "llama" runs packed on the native engine, "gpt2" padded with dropout."""
    return tiny.make_model(name, **{"vocab_size": VOCAB_SIZE, "max_position_embeddings": 64, **options})


def make_dataset(num_rows: int = 10) -> datasets.Dataset:
    rng = random.Random(0)
    prompts = ["".join(rng.choices(ALPHABET, k=rng.randint(2, 7))) for _ in range(num_rows)]
    return datasets.Dataset.from_dict({"prompt": prompts, "wanted": [prompt[0] for prompt in prompts]})


def share_of_early_letters(completion_ids: Sequence[list[int]], **_: Any) -> list[float]:
    """Dense enough that every group has a spread."""
    return [sum(token < 12 for token in ids) / len(ids) for ids in completion_ids]


_OPTIONS: dict[str, Any] = dict(
    gradient_checkpointing=False, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    max_completion_length=8, max_steps=8, lr_scheduler_type="cosine", seed=3,
)  # fmt: skip


def make_config(output_dir: Path | str, **options: Any) -> GRPOConfig:
    return tiny.make_config(output_dir, **{**_OPTIONS, **options})


def make_trainer(output_dir: Path | str, *, model: Any = "llama", **options: Any) -> GRPOTrainer:
    """`options` are `GRPOConfig`'s, or arguments of the trainer by their own names."""
    arguments = {
        "model": make_model(model) if isinstance(model, str) else model,
        "reward_funcs": share_of_early_letters,
        "train_dataset": make_dataset(),
        "processing_class": make_tokenizer(),
    }
    return tiny.make_trainer(output_dir, **{**_OPTIONS, **arguments, **options})


def ends_with_the_first_step() -> dict[str, Any]:
    """Options of a run of two steps whose first evaluation is its best one, with whose weights it ends."""
    values = iter([1.0, 0.0])

    def reward(completion_ids: list[list[int]], wanted: list[str], **_: Any) -> list[float]:
        if wanted[0] != "held out":
            return share_of_early_letters(completion_ids)
        return [next(values)] * len(completion_ids)

    held_out = make_dataset(2).map(lambda row: {"wanted": "held out"})
    return dict(
        reward_funcs=reward, max_steps=2, eval_dataset=held_out, per_device_eval_batch_size=2,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_reward",
    )  # fmt: skip


def read_metrics(output_dir: Path | str) -> list[dict[str, Any]]:
    lines = (Path(output_dir) / "metrics.jsonl").read_text().splitlines()
    return [without_timings(json.loads(line)) for line in lines]


def without_timings(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if not key.endswith(TIMINGS)}
