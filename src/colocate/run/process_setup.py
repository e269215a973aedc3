"""Settings of the whole process, made once before a run: seeds, PyTorch's allocator, how much is logged."""

from __future__ import annotations

import atexit
import logging
import os

import torch
from accelerate import Accelerator, DistributedType
from transformers import enable_full_determinism, set_seed
from transformers.utils import logging as transformers_logging

from colocate.config.grpo_config import GRPOConfig
from colocate.options.redaction import check_complete
from colocate.parallel.collectives import leave_process_groups

_PLUGINS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


def set_up_process(args: GRPOConfig) -> Accelerator:
    """Seed every global generator and set how much is logged, as transformers' trainers do; returns the
    process's place among the ranks.

    On CUDA, PyTorch's allocator is set to expandable segments unless the environment configures it: pieces
    that one phase frees serve another one in any size, so that fragmentation loses gigabytes less.
    """
    check_complete(vars(args))
    atexit.unregister(leave_process_groups)
    atexit.register(leave_process_groups)
    is_configured = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if args.device.type == "cuda" and not is_configured:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)
    level = args.get_process_log_level()
    transformers_logging.set_verbosity(level)
    if args.log_level == "passive":
        level = min(level, logging.WARNING)  # TRANSFORMERS_VERBOSITY=error silences transformers alone
    logging.getLogger("colocate").setLevel(level)
    accelerator = Accelerator(cpu=args.use_cpu)
    if accelerator.distributed_type in _PLUGINS:
        raise ValueError(
            f"The script has made an Accelerator for {accelerator.distributed_type.value}, and colocate "
            "splits model and optimizer itself (shard). Remove that Accelerator."
        )
    # All accelerators share one state, which whoever makes another configuration empties.
    accelerator.state.__dict__ = dict(accelerator.state.__dict__)
    return accelerator
