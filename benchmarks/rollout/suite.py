"""The native engine beside vLLM, all cases on one GPU: writes `results/rollout-<hardware>.json`.

    python -m benchmarks.rollout.suite [--peer-site DIR] [--parts 1.5b 7b floor logprobs] [--cases 1p5b_8seq]
    python -m benchmarks.rollout.suite --merge

Every measurement is a process of its own that leaves a record in --records, so the suite may be run in parts;
the result has the claims for which the records suffice (--merge only looks). The engines take
turns: in each round both run all cases of a model, and in every other round the other one is first (--first
says which begins, for rounds that are run one by one). A ratio is one of medians over all rounds of a run; of
vLLM's variants the best counts.

A run is of one commit on one machine, and compares only with itself. How fast vLLM is depends on the host,
too: the result keeps all runs, a later one is added, and a claim is the median over the runs that have it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.results import Record, by_part
from benchmarks.common.suite import Claims, Suite
from benchmarks.rollout.cases import CASES, model_directory
from benchmarks.rollout.run import VARIANTS

MIN_REPETITIONS = 3
FLOOR_CASE = "1p5b_512seq"


class RolloutSuite(Suite):
    """The native engine beside vLLM."""

    name = "rollout"
    parts = ("1.5b", "7b", "floor", "logprobs")
    has_all_claims = False
    extends_result = True

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=2)
        parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
        parser.add_argument("--first", choices=("vllm", "native"), default="vllm", help="of the first round")
        parser.add_argument("--repetitions", type=int, default=2, help="of each case in a round")
        parser.add_argument("--vllm-variants", nargs="+", choices=VARIANTS, default=VARIANTS[:1])

    @staticmethod
    def part_of(record: Record) -> str:
        """The run that a record is of."""
        return f"{record['commit']} on {record['machine']}"

    def measure(self, part: str) -> None:
        if part in ("1.5b", "7b"):
            self.rollouts(part)
        elif part == "floor" and not self.options.tiny:  # it needs CUDA, and this case
            self.run("rollout.floor", FLOOR_CASE, "--out", self.out("floor"))
        elif part == "logprobs":
            for engine in ("native", "vllm", "trainer"):
                words = ("rollout.logprobs", engine, self.model("1.5b"), self.records)
                if self.run(*words, is_peer=engine == "vllm") is None:
                    return

    def model(self, size: str) -> Path:
        return model_directory(self.options.model_dir, "tiny" if self.options.tiny else size)

    def rollouts(self, size: str) -> None:
        names = [name for name in self.options.cases if CASES[name].model == size]
        native_names = [name for name in names if CASES[name].logprobs]
        self.model(size)  # not within a measurement
        for number in range(self.options.rounds):
            contestants = [("vllm", variant) for variant in self.options.vllm_variants] + [("native", "")]
            if (number % 2 == 0) != (self.options.first == "vllm"):
                contestants.reverse()
            for engine, variant in contestants:
                self.run(
                    "rollout.run", "--engine", engine,
                    *(["--vllm-variant", variant] if variant else []),
                    "--cases", *(names if engine == "vllm" else native_names),
                    "--repetitions", str(self.options.repetitions),
                    "--model-dir", self.options.model_dir,
                    "--out", self.out(f"{engine}-{size}"),
                    is_peer=engine == "vllm",
                )  # fmt: skip

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {
            "runs": {
                run: {"tokens_per_s": tokens_per_s(of_run), "claims": claims_of_run(of_run)}
                for run, of_run in by_part(records, self.part_of).items()
            },
            "cases": {name: vars(case) for name, case in CASES.items()},
        }


# ── Claims ───────────────────────────────────────────────────────────────────────────────────────────────


def repetitions(records: list[Record]) -> Iterator[Record]:
    """Every repetition of every rollout, with what it was of."""
    for record in records:
        if record["kind"] == "rollout":
            for name, case in record["cases"].items():
                for repetition in case["repetitions"]:
                    yield {
                        "case": name,
                        "engine": record["engine"],
                        "variant": record["variant"],
                        **repetition,
                    }


def tokens_per_s(records: list[Record]) -> dict[str, dict[str, float]]:
    """Case -> variant -> median, where there are `MIN_REPETITIONS`."""
    medians: dict[str, dict[str, float]] = {}
    ordered = sorted(repetitions(records), key=lambda r: (r["case"], r["variant"]))
    for (case, variant), group in itertools.groupby(ordered, key=lambda r: (r["case"], r["variant"])):
        rates = [repetition["tokens_per_s"] for repetition in group]
        if len(rates) >= MIN_REPETITIONS:
            medians.setdefault(case, {})[variant] = statistics.median(rates)
    return medians


def compute_claims(records: list[Record]) -> Claims:
    """Every claim, the median over runs; None where no run's records suffice."""
    of_runs = [claims_of_run(of_run) for of_run in by_part(records, RolloutSuite.part_of).values()]
    claims: Claims = {}
    for name in claims_of_run([]):
        known = [value for of_run in of_runs if (value := of_run[name]) is not None]
        claims[name] = statistics.median(known) if known else None
    return claims


def claims_of_run(records: list[Record]) -> Claims:
    """Every claim as one run has it; None where its records do not suffice."""
    rates = tokens_per_s(records)

    def ratio(native_case: str, vllm_case: str) -> float | None:
        ours = rates.get(native_case, {}).get("native")
        theirs = [rate for variant, rate in rates.get(vllm_case, {}).items() if variant != "native"]
        return None if ours is None or not theirs else ours / max(theirs)

    def last(kind: str) -> Record | None:
        return next((record for record in reversed(records) if record["kind"] == kind), None)

    claims = {f"rollout_{name}_vs_vllm": ratio(name, name) for name, case in CASES.items() if case.logprobs}
    claims["rollout_1p5b_512seq_vs_vllm_nologprobs"] = ratio("1p5b_512seq", "1p5b_512seq_nologprobs")

    # A rollout of N tokens is taken for N steps: prefill, scheduling and copies to the host are in it.
    floor, rate = last("floor"), rates.get(FLOOR_CASE, {}).get("native")
    claims["decode_fraction_of_floor"] = None
    if floor is not None and rate is not None:
        claims["decode_fraction_of_floor"] = floor["floor_s"] / (CASES[FLOOR_CASE].num_seqs / rate)

    # Of vLLM's two gaps the smaller one.
    gaps = last("logprobs")
    claims["logprob_gap_vs_vllm"] = None
    if gaps is not None:
        theirs = min(gaps["vllm_gap_sampling"], gaps["vllm_gap_same_completions"])
        claims["logprob_gap_vs_vllm"] = gaps["native_gap"] / theirs
    return claims


if __name__ == "__main__":
    RolloutSuite.main()
