"""What the pages say of rollouts in 8 bits is what the result files have."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from colocate.config import rollout_precision

ROOT = Path(__file__).parents[2]


def words(text: str) -> str:
    return " ".join(text.split())


def page(name: str) -> str:
    return words((ROOT / f"docs/{name}.md").read_text())


BENCHMARKS, ENGINE = page("benchmarks"), page("native-engine")
SECTION = BENCHMARKS.partition("## Rollouts in 8 bits on one H100")[2].partition("## ")[0]
FILE = json.loads((ROOT / "benchmarks/results/precision-h100.json").read_text())
CLAIMS: dict[str, float] = FILE["claims"]
PRECISIONS = ("bf16", "fp8_kv", "fp8")
CASES = {
    "7b_256seq": "7B, 32 prompts × 8, 512 + 1,024 tokens",
    "1p5b_4k_256seq": "1.5B, 256 × 1, 4,096 + 192",
    "1p5b_512seq": "1.5B, 64 × 8, 256 + 1,024",
}


def record_of(kind: str, case: str | None = None) -> dict[str, Any]:
    (record,) = (r for r in FILE["repetitions"] if r["kind"] == kind and r.get("case") == case)
    return record


def ratio(figure: str, case: str, precision: str) -> float:
    return CLAIMS[f"{figure}_{case}_bf16"] / CLAIMS[f"{figure}_{case}_{precision}"]


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def test_speed_and_memory():
    measured = []
    for case, shown in CASES.items():
        for precision in record_of("speed", case)["runs"]:
            is_base, name = precision == "bf16", f"{case}_{precision}"
            cells = [shown if is_base else "the same", f"`{precision}`"]
            for figure in ("step_ms", "rollout_s"):
                times = "–" if is_base else f"{ratio(figure, case, precision):.2f}"
                cells += [f"{CLAIMS[f'{figure}_{name}']:.2f}", times]
            weights = CLAIMS[f"weight_gb_{name}"]
            cells += [f"{CLAIMS[f'kv_cache_gb_{name}']:.1f}", f"{weights:.1f}" if weights else "–"]
            measured.append(row(*cells))
    assert " ".join(measured) in SECTION
    long = record_of("speed", "1p5b_4k_256seq")
    decoding_s = long["completion_tokens"] * CLAIMS["step_ms_1p5b_4k_256seq_bf16"] / 1e3
    assert decoding_s < CLAIMS["rollout_s_1p5b_4k_256seq_bf16"] / 2
    assert "most of the rollout is reading them" in SECTION


def test_what_vllm_takes_in_8_bits():
    ours = CLAIMS["rollout_s_7b_256seq_fp8"]
    theirs = {
        record["kv_cache"]: statistics.median(run["seconds"] for run in record["repetitions"])
        for record in FILE["repetitions"]
        if record["kind"] == "peer"
    }
    assert theirs["fp8"] < theirs["fp8_weights"]
    assert CLAIMS["fp8_7b_256seq_vs_vllm_fp8"] == theirs["fp8"] / ours
    for said in (
        f"takes {theirs['fp8']:.1f} s for the rollout of 7B with keys and values in 8 bits, too, and "
        f"{theirs['fp8_weights']:.1f} s with these in 16",
        f"{theirs['fp8'] / ours:.2f} and {theirs['fp8_weights'] / ours:.2f} times as long as ours with `fp8`",
    ):
        assert said in SECTION, said


def test_what_was_not_measured_was_not():
    runs = {case: set(record_of("speed", case)["runs"]) for case in CASES}
    assert runs == {
        "7b_256seq": {"bf16", "fp8"},
        "1p5b_4k_256seq": {"bf16", "fp8_kv", "fp8"},
        "1p5b_512seq": {"bf16", "fp8_kv", "fp8"},
    }
    for never in ("`fp8_kv` with 7B", "an H200", "rewards of training on a GPU"):
        assert never in SECTION.partition("**Not measured:**")[2]
    assert not list((ROOT / "benchmarks/results").glob("precision*h200*"))


def test_log_ratios():
    for shown, claim, digits in (
        ("standard deviation of a token's log-ratio", "log_ratio_sd_{}", 4),
        ("largest log-ratio of a token", "log_ratio_max_{}", 3),
        ("share of the samples that counts, 1,024 tokens", "effective_share_{}_1024", 2),
        ("share of the samples that counts, 8,192 tokens", "effective_share_{}_8192", 2),
    ):
        assert row(shown, *(f"{CLAIMS[claim.format(p)]:.{digits}f}" for p in PRECISIONS)) in SECTION
    record = record_of("log_ratios")
    training, most = record["training"], CLAIMS["log_ratio_max_fp8"]
    for said in (
        f"{training['num_parameters'] / 1e6:.0f} million parameters",
        f"{training['num_steps']} steps of {training['tokens_per_step']:,} tokens",
        f"{record['num_sequences']} completions of {record['num_tokens']:,} tokens",
        f"between {math.exp(-most):.2f} and {math.exp(most):.2f} here",
    ):
        assert said in SECTION, said


def test_ablations_on_a_real_model():
    file = json.loads((ROOT / "benchmarks/results/precision-ablations-cpu.json").read_text())
    ways = file["repetitions"][0]["ways"]
    for shown, part in (
        ("keys", "keys {}"),
        ("values", "values {}"),
        ("keys and values", "keys and values {}"),
        ("products: inputs and weights of q, k, v, gate, up, down", "products {}"),
        ("all", "all {}"),
    ):
        found = [ways.get(part.format(way)) for way in ("e4m3", "int8", "int8, rotated")]
        if part == "all {}":  # with keys and values that are not rotated
            found[1] = None
        cells = ["–" if x is None else f"{x['mean_abs']:.3f}, {x['sd']:.3f}" for x in found]
        assert row(shown, *cells) in SECTION
    assert f"{ways['tokens']['number']:,.0f} tokens" in SECTION


def test_the_engine_on_a_real_model():
    claims = json.loads((ROOT / "benchmarks/results/real-precision-cpu.json").read_text())["claims"]
    for shown, name, digits in (
        ("mean size", "mean_abs", 3),
        ("standard deviation", "sd", 3),
        ("largest", "max_abs", 2),
    ):
        cells = [
            f"{claims[f'log_ratio_{name}_{precision}']:.{digits}f}" for precision in ("bf16", "fp8_kv", "fp8")
        ]
        assert row(shown, *cells) in SECTION
    spreads = {name: round(claims[f"log_ratio_sd_{name}"], 2) for name in ("fp8_kv", "fp8")}
    assert spreads == rollout_precision.ASSUMED_SPREAD
    assert f"makes it {spreads['fp8_kv']} and {spreads['fp8']}" in ENGINE
    text = f's = {spreads["fp8_kv"]} with "fp8_kv" and {spreads["fp8"]} with "fp8"'
    assert text in words(rollout_precision.__doc__ or "")


def test_rewards_on_a_cpu():
    file = json.loads((ROOT / "benchmarks/results/precision-curves-cpu.json").read_text())
    claims, setup = file["claims"], file["setup"]
    assert (setup["num_seeds"], setup["num_steps"], setup["num_final_steps"]) == (3, 300, 10)
    final = [f"{claims[f'final_reward_{precision}']:.3f} with `{precision}`" for precision in PRECISIONS]
    names = [f"final_reward_difference_{precision}" for precision in ("fp8_kv", "fp8")]
    less = [f"−{-claims[name]:.3f} ± {claims[f'{name}_error']:.3f}" for name in names]
    bf16 = [statistics.mean(r["reward"][-10:]) for r in file["repetitions"] if r["precision"] == "bf16"]
    for said in (
        f"the {max(bf16) - min(bf16):.3f} that lie between the seeds of `bf16`",
        f"{setup['num_steps']} steps with {setup['num_seeds']} seeds at each precision",
        f"of the last {setup['num_final_steps']} rollouts was {final[0]}, {final[1]} and {final[2]}.",
        f"Of runs of one seed that is {less[0]} and {less[1]}, with the standard error",
        f"or of more than {setup['num_steps']} steps",
    ):
        assert said in SECTION, said
    assert all(-0.01 < claims[name] < 0 for name in names) and "end within 0.01 of its reward" in ENGINE
    assert -2.5 < claims[names[1]] / claims[f"{names[1]}_error"] < -1.5, "two standard errors"


def test_the_engine_page_repeats_them():
    for said in (
        f"4,096 tokens {ratio('step_ms', '1p5b_4k_256seq', 'fp8_kv'):.2f} times as fast",
        f"7B with 256 sequences {ratio('step_ms', '7b_256seq', 'fp8'):.2f} times as fast",
        f"1.5B with 512 {ratio('step_ms', '1p5b_512seq', 'fp8'):.2f} times",
        f"{CLAIMS['log_ratio_sd_fp8_kv']:.3f} with `fp8_kv` and {CLAIMS['log_ratio_sd_fp8']:.3f} with `fp8`",
        f"{CLAIMS['effective_share_fp8_8192']:.0%} were left of the samples with `fp8` at 8,192 tokens",
    ):
        assert said in ENGINE, said
    scales = record_of("log_ratios")["scales"]
    off = {f"{kind}_{way}": f"{error:.1%}" for kind, ways in scales.items() for way, error in ways.items()}
    for said in (
        "weights are off by {weights_matrix_power_of_two} with one power of two and by "
        "{weights_blocks_of_128x128} with a factor for each block of 128 × 128",
        "keys in e4m3 would be off by {keys_token_power_of_two}, and by {keys_token_float32} with a factor "
        "in float32",
        "`down` reads by {activations_row_power_of_two}, and by {activations_blocks_of_128} with a factor",
        "takes keys to {keys_page_first_token_times_1}",
    ):
        assert said.format(**off) in ENGINE, said
