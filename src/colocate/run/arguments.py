"""Checks the types of `GRPOTrainer`'s arguments before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import datasets
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from colocate.config.grpo_config import GRPOConfig
from colocate.options.declared import marked
from colocate.options.requirements import IN_COMPLETIONS
from colocate.options.values import shown
from colocate.reporting.trackers import check_installed
from colocate.weights.layouts import causal_lm


def check_reward_source(reward_funcs: Any, environment_factory: Any) -> None:
    """Raises ValueError if nothing can reward completions."""
    is_empty = reward_funcs is None or (isinstance(reward_funcs, (list, tuple)) and not reward_funcs)
    if is_empty and environment_factory is None:
        raise ValueError(
            "No reward source provided: pass a function, a sequence classifier or its name in `reward_funcs`."
        )


def config_or_default(args: Any, model: Any) -> GRPOConfig:
    """`args`; None: as in TRL, a default configuration with an `output_dir` named after the model."""
    if args is None:
        _check_model(model)
        name = model if isinstance(model, str) else causal_lm(model).config.name_or_path
        return GRPOConfig(output_dir=f"{Path(str(name)).name or 'model'}-GRPO")
    if not isinstance(args, GRPOConfig):
        kind = f"{type(args).__module__}.{type(args).__qualname__}"
        raise TypeError(f"args must be a GRPOConfig of colocate, not {kind}: from colocate import GRPOConfig")
    args.take_late()
    return args


def check_arguments(
    *,
    model: Any,
    reward_funcs: Any,
    train_dataset: Any,
    eval_dataset: Any,
    processing_class: Any,
    reward_processing_classes: Any,
    callbacks: Any,
    optimizers: Any,
    peft_config: Any,
    report_to: Any = None,
) -> None:
    """Refuse arguments of a wrong type."""
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "The trainer was made within torch.inference_mode(), whose tensors cannot be trained. Make it "
            "outside."
        )
    _check_model(model)
    _check_reward_funcs([] if reward_funcs is None else reward_funcs)
    check_installed(report_to)
    if train_dataset is not None:
        _check_dataset("train_dataset", train_dataset)
    if isinstance(eval_dataset, dict):
        for name, part in eval_dataset.items():
            _check_dataset(f"eval_dataset[{name!r}]", part)
    elif eval_dataset is not None:
        _check_dataset("eval_dataset", eval_dataset, " or a dict of named ones")
    if processing_class is not None:
        _check_tokenizer("processing_class", processing_class)
    for one in _listed(reward_processing_classes):
        if one is not None:
            _check_tokenizer("reward_processing_classes", one)
    _check_callbacks(callbacks)
    _check_optimizers(optimizers)
    _check_peft_config(peft_config)


def check_modes(device_type: str) -> None:
    """Refuse modes of PyTorch that a script has set around `train` and that would act within it."""
    if not torch.is_grad_enabled():
        raise ValueError(
            "train() was called within torch.no_grad() or torch.inference_mode(), where nothing gets a "
            "gradient. Call it outside."
        )
    if torch.is_autocast_enabled(device_type):
        raise ValueError(
            "train() was called within torch.autocast, but computes everything in the type of the weights. "
            "Call it outside, with bf16=True for bfloat16."
        )


def texts_of(args: GRPOConfig) -> dict[str, tuple[str, str]]:
    """Values of options as text: their `repr`, and the part that may be shown."""
    values = {field.name: getattr(args, field.name) for field in fields(args)}
    return {name: (repr(value), shown(value, name)) for name, value in values.items()}


def check_unchanged(
    args: GRPOConfig, before: Mapping[str, tuple[str, str]], shaping_completions: bool = False
) -> None:
    """Refuse options that were set after the trainer was made (`before`), since its parts do not know them.

    Args:
        shaping_completions: Compare only the options with which completions are drawn, scored and weighed.
    """
    names = marked(GRPOConfig, IN_COMPLETIONS) if shaping_completions else before.keys()
    changed = [
        f"{name} from {before[name][1]} to {now[1]}"
        for name, now in texts_of(args).items()
        if name in names and now[0] != before[name][0]
    ]
    if changed:
        raise ValueError(
            f"trainer.args was changed after the trainer was made: {', '.join(changed)}. Set it in the "
            "GRPOConfig that the trainer is made with."
        )


def _refuse(name: str, value: Any, wanted: str) -> NoReturn:
    raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}, but must be {wanted}.")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_model(model: Any) -> None:
    if not isinstance(model, (str, nn.Module)):
        hint = "; pass a path as str(path)" if isinstance(model, Path) else ""
        _refuse("model", model, f"a model's name or directory, or a loaded causal language model{hint}")
    if model == "":
        raise ValueError("model='' is empty: give a model's name on the Hub, or a directory.")


def _check_reward_funcs(reward_funcs: Any) -> None:
    wanted = "a function, a sequence classifier or its name, or a list of these"
    for one in _listed(reward_funcs):
        if not (callable(one) or isinstance(one, str)):
            name = "reward_funcs" if one is reward_funcs else "one of reward_funcs"
            _refuse(name, one, wanted)


def _check_dataset(name: str, dataset: Any, or_else: str = "") -> None:
    if isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        return
    hint = ""
    if isinstance(dataset, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        hint = f": take one of its splits, {name}=dataset[{next(iter(dataset), 'train')!r}]"
        if len(dataset) > 1:
            hint += f" (it has {', '.join(map(repr, dataset))})"
    elif isinstance(dataset, (list, tuple)):
        hint = ": rows become one with datasets.Dataset.from_list(rows)"
    elif isinstance(dataset, (str, Path)):
        hint = ": load it with datasets.load_dataset or colocate.data.loading.load_prompts"
    kind = type(dataset).__name__
    raise TypeError(
        f"`{name}` must be a `Dataset` or `IterableDataset`{or_else}, got `{kind}` {shown(dataset)}{hint}."
    )


def _check_tokenizer(name: str, value: Any) -> None:
    if not isinstance(value, (PreTrainedTokenizerBase, ProcessorMixin)):
        hint = "; by name: AutoTokenizer.from_pretrained(name)" if isinstance(value, str) else ""
        _refuse(name, value, f"a tokenizer of transformers{hint}")


def _check_callbacks(callbacks: Any) -> None:
    wanted = "a list of transformers.TrainerCallback objects or classes"
    if not isinstance(callbacks, (list, tuple, type(None))):
        _refuse("callbacks", callbacks, wanted)
    for callback in callbacks or ():
        is_class = isinstance(callback, type) and issubclass(callback, TrainerCallback)
        if not (is_class or isinstance(callback, TrainerCallback)):
            _refuse("one of callbacks", callback, wanted)


def _check_optimizers(optimizers: Any) -> None:
    wanted = "a pair (optimizer, scheduler), each None or an object of torch.optim"
    if not isinstance(optimizers, (list, tuple)) or len(optimizers) != 2:
        _refuse("optimizers", optimizers, wanted)
    optimizer, scheduler = optimizers
    if not isinstance(optimizer, (torch.optim.Optimizer, type(None))):
        _refuse("optimizers[0]", optimizer, wanted)
    if scheduler is not None and (isinstance(scheduler, type) or not hasattr(scheduler, "step")):
        _refuse("optimizers[1]", scheduler, wanted)


def _check_peft_config(peft_config: Any) -> None:
    # Without PEFT whoever adds the adapter says so.
    if peft_config is not None and not hasattr(peft_config, "peft_type"):
        _refuse("peft_config", peft_config, "a PeftConfig such as peft.LoraConfig")
