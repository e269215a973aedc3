"""The loss of a micro-batch: one page that composes every part of the algorithm, in the order of TRL."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from colocate.algorithms.entropy import EntropyController
from colocate.algorithms.importance_sampling import correction_ratios, record_sampling_metrics
from colocate.algorithms.kl import kl_estimate
from colocate.algorithms.losses import LOSSES, LossInputs
from colocate.algorithms.masks import off_policy_sequence_mask
from colocate.algorithms.objective_params import ObjectiveParams
from colocate.algorithms.ratios import RATIOS
from colocate.algorithms.reductions import record_mean
from colocate.reporting.metrics import Metrics
from colocate.reporting.run_log import reserve_metrics

__all__ = ["LossBatch", "Objective", "ObjectiveParams"]

reserve_metrics("entropy", "entropy_trained", "kl", "policy_loss")


@dataclass(frozen=True)
class LossBatch:
    """The inputs of the loss for a micro-batch, besides the policy's own outputs.

    The longest completion has T tokens; shorter ones are padded on the right with mask 0. Masked entries are
    never read, so padding may hold anything, NaN included.
    """

    mask: Tensor  # [B, T] float32, 1 where the token counts
    advantages: Tensor  # [B], or [B, T] where tokens of one sequence differ
    loss_weights: Tensor  # [B] from `losses.loss_weights`
    entropy_weights: Tensor  # [B] from `normalization.entropy_weights`
    old_logprobs: Tensor | None = None  # [B, T]; None: the policy itself generated, the ratio is 1
    rollout_logprobs: Tensor | None = None  # [B, T] from the engine; NaN where it could not tell
    logprobs_without_dropout: Tensor | None = None  # [B, T] of the policy itself; None: it has no dropout
    reference_logprobs: Tensor | None = None  # [B, T]; needed with beta > 0
    entropy_thresholds: Tensor | None = None  # [B]; no policy loss or entropy bonus for tokens below

    def without_padding(self) -> LossBatch:
        """A copy of the batch in which everything that is masked is 0."""
        logprobs = ("old_logprobs", "rollout_logprobs", "logprobs_without_dropout", "reference_logprobs")
        names = ("advantages", *logprobs)
        given = {name: x for name in names if (x := getattr(self, name)) is not None and x.ndim == 2}
        return replace(self, **{name: _fill_padding(values, self.mask) for name, values in given.items()})

    def rollout_logprobs_beside(self, old_logprobs: Tensor) -> Tensor | None:
        """The engine's log-probabilities [B, T] plus the change that dropout makes to the trainer's
        `old_logprobs` [B, T].

        Engines apply no dropout. Without this term its noise, which adds up over a sequence, would count as a
        mismatch of kernels.
        """
        if self.rollout_logprobs is None or self.logprobs_without_dropout is None:
            return self.rollout_logprobs
        return self.rollout_logprobs + (old_logprobs - self.logprobs_without_dropout)


class Objective:
    """Computes loss and metrics of a micro-batch. The losses of micro-batches add up to that of the step.

        token_loss = surrogate(ratio, A) · off_policy_mask · entropy_mask · ρ + β·KL
        loss       = Σ_i loss_weight_i Σ_t mask · token_loss
                     − entropy_coef · Σ_i entropy_weight_i Σ_t mask · entropy_mask · H

    The surrogate is `LOSSES[loss_type]`'s. ρ is the engine's importance-sampling correction, applied if
    `vllm_importance_sampling_correction` is set and the batch has `rollout_logprobs`; a loss may take it
    inside its surrogate instead (`Loss.has_correction`).
    """

    def __init__(self, params: ObjectiveParams, entropy: EntropyController | None = None) -> None:
        """`entropy` says how much entropy is rewarded at each step; None: always `params.entropy_coef`."""
        self.params = params
        self._entropy = entropy

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy bonus in the next step."""
        if self._entropy is not None:
            return self._entropy.applied_coef
        # Under adaptive control there is no bonus until a first step's entropy has been measured.
        return 0.0 if self.params.use_adaptive_entropy else self.params.entropy_coef

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss depends on the entropies, so that they need a gradient."""
        return self.params.has_entropy_bonus

    @property
    def vanishes_without_advantages(self) -> bool:
        """Whether loss and gradient are 0 where all advantages are: every surrogate is a multiple of them."""
        return self.params.beta == 0.0 and not self.has_entropy_bonus

    def __call__(
        self, policy_logprobs: Tensor, entropies: Tensor, batch: LossBatch
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one micro-batch.

        Args:
            policy_logprobs: [B, T] of the completion tokens, with gradient.
            entropies: [B, T] in nats, with gradient if `ObjectiveParams.has_entropy_bonus`.
            batch: masks, weights, advantages and the log-probabilities of other policies.

        Returns:
            The scalar loss and the metrics, as totals and counts that merge over micro-batches: `entropy`,
            `kl`, `sampling/*` and the surrogate's own as in TRL, and with an entropy bonus `policy_loss` and
            `entropy_trained` (the mean entropy of the tokens that the bonus acts on).

        Raises:
            ValueError: `beta` is not 0 but the batch has no reference log-probabilities.
        """
        params, metrics = self.params, Metrics()
        mask = batch.mask
        assert policy_logprobs.shape == mask.shape, f"{policy_logprobs.shape=} is not {mask.shape=}"
        policy_logprobs, entropies = _fill_padding(policy_logprobs, mask), _fill_padding(entropies, mask)
        batch = batch.without_padding()
        old_logprobs = policy_logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        log_ratios = policy_logprobs - old_logprobs
        ratios = RATIOS[params.importance_sampling_level](log_ratios, mask)
        rollout_logprobs = batch.rollout_logprobs_beside(old_logprobs)
        correction = self._correction(old_logprobs, rollout_logprobs, mask, metrics)
        # The engine's log-probabilities see both causes of drift, other kernels and older weights.
        behaviour_logprobs = old_logprobs if rollout_logprobs is None else rollout_logprobs

        inputs = LossInputs(
            policy_logprobs=policy_logprobs,
            log_ratios=log_ratios,
            ratios=ratios,
            behaviour_logprobs=behaviour_logprobs,
            correction=correction,
            advantages=batch.advantages.reshape(len(mask), -1),
            mask=mask,
        )
        token_loss = self._surrogate(inputs, metrics)
        trained = mask
        if batch.entropy_thresholds is not None:
            trained = mask * (entropies >= batch.entropy_thresholds.unsqueeze(1))
            token_loss = token_loss * trained
        if correction is not None and not LOSSES[params.loss_type].has_correction:
            token_loss = token_loss * correction
        if params.beta != 0.0:
            token_loss = token_loss + params.beta * self._kl(policy_logprobs, ratios, batch, metrics)

        loss = (batch.loss_weights * (token_loss * mask).sum(dim=-1)).sum()
        record_mean(metrics, "entropy", entropies, mask)
        if params.has_entropy_bonus:
            # The entropy weights of a step's tokens add up to 1: this count makes the mean the step's loss.
            share_of_step = (batch.entropy_weights * trained.sum(dim=-1)).sum()
            metrics.add_mean("policy_loss", loss.detach(), share_of_step)
            record_mean(metrics, "entropy_trained", entropies, trained)
            bonus = (batch.entropy_weights * (entropies * trained).sum(dim=-1)).sum()
            loss = loss - self.entropy_coef * bonus
        return loss, metrics

    def _surrogate(self, inputs: LossInputs, metrics: Metrics) -> Tensor:
        token_loss = LOSSES[self.params.loss_type].surrogate(inputs, self.params, metrics)
        if self.params.off_policy_mask_threshold is None:
            return token_loss
        return token_loss * off_policy_sequence_mask(
            inputs.policy_logprobs,
            inputs.behaviour_logprobs,
            inputs.advantages,
            inputs.mask,
            threshold=self.params.off_policy_mask_threshold,
        )

    def _correction(
        self, old_logprobs: Tensor, rollout_logprobs: Tensor | None, mask: Tensor, metrics: Metrics
    ) -> Tensor | None:
        params = self.params
        if rollout_logprobs is None or not params.vllm_importance_sampling_correction:
            return None
        ratios = correction_ratios(
            old_logprobs,
            rollout_logprobs,
            mask,
            mode=params.vllm_importance_sampling_mode,
            clip_min=params.vllm_importance_sampling_clip_min,
            clip_max=params.vllm_importance_sampling_clip_max,
        )
        record_sampling_metrics(metrics, old_logprobs, rollout_logprobs, mask, ratios)
        return ratios

    def _kl(self, policy_logprobs: Tensor, ratios: Tensor, batch: LossBatch, metrics: Metrics) -> Tensor:
        if batch.reference_logprobs is None:
            raise ValueError(
                f"beta={self.params.beta} penalises the distance to the reference policy, but the batch has "
                "no reference_logprobs: compute them, or set beta=0."
            )
        kl = kl_estimate(
            policy_logprobs, batch.reference_logprobs, ratios if self.params.use_bias_correction_kl else None
        )
        record_mean(metrics, "kl", kl, batch.mask)
        return kl


def _fill_padding(values: Tensor, mask: Tensor) -> Tensor:
    # Multiplying by a mask of 0 would keep NaN and infinities, in the gradient too.
    return values.masked_fill(~mask.bool(), 0.0)
