"""The trainer: builds the parts, then the loop. Read `train` first.

The loop is the only place that changes phase: rollout (the engine is awake and owns the time-shared memory)
and training (the engine sleeps and its memory is the trainer's). Everything it calls is ignorant of the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, set_seed
from transformers.trainer_utils import TrainOutput, speed_metrics

from colocate.algorithms.objective import Objective, ObjectiveParams
from colocate.config import GRPOConfig
from colocate.policy.policy import Policy, UpdateResult
from colocate.rollout import Rollout, Scorer
from colocate.types import Prompt, Sample
from colocate.window import TrainingWindow


class GRPOTrainer:
    """Trains a language model with GRPO and its variants (DeepSeekMath, arXiv 2402.03300).

    The arguments are TRL's. `tools`, `rollout_func` and `environment_factory` are not supported yet and
    refused by name.

    Args:
        model: name or path of a causal language model, a loaded one, or a PEFT model.
        reward_funcs: a function, an async function, a sequence classifier or its name; or a list of these.
        args: the configuration.
        train_dataset: rows with a `prompt` (text or messages); other columns are passed to reward functions.
        eval_dataset: likewise, or a dict of named ones.
        processing_class: the tokenizer; the model's own if not given.
        reward_processing_classes: tokenizers of reward models.
        callbacks: transformers' trainer callbacks.
        optimizers: an optimizer over the model's parameters and a scheduler, instead of those `args` describe.
        quantization_config: passed to `from_pretrained` when `model` is a name.
        peft_config: train an adapter instead of the whole model.
    """

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train until `max_steps`; from a checkpoint directory, or the newest in `output_dir` with True."""
        with self.run(resume_from_checkpoint):
            while not self.control.should_training_stop:
                while not self.window.ready:
                    request = self.request(next(self.batches))
                    with self.phase("rollout"):
                        completions = self.engine.generate(request.prompts, self.sampling)
                    with self.phase("score"):
                        rollout = self.scorer.score(request, completions)
                    with self.phase("train"):
                        self.window.add(self.slices_of(rollout), self.policy.logprobs)
                with self.phase("train"):
                    update = self.policy.update(self.next_samples(), self.objective)
                with self.phase("publish"):
                    self.publish(update)
                self.report(update)
        return self.result

    def evaluate(
        self,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Generate for every held-out prompt and log the rewards as `eval_reward` and so on."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluate() needs an eval_dataset: pass it here or to the trainer.")
        if isinstance(dataset, dict):
            metrics = {}
            for name, part in dataset.items():
                metrics.update(self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        start_s = time.time()
        request = self.eval_request(dataset)
        with self.phase("rollout"):
            completions = self.engine.generate(request.prompts, self.sampling)
        with self.phase("score"):
            rollout = self.scorer.score(request, completions)
        with self.phase("train"):
            loss = self.eval_loss(rollout)
        ...
