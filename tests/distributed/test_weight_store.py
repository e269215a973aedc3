"""The stack on weights that are split over two and four ranks, beside transformers on the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from processes import run_ranks

pytestmark = pytest.mark.early

PARTS_OF_A_RUN = ("keep", "full", "lora", "gathered", "steps")
CASES = {
    2: [
        *(
            f"{family} {case}"
            for family in ("llama-biases", "gemma3_text", "qwen3")
            for case in PARTS_OF_A_RUN
        ),
        *("qwen3 steps lora", "qwen2 steps kl", "qwen3 steps lora kl", "bf16", "ghost", "interrupted"),
        *("qwen2 steps rows", "qwen3 steps rows lora", "qwen2 steps rows kl", "qwen3 steps rows lora kl"),
    ],
    4: [
        *(
            f"{family} {case}"
            for family in ("llama-biases", "gemma3_text", "qwen3")
            for case in ("keep", "steps")
        ),
        *("qwen3 steps lora", "qwen2 steps replicas", "qwen2 steps replicas lora"),
    ],
}
"""By the number of processes. "replicas": there are two of each part; "rows": each has all weights, and the
optimizer's state is split by rows."""

Results = list[dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, Results]:
    """What each rank of two and of four processes has found."""
    directory = tmp_path_factory.mktemp("store")
    found = {}
    for count in CASES:
        run_ranks(count, Path(__file__).with_name("weight_store_worker.py"), directory, timeout_s=240)
        found[count] = [json.loads((directory / f"{count}.{r}.json").read_text()) for r in range(count)]
    return found


@pytest.mark.parametrize(("count", "case"), [(count, case) for count in CASES for case in CASES[count]])
def test_split_weights_compute_what_whole_ones_do(results, count, case):
    for rank in results[count]:
        assert rank[case]
        for what, largest_difference in rank[case].items():
            assert largest_difference < 1e-5, what


def test_two_layers_are_whole_at_a_time_and_none_after_a_pass(results):
    for rank in results[2]:
        assert rank["buffers"] == {"during": 2.0, "after": 0.0}


def test_no_embedding_and_no_head_is_whole_while_layers_go_backward(results):
    for rank in results[2]:
        assert rank["whole head"] == {"later": 0, "kept": 0, "later lora": 0, "at_once lora": 0}
