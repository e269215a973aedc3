"""GRPO for language models on GPUs that the trainer and the rollout engine share."""

from typing import TYPE_CHECKING, Any

from colocate.version import __version__ as __version__

if TYPE_CHECKING:
    from colocate.config import GRPOConfig
    from colocate.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]


def __getattr__(name: str) -> Any:
    # Loading torch and transformers takes seconds; `colocate --help` and `import colocate` should not.
    if name == "GRPOConfig":
        from colocate.config import GRPOConfig

        return GRPOConfig
    if name == "GRPOTrainer":
        from colocate.trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module 'colocate' has no attribute {name!r}")
