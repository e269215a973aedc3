"""Text environments of other libraries as environments of `environment_factory`.

Each is one file and needs its library only when it is constructed. The model plays by one tool, `act`. The
environment ends the episode (`done`) and rewards it with the sum over its actions or, with `per_turn=True`,
each turn with the sum over its own:

    GRPOTrainer(..., environment_factory=lambda: GymnasiumEnvironment("Guess-v0"))

In a group, all episodes of a row should begin alike: give the dataset a column `seed`, which `reset` reads.
"""

from colocate.episodes.adapters.gymnasium import GymnasiumEnvironment
from colocate.episodes.adapters.openenv import OpenEnvEnvironment
from colocate.episodes.adapters.reasoning_gym import ReasoningGymEnvironment
from colocate.episodes.adapters.skyrl_gym import SkyRLGymEnvironment
from colocate.episodes.adapters.textarena import TextArenaEnvironment

__all__ = [
    "GymnasiumEnvironment",
    "OpenEnvEnvironment",
    "ReasoningGymEnvironment",
    "SkyRLGymEnvironment",
    "TextArenaEnvironment",
]
