"""The option `rollout_precision`: what it chooses, and what it refuses with which words."""

from __future__ import annotations

import logging

import pytest
import torch
from eight_bit_models import ONE_ROUNDING, with_8bit_kv, with_8bit_products
from engine_models import assert_logprobs_are_the_models, make_lora, make_model, make_prompts
from quantized_models import make_4bit_model

from colocate import GRPOConfig
from colocate.engines.native.eight_bit_weights import EightBitWeights, check_gpu
from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.kept_pages import KeptPages
from colocate.engines.native.kv_cache import KVCache
from colocate.kernels.fp8 import e4m3, int8
from colocate.types import SamplingParams
from colocate.weights.layouts import Layout, WeightPart, layout_for
from colocate.weights.shapes import ModelShapes
from colocate.weights.weight_parts import split_weights


def make(tmp_path, **options) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)


@pytest.mark.parametrize("precision", ["fp8_kv", "fp8"])
def test_tokens_are_corrected_one_by_one(tmp_path, precision, caplog):
    with caplog.at_level(logging.WARNING):
        config = make(tmp_path, rollout_precision=precision, max_completion_length=2048)
    assert config.vllm_importance_sampling_mode == "token_truncate"
    s, left = {"fp8_kv": (0.08, "0%"), "fp8": (0.26, "0%")}[precision]
    assert f"exp(-{s}² · 2048) = {left} of the samples" in caplog.text


def test_16_bits_keep_trls_correction(tmp_path):
    assert make(tmp_path).vllm_importance_sampling_mode == "sequence_mask"


@pytest.mark.parametrize("mode", ["token_mask", "token_truncate"])
def test_a_correction_of_tokens_stays(tmp_path, mode):
    config = make(tmp_path, rollout_precision="fp8", vllm_importance_sampling_mode=mode)
    assert config.vllm_importance_sampling_mode == mode


def test_a_correction_of_sequences_is_refused_with_the_arithmetic(tmp_path):
    with pytest.raises(ValueError, match=r"'sequence_truncate' weighs whole.*0\.26 · √512 = 5\.9.*0%"):
        make(
            tmp_path,
            rollout_precision="fp8",
            vllm_importance_sampling_mode="sequence_truncate",
            max_completion_length=512,
        )


def test_no_correction_is_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        make(tmp_path, rollout_precision="fp8", vllm_importance_sampling_correction=False)
    assert "trains on completions of another policy" in caplog.text


@pytest.mark.parametrize("engine", ["vllm", "rollout_server", "transformers"])
def test_other_engines_do_not_read_it(tmp_path, engine):
    with pytest.raises(ValueError, match=f"rollout_precision='fp8_kv' is not read with engine='{engine}'"):
        make(tmp_path, rollout_precision="fp8_kv", engine=engine)


@pytest.fixture
def on_gpu(monkeypatch):
    """A backend that takes layouts to be on a GPU of this name and compute capability."""
    pytest.importorskip("triton")
    from colocate.engines.native.triton_backend import TritonBackend

    def check(precision: str, name: str, capability: tuple[int, int], **sizes: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(Layout, "device", torch.device("cuda", 0))
        model = make_model("qwen3", **{"hidden_size": 64, "head_dim": 16, **sizes})
        TritonBackend().check_precision(precision, layout_for(model))

    return check


def test_an_old_gpu_is_refused_with_the_reason(on_gpu):
    with pytest.raises(ValueError, match=r"compute capability 8\.9 on; cuda:0, A100, has 8\.0"):
        on_gpu("fp8", "A100", (8, 0))
    on_gpu("fp8_kv", "A100", (8, 0))
    on_gpu("bf16", "A100", (8, 0))
    on_gpu("fp8", "L4", (8, 9))


def test_matrices_that_products_in_8_bits_do_not_take_are_refused(on_gpu):
    """o is not among them: it reads 4 · 12 columns of heads, and q, k and v have 8 · 12 rows."""
    with pytest.raises(ValueError, match=r"multiples of 16, and those of q, .* have 24, 40\. Set .*fp8_kv"):
        on_gpu("fp8", "H100", (9, 0), hidden_size=24, intermediate_size=40)
    on_gpu("fp8_kv", "H100", (9, 0), hidden_size=24, intermediate_size=40)
    on_gpu("fp8", "H100", (9, 0), head_dim=6, num_key_value_heads=2)


def test_a_rank_is_judged_by_its_part():
    model = make_model("llama", hidden_size=64, intermediate_size=48, vocab_size=98)
    check_gpu("fp8", layout_for(model), (9, 0), "")
    split_weights(model, WeightPart(0, 2))
    with pytest.raises(ValueError, match="have 24"):
        check_gpu("fp8", layout_for(model), (9, 0), "")


def test_the_engine_knows_no_other_precision():
    with pytest.raises(ValueError, match="rollout_precision='fp16' is unknown; it is one of bf16"):
        NativeEngine(make_model("qwen3"), rollout_precision="fp16")


@pytest.mark.parametrize(("num_rows", "is_copied"), [(1, True), (16, False), (33, True), (256, False)])
def test_rows_of_a_product_are_filled_up_if_they_must_be(num_rows, is_copied):
    pytest.importorskip("triton")
    from colocate.engines.native.triton_backend import _filled_up

    values = torch.randn(num_rows, 32).to(e4m3.DTYPE)
    filled = _filled_up(values)
    assert (filled.data_ptr() != values.data_ptr()) == is_copied and len(filled) % 16 == 0
    assert torch.equal(filled[:num_rows].view(torch.uint8), values.view(torch.uint8))
    assert not filled[num_rows:].view(torch.uint8).any()


def test_a_page_takes_the_bytes_that_are_planned():
    model = make_model("qwen3", head_dim=32)
    cache = KVCache(num_layers=2, num_kv_heads=2, head_dim=32, page_size=16)
    planned = ModelShapes.of(model).kv_bytes_per_token(int8.DTYPE)
    assert cache.page_bytes(int8.DTYPE) == 16 * planned == 16 * 2 * 2 * 2 * (32 + 1)
    cache.allocate(3, int8.DTYPE, torch.device("cpu"))
    assert cache.num_bytes == cache.bytes_of(3) == 3 * 16 * planned


@pytest.mark.parametrize("num_parts", [1, 2])
def test_weights_in_8_bits_take_the_bytes_that_are_planned(num_parts):
    """Beside the two factors of each of the three groups of a layer."""
    model = make_model("llama", vocab_size=98, hidden_size=512, intermediate_size=2048)
    planned = ModelShapes.of(model).part(num_parts).num_8bit_weights
    if num_parts > 1:
        split_weights(model, WeightPart(0, num_parts))
    layout = layout_for(model)
    assert EightBitWeights().needed_bytes(layout) == planned + len(layout.layers) * 3 * 2 * 512


def test_pages_are_copied_and_kept_with_their_scales():
    cache = KVCache(num_layers=2, num_kv_heads=2, head_dim=8, page_size=4)
    cache.allocate(6, int8.DTYPE, torch.device("cpu"))
    for layer in range(2):
        for tensor in cache.layer(layer):
            tensor.random_(0, 256)
            int8.scales_of(tensor).random_(0, 255)
    before = cache.read_pages([1, 4])
    cache.copy_pages([1, 4], [0, 2])
    assert torch.equal(cache.read_pages([0, 2]), before)
    kept = KeptPages(cache, [0, 2], b"")
    cache.allocate(6, int8.DTYPE, torch.device("cpu"))
    assert not cache.read_pages([3, 5]).any()
    kept.restore(cache, {0: 3, 2: 5})
    assert torch.equal(cache.read_pages([3, 5]), before)


@pytest.mark.parametrize("others", [(int8.DTYPE, torch.bfloat16), (torch.bfloat16, int8.DTYPE)])
def test_pages_of_another_type_lose_their_names(others):
    """What was stored in one type is never read in another; in its own it stays, scales included."""
    cpu, (before, after) = torch.device("cpu"), others
    cache = KVCache(num_layers=2, num_kv_heads=2, head_dim=8, page_size=4)
    cache.allocate(3, before, cpu)
    (page,) = cache.pool.allocate(1)
    cache.pool.name(page, b"name")
    cache.pool.release([page])
    content = cache.read_pages([page]).random_(0, 120)
    cache.write_pages([page], content)
    cache.allocate(6, before, cpu, has_room_to_copy=True)
    assert cache.pool.find([b"name"]) == [page]
    assert torch.equal(cache.read_pages([page]), content)
    cache.allocate(6, after, cpu, has_room_to_copy=True)
    assert not cache.pool.has_names and cache.pool.num_free == 6
    assert not cache.read_pages([page]).any()


@pytest.mark.parametrize("precision", ["fp8_kv", "fp8"])
def test_a_preempted_sequence_draws_what_it_would_have(precision):
    """Keys and values are read in 8 bits by prompts, too, so that those computed anew are the same."""
    prompts = make_prompts([5, 9, 3], 3)
    sampling = SamplingParams(max_tokens=24, temperature=1.0, seed=4)
    drawn = []
    for kv_cache_tokens in (None, 64):
        engine = NativeEngine(
            make_model("qwen3"),
            max_num_seqs=9,
            page_size=4,
            kv_cache_tokens=kv_cache_tokens,
            rollout_precision=precision,
        )
        engine.wake_up()
        drawn.append([completion.token_ids for completion in engine.generate(prompts, sampling)])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "make_base",
    [
        lambda: make_lora("qwen2"),
        lambda: make_4bit_model("qwen3"),
        lambda: make_model("olmo2"),
        lambda: make_lora("gemma3_text"),
    ],
    ids=["lora", "4 bits", "olmo2", "gemma3 lora"],
)
def test_adapters_are_added_and_4_bits_are_dequantised_before(make_base):
    reference = make_base()
    engine = NativeEngine(reference, max_num_seqs=4, page_size=4, rollout_precision="fp8")
    prompts = make_prompts([5, 9, 3], 2)
    engine.wake_up()
    completions = engine.generate(prompts, SamplingParams(max_tokens=12, temperature=1.0, seed=5))
    engine.close()
    with_8bit_products(with_8bit_kv(reference))
    assert_logprobs_are_the_models(reference, prompts, completions, atol=ONE_ROUNDING)


def test_weights_that_are_gathered_do_not_count_in_what_is_kept(monkeypatch):
    """Those of `decode_shard` are given back after the engine has fallen asleep, all of them."""

    class Gathered(NativeEngine):
        rollout_weight_bytes = 10**6

    engine = Gathered(make_model("qwen3"), max_num_seqs=4, page_size=4, rollout_precision="fp8")
    engine.wake_up()
    engine.generate(make_prompts([5]), SamplingParams(max_tokens=2))
    kept: list[int] = []
    in_8bit = engine._in_8bit.num_bytes
    monkeypatch.setattr(engine._in_8bit, "free", kept.append)
    monkeypatch.setattr(engine._cache, "free", kept.append)
    engine.sleep(in_8bit + 1000)
    assert in_8bit > 0 and kept == [in_8bit + 1000, 1000]


def test_weights_in_8_bits_are_the_trainers_of_now():
    """They are made anew for every rollout, and asleep the engine has no memory for them."""
    model = make_model("qwen3")
    engine = NativeEngine(model, max_num_seqs=4, page_size=4, rollout_precision="fp8")
    prompts, sampling = make_prompts([5, 9], 2), SamplingParams(max_tokens=10, temperature=1.0, seed=5)
    engine.wake_up()
    before = engine.generate(prompts, sampling)
    assert engine.rollout_weight_bytes > 0
    engine.sleep()
    assert engine.rollout_weight_bytes == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.update_weights(version=1)
    engine.wake_up()
    after = engine.generate(prompts, sampling)
    engine.close()
    assert [c.logprobs for c in after] != [c.logprobs for c in before]
    assert_logprobs_are_the_models(with_8bit_products(with_8bit_kv(model)), prompts, after, atol=ONE_ROUNDING)
