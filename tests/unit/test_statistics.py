"""Estimates of an evaluation, against enumeration, simulation and other libraries."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocate.inference.statistics import difference, mean, pass_at_k, share, wilson


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_all_choices_of_k_completions_with_a_right_one(n):
    for c in range(n + 1):
        is_right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            choices = [any(chosen) for chosen in combinations(is_right, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_pass_at_k_has_no_bias():
    """Its mean over draws of n completions, each right with p, is 1 - (1 - p)^k; the plain one's is not."""
    n, k, p = 6, 4, 0.15
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = 1 - (1 - p) ** k
    assert sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights)) == pytest.approx(expected)
    assert sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights)) != pytest.approx(expected, rel=0.02)


def test_pass_at_k_of_many_completions_is_finite():
    assert pass_at_k(100_000, 3, 50_000) == pytest.approx(1 - 0.5**3, abs=1e-4)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (0, 0, 1)])
def test_pass_at_k_that_cannot_be_estimated_says_how_many_completions_it_needs(n, c, k):
    with pytest.raises(ValueError, match="num_samples"):
        pass_at_k(n, c, k)


@given(st.integers(1, 500), st.data())
def test_wilson_bounds_are_the_shares_whose_test_just_does_not_refuse_what_was_seen(num_draws, data):
    """The interval is the set of p with |seen - p| <= z sqrt(p (1 - p) / n): that is its definition."""
    seen = data.draw(st.integers(0, num_draws)) / num_draws
    interval = wilson(seen, num_draws)
    z = NormalDist().inv_cdf(0.975)
    for bound in (interval.low, interval.high):
        if bound not in (0.0, 1.0):
            assert abs(seen - bound) == pytest.approx(
                z * math.sqrt(bound * (1 - bound) / num_draws), abs=1e-9
            )
    assert 0 <= interval.low <= seen <= interval.high <= 1


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=200))
def test_one_completion_for_each_prompt_has_wilsons_interval(values):
    ours, theirs = share(values), wilson(sum(values) / len(values), len(values))
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_more_completions_of_the_same_prompts_never_count_as_fewer_prompts_nor_as_more_than_all(counts):
    values = [count / 4 for count in counts]
    center, interval = sum(values) / len(values), share(values, 4)
    widest, narrowest = wilson(center, len(values)), wilson(center, 4 * len(values))
    assert widest.low - 1e-9 <= interval.low <= narrowest.low + 1e-9
    assert narrowest.high - 1e-9 <= interval.high <= widest.high + 1e-9


@pytest.mark.parametrize(("spread", "num_prompts"), [(0.2, 40), (2.0, 40), (50.0, 40), (2.0, 200)])
def test_intervals_of_clustered_completions_hold_the_truth_as_often_as_they_say(spread, num_prompts):
    """Prompts have their own shares, from a beta distribution: easy and hard ones, or nearly all alike."""
    rng, truth, num_samples = np.random.default_rng(0), 0.7, 8
    held = 0
    for _ in range(400):
        shares = rng.beta(truth * spread, (1 - truth) * spread, num_prompts)
        counts = rng.binomial(num_samples, shares)
        interval = share((counts / num_samples).tolist(), num_samples)
        held += interval.low <= truth <= interval.high
    assert 0.92 <= held / 400 <= 0.985


def test_a_difference_is_paired_by_prompt():
    """Models that agree on nearly every prompt differ for sure, though their intervals overlap."""
    rng = np.random.default_rng(1)
    first = (rng.random(300) < 0.5).astype(float)
    second = first.copy()
    second[np.flatnonzero(first == 0)[:12]] = 1.0
    gained = difference(second.tolist(), first.tolist())
    assert gained.value == pytest.approx(12 / 300) and gained.low > 0
    assert share(second.tolist()).low < share(first.tolist()).high


@pytest.mark.parametrize(("num_prompts", "num_samples"), [(40, 8), (15, 4)])
def test_intervals_of_differences_of_clustered_completions_hold_the_truth_as_often_as_they_say(
    num_prompts, num_samples
):
    """Prompts are anything from hopeless to certain, and the second model is better on each by up to 0.1."""
    rng, truth, held = np.random.default_rng(4), 0.1 - 0.1**2 / 2, 0
    for _ in range(1000):
        shares = rng.random(num_prompts)
        first, second = (
            rng.binomial(num_samples, p) / num_samples for p in (shares, np.minimum(1, shares + 0.1))
        )
        interval = difference(second.tolist(), first.tolist(), num_samples)
        held += interval.low <= truth <= interval.high
    assert held / 1000 == pytest.approx(0.955, abs=0.02)


@pytest.mark.parametrize("agreement", [0.0, 0.6, 0.95])
def test_intervals_of_differences_hold_the_truth_as_often_as_they_say(agreement):
    """The second model answers as the first with this probability, else on its own."""
    rng, held = np.random.default_rng(2), 0
    for _ in range(600):
        first = rng.random(120) < 0.6
        second = np.where(rng.random(120) < agreement, first, rng.random(120) < 0.8)
        truth = (1 - agreement) * (0.8 - 0.6)
        interval = difference(second.astype(float).tolist(), first.astype(float).tolist())
        held += interval.low <= truth <= interval.high
    assert held / 600 >= 0.925  # and up to 0.99 where models agree on nearly everything


def test_models_that_do_not_differ_on_few_prompts_may_differ_on_others():
    interval = difference([1.0] * 4, [1.0] * 4)
    assert interval.value == 0 and interval.low < -0.3 and interval.high > 0.3


@pytest.mark.parametrize("num_prompts", [2, 3, 5, 12])
def test_intervals_of_few_prompts_means_hold_the_truth_as_often_as_they_say(num_prompts):
    rng = np.random.default_rng(3)
    intervals = [mean(values) for values in rng.normal(1, 1, (3000, num_prompts)).tolist()]
    assert sum(interval.low <= 1 <= interval.high for interval in intervals) / 3000 == pytest.approx(
        0.95, abs=0.012
    )


def test_a_mean_has_the_interval_of_its_standard_error():
    values = [1.0, 2.0, 4.0, 7.0]
    half = 3.182446 * np.std(values, ddof=1) / 2
    assert (mean(values).low, mean(values).high) == pytest.approx((3.5 - half, 3.5 + half), abs=0.04)
    assert math.isnan(mean([1.0]).low)
    with pytest.raises(ValueError, match="at least one"):
        mean([])
    with pytest.raises(ValueError, match="between 0 and 1"):
        share([1.2])
