"""From a rollout's groups to the slices that optimizer steps are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from colocate.data.sampler import PromptBatch, PromptBatches
from colocate.experience.dealing import dealt
from colocate.experience.judge import Rollout
from colocate.experience.options import SelectionOptions
from colocate.experience.weighting import shuffled_slices, weighted_for_evaluation, with_entropy_threshold
from colocate.policy.policy import Policy
from colocate.types import Sample


class Selector:
    """Trains on every group of a rollout.

    The loop makes rollouts until the window holds a step. A selector that chooses among groups returns the
    slices of the chosen groups, and no slices while there are too few.
    """

    is_resumable = False
    """Whether a checkpoint has the selector's state."""

    def __init__(self, policy: Policy, options: SelectionOptions) -> None:
        self._policy = policy
        self._options = options

    def next_batch(self, batches: PromptBatches) -> PromptBatch:
        """The prompts of the next rollout."""
        return next(batches)

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """The metrics to log of a rollout that is about to be selected from."""
        return rollout.metrics

    def slices(self, rollout: Rollout, number: int) -> list[list[Sample]]:
        """The samples that this rank trains on, in slices, with loss weights and the reference's log-probs.

        A slice has the samples of `per_device_train_batch_size` episodes of each rank. They are weighed as
        the ranks have generated them, and then dealt over the ranks by their tokens.

        Args:
            number: the number of the generation batch in the run.
        """
        options = self._options
        # A step begins at a multiple of both numbers: slices in such a stretch are never in different steps.
        num_together = math.gcd(options.gradient_accumulation_steps, options.steps_per_generation)
        slices = shuffled_slices(rollout.members, options, number, rollout.num_loss_tokens)
        slices = self._dealt(slices, num_together)
        samples = iter(self._with_reference([sample for samples in slices for sample in samples]))
        return [[next(samples) for _ in part] for part in slices]

    def for_step(self, slices: Sequence[list[Sample]]) -> list[Sample]:
        """The samples of the optimizer step that trains on `slices`, which come from the window."""
        if self._options.top_entropy_quantile < 1.0:
            num_slices = self._options.gradient_accumulation_steps
            slices = [with_entropy_threshold(x, self._policy, self._options, num_slices) for x in slices]
        return [sample for samples in slices for sample in samples]

    def for_evaluation(self, rollout: Rollout) -> list[Sample]:
        """The samples that this rank evaluates, weighed as if all were one optimizer step."""
        (samples,) = self._dealt([weighted_for_evaluation(rollout.members, self._options)], 1)
        samples = self._with_reference(samples)
        if self._options.top_entropy_quantile < 1.0:
            samples = with_entropy_threshold(samples, self._policy, self._options, num_accumulated=1)
        return samples

    def state_dict(self) -> dict[str, Any]:
        """The facts of earlier selections on which later ones depend."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""

    def _dealt(self, slices: list[list[Sample]], num_together: int) -> list[list[Sample]]:
        return dealt(
            slices,
            num_together=num_together,
            share_prompts=self._policy.shares_prompts,
            rank=self._options.process_index,
            num_ranks=self._options.world_size,
            device=self._policy.device,
        )

    def _with_reference(self, samples: list[Sample]) -> list[Sample]:
        """The samples with the reference's log-probs, if the KL penalty needs them."""
        if self._policy.reference is None:
            return samples
        logprobs = self._policy.reference_logprobs(samples)
        return [replace(s, reference_logprobs=x) for s, x in zip(samples, logprobs, strict=True)]
