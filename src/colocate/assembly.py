"""Building the parts of a run from its configuration."""

from __future__ import annotations

import atexit
import logging
import math
import os
from typing import Any, TypeAlias

import datasets
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    enable_full_determinism,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from colocate.algorithms.entropy import EntropyController
from colocate.config import GRPOConfig
from colocate.data.prompts import validate_columns
from colocate.data.sampler import PromptBatches
from colocate.data.streams import settle_stream_options
from colocate.engines import build as engines
from colocate.engines.base import RolloutEngine
from colocate.engines.build import EngineParts, engine_of_auto
from colocate.memory.train_plan import TrainPlan
from colocate.nested_options import arguments_of_model_generate, in_words, stop_token_ids_of
from colocate.options import check_support
from colocate.planning.planner import Planner, choose_fixed_plan
from colocate.planning.remedies import find_remedies
from colocate.planning.run_options import wishes_of
from colocate.policy.loading import (
    add_adapter,
    cast_to_bf16,
    check_vocabulary,
    disable_dropout,
    enable_gradient_checkpointing,
    freeze_what_text_does_not_reach,
    load_model,
    set_pad_token,
)
from colocate.policy.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy
from colocate.policy.reference import make_reference
from colocate.policy.router_loss import router_loss_coef
from colocate.policy.stack import runs_packed, tell_fallbacks
from colocate.redaction import check_complete
from colocate.rewards.base import RewardFunctions
from colocate.types import SamplingParams
from colocate.weights.layouts import causal_lm, has_layout

logger = logging.getLogger(__name__)

TrainDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset
EvalDataset: TypeAlias = TrainDataset | dict[str, TrainDataset]

NOT_SUPPORTED = {
    "tools": "agents that call tools are not supported yet",
    "rollout_func": "the rollout comes from an engine; implement colocate.engines.base.RolloutEngine instead",
    "environment_factory": "environments are not supported yet",
}


def refuse_unsupported(**arguments: Any) -> None:
    """Raises ValueError for an argument of TRL's trainer that is given but not supported here."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"GRPOTrainer does not take {name}: {NOT_SUPPORTED[name]}.")


def check_reward_source(reward_funcs: Any) -> None:
    """Raises ValueError if there is nothing to reward completions with."""
    if reward_funcs is None or (isinstance(reward_funcs, (list, tuple)) and not reward_funcs):
        raise ValueError(
            "No reward source provided: pass a function, a sequence classifier or its name in `reward_funcs`."
        )


def set_up_process(args: GRPOConfig) -> None:
    """Seeds every global generator and sets how much is logged, as transformers' trainers do.

    On CUDA PyTorch's allocator gets expandable segments, unless the environment configures it: what one phase
    frees, another can then use in pieces of any size, and gigabytes less are lost between the pieces.

    Raises:
        ValueError: `args` were read from a file, where a secret is left out.
    """
    check_complete(vars(args))
    atexit.unregister(leave_process_group)
    atexit.register(leave_process_group)
    is_configured = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if args.device.type == "cuda" and not is_configured:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)
    level = args.get_process_log_level()
    transformers_logging.set_verbosity(level)
    logging.getLogger("colocate").setLevel(level)


def leave_process_group() -> None:
    """When the interpreter ends: the threads of a gloo group that is still there may abort the process.

    NCCL's is left alone: to destroy it can wait for a rank that has died.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def load_tokenizer(model: nn.Module, processing_class: Any, args: GRPOConfig) -> PreTrainedTokenizerBase:
    """The tokenizer given, or the one saved with the model; checked against the model.

    Raises:
        TypeError: a processor of a multi-modal model.
        ValueError: no EOS token, or a vocabulary that the model does not cover.
    """
    if processing_class is None:
        name = causal_lm(model).config.name_or_path
        if not name:
            raise ValueError(
                "The model was not loaded from anywhere, so its tokenizer is unknown: pass processing_class."
            )
        processing_class = AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    if isinstance(processing_class, ProcessorMixin):
        raise TypeError(
            f"processing_class is a {type(processing_class).__name__}, but only text can be trained on: "
            "pass its .tokenizer and prompts without images."
        )
    set_pad_token(processing_class, model)
    check_vocabulary(processing_class, model)
    return processing_class


def prepare_model(
    model: Any, args: GRPOConfig, device: torch.device, quantization_config: Any, peft_config: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model ready to be trained, and its trainable weights as they were before a cast to bf16."""
    init_kwargs = dict(args.model_init_kwargs or {})
    if isinstance(model, str):
        init_kwargs.setdefault("trust_remote_code", args.trust_remote_code)
        if quantization_config is not None:
            init_kwargs["quantization_config"] = quantization_config
    elif quantization_config is not None:
        raise ValueError(
            "quantization_config applies while a model loads, but your model is already instantiated: pass "
            "it by name, or drop quantization_config."
        )
    loaded = load_model(model, bf16=bool(args.bf16), model_init_kwargs=init_kwargs)
    freeze_what_text_does_not_reach(loaded)
    originals = cast_to_bf16(loaded) if args.bf16 else {}
    if peft_config is not None:
        loaded = add_adapter(loaded, peft_config)
        originals = {}  # the base is frozen now, and a frozen weight needs no master
    if args.disable_dropout:
        disable_dropout(loaded)
    if args.gradient_checkpointing and not has_layout(loaded):
        # transformers has read JSON text into a dict by now.
        enable_gradient_checkpointing(loaded, args.gradient_checkpointing_kwargs)  # type: ignore[arg-type]
    return nn.Module.to(loaded, device), originals


def build_policy(
    model: nn.Module,
    args: GRPOConfig,
    max_steps: int,
    *,
    originals: dict[str, torch.Tensor],
    has_new_adapter: bool,
    optimizers: tuple[Any, Any],
    planner: Planner | None,
) -> Policy:
    """The policy with its optimizer, its plan, and its reference where the KL penalty needs one.

    Raises:
        ValueError: `sync_ref_model` with an adapter.
    """
    if args.sync_ref_model and hasattr(model, "peft_config"):
        raise ValueError(
            "sync_ref_model=True, but with an adapter the reference is the frozen weights under it, which "
            "cannot move. Set sync_ref_model=False, or train the whole model without an adapter."
        )
    plan = choose_fixed_plan(wishes_of(args)) if planner is None else planned(planner)
    reference = make_reference(model, has_new_adapter=has_new_adapter) if args.beta > 0 else None
    optimizer = PolicyOptimizer(model, args, max_steps, original_weights=originals, optimizers=optimizers)
    if runs_packed(model):
        tell_fallbacks(model)
    return Policy(
        model,
        optimizer,
        temperature=args.temperature,
        share_prompts=args.share_prompts,
        plan=plan,
        max_grad_norm=args.max_grad_norm,
        reference=reference,
        router_loss_coef=router_loss_coef(model, args.router_aux_loss_coef),
    )


def planned(planner: Planner) -> TrainPlan:
    """The planner's choice, with a warning where memory will not do, or only for more work."""
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


def build_engine(
    model: nn.Module, args: GRPOConfig, accelerator: Accelerator, sampling: SamplingParams
) -> RolloutEngine:
    """The engine that `args.engine` names; "auto" takes the native one for what it knows.

    Raises:
        ImportError: engine="vllm" without a vLLM that is supported.
        ValueError: an option that the engine which "auto" has come to does not support.
    """
    name, arguments = args.engine, arguments_of_model_generate(args.generation_kwargs)
    if name == "auto":
        name, reason = engine_of_auto(model, use_vllm=args.use_vllm, generate_arguments=in_words(arguments))
        if reason is not None and accelerator.is_main_process:
            logger.warning(reason)
        for notice in check_support(args, name):
            if accelerator.is_main_process:
                logger.warning(notice)
    return engines.build_engine(name, EngineParts(model, args, accelerator, sampling, arguments))


def sampling_params(args: GRPOConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_k=max(args.top_k or 0, 0),
        top_p=args.top_p,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *stop_token_ids_of(args.generation_kwargs)))),
        seed=args.seed,
    )


def prompt_batches(dataset: TrainDataset, args: GRPOConfig) -> PromptBatches:
    """The training prompts in the order of the run."""
    assert args.generation_batch_size and args.num_generations, "GRPOConfig derives them"
    return PromptBatches(
        dataset,
        args.generation_batch_size // args.num_generations,
        shuffle=bool(args.shuffle_dataset),
        seed=args.seed if args.data_seed is None else args.data_seed,
    )


def num_steps(args: GRPOConfig, num_batches_per_epoch: int | None) -> tuple[int, float]:
    """Optimizer steps of the whole run, and steps per epoch: a fraction where a step crosses epochs.

    A stream without a length counts as one epoch.

    Raises:
        ValueError: an iterable dataset without max_steps.
    """
    if num_batches_per_epoch is None:
        if args.max_steps <= 0:
            raise ValueError(
                "An iterable dataset has no length, so epochs cannot be turned into steps: set max_steps."
            )
        return args.max_steps, args.max_steps
    assert args.steps_per_generation is not None, "GRPOConfig derives it"
    micro_steps = num_batches_per_epoch * args.steps_per_generation * args.num_iterations
    steps_per_epoch = micro_steps / args.gradient_accumulation_steps
    if args.max_steps > 0:
        return args.max_steps, steps_per_epoch
    return max(1, math.ceil(args.num_train_epochs * steps_per_epoch)), steps_per_epoch


def check_datasets(
    train_dataset: TrainDataset | None, eval_dataset: EvalDataset | None, args: GRPOConfig
) -> tuple[TrainDataset, EvalDataset | None]:
    """Both datasets, checked, with the columns that reward functions are to see.

    Raises:
        ValueError: no training data, an empty dataset, no prompts, images, or evaluation without data.
    """
    if train_dataset is None:
        raise ValueError("`train_dataset` is required: a datasets.Dataset with a column 'prompt'.")
    if eval_dataset is None and (args.eval_strategy != "no" or args.eval_on_start):
        raise ValueError(
            f"eval_strategy={str(args.eval_strategy)!r}, but there is no eval_dataset: pass one, or set "
            "eval_strategy='no'."
        )

    settle_stream_options(args, train_dataset, evaluation_sets(eval_dataset).values())

    def checked(dataset: TrainDataset) -> TrainDataset:
        validate_columns(dataset)
        return dataset.select_columns(["prompt"]) if args.remove_unused_columns else dataset

    if isinstance(eval_dataset, dict):
        return checked(train_dataset), {name: checked(part) for name, part in eval_dataset.items()}
    return checked(train_dataset), None if eval_dataset is None else checked(eval_dataset)


def evaluation_sets(eval_dataset: EvalDataset | None) -> dict[str, TrainDataset]:
    """By name; a single one is called ""."""
    if eval_dataset is None:
        return {}
    return eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}


def context_length(model: nn.Module, args: GRPOConfig) -> int:
    """Tokens of prompt and completion that the model was made for, or `vllm_max_model_length` if fewer."""
    limits = [
        getattr(causal_lm(model).config.get_text_config(), "max_position_embeddings", None),
        args.vllm_max_model_length,
    ]
    return min(limit for limit in (*limits, 1 << 62) if limit is not None and limit > 0)  # XLNet's is -1


def entropy_controller(args: GRPOConfig) -> EntropyController:
    return EntropyController(
        args.entropy_coef,
        use_adaptive_entropy=args.use_adaptive_entropy,
        entropy_coef_min=args.entropy_coef_min,
        entropy_coef_max=args.entropy_coef_max,
        entropy_coef_delta=args.entropy_coef_delta,
        entropy_target=args.entropy_target,
    )


def build_rewards(
    reward_funcs: Any, tokenizers: Any, args: GRPOConfig, device: torch.device
) -> RewardFunctions:
    rewards = RewardFunctions(
        reward_funcs,
        tokenizers,
        reward_weights=args.reward_weights,
        chat_template_kwargs=args.chat_template_kwargs,
        model_init_kwargs={"trust_remote_code": args.trust_remote_code},
        timeout_s=args.reward_timeout_s,
    )
    for model in rewards.models:
        model.to(device)
    return rewards


def description(
    model: nn.Module, engine: RolloutEngine, dataset: TrainDataset, accelerator: Accelerator
) -> dict[str, Any]:
    """What `run.json` says of a run beside its versions."""
    lm = causal_lm(model)
    return {
        "model": lm.config.name_or_path or type(lm).__name__,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "engine": type(engine).__name__,
        "dataset": getattr(dataset.info, "dataset_name", None),
        "device": f"{accelerator.num_processes} x {accelerator.device.type}",
    }
