"""Reward functions: calling them, those that are built in, and finding one by its name.

Importing this package imports neither torch nor transformers: `colocate --help` lists the built-in names.
"""

from colocate.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward
from colocate.rewards.format import think_format_reward
from colocate.rewards.length import get_cosine_scaled_reward, get_soft_overlong_punishment
from colocate.rewards.reasoning_gym import reasoning_gym_reward
from colocate.rewards.registry import get_reward_function
from colocate.rewards.repetition import get_repetition_penalty_reward

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
