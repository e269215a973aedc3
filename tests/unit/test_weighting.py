"""Shares of the samples in a loss, over ranks with unequal parts."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colocate.algorithms.losses import LOSSES
from colocate.experience import weighting
from colocate.types import Sample

MAX_COMPLETION_LENGTH = 9


def sample_of(length: int, masked: bool) -> Sample:
    mask = torch.zeros(length) if masked else torch.ones(length)
    ids = torch.arange(length)
    return Sample(prompt_ids=ids, completion_ids=ids, completion_mask=mask, advantage=0.0)


samples = st.lists(st.builds(sample_of, st.integers(1, MAX_COMPLETION_LENGTH), st.booleans()), max_size=5)


def evaluation_weights(ranks: list[list[Sample]], loss_type: str) -> list[tuple[float, float]]:
    """(loss weight, entropy weight) of every sample, in order, as the mean over ranks counts them."""
    weights = []
    for rank, own in enumerate(ranks):
        args = SimpleNamespace(
            loss_type=loss_type,
            max_completion_length=MAX_COMPLETION_LENGTH,
            world_size=len(ranks),
            process_index=rank,
        )
        counts = [float(s.completion_mask.sum()) for part in ranks for s in part]
        gathered = iter([counts, [len(part) for part in ranks]])
        with mock.patch.object(weighting, "gather_object", lambda values, gathered=gathered: next(gathered)):
            weighted = weighting.weighted_for_evaluation(own, args)
        weights += [(s.loss_weight / len(ranks), s.entropy_weight / len(ranks)) for s in weighted]
    return weights


@pytest.mark.parametrize("loss_type", LOSSES)
@given(ranks=st.lists(samples, min_size=1, max_size=3).filter(any))
def test_an_evaluation_counts_alike_however_it_is_divided(loss_type, ranks):
    alone = evaluation_weights([[s for part in ranks for s in part]], loss_type)
    for divided, whole in zip(evaluation_weights(ranks, loss_type), alone, strict=True):
        assert divided == pytest.approx(whole, rel=1e-5)
