"""GRPO for language models on GPUs that the trainer and the rollout engine share."""

from typing import TYPE_CHECKING, Any

from colocate.version import __version__ as __version__

if TYPE_CHECKING:
    from colocate.config import GRPOConfig
    from colocate.experience.rollout_function import generate_rollout_completions
    from colocate.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "generate_rollout_completions"]


def __getattr__(name: str) -> Any:
    # Loading torch and transformers takes seconds; `colocate --help` and `import colocate` should not.
    if name == "GRPOConfig":
        from colocate.config import GRPOConfig

        return GRPOConfig
    if name == "GRPOTrainer":
        from colocate.trainer import GRPOTrainer

        return GRPOTrainer
    if name == "generate_rollout_completions":
        from colocate.experience.rollout_function import generate_rollout_completions

        return generate_rollout_completions
    raise AttributeError(f"module 'colocate' has no attribute {name!r}")
