"""Whether engine and policy compute the same model: the log-probs of a run's first rollout, compared."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from colocate.engines.base import RolloutEngine
from colocate.engines.logprob_noise import largest_mean_noise
from colocate.policy.policy import Policy
from colocate.types import Sample, SamplingParams
from colocate.weights.layouts import causal_lm

logger = logging.getLogger(__name__)

NUM_COMPARED = 8
"""Completions that are scored again, spread over the rollout."""
_NUM_ERRORS = 6.0
"""The number of standard errors by which the tokens' mean log-prob may lie below minus the entropy."""
_SMALLEST_SURPRISE = 0.1
"""Nats per token that kernels may explain in bfloat16, however many tokens there are."""
_LOOK_AT = (
    "They should be one model: look at whether the engine has the run's weights, adapter and precision, and "
    "whether another run publishes to it; sampling/sampling_logp_difference is logged for every step."
)


class Agreement:
    """Compares an engine's log-probs with the policy's: once, and again after each restart of the engine.

    Where the engine reports log-probs, their mean distance from the policy's must be explained by rounding.
    Where it reports none, the tokens themselves are looked at. For tokens drawn from the policy E[log π(y)] =
    −H, and log π(y) + H is a martingale difference from token to token, so its mean is near 0 with a known
    standard error. Filters such as top_p keep the likely tokens and raise the mean; only a mean far below 0
    shows that another model has drawn the tokens. A repetition penalty also lowers the mean, and arguments of
    `generation_kwargs` may; with these nothing is concluded.

    Args:
        sampling: how the rollouts are drawn.
        is_drawn_otherwise: whether anything besides `sampling` decides which tokens are drawn.
        is_8bit: whether the engine generates in 8 bits (`rollout_precision`).
    """

    def __init__(
        self,
        engine: RolloutEngine,
        policy: Policy,
        sampling: SamplingParams,
        *,
        is_drawn_otherwise: bool = False,
        is_8bit: bool = False,
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._sampling = sampling
        self._is_drawn_otherwise = is_drawn_otherwise
        self._is_8bit = is_8bit
        self._num_restarts_seen = -1

    def leave_out(self) -> None:
        """Compare nothing until the engine starts again: Compare nothing until the engine restarts: older
        weights have drawn some of the coming tokens."""
        self._num_restarts_seen = self._engine.num_restarts

    def check(self, samples: Sequence[Sample]) -> None:
        """Warn if a rollout was not drawn from the policy. Only the first call (after a restart) costs time.

        Args:
            samples: this process's samples of a rollout on which the policy has not been trained yet.
        """
        engine, policy = self._engine, self._policy
        # Ranks that share the weights evaluate together, those without samples too.
        is_needed = bool(samples) or policy.num_weight_parts > 1
        if not is_needed or engine.num_restarts == self._num_restarts_seen:
            return
        self._num_restarts_seen = engine.num_restarts
        compared = samples[:: max(1, math.ceil(len(samples) / NUM_COMPARED))]
        evaluated = policy.logprobs(compared)
        if not evaluated:
            return
        logprobs, entropies = (torch.cat(part) for part in zip(*evaluated, strict=True))
        told = [sample.rollout_logprobs for sample in compared if sample.rollout_logprobs is not None]
        name = type(engine).__name__
        if len(told) == len(compared):
            dtype = causal_lm(policy.model).get_input_embeddings().weight.dtype
            noise = largest_mean_noise(
                dtype, logprobs.device, self._sampling.temperature, is_8bit=self._is_8bit
            )
            rounding = "to 8 bits" if self._is_8bit else f"in {str(dtype).removeprefix('torch.')}"
            if dtype != torch.float32 and not self._is_8bit and policy.num_weight_parts == 1:
                alone = torch.cat([policy.logprobs([sample])[0][0] for sample in compared])
                noise = _explained(noise, float((alone - logprobs).abs().mean()))
            problem = _distance(name, torch.cat(told), logprobs, noise, rounding)
        elif self._sampling.repetition_penalty == 1.0 and not self._is_drawn_otherwise:
            drawn = _drawn(compared)
            problem = _surprise(name, logprobs[drawn], entropies[drawn])
        else:
            problem = None
        if problem is not None:
            logger.warning(f"{problem} {_LOOK_AT}")


def _explained(most: float, own: float) -> float:
    """The distance that rounding explains in 16 bits, given that of the policy from itself.

    With a model of 135 million parameters in bfloat16, single sequences were 0.036 apart from packed ones and
    the engine 0.033. With other kernels engine and policy were up to 0.05 apart, half of the limit.

    Args:
        most: the largest that is ever allowed.
        own: the mean |difference| of sequences computed alone and together.
    """
    return min(most, max(most / 2, 2 * own))


def _distance(name: str, told: Tensor, logprobs: Tensor, noise: float, rounding: str) -> str | None:
    """The fault of the log-probs `told` [N] that an engine reports, or None if rounding explains their
    distance from the policy's, `noise` on average."""
    difference = (told - logprobs).abs()
    difference = difference[~difference.isnan()]
    if len(difference) == 0 or (mean := float(difference.mean())) <= noise:
        return None
    return (
        f"The log-probs of {name} differ from the policy's by {mean:.3g} nats per token on average and "
        f"{float(difference.max()):.3g} at most, over {len(difference):,} tokens of the rollout; rounding "
        f"{rounding} explains {noise:.2g}."
    )


def _drawn(samples: Sequence[Sample]) -> Tensor:
    """Which of the completion tokens [N] the engine has drawn, as bool: those that no tool has given."""
    masks = [sample.completion_mask.bool() for sample in samples]
    # Without turns there are none to leave out, but whole completions may be masked that were cut short: to
    # look at the others alone would be to look at tokens chosen by what came after them.
    if all(mask.all() or not mask.any() for mask in masks):
        masks = [torch.ones_like(mask) for mask in masks]
    return torch.cat(masks)


def _surprise(name: str, logprobs: Tensor, entropies: Tensor) -> str | None:
    """The fault of tokens, or None, given their log-probs [N] and entropies [N] under the policy."""
    surprise = -(logprobs + entropies)
    if len(surprise) < 2:
        return None
    mean, error = float(surprise.mean()), float(surprise.std()) / math.sqrt(len(surprise))
    if mean <= max(_NUM_ERRORS * error, _SMALLEST_SURPRISE):
        return None
    return (
        f"{name} tells no log-probs of the policy, and its tokens are less likely than the policy's own "
        f"would be: by {mean:.3g} nats per token on average and {float(surprise.max()):.3g} at most, over "
        f"{len(surprise):,} tokens of the rollout, which chance explains up to {_NUM_ERRORS * error:.2g}."
    )
