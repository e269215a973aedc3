"""What docs/benchmarks.md says of rollouts, modes, lag and refilling is what their results say."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import pictures
from benchmarks.pages import tables as pages

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"

NAMES = {"native": "native", "colocate": "vLLM colocated", "server": "vLLM server"}
MODELS = {"1p5b": "1.5B", "7b": "7B"}


def flat(text: str) -> str:
    return " ".join(text.split())


def section_of(name: str) -> str:
    """The part of the page that links to a result, in one line."""
    page = (ROOT / "docs/benchmarks.md").read_text()
    (section,) = [part for part in re.split(r"^## ", page, flags=re.MULTILINE) if f"[{name}.json]" in part]
    assert (ROOT / "docs" / f"{name}.svg").exists() and f"({name}.svg)" in section
    return flat(section)


def check_modes(section: str, result: dict[str, Any]) -> None:
    rows, claims = result["setup"]["summary"], result["claims"]
    origins = {label: (o["commit"], o["machine"]) for label, o in result["setup"]["origins"].items()}

    def run(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["model"], row["num_completions"], *origins[row["label"]]

    servers = {run(row): row for row in rows if row["mode"] == "server"}
    for row in rows:
        size = row["tensor_parallel_size"]
        cells = [
            f"{MODELS[row['model']]}, {row['num_completions']:,}",
            NAMES[row["mode"]]
            + (f", TP {size}" if size > 1 else "")
            + (", copied weights" if row["weights"] == "buckets" else ""),
            f"{row['step_s']:.1f}",
            f"{row['phases_s']['rollout']:.1f} + {row['phases_s']['train']:.1f}",
            f"{row['num_completions'] / row['step_s']:.1f}",
        ]
        if server := servers.get(run(row)):
            num_gpus = result["setup"]["num_gpus"]
            plain = server["step_s"] / row["step_s"]
            cells.append(f"{plain:.2f}")
            cells.append(f"{1.0 if row is server else plain * (num_gpus - 1) / num_gpus:.2f}")
        else:
            cells += ["–", "–"]
        assert f"| {' | '.join(cells)} |" in section, cells
    copied = [row for row in rows if row["weights"] == "buckets"]
    assert len(copied) == section.count("*Copied weights*") <= 1
    for text in (
        f"colocated vLLM completes {claims['colocate_vs_server_1p5b']:.2f} times",
        f"{claims['colocate_vs_server_7b']:.2f} times with 7B",
        f"native engine {claims['native_vs_server_1p5b']:.2f} times with 1.5B",
        f"a publication moves {claims['publish_shared_bytes']:,.0f} bytes",
        *(
            f"in {claims['publish_bucketed_7b_s']:.2f} s, after {row['engine_s']['wake_up']:.2f} s of "
            f"waking up, and a step takes {row['step_s']:.1f} s."
            for row in copied
        ),
        f"take {100 * claims['sleep_wake_overhead']:.1f}% of a step",
    ):
        assert text in section, text


def check_curves(section: str, result: dict[str, Any]) -> None:
    claims = result["claims"]
    for mode, name in NAMES.items():
        runs = [record for record in result["repetitions"] if record["mode"] == mode]
        last = [sum(r["reward"][-10:]) / len(r["reward"][-10:]) for r in runs]
        assert f"{name} {sum(last) / len(last):.3f}" in section
        assert f"{name} {claims[f'logprob_gap_{mode}']:.1e}" in section
    assert f"differ by {claims['final_reward_difference']:.3f} at most" in section
    assert f"deviation of {claims['final_reward_seed_std']:.3f}" in section
    assert f"one of {claims['final_reward_difference_std']:.3f}" in section


def test_the_table_of_products_is_the_generated_one() -> None:
    result = json.loads((RESULTS / "decode-swiglu-h200.json").read_text())
    table = "\n".join(pages.swiglu_table(result))
    assert f"\n{table}\n\n" in (ROOT / "docs/benchmarks.md").read_text()
    for row in result["repetitions"]:
        one, two = (statistics.median(row["seconds"][way]) for way in ("one kernel", "two kernels"))
        name = f"speedup_{row['model'].replace('.', 'p')}_{row['num_rows']}rows"
        assert result["claims"][name] == pytest.approx(two / one)


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_the_table_of_steps_at_few_rows_is_the_generated_one(gpu: str) -> None:
    result = json.loads((RESULTS / f"decode-{gpu}.json").read_text())
    table = "\n".join(pages.decode_table(result))
    assert f"\n{table}\n\n" in (ROOT / "docs/benchmarks.md").read_text()
    before, after = result["setup"]["runs"].values()
    assert after == result["claims"]
    assert len({run.partition(" on ")[2] for run in result["setup"]["runs"]}) == 1, "the same card"
    for rows in result["setup"]["cases"]:
        assert after[f"decode_step_s_{rows}rows"] < before[f"decode_step_s_{rows}rows"]


def test_the_table_of_few_rows_parts_is_the_generated_one() -> None:
    results = {
        rows: json.loads((RESULTS / f"decode-profile-{rows}rows-h100.json").read_text())
        for rows in (8, 64, 128)
    }
    table = "\n".join(pages.profiles_table(results))
    assert f"\n{table}\n\n" in (ROOT / "docs/benchmarks.md").read_text()
    for rows, result in results.items():
        case, seconds = result["setup"]["case"], result["setup"]["seconds"]
        assert case["num_prompts"] * case["num_generations"] == rows
        assert sum(seconds.values()) == pytest.approx(result["claims"]["traced_step_s"], rel=0.02)


def test_the_table_of_a_steps_parts_is_the_generated_one() -> None:
    result = json.loads((RESULTS / "decode-profile-h200.json").read_text())
    table = "\n".join(pages.profile_table(result))
    assert f"\n{table}\n\n" in (ROOT / "docs/benchmarks.md").read_text()
    seconds, least = result["setup"]["seconds"], result["setup"]["least_s"]
    assert sum(seconds.values()) == pytest.approx(result["claims"]["traced_step_s"], rel=0.02)
    assert sum(least.values()) == pytest.approx(result["claims"]["least_step_s"])
    rollout = json.loads((RESULTS / "rollout-h200.json").read_text())
    assert result["setup"]["machine"] in list(rollout["setup"]["runs"])[3], "the page says run D"


def test_the_table_of_rollouts_is_the_generated_one() -> None:
    result = json.loads((RESULTS / "rollout-h200.json").read_text())
    table = "\n".join(pages.rollout_table(result))
    assert f"\n{table}\n\n" in (ROOT / "docs/benchmarks.md").read_text()
    of_runs = [run["claims"] for run in result["setup"]["runs"].values()]
    ratios = [
        value for run in of_runs for name, value in run.items() if name.startswith("rollout_") and value
    ]
    assert table.count("\n") == 1 + len(ratios), "a ratio is not in the table"


def test_figures_of_modes_are_those_of_the_benchmark() -> None:
    check_modes(section_of("modes-h200x2"), json.loads((RESULTS / "modes-h200x2.json").read_text()))


def test_readme_and_guide_say_what_the_modes_are_worth() -> None:
    result = json.loads((RESULTS / "modes-h200x2.json").read_text())
    claims = result["claims"]
    plain, native = (f"{claims[f'{name}_vs_server_1p5b']:.1f}" for name in ("colocate", "native"))
    lora = f"{claims['colocate_vs_server_7b']:.1f}"
    (native_lora,) = {
        f"{row['vs_server']:.1f}"
        for row in result["setup"]["summary"]
        if (row["model"], row["mode"], row["num_completions"]) == ("7b", "native", 512)
    }
    readme = flat((ROOT / "README.md").read_text())
    assert (
        f"they complete {plain} times as many samples per second in full fine-tuning of 1.5B, and {lora} "
        "times" in readme
    )
    assert f"With the native engine in place of vLLM, it is {native} times as many for 1.5B." in readme
    guide = flat((ROOT / "docs/vllm.md").read_text())
    assert f"do {plain} times the work of 1.5B" in guide and f"{native} times with the native engine" in guide
    assert f"of 7B with LoRA {lora} and {native_lora} times" in guide
    rows = {row["label"]: row for row in result["setup"]["summary"]}
    over_two, on_each = (
        f"{rows[f'1p5b-colocate{tp}-1024']['phases_s']['rollout']:.1f} s" for tp in ("-tp2", "")
    )
    assert f"took {over_two} with one engine over two GPUs, and {on_each}, on another machine" in guide
    woken_s = rows["7b-colocate-buckets-512"]["engine_s"]["wake_up"]
    assert f"took {claims['publish_bucketed_7b_s']:.2f} s for 7B, after {woken_s:.2f} s of waking up" in guide


def test_figures_of_curves_are_those_of_the_benchmark() -> None:
    check_curves(section_of("curves-h200"), json.loads((RESULTS / "curves-h200.json").read_text()))


LAG_CASES = {
    "quickstart": ("lag0", "lag1", "lag2", "refill"),
    "calculator": ("lag0", "lag1", "lag2", "refill"),
    "quickstart_quarter": ("lag0", "lag1", "lag2"),
    "calculator_quarter": ("lag0", "lag1", "lag2"),
}
"""The settings of each task of the result."""


def last_ten(reward: list[float]) -> float:
    return sum(reward[-10:]) / 10


def check_lag(result: dict[str, Any]) -> None:
    """Every claim is of the rewards in the file: three runs of each setting, paired by their seeds."""
    rewards = {(r["task"], r["setting"], r["seed"]): r["reward"] for r in result["repetitions"]}
    assert len(rewards) == len(result["repetitions"]) == 3 * sum(map(len, LAG_CASES.values()))
    figures = {"final_reward": last_ten, "mean_reward": statistics.mean}
    names = set()
    for task, setting in ((task, setting) for task, settings in LAG_CASES.items() for setting in settings):
        for name, figure in figures.items():
            values = [figure(rewards[task, setting, seed]) for seed in range(3)]
            expected = {f"{name}_{task}_{setting}": statistics.mean(values)}
            if setting != "lag0":
                base = [figure(rewards[task, "lag0", seed]) for seed in range(3)]
                differences = [a - b for a, b in zip(values, base, strict=True)]
                error = statistics.stdev(differences) / 3**0.5
                expected[f"{name}_difference_{task}_{setting}"] = statistics.mean(differences)
                expected[f"{name}_difference_error_{task}_{setting}"] = error
            assert {key: result["claims"][key] for key in expected} == pytest.approx(expected)
            names |= expected.keys()
    assert names == result["claims"].keys()


def check_collapses(section: str, result: dict[str, Any]) -> None:
    """The page says how many runs end with less reward than the warm start has, and what a lag costs the
    others."""

    def num_collapsed(tasks: tuple[str, ...], settings: tuple[str, ...]) -> tuple[int, int]:
        runs = [r for r in result["repetitions"] if r["task"] in tasks and r["setting"] in settings]
        return sum(last_ten(r["reward"]) < r["reward"][0] for r in runs), len(runs)

    own, quarter, lags = (
        ("quickstart", "calculator"),
        ("quickstart_quarter", "calculator_quarter"),
        ("lag1", "lag2"),
    )
    assert "{} of {} runs with a lag end".format(*num_collapsed(own, lags)) in section
    assert num_collapsed(("quickstart",), ("lag2",)) == (3, 3)
    assert [num_collapsed((task,), ("lag1",))[0] for task in own] == [1, 1]
    assert num_collapsed(own, ("lag0", "refill"))[0] == num_collapsed(quarter, ("lag0", *lags))[0] == 0
    costs = [
        -result["claims"][f"final_reward_difference_{task}_{lag}"]
        for task, lag in itertools.product(quarter, lags)
    ]
    assert f"what a lag costs is at most {max(costs):.3f} of the reward at the end" in section


def test_figures_of_lag_and_refilling_are_those_of_the_benchmark() -> None:
    result = json.loads((RESULTS / "lag-cpu.json").read_text())
    check_lag(result)
    section = section_of("lag-cpu")
    assert flat("\n".join(pages.lag_table(result))) in section
    setup = result["setup"]
    assert f"batches of {setup['batch_size']} completions, on-policy at lag 0" in section
    assert f"the engine has {setup['num_rows']} rows" in section
    assert f"the last {setup['num_final_steps']} steps" in section
    check_collapses(section, result)
    picture = pictures.picture(pictures.lag_panels(result))
    assert picture == (ROOT / "docs/lag-cpu.svg").read_text(), "the picture is of another result"
