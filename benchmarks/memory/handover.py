"""What handing memory and weights over between training and rollout costs: writes `handover-<hardware>.json`.

    python -m benchmarks.memory.handover [--kv-gib 100] [--steps 6] [--hardware h200]

One run of `GRPOTrainer`, full fine-tuning of random weights of Qwen2.5-1.5B's shape, with a KV cache of
`--kv-gib`. In every step the engine gives all of it back before training and takes all of it again before the
next rollout, both timed with the device synchronised before and after; so is publishing, whose bytes are
counted.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.common.results import Record
from benchmarks.common.suite import Claims, Suite
from benchmarks.rollout.cases import SHAPES, model_directory
from benchmarks.step.cases import Work

WORK = Work("1.5b", 4, 8, 64, 64)
PAGE_TOKENS = 64


class HandoverSuite(Suite):
    """Sleep, wake-up and publication of the native engine in GRPO steps."""

    name = "handover"
    parts = (WORK.model,)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kv-gib", type=float, default=100)
        parser.add_argument("--steps", type=int, default=6, help="each is one repetition")

    def measure(self, part: str) -> None:
        size = "tiny" if self.options.tiny else part
        model_directory(self.options.model_dir, size)  # not within the measurement
        self.run(
            "step.run", "--framework", "colocate", *WORK.words(), "--micro-batch", WORK.num_completions,
            "--warm-up", 0, "--steps", self.options.steps, "--label", "handover", "--watch-engine",
            "--keep", "nothing", "--option", f"kv_cache_tokens={kv_cache_tokens(size, self.options.kv_gib)}",
            "--option", f"max_num_seqs={WORK.num_completions}",
            "--model-dir", self.options.model_dir, "--out", self.out("handover"),
        )  # fmt: skip

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records, self.options.kv_gib)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {"shape": SHAPES[WORK.model], "work": vars(WORK)}


def kv_cache_tokens(size: str, gib: float) -> int:
    """Whole pages of keys and values in two bytes each that make up so much memory."""
    shape = SHAPES[size]
    head_size = shape["hidden_size"] // shape["num_attention_heads"]
    token_bytes = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_size
    return -(-int(gib * 2**30) // (token_bytes * PAGE_TOKENS)) * PAGE_TOKENS


def compute_claims(records: list[Record], kv_gib: float) -> Claims:
    """Medians over the steps; None without a record, or where memory did not allow the cache asked for."""
    steps = [step for record in records for step in record["steps"]]
    is_whole = bool(steps) and min(step["kv_cache_bytes"] for step in steps) >= kv_gib * 2**30

    def median(method: str) -> float | None:
        return statistics.median(step["engine_s"][method] for step in steps) if is_whole else None

    size = f"{kv_gib:g}gib"
    return {
        f"sleep_{size}_s": median("sleep"),
        f"wake_{size}_s": median("wake_up"),
        "weight_sync_s": median("update_weights"),
        "weight_sync_bytes": max(step["published_bytes"] for step in steps) if is_whole else None,
    }


if __name__ == "__main__":
    HandoverSuite.main()
