"""Properties of the algorithms that hold whatever the numbers are."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.algorithms.advantages import (
    ADVANTAGES,
    AGGREGATIONS,
    AdvantageOptions,
    compute_advantages,
    nanstd,
)
from colocate.algorithms.entropy import EntropyController, EntropyOptions
from colocate.algorithms.importance_sampling import correction_ratios
from colocate.algorithms.kl import kl_estimate
from colocate.algorithms.losses import LOSSES, loss_weights
from colocate.algorithms.masks import entropy_threshold, off_policy_sequence_mask
from colocate.algorithms.normalization import entropy_weights, mean_tokens_per_step
from colocate.algorithms.objective import LossBatch, Objective, ObjectiveParams
from colocate.algorithms.objective_params import IMPORTANCE_SAMPLING_MODES
from colocate.algorithms.ratios import RATIOS
from colocate.reporting.metrics import Metrics

seeds = st.integers(0, 2**31 - 1)
loss_types = st.sampled_from(list(LOSSES))
levels = st.sampled_from(list(RATIOS))
few = settings(max_examples=60)


def make_params(**options) -> ObjectiveParams:
    return ObjectiveParams(**{"vllm_importance_sampling_mode": "token_truncate", **options})


def make_step(seed: int, *, num_sequences: int = 6, num_tokens: int = 5) -> tuple[torch.Tensor, ...]:
    """Policy log-probs and entropies (leaves), and a `LossBatch` with everything in it, in float64."""
    g = torch.Generator().manual_seed(seed)
    shape = (num_sequences, num_tokens)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    lengths = torch.randint(0, num_tokens + 1, (num_sequences,), generator=g)
    lengths[0] = num_tokens
    mask = (torch.arange(num_tokens) < lengths[:, None]).double()
    policy = -randn(*shape).abs()
    batch = LossBatch(
        mask=mask,
        advantages=randn(num_sequences),
        loss_weights=torch.rand(num_sequences, generator=g, dtype=torch.float64),
        entropy_weights=torch.rand(num_sequences, generator=g, dtype=torch.float64),
        old_logprobs=policy + 0.3 * randn(*shape),
        rollout_logprobs=policy + 0.3 * randn(*shape),
        reference_logprobs=policy + 0.3 * randn(*shape),
        entropy_thresholds=torch.full((num_sequences,), 0.4, dtype=torch.float64),
    )
    return policy.requires_grad_(), randn(*shape).abs().requires_grad_(), batch


def select(batch: LossBatch, index) -> LossBatch:
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return LossBatch(**{name: None if value is None else value[index] for name, value in values.items()})


def everything_on(loss_type: str, level: str) -> ObjectiveParams:
    return make_params(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.1,
        off_policy_mask_threshold=0.05,
        entropy_coef=0.2,
    )


@few
@given(
    seed=seeds, loss_type=loss_types, level=levels, cuts=st.lists(st.integers(0, 3), min_size=6, max_size=6)
)
def test_micro_batches_add_up(seed: int, loss_type: str, level: str, cuts: list[int]):
    """Any partition of a step gives the loss, the gradient and the metrics of the whole step."""
    policy, entropies, batch = make_step(seed)
    objective = Objective(everything_on(loss_type, level))
    whole, whole_metrics = objective(policy, entropies, batch)
    expected = torch.autograd.grad(whole, [policy, entropies])

    merged, total = Metrics(), torch.zeros((), dtype=torch.float64)
    for part in set(cuts):
        index = torch.tensor([i for i, cut in enumerate(cuts) if cut == part])
        loss, metrics = objective(policy[index], entropies[index], select(batch, index))
        total = total + loss
        merged.merge(metrics)
    torch.testing.assert_close(total, whole)
    for ours, theirs in zip(torch.autograd.grad(total, [policy, entropies]), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert merged.compute() == pytest.approx(whole_metrics.compute(), nan_ok=True)


@few
@given(seed=seeds, loss_type=loss_types, level=levels, order=st.permutations(range(6)))
def test_order_of_sequences_is_irrelevant(seed: int, loss_type: str, level: str, order: list[int]):
    policy, entropies, batch = make_step(seed)
    objective = Objective(everything_on(loss_type, level))
    expected = torch.autograd.grad(objective(policy, entropies, batch)[0], policy)[0]
    shuffled = objective(policy[order], entropies[order], select(batch, order))[0]
    torch.testing.assert_close(torch.autograd.grad(shuffled, policy)[0], expected)


@few
@given(seed=seeds, loss_type=loss_types, level=levels, junk=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_padding_is_never_read(seed: int, loss_type: str, level: str, junk: float):
    policy, entropies, batch = make_step(seed)
    objective = Objective(everything_on(loss_type, level))
    clean_loss, clean_metrics = objective(policy, entropies, batch)
    clean = torch.autograd.grad(clean_loss, [policy, entropies])

    padding = batch.mask == 0
    spoiled = batch
    for name in ("old_logprobs", "rollout_logprobs", "reference_logprobs"):
        values = getattr(batch, name).masked_fill(padding, junk)
        spoiled = dataclasses.replace(spoiled, **{name: values})
    inputs = [x.detach().masked_fill(padding, junk).requires_grad_() for x in (policy, entropies)]
    loss, metrics = objective(*inputs, spoiled)
    assert loss.item() == clean_loss.item()
    assert metrics.compute() == pytest.approx(clean_metrics.compute(), nan_ok=True)
    for ours, theirs in zip(torch.autograd.grad(loss, inputs), clean, strict=True):
        assert (ours[padding] == 0).all()
        assert torch.equal(ours, theirs)


@few
@given(seed=seeds, loss_type=loss_types, level=levels, old=st.booleans())
def test_on_policy_every_loss_is_the_policy_gradient(seed: int, loss_type: str, level: str, old: bool):
    """At ratio 1 nothing is clipped or reweighted: the gradient is −w·A per unmasked token."""
    policy, entropies, batch = make_step(seed)
    batch = dataclasses.replace(
        batch,
        old_logprobs=policy.detach().clone() if old else None,
        rollout_logprobs=policy.detach().clone(),
        reference_logprobs=None,
        entropy_thresholds=None,
    )
    epsilon_high = 5.0 if loss_type == "cispo" else None
    params = make_params(loss_type=loss_type, importance_sampling_level=level, epsilon_high=epsilon_high)
    loss, metrics = Objective(params)(policy, entropies, batch)
    expected = -(batch.loss_weights * batch.advantages)[:, None] * batch.mask
    torch.testing.assert_close(torch.autograd.grad(loss, policy)[0], expected)
    numbers = metrics.compute()
    assert numbers["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0)
    assert all(value == 0 for name, value in numbers.items() if name.startswith("clip_ratio/"))


@pytest.mark.parametrize("correct", [True, False])
def test_kl_gradient_over_a_whole_distribution(correct: bool):
    """Averaged over all tokens, corrected k3 has the gradient of KL(π_θ ‖ π_ref); plain k3 does not."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, -0.4, 1.0], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    probabilities = logprobs.detach().exp()
    ratios = torch.exp(logprobs - logprobs.detach()) if correct else None
    estimate = (probabilities * kl_estimate(logprobs, reference, ratios)).sum()
    torch.testing.assert_close(estimate, exact)
    same = torch.allclose(*(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (estimate, exact)))
    assert same == correct


def test_importance_ratios_by_hand():
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    log_ratios = torch.tensor([[1.0, 2.0, 9.0], [9.0, 9.0, 9.0]])
    assert RATIOS["token"](log_ratios, mask)[0, :2].log().tolist() == pytest.approx([1.0, 2.0])
    assert RATIOS["sequence"](log_ratios, mask).log().tolist() == [[1.5], [0.0]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [[0.5, 2.0, 1.0, 1.0]]),
        ("token_mask", [[0.0, 0.0, 1.0, 1.0]]),
        ("sequence_truncate", [[1.25]]),
        ("sequence_mask", [[1.25]]),
    ],
)
def test_correction_by_hand(mode: str, expected: list[list[float]]):
    """Ratios 1/4 and 5, one unknown, and padding that would be 100."""
    rollout = torch.zeros(1, 4)
    old = torch.tensor([[0.25, 5.0, 7.0, 100.0]]).log()
    rollout[0, 2] = math.nan
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    ratios = correction_ratios(old, rollout, mask, mode=mode, clip_min=0.5, clip_max=2.0)
    torch.testing.assert_close(ratios, torch.tensor(expected))


@few
@given(seed=seeds, mode=st.sampled_from(IMPORTANCE_SAMPLING_MODES))
def test_correction_without_mismatch_is_one(seed: int, mode: str):
    policy, _, batch = make_step(seed)
    ratios = correction_ratios(policy, policy.clone(), batch.mask, mode=mode, clip_min=0.5, clip_max=2.0)
    assert (ratios == 1).all()


def test_correction_applies_only_to_what_the_engine_reported():
    policy, entropies, batch = make_step(0)
    batch = dataclasses.replace(batch, entropy_thresholds=None)
    silent = dataclasses.replace(batch, rollout_logprobs=None)
    on, off = make_params(), make_params(vllm_importance_sampling_correction=False)
    corrected, metrics = Objective(on)(policy, entropies, batch)
    without = [Objective(p)(policy, entropies, b) for p, b in ((on, silent), (off, batch), (off, silent))]
    assert len({loss.item() for loss, _ in without}) == 1
    assert corrected.item() != without[0][0].item()
    assert "sampling/importance_sampling_ratio/mean" in metrics.compute()
    assert not any(name.startswith("sampling/") for _, m in without for name in m.compute())


def test_off_policy_mask_by_hand():
    """Only a negative advantage together with a large drift drops a sequence."""
    drift = torch.tensor([[0.6, 0.2], [0.6, 0.2], [0.3, 0.1], [math.nan, 0.7]])
    mask = torch.ones(4, 2)
    advantages = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]])
    keep = off_policy_sequence_mask(torch.zeros(4, 2), drift, advantages, mask, threshold=0.39)
    assert keep.tolist() == [[0.0], [1.0], [1.0], [1.0]]


def test_entropy_threshold_keeps_the_top():
    entropies = torch.arange(1.0, 11.0)
    for quantile, kept in ((0.0, 1), (0.2, 2), (0.5, 5), (1.0, 10)):
        assert (entropies >= entropy_threshold(entropies, quantile)).sum() == kept
    assert entropy_threshold(torch.empty(0), 0.2) == math.inf
    with pytest.raises(ValueError, match=r"top_entropy_quantile=1\.5"):
        entropy_threshold(entropies, 1.5)


@few
@given(
    counts=st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=4),
    loss_type=loss_types,
)
def test_weights_of_a_step(counts: list[list[int]], loss_type: str):
    """What the weights of a step's sequences add up to, from the definition of each loss type."""
    num_accumulated, num_tokens = len(counts), sum(map(sum, counts))
    tokens_per_step = mean_tokens_per_step(
        num_tokens, num_processes=1, num_accumulated=num_accumulated, steps_per_generation=num_accumulated
    )
    total = sum(
        (
            loss_weights(
                loss_type,
                torch.tensor(slice_counts),
                num_accumulated=num_accumulated,
                tokens_per_step=tokens_per_step,
                max_completion_length=9,
            )
            * torch.tensor(slice_counts)
        )
        .sum()
        .item()
        for slice_counts in counts
    )
    mean_length = num_tokens / (3 * num_accumulated)
    expected = {"dr_grpo": mean_length / 9, "luspo": mean_length}.get(loss_type, 1.0)
    assert total == pytest.approx(expected, rel=1e-5)
    entropy_total = sum(
        (entropy_weights(torch.tensor(c), num_accumulated=num_accumulated) * torch.tensor(c)).sum().item()
        for c in counts
    )
    assert entropy_total == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_weights_are_finite_when_all_is_masked(loss_type: str):
    tokens = mean_tokens_per_step(0, num_processes=2, num_accumulated=4, steps_per_generation=4)
    weights = loss_weights(
        loss_type, torch.zeros(3), num_accumulated=4, tokens_per_step=tokens, max_completion_length=9
    )
    assert weights.isfinite().all()


def reference_advantages(
    rewards: np.ndarray, group: int, weights: np.ndarray, scale: str, aggregation: str
) -> np.ndarray:
    """Loops in float64, one completion at a time."""

    def spread(values) -> float:
        known = [v for v in values if not np.isnan(v)]
        return np.std(known, ddof=1) if len(known) > 1 else np.nan

    n, num_funcs = rewards.shape
    if aggregation == "normalize_then_sum":
        table = np.full_like(rewards, np.nan)
        for i in range(n):
            members = slice(i // group * group, i // group * group + group)
            for f in range(num_funcs):
                known = [r for r in rewards[members, f] if not np.isnan(r)]
                if known:
                    table[i, f] = (rewards[i, f] - np.mean(known)) / (spread(known) + 1e-4)
    else:
        table = rewards
    sums = np.array([np.nansum(table[i] * weights) for i in range(n)])
    sums[np.isnan(rewards).all(axis=1)] = np.nan
    out = np.zeros(n)
    for i in range(n):
        members = sums[i // group * group : i // group * group + group]
        pool = sums if aggregation == "normalize_then_sum" else members
        if np.isnan(sums[i]):
            continue
        out[i] = sums[i] - np.nanmean(pool)
        if aggregation == "normalize_then_sum" or scale == "batch":
            out[i] /= spread(sums) + 1e-4
        elif scale == "group":
            out[i] /= spread(members) + 1e-4
        elif scale == "mean":
            out[i] = out[i] / np.nanmean(members) if np.nanmean(members) > 0 else 0.0
    return np.nan_to_num(out, nan=0.0)


def reward_table(seed: int, missing: float) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(12, 2, generator=g, dtype=torch.float64)
    return rewards.masked_fill(torch.rand(12, 2, generator=g) < missing, math.nan)


@few
@given(
    seed=seeds,
    missing=st.sampled_from([0.0, 0.3, 0.8]),
    scale=st.sampled_from(list(ADVANTAGES)),
    aggregation=st.sampled_from(list(AGGREGATIONS)),
)
def test_advantages_against_a_loop(seed: int, missing: float, scale: str, aggregation: str):
    rewards, weights = reward_table(seed, missing), torch.tensor([1.0, -0.5], dtype=torch.float64)
    if scale == "mean":  # of rewards that are not negative, many of them 0
        rewards, weights = rewards.clamp(min=0), weights.abs()
    ours = compute_advantages(
        rewards, 4, weights, AdvantageOptions(scale_rewards=scale, multi_objective_aggregation=aggregation)
    ).advantages.numpy()
    expected = reference_advantages(rewards.numpy(), 4, weights.numpy(), scale, aggregation)
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-9)


@few
@given(seed=seeds, shift=st.floats(-50, 50), scale=st.sampled_from(["group", "batch", "none"]))
def test_advantages_of_a_group_are_centred_and_ignore_shifts(seed: int, shift: float, scale: str):
    rewards, weights = reward_table(seed, missing=0.0), torch.ones(2, dtype=torch.float64)
    ours = compute_advantages(rewards, 4, weights, AdvantageOptions(scale_rewards=scale))
    torch.testing.assert_close(ours.advantages.view(-1, 4).sum(1), torch.zeros(3, dtype=torch.float64))
    moved = compute_advantages(rewards + shift, 4, weights, AdvantageOptions(scale_rewards=scale))
    torch.testing.assert_close(moved.advantages, ours.advantages, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("group", [2, 5])
def test_mean_scaling_climbs_the_truncated_log_likelihood(p: float, group: int):
    """The expected gradient over every outcome of a group of Bernoulli(p) completions, and the paper's."""
    rate = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    truncated = -sum((1 - rate) ** k / k for k in range(1, group))
    (expected,) = torch.autograd.grad(truncated, rate)
    outcomes = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * group)
    ours = compute_advantages(
        outcomes.reshape(-1, 1), group, torch.ones(1).double(), AdvantageOptions(scale_rewards="mean")
    ).advantages.view_as(outcomes)
    logprobs = outcomes * rate.log() + (1 - outcomes) * (1 - rate).log()
    surrogate = (logprobs.detach().sum(1).exp() * (ours * logprobs).mean(1)).sum()
    torch.testing.assert_close(torch.autograd.grad(surrogate, rate)[0], expected)


def test_mean_scaling_refuses_rewards_below_zero():
    rewards = torch.tensor([[1.0], [-0.5]])
    with pytest.raises(ValueError, match=r"a reward is -0\.5: .* set scale_rewards='group'"):
        compute_advantages(rewards, 2, torch.ones(1), AdvantageOptions(scale_rewards="mean"))


def test_unscored_and_equal_completions():
    rewards = torch.tensor([[1.0], [1.0], [math.nan], [2.0], [math.nan], [0.0]])
    ours = compute_advantages(rewards, 3, torch.ones(1), AdvantageOptions(scale_rewards="group"))
    assert ours.advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert ours.advantages[3:].tolist() == pytest.approx([0.7071, 0.0, -0.7071], abs=1e-4)
    assert ours.rewards.isnan().tolist() == [False, False, True, False, True, False]
    assert ours.is_std_zero.tolist() == [True, True, True, False, False, False]
    assert nanstd(torch.tensor([math.nan, 3.0]), dim=0).isnan()


def test_adaptive_entropy_by_hand():
    options = EntropyOptions(entropy_coef_max=0.12, entropy_coef_delta=0.05, entropy_target=1.0)
    controller = EntropyController(0.1, options, use_adaptive_entropy=True)
    assert controller.applied_coef == 0.0  # nothing measured yet
    path = []
    for entropy in (0.9, math.nan, 1.1, 1.0):
        controller.update(entropy)
        path.append((round(controller.coef, 6), round(controller.applied_coef, 6)))
    assert path == [(0.12, 0.12), (0.12, 0.12), (0.07, 0.0), (0.12, 0.12)]

    resumed = EntropyController(0.1, EntropyOptions(entropy_target=1.0), use_adaptive_entropy=True)
    resumed.load_state_dict(controller.state_dict())
    assert (resumed.coef, resumed.applied_coef) == (controller.coef, controller.applied_coef)


def test_fixed_entropy_coefficient_never_moves():
    controller = EntropyController(0.1)
    controller.update(0.0)
    assert controller.applied_coef == controller.coef == 0.1


def test_entropy_bonus_raises_entropy():
    """With no advantages, minimising the loss increases every trained token's entropy by its weight."""
    policy, entropies, batch = make_step(3)
    batch = dataclasses.replace(batch, advantages=torch.zeros(6, dtype=torch.float64))
    objective = Objective(make_params(entropy_coef=0.5), EntropyController(0.25))
    grad = torch.autograd.grad(objective(policy, entropies, batch)[0], entropies)[0]
    trained = batch.mask * (entropies >= 0.4)
    torch.testing.assert_close(grad, -0.25 * batch.entropy_weights[:, None] * trained)


def test_a_whole_step_s_policy_loss_is_reported_once():
    """Two micro-batches: the metric is their sum, not their mean."""
    policy, entropies, batch = make_step(1)
    batch = dataclasses.replace(batch, entropy_thresholds=None)
    weights = entropy_weights(batch.mask.sum(1), num_accumulated=1).double()
    batch = dataclasses.replace(batch, entropy_weights=weights)
    objective = Objective(make_params(use_adaptive_entropy=True))  # no bonus applied yet
    halves = [objective(policy[i], entropies[i], select(batch, i)) for i in (slice(0, 2), slice(2, 6))]
    merged = Metrics()
    for _, metrics in halves:
        merged.merge(metrics)
    assert merged.compute()["policy_loss"] == pytest.approx(sum(loss.item() for loss, _ in halves))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "dr-grpo"}, "Did you mean 'dr_grpo'"),
        ({"loss_type": "ppo"}, ", ".join(LOSSES)),
        ({"importance_sampling_level": "sequences"}, "Did you mean 'sequence'"),
        ({"vllm_importance_sampling_mode": "token-mask"}, "Did you mean 'token_mask'"),
        ({"epsilon": -0.1}, "set it to 0 or more"),
        ({"epsilon_high": -0.2}, "epsilon_high=-0.2"),
        ({"epsilon_high": 0.28, "delta": 1.25}, r"must exceed 1 \+ epsilon_high = 1\.28"),
        ({"loss_type": "sapo", "delta": 2.0}, "no effect with loss_type='sapo'"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"sapo_temperature_neg": 0.0}, "sapo_temperature_neg=0.0 must be positive"),
        ({"vespo_lambda_pos": -1.0}, "vespo_lambda_pos=-1.0 must be positive"),
        ({"vespo_k_neg": -1.0}, "vespo_k_neg=-1.0 must not be negative"),
        ({"off_policy_mask_threshold": 0.0}, "off_policy_mask_threshold=0.0"),
        ({"vllm_importance_sampling_clip_max": None}, "truncates to bounds that are not set"),
        ({"vllm_importance_sampling_clip_max": 0.9}, "0 <= min <= 1 <= max"),
        ({"vllm_importance_sampling_clip_min": 2.0}, "0 <= min <= 1 <= max"),
        ({"off_policy_mask_threshold": math.nan}, "off_policy_mask_threshold=nan"),
        ({"vllm_importance_sampling_clip_max": math.nan}, "clip_max=nan"),
        ({"vespo_k_pos": math.inf}, "vespo_k_pos=inf"),
    ],
)
def test_bad_options_are_refused_with_a_remedy(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_params(**options)


def test_bounds_do_not_matter_without_correction():
    make_params(vllm_importance_sampling_correction=False, vllm_importance_sampling_clip_max=None)


@few
@given(seed=seeds, level=st.sampled_from(["token_truncate", "uncorrected"]))
def test_dppo_is_the_paper_s_over_whole_distributions(seed: int, level: str):
    """Loss and gradient of DPPO-Binary-TV, token by token, from logits over a vocabulary of 4."""
    g = torch.Generator().manual_seed(seed)
    logits, old, engine = (torch.randn(3, 4, 4, generator=g, dtype=torch.float64) for _ in range(3))
    tokens = torch.randint(4, (3, 4), generator=g)
    advantages, weights = torch.randn(3, generator=g).double(), torch.rand(3, generator=g).double()
    logits.requires_grad_()
    policy, old, engine = (
        x.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] for x in (logits, old, engine)
    )
    unknown = torch.rand(3, 4, generator=g) < 0.2

    expected, slopes = 0.0, torch.zeros_like(logits)
    for i, t in ((i, t) for i in range(3) for t in range(4)):
        probabilities, token = logits[i, t].detach().softmax(-1), tokens[i, t]
        # The engine's correction makes the ratio π_θ/μ; what the engine could not tell has π_old for μ.
        sampled = old[i, t] if unknown[i, t] or level == "uncorrected" else engine[i, t]
        ratio = (probabilities[token].log() - sampled).exp()
        pi, mu = probabilities[token], (old if unknown[i, t] else engine)[i, t].exp()
        divergence = 0.5 * ((pi - mu).abs() + ((1 - pi) - (1 - mu)).abs())
        leaves = (pi - mu) * advantages[i] > 0 and divergence > (0.3 if advantages[i] > 0 else 0.1)
        if leaves and not unknown[i, t]:
            continue
        one_hot = torch.nn.functional.one_hot(token, 4)
        expected -= weights[i] * ratio * advantages[i]
        slopes[i, t] = -weights[i] * ratio * advantages[i] * (one_hot - probabilities)

    batch = LossBatch(
        mask=torch.ones(3, 4, dtype=torch.float64),
        advantages=advantages,
        loss_weights=weights,
        entropy_weights=weights,
        old_logprobs=old,
        rollout_logprobs=engine.masked_fill(unknown, math.nan),
    )
    params = ObjectiveParams(
        loss_type="dppo",
        epsilon=0.1,
        epsilon_high=0.3,
        vllm_importance_sampling_correction=level != "uncorrected",
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=math.inf,
    )
    loss, _ = Objective(params)(policy, torch.zeros(3, 4), batch)
    torch.testing.assert_close(loss.item(), float(expected))
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], slopes)


@given(seeds)
@few
def test_vespo_weighs_a_sequence_alike_by_its_tokens_and_by_itself(seed: int):
    # Bounds that no token and no sequence reaches: then the one ratio is the product of the many.
    policy, entropies, batch = make_step(seed)
    losses = [
        Objective(
            make_params(
                loss_type="vespo",
                vllm_importance_sampling_mode=f"{level}_truncate",
                vllm_importance_sampling_clip_max=1e30,
            )
        )(policy, entropies, batch)[0]
        for level in RATIOS
    ]
    torch.testing.assert_close(*losses)


def test_vespo_leaves_out_what_the_sequence_mask_does():
    # Two sequences of one advantage; to the engine the second is e^3 times less likely than to the trainer.
    old = torch.zeros(2, 3)
    batch = LossBatch(
        mask=torch.ones(2, 3),
        advantages=torch.ones(2),
        loss_weights=torch.ones(2),
        entropy_weights=torch.zeros(2),
        old_logprobs=old,
        rollout_logprobs=old - torch.tensor([[0.0], [1.0]]),
    )
    policy = old.clone().requires_grad_()
    loss, _ = Objective(ObjectiveParams(loss_type="vespo"))(policy, torch.zeros(2, 3), batch)
    loss.backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[-1.0] * 3, [0.0] * 3]))


@pytest.mark.parametrize(
    ("loss_type", "level", "message"),
    [
        ("luspo", "token", "`importance_sampling_level` should be set to `'sequence'`"),
        ("vespo", "sequence", "computes sequence-level importance weights internally"),
        ("dapo", "sequence", "weights each sequence by its completion length"),
        ("cispo", "token", "epsilon_high=0.2, so even unchanged tokens weigh 0.2"),
    ],
)
def test_unusual_pairs_are_warned_of(loss_type: str, level: str, message: str):
    params = ObjectiveParams(
        loss_type=loss_type,
        importance_sampling_level=level,
        vllm_importance_sampling_mode="token_mask",
    )
    lines = params.unusual_pairs()
    assert any(message in line for line in lines)


def test_a_ratio_without_a_lower_bound_is_told():
    """The first recipe of TRL's index of papers, after DeepSeek-R1."""
    (line,) = make_params(loss_type="grpo", epsilon=10.0).unusual_pairs()
    assert "at 1 - epsilon = -9, and" in line and "from above at 11." in line
    assert not make_params(loss_type="grpo", epsilon=1.0).unusual_pairs()


@pytest.mark.parametrize("loss_type", [name for name, loss in LOSSES.items() if loss.reads_delta])
def test_usual_pairs_are_silent(loss_type: str):
    level = "sequence" if loss_type in ("luspo", "grpo") else "token"
    assert not ObjectiveParams(loss_type=loss_type, importance_sampling_level=level).unusual_pairs()


def test_misuse_of_the_parts_is_refused():
    policy, entropies, batch = make_step(0)
    with pytest.raises(ValueError, match="no reference_logprobs"):
        unreferenced = dataclasses.replace(batch, reference_logprobs=None)
        Objective(make_params(beta=0.1))(policy, entropies, unreferenced)
    rewards, weights = torch.zeros(6, 2), torch.ones(2)
    with pytest.raises(ValueError, match="Did you mean 'group'"):
        compute_advantages(rewards, 3, weights, AdvantageOptions(scale_rewards="groups"))
    with pytest.raises(ValueError, match="Did you mean 'normalize_then_sum'"):
        compute_advantages(
            rewards, 3, weights, AdvantageOptions(multi_objective_aggregation="normalise_then_sum")
        )
    with pytest.raises(ValueError, match="2 are left over"):
        compute_advantages(rewards, 4, weights, AdvantageOptions(scale_rewards="group"))
    with pytest.raises(ValueError, match="2 reward functions"):
        compute_advantages(rewards, 3, torch.ones(3), AdvantageOptions(scale_rewards="group"))
    with pytest.raises(ValueError, match=r"entropy_coef_min=0\.2"):
        EntropyController(0.1, EntropyOptions(entropy_coef_min=0.2), use_adaptive_entropy=True)
    with pytest.raises(ValueError, match="entropy_coef_delta=0"):
        EntropyController(0.1, EntropyOptions(entropy_coef_delta=0.0), use_adaptive_entropy=True)
