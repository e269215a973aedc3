"""The tool task: examples/turns/calculator.py from one warm start, with some options changed.

    python -m benchmarks.curves.tool_task DIRECTORY

writes the warm start, the model that has imitated the demonstrations: DIRECTORY/model.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
from pathlib import Path
from types import ModuleType

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common.results import ROOT
from benchmarks.step.run import assignment

EXAMPLES = str(ROOT / "examples/turns")
NUM_IMITATION_STEPS = 400


def example() -> ModuleType:
    """The example's script, which imports its neighbour as a script does."""
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    return importlib.import_module("calculator")


def write_start(directory: Path, num_steps: int = NUM_IMITATION_STEPS) -> None:
    torch.manual_seed(0)
    model, tokenizer = example().beginner(random.Random(0), num_steps)
    tokenizer.save_pretrained(directory / "model")
    model.save_pretrained(directory / "model")


def train(start: Path, directory: Path, num_steps: int, changed: dict[str, str]) -> None:
    """Train on the tool task and leave the metrics in a directory."""
    trainer = example().build_trainer(
        AutoModelForCausalLM.from_pretrained(start / "model", dtype=torch.float32),
        AutoTokenizer.from_pretrained(start / "model"),
        example().problems(random.Random(0)),
        output_dir=str(directory),
        max_steps=num_steps,
        logging_steps=50,
        **dict(assignment(f"{name}={value}") for name, value in changed.items()),
    )
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    write_start(parser.parse_args().directory)


if __name__ == "__main__":
    main()
