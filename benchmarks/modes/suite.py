"""Native, colocated vLLM and a vLLM server, on the same GPUs: writes `results/modes-<hardware>.json`.

    python -m benchmarks.modes.suite --gpus 2 --hardware h200x2 [--parts 1p5b-server 1p5b-colocate ...]
        [--limit-s 540]
    python -m benchmarks.modes.suite --gpus 2 --hardware h200x2 --merge

The experiments 1 to 4 of "No GPU left behind" (Hugging Face, 2025): 1.5B and 7B, several batch sizes and
tensor-parallel sizes. In server mode the last GPU serves and the others train; the other modes train and
generate on all of them. What is compared is completions per second of whole steps at the same global batch:
what a user gets from the machine. Beside it stands the publication's normalisation, the server's figure times
GPUs / training GPUs, as if serving took none.

Every case is a run of step.py of its own that leaves a record in --records; one whose record is there is not
measured again, so a command that was cut short is simply given again. With --limit-s no case begins after so
many seconds; with --largest the claims come first. A server is started once for all batch sizes of its model.

The result has the records in it, and a later command, which may be on another day, replaces what it measures
anew; with --missing it only adds. What is compared is of one commit and one machine; a claim whose records do
not suffice is left out. `benchmarks.pages.tables` makes the table of docs/benchmarks.md from the result,
`benchmarks.pages.pictures` its picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from typing import Any

from benchmarks.common.results import Record, medians, read_records
from benchmarks.common.suite import Claims, Suite, visible_gpus
from benchmarks.common.vllm_server import vllm_server
from benchmarks.modes.cases import PARTS, ModeCase, all_cases, cases, largest
from benchmarks.rollout.cases import model_directory

NUM_WARM_UP, NUM_TIMED = 1, 3
CASE_S = 420.0
"""A case that takes longer has failed. In the first of a model vLLM compiles, for two minutes."""


class ModesSuite(Suite):
    """Native, colocated vLLM and a vLLM server, on the same GPUs."""

    name, hardware = "modes", "h200x2"
    parts = tuple(PARTS)
    has_all_claims = False
    extends_result = True

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--gpus", type=int, choices=(2, 4), default=2)
        parser.add_argument("--largest", action="store_true", help="only the largest batch, for the claims")
        parser.add_argument("--missing", action="store_true", help="only cases that the result has not")
        parser.add_argument(
            "--vllm-engine-kwargs", type=json.loads, default={}, metavar="JSON",
            help="more of vllm.LLM's arguments where it is colocated, as the machine needs; in the records",
        )  # fmt: skip

    @staticmethod
    def part_of(record: Record) -> str:
        """The case that a record is of."""
        return str(record["label"])

    def measure(self, part: str) -> None:
        """Run what is missing of a part, as far as the time goes."""
        records = read_records(self.records, self.part_of)
        if self.options.missing:
            records += self.published()
        measured = set(map(self.part_of, records))
        wanted = cases(part, self.options.gpus)[: 1 if self.options.largest else None]
        missing = [case for case in wanted if case.label not in measured]
        if not missing or self.time_is_up():
            return
        # Not within a measurement.
        size = "tiny" if self.options.tiny else missing[0].work.model
        directory = model_directory(self.options.model_dir, size)
        if missing[0].mode != "server":
            self._run_all(missing, {})
            return
        server = vllm_server(
            directory,
            *("--load-format", "dummy", "--max-model-len", str(max_model_len(missing[0]))),
            *(["--enforce-eager"] if self.options.tiny else []),
            gpu=visible_gpus(self.options.gpus)[-1],
            log=self.records / f"{time.time_ns()}-server.log",
            environment=self.environment,
        )
        with self.failure_noted(part), server as url:
            self._run_all(missing, {"vllm_server_base_url": url})

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records, self.options.gpus)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        rows = summary(records, self.options.gpus)
        return {"num_gpus": self.options.gpus, "num_warm_up": NUM_WARM_UP, "summary": rows}

    def _run_all(self, missing: list[ModeCase], more_options: dict[str, Any]) -> None:
        for case in missing:
            if not self.time_is_up():
                options = trainer_options(case, tiny=self.options.tiny)
                if case.mode == "colocate" and (more := self.options.vllm_engine_kwargs):
                    options["vllm_engine_kwargs"] = options.get("vllm_engine_kwargs", {}) | more
                self._step(case, options | more_options)

    def _step(self, case: ModeCase, run_options: dict[str, Any]) -> None:
        assignments = [f"{name}={json.dumps(value)}" for name, value in run_options.items()]
        self.run(
            "step.run", "--framework", "colocate", *case.work.words(),
            "--micro-batch", case.work.num_completions // case.num_trainers,
            "--warm-up", NUM_WARM_UP, "--steps", NUM_TIMED, "--label", case.label, "--watch-engine",
            *(word for assignment in assignments for word in ("--option", assignment)),
            "--model-dir", self.options.model_dir, "--out", self.out(case.label),
            num_processes=case.num_trainers,
            timeout_s=CASE_S,
            CUDA_VISIBLE_DEVICES=",".join(visible_gpus(self.options.gpus)[: case.num_trainers]),
        )  # fmt: skip


def max_model_len(case: ModeCase) -> int:
    """No more than is needed, as far as vLLM reserves by it."""
    return case.work.prompt_tokens + case.work.new_tokens + 8


def trainer_options(case: ModeCase, *, tiny: bool) -> dict[str, Any]:
    """What the modes' configurations differ in."""
    if case.mode == "native":
        return {"engine": "native"}
    if case.mode == "server":
        return {"engine": "vllm_server"}
    vllm: dict[str, Any] = {
        "engine": "vllm",
        "vllm_tensor_parallel_size": case.tensor_parallel_size,
        "vllm_weights": case.weights,
        "vllm_max_model_length": max_model_len(case),
    }
    # On a CPU vLLM would compile C++ for minutes.
    return vllm | ({"vllm_engine_kwargs": {"enforce_eager": True}} if tiny else {})


# ── Claims ───────────────────────────────────────────────────────────────────────────────────────────────


def timed_steps(records: list[Record], case: ModeCase) -> list[Record]:
    """The steps after the warm-up, over all records of the case."""
    return [
        step
        for record in records
        if record["label"] == case.label
        for step in record["steps"][record["num_warm_up"] :]
    ]


def completions_per_s(records: list[Record], case: ModeCase) -> float | None:
    """Completions per second of the median step; None with fewer steps than a case has."""
    steps = timed_steps(records, case)
    if len(steps) < NUM_TIMED:
        return None
    num_completions = next(
        r["work"]["num_prompts"] * r["work"]["num_generations"] for r in records if r["label"] == case.label
    )
    return num_completions / statistics.median(step["step_s"] for step in steps)


def ratio(records: list[Record], ours: ModeCase, theirs: ModeCase) -> float | None:
    """The ratio of two cases' completions per second; None if they are not of one commit and one machine."""
    origins = {(r["commit"], r["machine"]) for r in records if r["label"] in (ours.label, theirs.label)}
    ours_per_s, theirs_per_s = completions_per_s(records, ours), completions_per_s(records, theirs)
    if ours_per_s is None or theirs_per_s is None or len(origins) > 1:
        return None
    return ours_per_s / theirs_per_s


def sleep_share(records: list[Record], case: ModeCase) -> float | None:
    """Median share of a step that falling asleep and waking up take, without the publication in between."""
    shares = [
        (step["engine_s"]["sleep"] + step["engine_s"]["wake_up"]) / step["step_s"]
        for step in timed_steps(records, case)
    ]
    return statistics.median(shares) if shares else None


def compute_claims(records: list[Record], num_gpus: int) -> Claims:
    """Every claim, at the largest batch, with an engine on each GPU; None where the records do not suffice.

    A bucketed publication is `VLLMEngine._publish`, the device synchronised around it: adapters merged, all
    weights written into vLLM's copy, prefix cache forgotten. Of the part that asks for it: by itself vLLM
    would read the base from the trainer's parameters. Sleep and wake-up are of the model with which they
    take more of a step.
    """
    colocate, server, native = (
        {model: largest(model, mode, num_gpus) for model in ("1p5b", "7b")}
        for mode in ("colocate", "server", "native")
    )
    published = [step["published_bytes"] for step in timed_steps(records, colocate["1p5b"])]
    copying = timed_steps(records, largest("7b", "colocate", num_gpus, "buckets"))
    shares = [sleep_share(records, case) for case in colocate.values()]
    known_shares = [share for share in shares if share is not None]
    return {
        "colocate_vs_server_1p5b": ratio(records, colocate["1p5b"], server["1p5b"]),
        "colocate_vs_server_7b": ratio(records, colocate["7b"], server["7b"]),
        "native_vs_server_1p5b": ratio(records, native["1p5b"], server["1p5b"]),
        "publish_shared_bytes": max(published) if published else None,
        "publish_bucketed_7b_s": medians([step["engine_s"] for step in copying]).get("_publish"),
        "sleep_wake_overhead": max(known_shares) if len(known_shares) == len(shares) else None,
    }


def summary(records: list[Record], num_gpus: int) -> list[dict[str, Any]]:
    """Each case that was measured: what the claims are made of, and what is reported beside them."""
    rows = []
    for case in all_cases(num_gpus):
        per_s = completions_per_s(records, case)
        if per_s is None:
            continue
        steps = timed_steps(records, case)
        server = dataclasses.replace(case, mode="server", tensor_parallel_size=1, weights="auto")
        vs_server = ratio(records, case, server)
        rows.append(
            {
                "label": case.label,
                "model": case.model,
                "mode": case.mode,
                "tensor_parallel_size": case.tensor_parallel_size,
                "weights": case.weights,
                "num_trainers": case.num_trainers,
                "num_completions": case.work.num_completions,
                "step_s": statistics.median(step["step_s"] for step in steps),
                "completions_per_s": per_s,
                "vs_server": vs_server,
                # The server's rate as if serving took no GPU.
                "vs_server_normalised": vs_server and vs_server * server.num_trainers / case.num_trainers,
                "phases_s": medians([step["phases_s"] for step in steps]),
                "engine_s": medians([step["engine_s"] for step in steps]),
            }
        )
    return rows


if __name__ == "__main__":
    ModesSuite.main()
