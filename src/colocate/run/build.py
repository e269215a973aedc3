"""Builds the parts of a run of its configuration and the trainer's arguments."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import datasets
import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback

from colocate.algorithms.entropy import EntropyController, EntropyOptions
from colocate.algorithms.losses import LOSSES
from colocate.algorithms.objective import Objective
from colocate.algorithms.objective_params import ObjectiveParams
from colocate.checkpoints.best import BestCheckpoint
from colocate.config.grpo_config import GRPOConfig
from colocate.config.nested import arguments_of_model_generate
from colocate.data.first_prompt import tell_first_prompt
from colocate.data.prompts import row_name
from colocate.data.sampler import PromptBatches
from colocate.data.slow_prompts import limited
from colocate.data.splits import EvalDataset, TrainDataset, evaluation_sets
from colocate.data.template_check import NUM_ROWS, check_template
from colocate.engines.base import RolloutEngine
from colocate.experience.agreement import Agreement
from colocate.experience.judge import Judge
from colocate.experience.options import SelectionOptions
from colocate.experience.refill import RefillingSelector
from colocate.experience.requests import RequestBuilder
from colocate.experience.select import Selector
from colocate.experience.window import TrainingWindow
from colocate.memory.handover import Handover
from colocate.memory.sleeping import SleepingWeights, give_own_memory
from colocate.memory.timeline import Category, Timeline, resident_bytes_besides
from colocate.memory.train_plan import TrainPlan
from colocate.parallel.mesh import Mesh
from colocate.parallel.watch import watched
from colocate.planning.planner import Planner, choose_fixed_plan
from colocate.planning.remedies import find_remedies
from colocate.planning.run_options import constraints_of, planner_for
from colocate.policy.checks.forward_check import check_forward_pass
from colocate.policy.model.forward import router_loss_coef
from colocate.policy.model.loading import load_tokenizer, prepare_model, stop_token_ids
from colocate.policy.model.trained_weights import check_trained_weights
from colocate.policy.model.training_mode import active_dropout, training_only
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy
from colocate.policy.reference import Reference, make_reference
from colocate.policy.stack.stack import runs_packed, tell_fallbacks
from colocate.reporting.journal import Journal
from colocate.reporting.work_counts import WorkCounts
from colocate.rewards import FORMS
from colocate.rewards.base import RewardFunctions
from colocate.run.engine import build_engine, context_length, sampling_params
from colocate.run.identity import RunIdentity
from colocate.run.mesh import part_of, sharding_of, splits_state, weight_parts_of
from colocate.run.options import BatchOptions, PartOptions, PolicyOptions, ScoringOptions
from colocate.run.playing import PLAIN, Playing, build_player, check_mesh, datasets_of, num_prompts_of
from colocate.run.process_setup import set_up_process
from colocate.run.record import Run
from colocate.run.start_checks import check_ranks
from colocate.types import SamplingParams
from colocate.weights.weight_parts import local_part, splits_of

logger = logging.getLogger(__name__)


@watched(lambda args: "while the run was being built")
def build_run(
    args: GRPOConfig,
    model: Any,
    reward_funcs: Any,
    train_dataset: TrainDataset | None,
    eval_dataset: EvalDataset | None = None,
    *,
    processing_class: Any = None,
    reward_processing_classes: Any = None,
    callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
    optimizers: tuple[Any, Any] = (None, None),
    quantization_config: Any = None,
    peft_config: Any = None,
    playing: Playing = PLAIN,
) -> Run:
    """Load the model and make every part of a run; the arguments are `GRPOTrainer`'s, their types checked.

    Raises:
        ValueError: an argument, the dataset or the batch cannot be trained on; the message says what to set.
    """
    train_dataset, eval_dataset = datasets_of(train_dataset, eval_dataset, reward_funcs, args, playing)
    accelerator = set_up_process(args)
    check_ranks(args, model, train_dataset, eval_dataset, {"reward_funcs": reward_funcs} | playing.given)
    device, options, library_bytes = accelerator.device, PartOptions(args), resident_bytes_besides(model)
    has_new_adapter, loaded_in = peft_config is not None, (quantization_config, peft_config)
    mesh = Mesh.of(device.type, weight_parts_of(options.policy, accelerator, model, *loaded_in, optimizers))
    check_mesh(playing, mesh, options.policy.decode_shard)
    batches = prompt_batches(train_dataset, options.batches)
    num_steps = steps_of(options.batches, batches.num_batches_per_epoch)
    model, originals = prepare_model(model, options.model, device, *loaded_in, *part_of(mesh))
    tokenizer = load_tokenizer(model, processing_class, trust_remote_code=options.model.trust_remote_code)
    sampling = sampling_params(options.completions, stop_token_ids(tokenizer, model))
    # An engine may take all memory that it finds free: whatever else needs memory is made first.
    reference = make_reference(model, has_new_adapter=has_new_adapter) if options.objective.beta > 0 else None
    optimizer = build_optimizer(model, args, num_steps.of_run, originals, optimizers, mesh)
    planner = planner_for(model, options.policy, sharding_of(mesh, splits_optimizer=optimizer.is_split))
    engine = build_engine(model, args, accelerator, sampling, mesh)
    journal = build_journal(args, accelerator, callbacks, num_steps, model, tokenizer, optimizer)
    timeline = build_timeline(device, model, optimizer, engine, journal, library_bytes)
    handover = Handover(engine)
    engine.counts = counts = journal.progress.counts
    policy = build_policy(
        model, options.policy, optimizer, planner, reference, handover, timeline, mesh, counts
    )
    rewards = build_rewards(reward_funcs, reward_processing_classes, options.scoring, device, playing, counts)
    requests = build_requests(
        tokenizer, model, options.selection, train_dataset, eval_dataset, playing, rewards.names
    )
    entropy = entropy_controller(options.objective, options.entropy)
    return Run(
        args, accelerator, mesh, tokenizer, train_dataset, eval_dataset, playing, batches, requests, engine,
        player=build_player(playing, engine, sampling, requests, batches, options.player),
        judge=build_judge(rewards, tokenizer, accelerator, journal, options.scoring, playing, engine),
        selector=build_selector(policy, options.selection, rewards),
        window=build_window(model, options.policy, device), policy=policy, entropy=entropy,
        objective=Objective(options.objective, entropy), handover=handover, timeline=timeline,
        agreement=build_agreement(engine, policy, sampling, options.policy), journal=journal,
        scorers=build_scorers(rewards, reference, model, options.scoring, device), best=BestCheckpoint(args),
        identity=RunIdentity(args, accelerator, policy, engine, train_dataset, rewards, has_new_adapter),
    )  # fmt: skip


def build_optimizer(
    model: nn.Module,
    args: GRPOConfig,
    max_steps: int,
    originals: dict[str, torch.Tensor],
    optimizers: Any,
    mesh: Mesh,
) -> PolicyOptimizer:
    """The optimizer of a model that can be trained."""
    check_trained_weights(model)
    if runs_packed(model):  # such a model is compared with its layout when the policy is made
        tell_fallbacks(model)
    else:
        check_forward_pass(model)
    if args.sync_ref_model and mesh.num_weight_parts > 1:
        raise ValueError(
            f"sync_ref_model=True, but the weights are split over {mesh.num_weight_parts} processes, and a "
            "checkpoint has no place for the parts of a reference that has moved. Set shard=1 or "
            "sync_ref_model=False."
        )
    if args.sync_ref_model and hasattr(model, "peft_config"):
        raise ValueError(
            "sync_ref_model=True, but with an adapter the reference is the frozen weights under it, which "
            "cannot move. Set sync_ref_model=False, or train the whole model without an adapter."
        )
    return PolicyOptimizer(
        model,
        args,
        max_steps,
        original_weights=originals,
        optimizers=optimizers,
        mesh=mesh if splits_state(args, optimizers, mesh) else None,
        splits=splits_of(model),
    )


def build_policy(
    model: nn.Module,
    options: PolicyOptions,
    optimizer: PolicyOptimizer,
    planner: Planner | None,
    reference: Reference | None,
    handover: Handover,
    timeline: Timeline,
    mesh: Mesh,
    counts: WorkCounts,
) -> Policy:
    return Policy(
        model,
        optimizer,
        temperature=options.temperature,
        plan=choose_fixed_plan(constraints_of(options)) if planner is None else first_plan(planner),
        planner=planner,
        share_prompts=options.share_prompts,
        max_grad_norm=options.max_grad_norm,
        reference=reference,
        router_loss_coef=router_loss_coef(model, options.router_aux_loss_coef),
        remedies=[handover.take_back],
        mesh=mesh,
        counts=counts,
        mark_memory=timeline.mark,
    )


def first_plan(planner: Planner) -> TrainPlan:
    """The planner's choice, with a warning if memory does not suffice, or only at the cost of more work."""
    plan = planner.plan()
    if plan.shortage is not None:
        remedies = "; or ".join(remedy.settings for remedy in find_remedies(planner.case))
        advice = (
            f"To make it fit, set {remedies}" if remedies else "Nothing that can be set would make it fit"
        )
        logger.warning(
            f"The run may run out of memory: {plan.shortage}. It starts all the same and shrinks its "
            f"micro-batches when it must. {advice}."
        )
    if plan.repeated_prompts is not None:
        logger.warning(plan.repeated_prompts)
    logger.info(
        f"Training plan: {plan.train_plan}, {plan.peak_bytes / 2**30:.2f} GiB at the peak; KV cache of up to "
        f"{plan.kv_cache_tokens:,} tokens."
    )
    return plan.train_plan


def build_selector(policy: Policy, options: SelectionOptions, rewards: RewardFunctions) -> Selector:
    """The selector of groups to train on."""
    if options.refill_reward is not None and options.refill_reward not in rewards.names:
        raise ValueError(
            f"refill_reward={options.refill_reward!r} is none of the reward functions: "
            f"{', '.join(map(repr, rewards.names))}."
        )
    if options.refill_reward is not None and not options.max_refill_rounds:
        raise ValueError(
            f"refill_reward={options.refill_reward!r} says which groups are replaced, and "
            "max_refill_rounds=0 that none is. Set max_refill_rounds to at least 1."
        )
    return RefillingSelector(policy, options) if options.max_refill_rounds else Selector(policy, options)


def build_window(model: nn.Module, options: PolicyOptions, device: torch.device) -> TrainingWindow:
    """The window, which evaluates all completions in evaluation mode if the model has dropout or other noise,
    and the loss compares the policy with the engine's log-probs."""
    rates = ", ".join(f"{name} {rate:g}" for name, rate in active_dropout(model).items())
    others = [] if runs_packed(model) else training_only(model)
    if others and options.process_index == 0:
        logger.warning(
            f"In training mode {', '.join(others)} computes something else than in rollouts, dropout aside: "
            "gradients are of another model than the one that generates. If that is noise of a router, set "
            "its rate to 0 in the model's configuration. If an adapter is on such a module, take it out of "
            "target_modules."
        )
    is_compared = options.vllm_importance_sampling_correction or options.off_policy_mask_threshold is not None
    is_compared = is_compared or LOSSES[options.loss_type].reads_behaviour
    is_compared = is_compared and not arguments_of_model_generate(options.generation_kwargs)
    evaluates_all = bool(rates or others) and is_compared
    if evaluates_all and rates and options.process_index == 0:
        logger.warning(
            f"The model is trained with dropout ({rates}), and rollouts have none. What compares the two "
            "(vllm_importance_sampling_correction) does so without dropout, which costs one more forward "
            "pass over the completions of a rollout's first step. disable_dropout=True saves it."
        )
    return TrainingWindow(
        options.gradient_accumulation_steps, options.num_iterations, device, evaluates_all=evaluates_all
    )


def build_agreement(
    engine: RolloutEngine, policy: Policy, sampling: SamplingParams, options: PolicyOptions
) -> Agreement:
    is_drawn_otherwise = bool(arguments_of_model_generate(options.generation_kwargs))
    is_8bit = options.rollout_precision != "bf16"
    return Agreement(engine, policy, sampling, is_drawn_otherwise=is_drawn_otherwise, is_8bit=is_8bit)


def prompt_batches(dataset: TrainDataset, options: BatchOptions) -> PromptBatches:
    """The training prompts in the order of the run."""
    return PromptBatches(
        dataset,
        num_prompts_of(options),
        shuffle=bool(options.shuffle_dataset),
        seed=options.seed if options.data_seed is None else options.data_seed,
        weights=options.dataset_weights,
    )


class NumSteps(NamedTuple):
    """The optimizer steps of a run and of an epoch."""

    of_run: int
    per_epoch: float
    """Steps of one epoch, with a fraction where a step crosses epochs."""


def steps_of(options: BatchOptions, num_batches_per_epoch: int | None) -> NumSteps:
    """Steps of the run and of an epoch. A stream without a length counts as one epoch."""
    if num_batches_per_epoch is None:
        if options.max_steps <= 0:
            raise ValueError(
                "An iterable dataset has no length, so epochs cannot be turned into steps: set max_steps."
            )
        return NumSteps(options.max_steps, options.max_steps)
    micro_steps = num_batches_per_epoch * options.steps_per_generation * options.num_iterations
    steps_per_epoch = micro_steps / options.gradient_accumulation_steps
    if options.max_steps > 0:
        return NumSteps(options.max_steps, steps_per_epoch)
    return NumSteps(max(1, math.ceil(options.num_train_epochs * steps_per_epoch)), steps_per_epoch)


def entropy_controller(objective: ObjectiveParams, options: EntropyOptions) -> EntropyController:
    return EntropyController(
        objective.entropy_coef, options, use_adaptive_entropy=objective.use_adaptive_entropy
    )


def build_rewards(
    reward_funcs: Any,
    tokenizers: Any,
    options: ScoringOptions,
    device: torch.device,
    playing: Playing,
    counts: WorkCounts,
) -> RewardFunctions:
    """The reward functions of the user, and behind them those of environments, each of which has weight 1."""
    own, weights = playing.reward_functions, options.reward_weights
    if own:
        given = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        reward_funcs = [*(func for func in given if func is not None), *own]
        if isinstance(tokenizers, (list, tuple)):
            tokenizers = [*tokenizers, *[None] * len(own)]
        elif tokenizers is not None:
            tokenizers = [tokenizers, *[None] * len(own)]
        weights = None if weights is None else [*weights, *[1.0] * len(own)]
    rewards = RewardFunctions(
        reward_funcs or [],
        tokenizers,
        reward_weights=weights,
        chat_template_kwargs=options.chat_template_kwargs,
        model_init_kwargs={"trust_remote_code": options.trust_remote_code},
        timeout_s=options.reward_timeout_s,
        counts=counts,
    )
    for model in rewards.models:
        model.to(device)
    return rewards


def build_scorers(
    rewards: RewardFunctions,
    reference: Reference | None,
    model: nn.Module,
    options: ScoringOptions,
    device: torch.device,
) -> SleepingWeights:
    """The weights that only scoring reads; with `offload_scorers` they sleep at other times."""
    if not options.offload_scorers:
        return SleepingWeights((), device)
    weights: list[torch.Tensor] = [weight for scorer in rewards.models for weight in scorer.parameters()]
    weights += [] if reference is None else reference.weights()
    in_use = [local_part(parameter) for parameter in model.parameters()]
    if weights and device.type == "cpu" and options.process_index == 0:
        logger.warning(
            "offload_scorers=True frees nothing on a CPU: reward models and reference are copied from host "
            "memory to host memory and back in each rollout. Leave it out."
        )
    give_own_memory(weights, in_use)
    return SleepingWeights([local_part(weight) for weight in weights], device, in_use=in_use)


def build_journal(
    args: GRPOConfig,
    accelerator: Accelerator,
    callbacks: Sequence[TrainerCallback | type[TrainerCallback]],
    num_steps: NumSteps,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: PolicyOptimizer,
) -> Journal:
    """The journal, which also tells the callbacks of each step of PyTorch's optimizer."""
    journal = Journal(
        args,
        accelerator,
        callbacks,
        max_steps=num_steps.of_run,
        steps_per_epoch=num_steps.per_epoch,
        reward_forms=FORMS,
        model=model,
        processing_class=tokenizer,
        optimizer=optimizer.optimizer,
        lr_scheduler=optimizer.scheduler,
    )
    optimizer.optimizer.register_step_pre_hook(lambda *_: journal.event("on_pre_optimizer_step"))
    optimizer.optimizer.register_step_post_hook(lambda *_: journal.event("on_optimizer_step"))
    return journal


def build_requests(
    tokenizer: PreTrainedTokenizerBase,
    model: nn.Module,
    options: SelectionOptions,
    train_dataset: TrainDataset,
    eval_dataset: EvalDataset | None,
    playing: Playing,
    reward_names: Sequence[str],
) -> RequestBuilder:
    """The builder of requests from both datasets. Their longest and shortest prompts are checked now, and the
    first one as the model will read it."""
    length, reason = context_length(model, options.vllm_max_model_length)
    requests = RequestBuilder(tokenizer, options, length, playing.schemas_of, context_reason=reason)

    def look() -> None:
        for dataset in (train_dataset, *evaluation_sets(eval_dataset).values()):
            requests.check_extremes(dataset)
        if options.process_index == 0:
            tell_prompts(requests, train_dataset, options, reward_names)

    limited(look)
    return requests


def tell_prompts(
    requests: RequestBuilder,
    train_dataset: TrainDataset,
    options: SelectionOptions,
    reward_names: Sequence[str],
) -> None:
    """Say what the first prompts show, as the model will read them."""
    rows = list(islice(train_dataset, NUM_ROWS))
    try:
        token_ids = requests.tokenize(rows, [row_name(number) for number in range(len(rows))])
    except ValueError:
        if not isinstance(train_dataset, datasets.IterableDataset):
            raise
        # Later prompts of a stream are refused when their batch comes.
        rows = rows[:1]
        token_ids = requests.tokenize(rows, [row_name(0)])
    check_template(rows, requests.rendered, requests.tokenizer)
    tell_first_prompt(rows[0], token_ids[0], requests.tokenizer, options, reward_names)


def build_judge(
    rewards: RewardFunctions,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    journal: Journal,
    options: ScoringOptions,
    playing: Playing,
    engine: RolloutEngine,
) -> Judge:
    return Judge(
        rewards,
        tokenizer,
        accelerator.device,
        advantage_options=options,
        mask_truncated_completions=options.mask_truncated_completions,
        mask_stale_tokens=options.mask_stale_tokens,
        policy_version=(lambda: engine.policy_version) if options.max_policy_lag else None,
        has_turns=playing.has_turns,
        calls_tools=playing.calls_tools,
        trainer_state=lambda: journal.state,
        rank=accelerator.process_index,
    )


def build_timeline(
    device: torch.device,
    model: nn.Module,
    optimizer: PolicyOptimizer,
    engine: RolloutEngine,
    journal: Journal,
    library_bytes: int,
) -> Timeline:
    """The timeline, with the categories of the device's memory; on a CPU also that of Python and libraries
    (`library_bytes`)."""
    of_host = [Category("libraries", lambda: library_bytes)] if device.type == "cpu" else []
    weights = list(model.parameters())  # finding them takes longer than adding up their sizes
    return Timeline(
        device,
        [
            *of_host,
            Category("weights", lambda: sum(p.nbytes for p in weights)),
            Category("optimizer", lambda: optimizer.num_bytes),
            Category("kv_cache", lambda: engine.kv_cache_bytes, within_phases=True),
            Category("rollout_weights", lambda: engine.rollout_weight_bytes, within_phases=True),
            Category("gradients", lambda: optimizer.gradient_bytes, within_phases=True),
        ],
        on_phase=journal.set_phase,
        pooled=engine.pooled_bytes,
    )
