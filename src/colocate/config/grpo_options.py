"""The options that colocate declares for a `GRPOConfig`: a part's own in the record beside it, all else here.

An option declared in this file is honoured unless a table in `honoured.py` says otherwise. Each is declared
with its type, its default, what its value must satisfy (`colocate.options.requirements`) and the text that
`colocate train --help` prints. Nothing here loads PyTorch: names and values are checked before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from colocate.algorithms.advantages import AdvantageOptions
from colocate.algorithms.entropy import EntropyOptions
from colocate.algorithms.objective_params import ObjectiveParams
from colocate.engines.native.options import NativeOptions
from colocate.engines.options import SamplingOptions
from colocate.engines.plugged_in import PluggedInOptions
from colocate.engines.vllm.options import VLLMOptions
from colocate.experience.options import CarryOptions, RefillOptions, TurnOptions
from colocate.memory.plan_options import PlanOptions
from colocate.options.requirements import (
    AT_LEAST_ONE,
    BELOW_ONE,
    FEW,
    FRACTION,
    IN_COMPLETIONS,
    INTERVAL,
    NOT_NEGATIVE,
    PORT,
    SECONDS,
    TIMEOUT,
    OneOf,
)
from colocate.policy.model.options import ModelOptions
from colocate.reporting.options import JournalOptions
from colocate.rollout_server.options import ServerOptions


@dataclass(repr=False)
class GRPOOptions(
    SamplingOptions,
    NativeOptions,
    VLLMOptions,
    ServerOptions,
    PluggedInOptions,
    ModelOptions,
    PlanOptions,
    RefillOptions,
    CarryOptions,
    TurnOptions,
    JournalOptions,
    AdvantageOptions,
    EntropyOptions,
    ObjectiveParams,
):
    """The options of a `GRPOConfig` that `TrainingArguments` lacks, or has other types or defaults for."""

    # ── Defaults that differ from TrainingArguments ──────────────────────────────────────────────────────

    learning_rate: Annotated[float, NOT_NEGATIVE] = 1e-6
    logging_steps: Annotated[float, INTERVAL] = 10
    remove_unused_columns: bool | None = False  # TRL's type
    """Keep only the dataset's column `prompt`, so that reward functions see no other."""
    resume_from_checkpoint: str | bool | None = None
    """The checkpoint that `colocate train` continues from. True: the newest one in `output_dir`. "auto": the
    newest one that is not corrupt; if there is none at all, the run begins at step 0."""

    # ── Batches. All batch sizes count completions, not prompts ──────────────────────────────────────────

    generation_batch_size: Annotated[int | None, AT_LEAST_ONE] = None
    """Completions per rollout, over all ranks. None: per_device_train_batch_size × ranks ×
    steps_per_generation."""
    num_iterations: Annotated[int, FEW] = 1
    """How many times each rollout is trained on (μ)."""
    shuffle_dataset: bool = True
    """Visit the prompts in random order (seeded by `data_seed`, or by `seed` where that is not set)."""
    dataset_weights: dict[str, Any] | None = None
    """Shares of the prompts by the value of the dataset's column `dataset`, such as {gsm8k: 0.7, math: 0.3};
    they sum to 1. None: every row is visited equally often. A run file's `datasets` set it."""
    share_prompts: bool = True
    """Compute a group's prompt once for all of its completions in a micro-batch of training. False: once for
    each completion, as TRL does."""
    offload_scorers: bool = False
    """Keep the weights of reward models, and of the reference in full fine-tuning, in pinned host memory
    except while rollouts are scored: neither the KV cache nor training shares the device with them then."""
    max_skipped_steps: Annotated[int, AT_LEAST_ONE] = 3
    """A step whose loss or gradient is not finite is skipped; this many of them in a row stop the run."""

    # ── Loss ─────────────────────────────────────────────────────────────────────────────────────────────

    sync_ref_model: bool = False
    """Move the reference model towards the policy every `ref_model_sync_steps` steps (TR-DPO,
    arXiv:2404.09656)."""
    ref_model_mixup_alpha: Annotated[float, FRACTION] = 0.6
    """α in: reference ← α policy + (1 − α) reference."""
    ref_model_sync_steps: Annotated[int, AT_LEAST_ONE] = 512
    """Optimizer steps between two moves of the reference model."""
    mask_truncated_completions: Annotated[bool, IN_COMPLETIONS] = False
    """Leave completions that reached `max_completion_length` out of the loss."""
    router_aux_loss_coef: Annotated[float | None, NOT_NEGATIVE] = None
    """Weight of a mixture of experts' load-balancing loss. None: the model's own weight. 0: no such loss."""

    # ── Rewards ──────────────────────────────────────────────────────────────────────────────────────────

    reward_weights: Annotated[list[float] | None, IN_COMPLETIONS] = None
    """One weight per reward function, in the order of `reward_funcs`. None: every weight is 1."""
    reward_timeout_s: Annotated[float | None, SECONDS] = 1800.0
    """Seconds that each reward function may take for the completions of a rollout. A function that takes
    longer ends the run with an error that names it; where the trainer is not in the main thread, it ends the
    process. None: no limit."""

    # ── Configurations of DeepSpeed and FSDP, whose meaning `shard` and `offload_optimizer` take over ────

    deepspeed: dict[str, Any] | str | None = None
    """A DeepSpeed configuration, as a mapping or a JSON file. It is read as `shard` (stage 0: "none"; 1 and
    2: 1; 3: "auto") and `offload_optimizer`; DeepSpeed itself is not used."""
    fsdp: bool | list[str] | str | None = None  # True is documented
    """True, or the strategies of FSDP's older form ("full_shard auto_wrap"). Read as `shard` ("auto", or 1
    where the weights are not to be split); FSDP itself is not used."""
    fsdp_config: dict[str, Any] | str | None = None
    """The settings of `fsdp`, as a mapping or a JSON file; `reshard_after_forward` decides about `shard`."""

    # ── Accepted so that existing scripts run, or refused: `honoured.py` says which and why ──────────────

    accelerator_config: dict[str, Any] | str | Any | None = None  # also an `AcceleratorConfig`
    cast_lm_head_to_fp32: bool = False
    use_vllm: bool = False
    vllm_mode: Annotated[str, OneOf(("colocate", "server"))] = "colocate"
    vllm_structured_outputs_regex: str | None = None
    ds3_gather_for_generation: bool = True
    pad_to_multiple_of: int | Literal["auto"] | None = "auto"
    cache_implementation: str | None = None
    log_multimodal: bool = True
    log_completions_hub_repo: str | None = None
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict | str | None = None
    use_transformers_paged: bool = False
    # TRL's names, which read what the ones here do, and those older than TRL 1.16: `options/names.py`
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: Annotated[int, PORT] = 8000
    vllm_server_timeout: Annotated[float, TIMEOUT] = 240.0
    vllm_importance_sampling_cap: float | None = None
    vllm_max_model_len: Annotated[int | None, AT_LEAST_ONE] = None
    vllm_guided_decoding_regex: str | None = None
    vllm_device: str | None = None
    vllm_dtype: str | None = None
    vllm_enable_prefix_caching: bool | None = None
    use_liger_loss: bool | None = None
    wandb_log_unique_prompts: bool | None = None
    warmup_ratio: Annotated[float | None, BELOW_ONE] = None
