"""What the benchmark of several GPUs runs: steps by number of GPUs and by how the weights are split."""

from __future__ import annotations

import dataclasses
from typing import Literal

from benchmarks.memory.cases import CAP_80GB, Case
from benchmarks.step.cases import PeerSettings, Work

STEP_1P5B = Work("1.5b", 32, 8, 256, 512)
STEP_7B = Work("7b", 64, 8, 256, 256)
"""512 sequences, which one tensor-parallel engine decodes together, or two engines half of them each."""


@dataclasses.dataclass(frozen=True)
class StepCase:
    """GRPO steps of some work on some GPUs."""

    label: str
    work: Work
    num_gpus: int
    shard: Literal["none"] | int = 1
    """Our option `shard`; of one GPU nothing is split."""
    peer: PeerSettings | None = None
    """TRL's settings where TRL runs the work."""
    peer_shard: Literal["fsdp2", "zero3"] = "fsdp2"
    """What splits TRL's model: an entry of `LAUNCHES`."""
    num_warm_up: int = 2
    num_timed: int = 3


def at(work: Work, factor: int) -> Work:
    """The work with `factor` times the prompts."""
    return dataclasses.replace(work, num_prompts=factor * work.num_prompts)


def trl_7b(label: str, peer: PeerSettings, shard: Literal["fsdp2", "zero3"] = "fsdp2") -> StepCase:
    """The 7B work by TRL, whose step takes long: two are timed, after one."""
    return StepCase(label, STEP_7B, 2, peer=peer, peer_shard=shard, num_warm_up=1, num_timed=2)


STEPS: dict[str, tuple[StepCase, ...]] = {
    "1p5b": (
        StepCase("1p5b-1gpu", STEP_1P5B, 1),
        StepCase("1p5b-2gpu-none", at(STEP_1P5B, 2), 2, "none"),
        StepCase("1p5b-2gpu", at(STEP_1P5B, 2), 2),
        StepCase("1p5b-2gpu-half", STEP_1P5B, 2),
    ),
    "7b": (
        StepCase("7b-t1", STEP_7B, 2, 1, num_warm_up=1),
        StepCase("7b-t2", STEP_7B, 2, 2, num_warm_up=1),
    ),
    "7b-peer": (trl_7b("7b-trl", PeerSettings(8, True, True)),),
    "7b-peer-16": (trl_7b("7b-trl-16", PeerSettings(16, False, True)),),
    "7b-peer-32": (trl_7b("7b-trl-32", PeerSettings(32, True, True)),),
    "7b-peer-zero3": (trl_7b("7b-trl-zero3", PeerSettings(16, False, True), "zero3"),),
}
"""Steps by part of the suite, in the order in which they take turns. TRL's cases are parts of their own: one
that does not fit or hangs takes no other's time. Kept activations of 16 completions are about 34 GiB (512
tokens, 28 layers, 159 kB each), beside 61 GiB of weights, gradients and moments; those of 32 are too many."""

CONTEXTS: dict[str, tuple[Case, int]] = {
    "full_7b_2x80gb_context": (Case("7b", "full", 8, CAP_80GB), 2),
    "full_14b_2xh200_context": (Case("qwen2.5-14b", "full", 8), 2),
    "lora_72b_2xh200_context": (Case("qwen2.5-72b", "lora", 8), 2),
}
"""Per claim: one step of 8 completions, under a cap for each GPU, and the parts of the weights t."""

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "ACCELERATE_MIXED_PRECISION": "bf16",
}
"""What `accelerate launch` sets for TRL's FSDP2 configuration of full sharding (its fsdp2.yaml)."""

ZERO3 = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    "ACCELERATE_MIXED_PRECISION": "bf16",
}
"""What `accelerate launch` sets for TRL's DeepSpeed configuration of full sharding (its zero3.yaml)."""

LAUNCHES = {"fsdp2": FSDP2, "zero3": ZERO3}
"""Environments of TRL's processes by what splits its model."""
