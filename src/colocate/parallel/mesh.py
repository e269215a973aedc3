"""Which rank holds which part: the mesh of a run's ranks.

Two numbers describe every layout: one copy of the bf16 weights is split over t consecutive ranks of a node
(t = 1: every rank holds it whole), and fp32 masters, moments and gradients are split over all N ranks. With P
parameters and fp32 Adam that is 2 P / t + 16 P / N bytes per GPU (ZeRO, Rajbhandari et al. 2020,
arXiv:1910.02054: t = 1 is stage 2, and t = N stage 3).

    rank                    0  1  2  3      N = 4, t = 2
    part of the weights     0  1  0  1      `weight_group`: {0, 1} and {2, 3}
    part of the masters     0  0  1  1      of that part; `replica_group`: {0, 2} and {1, 3}
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks that share one copy of the weights, and those that hold the same part of it.

    Each mesh has process groups, which take memory until the process ends, so runs share one (`Mesh.of`).
    """

    device_mesh: DeviceMesh | None
    """[replicas N / t, parts t], named "replica" and "weight"; None: there is one rank."""

    @classmethod
    def of(cls, device_type: str, num_weight_parts: int = 1) -> Mesh:
        """The mesh of all ranks of the process group, with t = `num_weight_parts`; made once.

        Every rank must call it with the same arguments.

        Raises:
            ValueError: the number of ranks is no multiple of t.
        """
        num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if num_weight_parts < 1 or num_ranks % num_weight_parts:
            raise ValueError(
                f"shard={num_weight_parts} splits the weights {num_weight_parts} ways, and {num_ranks} "
                f"processes cannot be divided into groups of {num_weight_parts}. Set shard to a divisor of "
                f"{num_ranks}, or start another number of processes."
            )
        if num_ranks == 1:
            return cls(None)
        return cls._once(dist.group.WORLD, device_type, num_ranks // num_weight_parts, num_weight_parts)

    @classmethod
    @cache
    def _once(cls, world: ProcessGroup | None, device_type: str, *shape: int) -> Mesh:
        """A mesh of the ranks of `world`; a process may leave that and join another."""
        return cls(init_device_mesh(device_type, shape, mesh_dim_names=("replica", "weight")))

    @property
    def num_weight_parts(self) -> int:
        """The number t of ranks that share one copy of the weights."""
        return 1 if self.device_mesh is None else self.device_mesh["weight"].size()

    @property
    def num_replicas(self) -> int:
        """The number N / t of ranks that hold the same part of the weights."""
        return 1 if self.device_mesh is None else self.device_mesh["replica"].size()

    @property
    def num_ranks(self) -> int:
        """The number N of ranks."""
        return self.num_weight_parts * self.num_replicas

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.replica * self.num_weight_parts + self.weight_part

    @cached_property
    def by_part(self) -> DeviceMesh:
        """[parts t, replicas N / t]: the mesh whose order is that of the rows of a split parameter.

        All ranks must ask for it together the first time.
        """
        assert self.device_mesh is not None, "one rank has no mesh"
        return DeviceMesh(
            self.device_mesh.device_type,
            self.device_mesh.mesh.t(),
            mesh_dim_names=("part", "replica_of_part"),
        )

    @property
    def weight_part(self) -> int:
        """Which of the t parts of the weights this rank holds."""
        return 0 if self.device_mesh is None else self.device_mesh.get_local_rank("weight")

    @property
    def replica(self) -> int:
        """Which of the N / t copies of its part this rank holds, which is also its part of the masters."""
        return 0 if self.device_mesh is None else self.device_mesh.get_local_rank("replica")

    @property
    def weight_group(self) -> ProcessGroup | None:
        """The ranks that share one copy of the weights with this one; None where each rank has it whole."""
        return None if self.num_weight_parts == 1 else self._group("weight")

    @property
    def replica_group(self) -> ProcessGroup | None:
        """The ranks with the same part of the weights, which split its masters; None where there is only this
        rank."""
        return None if self.num_replicas == 1 else self._group("replica")

    @property
    def weight_mesh(self) -> DeviceMesh | None:
        """The ranks of `weight_group` in the order of their parts; None where each rank has all weights."""
        return None if self.num_weight_parts == 1 or not self.device_mesh else self.device_mesh["weight"]

    def _group(self, name: str) -> ProcessGroup:
        assert self.device_mesh is not None, "one rank has no groups"
        return self.device_mesh.get_group(name)


@dataclass(frozen=True)
class DecodeMesh:
    """Groups of t' ranks that decode together, among t that share one copy of the weights.

    Each rank decodes on t / t' gathered parts.

    rank                    0  1  2  3      t = 4, t' = 2
    part of the weights     0  1  2  3
    part while decoding     0  0  1  1      `gather_group`: {0, 1} and {2, 3}
    decodes with            2  3  0  1      `group`: {0, 2} and {1, 3}

    Ranks that need the same parts while decoding are those that hold them, so each part is sent once.
    """

    part: int
    """Which of the t' parts this rank decodes with."""
    num_parts: int
    """The number t' of ranks that decode together."""
    group: ProcessGroup | None
    """The ranks that decode with this one, in the order of parts; None: it decodes alone."""
    gather_group: ProcessGroup
    """The ranks whose parts of the weights this one gathers, in the order of parts."""
    weight_group: ProcessGroup
    """All ranks that share one copy of the weights."""

    @classmethod
    @cache
    def of(cls, mesh: Mesh, num_parts: int) -> DecodeMesh:
        """The ranks of `mesh` with t' = `num_parts`, less than t; made once.

        Every rank must call it with the same argument.

        Raises:
            ValueError: see `check_decode_parts`.
        """
        check_decode_parts(num_weight_parts := mesh.num_weight_parts, num_parts)
        assert mesh.device_mesh is not None and mesh.weight_group is not None, "the weights are split"
        shape = mesh.num_replicas, num_parts, num_weight_parts // num_parts
        names = ("replica", "decode", "gather")
        decode = init_device_mesh(mesh.device_mesh.device_type, shape, mesh_dim_names=names)
        return cls(
            decode.get_local_rank("decode"),
            num_parts,
            decode.get_group("decode") if num_parts > 1 else None,
            decode.get_group("gather"),
            mesh.weight_group,
        )


def check_decode_parts(num_weight_parts: int, num_parts: int) -> None:
    """Raises ValueError unless t = `num_weight_parts` is a multiple of t' = `num_parts`, and larger."""
    if num_parts < 1 or num_weight_parts % num_parts or num_parts == num_weight_parts:
        raise ValueError(
            f"decode_shard={num_parts} lets {num_parts} processes decode together, but the weights are split "
            f"over {num_weight_parts}, which cannot be divided into smaller groups of {num_parts}. Set "
            f"decode_shard to a divisor of {num_weight_parts}, or to None."
        )
