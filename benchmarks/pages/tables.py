"""Parts of docs/benchmarks.md, as Markdown from their results: tables of the engine, the sections on modes.

python -m benchmarks.pages.tables benchmarks/results/rollout-h200.json
python -m benchmarks.pages.tables benchmarks/results/decode-profile-h200.json
python -m benchmarks.pages.tables benchmarks/results/decode-swiglu-h200.json
python -m benchmarks.pages.tables benchmarks/results/modes-h200x2.json
python -m benchmarks.pages.tables benchmarks/results/curves-h200.json
"""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path
from typing import Any

from colocate.engines.vllm.memory import MAX_NUM_SEQS

NAMES = {"native": "native", "colocate": "vLLM colocated", "server": "vLLM server"}
NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}


ROLLOUTS = {
    "1p5b_512seq_vs_vllm": "1.5B, 64 prompts × 8, 256 + 1,024 tokens",
    "1p5b_512seq_vs_vllm_nologprobs": "the same against vLLM without log-probs",
    "1p5b_128seq_vs_vllm": "1.5B, 16 × 8, 256 + 1,024",
    "1p5b_longprompt_vs_vllm": "1.5B, 16 × 16, 4,096 + 512",
    "1p5b_ragged_vs_vllm": "1.5B, 64 × 8, lengths log-normal, median 300, at most 2,048",
    "7b_256seq_vs_vllm": "7B, 32 × 8, 512 + 1,024",
}
"""The claims of `benchmarks/rollout/suite.py` that are ratios, without their first word."""


def rollout_table(result: dict[str, Any]) -> list[str]:
    """A row for each ratio and run of the rollouts' result, runs lettered in their order."""
    lines = ["| rollout | run | native | vLLM | ratio |", "|---|---|---|---|---|"]
    for claim, name in ROLLOUTS.items():
        for letter, run in zip(string.ascii_uppercase, result["setup"]["runs"].values(), strict=False):
            if (ratio := run["claims"][f"rollout_{claim}"]) is not None:
                native = run["tokens_per_s"][claim.partition("_vs_vllm")[0]]["native"]
                lines.append(f"| {name} | {letter} | {native:,.0f} | {native / ratio:,.0f} | {ratio:.2f} |")
    return lines


def swiglu_table(result: dict[str, Any]) -> list[str]:
    """Speedups by model and number of rows, from the result of `kernels/swiglu.py`."""
    rows = result["repetitions"]
    counts = sorted({row["num_rows"] for row in rows})
    lines = [f"| rows | {' | '.join(f'{count:,}' for count in counts)} |", "|---" * (len(counts) + 1) + "|"]
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for count in counts:
            speedup = result["claims"].get(f"speedup_{model.replace('.', 'p')}_{count}rows")
            cells.append("–" if speedup is None else f"{speedup:.2f}")
        lines.append(f"| {model.upper()} | {' | '.join(cells)} |")
    return lines


def profile_table(result: dict[str, Any]) -> list[str]:
    """A row for each part of a profiled decode step, the longest first."""
    seconds, least = result["setup"]["seconds"], result["setup"]["least_s"]
    lines = ["| part of a step | µs | at least |", "|---|---|---|"]
    for part, part_s in sorted(seconds.items(), key=lambda item: -item[1]):
        bound = f"{least[part] * 1e6:,.0f}" if part in least else "–"
        lines.append(f"| {part} | {part_s * 1e6:,.0f} | {bound} |")
    claims = result["claims"]
    whole_s, least_s = claims["traced_step_s"], claims["least_step_s"]
    return [*lines, f"| whole step | {whole_s * 1e6:,.0f} | {least_s * 1e6:,.0f} |"]


def mode_name(row: dict[str, Any]) -> str:
    size, copies = row["tensor_parallel_size"], row["weights"] == "buckets"
    return NAMES[row["mode"]] + (f", TP {size}" if size > 1 else "") + (", copied weights" if copies else "")


def modes_table(rows: list[dict[str, Any]]) -> list[str]:
    """The Markdown table of docs/benchmarks.md."""
    lines = [
        "| model, completions per step | mode | step, s | rollout + training | completions/s | × server | "
        "× server, normalised |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["model"], row["num_completions"])):
        ratios = [
            "–" if row[name] is None else f"{row[name]:.2f}" for name in ("vs_server", "vs_server_normalised")
        ]
        cells = [
            f"{row['model'].replace('p', '.').upper()}, {row['num_completions']:,}",
            mode_name(row),
            f"{row['step_s']:.1f}",
            " + ".join(f"{row['phases_s'][name]:.1f}" for name in ("rollout", "train")),
            f"{row['completions_per_s']:.1f}",
            *ratios,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def modes_section(result: dict[str, Any]) -> list[str]:
    """The section of the page on the modes of rollout."""
    claims, num_gpus = result["claims"], result["setup"]["num_gpus"]
    name = f"modes-{result['hardware']['name']}"
    others = "the other trains" if num_gpus == 2 else f"the other {NUMBERS[num_gpus - 1]} train"
    versions = [origin["versions"] for origin in result["setup"]["origins"].values()]
    vllm = " and ".join(sorted({found["vllm"] for found in versions if "vllm" in found}))
    copies = "".join(
        ' *Copied weights* is LoRA with `vllm_weights="buckets"`: adapters are merged and all weights '
        f"written into vLLM's copy, in {claims['publish_bucketed_7b_s']:.2f} s, after "
        f"{row['engine_s']['wake_up']:.2f} s of waking up, and a step takes {row['step_s']:.1f} s."
        for row in result["setup"]["summary"]
        if row["weights"] == "buckets"
    )
    tensor_parallel = "".join(
        f" *TP {num_gpus}* is, like the server, one engine that completes all {row['num_completions']:,}, "
        f"{MAX_NUM_SEQS} at a time: {NUMBERS[num_gpus]} times as many decode steps as with an engine on each "
        "GPU."
        for row in result["setup"]["summary"]
        if row["tensor_parallel_size"] == num_gpus and row["model"] == "1p5b"
    )
    num_timed = len(result["repetitions"][0]["steps"]) - result["setup"]["num_warm_up"]
    return [
        f"## Modes of rollout on {NUMBERS[num_gpus]} H200s",
        "",
        f"`benchmarks/modes/suite.py`, [{name}.json](../benchmarks/results/{name}.json). GRPO steps of the "
        "same global batch on the same GPUs: random weights of the Qwen2.5 shapes, bfloat16, groups of 8; "
        "1.5B full fine-tuning with 256 + 512 tokens, 7B LoRA of rank 32 with 512 + 512. With a server one "
        f"GPU serves and {others}; otherwise all GPUs generate, then all train. vLLM "
        f"{vllm}. Medians of {num_timed} steps after a first one. *Normalised* is "
        "how the comparison was first published: the server's rate times GPUs / training GPUs. Ratios are of "
        "runs on one machine.",
        "",
        *modes_table(result["setup"]["summary"]),
        "",
        "With the largest batch colocated vLLM completes "
        f"{claims['colocate_vs_server_1p5b']:.2f} times as much per second as the server with 1.5B, "
        f"{claims['colocate_vs_server_7b']:.2f} times with 7B; the native engine "
        f"{claims['native_vs_server_1p5b']:.2f} times with 1.5B. vLLM reads the trainer's parameters: in "
        f"full fine-tuning a publication moves {claims['publish_shared_bytes']:,.0f} bytes, with LoRA the "
        f"adapters alone.{copies}{tensor_parallel} Falling asleep and waking up take "
        f"{claims['sleep_wake_overhead']:.1%} of a step where vLLM reads the trainer's parameters.",
        "",
        f"![Completions per second by mode and batch size]({name}.svg)",
    ]


def curves_section(result: dict[str, Any]) -> list[str]:
    """The section of the page on the reward curves of the modes."""
    claims, summary = result["claims"], result["setup"]["summary"]
    name = f"curves-{result['hardware']['name']}"
    seeds = {record["seed"] for record in result["repetitions"]}
    rewards = ", ".join(f"{NAMES[mode]} {row['final_reward']:.3f}" for mode, row in summary.items())
    gaps = ", ".join(f"{NAMES[mode]} {claims[f'logprob_gap_{mode}']:.1e}" for mode in summary)
    return [
        "## Reward curves of the modes",
        "",
        f"`benchmarks/curves/suite.py`, [{name}.json](../benchmarks/results/{name}.json). The quickstart's "
        f"task from one warm start, {result['repetitions'][0]['num_steps']} steps, {NUMBERS[len(seeds)]} "
        "seeds for each mode, the same prompts in the same order. Mean reward of the last "
        f"{result['setup']['num_final_rollouts']} rollouts: {rewards}. Two modes differ by "
        f"{claims['final_reward_difference']:.3f} at most. One run's final reward varies over seeds with a "
        f"standard deviation of {claims['final_reward_seed_std']:.3f}, from which the difference of two "
        f"modes' means has one of {claims['final_reward_difference_std']:.3f}. The engine's log-probs are "
        "off from the trainer's by, mean over a rollout's tokens, median over rollouts, nothing clipped: "
        f"{gaps}.",
        "",
        f"![Reward by step, and the difference of log-probs]({name}.svg)",
    ]


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text())
    parts = {
        "rollout": rollout_table,
        "decode-swiglu": swiglu_table,
        "decode-profile": profile_table,
        "modes": modes_section,
        "curves": curves_section,
    }
    print(*parts[result["name"]](result), sep="\n")


if __name__ == "__main__":
    main()
