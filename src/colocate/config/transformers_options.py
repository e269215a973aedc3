"""The options of transformers' `TrainingArguments`, known before it is imported: that takes seconds.

Their names, types and defaults are read from the text of their class. What is honoured of their values is in
tables here.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union

from colocate.options.declared import Option, as_read
from colocate.options.requirements import (
    AT_LEAST_ONE,
    BELOW_ONE,
    INTERVAL,
    MAY_BE_INFINITE,
    NOT_NEGATIVE,
    OneOf,
    Requirement,
)
from colocate.options.values import members
from colocate.policy.optimizer.names import OPTIMIZERS, REFUSED_OPTIMIZERS

_LOG_LEVELS = ("passive", "detail", "debug", "info", "warning", "error", "critical")

CHOICES: dict[str, OneOf] = {
    "optim": OneOf(OPTIMIZERS, refused=REFUSED_OPTIMIZERS),
    "lr_scheduler_type": OneOf(
        (
            *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"),
            *("inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"),
        )
    ),
    "ddp_backend": OneOf(("nccl", "gloo", "mpi", "cpu:gloo,cuda:nccl")),
    "eval_strategy": OneOf(("no", "steps", "epoch")),
    "logging_strategy": OneOf(("no", "steps", "epoch")),
    "log_level": OneOf(_LOG_LEVELS),
    "log_level_replica": OneOf(_LOG_LEVELS),
    "save_strategy": OneOf(("no", "steps", "epoch", "best")),
    "hub_strategy": OneOf(("end", "every_save", "checkpoint", "all_checkpoints")),
}
"""The values that are honoured, where others of the option's type are not."""

_SIZES = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")

RANGES: dict[str, Requirement] = {
    **dict.fromkeys((*_SIZES, "ddp_timeout"), AT_LEAST_ONE),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), BELOW_ONE),
    **dict.fromkeys(("eval_steps", "save_steps"), INTERVAL),
    **dict.fromkeys(("weight_decay", "eval_delay", "data_seed"), NOT_NEGATIVE),
    # What is 0 in float32 divides 0 by 0 wherever a gradient is 0.
    "adam_epsilon": Requirement(
        "must be greater than 0, in float32, too: at least 2**-126", lambda v: v >= 2**-126
    ),
    "seed": Requirement("must be at least 0 and less than 2**32, for numpy's sake", lambda v: 0 <= v < 2**32),
    "max_steps": Requirement(
        "must be at least 1, or -1 or 0 to train for num_train_epochs", lambda v: v >= -1
    ),
    "warmup_steps": Requirement(
        "must be a whole number of steps, or a share of the run below 1",
        lambda v: 0 <= v < 1 or (v >= 1 and v == int(v)),
    ),
}
"""Requirements of numbers. Conditions on several options are in `GRPOConfig` and `ObjectiveParams`."""


def _conditions_of(name: str) -> tuple[Any, ...]:
    choices = (CHOICES[name],) if name in CHOICES else ()
    ranges = (RANGES[name],) if name in RANGES else ()
    return (*choices, *ranges, *((MAY_BE_INFINITE,) if name == "max_grad_norm" else ()))


@functools.cache
def transformers_options() -> Mapping[str, Option]:
    """The options that `TrainingArguments` declares, by name.

    Raises:
        ImportError: transformers is not installed.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        raise ImportError("transformers is not installed: pip install transformers")
    source = Path(package.submodule_search_locations[0], "training_args.py").read_text(encoding="utf-8")
    (declaration,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"
    )
    assigned = {
        node.targets[0].id: node.value
        for node in ast.walk(declaration)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = {}
    for node in declaration.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            name, hint = node.target.id, _type(node.annotation)
            if hint is str and name in CHOICES:
                hint = Literal[tuple(CHOICES[name].names)]
            if not name.startswith("_"):
                default = _default(node.value, assigned)
                found[name] = Option(name, as_read(name, hint), default, _conditions_of(name))
    return found


def _default(value: ast.expr | None, assigned: Mapping[str, ast.expr]) -> Any:
    """The default that a declaration has; a name stands for what is last assigned to it."""
    if isinstance(value, ast.Call):
        words = {word.arg: word.value for word in value.keywords}
        return [] if "default_factory" in words else _default(words.get("default"), assigned)
    if isinstance(value, ast.Name):
        return _default(assigned.get(value.id), assigned)
    return None if value is None else ast.literal_eval(value)


_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, list, dict)}
_TYPES |= {"Literal": Literal, "Union": Union, "None": None}


def _type(node: ast.expr | None) -> Any:
    """The type that an annotation stands for; a class of transformers' is text, as its enumerations are, or
    anything where text is not allowed."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return _TYPES.get(node.id, Any)
        case ast.BinOp():
            kinds = [*members(_type(node.left)), *members(_type(node.right))]
            return Union[tuple(kind for kind in kinds if kind not in (Any, list[Any]) or str not in kinds)]  # noqa: UP007
        case ast.Subscript():
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return _type(node.value)[tuple(map(_type, inner))]
    return Any
