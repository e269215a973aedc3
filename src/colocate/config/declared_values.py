"""The values of a run's options, checked before the classes that declare the options are imported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin

from colocate.config.batch_sizes import derive_batch_sizes
from colocate.config.honoured import CHOICES, MAY_BE_INFINITE, RANGES
from colocate.engines.registry import OLDER_NAMES
from colocate.options.declared import declared_defaults, declared_types
from colocate.options.requirements import OneOf, Requirement, check_choice, check_range
from colocate.options.values import as_read, coerce

_OF_BATCHES = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("generation_batch_size", "steps_per_generation", "num_generations", "num_generations_eval"),
)


def check_batch(values: Mapping[str, object], num_ranks: int) -> None:
    """Refuse numbers of completions that do not hold whole groups, as `GRPOConfig` does.

    Args:
        values: options that `check_values` has passed.
    """
    defaults, types = declared_defaults(), declared_types()
    batch = SimpleNamespace(world_size=num_ranks)
    for name in _OF_BATCHES:
        value = values.get(name, defaults[name])
        setattr(batch, name, coerce(name, value, as_read(name, _without_conditions(types[name]))))
    strategy = values.get("eval_strategy", "no")
    batch.eval_strategy = "no" if strategy in (None, False) else str(strategy)  # YAML reads `no` as False
    derive_batch_sizes(batch)


def _without_conditions(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def check_values(values: Mapping[str, object]) -> None:
    """Refuse a value of another type than its option's, outside its range, or not among its choices.

    What is judged here and how is what `RunConfig` and `GRPOConfig` judge; they do it once more, and also
    judge options whose types are transformers' own, and several options together.

    Args:
        values: options by names that `check_names` knows.
    """
    types = declared_types()
    for name, value in values.items():
        choices: Collection[Any] | None = CHOICES.get(name)
        requirement = RANGES.get(name)
        if name in types:
            is_annotated = get_origin(types[name]) is Annotated
            hint, *conditions = get_args(types[name]) if is_annotated else (types[name],)
            value = coerce(name, value, as_read(name, hint), may_be_infinite=name in MAY_BE_INFINITE)
            for condition in conditions:
                if isinstance(condition, OneOf):
                    choices = condition.names
                if isinstance(condition, Requirement):
                    requirement = condition
        if name == "engine":
            value = OLDER_NAMES.get(str(value), value)
        if choices is not None and isinstance(value, (str, int)) and not isinstance(value, bool):
            check_choice(name, value, choices)
        if requirement is not None:
            check_range(name, value, requirement)
