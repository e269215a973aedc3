"""GRPO for language models on GPUs that the trainer and the rollout engine share."""

import importlib
from typing import TYPE_CHECKING, Any

from colocate.version import __version__ as __version__

if TYPE_CHECKING:
    from colocate.config import GRPOConfig
    from colocate.experience.rollout_function import generate_rollout_completions
    from colocate.scripts.arguments import DatasetConfig, DatasetMixtureConfig, ScriptArguments
    from colocate.scripts.mixture import get_dataset
    from colocate.scripts.model_config import (
        ModelConfig,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )
    from colocate.scripts.parser import TrlParser
    from colocate.scripts.rich_progress import RichProgressCallback
    from colocate.trainer import GRPOTrainer

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
    "GRPOConfig": "config",
    "GRPOTrainer": "trainer",
    "generate_rollout_completions": "experience.rollout_function",
    "ScriptArguments": "scripts.arguments",
    "DatasetConfig": "scripts.arguments",
    "DatasetMixtureConfig": "scripts.arguments",
    "get_dataset": "scripts.mixture",
    "ModelConfig": "scripts.model_config",
    "get_peft_config": "scripts.model_config",
    "get_quantization_config": "scripts.model_config",
    "get_kbit_device_map": "scripts.model_config",
    "TrlParser": "scripts.parser",
    "RichProgressCallback": "scripts.rich_progress",
}
"""The module below `colocate` that defines each name."""


def __getattr__(name: str) -> Any:
    # Loading torch and transformers takes seconds; `colocate --help` and `import colocate` should not.
    if name not in _MODULES:
        raise AttributeError(f"module 'colocate' has no attribute {name!r}")
    from colocate.import_ahead import importing_ahead

    with importing_ahead():
        return getattr(importlib.import_module(f"colocate.{_MODULES[name]}"), name)
