"""The profile of a decode step: what each kernel is for, from a trace whose steps are known."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_models import make_model, make_prompts

from benchmarks.rollout import profile as decode_profile
from colocate.engines.native.decoder import Decoder
from colocate.engines.native.engine import NativeEngine
from colocate.types import SamplingParams

NUM_LAYERS = 3


def step_names(
    *, has_prefixes: bool = True, num_splits: int = 1, in_products: bool = False, is_streamed: bool = False
) -> list[tuple[str, str]]:
    """Kernels in the order of a captured step, and what they are for."""
    attention = [
        *([("prefix_kernel", "attention, prompts")] if has_prefixes else []),
        ("suffix_kernel", "attention, completions"),
        *([("merge_kernel", "attention, completions")] if num_splits > 1 else []),
    ]
    gate_up = [
        ("nvjet_tst_128x256_TNT", "product, gate and up"),
        ("_silu_mul_kernel", "activation"),
    ]
    head = [("gemm", "product, head"), ("_reduce_parts_kernel", "sampler")]
    if in_products:
        gate_up, head = (
            [("swiglu_many_rows_kernel", "product, gate and up")],
            [("head_kernel", "product, head")],
        )
    down = [("nvjet_tst_splitK", "product, down"), ("splitKreduce_kernel", "product, down")]
    product = "nvjet_tst_64x128_v_bz_TNN"
    if is_streamed:
        product = "streamed_kernel"
        gate_up, down = [(product, "product, gate and up")], [(product, "product, down")]
    layer = [
        ("_rms_norm_kernel", "norms"),
        (product, "product, qkv"),
        *attention,
        (product, "product, o"),
        ("_rms_norm_kernel", "norms"),
        *gate_up,
        *down,
    ]
    return [
        ("vectorized_elementwise_kernel", "bookkeeping"),
        ("_begin_step_kernel", "bookkeeping"),
        ("vectorized_gather_kernel", "bookkeeping"),
        *NUM_LAYERS * layer,
        ("_rms_norm_kernel", "norms"),
        *head,
        ("_draw_kernel", "sampler"),
        ("_end_step_kernel", "bookkeeping"),
    ]


def kernels(names: list[tuple[str, str]], start_s: float = 0.0) -> list[Any]:
    """A microsecond each, and one between them."""
    return [
        decode_profile.Kernel(name, start_s + 2e-6 * number, start_s + 2e-6 * number + 1e-6)
        for number, (name, _) in enumerate(names)
    ]


@pytest.mark.parametrize("has_prefixes", [True, False])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("products", [{}, {"in_products": True}, {"is_streamed": True}], ids=str)
def test_every_kernel_of_a_step_has_its_role(
    has_prefixes: bool, num_splits: int, products: dict[str, bool]
) -> None:
    names = step_names(has_prefixes=has_prefixes, num_splits=num_splits, **products)
    assert decode_profile.roles(kernels(names)) == [role for _, role in names]


def test_only_whole_steps_count_in_any_order_of_the_events() -> None:
    names = step_names()
    trace = [kernel for number in range(4) for kernel in kernels(names, start_s=number * 1e-3)]
    cut = trace[5:-5]
    random.Random(0).shuffle(cut)
    steps = decode_profile.split_steps(cut)
    assert steps == [kernels(names, start_s=number * 1e-3) for number in (1, 2)]


def test_seconds_add_up_to_the_step_and_overlapping_kernels_count_once() -> None:
    names = step_names()
    step = kernels(names)
    at = next(i for i, (name, _) in enumerate(names) if name == "suffix_kernel")
    # It is in place before the prompts' kernel has ended, and ends when it would have.
    step[at] = step[at]._replace(start_s=step[at - 1].start_s + 0.25e-6)
    seconds = decode_profile.seconds_by_role(step)
    assert sum(seconds.values()) == pytest.approx(step[-1].end_s - step[0].start_s)
    assert seconds["attention, prompts"] == pytest.approx(NUM_LAYERS * 1e-6)
    assert seconds["attention, completions"] == pytest.approx((NUM_LAYERS + 1) * 1e-6)
    assert seconds["between"] == pytest.approx((len(names) - 2) * 1e-6)
    assert seconds["product, down"] == pytest.approx(2 * NUM_LAYERS * 1e-6)


def test_a_rollout_is_traced_within_it_and_goes_on_unchanged(monkeypatch) -> None:
    """The profiler starts, stops and is read; of the CPU, as here there is no kernel to see."""
    calls: list[str] = []
    profile, activities = torch.profiler.profile, [torch.profiler.ProfilerActivity.CPU]
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: profile(activities=activities))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    step = Decoder.step
    engine = NativeEngine(make_model("qwen3"))
    engine.wake_up()
    sampling = SamplingParams(max_tokens=decode_profile.NUM_STEPS + 9, temperature=1.0, seed=1)
    expected = engine.generate(make_prompts([5, 9]), sampling)
    with decode_profile.traced(first=4) as kernels:
        assert Decoder.step is not step
        assert engine.generate(make_prompts([5, 9]), sampling) == expected
    engine.close()
    assert Decoder.step is step and calls == ["synchronize"] * 2 and kernels == []


def test_a_kernel_where_none_is_expected_is_named() -> None:
    names = [("_rms_norm_kernel", ""), ("mystery", ""), ("_rms_norm_kernel", "")]
    with pytest.raises(ValueError, match="mystery comes between norms and norms"):
        decode_profile.roles(kernels(names))


def test_the_least_time_is_that_of_operations_or_bytes() -> None:
    case = decode_profile.CASES["1p5b_512seq"]
    fast_memory = decode_profile.least_s(case, flops_per_s=1e15, bytes_per_s=1e30)
    products = {role: s for role, s in fast_memory.items() if role.startswith("product")}
    num_weights = 28 * (1536 * (2048 + 1536) + 3 * 1536 * 8960) + 1536 * 151936
    assert sum(products.values()) == pytest.approx(2 * 512 * num_weights / 1e15)
    fast_products = decode_profile.least_s(case, flops_per_s=1e30, bytes_per_s=1e12)
    attention = fast_products["attention, prompts"] + fast_products["attention, completions"]
    assert attention == pytest.approx(decode_profile.kv_bytes_per_step(case) / 1e12)
    prompts = 64 * 256 * 2 * 28 * 2 * 128 * 2  # tokens, keys and values, layers, heads, sizes, bytes
    assert fast_products["attention, prompts"] == pytest.approx(prompts / 1e12)
    assert fast_products["product, down"] > 28 * 2 * 1536 * 8960 / 1e12
