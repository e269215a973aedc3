"""What is set for the whole process before a run, and the engine that a model and the options come to."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DistributedType
from engine_models import make_gpt2, make_model
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from colocate.config.grpo_config import GRPOConfig
from colocate.engines.vllm import engine, environment
from colocate.parallel.mesh import Mesh
from colocate.run.engine import build_engine, engine_of_auto, sampling_params
from colocate.run.header import _why
from colocate.run.process_setup import set_up_process


@pytest.fixture
def process_as_before(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    levels = logging.getLogger("colocate").level, transformers_logging.get_verbosity()
    yield
    torch.use_deterministic_algorithms(False)
    logging.getLogger("colocate").setLevel(levels[0])
    transformers_logging.set_verbosity(levels[1])


def test_seed_full_determinism_and_log_level(tmp_path, process_as_before):
    options = {"output_dir": str(tmp_path), "use_cpu": True, "seed": 7}
    set_up_process(GRPOConfig(**options))
    assert not torch.are_deterministic_algorithms_enabled()
    drawn = torch.rand(3)
    set_up_process(GRPOConfig(**options, full_determinism=True, log_level="error"))
    assert torch.equal(torch.rand(3), drawn)
    assert torch.are_deterministic_algorithms_enabled()
    assert logging.getLogger("colocate").level == logging.ERROR
    assert transformers_logging.get_verbosity() == logging.ERROR


def test_a_plugin_that_the_script_has_made_is_refused(tmp_path, process_as_before, monkeypatch):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(ValueError, match=r"an Accelerator for FSDP, and colocate splits .* \(shard\)"):
        set_up_process(args)


# ── engine="auto" with use_vllm=True: the model decides ──────────────────────────────────────────────────


@pytest.fixture
def build(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "installed_version", lambda: Version("0.30"))
    monkeypatch.setattr(engine, "VLLMEngine", lambda model, **options: options)
    accelerator = SimpleNamespace(is_main_process=True, num_processes=1)

    def build(model, **options):
        args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, **options)
        return build_engine(model, args, accelerator, sampling_params(args, ()), Mesh(None))

    return build


def test_vllms_options_are_read_where_a_model_without_a_layout_comes_to_it(build, caplog):
    options = build(make_gpt2(), vllm_tensor_parallel_size=2, vllm_engine_kwargs={"enforce_eager": True})
    assert (options["tensor_parallel_size"], options["engine_kwargs"]) == (2, {"enforce_eager": True})
    message = caplog.messages[-1]
    assert "GPT2LMHeadModel has no layout" in message and "completions come from vLLM" in message


def with_dora(model):
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], use_dora=True))


def with_own_head(model):
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))


def quantised(model, **config):
    model.config.quantization_config = config
    return model


def partly_rotated():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, rope_parameters=rope,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partly_rotated, "partial_rotary_factor=0.5 rotates only part of each head"),
        (lambda: with_dora(make_model("qwen3")), "uses the LoRA variant DoraLinearVariant"),
        (lambda: with_own_head(make_model("qwen3")), "PEFT keeps its own copy of lm_head"),
        (
            lambda: quantised(make_model("qwen3"), quant_method="bitsandbytes", load_in_8bit=True),
            "is quantised (bitsandbytes, 8 bits)",
        ),
        (make_gpt2, "GPT2LMHeadModel has no layout"),
    ],
)
def test_why_a_known_architecture_is_not_run_natively_is_said(tmp_path, make, reason):
    model = make()
    name, notice = engine_of_auto(model, use_vllm=False)
    assert name == "transformers" and reason in str(notice) and "model.generate" in str(notice)
    row = _why(GRPOConfig(output_dir=str(tmp_path), use_cpu=True), model)
    assert reason in row


def test_vllms_options_are_said_to_be_unread_where_a_model_has_a_layout(build, caplog):
    build(make_model("qwen3"), vllm_engine_kwargs={"enforce_eager": True}).close()
    assert any("vllm_engine_kwargs={'enforce_eager': True} is not needed" in line for line in caplog.messages)
    with pytest.raises(ValueError, match=r"vllm_tensor_parallel_size=2 is not supported.*engine='vllm'"):
        build(make_model("qwen3"), vllm_tensor_parallel_size=2)


def test_vllms_options_are_not_lost_without_vllm(build, monkeypatch):
    monkeypatch.setattr(environment, "installed_version", lambda: None)
    with pytest.raises(ValueError, match=r"vllm_tensor_parallel_size=2 is not supported"):
        build(make_gpt2(), vllm_tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("options", "num_seqs", "share_of_heads"),
    [
        ({}, 16, 1.0),
        ({"max_num_seqs": 5}, 5, 1.0),
        ({"per_device_eval_batch_size": 40}, 40, 1.0),
        ({"vllm_tensor_parallel_size": 2}, 32, 0.5),
        ({"vllm_tensor_parallel_size": 8}, 128, 0.5),  # two heads: each is on four GPUs
        ({"per_device_eval_batch_size": 600}, 512, 1.0),
    ],
)
def test_the_kv_cache_that_a_rollout_fills(build, options, num_seqs, share_of_heads):
    shape = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32}
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 8}
    sizes = {**batch, "vllm_max_model_length": 40, **options}
    given = build(make_model("qwen3", **shape), engine="vllm", **sizes)["usable_kv_cache_bytes"]
    tokens = num_seqs * (64 + 64) + 64  # in blocks of 64, one more for each sequence, and one in all
    assert given == tokens * 3 * 2 * 2 * 32 * 4 * share_of_heads


def test_nothing_says_how_long_sequences_get(build):
    assert build(make_model("qwen3"), engine="vllm")["usable_kv_cache_bytes"] is None
    assert build(make_gpt2(), vllm_max_model_length=40)["usable_kv_cache_bytes"] is None


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"top_k": -1, "top_p": 1.0}, "processed_logprobs"),
        ({"top_p": 0.9}, "raw_logprobs"),
        ({"repetition_penalty": 1.2}, "raw_logprobs"),
        ({"generation_kwargs": {"min_p": 0.1}}, "raw_logprobs"),
        ({"top_p": 0.9, "temperature": 0.7}, "processed_logprobs"),  # neither has them
    ],
)
def test_vllm_starts_in_the_mode_that_tells_log_probs_of_the_policy(build, sampling, mode):
    assert build(make_model("qwen3"), engine="vllm", **sampling)["logprobs_mode"] == mode


@pytest.mark.parametrize("name", ["vllm", "rollout_server", "trtllm", "transformers"])
def test_other_engines_do_not_read_parts_of_weights(name, tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), engine=name, use_cpu=True)
    mesh = SimpleNamespace(num_weight_parts=4)
    with pytest.raises(ValueError, match=rf"engine='{name}' cannot generate where 4 processes.*shard=4"):
        build_engine(make_model("qwen3"), args, None, None, mesh)
