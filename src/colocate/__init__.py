"""GRPO for language models on GPUs that the trainer and the rollout engine share."""

import importlib
from typing import TYPE_CHECKING, Any

from colocate.version import __version__ as __version__

if TYPE_CHECKING:
    from colocate.config.grpo_config import GRPOConfig
    from colocate.experience.players.rollout_function import generate_rollout_completions
    from colocate.trainer import GRPOTrainer
    from colocate.trl.scripts.arguments import (
        DatasetConfig,
        DatasetMixtureConfig,
        ScriptArguments,
        get_dataset,
    )
    from colocate.trl.scripts.model_config import (
        ModelConfig,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )
    from colocate.trl.scripts.parser import TrlParser
    from colocate.trl.scripts.rich_progress import RichProgressCallback

__all__ = [
    "DatasetConfig",
    "DatasetMixtureConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "RichProgressCallback",
    "ScriptArguments",
    "TrlParser",
    "generate_rollout_completions",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]

_MODULES = {
    "GRPOConfig": "config.grpo_config",
    "GRPOTrainer": "trainer",
    "generate_rollout_completions": "experience.players.rollout_function",
    "ScriptArguments": "trl.scripts.arguments",
    "DatasetConfig": "trl.scripts.arguments",
    "DatasetMixtureConfig": "trl.scripts.arguments",
    "get_dataset": "trl.scripts.arguments",
    "ModelConfig": "trl.scripts.model_config",
    "get_peft_config": "trl.scripts.model_config",
    "get_quantization_config": "trl.scripts.model_config",
    "get_kbit_device_map": "trl.scripts.model_config",
    "TrlParser": "trl.scripts.parser",
    "RichProgressCallback": "trl.scripts.rich_progress",
}
"""The module below `colocate` that defines each name."""


def __getattr__(name: str) -> Any:
    # Loading torch and transformers takes seconds; `colocate --help` and `import colocate` should not.
    if name not in _MODULES:
        raise AttributeError(f"module 'colocate' has no attribute {name!r}")
    from colocate.commands.import_ahead import importing_ahead

    with importing_ahead():
        return getattr(importlib.import_module(f"colocate.{_MODULES[name]}"), name)
