"""Text environments of other libraries as environments of `environment_factory`.

Each is one file and needs its library only when it is constructed. They play with one tool, `act`, end the
episode (`done`) and reward it with the sum of what its actions have earned, or, with `per_turn=True`, each
turn with what its actions have:

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
