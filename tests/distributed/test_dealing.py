"""Two ranks, their samples dealt by tokens, take the steps that one process takes on all samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dealing_worker import (
    CASES,
    LEARNING_RATE,
    NUM_ITERATIONS,
    NUM_ROLLOUTS,
    SLICES_PER_STEP,
    num_loss_tokens,
    objective_of,
    options_of,
    policy_of,
    samples_of,
)

from colocate.experience import weighting
from colocate.experience.select import Selector
from colocate.experience.window import TrainingWindow
from colocate.types import Sample
from processes import run_ranks

pytestmark = pytest.mark.early


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two ranks did in every case."""
    directory = tmp_path_factory.mktemp("dealing")
    run_ranks(2, Path(__file__).with_name("dealing_worker.py"), directory, timeout_s=240)
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def slices_of_both(case: str, rollout: int) -> list[list[Sample]]:
    """The slices of both ranks put together, each sample with its weight in the mean over ranks."""
    generated = [samples_of(rank, rollout, case) for rank in range(2)]
    num_tokens = num_loss_tokens(rollout, case)
    parts = [
        weighting.shuffled_slices([[s] for s in samples], options_of(case, rank, 2), rollout, num_tokens)
        for rank, samples in enumerate(generated)
    ]
    return [
        [replace(s, loss_weight=s.loss_weight / 2, entropy_weight=s.entropy_weight / 2) for s in (*a, *b)]
        for a, b in zip(*parts, strict=True)
    ]


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_one_process(both, case):
    policy, objective = policy_of(case), objective_of(case)
    start = {name: x.detach().clone() for name, x in policy.model.named_parameters()}
    selector = Selector(policy, options_of(case, 0, 1))
    window = TrainingWindow(SLICES_PER_STEP, NUM_ITERATIONS, torch.device("cpu"))
    metrics, trained = [], []
    for rollout in range(NUM_ROLLOUTS):
        slices = [selector._with_reference(samples) for samples in slices_of_both(case, rollout)]
        window.add(slices, lambda samples: [logprobs for logprobs, _ in policy.logprobs(samples)])
        while window.ready:
            samples = selector.for_step(window.peek())
            update = policy.update(samples, objective)
            window.advance(update.logprobs)
            metrics.append(update.metrics.compute())
            trained.append([(s.prompt_key, s.completion_ids.tolist()) for s in samples])
    results = [rank[case] for rank in both]
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(results[0]["parameters"][name], parameter, rtol=0, atol=1e-5)
        assert torch.equal(results[0]["parameters"][name], results[1]["parameters"][name])
    moved = max((x - start[name]).abs().max().item() for name, x in policy.model.named_parameters())
    assert moved > 1e-3  # a hundred times the tolerance
    assert results[0]["metrics"] == results[1]["metrics"]
    for actual, expected in zip(results[0]["metrics"], metrics, strict=True):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
    for step, parts in enumerate(zip(*(result["trained"] for result in results), strict=True)):
        assert sorted(parts[0] + parts[1]) == sorted(trained[step])
        # Rank 0 has generated ten times as many tokens as rank 1.
        first, second = (sum(len(ids) for _, ids in part) for part in parts)
        assert 0.6 < first / second < 1.6


def test_a_rank_without_a_sample_takes_part_in_the_step(both):
    policy = policy_of("grpo")
    (sample,) = samples_of(0, 0)[:1]
    model = policy.model
    ids = torch.cat([sample.prompt_ids, sample.completion_ids])[None]
    logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    picked = torch.log_softmax(logits, -1).gather(-1, sample.completion_ids[:, None])
    (-picked.sum() / 2).backward()  # the mean of the loss of one rank and of nothing
    for name, parameter in model.named_parameters():
        for rank in both:
            expected = parameter.detach() - LEARNING_RATE * parameter.grad
            torch.testing.assert_close(
                rank["one sample"]["parameters"][name].detach(), expected, rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("optimizer", ["replicated", "split"])
def test_all_ranks_skip_a_step_for_the_loss_of_one(both, optimizer):
    assert [rank[f"skipped {optimizer}"] for rank in both] == [[True, False]] * 2
