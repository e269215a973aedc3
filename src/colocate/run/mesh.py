"""The mesh of a run: how many ranks share weights and optimizer, by `shard` or the planner's choice."""

from __future__ import annotations

import logging
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.training_args import OptimizerNames

from colocate.config.grpo_config import GRPOConfig
from colocate.experience.ranks import of_all_ranks
from colocate.memory.workload import Sharding
from colocate.parallel.mesh import Mesh
from colocate.planning.run_options import PlannedOptions
from colocate.planning.run_sharding import choose_weight_parts
from colocate.policy.optimizer.names import WHOLE_MATRIX
from colocate.weights.layouts import WHOLE, WeightPart, weight_part_of

logger = logging.getLogger(__name__)


def weight_parts_of(
    options: PlannedOptions,
    accelerator: Accelerator,
    model: Any,
    quantization_config: Any,
    peft_config: Any,
    optimizers: Any,
) -> int:
    """The number of ranks that split each copy of the weights, by `shard` or the planner's choice."""
    if options.shard != "auto" or accelerator.num_processes == 1:
        return options.shard if isinstance(options.shard, int) else 1
    if isinstance(model, nn.Module) and weight_part_of(model) != WHOLE:
        return weight_part_of(model).count  # an earlier trainer has split it
    if accelerator.device.type != "cuda":
        return 1
    if (reason := why_state_stays_whole(options.optim, optimizers)) is not None:
        parts = 1
    else:
        parts, reason = choose_weight_parts(options, model, quantization_config, peft_config)
    # A rank that sees less memory, or no configuration, must not come to a mesh of its own.
    parts = max(of_all_ranks([parts]))
    if accelerator.is_main_process:
        logger.info(f"shard='auto' came to {parts}: {reason}")
    return parts


def sharding_of(mesh: Mesh, *, splits_optimizer: bool) -> Sharding:
    """The sharding of the run, for the planner."""
    return Sharding(mesh.num_ranks, mesh.num_weight_parts, splits_optimizer)


def part_of(mesh: Mesh) -> tuple[WeightPart, DeviceMesh | None]:
    """The part of the weights that this rank keeps, and the ranks with the others in the order of parts."""
    return WeightPart(mesh.weight_part, mesh.num_weight_parts), mesh.weight_mesh


def splits_state(args: GRPOConfig, optimizers: Any, mesh: Mesh) -> bool:
    """True if the ranks split the optimizer's state."""
    if mesh.device_mesh is None or args.shard == "none":
        return False
    if (reason := why_state_stays_whole(args.optim, optimizers)) is None:
        return True
    if args.shard != "auto":
        raise ValueError(
            f"shard={args.shard} splits the optimizer's state by rows, but {reason}. Set shard='none', or "
            "optim='adamw_torch_fused'."
        )
    if args.process_index == 0:
        logger.warning(f"Every process keeps all of the optimizer's state: {reason}.")
    return False


def why_state_stays_whole(optim: OptimizerNames | str, optimizers: Any) -> str | None:
    """Why ranks cannot split the optimizer's state; None: they can."""
    name = OptimizerNames(optim).value
    if optimizers[0] is not None:
        return f"your {type(optimizers[0]).__name__} in `optimizers` steps on whole parameters"
    return f"optim={name!r} steps on a value by others of its matrix" if name in WHOLE_MATRIX else None
