"""One of two ranks runs out of memory, at every place of a step: both repeat it, with one smaller plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from processes import run_ranks

pytestmark = pytest.mark.early

NUM_LAYOUTS = 3


@pytest.fixture(scope="module", params=[42, pytest.param(105, marks=pytest.mark.slow)])
def num_injections(request) -> int:
    """Two at each place in each layout, or five."""
    return request.param


@pytest.fixture(scope="module")
def told(tmp_path_factory, num_injections) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("recovery")
    worker = Path(__file__).with_name("recovery_worker.py")
    run_ranks(2, worker, directory, str(num_injections), timeout_s=240)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_every_injection_leads_to_what_the_smaller_plan_leads_to(told, num_injections):
    trials = list(zip(told[0]["trials"], told[1]["trials"], strict=True))
    assert len(trials) == num_injections and told[0]["moved"] > 1e-2
    assert max(one["rows"] for one in told) < 1e-5  # masters split by rows lead to the same weights
    assert {trial["case"][2] for trial, _ in trials} == {0, 1}
    assert len({tuple(trial["case"][:2]) for trial, _ in trials}) == 7 + 7 + 6
    for pair in trials:
        case = pair[0]["case"]
        assert sum(trial["has_failed"] for trial in pair) == 1, case
        assert pair[0]["plan"] == pair[1]["plan"], case
        assert max(trial["distance"] for trial in pair) < 1e-6, case
        assert pair[0]["checksum"] == pair[1]["checksum"], case


def test_only_training_that_ran_out_makes_the_plan_smaller(told):
    plans: dict[bool, set[str]] = {True: set(), False: set()}
    for trial in told[0]["trials"]:
        plans[trial["case"][1] == "rollout"].add(trial["plan"])
    (unchanged,) = plans[True]
    assert plans[False] and unchanged not in plans[False]


def test_another_error_of_one_rank_ends_all_by_name(told):
    for number in range(NUM_LAYOUTS):
        (kind, message), own = (one["endings"][number] for one in told)
        assert own == ["ValueError", "injected in backward"]
        assert kind == "PeerError" and "rank 1 (" in message and "ValueError: injected in backward" in message


def test_when_nothing_helps_all_say_which_rank_ran_out(told):
    for one in told:
        for kind, message in one["endings"][NUM_LAYOUTS:]:
            assert kind == "OutOfMemoryError" and "rank 1 (" in message and "Lower max_completion" in message


def test_ranks_whose_planners_disagree_train_by_the_most_cautious_choices(told):
    for layout in range(NUM_LAYOUTS):
        for one in told:
            result = one["disagreements"][layout]
            # Three steps, the last two after a refinement of each rank's own.
            (plan,) = {plan for plans in result["plans"] for plan in plans}
            assert "'full'" in plan and "tokens_per_microbatch=20" in plan and "chunk_size=64" in plan
            assert result["distance"] < 1e-4  # of other cuts, in float32; a step moves a hundred times as far
