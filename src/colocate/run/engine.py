"""The engine of a run, its sampling parameters and the length of its sequences, from options and model."""

from __future__ import annotations

import logging

from accelerate import Accelerator
from torch import nn

from colocate.config.grpo_config import GRPOConfig
from colocate.config.honoured import check_support
from colocate.config.nested import arguments_of_model_generate, in_words, stop_token_ids_of
from colocate.engines.base import RolloutEngine
from colocate.engines.registry import EngineParts, engine_of
from colocate.engines.vllm import environment
from colocate.parallel.mesh import Mesh, check_decode_parts
from colocate.run.options import CompletionOptions
from colocate.types import SamplingParams
from colocate.weights.context_length import longest_context
from colocate.weights.fully_sharded import is_fully_sharded
from colocate.weights.layouts import causal_lm, why_no_layout
from colocate.weights.weight_parts import local_part

logger = logging.getLogger(__name__)


def build_engine(
    model: nn.Module,
    args: GRPOConfig,
    accelerator: Accelerator,
    sampling: SamplingParams,
    mesh: Mesh | None = None,
) -> RolloutEngine:
    """The engine that `args.engine` names; "auto" takes the native engine wherever that can run. It
    is asleep."""
    context_length(
        model, args.vllm_max_model_length
    )  # before anything is started: what no engine may be asked for
    name, arguments = args.engine, arguments_of_model_generate(args.generation_kwargs)
    if name == "auto":
        name, reason = engine_of_auto(model, use_vllm=args.use_vllm, generate_arguments=in_words(arguments))
        if reason is not None and accelerator.is_main_process:
            logger.warning(reason)
        for notice in check_support(args, name):
            if accelerator.is_main_process:
                logger.warning(notice)
    check_weight_parts(name, model, args.decode_shard, mesh)
    assert args.generation_batch_size, "GRPOConfig derives it"
    return engine_of(name).make(
        EngineParts(
            model,
            args.engine_options(name),
            accelerator,
            sampling,
            arguments,
            mesh,
            output_dir=args.output_dir or ".",
            trust_remote_code=args.trust_remote_code,
            reserve_bytes=0 if args.offload_optimizer else _moments_bytes(model, args, mesh),
            num_seqs=max(args.generation_batch_size // args.world_size, args.per_device_eval_batch_size),
        )
    )


def check_weight_parts(name: str, model: nn.Module, decode_shard: int | None, mesh: Mesh | None) -> None:
    """Raises ValueError if an engine cannot read the weights that the ranks of `mesh` share."""
    num_parts = 1 if mesh is None else mesh.num_weight_parts
    if decode_shard is not None and decode_shard != num_parts:
        check_decode_parts(num_parts, decode_shard)
    if num_parts > 1 and is_fully_sharded(model) and decode_shard not in (None, 1):
        raise ValueError(
            f"decode_shard={decode_shard} lets {decode_shard} processes decode together, which needs a model "
            "with a layout; weights that FSDP2 splits are gathered, and every process generates alone. Set "
            "decode_shard=1 or None."
        )
    if num_parts > 1 and is_fully_sharded(model) and name == "rollout_server":
        raise ValueError(
            f"engine={name!r} cannot be sent weights that {num_parts} processes share by FSDP2 "
            f"(shard={num_parts}). Set engine='vllm' or 'transformers', or shard=1, with which every process "
            "has a copy."
        )
    if num_parts > 1 and not is_fully_sharded(model) and name != "native":
        raise ValueError(
            f"engine={name!r} cannot generate where {num_parts} processes share one copy of the weights "
            f"(shard={num_parts}); the native engine can. Set engine='native', or shard=1, with which every "
            "process has a copy."
        )


def engine_of_auto(
    model: nn.Module, *, use_vllm: bool, generate_arguments: str = ""
) -> tuple[str, str | None]:
    """The engine that engine="auto" chooses for a model, and the reason if it is not the native engine;
    `generate_arguments` are words for options that only `model.generate` knows."""
    if generate_arguments:
        return "transformers", (
            f"generation_kwargs asks for {generate_arguments}, which the native engine does not support (it "
            "samples from the policy, without beams): completions come from transformers' model.generate, "
            "which is slower and tells no log-probs."
        )
    if (reason := why_no_layout(model)) is None:
        return "native", None
    name = "vllm" if use_vllm and environment.installed_version() is not None else "transformers"
    return name, (
        f"The native engine cannot run this model ({reason}): completions come from "
        + ("vLLM, which is started." if name == "vllm" else "model.generate, which is slower.")
    )


def chosen_engine(args: GRPOConfig, model: nn.Module) -> str:
    """The name of the engine that generates for a model; engine="auto" chooses it."""
    if args.engine != "auto":
        return args.engine
    arguments = in_words(arguments_of_model_generate(args.generation_kwargs))
    return engine_of_auto(model, use_vllm=args.use_vllm, generate_arguments=arguments)[0]


def _moments_bytes(model: nn.Module, args: GRPOConfig, mesh: Mesh | None) -> int:
    """Bytes of Adam's two float32 moments, which exist from the first step on and stay during rollouts."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    num_trained = sum(local_part(parameter).numel() for parameter in trained)
    return 8 * num_trained // (mesh.num_replicas if mesh is not None and args.shard != "none" else 1)


def sampling_params(options: CompletionOptions, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The run's way to draw completions, which end at `stop_token_ids` and those of `generation_kwargs`."""
    return SamplingParams(
        max_tokens=options.max_completion_length,
        temperature=options.temperature,
        top_k=max(options.top_k or 0, 0),
        top_p=1.0 if options.top_p is None else options.top_p,
        min_p=options.min_p or 0.0,
        repetition_penalty=options.repetition_penalty,
        stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *stop_token_ids_of(options.generation_kwargs)))),
        seed=options.seed,
    )


def context_length(model: nn.Module, asked: int | None) -> tuple[int, str]:
    """The tokens of prompt and completion that the model was made for, or `vllm_max_model_length` (`asked`)
    if fewer; and the reason for that limit."""
    longest = longest_context(causal_lm(model).config)
    longest.check(asked, "vllm_max_model_length")
    most = longest.num_tokens or 1 << 62
    if asked is None or most <= asked:
        return most, longest.reason
    return asked, f"vllm_max_model_length={asked}"
