"""Weights for two vLLM servers on the trainer's GPUs: writes `results/pool-<hardware>.json`.

python -m benchmarks.pool.publish_suite

publish      50 publications of 7B to two servers that take turns with the trainer, each followed by a greedy
             match; in the middle of one a server is killed (publish.py)
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common.results import Record
from benchmarks.common.suite import Claims, Suite
from benchmarks.pool.publish import MOST_SHORTFALL


class PublishSuite(Suite):
    """Publications to servers that share the trainer's GPUs."""

    name, hardware = "pool", "h200x2"
    parts = ("publish",)

    @staticmethod
    def part_of(record: Record) -> str:
        return str(record["kind"])

    def measure(self, part: str) -> None:
        number = ("--num-publications", 4) if self.options.tiny else ()
        self.run("pool.publish", "--model-dir", self.options.model_dir, *number, "--out", self.out(part))

    def claims(self, records: list[Record]) -> Claims:
        if not records:
            return dict.fromkeys(
                ("publish_ipc_7b_s", "publish_host_bytes", "publications_matched", "publish_loss_survived")
            )
        (record,) = records
        pushes, rows, loss = record["pushes"], record["publications"], record["loss"]
        seconds = [second for of_server in pushes["seconds"].values() for second in of_server]
        after = loss["shortfall"].values()
        return {
            "publish_ipc_7b_s": statistics.median(seconds),
            "publish_host_bytes": sum(pushes["host_bytes"]),
            "publications_matched": sum(map(is_matched, rows)),
            "publish_loss_survived": float(
                len(after) == len(rows[0]["shortfall"]) and max(after) < MOST_SHORTFALL
            ),
        }

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {"size": "7b", "num_servers": 2, "most_shortfall": MOST_SHORTFALL}


def is_matched(row: Record) -> bool:
    """Whether all servers that were left took the new weights' greedy tokens, which are not the old ones'."""
    return max(row["shortfall"].values()) < MOST_SHORTFALL < min(row["stale"].values())


if __name__ == "__main__":
    PublishSuite.main()
