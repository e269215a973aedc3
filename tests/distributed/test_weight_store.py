"""The stack on weights that are split over two and four ranks, beside transformers on the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from processes import run_python

pytestmark = pytest.mark.early

CASES = [
    f"{family} {case}"
    for family in ("llama-biases", "qwen2", "qwen3")
    for case in ("keep", "full", "lora", "gathered")
] + ["ghost", "interrupted"]


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory) -> list[dict[str, dict[str, float]]]:
    """What each rank has found."""
    directory = tmp_path_factory.mktemp("store")
    worker = Path(__file__).with_name("weight_store_worker.py")
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}")
    run_python(*launcher, worker, directory, timeout_s=240)
    return [json.loads((directory / f"{request.param}.{r}.json").read_text()) for r in range(request.param)]


@pytest.mark.parametrize("case", CASES)
def test_split_weights_compute_what_whole_ones_do(results, case):
    for rank in results:
        for what, largest_difference in rank[case].items():
            assert largest_difference < 1e-5, what


def test_two_layers_are_whole_at_a_time_and_none_after_a_pass(results):
    assert [rank["buffers"] for rank in results] == [{"during": 2.0, "after": 0.0}] * len(results)
