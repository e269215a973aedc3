"""The suite of episodes: claims from records with known ratios, and turns as vLLM and our engine are made to
play them."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.episodes import cases, forced, run, suite
from benchmarks.rollout.cases import Case

CLAIMS = {  # as the project's table names them
    "open_vs_generate",
    "multiturn_step_vs_trl",
    "multiturn_rollout_vs_trl",
    "prefilled_tokens_over_minimum",
    "carry_over_step_ragged",
    "refill_overhead",
}
TURNS = forced.ForcedTurns([[5, 4], [7, 3]], call_id=8, stop_id=1, first_word_id=10)


def step(step_s: float, rollout_s: float = 1.0, tool_s: float | None = None, **more: Any) -> dict[str, Any]:
    counts = {"num_prompt": 256, "num_sampled": 1000, "num_given": 50, "num_trained": 1000} | more
    phases = {"rollout": rollout_s, "train": step_s - rollout_s}
    return {"step_s": step_s, "rollout_s": rollout_s, "tool_s": tool_s, "phases_s": phases, **counts}


def record(framework: str, label: str, *steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {"kind": "episodes", "framework": framework, "label": label, "num_warm_up": 1, "micro_batch": 8}
    return named | {"max_policy_lag": 0, "dull_share": 0.0, "steps": [step(99.0, 50.0, 0.0), *steps], **more}


def turns_record(framework: str, factor: float, **more: Any) -> dict[str, Any]:
    steps = [step(10 * factor, 2 * factor, 0.0), step(20 * factor, 12 * factor, 0.05)]
    return record(framework, "turns", *steps, step(11 * factor, 4 * factor, 0.0), **more)


def open_record(**prefilled: int) -> dict[str, Any]:
    def repetitions(seconds: float, num_prefilled: int = 100) -> list[dict[str, float]]:
        return [{"seconds": seconds, "num_tokens": 1000, "num_prefilled": num_prefilled}]

    ways = {"generate": repetitions(9.8), "open": repetitions(10.0), "lockstep 0.0": repetitions(30.0, 900)}
    turns = {f"turns {tool_s}": repetitions(12.0, count) for tool_s, count in prefilled.items()}
    return {"kind": "open engine", "least_prefilled": 100, "repetitions": ways | turns}


def test_names_are_those_of_the_table():
    claims = suite.compute_claims([])
    assert set(claims) == CLAIMS and set(claims.values()) == {None}


def test_claims_are_ratios_after_the_warm_up():
    records = [
        open_record(**{"0.0": 102, "0.05": 104}),
        turns_record("colocate", 1.0),
        turns_record("trl", 6.0, vllm_sleep=True),
        record("colocate", "carry_over", *[step(8.0)] * 6),
        record("colocate", "carry_over", *[step(9.0), step(3.0)] * 3, max_policy_lag=1),
        record(
            "colocate", "refill", step(5.0, num_sampled=2000), step(5.0, num_sampled=2200), dull_share=0.5
        ),
    ]
    claims = suite.compute_claims(records)
    assert claims["open_vs_generate"] == pytest.approx(0.98)
    assert claims["prefilled_tokens_over_minimum"] == pytest.approx(1.04)
    assert claims["multiturn_step_vs_trl"] == pytest.approx(6.0)
    assert claims["multiturn_rollout_vs_trl"] == pytest.approx(6.0)
    assert claims["carry_over_step_ragged"] == pytest.approx(8.0 / 6.0)
    assert claims["refill_overhead"] == pytest.approx(1.05)
    # Of TRL's settings the fastest count, for each claim.
    awake = turns_record("trl", 5.0, vllm_sleep=False)
    assert suite.compute_claims([*records, awake])["multiturn_step_vs_trl"] == pytest.approx(5.0)
    assert len(suite.summary([*records, awake])) == 4 + 2 + 2 + 1 + 1
    # Too few steps of one kind: the lag has not built up.
    short = [record("colocate", "carry_over", *[step(8.0)] * 6, max_policy_lag=lag) for lag in (0,)]
    assert suite.compute_claims(short)["carry_over_step_ragged"] is None


def test_steps_of_different_tokens_are_not_compared():
    ours = turns_record("colocate", 1.0)
    ours["steps"][1]["num_given"] = 51
    with pytest.raises(ValueError, match=r"different tokens.*'num_given': \{50, 51\}"):
        suite.compute_claims([ours, turns_record("trl", 6.0)])


@dataclass
class Limits:
    """In place of vLLM's SamplingParams."""

    max_tokens: int


class StubLLM:
    """Draws words from 20 on, and a mark (3) at the beginning of each turn."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []

    def generate(self, prompts: list[Any], sampling_params: list[Limits], use_tqdm: bool) -> list[Any]:
        self.prompts.append(prompts)
        outputs = []
        for params in sampling_params:
            ids = (3, *range(20, 19 + params.max_tokens))
            logprobs = [{token: -float(token)} for token in ids]
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs)]))
        return outputs


def test_vllm_draws_all_but_the_call_and_the_stop_token():
    llm, asked = StubLLM(), Limits(400)
    forced.force_vllm(llm, TURNS)
    for last_ids, drawn in [((8, 1), (3, 5)), ((1,), (3, 2)), ((8, 1), (3, 5))]:  # the third is a new rollout
        outputs = [output.outputs[0] for output in llm.generate(["a", "b"], asked, use_tqdm=False)]
        for output, num_drawn in zip(outputs, drawn, strict=True):
            assert output.token_ids == [13, *range(20, 19 + num_drawn), *last_ids]
            assert len(output.logprobs) == len(output.token_ids)
            assert list(output.logprobs[-1]) == [1]
    assert asked.max_tokens == 400 and llm.prompts == [["a", "b"]] * 3


def test_consecutive_prompts_have_the_tokens_of_the_case_wherever_a_rollout_begins():
    case = Case("1.5b", 4, 2, 16, 2048, lengths="lognormal")
    seen: list[Any] = []

    class Engine:
        def generate(self, prompts, sampling):
            seen.extend(prompts)

        submit = generate

    engine: Any = Engine()
    forced.force_lengths(engine, case)
    whole = [forced.Prompt((1,), key, range(2)) for key in range(3, 7)]
    engine.submit(whole, "sampling")
    engine.generate([forced.Prompt((1,), 9, range(1), (5,))], "sampling")
    assert sorted(prompt.max_tokens for prompt in seen[:4]) == sorted(map(tuple, case.limits()))
    assert seen[4].max_tokens == (5,)  # it has begun before


def test_a_share_of_the_rows_is_dull_and_their_groups_teach_nothing():
    rows = run.with_dull(run.Dataset.from_dict({"prompt": ["a"] * 1000}), 0.3)
    assert abs(sum(rows["is_dull"]) - 300) < 4 * math.sqrt(1000 * 0.3 * 0.7)
    assert rows["is_dull"] == run.with_dull(rows.remove_columns("is_dull"), 0.3)["is_dull"]
    assert run.dull_reward(["x"] * 4, [True, True, False, False]) == [0.0, 0.0, 2.0, 3.0]


@pytest.mark.slow
def test_groups_are_replaced_with_as_many_tokens_as_it_takes(tmp_path, monkeypatch):
    out = tmp_path / "record.json"
    words = ["run", "--framework", "colocate", "--single-turn", "--dull-share", "0.5", "--tiny"]
    words += ["--warm-up", "0", "--steps", "2", "--model-dir", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(run, "origin", lambda: {"commit": "of a test"})
    run.main()
    found = json.loads(out.read_text())
    assert found["refill_rounds"] > 0
    first, second = found["steps"]
    is_dull = run.with_dull(run.Dataset.from_dict({"prompt": ["a"] * 12}), 0.5)["is_dull"]
    lively = [number for number, dull in enumerate(is_dull) if not dull]
    assert first["num_sampled"] == (lively[1] + 1) * 4 * 32  # the prompts up to the second that is not dull
    assert first["num_trained"] == second["num_trained"] == 2 * 4 * 32
    found["label"] = "refill"
    num_sampled = first["num_sampled"] + second["num_sampled"]
    assert suite.refill_overhead([found]) == pytest.approx(num_sampled / (4 * 4 * 32) / 2)


def test_turns_have_room_for_a_call():
    lengths = cases.TINY_TURNS.lengths(1000)
    assert min(map(min, lengths)) == cases.LEAST_TOKENS == len(TURNS.tail(0)) + 1
    assert math.isclose(sum(map(sum, cases.Turns().lengths(512))) / 512, 4 * 262, rel_tol=0.05)
