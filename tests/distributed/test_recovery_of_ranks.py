"""One of two ranks runs out of memory, at every place of a step: both repeat it, with one smaller plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from processes import TORCHRUN, run_python

pytestmark = pytest.mark.early

NUM_INJECTIONS = 105


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("recovery")
    worker = Path(__file__).with_name("recovery_worker.py")
    run_python(*TORCHRUN, worker, directory, str(NUM_INJECTIONS), timeout_s=240)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_every_injection_leads_to_what_the_smaller_plan_leads_to(told):
    trials = list(zip(told[0]["trials"], told[1]["trials"], strict=True))
    assert len(trials) == NUM_INJECTIONS and told[0]["moved"] > 1e-2
    assert {trial["case"][1] for trial, _ in trials} == {0, 1}
    for pair in trials:
        case = pair[0]["case"]
        assert sum(trial["has_failed"] for trial in pair) == 1, case
        assert pair[0]["plan"] == pair[1]["plan"], case
        assert max(trial["distance"] for trial in pair) < 1e-6, case
        assert pair[0]["checksum"] == pair[1]["checksum"], case


def test_only_training_that_ran_out_makes_the_plan_smaller(told):
    plans = {trial["case"][0]: set() for trial in told[0]["trials"]}
    for trial in told[0]["trials"]:
        plans[trial["case"][0]].add(trial["plan"])
    (unchanged,) = plans.pop("rollout")
    assert all(found and unchanged not in found for found in plans.values())


def test_another_error_of_one_rank_ends_all_by_name(told):
    (kind, message), (own_kind, own_message) = told[0]["endings"][0], told[1]["endings"][0]
    assert (own_kind, own_message) == ("ValueError", "injected in backward")
    assert kind == "PeerError" and "rank 1 (" in message and "ValueError: injected in backward" in message


def test_when_nothing_helps_all_say_which_rank_ran_out(told):
    for one in told:
        kind, message = one["endings"][1]
        assert kind == "OutOfMemoryError" and "rank 1 (" in message and "Lower max_completion" in message
