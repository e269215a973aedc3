"""Tables of docs/benchmarks.md, as Markdown from their results.

    python -m benchmarks.pages.tables benchmarks/results/rollout-h200.json

Of the results rollout, decode-swiglu, decode-profile, modes and lag.
"""

from __future__ import annotations

import argparse
import json
import string
from pathlib import Path
from typing import Any

NAMES = {"native": "native", "colocate": "vLLM colocated", "server": "vLLM server"}


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
    """Speedups by model and number of rows, from the result of `kernels/matmul/swiglu.py`."""
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


def decode_table(result: dict[str, Any]) -> list[str]:
    """Steps at few rows of two commits, the older one first, from the result of `rollout/decode_suite.py`."""
    before, after = result["setup"]["runs"].values()
    lines = ["| rows | before, ms | ms | floor's share before | floor's share |", "|---" * 5 + "|"]
    for rows in result["setup"]["cases"]:
        steps = [run[f"decode_step_s_{rows}rows"] * 1e3 for run in (before, after)]
        shares = [run[f"decode_fraction_of_floor_{rows}rows"] for run in (before, after)]
        cells = [*(f"{step:.2f}" for step in steps), *(f"{share:.2f}" for share in shares)]
        lines.append(f"| {rows} | {' | '.join(cells)} |")
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


def profiles_table(results: dict[int, dict[str, Any]]) -> list[str]:
    """A row for each part of profiled steps at few rows, from their results by number of rows."""
    parts: dict[str, list[str]] = {}
    for number, result in enumerate(results.values()):
        seconds, least = result["setup"]["seconds"], dict(result["setup"]["least_s"])
        # No two rows share a prompt, so one kernel reads prompts and completions.
        least["attention, completions"] += least.pop("attention, prompts")
        for part, part_s in sorted(seconds.items(), key=lambda item: -item[1]):
            cells = parts.setdefault(part, ["–"] * (2 * len(results)))
            bound = f"{least[part] * 1e6:,.0f}" if part in least else "–"
            cells[2 * number : 2 * number + 2] = [f"{part_s * 1e6:,.0f}", bound]
        whole = parts.setdefault("whole step", ["–"] * (2 * len(results)))
        claims = result["claims"]
        whole_us = [claims[name] * 1e6 for name in ("traced_step_s", "least_step_s")]
        whole[2 * number : 2 * number + 2] = [f"{us:,.0f}" for us in whole_us]
    parts["whole step"] = parts.pop("whole step")
    heads = [f"{rows} rows, µs | at least" for rows in results]
    lines = [f"| part of a step | {' | '.join(heads)} |", "|---" * (2 * len(results) + 1) + "|"]
    return lines + [f"| {part.partition(',')[0] if part.startswith('att') else part} | {' | '.join(cells)} |"
                    for part, cells in parts.items()]  # fmt: skip


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


LAG_TASKS = {
    "quickstart": "quickstart",
    "calculator": "tool",
    "quickstart_quarter": "quickstart, ¼ rate",
    "calculator_quarter": "tool, ¼ rate",
}
LAG_SETTINGS = {"lag0": "lag 0", "lag1": "lag 1", "lag2": "lag 2", "refill": "refill"}


def lag_table(result: dict[str, Any]) -> list[str]:
    """A row for each task and setting of `curves/lag.py`: by how many updates a token is older than the
    weights it trains, tokens over those of lag 0, rewards with the lowest and the highest of its seeds, and
    their differences to lag 0 over seeds."""
    claims, rows = result["claims"], result["setup"]["summary"]
    base = {row["task"]: row["num_tokens"] for row in rows if row["setting"] == "lag0"}
    lines = [
        "| task | setting | age | × tokens | last steps | less lag 0 | all steps | less lag 0 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        key = f"{row['task']}_{row['setting']}"
        cells = [
            LAG_TASKS[row["task"]],
            LAG_SETTINGS[row["setting"]],
            f"{row['policy_lag/mean']:.2f}" if "policy_lag/mean" in row else "–",
            f"{row['num_tokens'] / base[row['task']]:.2f}",
        ]
        for figure in ("final_reward", "mean_reward"):
            low, high = row[f"{figure}_range"]
            cells.append(f"{claims[f'{figure}_{key}']:.3f} ({low:.2f} to {high:.2f})")
            if (difference := claims.get(f"{figure}_difference_{key}")) is None:
                cells.append("–")
            else:
                error = claims[f"{figure}_difference_error_{key}"]
                cells.append(f"{difference:+.3f} ± {error:.3f}".replace("-", "−"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    result = json.loads(parser.parse_args().result.read_text())
    parts = {
        "rollout": rollout_table,
        "decode": decode_table,
        "decode-swiglu": swiglu_table,
        "decode-profile": profile_table,
        "modes": lambda result: modes_table(result["setup"]["summary"]),
        "lag": lag_table,
    }
    print(*parts[result["name"]](result), sep="\n")


if __name__ == "__main__":
    main()
