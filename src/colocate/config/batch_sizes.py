"""Sizes of batches, derived from each other: completions of a rollout must be whole groups."""

from __future__ import annotations

import math
from typing import Any


def derive_batch_sizes(config: Any) -> None:
    """Set `generation_batch_size` and `steps_per_generation`, one from the other, by TRL's rule: a
    rollout feeds `steps_per_generation` micro-steps of every rank."""
    micro_step = config.per_device_train_batch_size * config.world_size
    arithmetic = (
        f"per_device_train_batch_size × ranks = {config.per_device_train_batch_size} × {config.world_size}"
    )
    if config.generation_batch_size is not None and config.steps_per_generation is not None:
        raise ValueError(
            f"generation_batch_size={config.generation_batch_size} and steps_per_generation="
            f"{config.steps_per_generation} say the same thing twice; set only one of them."
        )
    if config.generation_batch_size is not None:
        lower = config.generation_batch_size // micro_step * micro_step
        if lower != config.generation_batch_size or lower < 1:
            raise ValueError(
                f"generation_batch_size={config.generation_batch_size} is not a multiple of {arithmetic} = "
                f"{micro_step}. Set it to {max(lower, micro_step)} or {max(lower, 0) + micro_step}."
            )
        config.steps_per_generation = lower // micro_step
    else:
        if config.steps_per_generation is None:
            config.steps_per_generation = config.gradient_accumulation_steps
        config.generation_batch_size = micro_step * config.steps_per_generation
    _check_groups(config, config.generation_batch_size, config.steps_per_generation)


def _check_groups(config: Any, rollout: int, steps: int) -> None:
    """A rollout must hold whole groups, or advantages would compare completions of different prompts."""
    group = config.num_generations
    if group is None or group < 2:
        raise ValueError(
            f"num_generations={group}: an advantage compares completions of one prompt, so GRPO needs at "
            "least 2 of them. Set num_generations to 2 or more."
        )
    if rollout % group:
        # per_device × ranks × steps is a multiple of G exactly when per_device is one of `step`.
        step = group // math.gcd(group, config.world_size * steps)
        divisors = [g for g in range(2, min(rollout, 4096) + 1) if rollout % g == 0]
        raise ValueError(
            "The rollout of per_device_train_batch_size × ranks × steps_per_generation = "
            f"{config.per_device_train_batch_size} × {config.world_size} × {steps} = {rollout} completions "
            f"is not a whole number of groups of num_generations={group}. "
            f"Set per_device_train_batch_size to {step}, {2 * step}, {3 * step}, …"
            + (f" or num_generations to one of {divisors[:12]}." if divisors else ".")
        )
    group_eval = config.num_generations_eval or group
    if config.eval_strategy != "no" and (config.per_device_eval_batch_size * config.world_size) % group_eval:
        step = group_eval // math.gcd(group_eval, config.world_size)
        raise ValueError(
            "Evaluation batches of per_device_eval_batch_size × ranks = "
            f"{config.per_device_eval_batch_size} × {config.world_size} completions do not "
            f"hold whole groups of {group_eval}. Set per_device_eval_batch_size to {step}, {2 * step}, "
            f"{3 * step}, … or num_generations_eval."
        )
