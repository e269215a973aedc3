"""The speed of rollouts in 8 bits, and how far they are from the policy: writes
`results/precision-<hardware>.json`.

    python -m benchmarks.precision.suite --hardware h100 [--parts 7b_256seq log_ratios] [--limit-s 300]
    python -m benchmarks.precision.suite --hardware h100 --parts 7b_256seq --peer-site DIR

A part is a case of `cases.py`, measured in 16 and in 8 bits in turn by one process, or "log_ratios", for
which a model is trained first. Parts that are not measured anew keep their published records. With
--peer-site vLLM runs `PEER_CASE` in 8 bits, too.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.common.results import Record
from benchmarks.common.suite import Claims, Suite
from benchmarks.precision.cases import KV_CACHES, SPEED_CASES, STEPS_PER_LOOK

SPEEDUPS = {
    "fp8_kv_speedup_1p5b_4k_256seq": ("1p5b_4k_256seq", "fp8_kv", "decode_s_per_look"),
    "fp8_speedup_1p5b_4k_256seq": ("1p5b_4k_256seq", "fp8", "decode_s_per_look"),
    "fp8_speedup_7b_256seq": ("7b_256seq", "fp8", "seconds"),
    "fp8_kv_speedup_1p5b_512seq": ("1p5b_512seq", "fp8_kv", "seconds"),
    "fp8_speedup_1p5b_512seq": ("1p5b_512seq", "fp8", "seconds"),
}
"""The case, the precision and the time of each claim; times are compared with those of bf16."""
PEER_CASE = "7b_256seq"


class PrecisionSuite(Suite):
    """Rollouts in 8 bits beside those in 16."""

    name = "precision"
    parts = (*SPEED_CASES, "log_ratios")
    has_all_claims = False
    extends_result = True

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--repetitions", type=int, default=2)

    @staticmethod
    def part_of(record: Record) -> str:
        return str(record.get("case", record["kind"]))

    def measure(self, part: str) -> None:
        if self.time_is_up():
            return
        if part == "log_ratios":
            self.run("precision.log_ratios", "--out", self.out(part))
        else:
            repetitions = ("--repetitions", self.options.repetitions)
            self.run("precision.speed", part, *repetitions, "--out", self.out(part))
        if part == PEER_CASE and self.options.peer_site:
            for kv_cache in KV_CACHES:
                words = (
                    "precision.peer",
                    part,
                    "--kv-cache",
                    kv_cache,
                    "--out",
                    self.out(f"peer-{kv_cache}"),
                )
                self.run(*words, is_peer=True)

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {}


def compute_claims(records: list[Record]) -> Claims:
    """Every claim; None where its records are missing.

    - `*_speedup_<case>`: time in bf16 over that in 8 bits, medians; of whole rollouts, in the case of 4,096
      tokens of decoding alone.
    - `fp8_7b_256seq_vs_vllm_fp8`: vLLM's time over ours, with the faster of its KV caches.
    - `step_ms_<case>_<precision>` and `rollout_s_…`: of a decode step and of a whole rollout, medians.
    - `kv_cache_gb_…` and `weight_gb_…`: memory of the KV cache, and of weights beside the trainer's.
    - `log_ratio_sd_<precision>`, `log_ratio_max_<precision>`: of a token's log-ratio.
    - `effective_share_<precision>_<tokens>`: of the samples, weighted by the ratios of whole sequences.
    """
    cases = {record["case"]: record["runs"] for record in records if record["kind"] == "speed"}
    claims: Claims = {}
    for name, (case, precision, time) in SPEEDUPS.items():
        runs = cases.get(case, {})
        is_measured = "bf16" in runs and precision in runs
        claims[name] = _median(runs["bf16"], time) / _median(runs[precision], time) if is_measured else None
    for case, runs in cases.items():
        for precision, run in runs.items():
            claims[f"step_ms_{case}_{precision}"] = 1e3 * _median(run, "decode_s_per_look") / STEPS_PER_LOOK
            claims[f"rollout_s_{case}_{precision}"] = _median(run, "seconds")
            claims[f"kv_cache_gb_{case}_{precision}"] = run["kv_cache_bytes"] / 1e9
            claims[f"weight_gb_{case}_{precision}"] = run["weight_bytes"] / 1e9
    peers = [_median(record, "seconds") for record in records if record["kind"] == "peer"]
    if peers and "fp8" in cases.get(PEER_CASE, {}):
        claims[f"fp8_{PEER_CASE}_vs_vllm_fp8"] = min(peers) / _median(cases[PEER_CASE]["fp8"], "seconds")
    for record in (record for record in records if record["kind"] == "log_ratios"):
        for precision, figures in record["precisions"].items():
            claims[f"log_ratio_sd_{precision}"] = figures["sd"]
            claims[f"log_ratio_max_{precision}"] = figures["max_abs"]
            for length, sums in figures["sums"].items():
                claims[f"effective_share_{precision}_{length}"] = sums["effective_share"]
    return claims


def _median(run: dict[str, Any], time: str) -> float:
    return statistics.median(repetition[time] for repetition in run["repetitions"])


if __name__ == "__main__":
    PrecisionSuite.main()
