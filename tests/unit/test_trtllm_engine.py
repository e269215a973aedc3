"""TensorRT-LLM as an engine beyond the twelve points: what it is started with, what is refused by name."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_models import CONFIGS, config_of, make_model, make_prompts
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from trtllm_case import HostMemory, StandInEngine, arguments_for
from trtllm_stand_in import GPUS, NEWEST, OLDEST

from colocate.config.grpo_config import GRPOConfig
from colocate.engines.base import EngineLost
from colocate.engines.registry import EngineParts, engine_of, plugged_in
from colocate.options.distributions import BROUGHT_BY
from colocate.parallel.launching import without_launchers
from colocate.parallel.ray_cluster import VARIABLE, ClusterRequest, RayPlace
from colocate.types import SamplingParams
from colocate_trtllm import arguments as arguments_module
from colocate_trtllm.arguments import OWN_ARGUMENTS, check_engine_kwargs, llm_arguments, older_rope
from colocate_trtllm.options import ENGINE
from colocate_trtllm.server import WORKER
from processes import SOURCE, TRTLLM_SOURCE


@pytest.fixture
def parts(tmp_path):
    options = GRPOConfig(output_dir=str(tmp_path), engine="trtllm", use_cpu=True, bf16=False)
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    return EngineParts(make_model("qwen3"), options.engine_options("trtllm"), accelerator, SamplingParams(8))


# ── What is missing is said, with what to do ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("ray", r"needs the package ray, .* pip install 'ray>=2.40'"),
        (
            "tensorrt_llm",
            r"needs TensorRT-LLM, which is not installed here.*install --no-deps \. \./dist.*trtllm_python",
        ),
    ],
)
def test_a_missing_package_is_an_error_with_what_to_install(parts, missing, message, monkeypatch):
    monkeypatch.setattr(
        arguments_module.importlib.util, "find_spec", lambda name: None if name == missing else name
    )
    with pytest.raises(ImportError, match=message):
        ENGINE.make(parts)


def test_an_interpreter_that_is_not_there_is_refused(parts):
    pytest.importorskip("ray")
    parts.options.trtllm_python = "/nowhere/python"
    with pytest.raises(ValueError, match=r"trtllm_python='/nowhere/python' is no file on this node"):
        ENGINE.make(parts)


def test_a_run_without_ray_is_told_how_to_start(parts, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.delenv(VARIABLE, raising=False)
    parts.options.trtllm_python = sys.executable
    with pytest.raises(ValueError, match=r"not started in one. Start the run with --launcher ray"):
        ENGINE.make(parts)


def test_it_is_found_by_the_entry_point_of_its_distribution():
    assert engine_of("trtllm") is ENGINE
    assert BROUGHT_BY["trtllm"] == plugged_in()["trtllm"].dist.name == "colocate-trtllm"
    assert (TRTLLM_SOURCE.parent / "pyproject.toml").is_file()  # where `how_to_install` says


# ── Options ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", OWN_ARGUMENTS)
def test_arguments_that_a_run_determines_are_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=rf"trtllm_engine_kwargs has '{name}'=7, which is not for it: "):
        check_engine_kwargs({"enable_chunked_prefill": True, name: 7})


def test_what_is_not_determined_reaches_tensorrt_llm():
    cache = {"free_gpu_memory_fraction": 0.5, "enable_block_reuse": False}
    told = arguments_for(
        make_model("qwen3"),
        kv_cache_tokens=4096,
        page_size=64,
        engine_kwargs={"max_num_tokens": 2048, "kv_cache_config": cache},
    )
    assert told["max_num_tokens"] == 2048
    assert told["kv_cache_config"] == cache | {"max_tokens": 4096, "tokens_per_block": 64}
    # Its own limit of a prompt would be 1,024 tokens, however long a sequence may be.
    assert told["max_input_len"] == told["max_seq_len"] == 128
    for name, option in (("max_tokens", "kv_cache_tokens"), ("tokens_per_block", "page_size")):
        with pytest.raises(ValueError, match=rf"'{name}'=1, which is not for it: set {option}"):
            check_engine_kwargs({"kv_cache_config": {name: 1}})


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"vllm_tensor_parallel_size": 2}, "Set trtllm_tensor_parallel_size"),
        ({"vllm_gpu_memory_utilization": 0.4}, "free_gpu_memory_fraction"),
        ({"vllm_engine_kwargs": {"seed": 1}}, "Set trtllm_engine_kwargs"),
        ({"vllm_mode": "server"}, "Set engine='rollout_server'"),
    ],
)
def test_options_of_other_engines_are_refused_by_name(tmp_path, options, remedy):
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name}=.* not (read with engine='trtllm'|supported).*{remedy}"):
        GRPOConfig(output_dir=str(tmp_path), engine="trtllm", use_cpu=True, bf16=False, **options)


@pytest.mark.parametrize("name", ["trtllm_tensor_parallel_size", "trtllm_engine_kwargs", "trtllm_python"])
def test_its_options_are_said_to_be_unread_with_another_engine(tmp_path, name, caplog):
    value = {"trtllm_tensor_parallel_size": 2, "trtllm_engine_kwargs": {"a": 1}, "trtllm_python": "python"}[
        name
    ]
    with caplog.at_level(logging.WARNING, "colocate"):
        GRPOConfig(output_dir=str(tmp_path), engine="native", use_cpu=True, bf16=False, **{name: value})
    assert any(message.startswith(f"{name}=") and "TensorRT-LLM" in message for message in caplog.messages)


# ── The model's configuration, as transformers before 5.0 reads it ───────────────────────────────────────


OF_SEVERAL_KINDS = {"olmo3", "gemma3_text"}
"""Families that rotate layers of several kinds apart, for which the older form has no words."""


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OF_SEVERAL_KINDS])
def test_rotary_embeddings_are_told_in_the_older_form_too(name):
    """transformers reads the older form as well; from it alone it must come to the same embeddings."""
    config = config_of(name)
    told = json.loads((Path(llm_arguments_of(name)["model"]) / "config.json").read_text())
    older = {key: value for key, value in told.items() if key != "rope_parameters"}
    again = AutoConfig.for_model(older.pop("model_type"), **older)
    assert again.rope_parameters == config.rope_parameters
    assert told["rope_theta"] == config.rope_parameters["rope_theta"]


def llm_arguments_of(name: str) -> dict:
    return llm_arguments(make_model(name), max_len=64, max_num_seqs=4, tensor_parallel_size=1)


@pytest.mark.parametrize("name", sorted(OF_SEVERAL_KINDS))
def test_models_with_embeddings_of_several_kinds_are_refused(name):
    with pytest.raises(
        ValueError, match=r"of several kinds .* Set engine='native', 'vllm' or 'transformers'"
    ):
        llm_arguments_of(name)


def test_embeddings_of_several_kinds_are_refused():
    with pytest.raises(ValueError, match=r"of several kinds \(full_attention, sliding_attention\)"):
        older_rope({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}})
    assert older_rope({}) == {}


# ── Where it runs ────────────────────────────────────────────────────────────────────────────────────────


def test_the_servers_files_need_nothing_that_tensorrt_llm_pins():
    """Its environment has older releases of these packages, in which other files need not work."""
    blocked = ["transformers", "accelerate", "datasets", "peft", "safetensors", "numpy"]
    code = (
        "import sys; "
        f"sys.modules.update(dict.fromkeys({blocked!r})); "
        "from trtllm_package import install; install(); "
        "import colocate_trtllm.server, colocate_trtllm.weight_worker"
    )
    package = (
        "import sys, types\n"
        "def install():\n"
        "    for name in ('tensorrt_llm', 'tensorrt_llm._torch', 'tensorrt_llm._torch.utils',"
        " 'tensorrt_llm.llmapi', 'tensorrt_llm.llmapi.rlhf_utils'):\n"
        "        sys.modules[name] = types.ModuleType(name)\n"
        "    sys.modules['tensorrt_llm._torch.utils'].get_device_uuid = None\n"
        "    sys.modules['tensorrt_llm.llmapi.rlhf_utils'].WorkerExtension = object\n"
    )
    preamble = f"import types, sys; m = types.ModuleType('trtllm_package'); exec({package!r}, m.__dict__); "
    preamble += "sys.modules['trtllm_package'] = m; "
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}{os.pathsep}{TRTLLM_SOURCE}"}
    subprocess.run([sys.executable, "-c", preamble + code], env=environment, check=True)


def test_the_worker_is_found_by_its_name():
    module, _, name = WORKER.rpartition(".")
    assert (TRTLLM_SOURCE / (module.replace(".", "/") + ".py")).is_file() and name == "WeightWorker"


@given(
    st.dictionaries(
        st.sampled_from(
            ["SLURM_PROCID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_X", "PATH", "HOME"]
        ),
        st.text(),
    )
)
def test_launchers_variables_are_taken_out_and_no_others(environment):
    kept = without_launchers(environment)
    assert kept == {name: value for name, value in environment.items() if name in ("PATH", "HOME")}


def test_a_rank_leaves_a_share_of_its_gpu():
    ask = ClusterRequest(2, 8, on_gpus=True, shares=2)
    assert ask.bundles == [[{"CPU": 2.0, "GPU": 1.0}] * 8] * 2 and ask.sizes("CPU") == [16, 16]
    assert ClusterRequest(2, 8, on_gpus=True).sizes("CPU") == [8, 8]
    place = RayPlace("10.0.0.1:6379", "colocate-1", ("a-node0", "a-node1"), (8, 8), shares=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, place.as_variable()[VARIABLE])
        assert RayPlace.of_this_rank() == place and place.gpu_share == 0.5
        patch.delenv(VARIABLE)
        assert RayPlace.of_this_rank() is None


def test_workers_elsewhere_than_the_ranks_are_an_error(monkeypatch):
    monkeypatch.setattr(HostMemory, "__init__", lambda self: setattr(self, "gpu", GPUS[5]))
    with pytest.raises(RuntimeError, match=rf"workers are on {GPUS[0]} and its ranks on {GPUS[5]}"):
        StandInEngine.make(make_model("qwen3"))


# ── Log-probs, and what comes to a bad end ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("release", "has_logprobs"), [(NEWEST, True), (OLDEST, False)])
def test_log_probs_of_another_distribution_are_not_passed_on(release, has_logprobs, caplog):
    engine = StandInEngine.make(make_model("qwen3"), release=release)
    try:
        engine.wake_up()
        for _ in range(2):
            (completion,) = engine.generate(make_prompts([4]), SamplingParams(5, temperature=0.7))
            assert (completion.logprobs is not None) == has_logprobs
        (plain,) = engine.generate(make_prompts([4]), SamplingParams(5))
        assert plain.logprobs is not None
    finally:
        engine.close()
    warnings = [message for message in caplog.messages if "are not log-probs of the policy" in message]
    assert len(warnings) == (0 if has_logprobs else 1)
    assert (
        has_logprobs
        or "Install a release of TensorRT-LLM whose SamplingParams have logprobs_mode" in warnings[0]
    )


def test_a_completion_that_is_given_up_unasked_is_a_lost_engine(monkeypatch):
    engine = StandInEngine.make(make_model("qwen3"))
    try:
        engine.wake_up()
        inner = engine.server.inner._llm
        generate = inner.generate_async

        def cut_short(*arguments, **options):
            output = generate(*arguments, **options)
            output.abort()
            return output

        monkeypatch.setattr(inner, "generate_async", cut_short)
        with pytest.raises(EngineLost, match=r"gave a completion up after 0 tokens"):
            engine.generate(make_prompts([4]), SamplingParams(5))
    finally:
        engine.close()


def test_an_error_of_a_request_is_told_and_leaves_nothing_behind(monkeypatch):
    engine = StandInEngine.make(make_model("qwen3"))
    try:
        engine.wake_up()
        inner = engine.server.inner._llm
        with monkeypatch.context() as patch:
            patch.setattr(type(inner), "_draws", lambda *_: (_ for _ in ()).throw(ValueError("no room")))
            with pytest.raises(RuntimeError, match=r"could not draw a completion: ValueError: no room"):
                engine.generate(make_prompts([4, 5]), SamplingParams(5))
        assert engine.server.call("status").num_running == 0
        assert len(engine.generate(make_prompts([4]), SamplingParams(5))[0].token_ids) == 5
    finally:
        engine.close()
