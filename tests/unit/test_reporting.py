"""The run's record, its report and pictures, the live progress and the merging of metrics."""

from __future__ import annotations

import math
import random
from pathlib import Path

from colocate.reporting.completions import CompletionTable
from colocate.reporting.run_log import RunLog

GIB = 2**30


def synthetic_step(step: int, num_steps: int, rng: random.Random) -> tuple[dict, dict]:
    """Invented metrics and timeline of one step, of the size of a 1.5B run on one GPU."""
    progress = 1 / (1 + math.exp(-8 * (step / num_steps - 0.45)))
    length = 180 + 140 * progress + rng.gauss(0, 12)
    seconds = {
        "rollout": 3.2 + length / 150 + rng.expovariate(6),
        "score": 0.25 + rng.expovariate(20),
        "train": 2.3 + length / 300 + rng.gauss(0, 0.05),
        "publish": 0.01,
    }
    if step % 50 == 0:
        seconds["evaluate"] = 6.0
    spans, now = [], 0.0
    for phase, duration in seconds.items():
        categories = {"weights": int(3.1 * GIB), "optimizer": int(18.6 * GIB)}
        if phase in ("rollout", "evaluate"):
            categories["kv_cache"] = 96 * GIB
        held = sum(categories.values())
        extra = {"train": 61 + 9 * progress + rng.gauss(0, 1)}.get(phase, 2.5)
        spans.append(
            {
                "phase": phase,
                "start_s": now,
                "end_s": now + duration,
                "before_bytes": held,
                "after_bytes": held,
                "peak_bytes": held + int(extra * GIB),
                "categories": categories,
            }
        )
        now += duration + 0.02
    metrics = {
        "loss": rng.gauss(0, 0.01),
        "grad_norm": 0.3 * math.exp(rng.gauss(0, 0.4)),
        "learning_rate": 1e-6 * (1 - step / num_steps),
        "num_tokens": 512 * 450 * step,
        "reward": 0.1 + 0.6 * progress + rng.gauss(0, 0.05),
        "reward_std": 0.35 - 0.1 * progress,
        "rewards/accuracy_reward/mean": 0.05 + 0.55 * progress + rng.gauss(0, 0.04),
        "rewards/format_reward/mean": 0.2 + 0.75 * min(1, 2 * progress) + rng.gauss(0, 0.02),
        "frac_reward_zero_std": min(1.0, max(0.0, 0.3 + 0.3 * progress + rng.gauss(0, 0.05))),
        "completions/mean_length": length,
        "completions/min_length": length * 0.3,
        "completions/max_length": min(512, length * 2.1),
        "completions/clipped_ratio": max(0.0, 0.12 - 0.1 * progress + rng.gauss(0, 0.01)),
        "entropy": 1.1 - 0.6 * progress + rng.gauss(0, 0.03),
        "kl": 0.02 * progress + abs(rng.gauss(0, 0.001)),
        "clip_ratio/low_mean": abs(rng.gauss(0, 0.001)),
        "clip_ratio/high_mean": abs(rng.gauss(0.002, 0.001)),
        "sampling/sampling_logp_difference/mean": 0.008 + abs(rng.gauss(0, 0.001)),
        "sampling/sampling_logp_difference/max": 0.3 * math.exp(rng.gauss(0, 0.5)),
        "sampling/importance_sampling_ratio/min": 0.7 + rng.gauss(0, 0.05),
        "sampling/importance_sampling_ratio/mean": 1.0 + rng.gauss(0, 0.003),
        "sampling/importance_sampling_ratio/max": 1.5 + abs(rng.gauss(0, 0.2)),
        "num_hints": rng.random(),
    }
    phases = {**seconds, "train/forward": 0.35 * seconds["train"], "train/backward": 0.55 * seconds["train"]}
    memory = {"device": "cuda:0", "limit_bytes": int(139.8 * GIB), "spans": spans}
    return metrics, {"wall_s": now + 0.1, "phases": phases, "memory": memory}


def write_synthetic_run(directory: Path, num_steps: int = 300) -> Path:
    """A run's record of invented numbers, written through RunLog."""
    rng = random.Random(0)
    log = RunLog(directory)
    log.describe(
        {
            "run_name": "synthetic <numbers> & nothing else",
            "model": "invented-1.5B",
            "dataset": "invented/arithmetic",
            "device": "1 × invented GPU",
            "versions": {"colocate": "0.1.0", "torch": "2.11.0"},
        }
    )
    log.log_eval(0, {"eval_reward": 0.09}, epoch=0.0)
    for step in range(1, num_steps + 1):
        metrics, timeline = synthetic_step(step, num_steps, rng)
        log.log_step(step, metrics, epoch=step / 100, timeline=timeline)
        if step % 50 == 0:
            log.log_eval(step, {"eval_reward": metrics["reward"] + rng.gauss(0, 0.02)}, epoch=step / 100)
        if step % 10 == 0 or step == 1:
            log.log_completions(step, synthetic_completions(step))
    log.close()
    return directory


def synthetic_completions(step: int) -> CompletionTable:
    prompts = [[{"role": "user", "content": f"What is {a} + {step}? Think first."}] for a in range(6)]
    completions = [
        f"<think>{a} and {step} make {a + step}.\nLet me check: yes.</think>\n<answer>{a + step}</answer>"
        for a in range(6)
    ]
    completions[0] = "<script>alert('escaped?')</script>" + "na " * 900
    rewards = {"accuracy_reward": [0.0, 1.0] * 3, "format_reward": [1.0] * 5 + [math.nan]}
    return CompletionTable(prompts, completions, rewards, [-1.0, 1.0] * 3)
