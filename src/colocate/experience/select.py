"""From a rollout's groups to the slices that optimizer steps are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from colocate.experience.judge import Rollout
from colocate.experience.weighting import (
    WeightingOptions,
    shuffled_slices,
    weighted_for_evaluation,
    with_entropy_threshold,
)
from colocate.policy.policy import Policy
from colocate.types import Sample


class Selector:
    """Trains on every group of a rollout.

    The loop makes rollouts until the window holds a step. A selector that chooses among groups returns the
    slices of the chosen groups, and no slices while there are too few.
    """

    def __init__(self, policy: Policy, options: WeightingOptions) -> None:
        self._policy = policy
        self._options = options

    def slices(self, rollout: Rollout, number: int) -> list[list[Sample]]:
        """This rank's samples in slices of `per_device_train_batch_size`, with loss weights and the
        reference's log-probs.

        Args:
            number: the number of the generation batch in the run.
        """
        return shuffled_slices(self._with_reference(rollout.samples), self._options, number)

    def for_step(self, slices: Sequence[list[Sample]]) -> list[Sample]:
        """The samples of the optimizer step that trains on `slices`, which come from the window."""
        if self._options.top_entropy_quantile < 1.0:
            num_slices = self._options.gradient_accumulation_steps
            slices = [with_entropy_threshold(x, self._policy, self._options, num_slices) for x in slices]
        return [sample for samples in slices for sample in samples]

    def for_evaluation(self, rollout: Rollout) -> list[Sample]:
        """This rank's samples, weighed as if the whole evaluation were one optimizer step."""
        samples = weighted_for_evaluation(self._with_reference(rollout.samples), self._options)
        if self._options.top_entropy_quantile < 1.0:
            samples = with_entropy_threshold(samples, self._policy, self._options, num_accumulated=1)
        return samples

    def _with_reference(self, samples: list[Sample]) -> list[Sample]:
        """The samples with the reference's log-probs, if the KL penalty needs them."""
        if self._policy.reference is None:
            return samples
        logprobs = self._policy.reference_logprobs(samples)
        return [replace(s, reference_logprobs=x) for s, x in zip(samples, logprobs, strict=True)]
