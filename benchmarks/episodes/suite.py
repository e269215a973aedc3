"""Episodes of several turns beside TRL's, on one GPU: writes `results/episodes-<hardware>.json`.

    python -m benchmarks.episodes.suite [--peer-site DIR] [--parts engine turns carry_over refill]
    python -m benchmarks.episodes.suite --merge

Every measurement is a process of its own that leaves a record in --records, so the suite may be run in parts;
the result is written as soon as the records suffice for every claim (--merge only looks).

    engine       open rollouts beside `generate`, and what they read (engine.py)
    turns        GRPO steps with a tool that answers at once, and with one that takes 50 ms, in turns within a
                 process of either library
    carry_over   steps of ragged completions with `max_policy_lag` 0, and with 1
    refill       steps in which half of the groups teach nothing and are replaced

TRL runs with vLLM in the same process, asleep while it trains and with the largest micro-batch that training
was fastest with on as many tokens (`results/step-h200.json`). --peer-awake measures it with a vLLM that never
sleeps and so keeps its prefixes from turn to turn; of TRL's settings those with the shortest steps count. A
claim is a ratio of medians over all steps after the warm-up, but for `carry_over`, where it is one of means.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.common.results import Record, by_part, medians
from benchmarks.common.suite import Claims, Suite
from benchmarks.episodes.cases import CASE
from benchmarks.episodes.run import TOKENS
from benchmarks.rollout.cases import model_directory

TOOL_S = (0.0, 0.05)
"""Seconds that the tool takes, in turns."""
CARRY_STEPS = (2, 4)
"""To warm up, in which the lag builds up, and to be timed."""
REFILL_STEPS = (1, 4)
"""By the first step the share of dull groups becomes known."""
DULL_SHARE = 0.5
PEER_WORDS = ("--micro-batch", "8", "--no-gradient-checkpointing", "--liger")
PEER_AWAKE_MEMORY = 0.3
"""Share of the GPU for a vLLM that never sleeps: all episodes of `turns` fit, and training has the rest."""


class EpisodesSuite(Suite):
    """Episodes of several turns beside TRL's."""

    name = "episodes"
    parts = ("engine", "turns", "carry_over", "refill")

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--repetitions", type=int, default=2, help="of each way in `engine`")
        parser.add_argument("--steps", type=int, default=5, help="timed ones of each library in `turns`")
        parser.add_argument(
            "--frameworks", nargs="+", choices=("trl", "colocate"), default=["trl", "colocate"]
        )
        parser.add_argument("--peer-awake", action="store_true", help="TRL's vLLM never sleeps")
        parser.add_argument("--peer-word", action="append", default=[], help="of run.py, for TRL, at the end")

    @staticmethod
    def part_of(record: Record) -> str:
        """What is compared with one another runs on one machine, one after the other."""
        return "engine" if record["kind"] == "open engine" else record["label"]

    def measure(self, part: str) -> None:
        # Not within a measurement.
        model_directory(self.options.model_dir, "tiny" if self.options.tiny else CASE.model)
        if part == "engine":
            self.run(
                "episodes.engine", "--repetitions", self.options.repetitions, "--no-lockstep",
                "--model-dir", self.options.model_dir, "--out", self.out("engine"),
            )  # fmt: skip
        elif part == "turns":
            for framework in self.options.frameworks:
                words = [*PEER_WORDS, *self.options.peer_word] if framework == "trl" else []
                if framework == "trl" and self.options.peer_awake:
                    words += ["--no-vllm-sleep", "--vllm-memory", str(PEER_AWAKE_MEMORY)]
                self._steps(framework, part, (1, self.options.steps), "--tool-s", *map(str, TOOL_S), *words)
        elif part == "carry_over":
            for lag in (0, 1):
                self._steps("colocate", part, CARRY_STEPS, "--single-turn", "--max-policy-lag", str(lag))
        else:
            self._steps("colocate", part, REFILL_STEPS, "--single-turn", "--dull-share", str(DULL_SHARE))

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {"summary": summary(records)}

    def _steps(self, framework: str, label: str, num_steps: tuple[int, int], *words: str) -> None:
        num_warm_up, num_timed = num_steps
        self.run(
            "episodes.run", "--framework", framework, "--label", label,
            "--warm-up", num_warm_up, "--steps", num_timed, *words,
            "--model-dir", self.options.model_dir, "--out", self.out(f"{framework}-{label}"),
            is_peer=framework == "trl",
        )  # fmt: skip


# ── Claims ───────────────────────────────────────────────────────────────────────────────────────────────


def compute_claims(records: list[Record]) -> Claims:
    """Every claim; None where the records do not suffice.

    Raises:
        ValueError: the libraries' steps had different tokens.
    """
    check_tokens(records)
    opened = [record for record in records if record["kind"] == "open engine"]
    return {
        "open_vs_generate": over_engines(
            opened, lambda r: tokens_per_s(r, "open") / tokens_per_s(r, "generate")
        ),
        "multiturn_step_vs_trl": vs_trl(records, "step_s", TOOL_S[1]),
        "multiturn_rollout_vs_trl": vs_trl(records, "rollout_s", TOOL_S[0]),
        "prefilled_tokens_over_minimum": over_engines(opened, prefilled_over_minimum),
        "carry_over_step_ragged": carry_over(records),
        "refill_overhead": refill_overhead(records),
    }


def over_engines(records: list[Record], figure: Callable[[Record], float]) -> float | None:
    """The median of a figure over all runs of engine.py."""
    return statistics.median(map(figure, records)) if records else None


def tokens_per_s(record: Record, way: str) -> float:
    return statistics.median(r["num_tokens"] / r["seconds"] for r in record["repetitions"][way])


def prefilled_over_minimum(record: Record) -> float:
    """The most tokens that turns have read in prefills, over as many as there are to read."""
    ways = [repetitions for way, repetitions in record["repetitions"].items() if way.startswith("turns")]
    return max(r["num_prefilled"] for repetitions in ways for r in repetitions) / record["least_prefilled"]


def timed_steps(records: list[Record], framework: str, label: str) -> list[Record]:
    """The steps after the warm-up, over all processes, each with what its process says of it."""
    return [
        {**record, **step}
        for record in records
        if record["kind"] == "episodes" and (record["framework"], record["label"]) == (framework, label)
        for step in record["steps"][record["num_warm_up"] :]
    ]


def settings_of(step: Record) -> str:
    """How a process's steps were run, in words."""
    values = [f"{name} {step[name]}" for name in ("tool_s", "vllm_sleep") if step.get(name) is not None]
    values += [
        f"{name} {step[name]}" for name in ("micro_batch", "max_policy_lag", "dull_share") if step[name]
    ]
    return ", ".join([step["framework"], step["label"], *values])


def check_tokens(records: list[Record]) -> None:
    """Raises ValueError if the libraries' steps had different tokens."""
    steps = [step for name in ("trl", "colocate") for step in timed_steps(records, name, "turns")]
    found = {name: {step[name] for step in steps} for name in TOKENS}
    if any(len(counts) > 1 for counts in found.values()):
        raise ValueError(f"Steps had different tokens, so their times cannot be compared: {found}.")


def shortest(steps: list[Record], value: str) -> float | None:
    """The median of the settings with the shortest median; None without steps."""
    of_settings = by_part(steps, settings_of).values()
    return min((statistics.median(step[value] for step in some) for some in of_settings), default=None)


def vs_trl(records: list[Record], value: str, tool_s: float) -> float | None:
    """TRL's median over ours, of steps with a tool that takes `tool_s`."""
    theirs, ours = (
        shortest([step for step in timed_steps(records, name, "turns") if step["tool_s"] == tool_s], value)
        for name in ("trl", "colocate")
    )
    return None if theirs is None or ours is None else theirs / ours


def carry_over(records: list[Record]) -> float | None:
    """The mean step without a lag over the mean step with it: with a lag rollouts take turns, a long one that
    completes the next batch as well and a short one, of which a median would see but one."""
    steps = timed_steps(records, "colocate", "carry_over")
    seconds = []
    for lag in (0, 1):
        of_lag = [step["step_s"] for step in steps if step["max_policy_lag"] == lag]
        if len(of_lag) < CARRY_STEPS[1]:
            return None
        seconds.append(statistics.fmean(of_lag))
    return seconds[0] / seconds[1]


def refill_overhead(records: list[Record]) -> float | None:
    """Tokens generated for each token trained, over the fewest for the share of dull groups."""
    steps = timed_steps(records, "colocate", "refill")
    if not steps:
        return None
    num_generated, num_trained = (
        sum(step[name] for step in steps) for name in ("num_sampled", "num_trained")
    )
    return num_generated / num_trained * (1 - DULL_SHARE)


def summary(records: list[Record]) -> dict[str, Any]:
    """Medians by settings: what the claims are made of, and what is reported beside them."""
    rows: dict[str, Any] = {}
    steps = [
        step
        for framework in ("trl", "colocate")
        for label in EpisodesSuite.parts
        for step in timed_steps(records, framework, label)
    ]
    for settings, some in by_part(steps, settings_of).items():
        figures = medians([{name: step[name] for name in ("step_s", "rollout_s", *TOKENS)} for step in some])
        phases = medians([step["phases_s"] for step in some])
        rows[settings] = {"num_steps": len(some), **figures, "phases_s": phases}
    for record in records:
        if record["kind"] == "open engine":
            rows["engine"] = {way: tokens_per_s(record, way) for way in record["repetitions"]}
    return rows


if __name__ == "__main__":
    EpisodesSuite.main()
