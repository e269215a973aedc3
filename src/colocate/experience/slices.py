"""The slices of an optimizer step, visited one by one though they are trained on together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colocate.experience.rollout import RolloutRequest
from colocate.experience.window import TrainingWindow
from colocate.policy.policy import UpdateResult
from colocate.types import Sample

Step = tuple[list[Sample], UpdateResult]


class SliceRows:
    """Which rows each slice in the window is from, and how many slices of the next step were visited."""

    def __init__(self, window: TrainingWindow) -> None:
        self._window = window
        self._rows: dict[int, list[dict[str, Any]]] = {}  # of a whole batch, by each of its prompts' keys
        self._num_visited = 0
        self._step: Step | None = None

    def add(self, request: RolloutRequest) -> None:
        """Take note of a generation batch, and forget those that the window is done with."""
        rows = [row for row, _ in request.per_completion()]
        held = self._window.prompt_keys()
        self._rows = {key: rows for key, rows in self._rows.items() if key in held}
        self._rows.update((prompt.key, rows) for prompt in request.prompts)

    def take_step(self, visit: Callable[[list[dict[str, Any]]], Any]) -> Step:
        """Visit each slice of the next optimizer step with its generation batch's rows.

        Raises:
            RuntimeError: `visit` did not come to `self.visit` each time.
        """
        slices = self._window.peek()
        keys = [next((sample.prompt_key for sample in samples), None) for samples in slices]
        self._num_visited, self._step = 0, None
        for key in keys:
            visit([] if key is None else self._rows.get(key, []))
        step, self._step = self._step, None
        if step is None or self._num_visited != len(slices):
            raise RuntimeError(
                f"training_step was overridden and has called super().training_step {self._num_visited} "
                f"times for {len(slices)} slices of an optimizer step. Call it once each time."
            )
        return step

    def visit(self, optimizer_step: Callable[[], Step]) -> Tensor:
        """Count a visit; the last of a step takes it. Returns this rank's loss then, else 0.

        Raises:
            RuntimeError: the window holds no step.
        """
        if not self._window.ready:
            raise RuntimeError("There are no completions to train on: train() generates them, so call that.")
        self._num_visited += 1
        if self._num_visited != self._window.slices_per_step:
            return torch.zeros(())
        self._step = optimizer_step()
        return self._step[1].loss
