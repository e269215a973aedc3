"""Make a small language model that does a task badly, for a run file of recipes/small/ to train with GRPO.

    python examples/small_models/warm_start.py addition --output_dir runs/addition [--size 1m] [--digits 3]

A Qwen3 of random parameters imitates somebody who makes mistakes; it can become as good as the demonstrator,
and reward takes it further. Nothing is downloaded. Writes

    OUTPUT_DIR/model   model and tokenizer, as Hugging Face writes them
    OUTPUT_DIR/data    train.jsonl, the problems to train on, and test.jsonl, held-out ones; not for
                       chain_sum, whose problems reasoning_gym generates
    OUTPUT_DIR/imitation.json   steps, mean loss of the last hundred in nats per token, seconds of a core
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import chain_sum
import columns
import torch

# The chat format and the tasks of several turns are those of the examples next door.
sys.path.insert(0, str(Path(__file__).parents[1] / "turns"))

import calculator
import game
from chat import build_model, build_tokenizer, imitate

SIZES: dict[str, dict[str, int]] = {
    "200k": {},
    "1m": dict(hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=6),
    "3m": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8),
    "10m": dict(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6, head_dim=64
    ),
    "30m": dict(
        hidden_size=640, intermediate_size=1728, num_hidden_layers=7, num_attention_heads=10, head_dim=64
    ),
    # As many heads of keys as of queries, so that its KV cache is as large as one of a larger model.
    "100m": dict(
        hidden_size=896,
        intermediate_size=2304,
        num_hidden_layers=11,
        num_attention_heads=14,
        num_key_value_heads=14,
        head_dim=64,
        max_position_embeddings=512,
    ),
}
"""What models of about so many parameters differ in from the smallest one."""
LEARNING_RATES = {"200k": 3e-3, "1m": 2e-3, "3m": 1.5e-3, "10m": 1e-3, "30m": 6e-4, "100m": 4e-4}
NUM_TRAINED, NUM_EVALUATED = 8192, 1024
IMITATION = "imitation.json"

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task as imitation needs it."""

    phrases: list[str]
    """Texts that are one token each."""
    demonstrate: Callable[[random.Random], list[dict[str, Any]]]
    row: Callable[..., Row] | None = None
    """Draws a row of one side of the split, `held_out` or not; None: the run file generates its data."""
    tools: list[Any] = field(default_factory=list)
    num_steps: int = 250
    """Steps of imitation. After too few the model knows the form, but does not yet look at what it answers
    to, and reward finds nothing to strengthen."""


def addition_task(num_digits: int) -> Task:
    def row(rng: random.Random, *, held_out: bool) -> Row:
        return columns.as_row(*columns.problem(rng, num_digits, held_out=held_out))

    # Longer sums need a more careful demonstrator, or too few come out right.
    carelessness = min(columns.CARELESSNESS, 1 - 0.42 ** (1 / num_digits))
    shown = partial(columns.demonstration, num_digits=num_digits, carelessness=carelessness)
    return Task(columns.PHRASES, shown, row)


def calculator_row(rng: random.Random, *, held_out: bool) -> Row:
    """A sum of one side of a split like that of the addition."""
    while True:
        a, b = calculator.number(rng), calculator.number(rng)
        if columns.is_held_out(a, b) == held_out:
            return {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": a + b}


SECRETS = itertools.cycle(game.NUMBERS)


def game_row(rng: random.Random, *, held_out: bool) -> Row:
    """The next secret number. There are seven, in turns, so that every seven rows have each of them."""
    return {"prompt": game.PROMPT, "secret": next(SECRETS)}


def tasks(num_digits: int) -> dict[str, Callable[[], Task]]:
    """What makes each task; a library that only one of them needs is imported for that one."""
    return {
        "addition": lambda: addition_task(num_digits),
        "chain_sum": lambda: Task(chain_sum.PHRASES, chain_sum.Demonstrations(), num_steps=600),
        "calculator": lambda: Task(
            calculator.PHRASES, calculator.demonstration, calculator_row, [calculator.add]
        ),
        "game": lambda: Task(
            game.PHRASES,
            game.demonstration,
            game_row,
            [game.Game().guess],
            num_steps=game.NUM_IMITATION_STEPS,
        ),
    }


def write_data(directory: Path, row: Callable[..., Row], rng: random.Random) -> None:
    """Write train.jsonl and test.jsonl, which `colocate train` takes for the splits of these names."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, held_out, count in (("train", False, NUM_TRAINED), ("test", True, NUM_EVALUATED)):
        lines = [json.dumps(row(rng, held_out=held_out)) + "\n" for _ in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=tasks(3))
    parser.add_argument("--size", choices=SIZES, default="1m", help="parameters (default: %(default)s)")
    parser.add_argument("--digits", type=int, default=3, help="of the addition (default: %(default)s)")
    parser.add_argument("--imitation_steps", type=int, help="default: as many as the task needs")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)

    rng = random.Random(zlib.crc32(f"{options.task} {options.seed}".encode()))
    torch.manual_seed(options.seed)
    task = tasks(options.digits)[options.task]()
    tokenizer = build_tokenizer(task.phrases)
    model = build_model(tokenizer, **SIZES[options.size])
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{options.task}: {model.num_parameters() / 1e6:.2f} million parameters", flush=True)
    num_steps, begin_s = options.imitation_steps or task.num_steps, time.process_time()
    losses = imitate(
        model, tokenizer, task.demonstrate, task.tools,
        num_steps=num_steps,
        rng=rng,
        learning_rate=LEARNING_RATES[options.size],
    )  # fmt: skip
    model.save_pretrained(options.output_dir / "model")
    tokenizer.save_pretrained(options.output_dir / "model")
    if task.row is not None:
        write_data(options.output_dir / "data", task.row, rng)
    imitation = {
        "num_steps": num_steps,
        "loss": fmean(losses[-100:]),
        "core_s": time.process_time() - begin_s,
    }
    (options.output_dir / IMITATION).write_text(json.dumps(imitation, indent=1) + "\n")


if __name__ == "__main__":
    main()
