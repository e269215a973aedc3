"""The modes benchmark: cases that divide among their processes, claims from records with known ratios."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.common import results as results_file
from benchmarks.modes import cases as modes_cases
from benchmarks.modes import suite as modes
from benchmarks.pages import tables as pages
from benchmarks.step import cases as step_cases

CLAIMS = {  # as the project's table names them
    "colocate_vs_server_1p5b",
    "colocate_vs_server_7b",
    "native_vs_server_1p5b",
    "publish_shared_bytes",
    "publish_bucketed_7b_s",
    "sleep_wake_overhead",
}

ORIGIN = {"commit": "c", "machine": "m", "hardware": {}, "python": "3.12", "versions": {"vllm": "0.25.1"}}


PLAIN: dict[str, Any] = dict(phases_s={"rollout": 0.5, "train": 1.0}, engine_s={}, published_bytes=None)


def record(
    label: str, num_completions: int, *steps: float | dict[str, Any], warm_up: int = 0
) -> dict[str, Any]:
    return {
        "label": label,
        **ORIGIN,
        "num_warm_up": warm_up,
        "work": {"num_prompts": num_completions // 8, "num_generations": 8},
        "steps": [PLAIN | (step if isinstance(step, dict) else {"step_s": step}) for step in steps],
    }


def engine_step(
    step_s: float, sleep_s: float, wake_up_s: float, publish_s: float, num_bytes: int = 0
) -> dict[str, Any]:
    seconds = {"sleep": sleep_s, "wake_up": wake_up_s, "_publish": publish_s}
    return {"step_s": step_s, "engine_s": seconds, "published_bytes": num_bytes}


def awake(step_s: float) -> dict[str, Any]:
    return engine_step(step_s, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_every_batch_divides_among_those_that_train(num_gpus: int) -> None:
    cases = modes_cases.all_cases(num_gpus)
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        assert case.num_trainers == (num_gpus - 1 if case.mode == "server" else num_gpus)
        assert case.num_trainers % case.tensor_parallel_size == 0
        assert case.work.num_completions % case.num_trainers == 0
        assert step_cases.tiny(case.work).num_completions // 2 // case.num_trainers > 0
        assert step_cases.tiny(case.work).num_completions % case.num_trainers == 0
    for model in modes_cases.MODELS:
        sizes = [case.work.num_completions for case in cases if case.model == model]
        assert modes_cases.largest(model, "native", num_gpus).work.num_completions == max(sizes)


def test_without_records_there_is_no_claim() -> None:
    claims = modes.compute_claims([], 2)
    assert set(claims) == CLAIMS and set(claims.values()) == {None}
    assert modes.summary([], 2) == []


def test_ratios_are_of_median_steps_at_the_largest_batch() -> None:
    records = [
        record("1p5b-server-1024", 1024, 99.0, 24.0, 25.0, 50.0, warm_up=1),
        record("1p5b-colocate-1024", 1024, *map(awake, (99.0, 10.0, 12.5, 13.0)), warm_up=1),
        record("1p5b-native-1024", 1024, 99.0, 4.0, 5.0, 6.0, warm_up=1),
        # Other batches and groups would make other ratios.
        record("1p5b-colocate-64", 64, *map(awake, (1.0, 1.0, 1.0))),
        record("1p5b-colocate-tp2-1024", 1024, *map(awake, (1.0, 1.0, 1.0))),
        record("7b-server-512", 512, 30.0, 30.0, 30.0),
        record("7b-colocate-512", 512, *map(awake, (20.0, 20.0))),
    ]
    claims = modes.compute_claims(records, 2)
    assert claims["colocate_vs_server_1p5b"] == pytest.approx(25.0 / 12.5)
    assert claims["native_vs_server_1p5b"] == pytest.approx(25.0 / 5.0)
    assert claims["colocate_vs_server_7b"] is None  # two steps of three


@pytest.mark.parametrize("num_bytes", [0, 3])
def test_what_the_engine_spends_and_moves(num_bytes: int) -> None:
    records = [
        record(
            "1p5b-colocate-1024",
            1024,
            engine_step(90.0, 9.0, 9.0, 0.0, num_bytes=77),  # the warm-up
            *[engine_step(10.0, s, 0.1, 0.0) for s in (0.2, 0.3)],
            engine_step(20.0, 0.3, 0.1, 0.0, num_bytes),
            warm_up=1,
        ),
        record("7b-colocate-512", 512, *[engine_step(10.0, 0.5, 0.25, 0.01) for _ in range(3)]),
        record("7b-colocate-buckets-512", 512, *[engine_step(5.0, 2.0, 2.0, s) for s in (0.3, 0.2, 0.9)]),
    ]
    claims = modes.compute_claims(records, 2)
    assert claims["publish_shared_bytes"] == num_bytes  # a copy where weights should be shared is not hidden
    assert claims["publish_bucketed_7b_s"] == 0.3
    assert claims["sleep_wake_overhead"] == pytest.approx(0.075)  # 7B's; 1.5B's is 0.03
    assert modes.compute_claims(records[:1], 2)["sleep_wake_overhead"] is None


@pytest.mark.parametrize(("num_gpus", "factor"), [(2, 2.0), (4, 4 / 3)])
def test_the_normalisation_gives_the_server_its_gpu_back(num_gpus: int, factor: float) -> None:
    server = modes_cases.largest("1p5b", "server", num_gpus)
    native = modes_cases.largest("1p5b", "native", num_gpus)
    size = server.work.num_completions
    records = [record(server.label, size, 8.0, 8.0, 8.0), record(native.label, size, 2.0, 2.0, 2.0)]
    rows = modes.summary(records, num_gpus)
    by_mode = {row["mode"]: row for row in rows}
    assert by_mode["server"]["completions_per_s"] == size / 8
    assert by_mode["native"]["vs_server"] == pytest.approx(4.0)
    assert by_mode["native"]["vs_server_normalised"] == pytest.approx(4.0 / factor)
    lines = pages.modes_table(rows)
    assert (
        f"| 1.5B, {size:,} | native | 2.0 | 0.5 + 1.0 | {size / 2:.1f} | 4.00 | {4 / factor:.2f} |" in lines
    )
    assert f"| 1.5B, {size:,} | vLLM server | 8.0 | 0.5 + 1.0 | {size / 8:.1f} | 1.00 | 1.00 |" in lines


@pytest.mark.parametrize("model", ["1p5b", "7b"])
def test_modes_differ_in_the_engine_alone(model: str) -> None:
    options = {
        mode: modes.trainer_options(modes_cases.largest(model, mode, 2), tiny=False)
        for mode in ("native", "colocate", "server")
    }
    assert options["native"] == {"engine": "native"} and options["server"] == {"engine": "vllm_server"}
    assert options["colocate"].pop("engine") == "vllm"
    work = modes_cases.largest(model, "colocate", 2).work
    assert options["colocate"].pop("vllm_max_model_length") > work.prompt_tokens + work.new_tokens
    assert options["colocate"] == {"vllm_tensor_parallel_size": 1, "vllm_weights": "auto"}
    copying = modes.trainer_options(modes_cases.largest(model, "colocate", 2, "buckets"), tiny=False)
    assert copying["vllm_weights"] == "buckets"


def test_figures_of_different_machines_and_commits_are_not_compared() -> None:
    server = record("1p5b-server-64", 64, 8.0, 8.0, 8.0)
    for elsewhere in ({"machine": "n"}, {"commit": "d"}):
        native = record("1p5b-native-64", 64, 2.0, 2.0, 2.0) | elsewhere
        rows = modes.summary([server, native], 2)
        assert [(row["mode"], row["vs_server"]) for row in rows] == [("server", 1.0), ("native", None)]
        assert "| 1.5B, 64 | native | 2.0 | 0.5 + 1.0 | 32.0 | – | – |" in pages.modes_table(rows)


@pytest.mark.parametrize("missing", [True, False])
def test_missing_cases_are_those_that_neither_records_nor_result_have(tmp_path, monkeypatch, missing) -> None:
    (tmp_path / "modes-h200x2.json").write_text(json.dumps({"repetitions": [record("7b-native-512", 512)]}))
    records = tmp_path / "records"
    records.mkdir()
    (records / "0.json").write_text(json.dumps(record("1p5b-native-256", 256)))
    measured: list[str] = []
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    monkeypatch.setattr(modes, "model_directory", lambda parent, size: parent / size)
    monkeypatch.setattr(
        modes.ModesSuite, "_run_all", lambda self, some, more: measured.extend(case.label for case in some)
    )
    words = ["--records", str(records), *(["--missing"] if missing else [])]
    suite = modes.ModesSuite(modes.ModesSuite.parse(words), "c")
    for part in ("1p5b-native", "7b-native"):
        suite.measure(part)
    largest_7b = [] if missing else ["7b-native-512"]
    assert measured == ["1p5b-native-1024", "1p5b-native-64", *largest_7b, "7b-native-128"]
