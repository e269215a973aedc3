"""What docs/benchmarks.md says of episodes, carry-over and refilling is what their result says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

TOOLS = {0.05: "a tool that takes 50 ms", 0.0: "a tool that answers at once"}
VALUES = {"step_s": "whole step", "rollout_s": "rollout"}


def only(summary: dict[str, Any], *words: str) -> dict[str, Any]:
    """The row of the summary with all of these words."""
    (row,) = [row for name, row in summary.items() if all(word in name.split(", ") for word in words)]
    return row  # type: ignore[no-any-return]


def test_figures_of_episodes_are_those_of_the_benchmark() -> None:
    result = json.loads((ROOT / "benchmarks/results/episodes-h200.json").read_text())
    claims, summary = result["claims"], result["setup"]["summary"]
    page = (ROOT / "docs/benchmarks.md").read_text()
    (part,) = [p for p in re.split(r"^## ", page, flags=re.MULTILINE) if "[episodes-h200.json]" in p]
    section = " ".join(part.split())

    ratios = {}
    for tool_s, tool in TOOLS.items():
        peer, own = (only(summary, name, "turns", f"tool_s {tool_s}") for name in ("trl", "colocate"))
        assert peer["num_sampled"] == own["num_sampled"]
        assert f"the same {int(own['num_sampled']):,} tokens" in section
        for value, name in VALUES.items():
            ratios[tool_s, value] = peer[value] / own[value]
            cells = f"{peer[value]:.1f} | {own[value]:.1f} | {ratios[tool_s, value]:.2f}"
            assert f"| {tool}: {name} | {cells} |" in section
    assert claims["multiturn_step_vs_trl"] == ratios[0.05, "step_s"]
    assert claims["multiturn_rollout_vs_trl"] == ratios[0.0, "rollout_s"]

    lag0, lag1 = (
        summary[f"colocate, carry_over, micro_batch 16{words}"] for words in ("", ", max_policy_lag 1")
    )
    for text in (
        f"1,536 calls of 50 ms are {1536 * 0.05:.0f} s of its "
        f"{only(summary, 'trl', 'tool_s 0.05')['rollout_s']:.0f}.",
        f"prefills are {claims['prefilled_tokens_over_minimum']:.2f} times the least",
        f"as `generate` does: {claims['open_vs_generate']:.2f} times",
        f"a step takes {lag1['step_s']:.1f} s where it takes {lag0['step_s']:.1f} s without, "
        f"{claims['carry_over_step_ragged']:.2f} times as fast; "
        f"the rollout is {lag1['rollout_s']:.1f} s instead of {lag0['rollout_s']:.1f}.",
        f"`max_refill_rounds=8` draws {claims['refill_overhead']:.2f} times the tokens",
    ):
        assert text in section, text
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{claims['multiturn_step_vs_trl']:.1f} times with four turns and a tool of 50 ms (" in readme
    assert f"({ratios[0.0, 'step_s']:.1f} times if the tool answers at once)" in readme
