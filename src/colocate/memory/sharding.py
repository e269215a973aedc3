"""How the ranks of a run split what one of them need not hold whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """The two numbers that describe a layout (`parallel.mesh.Mesh`), known before there are any ranks."""

    num_ranks: int = 1
    """The GPUs of the run (N)."""
    num_weight_parts: int = 1
    """The ranks that share one copy of the weights (t), and that generate completions together."""
    splits_optimizer: bool = True
    """Whether the ranks split masters, moments and reduced gradients; False: each holds all of them
    (`shard="none"`)."""

    @property
    def num_replicas(self) -> int:
        """The ranks N / t that hold the same part of the weights."""
        return self.num_ranks // self.num_weight_parts

    @property
    def num_optimizer_parts(self) -> int:
        """The ranks that split the masters of one part of the weights; 1: each rank has them whole."""
        return self.num_replicas if self.splits_optimizer else 1

    @property
    def is_split(self) -> bool:
        """Whether a rank holds less of anything than it would alone."""
        return self.num_weight_parts > 1 or self.num_optimizer_parts > 1
