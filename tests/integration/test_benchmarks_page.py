"""Tables of `docs/benchmarks.md`: memory, log-probs, attention and adapters are those of the result files."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.step.cases import COMPARISONS, training_flop
from benchmarks.step.suite import PEAK_FLOP_PER_S

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/benchmarks.md").read_text().split())


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"benchmarks/results/{name}-h200.json").read_text())


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


MEMORY_TABLES = {
    ("context", "llama-3.1-8b", "qlora"): "Llama-3.1-8B, QLoRA: {context_8b_qlora_80gb:,} tokens | | | |",
    ("context", "qwen3-32b", "lora"): "Qwen3-32B, LoRA in bfloat16: {context_32b_lora_80gb:,} tokens | | | |",
    ("context", "qwen2.5-14b", "lora"): (
        "Qwen2.5-14B, LoRA: 32,768 tokens with {context_14b_lora_80gb:.1f} GiB | | | |"
    ),
    ("plan", "1.5b", "full"): "1.5B, full fine-tuning | | | | |",
    ("plan", "1.5b", "lora"): "1.5B, LoRA | | | | |",
    ("plan", "7b", "lora"): "7B, LoRA | | | | |",
    ("plan", "llama-3.1-8b", "qlora"): "Llama-3.1-8B, QLoRA | | | | |",
}
"""Headings of the rows of a model."""


def memory_rows() -> list[str]:
    """Each model's rows under its heading, as one text."""
    file = result("memory")
    rows: dict[tuple[str, str, str], list[str]] = {key: [] for key in MEMORY_TABLES}
    for run in file["repetitions"]:
        peak, plan = run["driver_peak_bytes"], run["predicted_peak_bytes"]
        assert run["passed"]
        cells = [f"{run['prompt_tokens']:,} + {run['completion_tokens']:,}", run["num_generations"]]
        if run["kind"] == "context":
            assert peak <= run["cap_bytes"]
            cells += [f"{run['cap_bytes'] / 2**30:.1f}", f"{peak / 2**30:.1f}"]
        else:
            error = abs(plan - peak) / peak
            assert error <= file["claims"]["plan_error"]
            cells += [f"{plan / 2**30:.2f}", f"{peak / 2**30:.2f}", f"{error:.1%}"]
        rows[run["kind"], run["model"], run["method"]].append(row(*cells))
    return [
        " ".join([f"| {heading.format(**file['claims'])}", *rows[key]])
        for key, heading in MEMORY_TABLES.items()
    ]


def gib(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib > 102 else f"{mib / 1024:.2f} GiB"


def logprob_rows() -> list[str]:
    claims = result("logprobs")["claims"]
    rows = []
    for case in ("1p5b_frozen", "1p5b_trained", "7b_frozen", "7b_trained"):
        peers = ("full_logits", "liger", "cce", "cce_exact")
        times = [claims[f"{case}_ms"] * claims[f"{case}_vs_{peer}"] for peer in peers]
        peaks = [claims[f"{case}_peak_mib"] * claims[f"{case}_memory_vs_{peer}"] for peer in peers]
        ours = f"{claims[f'{case}_ms']:.0f} ms, {gib(claims[f'{case}_peak_mib'])}"
        theirs = [f"{ms:.0f} ms, {gib(mib)}" for ms, mib in zip(times, peaks, strict=True)]
        model, head = case.split("_")
        rows.append(row(f"{model.replace('p', '.').upper()}, head {head}", ours, *theirs))
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
        assert line in PAGE, line


def test_figures_in_the_text_are_those_of_the_results():
    memory, logprobs = result("memory"), result("logprobs")
    assert f"within {memory['claims']['plan_error']:.1%} of" in PAGE
    (chunk,) = {
        run["train_plan"]["logprob_chunk_size"]
        for run in memory["repetitions"]
        if run["kind"] == "context" and run["model"] == "qwen3-32b"
    }
    assert f"({chunk} tokens for 32B above)" in PAGE
    errors = {
        mine: {
            round(run["hidden_error"], digits)
            for run in logprobs["repetitions"]
            if run["variant"].startswith(names)
        }
        for mine, names, digits in ((True, "colocate", 3), (False, ("liger", "full logits"), 2))
    }
    assert max(errors[True]) == 0.003 and errors[False] == {0.02}
    assert "errors against float64 are 0.003, those of Liger and of full logits in bfloat16 0.02" in PAGE


def test_starts_and_a_small_batch_on_an_h100_are_those_of_the_results():
    start = json.loads((ROOT / "benchmarks/results/start-h100.json").read_text())
    done = [r["done_after_s"] for r in start["repetitions"] if r["kind"] == "cold_start"]
    imports, load, complete = (
        median(one[phase] - (one[before] if before else 0) for one in done)
        for before, phase in ((None, "import"), ("import", "load"), ("load", "complete"))
    )
    assert (
        f"it takes {start['claims']['start_cold_s']:.1f} s: {imports:.1f} s until PyTorch and transformers "
        f"are imported, {load:.1f} s to load the model and {complete:.1f} s to the completion."
    ) in PAGE
    assert f"takes {start['claims']['first_step_over_steady']:.1f} times as long as a later one." in PAGE
    rollout = json.loads((ROOT / "benchmarks/results/rollout-h100.json").read_text())
    first, second = rollout["setup"]["runs"].values()
    rates = [f"{run['tokens_per_s']['1p5b_8seq']['native']:,.0f}" for run in (first, second)]
    ratios = [f"{run['claims']['rollout_1p5b_8seq_vs_vllm']:.2f}" for run in (first, second)]
    assert (
        f"come at {' and '.join(rates)} tokens per second, {' and '.join(ratios)} times as fast as vLLM's"
        in PAGE
    )
    many, ragged = (second["claims"][f"rollout_1p5b_{case}_vs_vllm"] for case in ("512seq", "ragged"))
    assert f"64 × 8 of them are {many:.2f} times as fast as vLLM's, and those of log-normal" in PAGE
    assert f"lengths {ragged:.2f} times" in PAGE
    assert [first["claims"][f"rollout_1p5b_{case}_vs_vllm"] for case in ("512seq", "ragged")] == [None, None]


def test_a_step_on_an_h100_is_that_of_the_result():
    file = json.loads((ROOT / "benchmarks/results/step-h100.json").read_text())
    theirs, ours = (file["setup"]["summary"][f"{who} 1p5b"] for who in ("trl", "colocate"))
    of_h200 = result("step")["setup"]["summary"]["trl 1p5b"]
    assert theirs["num_steps"] == ours["num_steps"] == 6
    assert (
        f"TRL takes {theirs['step_s']:.1f} s and colocate {ours['step_s']:.1f}, "
        f"{file['claims']['step_1p5b_vs_trl']:.2f} times."
    ) in PAGE
    assert (
        f"{theirs['phases_s']['generate']:.1f} s of these {theirs['step_s']:.1f}, where it was "
        f"{of_h200['phases_s']['generate']:.1f} of {of_h200['step_s']:.1f}."
    ) in PAGE
    assert result("step")["claims"]["step_1p5b_vs_trl"] < file["claims"]["step_1p5b_vs_trl"]


def test_where_training_goes_is_what_was_measured():
    flop = training_flop(COMPARISONS["1p5b"].work, shares_prompts=True)["total"]
    files = [
        json.loads((ROOT / f"benchmarks/results/step-profile-{name}.json").read_text())["claims"]
        for name in ("h200", "h100")
    ]
    parts = [name for name in files[0] if name.startswith("share of ")]
    for name in parts:
        shares = " | ".join(f"{file[name]:.1%}" for file in files)
        assert f"| {name.removeprefix('share of ')} | {shares} |" in PAGE
    assert all(sum(file[name] for name in parts) == pytest.approx(1, abs=0.01) for file in files)
    said = [f"{file['train_s']:.2f} s on an" for file in files]
    assert all(phrase in PAGE for phrase in said)
    of_peak = [f"{flop / file['train_s'] / PEAK_FLOP_PER_S:.0%}" for file in files]
    assert f"{said[0]} H200, {of_peak[0]} of its peak, and {said[1]} H100, {of_peak[1]}." in PAGE
    rates = [f"{file['product_flop_per_s'] / 1e12:.0f}" for file in files]
    assert f"Products run at {rates[0]} and {rates[1]} TFLOP/s, about seven tenths" in PAGE
    assert all(0.65 < file["product_flop_per_s"] / PEAK_FLOP_PER_S < 0.75 for file in files)


def test_starts_on_a_cpu_are_those_of_the_result():
    claims = json.loads((ROOT / "benchmarks/results/start-cpu.json").read_text())["claims"]
    cpu = {name.removesuffix("_cpu_s"): s for name, s in claims.items() if name.endswith("_cpu_s")}
    quick = ("version", "help", "wrong_option", "wrong_model", "report")
    assert f"answers within {max(cpu[case] for case in quick):.1f} s, such as `colocate report`" in PAGE
    found, before = cpu["wrong_model"], cpu["wrong_model_before"]
    assert f"says so after {found:.1f} s, where it took {before:.1f}." in PAGE
    found, before = cpu["first_completion"], cpu["first_completion_before"]
    assert f"takes {found:.1f} s from the start of `colocate chat`, where it took {before:.1f}." in PAGE
    takes = f"takes {cpu['plan']:.1f} s, importing the trainer {cpu['import_trainer']:.1f} s"
    assert f"{takes} and a run of one step {cpu['first_step']:.1f} s, all within 3% of" in PAGE
    for case in ("plan", "import_trainer", "first_step"):
        assert cpu[case] == pytest.approx(cpu[f"{case}_before"], rel=0.03)
