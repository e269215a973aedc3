"""Weights for rollout servers on the trainer's two GPUs: writes `results/pool-<hardware>.json`.

python -m benchmarks.pool.publish_suite [--parts vllm native]

vllm         50 publications of 7B to two servers of vLLM that take turns with the trainer, each followed by a
             greedy match; in the middle of one a server is killed (publish.py)
native       the same to two servers of the native engine, which stay awake
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common.results import Record
from benchmarks.common.suite import Claims, Suite
from benchmarks.pool.publish import MOST_SHORTFALL

PREFIXES = {"vllm": "publish", "native": "publish_native"}
"""What the claims of each part begin with."""
FIGURES = ("ipc_7b_s", "host_bytes", "matched", "loss_survived")


class PublishSuite(Suite):
    """Publications to servers that share the trainer's GPUs."""

    name, hardware = "pool", "h200x2"
    parts = tuple(PREFIXES)
    has_all_claims = False

    @staticmethod
    def part_of(record: Record) -> str:
        return str(record["engine"])

    def measure(self, part: str) -> None:
        self.run(
            *("pool.publish", "--model-dir", self.options.model_dir, "--engine", part),
            *("--num-publications", 4 if self.options.tiny else 50, "--out", self.out(part)),
        )

    def claims(self, records: list[Record]) -> Claims:
        found = {self.part_of(record): record for record in records}
        claims: Claims = {}
        for part, prefix in PREFIXES.items():
            figures = figures_of(found[part]) if part in found else dict.fromkeys(FIGURES)
            claims |= {f"{prefix}_{name}": figure for name, figure in figures.items()}
        return claims

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {"size": "7b", "num_servers": 2, "most_shortfall": MOST_SHORTFALL}


def figures_of(record: Record) -> Claims:
    """Median seconds of a push, bytes through the host, publications matched, and whether all servers had the
    present weights after the loss of one."""
    pushes, after = record["pushes"], record["loss"]["shortfall"].values()
    rows = record["publications"]
    survived = len(after) == len(rows[0]["shortfall"]) and max(after) < MOST_SHORTFALL
    return {
        "ipc_7b_s": statistics.median(second for of in pushes["seconds"].values() for second in of),
        "host_bytes": sum(pushes["host_bytes"]),
        "matched": sum(map(is_matched, rows)),
        "loss_survived": float(survived),
    }


def is_matched(row: Record) -> bool:
    """Whether all servers that were left took the new weights' greedy tokens, which are not the old ones'."""
    return max(row["shortfall"].values()) < MOST_SHORTFALL < min(row["stale"].values())


if __name__ == "__main__":
    PublishSuite.main()
