"""The engine of a run, what it draws from and how long its sequences may be: its options say so, and its
model."""

from __future__ import annotations

import logging

from accelerate import Accelerator
from torch import nn

from colocate.config.grpo_config import GRPOConfig
from colocate.config.honoured import check_support
from colocate.config.nested import arguments_of_model_generate, in_words, stop_token_ids_of
from colocate.engines.base import RolloutEngine
from colocate.parallel.mesh import Mesh
from colocate.run import engines
from colocate.run.engines import EngineParts, engine_of_auto
from colocate.types import SamplingParams
from colocate.weights.context_length import longest_context
from colocate.weights.layouts import causal_lm

logger = logging.getLogger(__name__)


def build_engine(
    model: nn.Module,
    args: GRPOConfig,
    accelerator: Accelerator,
    sampling: SamplingParams,
    mesh: Mesh | None = None,
) -> RolloutEngine:
    """The engine that `args.engine` names; "auto" takes the native engine wherever that can run.

    Raises:
        ImportError: engine="vllm" without a vLLM that is supported.
        ValueError: an option that the engine which "auto" has come to does not support; `context_length`.
    """
    context_length(model, args)  # before anything is started: what no engine may be asked for
    name, arguments = args.engine, arguments_of_model_generate(args.generation_kwargs)
    if name == "auto":
        name, reason = engine_of_auto(model, use_vllm=args.use_vllm, generate_arguments=in_words(arguments))
        if reason is not None and accelerator.is_main_process:
            logger.warning(reason)
        for notice in check_support(args, name):
            if accelerator.is_main_process:
                logger.warning(notice)
    return engines.build_engine(name, EngineParts(model, args, accelerator, sampling, arguments, mesh))


def sampling_params(args: GRPOConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """How the run draws completions, which end at `stop_token_ids` and those of `generation_kwargs`."""
    return SamplingParams(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_k=max(args.top_k or 0, 0),
        top_p=1.0 if args.top_p is None else args.top_p,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *stop_token_ids_of(args.generation_kwargs)))),
        seed=args.seed,
    )


def context_length(model: nn.Module, args: GRPOConfig) -> tuple[int, str]:
    """The tokens of prompt and completion that the model was made for, or `vllm_max_model_length` if fewer;
    and what says so.

    Raises:
        ValueError: `vllm_max_model_length` is more than the model computes consistently.
    """
    longest, asked = longest_context(causal_lm(model).config), args.vllm_max_model_length
    longest.check(asked, "vllm_max_model_length")
    most = longest.num_tokens or 1 << 62
    if asked is None or most <= asked:
        return most, longest.reason
    return asked, f"vllm_max_model_length={asked}"
