"""What the benchmarks' suites share: results are whole or not written, and one failure stops nothing else."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec

import pytest

from benchmarks.common import results
from benchmarks.common.suite import Suite

WHERE = {"commit": "abc", "machine": "m", "versions": {"torch": "2.11"}}
ORIGIN = WHERE | {"hardware": {"num_cores": 16}, "python": "3.12"}
RECORDS = [
    ORIGIN | {"step_s": 2.0},
    ORIGIN | {"step_s": 3.0, "versions": {"torch": "2.11", "vllm": "0.25"}},
    ORIGIN | {"step_s": 4.0},
]


def test_a_result_has_its_records_origin(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    main = ModuleSpec("benchmarks.step.suite", None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", main, raising=False)
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/step/suite.py", "--merge"])
    results.write_suite_result("step", "h200", {"ratio": 1.5}, RECORDS, num_gpus=2)
    written = json.loads((tmp_path / "step-h200.json").read_text())
    assert written["command"] == "python -m benchmarks.step.suite --merge"
    assert (written["claims"], written["commit"], written["repetitions"]) == ({"ratio": 1.5}, "abc", RECORDS)
    assert written["setup"] == {"machine": "m", "num_gpus": 2}
    # Not of the machine and the environment in which the records are put together.
    assert written["hardware"] == {"name": "h200", "num_cores": 16} and written["python"] == "3.12"
    assert written["versions"] == {"torch": "2.11", "vllm": "0.25"}
    assert capsys.readouterr().out.strip() == str(tmp_path / "step-h200.json")


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

    assert results.read_records(tmp_path, part) == records
    with pytest.raises(ValueError, match="more than one commit"):
        results.read_records(tmp_path)
    (tmp_path / "2.json").write_text(json.dumps(records[1] | {"machine": "o"}))
    with pytest.raises(ValueError, match=r"more than one machine: \['n', 'o'\]"):
        results.read_records(tmp_path, part)
    results.write_suite_result("step", "h200", {"ratio": 1.5}, records, part=part)
    written = json.loads((tmp_path / "step-h200.json").read_text())
    assert written["commit"] == "def"
    assert written["setup"]["origins"]["a"] == WHERE


def test_without_every_claim_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    results.write_suite_result("step", "h200", {"ratio": 1.5, "share": None, "gap": None}, [])
    assert not list(tmp_path.iterdir())
    assert "2 of 3 claims are missing, the first share" in capsys.readouterr().out


class Numbers(Suite):
    """A suite that measures nothing."""

    name = "numbers"
    parts = ("a", "b")
    has_all_claims = False
    extends_result = True

    @staticmethod
    def part_of(record):
        return record["part"]

    def claims(self, records):
        found = {record["part"]: record["step_s"] for record in records}
        return {part: found.get(part) for part in self.parts}


def numbers(tmp_path, *words):
    return Numbers(Numbers.parse(["--records", str(tmp_path / "records"), *words]), "abc")


def test_a_later_day_adds_to_the_result_and_replaces_what_it_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path))

    def merged(part, step_s, **where):
        suite = numbers(tmp_path, "--records", str(tmp_path / f"{part}-{step_s}"), "--hardware", "h")
        suite.out(part).write_text(json.dumps(ORIGIN | {"part": part, "step_s": step_s} | where))
        suite.merge()
        return json.loads((tmp_path / "numbers-h.json").read_text())

    assert merged("a", 1.0)["claims"] == {"a": 1.0}
    assert merged("b", 2.0, machine="n")["claims"] == {"a": 1.0, "b": 2.0}
    third = merged("a", 3.0, commit="def")
    assert third["claims"] == {"a": 3.0, "b": 2.0} and len(third["repetitions"]) == 2
    assert {part: one["machine"] for part, one in third["setup"]["origins"].items()} == {"a": "m", "b": "n"}


def test_a_failure_stops_nothing_and_is_named(tmp_path, capsys):
    suite = numbers(tmp_path)
    assert suite.run("rollout.floor", "no_such_case") is None
    with suite.failure_noted("server"):
        raise RuntimeError("it does not answer")
    with pytest.raises(KeyboardInterrupt), suite.failure_noted("server"):
        raise KeyboardInterrupt
    measured, server = suite.failures
    assert measured.startswith("rollout.floor no_such_case: status 2: ") and "invalid choice" in measured
    assert server == "server: it does not answer" and "FAILED (2)" in capsys.readouterr().out


def test_time_is_up_after_the_limit_and_never_without_one(tmp_path):
    assert not numbers(tmp_path).time_is_up()
    assert not numbers(tmp_path, "--limit-s", "60").time_is_up()
    assert numbers(tmp_path, "--limit-s", "-1").time_is_up()
