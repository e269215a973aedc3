"""What the launcher on Ray tells a rank of its cluster, so that a rank can start others beside itself."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

VARIABLE = "COLOCATE_RAY_PLACE"


@dataclass(frozen=True)
class RayPlace:
    """The cluster of a run, and the bundles of its ranks: rank by rank, group by group."""

    address: str
    namespace: str
    groups: tuple[str, ...]
    """The names of the placement groups, one for each node."""
    sizes: tuple[int, ...]
    """The number of each group's bundles, one for each rank."""
    shares: int
    """How many processes share the GPU of each bundle; a rank is one of them."""

    @property
    def tables(self) -> list[list[str]]:
        """For each group its node, which bears its name here, once for each bundle; see `slices.cut`."""
        return [[name] * size for name, size in zip(self.groups, self.sizes, strict=True)]

    @property
    def gpu_share(self) -> float:
        """The share of a bundle's GPU that each of them takes."""
        return 1 / self.shares

    def as_variable(self) -> dict[str, str]:
        """The variable by which a rank learns of this."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of_this_rank(cls) -> RayPlace | None:
        """What the launcher has told this process; None: it was started in another way."""
        if (text := os.environ.get(VARIABLE)) is None:
            return None
        told = json.loads(text)
        return cls(**told | {"groups": tuple(told["groups"]), "sizes": tuple(told["sizes"])})
