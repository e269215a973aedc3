"""The optimizer and schedule that transformers' options name, made for given leaves."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.training_args import OptimizerNames

from colocate.options.values import shown
from colocate.policy.optimizer.names import shortcomings

logger = logging.getLogger(__name__)


def build_scheduler(optimizer: Optimizer, args: TrainingArguments, num_training_steps: int) -> LRScheduler:
    """The schedule that `lr_scheduler_type` names."""
    try:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,  # type: ignore[arg-type]
        )
    except TypeError as error:
        raise ValueError(
            f"The schedule {shown(args.lr_scheduler_type)} refuses lr_scheduler_kwargs="
            f"{shown(args.lr_scheduler_kwargs)}: {error}"
        ) from error


def build_optimizer(
    model: nn.Module, args: TrainingArguments, leaves: Mapping[str, nn.Parameter]
) -> Optimizer:
    """The optimizer that `optim` names, over `leaves` by parameter name, with transformers' groups."""
    name = OptimizerNames(args.optim).value
    optimizer_class, kwargs = _class_and_kwargs(name, model, args)
    is_plain = isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
    if not is_plain or {"model", "optimizer_dict"} & kwargs.keys():
        raise ValueError(
            f"optim={name!r} steps on the model's own modules, which cannot be combined with fp32 "
            "masters and gradients that are reduced before the step. Choose another, such as "
            "'adamw_torch_fused'."
        )
    if (line := shortcomings(name)) is not None and args.process_index == 0:
        logger.warning(line)
    if optimizer_class in (torch.optim.AdamW, torch.optim.SGD):
        # In place, in one kernel. The other implementations hold temporaries as large as all the weights, and
        # may run out of memory between one weight and the next.
        kwargs["fused"] = True
    elif optimizer_class in (torch.optim.Adagrad, torch.optim.RMSprop):
        kwargs["foreach"] = False  # so temporaries are as large as one weight, and not as all weights
    if "params" in kwargs:  # GaLore and APOLLO project some of the model's parameters
        return optimizer_class(_over_leaves(kwargs.pop("params"), model, leaves), **kwargs)
    # The method does not use the trainer that it belongs to. Calling it makes the groups that the installed
    # transformers would make.
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    groups = [
        {"params": [p for n, p in leaves.items() if n in decayed], "weight_decay": args.weight_decay},
        {"params": [p for n, p in leaves.items() if n not in decayed], "weight_decay": 0.0},
    ]
    return optimizer_class([group for group in groups if group["params"]], **kwargs)


def _class_and_kwargs(name: str, model: nn.Module, args: TrainingArguments) -> tuple[Any, dict[str, Any]]:
    """The optimizer class that transformers chooses for `optim`, and its keyword arguments."""
    try:
        optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[arg-type]
    except (ImportError, ValueError) as error:
        # If some libraries are missing, transformers raises a ValueError.
        if isinstance(error, ValueError) and not re.search("install|failed to import", str(error)):
            raise
        remedy = "pip install 'bitsandbytes>=0.46'" if "bitsandbytes" in str(error) else str(error)
        raise ImportError(f"optim={name!r} needs a library that is not installed: {remedy}") from error
    # `optim_args` reaches some optimizers as text.
    return optimizer_class, {key: _number(x) if isinstance(x, str) else x for key, x in kwargs.items()}


def _number(text: str) -> float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def _over_leaves(
    groups: list[dict[str, Any]], model: nn.Module, leaves: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """The parameter groups with masters in place of the bf16 parameters, and without frozen parameters."""
    of_parameter = {id(parameter): leaves.get(name) for name, parameter in model.named_parameters()}
    groups = [group | {"params": [of_parameter[id(p)] for p in group["params"]]} for group in groups]
    groups = [group | {"params": [leaf for leaf in group["params"] if leaf is not None]} for group in groups]
    return [group for group in groups if group["params"]]


def checked_optimizer(optimizer: Optimizer, trainable: Mapping[str, nn.Parameter]) -> Optimizer:
    """The user's own optimizer, over the model's own parameters."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in trainable.values()):
        raise ValueError(
            f"The {type(optimizer).__name__} in `optimizers` holds none of the {len(trainable)} trainable "
            "parameters of the model. Build it over the very model object that is passed to the trainer."
        )
    low = [name for name, p in trainable.items() if p.dtype != torch.float32]
    if low:
        logger.warning(
            "Your optimizer steps on %d %s parameters themselves: at small learning rates most of its "
            "updates round to nothing. Set bf16=False, or choose the optimizer by `optim` to get fp32 "
            "masters.",
            len(low),
            trainable[low[0]].dtype,
        )
    return optimizer


def initialize_group(optimizer: Any, index: int, group: dict[str, Any]) -> None:
    """Make the state of parameters that have a gradient but no state; nothing for unknown optimizers."""
    if hasattr(optimizer, "init_state"):  # bitsandbytes'
        optimizer.check_overrides()  # as bitsandbytes' own first step does before it makes state
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is not None and not optimizer.state.get(parameter):
                optimizer.init_state(group, parameter, index, position)
    elif type(optimizer).__module__.startswith("torch.optim") and hasattr(optimizer, "_init_group"):
        # The function also fills lists for the step, one for each state tensor.
        num_lists = len(inspect.signature(optimizer._init_group).parameters) - 1
        optimizer._init_group(group, *([] for _ in range(num_lists)))
