"""Weights for rollout servers on the trainer's GPUs: writes `results/pool-<hardware>.json`.

python -m benchmarks.pool.publish_suite
python -m benchmarks.pool.publish_suite --num_gpus 1 --hardware h100

publish      50 publications of 7B to two servers of vLLM that take turns with the trainer, each followed by a
             greedy match; in the middle of one a server is killed (publish.py). With one GPU 5 publications
             to a native server that is awake beside the trainer: `results/pool-native-<hardware>.json`
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.common.results import Record
from benchmarks.common.suite import Claims, Suite
from benchmarks.pool.publish import MOST_SHORTFALL


class PublishSuite(Suite):
    """Publications to servers that share the trainer's GPUs."""

    name, hardware = "pool", "h200x2"
    parts = ("publish",)

    def __init__(self, options: argparse.Namespace, commit: str) -> None:
        if options.num_gpus == 1:
            self.name = "pool-native"  # type: ignore[misc]
            options.hardware = "h200" if options.hardware == self.hardware else options.hardware
        super().__init__(options, commit)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--num_gpus", type=int, choices=[1, 2], default=2)

    @staticmethod
    def part_of(record: Record) -> str:
        return str(record["kind"])

    def measure(self, part: str) -> None:
        alone = ("--engine", "native", "--gpus", 0) if self.options.num_gpus == 1 else ()
        number = 4 if self.options.tiny else 5 if alone else 50
        self.run(
            *("pool.publish", "--model-dir", self.options.model_dir, *alone),
            *("--num-publications", number, "--out", self.out(part)),
        )

    def claims(self, records: list[Record]) -> Claims:
        if not records:
            return dict.fromkeys(
                ("publish_ipc_7b_s", "publish_host_bytes", "publications_matched", "publish_loss_survived")
            )
        (record,) = records
        pushes, rows, loss = record["pushes"], record["publications"], record["loss"]
        seconds = [second for of_server in pushes["seconds"].values() for second in of_server]
        if not loss:  # one server, of which the first push, before the publications, makes the transport
            return {
                "publish_native_ipc_7b_s": statistics.median(seconds),
                "publish_native_host_bytes": sum(pushes["host_bytes"]),
                "publications_native_matched": sum(map(is_matched, rows)),
            }
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
        return {"size": "7b", "num_servers": self.options.num_gpus, "most_shortfall": MOST_SHORTFALL}


def is_matched(row: Record) -> bool:
    """Whether all servers that were left took the new weights' greedy tokens, which are not the old ones'."""
    return max(row["shortfall"].values()) < MOST_SHORTFALL < min(row["stale"].values())


if __name__ == "__main__":
    PublishSuite.main()
