"""The native engine beside vLLM, all cases on one GPU: writes `results/rollout-<hardware>.json`.

    python -m benchmarks.rollout.suite [--vllm-site DIR] [--parts 1.5b 7b floor cold_start logprobs]
    python -m benchmarks.rollout.suite --merge

Every measurement is a process of its own that leaves a record in --records, so the suite may be run in parts;
the result is written as soon as the records suffice for every claim (--merge only looks). The engines take
turns: in each round both run all cases of a model, and in every other round the other one is first (--first
says which begins, for rounds that are run one by one). A ratio is one of medians over all rounds of a run; of
vLLM's variants the best counts.

A run is of one commit on one machine, and compares only with itself. How fast vLLM is depends on the host,
too: the result keeps all runs, a later one is added, and a claim is the median over the runs that have it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.results import committed, origin, published_records, write_suite_result
from benchmarks.common.runner import Record, Runner, read_records
from benchmarks.rollout.cases import CASES, model_directory
from benchmarks.rollout.run import VARIANTS

MIN_REPETITIONS = 3
NUM_COLD_STARTS = 3
FLOOR_CASE = "1p5b_512seq"
PARTS = ("1.5b", "7b", "floor", "cold_start", "logprobs")
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")


class Suite(Runner):
    """Runs the measurements as processes."""

    def __init__(self, options: argparse.Namespace, commit: str) -> None:
        super().__init__(
            options.records,
            commit,
            extra_words=["--tiny"] if options.tiny else [],
            peer_site=options.vllm_site,
        )
        self.options = options

    def model(self, size: str) -> Path:
        return model_directory(self.options.model_dir, "tiny" if self.options.tiny else size)

    def rollouts(self, size: str) -> None:
        names = [name for name, case in CASES.items() if case.model == size]
        if self.options.cases:
            names = [name for name in names if name in self.options.cases]
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

    def floor(self) -> None:
        if not self.options.tiny:  # it needs CUDA, and this case
            self.run("rollout.floor", FLOOR_CASE, "--out", self.out("floor"))

    def cold_starts(self) -> None:
        directory = self.model("1.5b")
        for _ in range(NUM_COLD_STARTS):
            with tempfile.TemporaryDirectory() as empty:
                start_s = time.time()
                output = self.run("rollout.cold_start", directory, **dict.fromkeys(CACHES, empty))
            if output is not None:
                record = {
                    "kind": "cold_start",
                    "seconds": float(output.split()[-1]) - start_s,
                    **origin(self.environment["COLOCATE_COMMIT"]),
                }
                self.out("cold-start").write_text(json.dumps(record, indent=1) + "\n")

    def logprobs(self) -> None:
        directory = self.model("1.5b")
        for part in ("native", "vllm", "trainer"):
            if self.run("rollout.logprobs", part, directory, self.records, is_peer=part == "vllm") is None:
                return


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


def run_of(record: Record) -> str:
    """Which run it is of."""
    return f"{record['commit']} on {record['machine']}"


def by_run(records: list[Record]) -> dict[str, list[Record]]:
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(run_of(record), []).append(record)
    return runs


def compute_claims(records: list[Record]) -> dict[str, float | None]:
    """Every claim, the median over runs; None where no run's records suffice."""
    of_runs = [claims_of_run(of_run) for of_run in by_run(records).values()]
    claims: dict[str, float | None] = {}
    for name in claims_of_run([]):
        known = [value for of_run in of_runs if (value := of_run[name]) is not None]
        claims[name] = statistics.median(known) if known else None
    return claims


def claims_of_run(records: list[Record]) -> dict[str, float | None]:
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

    starts = [record["seconds"] for record in records if record["kind"] == "cold_start"]
    claims["start_cold_s"] = statistics.median(starts) if len(starts) >= MIN_REPETITIONS else None

    # Of vLLM's two gaps the smaller one.
    gaps = last("logprobs")
    claims["logprob_gap_vs_vllm"] = None
    if gaps is not None:
        theirs = min(gaps["vllm_gap_sampling"], gaps["vllm_gap_same_completions"])
        claims["logprob_gap_vs_vllm"] = gaps["native_gap"] / theirs
    return claims


def merge(options: argparse.Namespace) -> None:
    """Print the claims, and write the result if all are there."""
    new = read_records(options.records, run_of)
    runs = by_run([] if options.tiny else published_records("rollout", options.hardware)) | by_run(new)
    records = [record for of_run in runs.values() for record in of_run]
    summary: dict[str, Any] = {
        run: {"tokens_per_s": tokens_per_s(of_run), "claims": claims_of_run(of_run)}
        for run, of_run in runs.items()
    }
    claims = compute_claims(records)
    print(json.dumps({"runs": summary, "claims": claims}, indent=1))
    write_suite_result(
        "rollout",
        options.hardware,
        claims,
        records,
        part=run_of,
        runs=summary,
        cases={name: vars(case) for name, case in CASES.items()},
    )


def parse() -> argparse.Namespace:
    temporary = Path(tempfile.gettempdir())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cases", nargs="+", choices=CASES, help="of the rollouts, only these")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--first", choices=("vllm", "native"), default="vllm", help="of the first round")
    parser.add_argument("--repetitions", type=int, default=2, help="of each case in a round")
    parser.add_argument("--vllm-variants", nargs="+", choices=VARIANTS, default=VARIANTS[:1])
    parser.add_argument("--vllm-site", help="a folder with vLLM, put on PYTHONPATH of vLLM's processes only")
    parser.add_argument("--records", type=Path, default=temporary / "colocate-rollout-records")
    parser.add_argument("--model-dir", type=Path, default=temporary / "colocate-models")
    parser.add_argument("--merge", action="store_true", help="measure nothing")
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--tiny", action="store_true", help="tiny models and cases, to try the scripts")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if not options.merge:
        suite = Suite(options, committed())
        steps = {
            "1.5b": lambda: suite.rollouts("1.5b"),
            "7b": lambda: suite.rollouts("7b"),
            "floor": suite.floor,
            "cold_start": suite.cold_starts,
            "logprobs": suite.logprobs,
        }
        for part in options.parts:
            steps[part]()
    merge(options)
    if not options.merge:
        suite.exit_if_failed()


if __name__ == "__main__":
    main()
