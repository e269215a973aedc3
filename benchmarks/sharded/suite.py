"""Steps and contexts on several GPUs: writes `results/sharded-<hardware>.json`.

    python -m benchmarks.sharded.suite [--parts 1p5b 7b 7b-peer 7b-peer-16 tp2 resume] [--peer-site DIR]
    python -m benchmarks.sharded.suite --parts full_7b_2x80gb_context --lengths 4096 16384
    python -m benchmarks.sharded.suite --merge

The cases of a part take turns, `--rounds` times, and every run leaves a record in --records; the result has
the claims whose records suffice. Ratios are of medians over all rounds, and only of records of one commit and
one machine; of TRL's cases the fastest counts. A context counts when both divisions of it pass
(`benchmarks.memory.run`), with the cap enforced on each GPU by a process that holds the rest of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.device_watch import DeviceWatch
from benchmarks.common.results import Record, medians, origin
from benchmarks.common.suite import Claims, Suite, visible_gpus
from benchmarks.memory.cases import Case
from benchmarks.rollout.cases import model_directory
from benchmarks.sharded.cases import CONTEXTS, LAUNCHES, STEPS, StepCase

NUM_GPUS = 2
RESUMES = (("write", "2", 2), ("read", "2", 2), ("read", "1", 2), ("read", "auto", 1))
"""What is done with one checkpoint, in this order: part, option `shard`, processes."""
# Labels of the work on which TRL is compared.
OWN_7B = tuple(case.label for case in STEPS["7b"])
PEER_7B = tuple(case.label for part in STEPS.values() for case in part if case.peer is not None)
STEP_S = 500.0
"""A run that takes longer has failed. In TRL's first, vLLM compiles for two minutes."""


class ShardedSuite(Suite):
    """Steps and contexts on several GPUs."""

    name, hardware = "sharded", "h200x2"
    parts = (*STEPS, "tp2", "resume", *CONTEXTS)
    has_all_claims = False
    extends_result = True

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=1)
        parser.add_argument(
            "--lengths", nargs="+", type=int, default=[4096], help="of contexts, in this order"
        )
        parser.add_argument("--new-tokens", type=int, default=256, help="generated ones, of decoded runs")

    @staticmethod
    def part_of(record: Record) -> str:
        """What a record is compared with runs on one machine, one after the other."""
        return str(record["part"])

    def measure(self, part: str) -> None:
        if part in CONTEXTS:
            self._contexts(part)
            return
        if part == "tp2":
            directory = model_directory(self.options.model_dir, "tiny" if self.options.tiny else "7b")
            out = self.out(part)
            self.run(
                "sharded.tensor_parallel", directory, "--out", out,
                num_processes=NUM_GPUS, timeout_s=STEP_S, CUDA_VISIBLE_DEVICES=self._gpus(NUM_GPUS),
            )  # fmt: skip
            _label(out, part)
            return
        if part == "resume":
            self._resume()
            return
        for _ in range(self.options.rounds):
            for case in STEPS[part]:
                if not self.time_is_up():
                    self._step(part, case)

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {"num_gpus": NUM_GPUS, "summary": summary(records)}

    def _step(self, part: str, case: StepCase) -> None:
        # Not within a measurement.
        model_directory(self.options.model_dir, "tiny" if self.options.tiny else case.work.model)
        out = self.out(case.label)
        words = ["--micro-batch", str(case.work.num_completions // case.num_gpus)]
        if case.peer is not None:
            words = [*case.peer.words(), "--option", "vllm_gpu_memory_utilization=0.4"]
        elif case.num_gpus > 1:
            words += ["--watch-engine", "--option", f"shard={json.dumps(case.shard)}"]
        self.run(
            "step.run", "--framework", "colocate" if case.peer is None else "trl", *case.work.words(),
            "--warm-up", case.num_warm_up, "--steps", case.num_timed, "--label", case.label, *words,
            "--model-dir", self.options.model_dir, "--out", out,
            is_peer=case.peer is not None,
            num_processes=case.num_gpus,
            timeout_s=STEP_S,
            CUDA_VISIBLE_DEVICES=self._gpus(case.num_gpus),
            **({} if case.peer is None else LAUNCHES[case.peer_shard]),
        )  # fmt: skip
        _label(out, part)

    def _gpus(self, num_gpus: int) -> str:
        return ",".join(visible_gpus(NUM_GPUS)[:num_gpus])

    def _resume(self) -> None:
        """A checkpoint of two processes that split the weights, read by two that do not, and by one."""
        directory = self.records / f"{time.time_ns()}-checkpoint"
        record = origin(self.environment["COLOCATE_COMMIT"]) | {
            "kind": "resume",
            "part": "resume",
            "runs": [],
        }
        for part, shard, num_processes in RESUMES:
            output = self.run(
                "sharded.resume", part, directory, "--shard", shard,
                num_processes=num_processes, CUDA_VISIBLE_DEVICES=self._gpus(num_processes),
            )  # fmt: skip
            if output is not None:
                record["runs"].append(json.loads(output.splitlines()[-1]))
        shutil.rmtree(directory, ignore_errors=True)
        self.out("resume").write_text(json.dumps(record, indent=1) + "\n")

    def _contexts(self, claim: str) -> None:
        """Both divisions of every length; a length that fails in one is not tried in the other."""
        for length in self.options.lengths:
            for teacher_forced in (False, True):
                if self.time_is_up() or not self._context(claim, length, teacher_forced):
                    break

    def _context(self, claim: str, length: int, teacher_forced: bool) -> bool:
        case, num_parts = CONTEXTS[claim]
        record = origin(self.environment["COLOCATE_COMMIT"]) | vars(case) | {"part": claim}
        record |= {"kind": "context", "length": length, "teacher_forced": teacher_forced}
        gpus = visible_gpus(NUM_GPUS)
        watches = [DeviceWatch(case.cap_bytes, gpu) for gpu in gpus] if torch.cuda.is_available() else []
        start_s = time.perf_counter()
        output = self.run(*context_words(case, num_parts, length, self.options.new_tokens),
            *(["--teacher-forced"] if teacher_forced else []),
            num_processes=NUM_GPUS,
            timeout_s=STEP_S,
            CUDA_VISIBLE_DEVICES=",".join(gpus),
            PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        )  # fmt: skip
        record |= {"passed": output is not None, "seconds": time.perf_counter() - start_s}
        # That a length does not fit is a finding, not a failure.
        record["error"] = self.failures.pop() if output is None else None
        record["driver_peak_bytes"] = [watch.peak_bytes() for watch in watches]
        for watch in watches:
            watch.close()
        if output is not None:
            record |= json.loads(output.splitlines()[-1])
        self.out(f"context-{case.model}").write_text(json.dumps(record, indent=1) + "\n")
        return output is not None


def _label(out: Path, part: str) -> None:
    """Note in a record, if it was written, which part of the suite it is of."""
    if out.exists():
        out.write_text(json.dumps(json.loads(out.read_text()) | {"part": part}, indent=1) + "\n")


def context_words(case: Case, num_parts: int, length: int, new_tokens: int) -> list[str | int]:
    return [
        "memory.run", "--model", case.model, "--method", case.method, "--generations", case.num_generations,
        "--length", length, "--new-tokens", new_tokens, "--option", f"shard={num_parts}",
    ]  # fmt: skip


# ── Claims ───────────────────────────────────────────────────────────────────────────────────────────────


def timed_steps(records: list[Record], label: str) -> list[Record]:
    """The steps after the warm-up, over all records of the label."""
    return [
        step for record in records if record.get("label") == label
        for step in record["steps"][record["num_warm_up"] :]
    ]  # fmt: skip


def median_s(records: list[Record], label: str, phase: str | None = None) -> float | None:
    """Seconds of the median step, or of a phase in it; None without a step."""
    steps = timed_steps(records, label)
    values = [step["step_s"] if phase is None else step["phases_s"][phase] for step in steps]
    return statistics.median(values) if values else None


def quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def longest_context(records: list[Record], claim: str) -> int | None:
    """The longest length of which both divisions passed the last time."""
    runs = {(r["length"], r["teacher_forced"]): r["passed"] for r in records if r["part"] == claim}
    lengths = {length for length, _ in runs if runs.get((length, False)) and runs.get((length, True))}
    return max(lengths, default=None)


def plan_error(records: list[Record]) -> float | None:
    """The largest relative error of a predicted peak, over the contexts that passed and their GPUs.

    Only decoded runs count, as in the memory benchmark: a teacher-forced run leaves out the rollout, and the
    plan has the rollout's memory.
    """
    errors = [
        abs(record["predicted_peak_bytes"] - peak) / peak
        for record in records
        if record["kind"] == "context" and record["passed"] and not record["teacher_forced"]
        for peak in record["driver_peak_bytes"]
    ]
    return max(errors, default=None)


def tensor_parallel(records: list[Record]) -> Claims:
    """What the last run of two GPUs that decode together showed."""
    found = [record for record in records if record["kind"] == "tensor_parallel"]
    last = found[-1] if found else {}
    return {
        "logprob_gap_tp2": quotient(last.get("gap_of_two"), last.get("gap_of_one")),
        "tp2_allreduce_share": last.get("decode", {}).get("share"),
    }


def resumes_exactly(records: list[Record]) -> float | None:
    """1 if every reader of the last checkpoint had the writer's weights and moments, else 0."""
    found = [record["runs"] for record in records if record["kind"] == "resume"]
    if not found or len(found[-1]) < len(RESUMES):
        return None
    written, *read = (run["checksums"] for run in found[-1])
    return float(all(run == written for run in read))


def compute_claims(records: list[Record]) -> Claims:
    """Every claim of the records; None where they do not suffice."""
    one, replicated, weak, strong = (
        median_s(records, label) for label in ("1p5b-1gpu", "1p5b-2gpu-none", "1p5b-2gpu", "1p5b-2gpu-half")
    )
    published = [step["published_bytes"] for label in ("1p5b-2gpu", "7b-t1", "7b-t2")
                 for step in timed_steps(records, label) if "published_bytes" in step]  # fmt: skip
    return {
        "step_7b_full_2gpu_vs_trl": peer_ratio(records),
        "optimizer_sharding_overhead_1p5b": quotient(weak, replicated),
        "weight_sharding_overhead_7b": quotient(
            median_s(records, "7b-t2", "train"), median_s(records, "7b-t1", "train")
        ),
        "tp2_decode_7b_vs_two_engines": quotient(
            median_s(records, "7b-t1", "rollout"), median_s(records, "7b-t2", "rollout")
        ),
        "weak_scaling_2gpu_1p5b": quotient(one, weak),
        "strong_scaling_2gpu_1p5b": quotient(one, None if strong is None else NUM_GPUS * strong),
        "publish_sharded_bytes": max(published) if published else None,
        "plan_error_2gpu": plan_error(records),
        **tensor_parallel(records),
        "resume_other_world_size_exact": resumes_exactly(records),
        **{claim: longest_context(records, claim) for claim in CONTEXTS},
    }


def fastest_s(records: list[Record], labels: Iterable[str]) -> float | None:
    """Seconds of the fastest label's median step."""
    return min(filter(None, (median_s(records, label) for label in labels)), default=None)


def peer_ratio(records: list[Record]) -> float | None:
    """TRL's 7B step over ours, each at the fastest of its cases.

    TRL's records count only if they have our commit and are of our machine.
    """
    ours = [record for record in records if record.get("label") in OWN_7B]
    origins = {(record["commit"], record["machine"]) for record in ours}
    theirs = [
        record for record in records
        if record.get("label") in PEER_7B and (record["commit"], record["machine"]) in origins
    ]  # fmt: skip
    return quotient(fastest_s(theirs, PEER_7B), fastest_s(ours, OWN_7B))


def summary(records: list[Record]) -> dict[str, Any]:
    """Medians by label: what the claims are made of."""
    labels = dict.fromkeys(record["label"] for record in records if record["kind"] == "step")
    return {
        label: {
            "step_s": median_s(records, label),
            "phases_s": medians([step["phases_s"] for step in timed_steps(records, label)]),
        }
        for label in labels
    }


if __name__ == "__main__":
    ShardedSuite.main()
