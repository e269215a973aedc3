"""Where a decode step's time goes: its kernels by what they are for, each beside what the hardware allows.

    python -m benchmarks.rollout.profile 1p5b_512seq --hardware h200
    python -m benchmarks.rollout.profile --rows 64 --hardware h200

Writes `results/decode-profile-<hardware>.json`, of few rows (1.5B, 256 + 512 tokens, each row a prompt of its
own) `results/decode-profile-64rows-<hardware>.json`. The kernels of the steps around the middle of a rollout,
where contexts have the mean length, are read from CUPTI's trace of a captured step; the step's own time is
taken without the profiler, from the whole rollout as the suite measures it. A kernel of cuBLAS does not say
which product it is: that follows from our kernels before and after it.

The least time of a product is the larger of its operations at the rate of a product of 8,192³ and its bytes
at the rate of a copy, both measured in the same run; that of everything else is its bytes. What no kernel
covers is `between`: a kernel starts when the one before has ended on all multiprocessors.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common.results import committed, machine, medians, write_result
from benchmarks.common.timing import copy_bytes_per_s, median_s
from benchmarks.rollout.cases import CASES, SHAPES, Case, model_directory
from benchmarks.rollout.floor import kv_bytes_per_step
from benchmarks.rollout.run import Native
from colocate.engines.native.decoder import Decoder

NUM_STEPS = 32
NUM_REPETITIONS = 3

OWN_KERNELS = {
    "_rms_norm_kernel": "norms",
    "prefix_kernel": "attention, prompts",
    "suffix_kernel": "attention, completions",
    "merge_kernel": "attention, completions",
    "_silu_mul_kernel": "activation",
    "swiglu_few_rows_kernel": "product, gate and up",
    "swiglu_many_rows_kernel": "product, gate and up",
    "_reduce_parts_kernel": "sampler",
    "head_kernel": "product, head",
    "_draw_kernel": "sampler",
    "_begin_step_kernel": "bookkeeping",
    "_end_step_kernel": "bookkeeping",
}
PASSES = {"_silu_mul_kernel": "activation", "_reduce_parts_kernel": "sampler"}
"""Kernels that a step has only where the product before them does not include their work."""
STREAMED_KERNEL = "streamed_kernel"
"""The kernel of several products, which its place tells apart."""
LAST_KERNEL = "_end_step_kernel"
"""The kernel with which a step ends."""
OTHERS_BEFORE = {
    "attention, prompts": "product, qkv",
    "attention, completions": "product, qkv",
    "activation": "product, gate and up",
    "sampler": "product, head",
    "bookkeeping": "bookkeeping",
}
"""The role of a kernel that is not ours, by the role of the next kernel that is."""
OTHERS_AFTER = {
    "attention, completions": "product, o",
    "activation": "product, down",
    "product, gate and up": "product, down",
    "bookkeeping": "bookkeeping",  # the embedding of the last tokens
}
"""The role of a kernel that is not ours and comes before a norm, by the role of the kernel before it."""
BETWEEN = "between"


class Kernel(NamedTuple):
    """One of the trace; times in seconds."""

    name: str
    start_s: float
    end_s: float


# ── Reading the trace ────────────────────────────────────────────────────────────────────────────────────


def split_steps(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """The whole steps of a trace, which may begin and end within one."""
    steps: list[list[Kernel]] = [[]]
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_s):
        steps[-1].append(kernel)
        if kernel.name == LAST_KERNEL:
            steps.append([])
    return steps[1:-1]


def roles(step: list[Kernel]) -> list[str]:
    """What each kernel of a step is for.

    Raises:
        ValueError: a kernel that is not ours is where no product is expected.
    """
    own = [OWN_KERNELS.get(kernel.name) for kernel in step]
    following = list(itertools.accumulate(reversed(own), lambda after, role: role or after))[::-1]
    found, before = [], "bookkeeping"
    for kernel, role, after in zip(step, own, following, strict=True):
        if role is None:
            role = OTHERS_BEFORE.get(after or "") or OTHERS_AFTER.get(before)
            if role is None and kernel.name == STREAMED_KERNEL and before == "norms":
                role = before = "product, gate and up"  # the activation is in it
            if role is None:
                raise ValueError(f"{kernel.name} comes between {before} and {after}.")
        else:
            before = role
        found.append(role)
    return found


def seconds_by_role(step: list[Kernel]) -> dict[str, float]:
    """Seconds from the first kernel's start to the last one's end; an overlap is the earlier kernel's."""
    seconds: dict[str, float] = {}
    covered_s = step[0].start_s
    for kernel, role in zip(step, roles(step), strict=True):
        seconds[BETWEEN] = seconds.get(BETWEEN, 0.0) + max(0.0, kernel.start_s - covered_s)
        seconds[role] = seconds.get(role, 0.0) + max(0.0, kernel.end_s - max(covered_s, kernel.start_s))
        covered_s = max(covered_s, kernel.end_s)
    return seconds


# ── Measuring ────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def traced(first: int) -> Iterator[list[Kernel]]:
    """A list that after the block has the kernels of `NUM_STEPS` steps of its rollout, from `first` on."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    numbers, launch = itertools.count(), Decoder.step
    kernels: list[Kernel] = []

    def step(decoder: Decoder, max_context_len: int) -> None:
        number = next(numbers)
        if number == first:
            torch.cuda.synchronize()
            profiler.start()
        elif number == first + NUM_STEPS:
            torch.cuda.synchronize()
            profiler.stop()
        launch(decoder, max_context_len)

    Decoder.step = step  # type: ignore[method-assign]
    try:
        yield kernels
    finally:
        Decoder.step = launch  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels += [
        Kernel(event["name"], event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6)
        for event in events
        if event.get("cat") == "kernel"
    ]


def product_flops_per_s() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_s(lambda: a @ b)


def least_s(case: Case, flops_per_s: float, bytes_per_s: float) -> dict[str, float]:
    """Seconds per step that the hardware allows, by role."""
    shape, num_rows = SHAPES[case.model], case.num_seqs
    hidden, intermediate, vocab_size = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    num_layers = shape["num_hidden_layers"]
    head_dim = hidden // shape["num_attention_heads"]
    qkv = hidden + 2 * shape["num_key_value_heads"] * head_dim

    def product(inputs: int, outputs: int, output_bytes: int = 2) -> float:
        num_bytes = 2 * inputs * (outputs + num_rows) + output_bytes * num_rows * outputs
        return max(2 * num_rows * inputs * outputs / flops_per_s, num_bytes / bytes_per_s)

    without_completions = dataclasses.replace(case, completion_tokens=0)
    kv_bytes, prompt_bytes = kv_bytes_per_step(case), kv_bytes_per_step(without_completions)
    row_bytes = 2 * num_rows * hidden
    return {
        "product, qkv": num_layers * product(hidden, qkv),
        "product, o": num_layers * product(hidden, hidden),
        "product, gate and up": num_layers * product(hidden, 2 * intermediate),
        "product, down": num_layers * product(intermediate, hidden),
        "product, head": product(hidden, vocab_size, output_bytes=4),
        "attention, prompts": prompt_bytes / bytes_per_s,
        "attention, completions": (kv_bytes - prompt_bytes) / bytes_per_s,
        # A sum is read, and written with its norm; the first has nothing to add.
        "norms": (2 * num_layers * 4 + 2) * row_bytes / bytes_per_s,
        "activation": num_layers * 3 * 2 * num_rows * intermediate / bytes_per_s,
        "sampler": 4 * num_rows * vocab_size / bytes_per_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    fixed = [name for name, case in CASES.items() if case.lengths == "fixed"]
    parser.add_argument("case", nargs="?", choices=fixed, default="1p5b_512seq")
    parser.add_argument("--rows", type=int, help="few rows in place of a case")
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "colocate-models")
    parser.add_argument("--hardware", default="h200")
    options = parser.parse_args()
    case = CASES[options.case] if options.rows is None else Case("1.5b", options.rows, 1, 256, 512)
    name = "decode-profile" if options.rows is None else f"decode-profile-{options.rows}rows"
    commit = committed()
    native = Native(model_directory(options.model_dir, case.model), [case])
    prompts, limits = case.prompts(), case.limits()
    short = [[limit // 4 for limit in some] for some in limits]
    # A captured graph does not outlive CUPTI's teardown between two traces (torch/profiler/profiler.py).
    os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
    with traced(first=8):  # graphs are captured and the profiler is set up
        native.rollout(case, prompts, short, seed=0)
    repetitions = []
    for number in range(NUM_REPETITIONS):
        start_s = time.perf_counter()
        native.rollout(case, prompts, limits, seed=1 + number)
        rollout_s = time.perf_counter() - start_s
        with traced(first=case.completion_tokens // 2 - NUM_STEPS // 2) as kernels:
            native.rollout(case, prompts, limits, seed=1 + number)
        steps = split_steps(kernels)
        repetitions.append(
            {
                "rollout_s": rollout_s,
                "traced_step_s": statistics.median(step[-1].end_s - step[0].start_s for step in steps),
                "num_kernels": len(steps[0]),
                "seconds": medians([seconds_by_role(step) for step in steps]),
                "names": dict(names(steps[0])),
            }
        )
    flops_per_s, bytes_per_s = product_flops_per_s(), copy_bytes_per_s()
    seconds = medians([one["seconds"] for one in repetitions])
    least = least_s(case, flops_per_s, bytes_per_s)
    # What a product does on the way to its result moves no bytes of its own.
    for kernel, role in PASSES.items():
        if kernel not in repetitions[0]["names"].get(role, ()):
            del least[role]
    rollout_s = statistics.median(one["rollout_s"] for one in repetitions)
    for role, role_s in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{role:24}{role_s * 1e6:9.0f} µs{least.get(role, 0.0) * 1e6:9.0f} µs at least")
    path = write_result(
        name,
        options.hardware,
        {
            "step_s": rollout_s / case.completion_tokens,
            "traced_step_s": statistics.median(one["traced_step_s"] for one in repetitions),
            "least_step_s": sum(least.values()),
        },
        repetitions,
        commit,
        machine=machine(),
        case=vars(case),
        seconds=seconds,
        least_s=least,
        flops_per_s=flops_per_s,
        copy_bytes_per_s=bytes_per_s,
    )
    print(path)


def names(step: list[Kernel]) -> Iterator[tuple[str, list[str]]]:
    """Role -> the kernels that have it."""
    pairs = sorted({(role, kernel.name[:200]) for kernel, role in zip(step, roles(step), strict=True)})
    for role, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield role, [name for _, name in group]


if __name__ == "__main__":
    main()
