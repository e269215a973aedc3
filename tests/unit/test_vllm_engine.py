"""What the in-process vLLM engine decides before vLLM starts; none of this needs vLLM."""

import gc
import itertools
import json
import logging
import os
import sys
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from engine_models import make_gpt2, make_lora, make_model
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from quantized_models import make_4bit_model

from colocate.engines.requests import derived_seed
from colocate.engines.vllm import arguments, environment, internals, shared_weights
from colocate.engines.vllm import engine as engine_module
from colocate.engines.vllm.arguments import OWN_ARGUMENTS
from colocate.engines.vllm.groups import check_group_size
from colocate.weights.layouts import layout_for
from colocate.weights.shared_views import fuse_parameters
from colocate.weights.source import WeightSource

# ── Versions ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("version", ["0.25.0", "0.25.1", "0.32.0", "0.33.4", "0.33.0+cpu"])
def test_supported_versions_say_nothing(version):
    assert environment.check_version(Version(version)) is None


def test_newer_ones_are_untested_and_older_ones_refused(monkeypatch, caplog):
    monkeypatch.setattr(environment, "installed_version", lambda: Version("0.34.0"))
    with caplog.at_level(logging.WARNING, "colocate"):
        assert environment.check_installed() == Version("0.34.0")
    assert "vLLM 0.34.0 is untested here: 0.25 to 0.33" in caplog.text
    monkeypatch.setattr(environment, "installed_version", lambda: Version("0.24.9"))
    with pytest.raises(ImportError, match=r"vLLM 0\.24\.9 is too old: 0\.25 to 0\.33.*pip install"):
        environment.check_installed()


def test_a_missing_vllm_is_an_error_with_remedies(monkeypatch):
    monkeypatch.setattr(environment, "installed_version", lambda: None)
    with pytest.raises(ImportError, match=r"pip install 'vllm>=0\.25,<0\.34'.*engine='native'"):
        engine_module.VLLMEngine(make_model("qwen3"))


# ── Arguments ────────────────────────────────────────────────────────────────────────────────────────────


GIB = 2**30


@pytest.fixture
def device_memory(monkeypatch):
    """Sets the bytes that a device of 140 GiB seems to have free."""
    return lambda free: monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 140 * GIB))


@pytest.fixture
def with_vllm(monkeypatch):
    monkeypatch.setattr(engine_module, "check_installed", lambda: Version("0.32.0"))


@pytest.mark.parametrize("name", sorted(OWN_ARGUMENTS))
def test_arguments_that_are_ours_are_refused_by_name(name, with_vllm):
    with pytest.raises(ValueError, match=f"vllm_engine_kwargs has '{name}'=1"):
        engine_module.VLLMEngine(make_model("qwen3"), engine_kwargs={name: 1})


def test_groups_must_divide_the_processes(with_vllm):
    with pytest.raises(ValueError, match=r"vllm_tensor_parallel_size=2 .*: 1 processes = 0 × 2 \+ 1"):
        engine_module.VLLMEngine(make_model("qwen3"), tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"8 processes = 2 × 3 \+ 2\. Set it to one of \[1, 2, 4, 8\]"):
        check_group_size(3, 8)
    check_group_size(4, 8)


def test_memory_is_a_share_of_what_is_free_less_what_training_will_take():
    assert arguments.memory_share(100 * GIB, 140 * GIB, reserve_bytes=20 * GIB) == pytest.approx(70 / 140)
    with pytest.raises(ValueError, match=r"0\.9 × 10\.00 GiB free - 12\.00 GiB .* = -3\.00 GiB"):
        arguments.memory_share(10 * GIB, 140 * GIB, reserve_bytes=12 * GIB)


@given(num_seqs=st.integers(1, 2000), num_tokens=st.integers(1, 5000))
def test_a_whole_kv_cache_holds_every_sequence_and_little_more(num_seqs, num_tokens):
    tokens = arguments.whole_kv_cache_bytes(num_seqs, num_tokens, bytes_per_token=1)
    blocks = tokens // arguments.BLOCK_TOKENS - 1  # vLLM keeps one for padding
    assert num_tokens <= blocks // num_seqs * arguments.BLOCK_TOKENS < num_tokens + 2 * arguments.BLOCK_TOKENS


def unstarted(**attributes):
    """An engine without a vLLM, with these attributes."""
    engine = object.__new__(engine_module.VLLMEngine)
    vars(engine).update({"_device": torch.device("cuda"), "_frees_memory": True, **attributes})
    return engine


@pytest.mark.parametrize(("usable", "is_given"), [(19, True), (21, False), (None, False)])
def test_no_more_kv_cache_than_is_of_use(usable, is_given, monkeypatch, device_memory):
    source = SimpleNamespace(wants_sharing=True)
    engine = unstarted(
        _source=SimpleNamespace(num_bytes=10 * GIB), _group=SimpleNamespace(size=2), _shared=source
    )
    device_memory(free=100 * GIB)
    usable_bytes = None if usable is None else usable * GIB
    kwargs = engine._memory_kwargs(None, 50 * GIB, usable_bytes, {})
    assert kwargs.pop("gpu_memory_utilization") == pytest.approx(40 / 140)
    assert kwargs == ({"kv_cache_memory_bytes": usable_bytes} if is_given else {})
    # A copy of the weights takes its part of the share first: half of 40 - 10 / 2 GiB is left.
    source.wants_sharing = False
    assert "kv_cache_memory_bytes" not in engine._memory_kwargs(None, 50 * GIB, 18 * GIB, {})
    assert "kv_cache_memory_bytes" in engine._memory_kwargs(None, 50 * GIB, 17 * GIB, {})
    source.wants_sharing = True
    # An engine that never sleeps has 0.3 × 140 GiB, and half of that for a KV cache of a given size.
    engine._frees_memory = False
    kwargs = engine._memory_kwargs(None, 50 * GIB, usable_bytes, {})
    size = {"kv_cache_memory_bytes": usable_bytes} if is_given else {}
    assert kwargs == {"gpu_memory_utilization": 0.3, **size}
    # Not beside a size or a share that the user has given.
    assert engine._memory_kwargs(0.3, 0, 19 * GIB, {}) == {"gpu_memory_utilization": 0.3}
    assert engine._memory_kwargs(None, 0, 19 * GIB, {"kv_cache_memory_bytes": 5}) == {}


@pytest.mark.parametrize("make", [make_gpt2, lambda: make_model("qwen3")], ids=["no layout", "not fused"])
def test_a_copy_of_any_model_has_a_share(make, device_memory):
    source = SimpleNamespace(wants_sharing=False)
    engine = unstarted(_source=WeightSource(make()), _group=SimpleNamespace(size=1), _shared=source)
    device_memory(free=100 * GIB)
    assert engine._memory_kwargs(None, 0, None, {}) == {"gpu_memory_utilization": pytest.approx(90 / 140)}
    assert engine._memory_kwargs(None, 0, GIB, {})["kv_cache_memory_bytes"] == GIB


@pytest.mark.parametrize(("free_gib", "is_emptied"), [(10.5, True), (11.5, False)])
def test_pytorch_gives_back_only_what_waking_up_needs(free_gib, is_emptied, monkeypatch, device_memory):
    calls = []
    engine = unstarted(_is_awake=False, _is_stale=False, shares_weights=False)
    monkeypatch.setattr(internals, "unmapped_bytes", lambda: 10 * GIB)

    def wake_up(tags):
        calls.extend(tags)
        torch.cuda.empty_cache()  # as vLLM does, of late in waking up, too

    engine._llm = SimpleNamespace(wake_up=wake_up)
    device_memory(free=int(free_gib * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    engine.wake_up()
    assert calls == ["empty"] * is_emptied + ["weights", "kv_cache"]
    torch.cuda.empty_cache()
    assert calls[-1] == "empty"  # as before


@given(seed=st.integers(), key=st.integers(), sample=st.integers(0, 1000))
def test_each_completion_has_a_seed_of_its_own(seed, key, sample):
    own = derived_seed(seed, key, sample, num_bits=63)
    assert 0 <= own < 2**63
    others = ((seed + 1, key, sample), (seed, key + 1, sample), (seed, key, sample + 1))
    assert own not in [derived_seed(*other, num_bits=63) for other in others]


def test_seeds_stay_what_they_were():
    """A run that is resumed with a later version goes on with the same draws."""
    assert derived_seed(3, 5, 1, num_bits=63) == 398460107012215196
    assert derived_seed(3, 5, num_bits=62) == 2469111712395213642


def test_the_configuration_has_the_same_place_in_every_run(tmp_path, monkeypatch):
    monkeypatch.setattr(arguments.tempfile, "tempdir", str(tmp_path))
    first = arguments.config_directory(make_model("qwen3"))
    assert arguments.config_directory(make_model("qwen3", seed=1)) == first
    assert arguments.config_directory(make_model("qwen3", num_hidden_layers=3)) != first
    assert [path.name for path in first.iterdir()] == ["config.json"]
    # Weights come dequantised, so vLLM must not hear of their quantisation.
    config = json.loads((arguments.config_directory(make_4bit_model("qwen3")) / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["Qwen3ForCausalLM"]


# ── Process ──────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_of_the_launch_stays_in_the_environment(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    with internals.launched(torch.device("cuda", 1)):
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == ("0", "1", "1")
        assert int(os.environ["MASTER_PORT"]) > 0
    assert dict(os.environ) == before


def test_what_vllm_sets_for_the_process_is_put_back(monkeypatch):
    from triton import knobs

    monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", "0")  # where Triton keeps what is set

    before = torch.get_float32_matmul_precision(), torch.get_num_threads(), torch.set_num_threads
    with pytest.raises(KeyError), internals.process_settings_kept():
        torch.set_float32_matmul_precision("high" if before[0] != "high" else "medium")
        torch.set_num_threads(before[1] + 1)
        torch.set_num_threads = None
        knobs.runtime.jit_post_compile_hook = print
        knobs.autotuning.print = True
        raise KeyError("as if vLLM had failed to start")
    after = torch.get_float32_matmul_precision(), torch.get_num_threads(), torch.set_num_threads
    assert after == before
    assert knobs.runtime.jit_post_compile_hook is None and not knobs.autotuning.print


def test_a_launchers_environment_is_kept(monkeypatch):
    launcher = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    with internals.launched(torch.device("cuda", 1)):
        assert {name: os.environ[name] for name in launcher} == launcher


@pytest.mark.parametrize(
    ("before", "without"),
    [
        ("expandable_segments:True", "expandable_segments:False"),
        ("max_split_size_mb:9, expandable_segments:True", "max_split_size_mb:9,expandable_segments:False"),
        ("max_split_size_mb:9", "max_split_size_mb:9,expandable_segments:False"),
    ],
)
def test_only_expandable_segments_are_turned_off(before, without):
    assert internals._with_expansion(before, False) == without
    assert internals._with_expansion(before, True) == without.replace("False", "True")


class Pool:
    """Stands for PyTorch's, which must never be dropped."""

    def snapshot(self):
        return [{"allocated_size": 20, "total_size": 32}, {"allocated_size": 0, "total_size": 64}]


def test_memory_is_given_back_once_and_pools_are_never_dropped(monkeypatch):
    given_back = []
    pool = Pool()
    data = {i: SimpleNamespace(handle=(0, 10 * i), is_asleep=i == 2) for i in (1, 2, 3)}
    allocator = SimpleNamespace(allocator_and_pools={"weights": (pool, None)}, pointer_to_data=data)
    kind = SimpleNamespace(instance=allocator, get_instance=itertools.repeat(allocator).__next__)
    modules = {
        "vllm.device_allocator.cumem": SimpleNamespace(
            CuMemAllocator=kind, unmap_and_release=given_back.append
        ),
        "vllm.model_executor.layers.rotary_embedding": SimpleNamespace(_ROPE_DICT={"key": "angles"}),
    }
    for name, module in modules.items():
        for parent in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
            monkeypatch.setitem(sys.modules, parent, SimpleNamespace(__path__=[]))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(internals, "_kept_pools", [])
    assert internals.pooled_bytes() == (20, 96)
    assert internals.unmapped_bytes() == 20
    internals.keep_pools()
    assert not allocator.allocator_and_pools  # vLLM finds none to drop
    allocator.allocator_and_pools["kv_cache"] = [(Pool(), None), (Pool(), None)]  # the next engine's
    assert internals.pooled_bytes() == (60, 288)
    allocator.allocator_and_pools.clear()
    internals.free_pools()
    assert given_back == [(0, 10), (0, 30)] and not data
    is_alive = weakref.ref(pool)
    del pool, allocator, kind, modules
    monkeypatch.undo()
    gc.collect()
    assert is_alive() is not None


# ── Sharing ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda: make_model("qwen3"), {}, "on the device 'cpu'"),
        (lambda: make_model("qwen3").to("meta"), {"tensor_parallel_size": 2}, "a part of every matrix"),
        (lambda: make_lora("qwen3").to("meta"), {}, "the policy has adapters, which are merged"),
        (lambda: make_model("qwen3").to("meta"), {"model_impl": "transformers"}, "its own parameters"),
        (lambda: make_model("qwen3").to("meta"), {}, "vocabulary of 97 tokens to a multiple of 64"),
        (lambda: make_model("qwen3", vocab_size=128).to("meta"), {}, None),
    ],
)
def test_why_weights_cannot_be_shared(make, options, reason, monkeypatch):
    if "cpu" not in str(reason):  # no CUDA here: a device without memory stands in for it
        monkeypatch.setattr(shared_weights, "SHARING_DEVICE", "meta")
    options = {"tensor_parallel_size": 1, "model_impl": "vllm", **options}
    why = shared_weights.why_not_shared(make(), **options)
    assert (why is None) if reason is None else (reason in why)


def test_parameters_are_fused_before_vllm_has_its_pools(with_vllm, monkeypatch):
    # What is allocated while vLLM loads would be discarded when it sleeps.
    class Started(Exception):
        """Raised in place of vLLM's start."""

    monkeypatch.setattr(shared_weights, "SHARING_DEVICE", "cpu")
    monkeypatch.setattr(engine_module.VLLMEngine, "_start", Mock(side_effect=Started))
    model = make_model("qwen3", vocab_size=128)
    with pytest.raises(RuntimeError, match="not slices of one storage"):
        shared_weights.vllm_views(model)
    with pytest.raises(Started):
        engine_module.VLLMEngine(model)
    assert shared_weights.vllm_views(model)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_vllms_first_copy_has_the_size_of_the_model(name):
    model = make_model(name)
    fuse_parameters(layout_for(model))
    assert shared_weights.num_bytes(model) == sum(p.nbytes for p in model.parameters())


def test_a_share_of_memory_is_corrected_for_weights_that_vllm_counts_twice(monkeypatch):
    model = make_model("qwen3")
    engine = unstarted(_shared=shared_weights.SharedWeights(model, wants_sharing=True))
    fuse_parameters(layout_for(model))
    size = shared_weights.num_bytes(model)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * size, 10 * size))
    for is_counted, share in ((True, 0.4), (False, 0.5)):
        monkeypatch.setattr(internals, "counts_freed_weights", lambda is_counted=is_counted: is_counted)
        assert engine._utilization(0.5) == pytest.approx(share)
    monkeypatch.setattr(internals, "counts_freed_weights", lambda: True)
    assert engine._utilization(0.1) > 0
    engine._shared.wants_sharing = False
    assert engine._utilization(0.5) == 0.5


@pytest.mark.parametrize(
    ("make", "device", "reason"),
    [(make_model, "cuda", "on the device 'cpu'"), (make_lora, "cpu", "the policy has adapters")],
)
def test_sharing_asked_for_and_impossible_is_an_error(make, device, reason, with_vllm, monkeypatch):
    monkeypatch.setattr(shared_weights, "SHARING_DEVICE", device)
    with pytest.raises(ValueError, match=rf"vllm_weights='shared' is not possible: {reason}.*'auto'"):
        engine_module.VLLMEngine(make("qwen3"), weights="shared")


@pytest.mark.parametrize(("asked", "level"), [("auto", "INFO"), ("shared", "WARNING")])
def test_a_vllm_whose_parameters_do_not_match_starts_once_and_copies(
    asked, level, with_vllm, monkeypatch, caplog
):
    started = []

    def start(engine, *_, **__):
        # As the loader does when it finds that vLLM keeps its parameters in another form.
        started.append(engine._shared.wants_sharing)
        engine._shared.reason = "lm_head.weight has shape (192, 32) in vLLM and (128, 32) in the trainer"
        return SimpleNamespace(apply_model=lambda function: [4096])

    monkeypatch.setattr(shared_weights, "SHARING_DEVICE", "cpu")
    monkeypatch.setattr(engine_module.VLLMEngine, "_start", start)
    monkeypatch.setattr(internals, "kv_cache_bytes", lambda llm: 0)
    monkeypatch.setattr(internals, "max_model_len", lambda llm: 128)
    monkeypatch.setattr(engine_module.atexit, "register", lambda *_: None)
    with caplog.at_level("INFO", "colocate"):
        engine = engine_module.VLLMEngine(make_model("qwen3", vocab_size=128), weights=asked)
    assert started == [True] and not engine.shares_weights
    (record,) = caplog.records
    assert record.levelname == level and "copy of the weights, because lm_head.weight has" in record.message


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama-biases"])
def test_parameters_that_moved_are_noticed(name):
    model = make_model(name)
    fuse_parameters(layout_for(model))
    source = shared_weights.SharedWeights(model, wants_sharing=True, shared=shared_weights.vllm_views(model))
    source.check_in_place()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    source.check_in_place()
    model.model.layers[0].mlp.down_proj.weight.data = model.model.layers[0].mlp.down_proj.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"1 of .*model\.layers\.0\.mlp\.down_proj\.weight.*'buckets'"):
        source.check_in_place()
    model.double().float()
    with pytest.raises(RuntimeError, match="moved after vLLM started"):
        source.check_in_place()
