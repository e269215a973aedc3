"""Two and four processes that split the weights decode what one decodes, and what `model.generate` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import assert_logprobs_are_the_models, greedy_references, randomise_adapters
from tensor_parallel_worker import MODELS, SAMPLINGS, all_prompts, plain

from colocate.engines.native.engine import NativeEngine
from colocate.types import Completion
from processes import run_ranks

pytestmark = pytest.mark.early

CASES = ["qwen2-2", "qwen3-2", "odd-2", "llama-4"]
PROMPTS = all_prompts()


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Where four processes wrote what they drew, two by two and all together."""
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(4, Path(__file__).with_name("tensor_parallel_worker.py"), directory, timeout_s=240)
    return directory


def of_ranks(directory: Path, case: str) -> list[dict[str, Any]]:
    return [torch.load(directory / f"{case}-{rank}.pt", weights_only=False) for rank in range(4)]


def awake(model: Any) -> NativeEngine:
    engine = NativeEngine(model, max_num_seqs=32, page_size=4)
    engine.wake_up()
    return engine


def completions(found: list[tuple[Any, ...]]) -> list[Completion]:
    return [Completion(*fields, policy_version=0) for fields in found]


def assert_equal(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    """Equal tokens and ends, and log-probs up to rounding."""
    assert [(tokens, end) for tokens, _, end in found] == [(tokens, end) for tokens, _, end in expected]
    for (_, ours, _), (_, theirs, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_ranks_draw_the_same_and_each_gets_its_own(directory, case):
    ranks, num_parts = of_ranks(directory, case), int(case[-1])
    for kind in SAMPLINGS:
        for first in range(0, 4, num_parts):
            group = ranks[first : first + num_parts]
            own = [completion for rank in group for completion in rank[kind][0]]
            assert (group[-1][kind][0] == []) == (num_parts == 4)
            for rank in group:
                assert rank[kind][1] == own, kind  # bit for bit, log-probs too
    for rank in ranks:
        assert rank["sums"] and all(rank["sums"]), "a sum differs between ranks"


@pytest.mark.parametrize("case", CASES)
def test_greedy_is_model_generate(directory, case):
    found = of_ranks(directory, case)[0]["greedy"][1]
    model = MODELS[case[:-2]]()
    limits = [limit for prompt in PROMPTS for limit in prompt.limits(10)]
    references = greedy_references(model, PROMPTS, 10)
    expected = [tuple(tokens[:n]) for tokens, n in zip(references, limits, strict=True)]
    assert [tokens for tokens, _, _ in found] == expected
    assert_logprobs_are_the_models(model, PROMPTS, completions(found), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_draws_are_those_of_one_rank(directory, case):
    found, engine = of_ranks(directory, case)[0], awake(MODELS[case[:-2]]())
    for kind, sampling in SAMPLINGS.items():
        if sampling.is_plain and sampling.temperature and case.startswith("odd"):
            continue  # blocks that straddle ranks are drawn with other noise
        assert_equal(found[kind][1], plain(engine.generate(PROMPTS, sampling)))
    assert {end for _, _, end in found["stopped"][1]} == {"stop", "length"}


def test_the_rollouts_copy_of_adapters_follows_a_step(directory):
    model = MODELS["qwen3"]()
    torch.manual_seed(3)
    randomise_adapters(model)
    engine = awake(model)
    for rank in of_ranks(directory, "qwen3-2"):
        assert rank["copy of A"] == [True] * 4  # same addresses and bytes, given back in sleep
        for kind, found in rank["after a step"].items():
            assert found != rank[kind][1]
            assert_equal(found, plain(engine.generate(PROMPTS, SAMPLINGS[kind])))


def test_draws_with_other_noise_have_the_policys_log_probs(directory):
    found = of_ranks(directory, "odd-2")[0]["drawn"][1]
    temperature = SAMPLINGS["drawn"].temperature
    assert_logprobs_are_the_models(
        MODELS["odd"](), PROMPTS, completions(found), atol=1e-5, rtol=1e-5, temperature=temperature
    )
    assert max(token for tokens, _, _ in found for token in tokens) >= 300


@pytest.mark.parametrize("case", CASES)
def test_a_rank_keeps_its_heads_pages_and_groups_are_prefilled_once(directory, case):
    for rank in of_ranks(directory, case):
        own, whole = rank["page_bytes"]
        assert own * int(case[-1]) == whole
        assert rank["num_prefilled"] == sum(len(prompt.token_ids) for prompt in PROMPTS)


def test_a_rank_without_memory_takes_the_others_along(directory):
    ranks = of_ranks(directory, "memory")
    model = MODELS["qwen2"]()
    expected = plain(awake(model).generate(PROMPTS, SAMPLINGS["drawn"]))
    for rank in ranks:
        assert rank["max_prefill"] == 512  # half of what it was, on the rank that failed and on the others
        assert_equal(rank["drawn"], expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    for rank in ranks:
        assert_equal(rank["after a step"], plain(awake(model).generate(PROMPTS, SAMPLINGS["greedy"])))


def test_what_one_rank_asks_wrongly_is_refused_on_all(directory):
    for rank, found in enumerate(of_ranks(directory, "memory")):
        sampling, prompt, engine = found["errors"]
        assert (
            "The 2 ranks that share the weights decode together, and ask for different sampling" in sampling
        )
        assert "max_tokens=9" in sampling and "max_tokens=10" in sampling
        assert "Prompt 7 is empty" in prompt
        assert f"The model holds part {rank % 2} of 2 of its weights" in engine
        assert found["nothing"] == []


@pytest.mark.parametrize(("case", "num_parts"), [("qwen2-2", 1), ("tied-4", 1), ("qwen2-4", 2)])
def test_ranks_that_gather_weights_draw_what_one_rank_does(directory, case, num_parts):
    ranks = of_ranks(directory, f"gathered-{case}-{num_parts}")
    name, num_weight_parts = case.split("-")
    model = MODELS[name]()
    engine, expected = awake(model), {}
    for kind in ("greedy", "drawn"):
        expected[kind] = plain(engine.generate(PROMPTS, SAMPLINGS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    engine.update_weights(1)
    expected["after a step"] = plain(engine.generate(PROMPTS, SAMPLINGS["greedy"]))
    assert expected["after a step"] != expected["greedy"]
    for first in range(0, 4, int(num_weight_parts)):
        group = ranks[first : first + int(num_weight_parts)]
        for kind, completions_of_one in expected.items():
            assert_equal([completion for rank in group for completion in rank[kind]], completions_of_one)
    for rank in ranks:
        assert rank.get("turns", rank["after a step"]) == rank["after a step"]


@pytest.mark.parametrize(("case", "num_parts"), [("qwen2-2", 1), ("tied-4", 1), ("qwen2-4", 2)])
def test_gathered_weights_take_memory_while_the_engine_is_awake(directory, case, num_parts):
    """Also after one rank had too little of it, which all of its group were told."""
    model = MODELS[case.split("-")[0]]()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for rank in of_ranks(directory, f"gathered-{case}-{num_parts}"):
        assert rank["asleep"] == [0] * 4
        (held,) = rank["awake"]
        # Norms are whole on every rank; each block begins at a multiple of 512 bytes.
        assert num_bytes / num_parts <= held < 1.2 * num_bytes / num_parts + 512 * 100
        assert f"decode_shard={num_parts} gathers" in rank["error"]
