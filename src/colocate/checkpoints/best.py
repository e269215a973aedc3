"""The best checkpoint of a run by a metric of its evaluations, as in transformers' trainers.

Its step, metric and path are fields of `TrainerState` (`best_global_step`, `best_metric`,
`best_model_checkpoint`), which callbacks such as `EarlyStoppingCallback` read and checkpoints contain.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerState, TrainingArguments

from colocate.checkpoints import sealed
from colocate.options.values import nearest
from colocate.weights.layouts import WHOLE, causal_lm, weight_part_of
from colocate.weights.part_loading import load_part
from colocate.weights.weight_parts import local_part, splits_of

logger = logging.getLogger(__name__)


class BestCheckpoint:
    """Finds out at each evaluation whether the model is the best so far, and where the best one is saved.

    Args:
        args: read for `metric_for_best_model` (None compares nothing), `greater_is_better`,
            `load_best_model_at_end` and `save_total_limit`.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args
        self._last_saved: tuple[int, Path] | None = None

    def judge(self, state: TrainerState, metrics: Mapping[str, float]) -> bool:
        """Whether the model just evaluated is better than all earlier ones. If so, it is noted in `state`.

        A NaN is never better.
        """
        metric = self._args.metric_for_best_model
        if metric is None:
            return False
        name = metric if metric.startswith("eval_") else f"eval_{metric}"
        if name not in metrics:
            raise ValueError(
                f"metric_for_best_model={metric!r}, but an evaluation gives no {name!r}"
                f"{nearest(name, metrics) or '.'} It gives {', '.join(sorted(metrics))}."
            )
        sign = 1.0 if self._args.greater_is_better else -1.0
        best_so_far = -math.inf if state.best_metric is None else sign * state.best_metric
        if not sign * metrics[name] > best_so_far:  # not "<=": a NaN is neither
            return False
        state.best_metric = metrics[name]
        state.best_global_step = state.global_step
        if self._last_saved is not None and self._last_saved[0] == state.global_step:
            state.best_model_checkpoint = str(self._last_saved[1])
        return True

    def note_saving(self, state: TrainerState, directory: Path) -> None:
        """Note in `state` that the model is about to be saved in a directory."""
        self._last_saved = (state.global_step, directory)
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(directory)

    @staticmethod
    def find_again(state: TrainerState, resumed_from: Path) -> None:
        """Look for the best checkpoint of a resumed run next to the one resumed from, if it was moved."""
        if state.best_model_checkpoint is None:
            return
        saved = Path(state.best_model_checkpoint)
        candidates = [saved, resumed_from.parent / saved.name]
        found = next((directory for directory in candidates if directory.is_dir()), None)
        if found is None:
            logger.warning(
                f"The best checkpoint so far, {saved}, is not there any more and is forgotten; its value, "
                f"{state.best_metric}, stays the one to beat."
            )
        state.best_model_checkpoint = None if found is None else str(found)

    def load_at_end(self, state: TrainerState, model: nn.Module) -> bool:
        """Copy the best weights into the model if the run shall end with them. Returns whether it did."""
        if not self._args.load_best_model_at_end:
            return False
        if state.best_model_checkpoint is None:
            logger.warning(
                "load_best_model_at_end=True, but no checkpoint of a best evaluation was saved: the model "
                "has the weights of the last step."
            )
            return False
        load_weights(model, Path(state.best_model_checkpoint))
        logger.info(f"The weights are those of {state.best_model_checkpoint} ({state.best_metric}).")
        return True

    def delete_others(self, state: TrainerState, output_dir: Path) -> None:
        """Delete all checkpoints but the best at the end of a run, if `save_total_limit` is 1."""
        if state.best_model_checkpoint is None or self._args.save_total_limit != 1:
            return
        for directory in sealed.list_checkpoints(output_dir):
            if directory.resolve() != Path(state.best_model_checkpoint).resolve():
                sealed.delete_checkpoint(directory)


@torch.no_grad()
def load_weights(model: nn.Module, directory: Path) -> None:
    """Copy a checkpoint's weights into the model's parameters, whose storage stays where it is.

    For a PEFT model a checkpoint has the adapters' weights alone.
    """
    sealed.verify(directory)
    if hasattr(model, "peft_config"):
        from peft import load_peft_weights, set_peft_model_state_dict

        for adapter in model.peft_config:  # type: ignore[union-attr]
            folder = directory if adapter == "default" else directory / adapter
            set_peft_model_state_dict(
                model, load_peft_weights(str(folder), device="cpu"), adapter_name=adapter
            )
        return
    parameters, part = dict(model.named_parameters()), weight_part_of(model)
    if part != WHOLE:
        own = load_part(str(directory), causal_lm(model).config, part, dtype=next(model.parameters()).dtype)
        if own is not None:
            for name, weight in own.named_parameters():
                parameters[name].copy_(weight)
            return
    # The model reads its files itself, because names and shapes in them may differ from the parameters'.
    model_class: Any = type(model)
    saved, report = model_class.from_pretrained(directory, dtype="auto", output_loading_info=True)
    weights = dict(saved.named_parameters())
    # transformers initialises the weights that it reports as missing, so they must be an error here.
    if missing := sorted((parameters.keys() - weights.keys()) | set(report["missing_keys"])):
        raise sealed.CheckpointError(
            f"{directory} has no weights for {len(missing)} of the model's parameters, {missing[0]} for one."
        )
    splits = splits_of(model)
    for name, parameter in parameters.items():
        local_part(parameter).copy_(splits[name].of_full(weights[name]))
