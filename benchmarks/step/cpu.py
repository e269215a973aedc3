"""GRPO steps on a CPU: colocate beside TRL with transformers generation, same model, same work, taking turns.

    python -m benchmarks.step.cpu [--rounds 3] [--steps 4]

Random weights: speed does not depend on their values. Both libraries run their own `train()` with the same
options, prompts, group size and lengths. A round is one run of each; its first step (warm-up) is not counted.
Rollout is the time to generate; training is everything else in a step (rewards are free here).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results import Record
from benchmarks.common.suite import Claims, Suite
from benchmarks.rollout.cases import SHAPES, model_directory
from benchmarks.step.cases import Work

WORK = Work("cpu", 8, 8, 64, 128)
GENERATION = {"trl": "_generate_single_turn", "colocate": "rollout"}
"""The phase of a step in which each library generates."""


class CpuSuite(Suite):
    """Steps on a CPU beside TRL's."""

    name, hardware = "step", "cpu"
    parts = ("steps",)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--steps", type=int, default=4, help="steps a round, the warm-up included")
        # Every command is measured anew.
        records = Path(tempfile.gettempdir()) / f"colocate-step-cpu-records-{os.getpid()}"
        parser.set_defaults(records=records)

    def measure(self, part: str) -> None:
        model_directory(self.options.model_dir, "tiny" if self.options.tiny else WORK.model)
        for _ in range(self.options.rounds):
            for framework in GENERATION:
                self.run(
                    "step.run", "--framework", framework, *WORK.words(),
                    "--micro-batch", WORK.num_completions, "--no-gradient-checkpointing",
                    "--warm-up", 1, "--steps", self.options.steps - 1, "--label", "cpu",
                    "--model-dir", self.options.model_dir, "--out", self.out(framework),
                )  # fmt: skip

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {"shape": SHAPES[WORK.model], "work": vars(WORK), "num_threads": torch.get_num_threads()}


def medians(records: list[Record], framework: str) -> dict[str, float]:
    """Tokens per second in rollout and in training, and seconds per step."""
    rollout, training, steps_s = [], [], []
    for record in records:
        if record["framework"] == framework:
            work = Work(**record["work"])
            for step in record["steps"][record["num_warm_up"] :]:
                rollout_s = step["phases_s"][GENERATION[framework]]
                rollout.append(work.num_completions * work.new_tokens / rollout_s)
                training.append(work.num_tokens / (step["step_s"] - rollout_s))
                steps_s.append(step["step_s"])
    names = ("rollout_tokens_per_s", "training_tokens_per_s", "step_s")
    return dict(zip(names, map(statistics.median, (rollout, training, steps_s)), strict=True))


def compute_claims(records: list[Record]) -> Claims:
    """Every claim; none where a library has no record."""
    if {record["framework"] for record in records} != set(GENERATION):
        return {}
    ours, theirs = medians(records, "colocate"), medians(records, "trl")
    return {
        "rollout_tokens_per_s": ours["rollout_tokens_per_s"],
        "training_tokens_per_s": ours["training_tokens_per_s"],
        "rollout_vs_trl": ours["rollout_tokens_per_s"] / theirs["rollout_tokens_per_s"],
        "training_vs_trl": ours["training_tokens_per_s"] / theirs["training_tokens_per_s"],
        "step_vs_trl": theirs["step_s"] / ours["step_s"],
    }


if __name__ == "__main__":
    CpuSuite.main()
