"""TRL's own GRPOConfig is the reference: names, defaults, derived batches, and which batches are errors."""

import dataclasses
import warnings

import pytest
import trl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import TrainingArguments

from colocate.config.grpo_config import GRPOConfig
from colocate.options.names import OF_TRL

OWN = {
    **dict.fromkeys(
        ("engine", "max_num_seqs", "page_size", "kv_cache_tokens", "rollout_precision"),
        "options of engines that TRL does not have",
    ),
    **dict.fromkeys(
        ("vllm_weights", "vllm_engine_kwargs"), "how vLLM gets its weights, and the rest of its options"
    ),
    **dict.fromkeys(
        ("trtllm_tensor_parallel_size", "trtllm_engine_kwargs", "trtllm_python"),
        "an engine that TRL does not have",
    ),
    **dict.fromkeys(OF_TRL.values(), "servers that need not be vLLM's; TRL's names are taken as well"),
    **dict.fromkeys(
        ("vllm_on_server_loss", "vllm_group_host"),
        "what to do without the server, and how it finds the trainer",
    ),
    **dict.fromkeys(
        ("max_tokens_per_microbatch", "activation_policy", "share_prompts", "logprob_chunk_size"),
        "packing and what of a step is in memory at a time",
    ),
    **dict.fromkeys(
        ("dataset_weights", "apply_chat_template"), "mixtures, and a chat template for prompts that are text"
    ),
    **dict.fromkeys(("max_refill_rounds", "refill_reward"), "dynamic sampling"),
    **dict.fromkeys(("max_policy_lag", "mask_stale_tokens"), "batches that are begun ahead"),
    **dict.fromkeys(("tool_timeout_s", "tool_workers"), "tools that hang, and threads for those that wait"),
    **dict.fromkeys(("agent_timeout_s", "agent_port"), "agents that ask by HTTP"),
    **dict.fromkeys(
        (
            "offload_optimizer",
            "offload_scorers",
            "shard",
            "decode_shard",
            "max_skipped_steps",
            "reward_timeout_s",
        ),
        "memory and safety",
    ),
    **dict.fromkeys(("activation_policy", "share_prompts"), "what training keeps, and computes once"),
    **dict.fromkeys(
        (
            "max_prompt_length",
            "vllm_max_model_len",
            "vllm_guided_decoding_regex",
            "vllm_device",
            "vllm_dtype",
            "vllm_enable_prefix_caching",
            "use_liger_loss",
            "wandb_log_unique_prompts",
            "warmup_ratio",
        ),
        "TRL or transformers had it once, and scripts still set it",
    ),
}

OTHER_DEFAULTS = {
    "vllm_gpu_memory_utilization": "TRL: 0.3; here vLLM gets what training leaves",
    "vllm_enable_sleep_mode": "TRL: False; here vLLM's memory is training's in turn",
}


def declared(config_class):
    return {f.name: f for f in dataclasses.fields(config_class)}


def default(field):
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def test_names_are_trls_and_the_listed_ones():
    ours, theirs = declared(GRPOConfig), declared(trl.GRPOConfig)
    assert set(theirs) - set(ours) == set()
    assert set(ours) - set(theirs) == set(OWN)


def test_declared_defaults_are_trls():
    ours, theirs = declared(GRPOConfig), declared(trl.GRPOConfig)
    different = {name for name in theirs if default(ours[name]) != default(theirs[name])}
    assert different == set(OTHER_DEFAULTS)


def test_servers_have_trls_defaults_under_the_names_here():
    ours, theirs = declared(GRPOConfig), declared(trl.GRPOConfig)
    assert {name: default(ours[name]) for name in OF_TRL.values()} == {
        name: default(theirs[of_trl]) for of_trl, name in OF_TRL.items()
    }


def test_resolved_defaults_are_trls(tmp_path):
    reasons = {
        **OTHER_DEFAULTS,
        "bf16": "TRL: True everywhere; here only where the device is a GPU that has it",
        "hub_token": "TRL: '<HUB_TOKEN>' also where there is none, and a config made of it logs in with that",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        theirs = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True).to_dict()
    ours = GRPOConfig(output_dir=str(tmp_path), use_cpu=True).to_dict()
    assert {name for name, value in theirs.items() if ours[name] != value} == set(reasons)


TRAINING = st.fixed_dictionaries(
    {"per_device_train_batch_size": st.integers(1, 8), "num_generations": st.integers(1, 6)},
    optional={
        "gradient_accumulation_steps": st.integers(1, 4),
        "generation_batch_size": st.integers(1, 48),
        "steps_per_generation": st.integers(1, 6),
    },
)
EVALUATION = st.fixed_dictionaries(
    {
        "per_device_eval_batch_size": st.integers(1, 8),
        "eval_strategy": st.sampled_from(["no", "epoch"]),
        "do_eval": st.booleans(),
    },
    optional={"num_generations_eval": st.integers(1, 6)},
)
REWARDS_AND_CORRECTION = st.fixed_dictionaries(
    {
        "vllm_importance_sampling_clip_max": st.sampled_from([None, 1.0, 3.0]),
        "vllm_importance_sampling_clip_min": st.sampled_from([None, 0.5, 1.0]),
        "vllm_importance_sampling_mode": st.sampled_from(["token_truncate", "sequence_mask"]),
        "vllm_importance_sampling_correction": st.booleans(),
        "scale_rewards": st.sampled_from([True, False, "group", "batch", "none"]),
    }
)
DERIVED = (
    "generation_batch_size",
    "steps_per_generation",
    "num_generations",
    "num_generations_eval",
    "scale_rewards",
    "do_eval",
    "pad_to_multiple_of",
)


@pytest.mark.parametrize("grid", [TRAINING, EVALUATION, REWARDS_AND_CORRECTION])
@given(data=st.data())
@settings(max_examples=80, suppress_health_check=list(HealthCheck))
def test_derived_values_and_errors_are_trls(grid, data, tmp_path, monkeypatch):
    options = data.draw(grid)
    monkeypatch.setattr(TrainingArguments, "world_size", data.draw(st.integers(1, 4)))

    def derive(config_class):
        try:
            config = config_class(output_dir=str(tmp_path), use_cpu=True, **options)
        except ValueError:
            return "ValueError"
        return {name: getattr(config, name) for name in DERIVED}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert derive(GRPOConfig) == derive(trl.GRPOConfig)
