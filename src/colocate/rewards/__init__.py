"""Reward functions: calling them, those that are built in, and finding one by its name.

Importing this package imports neither torch nor transformers: `colocate --help` lists the built-in names.
"""

from collections.abc import Callable

from colocate.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward
from colocate.rewards.format import think_format_reward
from colocate.rewards.length import get_cosine_scaled_reward, get_soft_overlong_punishment
from colocate.rewards.reasoning_gym import reasoning_gym_reward
from colocate.rewards.repetition import get_repetition_penalty_reward
from colocate.users_code.by_name import did_you_mean, import_function

__all__ = [
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_reward_function",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "reasoning_gym_reward",
    "think_format_reward",
]

BUILT_IN: dict[str, Callable] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "reasoning_gym_reward": reasoning_gym_reward,
    "get_soft_overlong_punishment": get_soft_overlong_punishment(
        max_completion_len=1280, soft_punish_cache=256
    ),
    "get_repetition_penalty_reward": get_repetition_penalty_reward(),
}
"""Built-in reward functions: those that TRL's command line knows, with TRL's parameters, and some of our
own."""

FORMS = {
    "accuracy_reward": r"an answer in \boxed{...}, or as LaTeX after words like 'The final answer is $...$'",
    "reasoning_accuracy_reward": r"</think>, and after it an answer in \boxed{...}",
    "think_format_reward": "<think>, then reasoning, then </think> at the beginning of the completion",
    "reasoning_gym_reward": "the bare answer between <answer> and </answer>",
}
"""The forms that built-in rewards look for, told where none of a run's completions has it."""


def get_reward_function(name: str) -> Callable:
    """Find a reward function.

    Args:
        name: A built-in name such as `"accuracy_reward"`, a dotted path such as `"package.module.function"`
            (the working directory is searched too), or `"path/to/file.py:function"`.

    Raises:
        ValueError: the name is unknown, the module has no such function, or what it has cannot be called.
        FileNotFoundError: there is no such file.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if "." not in name:
        raise ValueError(
            f"Unknown reward function {name!r}.{did_you_mean(name, BUILT_IN)} Built in are "
            f"{', '.join(BUILT_IN)}; others are given as package.module.function or path/to/file.py:function."
        )
    return import_function(name, "reward function", BUILT_IN)
