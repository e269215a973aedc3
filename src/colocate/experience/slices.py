"""The slices of an optimizer step, visited one by one though they are trained on together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colocate.experience.requests import RolloutRequest
from colocate.experience.window import TrainingWindow
from colocate.policy.policy import UpdateResult
from colocate.types import Sample

Step = tuple[list[Sample], UpdateResult]


class SliceRows:
    """Remembers from which rows of the dataset each slice in the window comes."""

    def __init__(self, window: TrainingWindow) -> None:
        self._window = window
        self._rows: dict[int, list[dict[str, Any]]] = {}  # a batch's rows, under each prompt's key

    def add(self, request: RolloutRequest) -> None:
        """Take note of a generation batch, and forget the batches that the window is done with."""
        rows = [row for row, _ in request.per_completion()]
        held = self._window.prompt_keys()
        self._rows = {key: rows for key, rows in self._rows.items() if key in held}
        # This rank may train on completions of prompts that another has completed.
        self._rows.update((key, rows) for key in request.batch_keys)

    def of_next_step(self) -> list[list[dict[str, Any]]]:
        """The rows of each slice's whole generation batch, for the slices of the next optimizer step.

        The rows are empty for completions that were generated before the run was resumed, and for a slice
        whose completions are all on other ranks.
        """
        keys = [
            next((s.prompt_key for s in samples if s.prompt_key is not None), None)
            for samples in self._window.peek()
        ]
        return [[] if key is None else self._rows.get(key, []) for key in keys]


class SlicedStep:
    """An optimizer step that is visited once for each of its slices, and taken at the last visit."""

    def __init__(self, take: Callable[[], Step], num_slices: int) -> None:
        self._take = take
        self._num_slices = num_slices
        self._num_visited = 0
        self._step: Step | None = None

    def visit(self) -> Tensor:
        """Count a visit: return this rank's loss at the last visit, and 0 before."""
        self._num_visited += 1
        if self._num_visited != self._num_slices:
            return torch.zeros(())
        self._step = self._take()
        return self._step[1].loss

    def result(self) -> Step:
        """The samples that the step was taken with, and its result.

        Raises:
            RuntimeError: there was not one visit for each slice.
        """
        if self._step is None or self._num_visited != self._num_slices:
            raise RuntimeError(
                f"training_step was overridden and has called super().training_step {self._num_visited} "
                f"times for {self._num_slices} slices of an optimizer step. Call it once each time."
            )
        return self._step
