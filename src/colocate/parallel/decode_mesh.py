"""Which ranks decode together, where fewer do than share one copy of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from colocate.parallel.mesh import Mesh


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
    """Raises ValueError if t = `num_weight_parts` is no multiple of t' = `num_parts`, or not more."""
    if num_parts < 1 or num_weight_parts % num_parts or num_parts == num_weight_parts:
        raise ValueError(
            f"decode_shard={num_parts} lets {num_parts} processes decode together, but the weights are split "
            f"over {num_weight_parts}, which cannot be divided into smaller groups of {num_parts}. Set "
            f"decode_shard to a divisor of {num_weight_parts}, or to None."
        )
