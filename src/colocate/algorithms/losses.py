"""The policy losses by name: to add a loss type is to add one entry to `LOSSES`.

A surrogate gives the loss of each token, before masks, the engine's correction, KL and normalisation; the
options that it reads are declared in `LossOptions`. A result of shape [B, 1] broadcasts to [B, T]: a
sequence-level loss counts once for every token of its sequence.

Options are checked before PyTorch is loaded, so nothing here imports it: surrogates call methods of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

from colocate.algorithms import normalization
from colocate.algorithms.normalization import LossSlice
from colocate.algorithms.ratios import RATIOS
from colocate.algorithms.reductions import masked_max, masked_min, record_mean
from colocate.options.requirements import (
    IN_COMPLETIONS,
    MAY_BE_INFINITE,
    NOT_NEGATIVE,
    POSITIVE,
    OneOf,
    check_choice,
)
from colocate.reporting.run_log import reserve_metrics

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from colocate.reporting.metrics import Metrics

reserve_metrics(
    *(f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean"))
)
reserve_metrics("cispo_clip_ratio", "vespo/phi_seq_mean")
MIN_LOG_WEIGHT = math.log(1e-8)
MAX_LOG_WEIGHT = 20.0


# ── Loss ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class LossOptions:
    """The options of a run that the surrogates read."""

    # ── Loss ─────────────────────────────────────────────────────────────────────────────────────────────

    loss_type: Annotated[str, OneOf(LOSSES), IN_COMPLETIONS] = "dapo"
    """The policy loss: its surrogate and its normalisation."""
    importance_sampling_level: Annotated[str, OneOf(RATIOS)] = "token"
    """Ratios per "token", or one per "sequence" from the mean log-ratio (GSPO, arXiv:2507.18071)."""
    epsilon: float = 0.2
    """Lower clipping bound: ratios below 1 − ε. With "dppo": how far a token's probability may fall."""
    epsilon_high: Annotated[float | None, MAY_BE_INFINITE] = None
    """Upper clipping bound, 1 + ε_high; None takes `epsilon`. DAPO: 0.28. With "cispo" the cap itself: 5.
    With "dppo": how far a token's probability may rise."""
    delta: float | None = None
    """Second upper bound on the ratio, for negative advantages (INTELLECT-2, arXiv:2505.07291)."""
    sapo_temperature_neg: Annotated[float, POSITIVE] = 1.05
    """SAPO's temperature where the advantage is not positive (arXiv:2511.20347)."""
    sapo_temperature_pos: Annotated[float, POSITIVE] = 1.0
    """SAPO's temperature where the advantage is positive."""
    vespo_k_pos: Annotated[float, NOT_NEGATIVE] = 2.0
    """VESPO's exponent k of the ratio, positive advantages (arXiv:2602.10693)."""
    vespo_lambda_pos: Annotated[float, POSITIVE] = 3.0
    """VESPO's decay λ of the ratio, positive advantages."""
    vespo_k_neg: Annotated[float, NOT_NEGATIVE] = 3.0
    vespo_lambda_neg: Annotated[float, POSITIVE] = 2.0

    @property
    def upper_epsilon(self) -> float:
        """`epsilon_high`, which defaults to `epsilon`."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a surrogate, of a micro-batch: B sequences, the longest of T tokens. Masked entries are
    0."""

    policy_logprobs: Tensor
    """log π_θ of the tokens, [B, T], with gradient."""
    log_ratios: Tensor
    """log π_θ − log π_old of the tokens, [B, T], with gradient."""
    ratios: Tensor
    """The ratios r = π_θ / π_old, [B, T] at token level or [B, 1] at sequence level, with gradient."""
    behaviour_logprobs: Tensor
    """Log-probabilities [B, T] under the policy that sampled: the engine's if it reports them (NaN for a
    token whose it could not), else log π_old."""
    correction: Tensor | None
    """The engine's correction ρ, [B, T] or [B, 1], from `importance_sampling.correction_ratios`, or None."""
    advantages: Tensor
    """The advantages A of the sequences, [B, 1], or of their tokens, [B, T]."""
    mask: Tensor
    """The mask [B, T], 1 where the token counts."""


Surrogate: TypeAlias = "Callable[[LossInputs, LossOptions, Metrics], Tensor]"
"""A function that returns the losses of the tokens, [B, T] or [B, 1], and adds its own metrics."""


@dataclass(frozen=True)
class Loss:
    """A loss type: its surrogate, its normaliser, and further facts for the objective."""

    surrogate: Surrogate
    normalizer: Callable[[LossSlice], Tensor]
    """The weight of each sequence's sum, [B]: a function of `colocate.algorithms.normalization`."""
    paper: str
    """The paper that published the loss, to be read by people."""
    reads_delta: bool = False
    """Whether the surrogate reads the option `delta`, which is refused for other losses."""
    has_correction: bool = False
    """Whether the surrogate itself applies the engine's correction. If not, the objective multiplies its
    result by the correction."""
    reads_behaviour: bool = False
    """Whether the surrogate compares the policy with `LossInputs.behaviour_logprobs`."""
    in_trl: bool = True
    """Whether TRL has the loss under this name, so that tests compare the two."""
    cautions: tuple[Callable[[LossOptions], str | None], ...] = ()
    """Functions of the options, each of which returns one line if the options are allowed but seldom meant,
    or None. The lines are worded like TRL's warnings."""


def check_loss(options: LossOptions) -> None:
    """Raise ValueError for an unknown loss type, and for an option that the loss type does not read."""
    check_choice("loss_type", options.loss_type, LOSSES)
    if options.delta is not None and not LOSSES[options.loss_type].reads_delta:
        raise ValueError(
            f"delta={options.delta} has no effect with loss_type={options.loss_type!r}, only with "
            f"{', '.join(name for name, loss in LOSSES.items() if loss.reads_delta)}: set it to None or "
            "change the loss type."
        )


def loss_weights(
    loss_type: str,
    token_counts: Tensor,
    *,
    num_accumulated: int,
    tokens_per_step: float,
    max_completion_length: int,
) -> Tensor:
    """The loss weights of one slice's sequences, [B] float32, by a loss type's normaliser.

    Args:
        token_counts: [B] unmasked tokens per sequence; 0 is allowed.
        num_accumulated, tokens_per_step, max_completion_length: see `normalization.LossSlice`.
    """
    part = LossSlice(token_counts.float(), num_accumulated, tokens_per_step, max_completion_length)
    return LOSSES[loss_type].normalizer(part)


# ── Surrogates ───────────────────────────────────────────────────────────────────────────────────────────


def clipped(inputs: LossInputs, options: LossOptions, metrics: Metrics) -> Tensor:
    """The clipped surrogate −min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A), optionally bounded on both sides.

    ε_high > ε_low is DAPO's. For A < 0 the surrogate grows without bound in r; δ caps r there,
    −min(min(r, δ)·A, clip(r)·A), as in "INTELLECT-2: A Reasoning Model Trained Through Globally Decentralized
    Reinforcement Learning", arXiv 2505.07291.
    """
    ratios, advantages = inputs.ratios, inputs.advantages
    low = (ratios < 1 - options.epsilon) & (advantages < 0)
    high = (ratios > 1 + options.upper_epsilon) & (advantages > 0)
    _record_clipping(metrics, low, high, inputs.mask)
    bounded = ratios.clamp(1 - options.epsilon, 1 + options.upper_epsilon)
    if options.delta is not None:
        ratios = ratios.clamp(max=options.delta)
    return -(ratios * advantages).minimum(bounded * advantages)


def dppo(inputs: LossInputs, options: LossOptions, metrics: Metrics) -> Tensor:
    """−M·r·A with M = 0 where A > 0 and π_θ(y) − μ(y) > ε_high, or A < 0 and μ(y) − π_θ(y) > ε; else M = 1.

    A trust region of probabilities instead of ratios: |π_θ(y) − μ(y)| is the total variation between the two
    policies if all tokens but the sampled one are taken as one (the paper's DPPO-Binary-TV, with 0.15).
    Tokens that would bring the policy back into the region keep their gradient. μ is the policy that sampled;
    a token whose probability the engine could not tell is kept.

    The paper's ratio is π_θ/μ. That is r here times the engine's correction, with
    `vllm_importance_sampling_mode="token_truncate"` and `vllm_importance_sampling_clip_max=inf`.
    """
    advantages = inputs.advantages
    shift = (inputs.policy_logprobs.exp() - inputs.behaviour_logprobs.exp()).detach().nan_to_num(nan=0.0)
    low = (shift < -options.epsilon) & (advantages < 0)
    high = (shift > options.upper_epsilon) & (advantages > 0)
    _record_clipping(metrics, low, high, inputs.mask)
    return (-inputs.ratios * advantages).where(~(low | high), 0.0)


def cispo(inputs: LossInputs, options: LossOptions, metrics: Metrics) -> Tensor:
    """−sg(min(r, ε_high))·A·log π_θ: the ratio is clipped as a weight, so no token loses its gradient.

    `sg` stops the gradient. ε_high bounds r itself, not r − 1: "The Art of Scaling Reinforcement Learning
    Compute for LLMs" (arXiv 2510.13786) recommends 5.
    """
    ratios, advantages, cap = inputs.ratios, inputs.advantages, options.upper_epsilon
    record_mean(metrics, "cispo_clip_ratio", (ratios > cap) & (advantages > 0), inputs.mask)
    return -ratios.clamp(max=cap).detach() * advantages * inputs.policy_logprobs


def sapo(inputs: LossInputs, options: LossOptions, metrics: Metrics) -> Tensor:
    """−4/τ·σ(τ(r − 1))·A, τ = τ_pos where A > 0 and τ_neg elsewhere: a soft gate instead of a clip.

    The gate's slope at r = 1 is 1, so on-policy the gradient is the policy gradient.
    """
    ratios, advantages = inputs.ratios, inputs.advantages
    temperatures = _where(
        advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg, dtype=ratios.dtype
    )
    return -(temperatures * (ratios - 1)).sigmoid() * 4 / temperatures * advantages


def vespo(inputs: LossInputs, options: LossOptions, metrics: Metrics) -> Tensor:
    """−φ(w)·A·log π_θ with φ(w) = e^λ · w^k · e^(−λw), the Gamma-shaped weight of a sequence; φ(1) = 1.

    w = Π_t π_θ(y_t)/π_old(y_t) · π_old(y_t)/π_rollout(y_t) is the ratio of the whole sequence, not
    length-normalised; k and λ depend on the sign of A. No gradient flows through φ.
    """
    weights = _vespo_weights(inputs, options)
    record_mean(metrics, "vespo/phi_seq_mean", weights, inputs.mask)
    return -weights * inputs.advantages * inputs.policy_logprobs


def _vespo_weights(inputs: LossInputs, options: LossOptions) -> Tensor:
    log_ratios, mask, advantages = inputs.log_ratios.detach(), inputs.mask, inputs.advantages
    log_weights = (log_ratios.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT) * mask).sum(dim=-1, keepdim=True)
    if inputs.correction is not None:
        # A ratio masked to 0 has no logarithm; the lower bound makes its whole sequence negligible instead.
        log_corrections = inputs.correction.detach().log().clamp(MIN_LOG_WEIGHT, MAX_LOG_WEIGHT)
        if log_corrections.shape == mask.shape:
            log_corrections = (log_corrections * mask).sum(dim=-1, keepdim=True)
        log_weights = log_weights + log_corrections
    log_weights = log_weights.clamp(MIN_LOG_WEIGHT, MAX_LOG_WEIGHT)
    k = _where(advantages >= 0, options.vespo_k_pos, options.vespo_k_neg, dtype=log_weights.dtype)
    decay = _where(
        advantages >= 0, options.vespo_lambda_pos, options.vespo_lambda_neg, dtype=log_weights.dtype
    )
    return (decay + k * log_weights - decay * log_weights.exp()).exp()


def _where(condition: Tensor, if_true: float, if_false: float, dtype: torch.dtype) -> Tensor:
    # torch.where rounds two Python floats to the default dtype first.
    return condition.new_full(condition.shape, if_false, dtype=dtype).masked_fill(condition, if_true)


def _record_clipping(metrics: Metrics, low: Tensor, high: Tensor, mask: Tensor) -> None:
    """Record `clip_ratio/*` from flags [B, T] or [B, 1]; minima and maxima are over sequences' fractions."""
    record_mean(metrics, "clip_ratio/low_mean", low, mask)
    record_mean(metrics, "clip_ratio/high_mean", high, mask)
    record_mean(metrics, "clip_ratio/region_mean", low | high, mask)
    if low.shape != mask.shape:
        mask = mask.new_ones(low.shape)
    num_tokens = mask.sum(dim=-1)
    metrics.add_min("clip_ratio/low_min", masked_min((low * mask).sum(dim=-1) / num_tokens, num_tokens))
    metrics.add_max("clip_ratio/high_max", masked_max((high * mask).sum(dim=-1) / num_tokens, num_tokens))


# ── What is seldom meant ─────────────────────────────────────────────────────────────────────────────────


def _sums_over_tokens(options: LossOptions) -> str | None:
    if options.importance_sampling_level == "token":
        return None
    return (
        f"loss_type={options.loss_type!r} sums over tokens, which with importance_sampling_level='sequence' "
        "effectively weights each sequence by its completion length. GSPO as published is loss_type='grpo'."
    )


def _caps_below_one(options: LossOptions) -> str | None:
    if options.upper_epsilon >= 1:
        return None
    return (
        f"loss_type='cispo' caps the ratio itself at epsilon_high={options.upper_epsilon}, so even "
        f"unchanged tokens weigh {options.upper_epsilon} instead of 1. ScaleRL recommends 5."
    )


def _has_sequence_ratios(options: LossOptions) -> str | None:
    if options.importance_sampling_level == "sequence":
        return None
    return (
        "loss_type='luspo' is defined with sequence-level ratios: `importance_sampling_level` should be set "
        "to `'sequence'`, not 'token'."
    )


def _has_weights_of_its_own(options: LossOptions) -> str | None:
    if options.importance_sampling_level == "token":
        return None
    return (
        "loss_type='vespo' computes sequence-level importance weights internally: "
        "`importance_sampling_level` should be set to `'token'`."
    )


# ── The table ────────────────────────────────────────────────────────────────────────────────────────────

LOSSES: dict[str, Loss] = {
    "grpo": Loss(
        clipped,
        normalization.sequence_mean,
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, arXiv "
        "2402.03300; with sequence-level ratios, Group Sequence Policy Optimization, arXiv 2507.18071",
        reads_delta=True,
    ),
    "dapo": Loss(
        clipped,
        normalization.step_mean,
        "DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv 2503.14476",
        reads_delta=True,
        cautions=(_sums_over_tokens,),
    ),
    "bnpo": Loss(
        clipped,
        normalization.slice_mean,
        "TRL's first token-level normalisation",
        reads_delta=True,
        cautions=(_sums_over_tokens,),
    ),
    "dr_grpo": Loss(
        clipped,
        normalization.fixed_length_mean,
        "Understanding R1-Zero-Like Training: A Critical Perspective, arXiv 2503.20783",
        reads_delta=True,
        cautions=(_sums_over_tokens,),
    ),
    "luspo": Loss(
        clipped,
        normalization.sequence_sum,
        "Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length Variation "
        "in RLVR, arXiv 2602.05261",
        reads_delta=True,
        cautions=(_has_sequence_ratios,),
    ),
    "dppo": Loss(
        dppo,
        normalization.step_mean,
        "Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879",
        reads_behaviour=True,
        in_trl=False,
        cautions=(_sums_over_tokens,),
    ),
    "cispo": Loss(
        cispo,
        normalization.step_mean,
        "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention, arXiv 2506.13585",
        cautions=(_sums_over_tokens, _caps_below_one),
    ),
    "sapo": Loss(sapo, normalization.sequence_mean, "Soft Adaptive Policy Optimization, arXiv 2511.20347"),
    "vespo": Loss(
        vespo,
        normalization.step_mean,
        "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training, "
        "arXiv 2602.10693",
        has_correction=True,
        cautions=(_has_weights_of_its_own,),
    ),
}
