"""Tokenizer, models and data small enough that a training run takes a second. Nothing is downloaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from colocate.config.grpo_config import GRPOConfig
from colocate.engines.turns import TurnEngine
from colocate.reporting.run_log import TRAINER_METRICS
from colocate.run import build
from colocate.trainer import GRPOTrainer
from colocate.types import Completion, Prompt
from colocate.weights.shapes import ModelShapes

SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-=?.,\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_POSITION = 1024

_SIZES: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_POSITION,
    initializer_range=0.2,  # far from uniform: log-probs and entropies are of order one
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with a ChatML template."""
    extra = {"unk_token": "<unk>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    tokenizer = character_tokenizer(SPECIAL_TOKENS, CHARACTERS, **extra)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def character_tokenizer(
    special_tokens: Sequence[str], characters: str, unk_token: str = "<pad>", **options: Any
) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*special_tokens, *characters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=unk_token))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # no spaces between the characters
    options |= {"pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unk_token, **options)


VOCAB_SIZE = len(SPECIAL_TOKENS) + len(CHARACTERS)
PAD, EOS = 0, 1


# "gpt2" and "gpt_neox" have no layout for the native engine and run padded; "gpt2" has dropout.
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": dict(head_dim=8, tie_word_embeddings=False),
    "qwen2": dict(tie_word_embeddings=True),
    "llama": {},
    "gpt2": {},
    "gpt_neox": {},
}


def make_model(architecture: str = "qwen3", *, seed: int = 0, **overrides: Any) -> Any:
    """A random causal language model in float32, by the name of an architecture above."""
    torch.manual_seed(seed)
    ends: dict[str, Any] = dict(vocab_size=VOCAB_SIZE, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)
    options = {**_SIZES, **_ARCHITECTURES[architecture], **ends, **overrides}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **options))


def make_reward_model(seed: int = 7) -> Qwen3ForSequenceClassification:
    torch.manual_seed(seed)
    # Not Qwen2: transformers replaces the tokenizer of a directory with a model of that type by its own.
    config = Qwen3Config(**_SIZES, head_dim=8, vocab_size=VOCAB_SIZE, pad_token_id=PAD, num_labels=1)
    return Qwen3ForSequenceClassification(config)


def sums(num_rows: int = 12, *, conversational: bool = False) -> Dataset:
    """Rows like {"prompt": "3 + 4 =", "answer": "7"}."""
    prompts, answers = [], []
    for i in range(num_rows):
        a, b = (3 * i + 1) % 10, (7 * i + 2) % 10
        prompts.append(f"{a} + {b} =")
        answers.append(str(a + b))
    if conversational:
        return Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": p}] for p in prompts], "answer": answers}
        )
    return Dataset.from_dict({"prompt": prompts, "answer": answers})


def text_of(completion: str | list[dict[str, str]]) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def count_digits(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that differs within nearly every group of random completions."""
    return [float(sum(c.isdigit() for c in text_of(completion))) for completion in completions]


def make_config(output_dir: Any, **options: Any) -> GRPOConfig:
    """Two steps of one group of four each, every step logged, nothing saved."""
    defaults: dict[str, Any] = dict(
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    return GRPOConfig(output_dir=str(output_dir), **{**defaults, **options})


def make_trainer(output_dir: Any, *, stub: StubEngine | None = None, **arguments: Any) -> GRPOTrainer:
    """A trainer of a tiny model; what is no argument of the trainer is an option of its configuration.

    Args:
        stub: takes the place of the rollout engine.
    """
    if stub is not None:
        with mock.patch.object(build, "build_engine", lambda *_: stub):
            return make_trainer(output_dir, **arguments)
    names = set(inspect.signature(GRPOTrainer).parameters)
    options = {name: arguments.pop(name) for name in list(arguments) if name not in names}
    return GRPOTrainer(
        **{
            "model": make_model(),
            "reward_funcs": count_digits,
            "args": make_config(output_dir, **options),
            "train_dataset": sums(),
            "processing_class": make_tokenizer(),
            **arguments,
        }
    )


def shapes_of(config: Any, **options: Any) -> ModelShapes:
    """The shapes of a model that is not loaded."""
    with torch.device("meta"):
        return ModelShapes.of(AutoModelForCausalLM.from_config(config), **options)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed_weights(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    """Names of the parameters that are not what they were; all of them must be finite."""
    now = dict(model.named_parameters())
    assert all(parameter.isfinite().all() for parameter in now.values())
    return {name for name, parameter in now.items() if not torch.equal(parameter, before[name])}


def train(trainer: GRPOTrainer) -> set[str]:
    """Train, and return the names of the parameters that changed."""
    before = weights_of(trainer.model)
    trainer.train()
    return changed_weights(trainer.model, before)


def logged(trainer: Any, name: str) -> list[float]:
    """The values of one name in the log history of a trainer, ours or TRL's."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def unexplained(trainer: Any) -> set[str]:
    """Names in the log history of a trainer that are neither metrics of its own nor of reward functions: a
    function could take such a name, and docs/metrics.md would not have it."""
    names = {name for entry in trainer.state.log_history if "train_runtime" not in entry for name in entry}
    return {name for name in names if not name.startswith("rewards/")} - TRAINER_METRICS


class StubEngine(TurnEngine):
    """A rollout engine that completes with what it is told, and knows no log-probs.

    Args:
        complete: (prompt, member of the group) -> token ids. A later turn's prompt is all that came before.
    """

    _max_len, _max_len_reason, _vocab_size = MAX_POSITION, "it is a stub", 1 << 20

    def __init__(self, complete: Callable[[Prompt, int], list[int]]) -> None:
        self._complete = complete

    def generate(self, prompts, sampling):
        ids = [self._complete(prompt, member) for prompt in prompts for member in prompt.samples]
        return [
            Completion(tuple(i), None, "stop" if i[-1] in sampling.stop_token_ids else "length", 0)
            for i in ids
        ]
