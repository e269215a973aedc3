"""The options that each part of a run reads, taken from its configuration once.

A record here has the options that its part declares, and those of other parts and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from colocate.algorithms.advantages import AdvantageOptions
from colocate.algorithms.entropy import EntropyOptions
from colocate.algorithms.objective_params import ObjectiveParams
from colocate.engines.options import SamplingOptions
from colocate.experience.options import CarryOptions, SelectionOptions, TurnOptions
from colocate.planning.run_options import PlannedOptions
from colocate.policy.model.options import ModelOptions

if TYPE_CHECKING:
    from colocate.config.grpo_config import GRPOConfig


@dataclass(kw_only=True)
class BatchOptions:
    """The order of the prompts, and the batches and steps that a run is made of."""

    generation_batch_size: int
    num_generations: int
    steps_per_generation: int
    gradient_accumulation_steps: int
    num_iterations: int
    max_steps: int
    num_train_epochs: float
    shuffle_dataset: bool
    dataset_weights: dict[str, Any] | None
    seed: int
    data_seed: int | None


@dataclass(kw_only=True)
class CompletionOptions(SamplingOptions):
    """The options by which completions are drawn."""

    max_completion_length: int
    seed: int


@dataclass(kw_only=True)
class PlayerOptions(TurnOptions, CarryOptions):
    """The options of the player of episodes."""

    chat_template_kwargs: dict[str, Any] | None
    max_refill_rounds: int
    process_index: int


@dataclass(kw_only=True)
class PolicyOptions(PlannedOptions):
    """The options of the policy, of its plan and of the reference."""

    max_grad_norm: float
    router_aux_loss_coef: float | None
    process_index: int


@dataclass(kw_only=True)
class ScoringOptions(AdvantageOptions, CarryOptions):
    """The options of rewards and of their use."""

    reward_weights: list[float] | None
    reward_timeout_s: float | None
    mask_truncated_completions: bool
    offload_scorers: bool
    chat_template_kwargs: dict[str, Any] | None
    trust_remote_code: bool
    process_index: int


class PartOptions:
    """The record of each part's options, with the values that they have when a run is built."""

    def __init__(self, args: GRPOConfig) -> None:
        rank = {"process_index": args.process_index}
        ranks = {**rank, "world_size": args.world_size}
        self.batches = args.options_of(BatchOptions)
        self.model = args.options_of(ModelOptions)
        self.completions = args.options_of(CompletionOptions)
        self.policy = args.options_of(PolicyOptions, **ranks, device=args.device)
        self.player = args.options_of(PlayerOptions, **rank)
        self.scoring = args.options_of(ScoringOptions, **rank)
        self.selection = args.options_of(SelectionOptions, **ranks)
        self.objective = args.options_of(ObjectiveParams)
        self.entropy = args.options_of(EntropyOptions)
