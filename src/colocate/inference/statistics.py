"""Confidence of an evaluation: intervals of shares, of means and of differences, and pass@k.

Prompts are the independent draws: completions of one prompt succeed or fail together, so intervals are over
the values of prompts (clustered standard errors; Miller 2024, "Adding Error Bars to Evals",
arXiv:2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pstdev, variance

CONFIDENCE = 0.95
_QUANTILE = 0.5 + CONFIDENCE / 2
_Z = NormalDist().inv_cdf(_QUANTILE)


@dataclass(frozen=True)
class Estimate:
    """A number and its interval of 95% confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def share(values: Sequence[float], num_samples: int = 1) -> Estimate:
    """The mean of N prompts' values between 0 and 1, such as the share of a prompt's completions that are
    right.

    The interval is Wilson's (1927), which stays within 0 and 1 and has a width where all values are equal.
    With one completion for each prompt it is Wilson's own; with several, the number of draws is the effective
    one of clustered data (Korn and Graubard 1998): p (1 - p) divided by the variance of the mean, at least N
    and at most all.

    Args:
        num_samples: completions that each value is made of.
    """
    if not values or min(values) < 0 or max(values) > 1:
        raise ValueError("A share needs at least one value, and all of them between 0 and 1.")
    center, num_draws = fmean(values), float(len(values))
    if len(values) > 1 and (spread := variance(values)) > 0:
        # The sample's variance of 0 and 1 alone is p (1 - p) N / (N - 1): then the number is N.
        population = spread * (len(values) - 1) / len(values)
        effective = center * (1 - center) / population * len(values)
        num_draws = min(max(num_draws, effective), num_draws * num_samples)
    return wilson(center, num_draws)


def wilson(observed: float, num_draws: float) -> Estimate:
    """Wilson's score interval (1927) of a share in `num_draws` independent draws."""
    shrink = 1 + _Z**2 / num_draws
    center = (observed + _Z**2 / (2 * num_draws)) / shrink
    half = _Z / shrink * math.sqrt(observed * (1 - observed) / num_draws + _Z**2 / (4 * num_draws**2))
    # Rounding must not put the bound of 0 or 1 to the wrong side of it.
    return Estimate(observed, max(0.0, min(center - half, observed)), min(1.0, max(center + half, observed)))


def mean(values: Sequence[float]) -> Estimate:
    """The mean of N prompts' values, with Student's interval of its error; NaN bounds for one value."""
    if not values:
        raise ValueError("A mean needs at least one value.")
    center = fmean(values)
    if len(values) == 1:
        return Estimate(center, math.nan, math.nan)
    half = _student(len(values) - 1) * math.sqrt(variance(values) / len(values))
    return Estimate(center, center - half, center + half)


def _student(degrees: int) -> float:
    """The quantile of Student's distribution for which the normal one has `_Z`, to 1%; the series is equation
    26.7.5 of Abramowitz and Stegun's "Handbook of Mathematical Functions"."""
    if degrees == 1:
        return math.tan(math.pi * (_QUANTILE - 0.5))
    if degrees == 2:
        return CONFIDENCE * math.sqrt(0.5 / (_QUANTILE * (1 - _QUANTILE)))
    first, second, third = (
        _Z**3 + _Z,
        5 * _Z**5 + 16 * _Z**3 + 3 * _Z,
        3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z,
    )
    return _Z + first / (4 * degrees) + second / (96 * degrees**2) + third / (384 * degrees**3)


def difference(values: Sequence[float], others: Sequence[float], num_samples: int = 1) -> Estimate:
    """The share of `values` minus that of `others`, which another model has reached on the same prompts.

    Both models have their easy and hard prompts in common, which says more than two intervals do. The
    interval is made of both shares' intervals and of the correlation between them (Newcombe 1998, Statistics
    in Medicine 17:2635, method 10), so that it has a width even where no prompt's share differs.
    """
    one, other = share(values, num_samples), share(others, num_samples)
    phi = _correlation(values, others, num_samples)
    gained = one.value - other.value

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a**2 - 2 * phi * a * b + b**2))

    low = gained - reach(one.value - one.low, other.high - other.value)
    high = gained + reach(one.high - one.value, other.value - other.low)
    return Estimate(gained, max(-1.0, low), min(1.0, high))


def _correlation(values: Sequence[float], others: Sequence[float], num_samples: int) -> float:
    """The correlation between two models' shares; a positive one is lowered by Newcombe's correction, half a
    completion of all, since few on which models disagree make it look closer to 1 than it is."""
    deviations = pstdev(values) * pstdev(others)
    if deviations == 0:
        return 0.0
    center, other = fmean(values), fmean(others)
    pairs = zip(values, others, strict=True)
    covariance = fmean((value - center) * (second - other) for value, second in pairs)
    if covariance > 0:
        covariance = max(0.0, covariance - 0.5 / (len(values) * num_samples))
    return covariance / deviations


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that at least one of k completions is right, estimated from c right ones among n
    completions of a prompt.

    The estimate 1 - C(n - c, k) / C(n, k) has no bias (Chen et al. 2021, arXiv:2107.03374, equation 1); 1 -
    (1 - c / n)^k has.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"pass@{k} cannot be estimated from {num_samples} completions of which {num_correct} are "
            f"right: it needs at least {k} of them. Set --num_samples {k} or more."
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
