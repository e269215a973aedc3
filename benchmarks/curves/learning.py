"""The quickstart's task with every filter, every loss at its defaults and every optimizer that is installed:
writes `results/learning-<hardware>.json`.

    python -m benchmarks.curves.learning --hardware h200 [--jobs 8] [--variants top_p vespo lion_32bit]

Every run is a process that starts from one warm start and takes `--steps` optimizer steps; the claim
`rise_<variant>` is the mean reward of its last rollouts less that of its first. What differs from the
quickstart's recipe is one option and, where steps are of another size, the learning rate: an optimizer whose
step has the gradient's sign or size needs another one than Adam.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.results import Record
from benchmarks.common.suite import Claims, Suite
from benchmarks.curves.run import warm_start

NUM_COMPARED = 4
"""Rollouts at the beginning and at the end of a run whose mean rewards are compared."""
RUN_S = 240.0
"""A run that takes longer has failed."""

FILTERS: dict[str, dict[str, Any]] = {
    "unfiltered": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "top_k_top_p_temperature": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
}
LOSSES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "vespo")},
    # Neither clips at its defaults: the steps of the recipe, four to a rollout, are too large for them.
    "cispo": {"learning_rate": 1e-4},
    "sapo": {"learning_rate": 2e-4},
}
LEARNING_RATES = {
    "sgd": 0.3,
    "lion": 1e-4,
    "adagrad": 2e-3,
    "rmsprop": 3e-5,
    "ademamix": 3e-4,
    "adafactor": 2e-4,
}
"""Learning rates by how an optimizer's name begins, after `paged_`; other optimizers take the recipe's."""
LOW_RANK = {"optim_target_modules": "all-linear"}


def optimizers() -> dict[str, dict[str, Any]]:
    from colocate.policy.optimizer.names import LOW_RANK as LOW_RANK_NAMES
    from colocate.policy.optimizer.names import OPTIMIZERS

    variants = {}
    for name in OPTIMIZERS:
        options: dict[str, Any] = {"optim": name}
        for beginning, learning_rate in LEARNING_RATES.items():
            if name.removeprefix("paged_").startswith(beginning):
                options["learning_rate"] = learning_rate
        variants[name] = options | (LOW_RANK if name in LOW_RANK_NAMES else {})
    return variants


def variants() -> dict[str, dict[str, Any]]:
    """The options of each run beside the recipe's."""
    return FILTERS | {name: {"loss_type": name, **other} for name, other in LOSSES.items()} | optimizers()


def rise(record: Record) -> float:
    """The mean reward of the last rollouts less that of the first."""
    rewards = record["reward"]
    return statistics.fmean(rewards[-NUM_COMPARED:]) - statistics.fmean(rewards[:NUM_COMPARED])


class LearningSuite(Suite):
    """The quickstart's task with every filter, loss and optimizer."""

    name = "learning"
    parts = ("variants",)
    has_tiny = False

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--jobs", type=int, default=8, help="runs side by side")
        parser.add_argument("--steps", type=int, default=100, help="optimizer steps, four to a rollout")
        parser.add_argument("--variants", nargs="+", choices=variants(), default=list(variants()))
        # Every command is measured anew.
        records = Path(tempfile.gettempdir()) / f"colocate-learning-records-{os.getpid()}"
        parser.set_defaults(records=records)

    def measure(self, part: str) -> None:
        start = warm_start(self.records / "start")

        def run(variant: str) -> None:
            options = [f"{name}={value}" for name, value in variants()[variant].items()]
            self.run(
                "curves.run", "--steps", self.options.steps, "--start", start,
                "--label", f"variant={variant}", "--out", self.out(variant),
                *(["--option", *options] if options else []),
                timeout_s=RUN_S,
                OMP_NUM_THREADS="1",
            )  # fmt: skip

        first, *others = self.options.variants
        run(first)  # alone, so that it compiles the kernels for all
        with ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(run, others))
        self.failures.clear()  # a package that is not installed: the result names them

    def claims(self, records: list[Record]) -> Claims:
        """The rise of every run that came to its end."""
        return {f"rise_{record['variant']}": rise(record) for record in records}

    def setup(self, records: list[Record]) -> dict[str, Any]:
        failed = set(self.options.variants) - {record["variant"] for record in records}
        return {"num_compared_rollouts": NUM_COMPARED, "failed": sorted(failed)}


if __name__ == "__main__":
    LearningSuite.main()
