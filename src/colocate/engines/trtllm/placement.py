"""Where the workers of one TensorRT-LLM run: bundles of Ray's placement groups, and a share of each GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Placement:
    """The bundles of an engine's workers, worker by worker in the order of their tensor-parallel ranks.

    Attributes:
        groups: Ray's placement groups that the engine has bundles of, one for each node.
        bundle_indices: the numbers of its bundles in each of `groups`.
        gpu_share: the share of its bundle's GPU that each worker takes, above 0 and at most 1.

    Raises:
        ValueError: the lists do not fit each other, a bundle has a negative number or is there twice, or the
            share is none.
    """

    groups: Sequence[Any]
    bundle_indices: Sequence[Sequence[int]]
    gpu_share: float

    def __post_init__(self) -> None:
        if not self.groups or len(self.groups) != len(self.bundle_indices):
            raise ValueError(
                f"{len(self.groups)} placement groups came with {len(self.bundle_indices)} lists of bundles; "
                "there must be one list for each group, and at least one group."
            )
        for number, bundles in enumerate(self.bundle_indices):
            if not bundles or min(bundles) < 0 or len(set(bundles)) != len(bundles):
                raise ValueError(
                    f"The bundles of placement group {number} are {list(bundles)}; an engine needs at least "
                    "one of each group, by its number from 0, and none twice."
                )
        if not 0 < self.gpu_share <= 1:
            raise ValueError(
                f"gpu_share={self.gpu_share} of a GPU for each worker, but it must be above 0 and at most 1."
            )

    @property
    def num_workers(self) -> int:
        return sum(len(bundles) for bundles in self.bundle_indices)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `AsyncLLM`. They are its own and must be named: it overwrites a
        `ray_placement_config`, and its other arguments follow them by position."""
        return {
            "placement_groups": list(self.groups),
            "placement_bundle_indices": [list(bundles) for bundles in self.bundle_indices],
            "per_worker_gpu_share": self.gpu_share,
        }
