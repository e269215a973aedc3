"""4-bit weights under captured graphs: the copy, one weight at a time, and sleep in between."""

from __future__ import annotations

import pytest
import torch
from engine_models import (
    assert_logprobs_are_the_models,
    greedy_references,
    make_prompts,
    randomise_adapters,
)
from quantized_models import PROJECTIONS, linear_4bit, make_4bit_model

from colocate.engines.native import capacity
from colocate.engines.native import engine as native_engine
from colocate.types import SamplingParams
from colocate.weights.layouts import layout_for
from colocate.weights.quantized import dequantize

pytestmark = pytest.mark.gpu

PROMPTS = make_prompts([5, 40, 17], 3)
SAMPLED = SamplingParams(max_tokens=20, seed=4)
GREEDY = SamplingParams(max_tokens=20, temperature=0)


def four_bit(dtype: torch.dtype = torch.float32):
    return make_4bit_model("qwen3", dtype=dtype, device="cuda")


@pytest.fixture(params=[True, False], ids=["copy", "one by one"])
def is_copy(request, monkeypatch) -> bool:
    def take_weights(weights, cache, layout, **_):
        weights.allocate(layout, is_copy=request.param)

    monkeypatch.setattr(native_engine, "take_weights", take_weights)
    return request.param


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantising_in_a_graph_is_dequantising(quant_type, is_nested, dtype):
    linear = linear_4bit(
        192, 256, dtype=dtype, device="cuda", quant_type=quant_type, compress_statistics=is_nested
    )
    expected = dequantize(linear)
    assert expected.dtype == dtype and expected.shape == (192, 256)
    wide = torch.full((3 * 192, 256), torch.nan, dtype=dtype, device="cuda")
    out = wide[192:384]
    dequantize(linear, out=out)
    out.fill_(torch.nan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dequantize(linear, out=out)
    assert out.isnan().all(), "captured, not run"
    graph.replay()
    assert torch.equal(out, expected)
    assert wide[:192].isnan().all() and wide[384:].isnan().all()


def test_greedy_is_model_generate(start_engine, is_copy):
    model = four_bit()
    expected = greedy_references(model, PROMPTS, 20)
    completions = start_engine(model).generate(PROMPTS, GREEDY)
    assert [list(completion.token_ids) for completion in completions] == expected


def test_logprobs_in_bfloat16_are_the_models(start_engine, is_copy):
    model = four_bit(torch.bfloat16)
    for prompt in make_prompts([6, 30]):
        completions = start_engine(model).generate([prompt], SAMPLED)
        assert_logprobs_are_the_models(model, [prompt], completions, atol=0.2)


def test_graphs_captured_before_sleep_read_the_weights_made_after_it(start_engine, is_copy):
    model = four_bit(torch.bfloat16)
    engine = start_engine(model)
    before = engine.generate(PROMPTS, SAMPLED)
    graphs = dict(engine._decoder._graphs)
    assert graphs
    held = engine.rollout_weight_bytes
    assert held >= engine._weights.needed_bytes(layout_for(model), is_copy=is_copy) > 0
    for keep_bytes in (0, held, held // 2):
        engine.sleep(keep_bytes)
        assert engine.rollout_weight_bytes + engine.kv_cache_bytes <= keep_bytes
        others = torch.full(
            (256 * 2**20,), 255, dtype=torch.uint8, device="cuda"
        )  # what is left there is NaN
        engine.wake_up()
        assert engine.generate(PROMPTS, SAMPLED) == before
        del others
    assert engine._decoder._graphs == graphs, "captured anew"


def test_both_ways_are_the_same_computation(start_engine, monkeypatch):
    model = four_bit(torch.bfloat16)
    completions = []
    for is_copy in (True, False):
        monkeypatch.setattr(
            native_engine,
            "take_weights",
            lambda weights, cache, layout, is_copy=is_copy, **_: weights.allocate(layout, is_copy=is_copy),
        )
        completions.append(start_engine(model).generate(PROMPTS, SAMPLED))
    assert completions[0] == completions[1]


def test_a_change_of_way_captures_graphs_anew(start_engine, monkeypatch):
    model = four_bit()
    engine = start_engine(model)
    before = engine.generate(PROMPTS, GREEDY)
    assert engine._weights.is_copy
    with monkeypatch.context() as patch:
        # Room for the pages that are needed, and for nothing beside them.
        page_bytes = engine._cache.page_bytes(torch.float32)
        patch.setattr(capacity, "_usable_bytes", lambda held, device: 5 * 2**28 + page_bytes)
        patch.setattr(
            engine._weights, "needed_bytes", lambda layout, is_copy: 5 * 2**28 if is_copy else 2**20
        )
        engine.sleep()
        engine.wake_up()
        # A copy of five handles would leave none for the cache.
        assert engine.generate(PROMPTS, GREEDY) == before
        assert not engine._weights.is_copy
    assert engine.generate(PROMPTS, GREEDY) == before
    assert engine._weights.is_copy


def test_adapters_on_4_bit_weights(start_engine, is_copy):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(four_bit(), LoraConfig(r=4, lora_alpha=8, target_modules=list(PROJECTIONS)))
    torch.manual_seed(3)
    randomise_adapters(model)
    engine = start_engine(model)
    expected = greedy_references(model, PROMPTS, 20)
    assert [list(c.token_ids) for c in engine.generate(PROMPTS, GREEDY)] == expected
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1)
    changed = greedy_references(model, PROMPTS, 20)
    assert changed != expected
    assert [list(c.token_ids) for c in engine.generate(PROMPTS, GREEDY)] == changed
