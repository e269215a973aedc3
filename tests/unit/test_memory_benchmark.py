"""The memory benchmark: its models, its claims, and the ballast that enforces the cap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import device_watch
from benchmarks.memory import cases as memory_cases
from benchmarks.memory import handover
from benchmarks.memory import run as memory_run
from benchmarks.memory import suite as memory
from colocate.weights.layouts import layout_for
from colocate.weights.shared_views import fuse_parameters

GIB = 2**30
MODELS = {"llama-3.1-8b": 8_030_261_248, "qwen3-32b": 32_762_123_264, "qwen2.5-14b": 14_770_033_664}


@pytest.mark.parametrize(("model", "num_parameters"), MODELS.items())
def test_models_have_the_published_number_of_parameters(model: str, num_parameters: int) -> None:
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(memory_cases.config_of(model))
    assert sum(p.numel() for p in made.parameters()) == num_parameters


def small(model: str) -> Any:
    """The configuration with everything but the sizes."""
    config = memory_cases.config_of(model)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 64, 128, 2
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    config.vocab_size, config.max_position_embeddings = 96, 16384
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return config


@pytest.mark.parametrize("model", MODELS)
def test_model_made_layer_by_layer_is_the_model(model: str) -> None:
    made = memory_cases.make_model(small(model), "lora", torch.device("cpu"))
    usual = AutoModelForCausalLM.from_config(small(model), dtype=torch.bfloat16)
    usual.load_state_dict(made.state_dict())
    ids = torch.arange(1, 90)[None]
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, usual(ids).logits, rtol=0, atol=0)
    assert all(0.015 < p.float().std() < 0.025 for p in made.parameters() if p.ndim > 1)
    addresses = [p.data_ptr() for p in made.parameters()]
    fuse_parameters(layout_for(made))
    assert [p.data_ptr() for p in made.parameters()] == addresses, "its projections were not fused yet"


def test_tied_head_is_the_embedding() -> None:
    made = memory_cases.make_model(memory_cases.config_of("tiny"), "full", torch.device("cpu"))
    assert made.lm_head.weight is made.model.embed_tokens.weight


def test_quantized_model_has_a_layout_and_four_bits() -> None:
    pytest.importorskip("bitsandbytes")
    config = memory_cases.config_of("tiny")
    made = memory_cases.make_model(config, "qlora", torch.device("cpu"))
    plain = memory_cases.make_model(memory_cases.config_of("tiny"), "lora", torch.device("cpu"))
    for quantized, layer in zip(layout_for(made).layers, layout_for(plain).layers, strict=True):
        groups = zip(quantized.projection_groups(), layer.projection_groups(), strict=True)
        for four_bits, whole in (pair for group in groups for pair in zip(*group, strict=True)):
            assert (
                four_bits.weight.numel() * 2 == whole.weight.numel() and four_bits.weight.dtype == torch.uint8
            )
    # The same random numbers, so quantising has changed the logits and not much.
    ids = torch.arange(10, 40)[None]
    with torch.no_grad():
        difference = (made(ids).logits - plain(ids).logits).float().std()
        assert 0 < difference < 0.3 * plain(ids).logits.float().std()


@pytest.mark.parametrize(("free", "leave"), [(140 * GIB, 80 * 10**9), (80 * 10**9, 80 * 10**9), (3, 1)])
def test_ballast_leaves_the_cap_or_less_than_a_unit_below(free: int, leave: int) -> None:
    unit = device_watch.BALLAST_UNIT_BYTES
    size = device_watch.ballast_bytes(free, leave)
    assert size % unit == 0 and leave - unit < free - size <= leave


def test_a_gpu_smaller_than_the_cap_is_refused() -> None:
    with pytest.raises(RuntimeError, match="smaller than the cap"):
        device_watch.ballast_bytes(10, 11)


@pytest.mark.gpu
def test_watch_sees_what_others_take_under_the_cap() -> None:
    watch = device_watch.DeviceWatch(leave_bytes=4 * GIB)
    try:
        assert 4 * GIB - device_watch.BALLAST_UNIT_BYTES < watch.free_bytes <= 4 * GIB
        watch.peak_bytes()
        block = torch.ones(GIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        assert watch.peak_bytes() >= GIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
        del block
    finally:
        watch.close()
        torch.cuda.empty_cache()


def test_sequence_is_divided_in_two_ways() -> None:
    assert memory_run.divided(47500, 1024, teacher_forced=False) == (46476, 1024)
    assert memory_run.divided(47500, 1024, teacher_forced=True) == (512, 46988)


def context(case: str, length: int, teacher_forced: bool, passed: bool, peak: int = 0) -> dict[str, Any]:
    divided = dict(case=case, length=length, teacher_forced=teacher_forced)
    return divided | dict(kind="context", passed=passed, driver_peak_bytes=peak)


PLAN: dict[str, Any] = dict(kind="plan", model="m", method="lora", length=9, num_generations=2, passed=True)


def test_a_length_counts_when_both_divisions_pass() -> None:
    records = [
        context("8b-qlora", 47500, False, True),
        context("8b-qlora", 47500, True, False),
        context("8b-qlora", 40000, True, True),
        context("8b-qlora", 40000, False, True),
        context("8b-qlora", 95000, False, True),
        context("32b-lora", 12288, False, True),
        context("32b-lora", 12288, True, True),
    ]
    claims = memory.compute_claims(records)
    assert (claims["context_8b_qlora_80gb"], claims["context_32b_lora_80gb"]) == (40000, 12288)
    assert claims["context_14b_lora_80gb"] is None and claims["plan_error"] is None
    # A later run of the same replaces an earlier one.
    claims = memory.compute_claims([*records, context("8b-qlora", 47500, True, True)])
    assert claims["context_8b_qlora_80gb"] == 47500


def test_peak_is_the_higher_of_both_divisions() -> None:
    records = [
        context("14b-lora", 32768, False, True, 39 * GIB),
        context("14b-lora", 32768, True, True, 41 * GIB),
        context("14b-lora", 16384, True, True, 60 * GIB),
    ]
    assert memory.compute_claims(records)["context_14b_lora_80gb"] == 41


def test_plan_error_is_the_largest_of_enough_configurations() -> None:
    records = [
        PLAN | {"length": length, "predicted_peak_bytes": 100 + length, "driver_peak_bytes": 100}
        for length in (1, -3, 2, 0, 1, 2)
    ]
    assert memory.compute_claims(records)["plan_error"] is None  # two are of the same configuration
    more = [{**records[0], "length": length, "predicted_peak_bytes": 101} for length in (7, 8)]
    assert memory.compute_claims([*records, *more])["plan_error"] == pytest.approx(0.03)


def test_claims_are_those_of_the_table() -> None:
    names = {"context_8b_qlora_80gb", "context_32b_lora_80gb", "context_14b_lora_80gb", "plan_error"}
    assert set(memory.compute_claims([])) == names


def test_at_least_six_configurations_are_planned() -> None:
    assert len(set(memory_cases.PLAN_CASES)) >= memory.MIN_PLAN_CONFIGURATIONS


def test_without_a_gpu_there_is_no_error_of_a_plan_and_no_peak() -> None:
    rehearsed = [context("14b-lora", 32768, teacher_forced, True) for teacher_forced in (False, True)]
    for record in rehearsed:
        del record["driver_peak_bytes"]
    claims = memory.compute_claims([PLAN, *rehearsed])
    assert claims["plan_error"] is None and claims["context_14b_lora_80gb"] is None


def test_plans_and_contexts_of_a_model_may_be_of_different_days() -> None:
    model = {"model": "llama-3.1-8b", "method": "qlora"}
    parts = [memory.MemorySuite.part_of(model | {"kind": kind}) for kind in ("plan", "context", "context")]
    assert parts[0] != parts[1] == parts[2]


def test_handover_counts_where_the_cache_is_as_large_as_asked_for() -> None:
    seconds = ((0.5, 0.1, 9.0), (0.1, 0.2, 1.0), (0.2, 0.3, 2.0))
    names = ("wake_up", "sleep", "update_weights")
    steps = [
        {"engine_s": dict(zip(names, one, strict=True)), "published_bytes": 7 * i, "kv_cache_bytes": GIB + i}
        for i, one in enumerate(seconds)
    ]
    expected = {"sleep_1gib_s": 0.2, "wake_1gib_s": 0.2, "weight_sync_s": 2.0, "weight_sync_bytes": 14}
    assert handover.compute_claims([{"steps": steps}], 1.0) == expected
    small = [*steps, steps[0] | {"kv_cache_bytes": GIB - 1}]
    for records in ([], [{"steps": small}]):
        assert set(handover.compute_claims(records, 1.0).values()) == {None}


def test_a_kv_cache_of_so_many_gib_has_whole_pages() -> None:
    # 28 layers of 2 heads of 128: keys and values take 28 KiB for each token.
    assert handover.kv_cache_tokens("1.5b", 1.0) == -(-GIB // (28 * 1024 * 64)) * 64
