"""Shares of the samples in a loss, over ranks with unequal parts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colocate.algorithms.losses import LOSSES
from colocate.experience import ranks as over_ranks
from colocate.experience import weighting
from colocate.types import Sample

MAX_COMPLETION_LENGTH = 9


def sample_of(length: int, masked: bool) -> Sample:
    mask = torch.zeros(length) if masked else torch.ones(length)
    ids = torch.arange(length)
    return Sample(prompt_ids=ids, completion_ids=ids, completion_mask=mask, advantage=0.0)


samples = st.builds(sample_of, st.integers(1, MAX_COMPLETION_LENGTH), st.booleans())
members = st.lists(st.lists(samples, min_size=1, max_size=3), max_size=5)


def merged(member: list[Sample]) -> Sample:
    """The one sample of an episode that did not fork, with all its tokens."""
    mask = torch.cat([sample.completion_mask for sample in member])
    return replace(member[0], completion_ids=torch.arange(len(mask)), completion_mask=mask)


def evaluation_weights(ranks: list[list[list[Sample]]], loss_type: str) -> list[tuple[float, float]]:
    """(loss weight, entropy weight) of every sample, in order, as the mean over ranks counts them."""
    weights = []
    for rank, own in enumerate(ranks):
        args = SimpleNamespace(
            loss_type=loss_type,
            max_completion_length=MAX_COMPLETION_LENGTH,
            world_size=len(ranks),
            process_index=rank,
        )
        counts = [[float(merged(member).completion_mask.sum()) for member in part] for part in ranks]
        with mock.patch.object(over_ranks, "gather_object", lambda _, counts=counts: counts):
            weighted = weighting.weighted_for_evaluation(own, args)
        weights += [(s.loss_weight / len(ranks), s.entropy_weight / len(ranks)) for s in weighted]
    return weights


@pytest.mark.parametrize("loss_type", LOSSES)
@given(ranks=st.lists(members, min_size=1, max_size=3).filter(any))
@pytest.mark.share(3)
def test_an_evaluation_counts_alike_however_it_is_divided(loss_type, ranks):
    alone = evaluation_weights([[member for part in ranks for member in part]], loss_type)
    for divided, whole in zip(evaluation_weights(ranks, loss_type), alone, strict=True):
        assert divided == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("loss_type", LOSSES)
@given(members=members.filter(bool), batch_size=st.integers(1, 3))
def test_samples_of_one_episode_count_as_one(loss_type, members, batch_size):
    """In every slice of a step, a sample has the weight of the one that its episode would be unforked."""
    options = SimpleNamespace(
        seed=3, loss_type=loss_type, max_completion_length=MAX_COMPLETION_LENGTH, world_size=1,
        per_device_train_batch_size=batch_size, gradient_accumulation_steps=2, steps_per_generation=4,
    )  # fmt: skip
    numbered = [[replace(s, prompt_key=n) for s in member] for n, member in enumerate(members)]
    num_tokens = int(sum(s.completion_mask.sum() for member in members for s in member))
    slices = weighting.shuffled_slices(numbered, options, 7, num_tokens)
    expected = weighting.shuffled_slices([[merged(member)] for member in numbered], options, 7, num_tokens)
    for got, want in zip(slices, expected, strict=True):
        weight_of = {s.prompt_key: (s.loss_weight, s.entropy_weight) for s in want}
        assert list(dict.fromkeys(s.prompt_key for s in got)) == list(weight_of)
        assert [s.completion_mask.tolist() for s in got] == [
            s.completion_mask.tolist() for key in weight_of for s in numbered[key]
        ]
        assert all((s.loss_weight, s.entropy_weight) == weight_of[s.prompt_key] for s in got)
