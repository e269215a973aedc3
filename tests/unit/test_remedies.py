"""What is said to make a run fit, against the planner's word on the run so changed."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import GIB, LARGE_SHAPES, LORA_SHAPES, on_gpu

from colocate.memory.workload import VLLMDemand
from colocate.planning.planner import Case, Constraints
from colocate.planning.remedies import find_remedies, needed_bytes, with_adapters


def case(shapes=LARGE_SHAPES, gib=16.0, constraints=None, **workload):
    return Case(shapes, on_gpu(**workload), int(gib * GIB), constraints or Constraints())


def settings_of(a_case):
    return [remedy.settings for remedy in find_remedies(a_case)]


@settings(max_examples=12)
@given(
    gib=st.integers(4, 40),
    optim=st.sampled_from(["adamw_torch_fused", "adamw_bnb_8bit", "sgd"]),
    beta=st.booleans(),
    shapes=st.sampled_from([LARGE_SHAPES, LORA_SHAPES]),
    length=st.sampled_from([512, 2**14]),
)
def test_every_remedy_suffices_and_nothing_in_it_is_idle(gib, optim, beta, shapes, length):
    asked = case(shapes, gib, optim=optim, has_reference=beta, prompt_tokens=length, completion_tokens=length)
    remedies = find_remedies(asked)
    if asked.plan().fits:
        assert remedies == []
    tight = [remedy for remedy in remedies if remedy.plan.why_tight]
    for remedy in remedies:
        assert remedy.plan == remedy.case.plan() and remedy.plan.fits
        assert remedy.plan.device_memory_bytes == asked.device_memory_bytes
        for size in range(1, len(remedy.changes)):
            for fewer in combinations(remedy.changes, size):
                changed = asked
                for change in fewer:
                    changed = change.apply(changed)
                # Fewer changes do not suffice, or barely, as then is said first.
                assert not changed.plan().fits or (changed.plan().why_tight and tight)
    costs = [sum(change.cost for change in remedy.changes) for remedy in remedies]
    assert costs == sorted(costs)


def test_changes_are_joined_where_one_does_not_suffice():
    short = case(gib=22.1, has_reference=True, prompt_tokens=512, completion_tokens=1024)
    assert settings_of(short)[0] == "beta=0.0 optim=adamw_bnb_8bit"
    for name, alone in (("has_reference", False), ("optim", "adamw_bnb_8bit")):
        changed = replace(short, workload=replace(short.workload, **{name: alone}))
        assert changed.plan().fits is False
    assert "use_peft=True" in settings_of(short)


def test_what_the_user_fixed_is_loosened_first():
    fixed = Constraints(activation_policy="keep", tokens_per_microbatch=16384, offload_optimizer=False)
    assert settings_of(case(gib=30, constraints=fixed))[0].split()[0] in (
        "activation_policy=auto", "max_tokens_per_microbatch=768", "offload_optimizer=True",
    )  # fmt: skip
    assert settings_of(case(LORA_SHAPES, 40, kv_cache_tokens=10**8))[0] == "kv_cache_tokens=null"
    demand = VLLMDemand(memory_share=0.9, sleeps=False)
    asked = case(LARGE_SHAPES, 60, engine="vllm", vllm=demand)
    assert set(settings_of(asked)) & {"vllm_gpu_memory_utilization=null", "vllm_enable_sleep_mode=True"}


def test_shorter_sequences_are_a_remedy_where_they_help_only():
    long = case(LORA_SHAPES, 16, prompt_tokens=2**18, completion_tokens=2**18)
    assert any("max_completion_length=" in way or "max_prompt_length=" in way for way in settings_of(long))
    assert not any("max_" in way for way in settings_of(case(gib=20)))


def test_nothing_suffices_where_even_4_bits_are_too_large():
    assert find_remedies(case(gib=1.5)) == []
    assert find_remedies(case(gib=1000)) == [] and find_remedies(Case(LARGE_SHAPES, on_gpu())) == []


@pytest.mark.parametrize("in_4bit", [False, True])
def test_the_least_device_is_one_that_the_run_fits(in_4bit):
    asked = with_adapters(case(), in_4bit=in_4bit)
    size = needed_bytes(asked)
    assert replace(asked, device_memory_bytes=size).plan().fits
    assert not replace(asked, device_memory_bytes=int(0.97 * size)).plan().fits
    assert size < needed_bytes(case())
    # vLLM would take nine tenths of any device, and training needs more than the rest of small ones only.
    greedy = case(engine="vllm", vllm=VLLMDemand(memory_share=1.0))
    assert needed_bytes(greedy) is None
