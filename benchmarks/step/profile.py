"""Where the training of a step goes, by what kernels are for: writes `results/step-profile-<hardware>.json`.

    python -m benchmarks.step.profile [--hardware h100]

Our step of the suite's case "1p5b". What a GPU ran in the phase `train` of the last steps is read from
CUPTI's trace; the phase's own time is that of an earlier step, which is not traced. What no kernel covers is
`between`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.results import committed, machine, write_result
from benchmarks.rollout.cases import model_directory
from benchmarks.step.cases import COMPARISONS, training_flop
from benchmarks.step.run import colocate_trainer, parse

NUM_WARM_UP, NUM_TIMED, NUM_TRACED = 2, 2, 2
ROLES = (
    ("products", ("nvjet", "gemm", "cutlass", "swiglu", "splitK")),
    ("attention", ("cudnn", "fmha", "flash", "_merge_attention", "attention_merge")),
    ("norms, rotation and activation", ("_rms_norm", "_rotate", "_silu_mul")),
    ("softmax of the head", ("_gradient_kernel", "_reduce_split", "_softmax", "statistics")),
    ("optimizer", ("multi_tensor_apply", "Fused", "adam")),
)
"""Roles by parts of their kernels' names; the first that fits counts."""
OTHER, BETWEEN = "sums, copies and the rest", "between"


def role_of(kernel: str) -> str:
    return next((role for role, parts in ROLES if any(part in kernel for part in parts)), OTHER)


def seconds_of(role: str, kernels: dict[str, float]) -> float:
    return sum(seconds for kernel, seconds in kernels.items() if role_of(kernel) == role)


class Watch:
    """Seconds of the phase `train` by step, and what the GPU ran in it in the steps that are traced."""

    def __init__(self, trainer: Any) -> None:
        self.seconds: dict[int, float] = defaultdict(float)
        self.kernels: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        """Seconds of each kernel by step."""
        self._phase, self._state = trainer.run.timeline.phase, trainer.run.journal.state
        trainer.run.timeline.phase = self.phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        step = self._state.global_step
        is_traced = name == "train" and step >= NUM_WARM_UP + NUM_TIMED
        with profile(activities=[ProfilerActivity.CUDA]) if is_traced else nullcontext() as profiler:
            start_s = time.perf_counter()
            with self._phase(name):  # which waits for the device at both ends
                yield
            self.seconds[step] += (time.perf_counter() - start_s) if name == "train" else 0.0
        for event in profiler.key_averages() if is_traced else ():
            self.kernels[step][event.key] += event.device_time_total / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "colocate-models")
    own, commit = parser.parse_args(), committed()
    work = COMPARISONS["1p5b"].work
    model_directory(own.model_dir, work.model)
    words = ["--framework", "colocate", *work.words(), "--model-dir", str(own.model_dir), "--out", "none"]
    words += ["--warm-up", str(NUM_WARM_UP), "--steps", str(NUM_TIMED + NUM_TRACED)]
    with tempfile.TemporaryDirectory() as directory:
        trainer = colocate_trainer(parse(words), work, directory)
        watch = Watch(trainer)
        trainer.train()
    timed_s = [watch.seconds[NUM_WARM_UP + number] for number in range(NUM_TIMED)]
    traces = list(watch.kernels.values())
    by_role = {
        role: statistics.median(seconds_of(role, trace) for trace in traces)
        for role in (*(role for role, _ in ROLES), OTHER)
    }
    train_s = statistics.median(timed_s)
    flop = training_flop(work, shares_prompts=True)
    claims = {
        "train_s": train_s,
        **{f"share of {role}": role_s / train_s for role, role_s in by_role.items()},
        f"share of {BETWEEN}": 1 - sum(by_role.values()) / train_s,
        "product_flop_per_s": (flop["layers"] + flop["head"]) / by_role["products"],
    }
    repetitions = [{"train_s": timed_s}, *({"kernels": trace} for trace in traces)]
    path = write_result(
        "step-profile", own.hardware, claims, repetitions, commit, work=vars(work), machine=machine()
    )
    print(path, claims, torch.cuda.get_device_name(), sep="\n")


if __name__ == "__main__":
    main()
