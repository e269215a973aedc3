"""Configurations of DeepSpeed and FSDP become colocate's options, contradict them, or are refused by name."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from colocate.config import launchers
from launcher_configs import DEEPSPEED_JSON, FSDP1, FSDP2, ZERO3, environment_of, with_entries


@pytest.fixture(autouse=True)
def nothing_taken(monkeypatch):
    monkeypatch.setattr(launchers, "_taken", {})


def options(**given: Any) -> SimpleNamespace:
    """A configuration before its values are checked, as far as `translate` reads it."""
    values = dict(
        shard="auto", offload_optimizer=None, bf16=None, deepspeed=None, fsdp=None, fsdp_config=None,
        max_grad_norm=1.0, gradient_accumulation_steps=1, per_device_train_batch_size=8, optim="adamw_torch",
        learning_rate=1e-6, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0,
        lr_scheduler_type="linear", warmup_steps=0, max_steps=100,
    )  # fmt: skip
    return SimpleNamespace(**values | given)


def json_with(section: str = "", **entries: Any) -> dict[str, Any]:
    return with_entries(DEEPSPEED_JSON, section, **entries)


WARM_UP = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}
STAGES = {0: "none", 1: 1, 2: 1, 3: "auto"}


@pytest.mark.parametrize(("stage", "shard"), STAGES.items())
def test_stages_of_accelerate(stage, shard, tmp_path):
    configuration = with_entries(ZERO3, "deepspeed_config", zero_stage=stage)
    config = options()
    (line,) = launchers.translate(config, environment_of(configuration, tmp_path))
    assert (config.shard, config.offload_optimizer, config.bf16) == (shard, None, True)
    assert f"(zero_stage={stage}) is read as shard={shard!r}, bf16=True; DeepSpeed itself is not used" in line


@pytest.mark.parametrize(("stage", "shard"), STAGES.items())
@pytest.mark.parametrize("where", ["file", "option", "accelerate"])
def test_stages_of_a_json(where, stage, shard, tmp_path):
    content = json_with("zero_optimization", stage=stage)
    file, environment = tmp_path / "zero.json", {}
    file.write_text(json.dumps(content))
    config = options(deepspeed={"file": str(file), "option": content}.get(where))
    if where == "accelerate":
        section = {"deepspeed_config_file": str(file), "zero3_init_flag": True}
        environment = environment_of({**ZERO3, "deepspeed_config": section}, tmp_path)
    (line,) = launchers.translate(config, environment)
    assert (config.shard, config.offload_optimizer, config.deepspeed) == (shard, True, None)
    assert config.bf16 is (True if where == "accelerate" else None)
    assert f"shard={shard!r}, offload_optimizer=True" in line and "its step runs on the GPU" in line
    assert ("zero.json" in line) == (where != "option")


@pytest.mark.parametrize(
    ("entries", "shard"),
    [
        *((dict(fsdp_sharding_strategy=str(n)), s) for n, s in enumerate(("auto", 1, "none", "auto", 1), 1)),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "auto"),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, 1),
        ({}, "auto"),
    ],
)
def test_strategies_of_fsdp1(entries, shard, tmp_path):
    config = options()
    environment = environment_of(with_entries(FSDP1, "fsdp_config", **entries), tmp_path)
    (line,) = launchers.translate(config, environment)
    assert config.shard == shard
    assert "accelerate's FSDP configuration (fsdp_version=1, fsdp_sharding_strategy=" in line


@pytest.mark.parametrize(("reshards", "shard"), [(True, "auto"), (False, 1)])
def test_fsdp2(reshards, shard, tmp_path):
    entries = {"fsdp_reshard_after_forward": reshards, "fsdp_activation_checkpointing": True}
    config = options()
    environment = environment_of(with_entries(FSDP2, "fsdp_config", **entries), tmp_path)
    (line,) = launchers.translate(config, environment)
    assert config.shard == shard
    assert "fsdp_version=2" in line and "activation_policy decides" in line


def test_fsdp2_on_a_mesh_of_accelerate(tmp_path):
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    config = options()
    (line,) = launchers.translate(
        config, environment_of(FSDP2 | {"parallelism_config": sizes, "num_processes": 8}, tmp_path)
    )
    assert config.shard == "auto" and "dp_replicate_size=2, dp_shard_size=4" in line
    launchers._taken.clear()
    sizes = {"parallelism_config_tp_size": 2}
    environment = environment_of(FSDP2 | {"parallelism_config": sizes}, tmp_path)
    with pytest.raises(ValueError, match="parallelism_config_tp_size=2, which is not supported"):
        launchers.translate(options(), environment)


@pytest.mark.parametrize(
    ("fsdp", "fsdp_config", "shard"),
    [
        (True, None, "auto"),
        ("true", {"reshard_after_forward": False}, 1),
        ("full_shard auto_wrap", {"fsdp_transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}, "auto"),
        (["shard_grad_op", "auto_wrap"], None, 1),
        ("no_shard", None, "none"),
        ("hybrid_shard", {"version": 1}, "auto"),
        (True, {"version": 1, "reshard_after_forward": "hybrid_shard_zero2"}, 1),
    ],
)
def test_fsdp_of_transformers(fsdp, fsdp_config, shard):
    config = options(fsdp=fsdp, fsdp_config=fsdp_config)
    (line,) = launchers.translate(config, {})
    assert (config.shard, config.fsdp, config.fsdp_config) == (shard, None, None)
    assert f"is read as shard={shard!r}; FSDP itself is not used" in line


def test_nothing_asked_is_nothing_changed(tmp_path):
    environment = environment_of({**ZERO3, "distributed_type": "MULTI_GPU"}, tmp_path, "--multi_gpu")
    before = dict(environment)
    config = options(fsdp=False)
    assert launchers.translate(config, environment) == []
    assert environment == before
    assert (config.shard, config.bf16) == ("auto", None)


def test_the_environment_is_cleared_and_remembered(tmp_path):
    """Or `Accelerator()` wants DeepSpeed, and a second configuration is not translated."""
    environment = environment_of(ZERO3, tmp_path)
    launchers.translate(options(), environment)
    assert not [
        name for name in environment if "DEEPSPEED" in name or name.startswith("ACCELERATE_CONFIG_DS")
    ]
    config = options()
    assert len(launchers.translate(config, environment)) == 1 and config.bf16
    with pytest.raises(ValueError, match="shard=1 was set"):
        launchers.translate(options(shard=1), environment)


@pytest.mark.parametrize("shard", ["auto", 2, 4, "8"])
def test_a_fixed_split_agrees_with_stage_3(shard, tmp_path):
    config = options(shard=shard)
    launchers.translate(config, environment_of(ZERO3, tmp_path))
    assert config.shard == shard


@pytest.mark.parametrize(
    ("content", "given", "message"),
    [
        ({"zero_optimization": {"stage": 2}}, {"shard": 2}, "shard=1, and the option shard=2 was set"),
        (DEEPSPEED_JSON, {"shard": "none"}, "weights that may be split, and the option shard='none' was set"),
        (DEEPSPEED_JSON, {"offload_optimizer": False}, "option offload_optimizer=False was set"),
        ({"bf16": {"enabled": True}}, {"bf16": False}, "bf16=True, and the option bf16=False was"),
        ({"bf16": {"enabled": False}}, {"bf16": True}, "bf16=False, and the option bf16=True was"),
        ({"fp16": {"enabled": True}}, {}, "fp16.enabled=true, which is not supported: float16 needs loss"),
        (json_with("zero_optimization", offload_param={"device": "cpu"}), {}, "offload_param.device='cpu'"),
        (json_with("zero_optimization", offload_param={"device": "nvme"}), {}, "offload_param.device='nvme'"),
        (json_with("zero_optimization", offload_optimizer={"device": "nvme"}), {}, "not on a disk"),
        (json_with("zero_optimization", stage=4), {}, "stage=4; ZeRO has stages 0, 1, 2 and 3"),
        (json_with("zero_optimization", overlap_com=True), {}, "did you mean 'overlap_comm'"),
        (json_with(gradient_clipping=0.5), {}, "gradient_clipping=0.5, but max_grad_norm=1.0"),
        (json_with(gradient_accumulation_steps=4), {}, "but gradient_accumulation_steps=1"),
        (json_with(train_micro_batch_size_per_gpu=4), {}, "but per_device_train_batch_size=8"),
        (json_with(train_batch_size=16), {}, "× processes × gradient_accumulation_steps=8. Set"),
        (json_with("optimizer", type="Lion"), {}, "optimizer.type='Lion', but optim='adamw_torch'"),
        (json_with("optimizer", params={"lr": 1e-5}), {}, "params.lr=1e-05, but learning_rate=1e-06"),
        (json_with("optimizer", params={"betas": [0.9, 0.95]}), {}, "betas=.*but .adam_beta1, adam_beta2.="),
        (json_with("optimizer", params={"freeze_step": 1}), {}, "params.freeze_step=1, which is not"),
        (json_with(scheduler={"type": "WarmupLR"}), {}, "='constant_with_warmup' is the same"),
        (json_with(scheduler=WARM_UP), {}, "warmup_steps=0"),
        (json_with(tensor_parallel={"autotp_size": 2}), {}, "tensor_parallel=.*which is not supported"),
        (json_with(wandb={"enabled": True}), {}, "enables wandb.*set report_to"),
        ("nowhere.json", {}, "deepspeed='nowhere.json' is neither a mapping nor a file"),
    ],
)  # fmt: skip
def test_what_a_json_may_not_say(content, given, message):
    with pytest.raises(ValueError, match=message):
        launchers.translate(options(deepspeed=content, **given), {})


def test_numbers_that_agree_are_taken():
    content = json_with(
        gradient_clipping=0.2, gradient_accumulation_steps=4, train_micro_batch_size_per_gpu=8,
        train_batch_size=32, fp16={"enabled": "auto"}, bf16={"enabled": True},
        scheduler={"type": "WarmupDecayLR", "params": {"warmup_max_lr": 1e-6, "total_num_steps": "auto"}},
        tensorboard={"enabled": False},
    )  # fmt: skip
    content["optimizer"]["params"] |= {"lr": 1e-6, "betas": [0.9, 0.999], "torch_adam": True}
    config = options(deepspeed=content, max_grad_norm=0.2, gradient_accumulation_steps=4)
    assert len(launchers.translate(config, {})) == 1 and config.bf16 is True


@pytest.mark.parametrize(
    ("configuration", "given", "message"),
    [
        (with_entries(FSDP2, "fsdp_config", fsdp_offload_params=True), {}, "offload_params=true, which"),
        (with_entries(ZERO3, "deepspeed_config", offload_param_device="nvme"), {}, "device='nvme'"),
        (with_entries(ZERO3, "deepspeed_config", gradient_clipping=0.5), {}, "gradient_clipping=0.5, but "),
        (with_entries(ZERO3, mixed_precision="fp16"), {}, "mixed_precision='fp16', which is not supported"),
        (ZERO3, {"bf16": False}, "asks for bf16=True, and the option bf16=False was set"),
        (FSDP2, {"shard": 1}, "asks for weights that may be split, and the option shard=1 was set"),
        (FSDP2, {"deepspeed": {"zero_optimization": {"stage": 1}}}, "shard=1, and .* weights that may"),
    ],
)  # fmt: skip
def test_what_accelerate_may_not_ask_for(configuration, given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        launchers.translate(options(**given), environment_of(configuration, tmp_path))


@pytest.mark.parametrize(
    ("fsdp", "fsdp_config", "message"),
    [
        (None, {"version": 2}, "is read only with fsdp=True"),
        ("full_shard offload", None, "offload_params=true, which is not supported: FSDP's offload keeps"),
        ("full_shart", None, "fsdp has 'full_shart', which is not supported; did you mean 'full_shard'"),
        (True, {"reshard_after_forwards": True}, "no key 'reshard_after_forwards'; did you mean"),
        (True, {"xla": True}, "TPUs are not supported"),
        (True, {"reshard_after_forward": "half"}, "the strategy 'half' is unknown; it is one of FULL_SHARD"),
        ("full_shard no_shard", None, "names 2 strategies"),
    ],
)
def test_what_fsdp_may_not_ask_for(fsdp, fsdp_config, message):
    with pytest.raises(ValueError, match=message):
        launchers.translate(options(fsdp=fsdp, fsdp_config=fsdp_config), {})


def test_megatron_is_refused():
    with pytest.raises(ValueError, match="use_megatron_lm"):
        launchers.translate(options(), {"ACCELERATE_USE_MEGATRON_LM": "true"})
