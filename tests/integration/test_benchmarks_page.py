"""Tables of `docs/benchmarks.md`: memory, log-probs, attention and adapters are those of the result files."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/benchmarks.md").read_text().split())


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"benchmarks/results/{name}-h200.json").read_text())


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def memory_rows() -> list[str]:
    file = result("memory")
    rows = []
    for run in file["repetitions"]:
        peak, plan = run["driver_peak_bytes"], run["predicted_peak_bytes"]
        assert run["passed"]
        cells = (f"{run['prompt_tokens']:,} + {run['completion_tokens']:,}", run["num_generations"])
        if run["cap_bytes"]:
            assert peak <= run["cap_bytes"]
            rows.append(row(*cells, f"{run['cap_bytes'] / 2**30:.1f}", f"{peak / 2**30:.1f}"))
        else:
            assert abs(plan - peak) / peak <= file["claims"]["plan_error"]
            rows.append(
                row(*cells, f"{plan / 2**30:.2f}", f"{peak / 2**30:.2f}", f"{abs(plan - peak) / peak:.1%}")
            )
    return rows


def logprob_rows() -> list[str]:
    claims = result("logprobs")["claims"]
    rows = []
    for case in ("1p5b_frozen", "1p5b_trained", "7b_frozen", "7b_trained"):
        peers = ("full_logits", "liger", "cce", "cce_exact")
        times = [claims[f"{case}_ms"] * claims[f"{case}_vs_{peer}"] for peer in peers]
        peaks = [claims[f"{case}_peak_mib"] * claims[f"{case}_memory_vs_{peer}"] for peer in peers]
        ours = f"{claims[f'{case}_ms']:.0f} ms, {claims[f'{case}_peak_mib'] / 1024:.1f} GiB"
        theirs = [f"{ms:.0f} ms, {mib / 1024:.1f} GiB" for ms, mib in zip(times, peaks, strict=True)]
        rows.append(row(ours, *theirs))
    return rows


def attention_rows() -> list[str]:
    file = result("attention")
    rows = []
    for case in file["repetitions"]:
        cells = [
            sum(median(case[way][part]) for part in ("forward_s", "backward_s")) * 1e3
            for way in ("flash", "cudnn")
        ]
        assert cells[0] / cells[1] == pytest.approx(file["claims"][f"cudnn_vs_flash {case['case']}"])
        rows.append(row(case["case"], *(f"{ms:.2f}" for ms in cells)))
    return rows


def adapter_rows() -> list[str]:
    claims = result("decode-lora")["claims"]
    ways = ("engine", "matrix_products")
    return [
        row(num_rows, *(f"{claims[f'{way}_adds_s_{num_rows}_rows'] * 1e3:.2f}" for way in ways))
        for num_rows in (8, 32, 128, 512)
    ]


@pytest.mark.parametrize("rows", [memory_rows, logprob_rows, attention_rows, adapter_rows])
def test_tables_are_those_of_the_results(rows):
    for line in rows():
        assert line.removeprefix("| ") in PAGE, line


def test_contexts_are_those_of_the_results():
    claims = result("memory")["claims"]
    assert f"{claims['context_8b_qlora_80gb']:,} tokens" in PAGE
    assert f"{claims['context_32b_lora_80gb']:,} tokens" in PAGE
    assert f"with {claims['context_14b_lora_80gb']:.1f} GiB" in PAGE
    assert f"within {claims['plan_error']:.1%}" in PAGE
