"""What the benchmarks' suites share: results are whole or not written, and one failure stops nothing else."""

from __future__ import annotations

import json

import pytest

from benchmarks.common import results as results_file
from benchmarks.common import runner

ORIGIN = {
    "commit": "abc",
    "machine": "m",
    "hardware": {"num_cores": 16},
    "python": "3.12",
    "versions": {"torch": "2.11"},
}
RECORDS = [
    ORIGIN | {"step_s": 2.0},
    ORIGIN | {"step_s": 3.0, "versions": {"torch": "2.11", "vllm": "0.25"}},
    ORIGIN | {"step_s": 4.0},
]


def test_a_result_has_its_records_origin(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    results_file.write_suite_result("step", "h200", {"ratio": 1.5}, RECORDS, num_gpus=2)
    written = json.loads((tmp_path / "step-h200.json").read_text())
    assert (written["claims"], written["commit"], written["repetitions"]) == ({"ratio": 1.5}, "abc", RECORDS)
    assert written["setup"] == {"machine": "m", "num_gpus": 2}
    # Not of the machine and the environment in which the records are put together.
    assert written["hardware"] == {"name": "h200", "num_cores": 16} and written["python"] == "3.12"
    assert written["versions"] == {"torch": "2.11", "vllm": "0.25"}
    assert capsys.readouterr().out.strip() == str(tmp_path / "step-h200.json")
    results_file.write_suite_result("step", "h200", {"ratio": 1.5}, RECORDS, [{"step_s": 2.0}])
    assert json.loads((tmp_path / "step-h200.json").read_text())["repetitions"] == [{"step_s": 2.0}]


def test_parts_may_be_of_different_commits_and_one_part_may_not(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    records = [
        ORIGIN | {"part": "a"},
        ORIGIN | {"part": "b", "commit": "def", "machine": "n", "versions": {"torch": "2.12"}},
    ]
    for number, record in enumerate(records):
        (tmp_path / f"{number}.json").write_text(json.dumps(record))

    def part(record):
        return record["part"]

    assert runner.read_records(tmp_path, part) == records
    with pytest.raises(ValueError, match="more than one commit"):
        runner.read_records(tmp_path)
    (tmp_path / "2.json").write_text(json.dumps(records[1] | {"machine": "o"}))
    with pytest.raises(ValueError, match=r"more than one machine: \['n', 'o'\]"):
        runner.read_records(tmp_path, part)
    results_file.write_suite_result("step", "h200", {"ratio": 1.5}, records, part=part)
    written = json.loads((tmp_path / "step-h200.json").read_text())
    assert written["commit"] == "def"
    assert written["setup"]["origins"]["a"] == {
        "commit": "abc",
        "machine": "m",
        "versions": {"torch": "2.11"},
    }


def test_without_every_claim_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    results_file.write_suite_result("step", "h200", {"ratio": 1.5, "share": None, "gap": None}, [])
    assert not list(tmp_path.iterdir())
    assert "2 of 3 claims are missing, the first share" in capsys.readouterr().out


def test_a_noted_failure_stops_nothing_until_the_end(tmp_path):
    suite = runner.Runner(tmp_path / "records", "abc", extra_words=[])
    suite.exit_if_failed()
    with suite.failure_noted("server"):
        raise RuntimeError("it does not answer")
    with pytest.raises(KeyboardInterrupt), suite.failure_noted("server"):
        raise KeyboardInterrupt
    with pytest.raises(SystemExit, match="FAILED: server: it does not answer"):
        suite.exit_if_failed()


def test_time_is_up_after_the_limit_and_never_without_one(tmp_path):
    assert not runner.Runner(tmp_path, "abc", extra_words=[]).time_is_up()
    assert not runner.Runner(tmp_path, "abc", extra_words=[], limit_s=60.0).time_is_up()
    assert runner.Runner(tmp_path, "abc", extra_words=[], limit_s=-1.0).time_is_up()
