"""Every option is honoured, needless or refused, and a table says why.

`GRPOConfig` inherits some two hundred options from TRL and transformers. An option that is accepted and then
ignored costs its user days, so every one of them is in exactly one row here:

- honoured: does what TRL's or transformers' documentation says. These are the options that a class of
  colocate declares and that are in no other row, and the options in `HONOURED_OF_TRANSFORMERS`;
- ALIASES (`options/names.py`): an older name, or one of TRL's, moved to the one here;
- UNNECESSARY: what it asks for happens anyway or cannot matter here; setting it prints one line saying why;
- REFUSED: any value but the default is a `ValueError` with the reason and what to do instead.

Options of one engine (the record of an `Engine` declares them) are in UNNECESSARY or REFUSED, and honoured
with that engine (`HONOURED_BY`).

An option in no row comes from a newer transformers and is refused unless it has its default.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from colocate.config.rollout_precision import check_precision
from colocate.engines.registry import engines
from colocate.options.declared import default_of
from colocate.options.names import ALIASES, OF_TRL
from colocate.options.requirements import Elsewhere, check_choice
from colocate.options.values import shown
from colocate.policy.optimizer.names import check_optimizer
from colocate.weights.families import FAMILY_NAMES


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HONOURED_OF_TRANSFORMERS: frozenset[str] = _names(
    """
    output_dir per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
    num_train_epochs max_steps seed data_seed full_determinism

    lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args optim_target_modules weight_decay
    adam_beta1 adam_beta2 adam_epsilon max_grad_norm tf32 activation_checkpointing
    activation_checkpointing_kwargs use_cpu ddp_backend ddp_timeout

    logging_strategy logging_first_step log_level log_level_replica disable_tqdm report_to run_name project
    trackio_space_id trackio_bucket_id trackio_static_space_id

    eval_strategy eval_steps eval_delay eval_on_start

    save_strategy save_steps save_total_limit save_only_model load_best_model_at_end metric_for_best_model
    greater_is_better restore_callback_states_from_checkpoint
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_revision
    """
)
"""Options of `TrainingArguments` that are honoured as its documentation says."""


def _of_engines(*, refused: bool) -> dict[str, str]:
    """The options that one engine alone has, with the reason why they are not needed, or refused, with
    another."""
    found = {}
    for engine in engines().values():
        for name, hint in engine.own_options.items() if engine.unread else ():
            marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Elsewhere)]
            mark = marks[0] if marks else Elsewhere(engine.unread)
            if mark.is_refused == refused:
                found[name] = mark.reason
    return found


_SHARED = "the native engine shares the trainer's weights and memory; nothing to set"
_NO_WORKERS = "prompts are tokenised once and there are no data-loading processes"
_OWN_PRECISION = "evaluation uses the policy's own weights in their own precision"
_NO_DDP = "gradients are reduced once per optimizer step, without DistributedDataParallel"
_NATIVE_BATCHING = "the native engine batches continuously and keeps its KV cache in pages already"
_OWN_KERNELS = (
    "norms, rotary embeddings, gates and log-probabilities have fused kernels here; no layer is patched"
)
_NO_LOGITS = "evaluation scores completions; no logits or labels are gathered"

UNNECESSARY: dict[str, str] = {
    **_of_engines(refused=False),
    "use_vllm": "the native engine generates on the trainer's GPU already. vLLM is started only for a model "
    f"that is not supported natively ({FAMILY_NAMES} are), or with engine='vllm'",
    "vllm_device": _SHARED,
    "vllm_dtype": _SHARED,
    "vllm_enable_prefix_caching": "a prompt is always stored and read once for its whole group",
    "ds3_gather_for_generation": "only read under DeepSpeed ZeRO-3",
    "pad_to_multiple_of": "sequences are packed, never padded",
    "use_liger_loss": "log-probabilities are always computed in chunks, never from full logits",
    "log_multimodal": "completions are text",
    "cache_implementation": "the engines keep a KV cache of their own, and none changes a result",
    "use_transformers_continuous_batching": _NATIVE_BATCHING,
    "transformers_continuous_batching_config": _NATIVE_BATCHING,
    "use_transformers_paged": _NATIVE_BATCHING,
    "use_liger_kernel": _OWN_KERNELS,
    "liger_kernel_config": _OWN_KERNELS,
    "cast_lm_head_to_fp32": "training sums and keeps logits in float32 already, whatever the head's type; "
    "the head's weights keep theirs, and bf16 ones have float32 masters in the optimizer",
    "accelerator_config": "prompts are drawn without accelerate's data loaders (split_batches and num_steps, "
    "which would change batches, are refused)",
    "average_tokens_across_devices": "losses are always normalised by the tokens of all ranks",
    "bf16_full_eval": _OWN_PRECISION,
    "fp16_full_eval": _OWN_PRECISION,
    "use_cache": "the trainer's forward keeps no KV cache, the engine always does",
    "torch_empty_cache_steps": "memory is handed over between rollout and training in every step",
    "log_on_each_node": "metrics are reduced over all ranks and logged once",
    "logging_nan_inf_filter": "a step that is not finite is skipped and counted (see max_skipped_steps)",
    "include_num_input_tokens_seen": "num_tokens is always logged",
    "skip_memory_metrics": "memory is always reported",
    "prediction_loss_only": _NO_LOGITS,
    "eval_do_concat_batches": _NO_LOGITS,
    "eval_use_gather_object": _NO_LOGITS,
    "eval_accumulation_steps": _NO_LOGITS,
    "include_for_metrics": _NO_LOGITS,
    "batch_eval_metrics": _NO_LOGITS,
    "label_names": _NO_LOGITS,
    "hub_always_push": "every upload is finished before the next starts, so none is skipped",
    "dataloader_drop_last": "an incomplete last batch is always dropped, as in TRL",
    "dataloader_num_workers": _NO_WORKERS,
    "dataloader_pin_memory": _NO_WORKERS,
    "dataloader_persistent_workers": _NO_WORKERS,
    "dataloader_prefetch_factor": _NO_WORKERS,
    "dataloader_multiprocessing_context": _NO_WORKERS,
    "dataloader_in_order": _NO_WORKERS,
    "length_column_name": "micro-batches are packed by the lengths of the completions themselves",
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "do_train": "the script that calls `train()` decides",
    "do_eval": "eval_strategy decides",
    "do_predict": "nothing is predicted beyond evaluation",
    "local_rank": "read from the environment that the launcher sets",
}

UNNECESSARY_WITH_LAYOUT: dict[str, str] = dict.fromkeys(
    ("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    f"it is read only for models that are not supported natively; for {FAMILY_NAMES} "
    "the planner chooses what is recomputed (`activation_policy`)",
)
"""Options that are on by default and that a natively supported model does not read. Their value does not show
whether the user has set them: only the run file or the command line does."""

REFUSED: dict[str, str] = {
    **_of_engines(refused=True),
    "vllm_mode": "with this engine, or without use_vllm=True, no server is asked. Set "
    "engine='rollout_server', or vllm_mode='colocate'",
    "vllm_structured_outputs_regex": "sampling outside the policy's own distribution is not supported; score "
    "the format in a reward function instead",
    "log_completions_hub_repo": "completions are written to output_dir; upload that directory instead",
    "fp16": "float16 needs loss scaling, which rare large gradients upset; set bf16=True",
    "auto_find_batch_size": "a generation batch must hold whole groups, so it cannot shrink when memory runs "
    "out; lower max_tokens_per_microbatch, which changes no result",
    "label_smoothing_factor": "GRPO has no labels; remove it",
    "neftune_noise_alpha": "noise on the embeddings would make trainer and engine disagree; remove it",
    "train_sampling_strategy": "use shuffle_dataset=False for the data's own order; packing balances lengths",
    "torch_compile": "not supported yet; remove it",
    "torch_compile_backend": "torch_compile is not supported yet; remove it",
    "torch_compile_mode": "torch_compile is not supported yet; remove it",
    "parallelism_config": "the weights are split over GPUs in one way; set shard, or let it choose",
    "debug": "not supported; steps that are not finite are reported by name (see max_skipped_steps)",
    "save_on_each_node": "a checkpoint is one directory for all nodes; put output_dir on shared storage",
    "ignore_data_skip": "a resumed run continues its data where it stopped; start a new run instead",
    "enable_jit_checkpoint": "not supported yet; set save_steps to what you can afford to lose",
}

HONOURED_BY: dict[str, frozenset[str]] = {
    engine.name: frozenset({*engine.own_options, *engine.asked_for_by})
    for engine in engines().values()
    if engine.unread
}
"""The options in UNNECESSARY and REFUSED that an engine does honour, by the engine's name."""


def check_report_to(names: Collection[str]) -> None:
    """Raises ValueError for a name that is no reporting integration of transformers'."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in names:
        check_choice("report_to", name, INTEGRATION_TO_CALLBACK)


def honoured(config_class: type, *engines: str) -> frozenset[str]:
    """The options that do what their documentation says, with whichever of these engines.

    They are those that colocate's own classes declare, but for the tables' exceptions, and those that
    `HONOURED_OF_TRANSFORMERS` lists.
    """
    own = [cls for cls in config_class.__mro__ if cls.__module__.startswith("colocate.")]
    declared = {name for cls in own for name in inspect.get_annotations(cls)}
    excepted = {*ALIASES, *UNNECESSARY, *REFUSED}
    return (HONOURED_OF_TRANSFORMERS | (declared - excepted)).union(
        *(HONOURED_BY.get(engine, frozenset()) for engine in engines)
    )


def check_support(config: Any, engine: str | None = None) -> list[str]:
    """Refuse what is not supported; returns one line for each option that is set but unnecessary.

    Must see the values as given, before `TrainingArguments` replaces them with derived ones. Where the model
    will decide between the native engine and vLLM, the options of vLLM wait until it has.

    Args:
        engine: the engine that engine="auto" has chosen, to judge the options that had to wait for that
            choice; None judges all other options.
    """
    is_undecided = config.engine == "auto" and config.use_vllm
    # The notice about use_vllm itself is due whatever the engine turns out to be.
    waiting = HONOURED_BY["vllm"] - {"use_vllm"} if is_undecided else frozenset()
    if engine is None:
        engine = config.engine
        optim = str(getattr(config.optim, "value", config.optim))
        check_optimizer(optim, config.optim_args, config.optim_target_modules)
        judged = frozenset(field.name for field in fields(config)) - waiting
    else:
        judged = waiting
    defaults = {field.name: default_of(field) for field in fields(config)}
    check_precision(config, engine)
    replaced = engines()[engine].replaced if engine in engines() else {}
    for name, remedy in replaced.items():
        if getattr(config, name) != defaults[name]:
            value = shown(getattr(config, name), name)
            raise ValueError(f"{name}={value} is not read with engine={engine!r}. Set {remedy}.")
    # What TRL's names are set to is judged under the names here.
    return _notices(config, judged - honoured(type(config), engine) - OF_TRL.keys())


def _notices(config: Any, names: Collection[str]) -> list[str]:
    """One line for each of the options `names` that is set but unnecessary."""
    notices = []
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        default = default_of(field)
        # What is empty, as many defaults were in older versions, asks for as little as what is None.
        if name not in names or value == default or not (value or default):
            continue
        if name in UNNECESSARY:
            notices.append(f"{name}={shown(value, name)} is not needed: {UNNECESSARY[name]}.")
        else:
            reason = REFUSED.get(name, f"this version of colocate does not know it; remove {name}")
            raise ValueError(f"{name}={shown(value, name)} is not supported: {reason}.")
    return notices
