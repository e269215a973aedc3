"""How the ranks of a run split what one of them need not hold whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """The two numbers that describe a layout (`parallel.mesh.Mesh`), known before there are any ranks."""

    num_ranks: int = 1
    """The GPUs of the run (N)."""
    num_weight_parts: int = 1
    """The ranks that share one copy of the weights (t)."""
    splits_optimizer: bool = True
    """Whether the ranks split masters, moments and reduced gradients; False: each holds all of them
    (`shard="none"`)."""
    decode_shard: int | None = None
    """The ranks that generate completions together, a divisor t' of t; None: t."""

    @property
    def num_decode_parts(self) -> int:
        """The parts t' of the weights with which completions are generated, one on each rank."""
        return min(self.decode_shard or self.num_weight_parts, self.num_weight_parts)

    @property
    def gathers(self) -> bool:
        """Whether a rank gathers parts of the weights for each rollout."""
        return self.num_decode_parts < self.num_weight_parts

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
