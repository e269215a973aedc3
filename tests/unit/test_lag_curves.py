"""The curves of lag and refilling: what is run, what a record has of a run, claims, picture and table."""

from __future__ import annotations

import json
import math
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks.curves import lag, tool_task
from benchmarks.curves import run as curves_run
from benchmarks.pages import pictures, tables


@pytest.fixture
def away_from_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what importing the example leaves behind: names as plain as its neighbour's, `chat`."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.mark.usefixtures("away_from_examples")
def test_a_run_of_the_tool_task_leaves_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool_task.write_start(tmp_path / "start", num_steps=2)
    words = [
        *("run", "--task", "calculator", "--steps", "2", "--start", tmp_path / "start", "--curves", "reward"),
        *("--label", "task=calculator", "setting=refill", "seed=1", "--out", tmp_path / "record.json"),
        *("--option", "seed=1", "max_refill_rounds=1", "refill_reward=is_right"),
    ]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    monkeypatch.setenv("COLOCATE_COMMIT", "a commit")
    curves_run.main()
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["task"], record["setting"], record["seed"]) == ("calculator", "refill", 1)
    # After two steps of imitation nothing is right: all groups are dull, and all are replaced once, in the
    # second step by what its first rollout asks for beyond a batch.
    assert record["reward"] == [0.0] * 2 and "gap_mean" not in record
    # Two rollouts in each step, prompts of 16 tokens.
    assert record["num_tokens"] > 2 * 2 * 128 * (16 + 1)
    assert (record["means"]["refill/dull_groups"], record["means"]["refill/rounds"]) == (1.0, 0.5)
    assert record["commit"] == "a commit"


class RecordedSuite(lag.LagSuite):
    """Writes down its commands instead of running them."""

    commands: list[list[str]]

    def run(self, *command: Any, **others: Any) -> str:
        self.commands.append([str(word) for word in command])
        return ""


def commands(tmp_path: Path, *words: str) -> list[list[str]]:
    start = tmp_path / "quickstart/data/test.jsonl"  # it is there
    start.parent.mkdir(parents=True, exist_ok=True)
    start.touch()
    suite = RecordedSuite(lag.LagSuite.parse(["--records", str(tmp_path), "--jobs", "1", *words]), "a commit")
    suite.commands = []
    suite.measure("runs")
    return suite.commands


def options_of(command: list[str]) -> dict[str, str]:
    after = command[command.index("--option") + 1 : command.index("--out")]
    labels = command[command.index("--label") + 1 : command.index("--option")]
    return dict(word.split("=") for word in [*labels, *after])


def test_every_setting_runs_with_every_seed(tmp_path: Path) -> None:
    start, *runs = commands(tmp_path)
    assert start == ["curves.tool_task", str(tmp_path / "calculator")]
    found = [options_of(run) for run in runs]
    assert len({(run["task"], run["setting"], run["seed"]) for run in found}) == len(found) == 2 * (4 + 3) * 3
    started = {run[run.index("--task") + 1]: Path(run[run.index("--start") + 1]) for run in runs}
    assert started == {task: tmp_path / task for task in ("quickstart", "calculator")}
    names = {"task", "setting", "seed", "max_num_seqs"}
    expected = {
        "lag0": {},
        "lag1": {"max_policy_lag": "1"},
        "lag2": {"max_policy_lag": "2"},
        "refill": {"max_refill_rounds": "3"},
    }
    for run in found:
        task, _, is_slow = run["task"].partition("_")
        own = {"steps_per_generation": "1"} if task == "quickstart" else {}
        if is_slow:
            own["learning_rate"] = "2e-4" if task == "quickstart" else "2.5e-4"
        if run["setting"] == "refill":
            own["refill_reward"] = "correct" if run["task"] == "quickstart" else "is_right"
        assert {k: v for k, v in run.items() if k not in names} == expected[run["setting"]] | own
        assert run["max_num_seqs"] == "192"


def test_a_run_that_has_a_record_is_not_repeated(tmp_path: Path) -> None:
    words = ["--tasks", "quickstart", "--settings", "lag0", "refill", "--seeds", "2"]
    before = commands(tmp_path, *words)
    done = {"task": "quickstart", "setting": "refill", "seed": 1, "commit": "a commit", "machine": "one"}
    (tmp_path / "1-record.json").write_text(json.dumps(done))
    after = commands(tmp_path, *words)
    assert len(before) == 4 and len(after) == 3
    assert not any("setting=refill" in run and "seed=1" in run for run in after)


FINALS = {"lag0": [0.8, 0.9, 0.85], "lag1": [0.78, 0.91, 0.82], "refill": [0.9, 0.9, 0.9]}


def records() -> list[dict[str, Any]]:
    """Twenty steps of each run: the first half at 0.3, the second around the final reward."""
    return [
        {
            "task": task,
            "setting": setting,
            "seed": seed,
            "reward": [0.3] * 10 + [final - 0.05, final + 0.05] * 5,
            "means": {"policy_lag/mean": 0.25 * (seed + 1)} if setting == "lag1" else {},
            "num_tokens": 3000 if setting == "refill" else 2000,
            "total_s": 60.0,
        }
        for task, setting in lag.cases_of(lag.TASKS, FINALS)
        for seed, final in enumerate(FINALS[setting])
    ]


def result() -> dict[str, Any]:
    claims = lag.compute_claims(records(), list(lag.TASKS), list(FINALS), 3)
    return {"claims": claims, "setup": {"summary": lag.summary(records())}, "repetitions": records()}


def test_differences_are_of_runs_of_one_seed() -> None:
    claims = result()["claims"]
    for task in lag.TASKS:
        assert claims[f"final_reward_{task}_lag0"] == pytest.approx(0.85)
        assert f"final_reward_difference_{task}_lag0" not in claims
    cases = lag.cases_of(lag.TASKS, ["lag1", "refill"])
    assert len(cases) == 4 + 2
    for task, setting in cases:
        differences = [a - b for a, b in zip(FINALS[setting], FINALS["lag0"], strict=True)]
        error = statistics.stdev(differences) / math.sqrt(3)
        for figure, share in (("final_reward", 1.0), ("mean_reward", 0.5)):
            key = f"{task}_{setting}"
            assert claims[f"{figure}_difference_{key}"] == pytest.approx(share * statistics.mean(differences))
            assert claims[f"{figure}_difference_error_{key}"] == pytest.approx(share * error)


def test_without_a_run_its_settings_claims_are_missing() -> None:
    missing = [record for record in records() if (record["setting"], record["seed"]) != ("lag1", 2)]
    claims = lag.compute_claims(missing, list(lag.TASKS), list(FINALS), 3)
    assert all((claims[name] is None) == name.endswith("_lag1") for name in claims)
    missing = [record for record in records() if (record["setting"], record["seed"]) != ("lag0", 2)]
    claims = lag.compute_claims(missing, list(lag.TASKS), list(FINALS), 3)
    assert all((claims[name] is None) == ("difference" in name or "lag0" in name) for name in claims)


def test_the_table_has_differences_with_their_errors() -> None:
    table = tables.lag_table(result())
    assert len(table) == 2 + 2 * 3 + 2 * 2
    assert table[2] == (
        "| quickstart | lag 0 | – | 1.00 | 0.850 (0.80 to 0.90) | – | 0.575 (0.55 to 0.60) | – |"
    )
    assert table[3] == (
        "| quickstart | lag 1 | 0.50 | 1.00 | 0.837 (0.78 to 0.91) | −0.013 ± 0.012 "
        "| 0.568 (0.54 to 0.60) | −0.007 ± 0.006 |"
    )
    assert table[7] == (
        "| tool | refill | – | 1.50 | 0.900 (0.90 to 0.90) | +0.050 ± 0.029 "
        "| 0.600 (0.60 to 0.60) | +0.025 ± 0.014 |"
    )


def test_the_picture_has_a_line_for_each_run_and_setting() -> None:
    drawn = ElementTree.fromstring(pictures.picture(pictures.lag_panels(result())))
    lines = [e.get("class", "") for e in drawn.iter() if e.tag.endswith("path")]
    assert sum(line.startswith("faint") for line in lines) == 2 * 9 + 2 * 6
    assert sum(line.startswith("curve") for line in lines) == 2 * (3 + 3) + 2 * (2 + 2)  # and the legend's
    titles = {element.text for element in drawn.iter() if element.get("class") == "title"}
    assert titles == {
        *("Reward: quickstart", "Reward: tool", "Reward: quickstart, ¼ rate", "Reward: tool, ¼ rate")
    }
    corners = [(e.get("x"), e.get("y")) for e in drawn if e.tag.endswith("svg")]
    assert len({x for x, _ in corners}) == len({y for _, y in corners}) == 2 and len(set(corners)) == 4
    texts = {element.text for element in drawn.iter()}
    assert {"lag 0", "lag 1", "refill"} <= texts and "lag 2" not in texts
