"""Runs of `GRPOTrainer` that take a second: a two-layer model over an alphabet, a few steps."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from colocate import GRPOConfig, GRPOTrainer

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
SPECIAL_TOKENS = ("<pad>", "<eos>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + len(ALPHABET)
TIMINGS = ("time", "step_time", "wall_s", "phases", "memory", "train_runtime", "runtime", "per_second")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()  # no spaces between the letters
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(
    name: str = "llama", *, seed: int = 0, vocab_size: int = VOCAB_SIZE, hidden_size: int = 32
) -> Any:
    """A random model: "llama" runs packed on the native engine, "gpt2" padded with dropout."""
    torch.manual_seed(seed)
    tokens = dict(vocab_size=vocab_size, eos_token_id=1, bos_token_id=None, pad_token_id=0)
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(**tokens, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2)
        )
    config = LlamaConfig(
        **tokens, hidden_size=hidden_size, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_dataset(num_rows: int = 10) -> datasets.Dataset:
    rng = random.Random(0)
    prompts = ["".join(rng.choices(ALPHABET, k=rng.randint(2, 7))) for _ in range(num_rows)]
    return datasets.Dataset.from_dict({"prompt": prompts, "wanted": [prompt[0] for prompt in prompts]})


def share_of_early_letters(completion_ids: Sequence[list[int]], **_: Any) -> list[float]:
    """Dense enough that every group has a spread."""
    return [sum(token < 12 for token in ids) / len(ids) for ids in completion_ids]


def make_config(output_dir: Path | str, **options: Any) -> GRPOConfig:
    defaults: dict[str, Any] = dict(
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, report_to="none",
        per_device_train_batch_size=2, num_generations=4, gradient_accumulation_steps=2,
        max_completion_length=8, max_steps=8, learning_rate=1e-2, logging_steps=1, save_strategy="no",
        lr_scheduler_type="cosine", seed=3,
    )  # fmt: skip
    return GRPOConfig(output_dir=str(output_dir), **{**defaults, **options})


def make_trainer(output_dir: Path | str, *, model: Any = "llama", **options: Any) -> GRPOTrainer:
    """`options` are `GRPOConfig`'s, or arguments of the trainer by their own names."""
    arguments = {
        "reward_funcs": share_of_early_letters,
        "train_dataset": make_dataset(),
        "processing_class": make_tokenizer(),
        **{name: options.pop(name) for name in _TRAINER_ARGUMENTS if name in options},
    }
    model = make_model(model) if isinstance(model, str) else model
    return GRPOTrainer(model, args=make_config(output_dir, **options), **arguments)


_TRAINER_ARGUMENTS = (
    *("reward_funcs", "train_dataset", "eval_dataset", "processing_class", "callbacks", "peft_config"),
    *("optimizers", "tools", "rollout_func", "environment_factory"),
)


def read_metrics(output_dir: Path | str) -> list[dict[str, Any]]:
    lines = (Path(output_dir) / "metrics.jsonl").read_text().splitlines()
    return [without_timings(json.loads(line)) for line in lines]


def without_timings(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if not key.endswith(TIMINGS)}
