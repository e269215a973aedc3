"""GRPO steps beside TRL's on one GPU: writes `results/step-<hardware>.json`.

    python -m benchmarks.step.suite [--peer-site DIR] [--parts tune 1p5b 1p5b_longprompt 7b_lora standby ...]
    python -m benchmarks.step.suite --merge

Every measurement is a process of its own that leaves a record in --records, so the suite may be run in parts;
the result has the claims for which the records suffice (--merge only looks), and keeps those of the parts
that were not measured again. The libraries take turns: in every other round the other one is first. TRL runs
with what `tune` found to be fastest for the case; without a record of it, with the first candidate. A claim
is a ratio of medians over all rounds.

`standby` compares our step with the hand-over of memory and without, in turns within one process. `ablation`
runs our step with sharing of prompts on and off and with each activation policy.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.common.results import Record, medians, read_records
from benchmarks.common.suite import Claims, Suite
from benchmarks.rollout.cases import model_directory
from benchmarks.step.cases import (
    COMPARISONS,
    PEAK_FLOP_PER_S,
    TUNING_SHARE,
    Comparison,
    PeerSettings,
    Work,
)
from benchmarks.step.run import STANDBY_BLOCK

STANDBY_STEPS = 4 * STANDBY_BLOCK
MFU_COMPARISON = "1p5b"
ABLATION: dict[str, list[str]] = {
    "shared, keep": ["share_prompts=true", "activation_policy=keep"],
    "shared, selective": ["share_prompts=true", "activation_policy=selective"],
    "shared, full": ["share_prompts=true", "activation_policy=full"],
    "shared, offload": ["share_prompts=true", "activation_policy=offload"],
    "not shared, selective": ["share_prompts=false", "activation_policy=selective"],
    "not shared, full": ["share_prompts=false", "activation_policy=full"],
}


class StepSuite(Suite):
    """GRPO steps beside TRL's."""

    name = "step"
    parts = ("tune", *COMPARISONS, "standby", "ablation")
    has_all_claims = False
    extends_result = True

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=1)
        parser.add_argument("--micro-batch", type=int, default=16, help="ours, in completions")
        parser.add_argument(
            "--option", action="append", default=[], metavar="NAME=VALUE", help="of our configuration"
        )

    @staticmethod
    def part_of(record: Record) -> str:
        """What is compared with one another runs on one machine, one after the other."""
        # Tuning was once one record for all candidates of a case.
        return record["label"] if "label" in record else f"tune-{record['comparison']}"

    def measure(self, part: str) -> None:
        comparison = COMPARISONS.get(part, COMPARISONS[MFU_COMPARISON])
        work, num_warm_up, num_timed = comparison.work, comparison.num_warm_up, comparison.num_timed
        if part == "tune":
            self.tune()
        elif part == "standby":
            self._step(
                "colocate", work, part, num_warm_up, STANDBY_STEPS, *self._own_words(), "--keep", "in-turns"
            )
        elif part == "ablation":
            for label, assignments in ABLATION.items():
                words = [word for assignment in assignments for word in ("--option", assignment)]
                self._step("colocate", work, label, 2, 2, *self._own_words(), *words)
        else:
            peer = best_settings(read_records(self.records, self.part_of), part)
            for number in range(self.options.rounds):
                for framework in ("trl", "colocate") if number % 2 == 0 else ("colocate", "trl"):
                    words = peer.words() if framework == "trl" else self._own_words()
                    self._step(framework, work, part, num_warm_up, num_timed, *words)

    def tune(self) -> None:
        """The training half of TRL's step with each of its settings, on made-up completions."""
        for name, comparison in COMPARISONS.items():
            work = comparison.work
            work = dataclasses.replace(work, num_prompts=work.num_prompts // TUNING_SHARE)
            for settings in comparison.candidates:
                self._step("trl", work, f"tune-{name}", 1, 1, *settings.words(), "--made-up-completions")

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {
            "summary": summary(records),
            "peak_flop_per_s": PEAK_FLOP_PER_S,
            "peer_settings": {name: vars(best_settings(records, name)) for name in COMPARISONS},
        }

    def _own_words(self) -> list[str]:
        words = ["--micro-batch", str(self.options.micro_batch)]
        return words + [word for assignment in self.options.option for word in ("--option", assignment)]

    def _step(
        self, framework: str, work: Work, label: str, num_warm_up: int, num_timed: int, *words: str
    ) -> None:
        # Not within a measurement.
        model_directory(self.options.model_dir, "tiny" if self.options.tiny else work.model)
        self.run(
            "step.run", "--framework", framework, *work.words(),
            "--warm-up", num_warm_up, "--steps", num_timed, "--label", label, *words,
            "--model-dir", self.options.model_dir, "--out", self.out(f"{framework}-step"),
            is_peer=framework == "trl",
        )  # fmt: skip


# ── Claims ───────────────────────────────────────────────────────────────────────────────────────────────


def best_settings(records: list[Record], comparison: str) -> PeerSettings:
    """The candidate whose steps were shortest in the tuning of the case; the first if there was none."""
    tried = [
        (median_of(record["steps"][record["num_warm_up"] :]), record)
        for record in records
        if record["kind"] == "step" and record["label"] == f"tune-{comparison}"
    ]
    if not tried:
        return COMPARISONS[comparison].candidates[0]
    _, best = min(tried, key=lambda entry: entry[0])
    return PeerSettings(best["micro_batch"], best["gradient_checkpointing"], best["liger"])


def timed_steps(records: list[Record], framework: str, label: str) -> Iterator[Record]:
    """The steps after the warm-up, over all rounds, each with what its process says of it."""
    for record in records:
        if record["kind"] == "step" and (record["framework"], record["label"]) == (framework, label):
            shared = {key: value for key, value in record.items() if key != "steps"}
            for step in record["steps"][record["num_warm_up"] :]:
                yield {**shared, **step}


def median_of(steps: list[Record], value: str = "step_s") -> float:
    return statistics.median(step[value] for step in steps)


def utilization(step: Record, flop: str = "flop") -> float:
    """Model FLOP of a step's training phase over what the GPU could do in that time."""
    return step[flop]["total"] / step["phases_s"]["train"] / PEAK_FLOP_PER_S


def ratio(records: list[Record], name: str, comparison: Comparison) -> float | None:
    """TRL's median step over ours; None with fewer steps than the case asks for."""
    ours, theirs = (list(timed_steps(records, framework, name)) for framework in ("colocate", "trl"))
    if min(len(ours), len(theirs)) < comparison.num_timed:
        return None
    return median_of(theirs) / median_of(ours)


def standby_slowdown(records: list[Record]) -> float | None:
    """Median step with the hand-over over the median without; the first step of a block is of neither."""
    sides: dict[bool, list[Record]] = {False: [], True: []}
    for record in records:
        if record["kind"] == "step" and record["label"] == "standby":
            steps = record["steps"][record["num_warm_up"] :]
            for start in range(0, len(steps), STANDBY_BLOCK):
                block = steps[start : start + STANDBY_BLOCK]
                sides[block[0]["keeps_kv_cache"]] += block[1:]
    if min(map(len, sides.values())) < STANDBY_BLOCK - 1:
        return None
    return median_of(sides[False]) / median_of(sides[True])


def compute_claims(records: list[Record]) -> Claims:
    """Every claim; None where the records do not suffice."""
    claims = {f"step_{name}_vs_trl": ratio(records, name, case) for name, case in COMPARISONS.items()}
    steps = list(timed_steps(records, "colocate", MFU_COMPARISON))
    claims["train_mfu_1p5b"] = statistics.median(map(utilization, steps)) if steps else None
    claims["standby_slowdown"] = standby_slowdown(records)
    return claims


def summary(records: list[Record]) -> dict[str, Any]:
    """Medians by framework and label: what the claims are made of, and what is reported beside them."""
    steps_of = [r for r in records if r["kind"] == "step" and not r["label"].startswith("tune-")]
    labels = {(record["framework"], record["label"]): record for record in steps_of}
    rows = {}
    for (framework, label), record in labels.items():
        steps = list(timed_steps(records, framework, label))
        work = Work(**record["work"])
        row = {"num_steps": len(steps), "step_s": median_of(steps)}
        row["phases_s"] = medians([step["phases_s"] for step in steps])
        row["trained_tokens_per_s"] = work.num_tokens / row["phases_s"]["train"]
        row["driver_peak_gib"] = record.get("driver_peak_bytes", math.nan) / 2**30
        if framework == "colocate":
            num_processed = work.num_processed_tokens(shares_prompts=record["shares_prompts"])
            row["processed_tokens_per_s"] = num_processed / row["phases_s"]["train"]
            row["train_peak_gib"] = max(step["train_peak_bytes"] for step in steps) / 2**30
            is_lora = work.lora_rank is not None
            # With LoRA the frozen weights have no gradient, and 4 FLOP per token and weight count, not 6.
            name = "train_utilization_4n" if is_lora else "train_mfu"
            row[name] = statistics.median(map(utilization, steps))
            row[f"{name}_as_if_unshared"] = statistics.median(
                utilization(step, "flop_unshared") for step in steps
            )
        rows[f"{framework} {label}"] = row
    return rows


if __name__ == "__main__":
    StepSuite.main()
