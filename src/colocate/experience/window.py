"""The window: it decides on which completions each optimizer step trains.

A generation batch is cut into `steps_per_generation` slices of `per_device_train_batch_size` completions and
visited `num_iterations` times; an optimizer step takes the next `gradient_accumulation_steps` slices. With
steps_per_generation = 2, num_iterations = 2 and gradient_accumulation_steps = 1:

    rollout 0              rollout 1
    slice 0  1  0  1       slice 0  1  0  1
    step  1  2  3  4             5  6  7  8

Step 1 is on-policy: its own log-probs are the old log-probs. Steps 2 to 4 train on completions of an older
policy and need that policy's log-probs. For slice 0 step 1 has computed them anyway; only slice 1 costs a
forward pass.

With dropout a step's own log-probs are noisy, and those of an engine are not. Then every slice is evaluated
without dropout: these log-probs are compared with the engine's, and are the old ones of later passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colocate.types import Sample


@dataclass
class WindowSlice:
    """Completions that TRL would put into one micro-batch, and how many passes over them are left."""

    samples: list[Sample]
    passes_left: int


class TrainingWindow:
    """Scored completions on their way into optimizer steps.

    Args:
        slices_per_step: slices of a step; num_iterations: passes over each slice.
        evaluates_all: also compute the log-probs of on-policy slices without dropout.
    """

    def __init__(
        self,
        slices_per_step: int,
        num_iterations: int,
        device: torch.device,
        *,
        evaluates_all: bool = False,
    ) -> None:
        self.slices_per_step = slices_per_step
        self.num_iterations = num_iterations
        self._device = device
        self._evaluates_all = evaluates_all
        self._queue: deque[WindowSlice] = (
            deque()
        )  # one entry per visit; the visits of a slice share one object
        self._has_moved = False  # whether the policy has since the front of the queue was generated

    @property
    def ready(self) -> bool:
        """Whether there is enough for an optimizer step."""
        return len(self._queue) >= self.slices_per_step

    def add(
        self, slices: Sequence[list[Sample]], old_logprobs: Callable[[list[Sample]], list[Tensor]]
    ) -> None:
        """Queue a rollout's slices, `num_iterations` times over.

        A slice may be empty, where its samples are on other ranks; all ranks ask for old log-probs together.

        Args:
            slices: freshly generated and scored samples.
            old_logprobs: computes the current policy's log-probs of samples; called only for slices whose
                first visit comes after the policy has moved, or for all (`evaluates_all`).
        """
        self._has_moved = self._has_moved and bool(self._queue)
        added = [WindowSlice(list(samples), self.num_iterations) for samples in slices]
        num_on_policy = max(0, self.slices_per_step - len(self._queue))
        if self._has_moved:
            # The new slices share a step with older completions, and then all samples of the step need old
            # log-probs.
            num_on_policy = 0
        first_evaluated = 0 if self._evaluates_all else num_on_policy
        if evaluated := added[first_evaluated:]:
            logprobs = iter(old_logprobs([sample for entry in evaluated for sample in entry.samples]))
            for number, entry in enumerate(evaluated, first_evaluated):
                is_old = number >= num_on_policy
                entry.samples = [_evaluated(sample, next(logprobs), is_old) for sample in entry.samples]
        for _ in range(self.num_iterations):
            self._queue.extend(added)

    def peek(self) -> list[list[Sample]]:
        """The slices of the next optimizer step."""
        return [entry.samples for _, entry in zip(range(self.slices_per_step), self._queue, strict=False)]

    @property
    def keeps_logprobs(self) -> bool:
        """Whether `advance` reads the log-probs of the next step, for later visits of its slices."""
        entries = [entry for _, entry in zip(range(self.slices_per_step), self._queue, strict=False)]
        return any(entry.passes_left > 1 for entry in entries)

    def prompt_keys(self) -> set[int | None]:
        """Keys of the prompts of all samples whose steps are still to come."""
        return {sample.prompt_key for entry in self._queue for sample in entry.samples}

    def advance(self, policy_logprobs: Sequence[Tensor]) -> None:
        """Drop the slices of the step just taken, keeping its log-probs for later visits of the same slices.

        Args:
            policy_logprobs: the step's log-probs [C] of each sample in `peek()`, in their order.
        """
        self._has_moved = True
        logprobs = iter(policy_logprobs)
        for _ in range(self.slices_per_step):
            entry = self._queue.popleft()
            entry.passes_left -= 1
            step_logprobs = [next(logprobs) for _ in entry.samples]
            if entry.passes_left:
                entry.samples = [
                    _off_policy(sample, values)
                    for sample, values in zip(entry.samples, step_logprobs, strict=True)
                ]

    def clear(self) -> None:
        """Drop the completions that wait for later steps."""
        self._queue.clear()

    @staticmethod
    def num_waiting(state: dict[str, Any]) -> int:
        """The number of completions that wait in a window with this `state_dict`."""
        return sum(len(entry["samples"]) for entry in state["slices"])

    def state_dict(self) -> dict[str, Any]:
        """The completions that wait between two steps; the policy has moved since they were drawn."""
        slices = list({id(entry): entry for entry in self._queue}.values())
        order = [next(i for i, entry in enumerate(slices) if entry is visit) for visit in self._queue]
        return {
            "slices": [
                {"samples": [vars(s) for s in e.samples], "passes_left": e.passes_left} for e in slices
            ],
            "order": order,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        slices = [
            WindowSlice([self._restored(s) for s in e["samples"]], e["passes_left"]) for e in state["slices"]
        ]
        self._queue = deque(slices[i] for i in state["order"])
        self._has_moved = True

    def _restored(self, fields: dict[str, Any]) -> Sample:
        on_device: dict[str, Any] = {
            name: value.to(self._device) if isinstance(value, Tensor) else value
            for name, value in fields.items()
        }
        return Sample(**on_device)


def _evaluated(sample: Sample, logprobs: Tensor, is_old: bool) -> Sample:
    """The sample with its log-probs [C] without dropout: the old ones, or those of a step to come."""
    if is_old:
        return replace(sample, old_logprobs=logprobs)
    return replace(sample, logprobs_without_dropout=logprobs)


def _off_policy(sample: Sample, step_logprobs: Tensor) -> Sample:
    """The sample for a pass after its first, whose step had the log-probs [C]."""
    if sample.old_logprobs is not None:
        return sample
    evaluated = sample.logprobs_without_dropout
    old_logprobs = step_logprobs if evaluated is None else evaluated
    return replace(sample, old_logprobs=old_logprobs, logprobs_without_dropout=None)
