"""A model learns that a calculator is right more often than it is: GRPO with a tool, in a minute on a CPU.

    python examples/turns/calculator.py [--output_dir runs/calculator] [--seed 0]

First a Qwen3 of 0.2 million random parameters imitates somebody who uses the calculator for three sums in ten
and guesses the others. Then reward for right answers teaches it to use the calculator always.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from chat import Message, build_model, build_tokenizer, called, imitate
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from colocate import GRPOConfig, GRPOTrainer

PHRASES = ['{"name": "add", "arguments": {"a": ', ', "b": ', "}}", "add", "+", "Failed"]
SHARE_OF_CALLS = 0.3


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def number(rng: random.Random) -> int:
    return rng.randint(10, 49)


def demonstration(rng: random.Random) -> list[Message]:
    """A sum, and what somebody says who does not always use the calculator."""
    a, b = number(rng), number(rng)
    conversation = [{"role": "user", "content": f"{a}+{b}"}]
    if rng.random() < SHARE_OF_CALLS:
        answer = str(a + b)
        conversation += [called("add", a=a, b=b), {"role": "tool", "name": "add", "content": answer}]
    else:
        answer = str(rng.randint(20, 98))
    return [*conversation, {"role": "assistant", "content": answer}]


def is_right(completions: list[list[Message]], answer: list[int], **columns: Any) -> list[float]:
    return [
        float(turns[-1]["content"] == str(right)) for turns, right in zip(completions, answer, strict=True)
    ]


def beginner(rng: random.Random, num_steps: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A model that has imitated the demonstrations, and its tokenizer."""
    tokenizer = build_tokenizer(PHRASES)
    model = build_model(tokenizer)
    imitate(model, tokenizer, demonstration, [add], num_steps=num_steps, rng=rng)
    return model, tokenizer


def problems(rng: random.Random) -> Dataset:
    sums = [(number(rng), number(rng)) for _ in range(2000)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": a + b} for a, b in sums]
    )


def build_trainer(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    dataset: Dataset,
    *,
    learning_rate: float = 1e-3,
    **options: Any,
) -> GRPOTrainer:
    config = GRPOConfig(
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=40,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        **options,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=is_right,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        tools=[add],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", default="runs/calculator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--imitation_steps", type=int, default=400)
    parser.add_argument("--max_steps", type=int, default=60)
    arguments = parser.parse_args()

    rng = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    model, tokenizer = beginner(rng, arguments.imitation_steps)
    trainer = build_trainer(
        model,
        tokenizer,
        problems(rng),
        output_dir=arguments.output_dir,
        max_steps=arguments.max_steps,
        logging_steps=5,
        seed=arguments.seed,
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"right in the first five steps: {rewards[0]:.0%}; in the last five: {rewards[-1]:.0%}")


if __name__ == "__main__":
    main()
