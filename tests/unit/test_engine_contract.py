"""What `engines/base.py` promises, asked of every engine.

A new engine joins by one entry in `ENGINES`, in `ENGINES_ON_GPU` if it needs one, or in a list of
those that have a library of their own.
Under torchrun all processes ask one engine, each for itself; see `test_two_gpus_keep_the_contract`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from eight_bit_models import ONE_ROUNDING, with_8bit_kv, with_8bit_products
from engine_models import (
    MAX_POSITION,
    greedy_completions,
    greedy_reference,
    greedy_references,
    make_gpt2,
    make_lora,
    make_model,
    make_prompts,
    owners_of,
    plain_logits,
    token_logprobs,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_server_case import make_native_server_pool
from open_episodes import MAX_TOKENS, assert_each_is_as_alone, scripts
from quantized_models import make_4bit_model
from trtllm_case import StandInEngine, make_real_engine
from vllm_server_case import make_server_engine, make_server_model, make_server_pool

from colocate.engines.base import RolloutEngine
from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.sampler import process_logits
from colocate.engines.transformers_engine import TransformersEngine
from colocate.engines.vllm.logprobs_mode import PROCESSED, RAW, tells_policys
from colocate.reporting.work_counts import WorkCounts
from colocate.rollout_server.trainer.pool import EnginePool
from colocate.types import Completion, Prompt, SamplingParams
from colocate.weights.layouts import causal_lm
from native_replica import NativeReplica
from vllm_unpacked import unpacked


@dataclasses.dataclass(frozen=True)
class EngineCase:
    """How to make an engine, and what it cannot promise as the native one does."""

    make_model: Callable[[], Any]
    make_engine: Callable[[Any], RolloutEngine]
    logprob_atol: float = 1e-5
    process_logits: Callable[..., torch.Tensor] = process_logits
    """The distribution it draws from, as a function of logits, sampling and the tokens seen."""
    logprobs_modes: tuple[str, ...] | None = None
    """Those that vLLM or TensorRT-LLM has, which decide with which sampling it has log-probs of the policy;
    None: it always has."""
    shares_weights: bool = True
    ends_one_by_one: bool = True
    """It returns a turn as soon as that has ended; else all that it was drawing."""
    is_open: bool = True
    """Sequences can be submitted and extended; else processes that generate together can do that alone."""
    is_exact: bool = True
    """What is asked again has equal log-probs, bit for bit. Else they differ by roundings: requests come one
    by one, and which of them share a step depends on when they come, or submitted prompts find what earlier
    ones have left in the cache."""
    is_kept: bool = False
    """It takes long to start: one serves all tests, and gets the first weights back before each."""


def min_p_first(logits: torch.Tensor, sampling: SamplingParams, seen: torch.Tensor) -> torch.Tensor:
    """vLLM's order: min-p looks at the whole distribution, and top-k and top-p at what it leaves."""
    before = dataclasses.replace(sampling, top_k=0, top_p=1.0)
    after = SamplingParams(1, top_k=sampling.top_k, top_p=sampling.top_p)
    logits = process_logits(logits, before, seen)
    return logits if sampling.temperature == 0 else process_logits(logits, after, None)


def vllm_engine(model: Any, **options: Any) -> RolloutEngine:
    from colocate.engines.vllm.engine import VLLMEngine

    engine_kwargs: dict[str, Any] = {"enforce_eager": True}
    if torch.cuda.is_available():
        # A small share of the device, quickly mapped, for several suites at once.
        engine_kwargs["kv_cache_memory_bytes"] = 2**28
        options["gpu_memory_utilization"] = 0.1
        # vLLM's attention for float32 is Triton's, whose products else have the 10 bits of TF32.
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    return VLLMEngine(model, max_num_seqs=4, engine_kwargs=engine_kwargs, **options)


def tensor_parallel_vllm_engine(model: Any) -> RolloutEngine:
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return vllm_engine(model, tensor_parallel_size=dist.get_world_size())


def model_of_this_process() -> Any:
    if not torch.cuda.is_available():
        return make_model("qwen3", head_dim=32)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return make_model("qwen3", head_dim=64).cuda()


def unpacked_vllm_engine(model: Any) -> RolloutEngine:
    with unpacked():
        return vllm_engine(model)


def vllm_case(make_model: Callable[[], Any], **fields: Any) -> EngineCase:
    # Other kernels than the trainer's, in float32.
    defaults = {"logprob_atol": 1e-4, "process_logits": min_p_first, "is_kept": True}
    defaults |= {"logprobs_modes": (PROCESSED,)}
    return EngineCase(make_model, vllm_engine, **{**defaults, **fields})


def native_pool(model: Any, num_engines: int) -> EnginePool:
    return EnginePool([NativeReplica(model, max_num_seqs=4, page_size=4) for _ in range(num_engines)])


def pools(*numbers: int) -> dict[str, EngineCase]:
    """Of engines in this process, and of native servers, so many in each."""
    in_process = EngineCase(lambda: make_model("qwen3"), native_pool, is_exact=False)
    servers = dataclasses.replace(
        in_process, make_engine=make_native_server_pool, shares_weights=False, is_kept=True
    )
    return {
        f"{name}-{number}": dataclasses.replace(
            case, make_engine=functools.partial(case.make_engine, num_engines=number)
        )
        for name, case in (("pool-of", in_process), ("native-servers", servers))
        for number in numbers
    }


ENGINES = {
    **pools(2),
    "native": EngineCase(
        lambda: make_model("qwen3"), lambda model: NativeEngine(model, max_num_seqs=4, page_size=4)
    ),
    "native-4bit": EngineCase(
        lambda: make_4bit_model("qwen3"), lambda model: NativeEngine(model, max_num_seqs=4, page_size=4)
    ),
    "native-fp8-kv": EngineCase(
        lambda: with_8bit_kv(make_model("qwen3")),
        lambda model: NativeEngine(model, max_num_seqs=4, page_size=4, rollout_precision="fp8_kv"),
        logprob_atol=ONE_ROUNDING / 2,
    ),
    "native-fp8": EngineCase(
        lambda: with_8bit_products(with_8bit_kv(make_model("qwen3"))),
        lambda model: NativeEngine(model, max_num_seqs=4, page_size=4, rollout_precision="fp8"),
        logprob_atol=ONE_ROUNDING / 2,
    ),
    "transformers": EngineCase(
        lambda: make_model("qwen3"),
        lambda model: TransformersEngine(model, pad_token_id=0, max_num_seqs=4),
        ends_one_by_one=False,
    ),
    "transformers-gpt2": EngineCase(
        make_gpt2,
        lambda model: TransformersEngine(model, pad_token_id=0, max_num_seqs=4),
        ends_one_by_one=False,
    ),
    "trtllm-stand-in": EngineCase(
        lambda: make_model("qwen3"),
        StandInEngine.make,
        logprobs_modes=(PROCESSED, RAW),
        shares_weights=False,
    ),
}
POOLS_OF_OTHER_SIZES = pools(1, 3)
ENGINES_ON_GPU = {
    # Sides of matrices that products in 8 bits have.
    "native-fp8-cuda": EngineCase(
        lambda: with_8bit_products(with_8bit_kv(make_model("qwen3", head_dim=16, hidden_size=64).cuda())),
        lambda model: NativeEngine(model, max_num_seqs=4, page_size=16, rollout_precision="fp8"),
        logprob_atol=ONE_ROUNDING,
    ),
    "native-fp8-kv-cuda": EngineCase(
        lambda: with_8bit_kv(make_model("qwen3", head_dim=16).cuda()),
        lambda model: NativeEngine(model, max_num_seqs=4, page_size=16, rollout_precision="fp8_kv"),
        logprob_atol=ONE_ROUNDING / 2,
    ),
    "native-cuda": EngineCase(
        lambda: make_model("qwen3").cuda(),
        lambda model: NativeEngine(model, max_num_seqs=4, page_size=16),
        logprob_atol=1e-4,
    ),
    "native-4bit-cuda": EngineCase(
        lambda: make_4bit_model("qwen3", device="cuda"),
        lambda model: NativeEngine(model, max_num_seqs=4, page_size=16),
        logprob_atol=1e-4,
    ),
}
# Sizes of heads for which vLLM has attention on a CPU.
ENGINES_WITH_VLLM = {
    "vllm": vllm_case(lambda: make_model("qwen3", head_dim=32), shares_weights=False),
    # For sampling with filters at temperature 1.
    "vllm-gpt2": dataclasses.replace(
        vllm_case(lambda: make_gpt2(n_embd=64, n_head=2), shares_weights=False, logprobs_modes=(RAW,)),
        make_engine=lambda model: vllm_engine(model, logprobs_mode=RAW),
    ),
    "vllm-lora": vllm_case(lambda: make_lora("qwen2", hidden_size=128), shares_weights=False),
    # Whole blocks of vocabulary: vLLM pads others, which cannot be shared.
    "vllm-shared": dataclasses.replace(
        vllm_case(lambda: make_model("qwen2", hidden_size=128, vocab_size=128)),
        make_engine=unpacked_vllm_engine,
    ),
    "vllm_server": dataclasses.replace(
        vllm_case(make_server_model, shares_weights=False),
        make_engine=make_server_engine,
    ),
}
ENGINES_WITH_SEVERAL_SERVERS = {
    "vllm_server-pool": dataclasses.replace(
        vllm_case(make_server_model, shares_weights=False),
        make_engine=make_server_pool,
    ),
}
ENGINES_WITH_VLLM_ON_GPU = {
    # In float32, for which vLLM picks an attention of its own. 97 tokens, which it pads: not shareable.
    "vllm-cuda": vllm_case(
        lambda: make_model("qwen3", head_dim=64).cuda(), shares_weights=False, logprob_atol=5e-3
    ),
}
ENGINES_WITH_TRTLLM = {
    "trtllm": EngineCase(
        lambda: make_model("qwen3", head_dim=64, dtype=torch.bfloat16).cuda(),
        make_real_engine,
        logprob_atol=5e-2,
        logprobs_modes=(PROCESSED, RAW),
        shares_weights=False,
        is_kept=True,
    ),
}
ENGINES_OVER_PROCESSES = {
    "vllm-tensor-parallel": dataclasses.replace(
        vllm_case(model_of_this_process, shares_weights=False, logprob_atol=5e-3),
        make_engine=tensor_parallel_vllm_engine,
        is_open=False,
    ),
}

GREEDY = SamplingParams(max_tokens=9, temperature=0)


def cases() -> Iterator[Any]:
    groups = (
        (ENGINES, ()),
        (POOLS_OF_OTHER_SIZES, (pytest.mark.slow,)),
        (ENGINES_ON_GPU, (pytest.mark.gpu,)),
        (ENGINES_WITH_VLLM, (pytest.mark.vllm,)),
        (ENGINES_WITH_SEVERAL_SERVERS, (pytest.mark.vllm, pytest.mark.slow)),
        (ENGINES_WITH_VLLM_ON_GPU, (pytest.mark.vllm, pytest.mark.gpu)),
        (ENGINES_WITH_TRTLLM, (pytest.mark.trtllm, pytest.mark.gpu)),
    )
    if "LOCAL_RANK" in os.environ:
        groups = ((ENGINES_OVER_PROCESSES, (pytest.mark.vllm,)),)
    for engines, marks in groups:
        for name, case in engines.items():
            # An engine that takes long to start starts once, in whichever process has its tests.
            yield pytest.param(case, marks=[*marks, pytest.mark.xdist_group(name)], id=name)


@pytest.fixture(scope="module", params=cases())
def case(request) -> EngineCase:
    return request.param


@dataclasses.dataclass
class Kept:
    """What stays from one test to the next of an engine that takes long to start."""

    model: Any = None
    engine: RolloutEngine | None = None
    weights: Any = None


@pytest.fixture(scope="module")
def kept(case) -> Iterator[Kept]:
    kept = Kept()
    yield kept
    if kept.engine is not None:
        kept.engine.close()


@pytest.fixture
def model(case, kept):
    if not case.is_kept:
        return case.make_model()
    if kept.model is None:
        kept.model = case.make_model()
        kept.weights = {name: tensor.clone() for name, tensor in kept.model.state_dict().items()}
    kept.model.load_state_dict(kept.weights)
    kept.model.zero_grad()
    return kept.model.eval()


@pytest.fixture
def asleep(case, model, kept) -> Iterator[RolloutEngine]:
    if not case.is_kept:
        engine = case.make_engine(model)
        yield engine
        engine.close()
        return
    if kept.engine is None:
        kept.engine = case.make_engine(model)
    kept.engine.sleep()
    kept.engine.update_weights(version=0)
    yield kept.engine
    try:
        kept.engine.wake_up()
    except RuntimeError:  # closed
        kept.engine = None


@pytest.fixture
def engine(asleep) -> RolloutEngine:
    asleep.wake_up()
    return asleep


@pytest.fixture
def open_engine(engine, case) -> RolloutEngine:
    if not case.is_open:
        with pytest.raises(ValueError, match="together"):
            engine.submit(make_prompts([4]), GREEDY)
        pytest.skip("this engine refuses open rollouts, as was checked")
    return engine


def generate(
    engine: RolloutEngine, lengths: list[int], num_generations: int = 1, **options
) -> list[Completion]:
    sampling = SamplingParams(**{"max_tokens": 9, **options})
    return engine.generate(make_prompts(lengths, num_generations), sampling)


def test_completions_come_prompt_by_prompt_in_sample_order(engine):
    first, second, third = make_prompts([5, 2, 8])
    sampling = SamplingParams(max_tokens=6)
    alone = {
        (prompt.key, sample): engine.generate(
            [dataclasses.replace(prompt, samples=range(sample, sample + 1))], sampling
        )[0]
        for prompt in (first, second, third)
        for sample in range(5)
    }
    together = engine.generate(
        [
            dataclasses.replace(first, samples=range(3, 5)),
            dataclasses.replace(second, samples=range(0)),
            dataclasses.replace(third, samples=range(3)),
        ],
        sampling,
    )
    expected = [(first.key, 3), (first.key, 4), *((third.key, sample) for sample in range(3))]
    assert [c.token_ids for c in together] == [alone[request].token_ids for request in expected]


def test_nothing_asked_nothing_made(engine):
    assert engine.generate([], GREEDY) == []


def test_greedy_is_model_generate(engine, model):
    prompts = make_prompts([1, 7, 3, 12, 4, 4, 9], 2)
    assert greedy_completions(engine, prompts, 9) == greedy_references(model, prompts, 9)


def test_greedy_with_repetition_penalty_is_model_generate(engine, model):
    prompts = make_prompts([1, 7, 12])
    sampling = SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.7)
    completions = engine.generate(prompts, sampling)
    expected = [greedy_reference(model, p.token_ids, 12, repetition_penalty=1.7) for p in prompts]
    assert [list(c.token_ids) for c in completions] == expected
    assert expected != [greedy_reference(model, p.token_ids, 12) for p in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"top_k": 20, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.7},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.share(3)
def test_logprobs_are_the_policys_whatever_filters_the_draw(engine, model, case, options):
    prompts = make_prompts([1, 6, 11], 2)
    sampling = SamplingParams(max_tokens=10, seed=3, **options)
    completions = engine.generate(prompts, sampling)
    for prompt, completion in zip(owners_of(prompts), completions, strict=True):
        logits = plain_logits(model, prompt.token_ids, completion.token_ids)
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for i in range(len(logits)):
            seen[i, list(prompt.token_ids + completion.token_ids[:i])] = True
        drawn_from = token_logprobs(case.process_logits(logits, sampling, seen), completion.token_ids)
        assert drawn_from.isfinite().all(), "a filtered token was drawn"
        modes = case.logprobs_modes
        if modes is not None and not any(tells_policys(mode, sampling) for mode in modes):
            assert completion.logprobs is None
            continue
        expected = token_logprobs(logits / (sampling.temperature or 1.0), completion.token_ids)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), expected, atol=case.logprob_atol, rtol=1e-5
        )


def test_stop_token_ends_the_completion_and_is_part_of_it(engine):
    free = generate(engine, [5, 5, 5], 4, max_tokens=12, seed=1)
    stops = (free[0].token_ids[4], free[5].token_ids[2])
    stopped = generate(engine, [5, 5, 5], 4, max_tokens=12, seed=1, stop_token_ids=stops)
    assert {c.finish_reason for c in stopped} == {"stop", "length"}
    for before, after in zip(free, stopped, strict=True):
        hits = [i for i, token in enumerate(before.token_ids) if token in stops]
        length = hits[0] + 1 if hits else 12
        assert after.token_ids == before.token_ids[:length]
        assert after.finish_reason == ("stop" if hits else "length")
        assert after.logprobs is not None and len(after.logprobs) == length


def test_stop_token_as_last_allowed_token_is_a_stop(engine):
    (free,) = generate(engine, [5], max_tokens=4)
    (stopped,) = generate(engine, [5], max_tokens=4, stop_token_ids=(free.token_ids[3],))
    expected = free.token_ids.index(free.token_ids[3]) + 1
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:expected], "stop")


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens(engine, max_tokens):
    completions = generate(engine, [3, 9], 3, max_tokens=max_tokens)
    assert [len(c.token_ids) for c in completions] == [max_tokens] * 6
    assert {c.finish_reason for c in completions} == {"length"}


def test_limits_of_each_sample_cut_what_would_have_come(engine):
    # Stop tokens and limits end completions in the same rollout; no limit changes what another one draws.
    whole = generate(engine, [5, 9, 2], 3, max_tokens=9, seed=4)
    stop = whole[1].token_ids[3]
    whole = generate(engine, [5, 9, 2], 3, max_tokens=9, seed=4, stop_token_ids=(stop,))
    limits = [(1, 9, 4), (2, 2, 8), None]
    prompts = [
        dataclasses.replace(prompt, max_tokens=limit)
        for prompt, limit in zip(make_prompts([5, 9, 2], 3), limits, strict=True)
    ]
    sampling = SamplingParams(max_tokens=9, seed=4, stop_token_ids=(stop,))
    completions = engine.generate(prompts, sampling)
    for completion, free, limit in zip(completions, whole, (1, 9, 4, 2, 2, 8, 9, 9, 9), strict=True):
        assert completion.token_ids == free.token_ids[:limit]
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == stop else "length")


def test_a_limit_lets_a_longer_prompt_in(engine):
    (prompt,) = make_prompts([MAX_POSITION - 3])
    (completion,) = engine.generate(
        [dataclasses.replace(prompt, max_tokens=(3,))], SamplingParams(max_tokens=9)
    )
    assert len(completion.token_ids) == 3


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((3,), "Prompt 100 asks for 2 samples and its max_tokens has 1"),
        ((0, 3), "limits a completion to 0 tokens"),
        ((3, 5), "to 5 tokens, but the rollout's max_tokens=4 allows 1 to 4"),
    ],
)
def test_impossible_limits_are_refused_with_their_numbers(engine, limits, message):
    (prompt,) = make_prompts([3], 2)
    with pytest.raises(ValueError, match=message):
        engine.generate([dataclasses.replace(prompt, max_tokens=limits)], SamplingParams(max_tokens=4))


def are_equal(case: EngineCase, some: list[Completion], others: list[Completion]) -> bool:
    """Whether completions are the same, as exactly as the engine promises."""
    if case.is_exact:
        return some == others
    bare = [[dataclasses.replace(each, logprobs=None) for each in of] for of in (some, others)]
    pairs = zip(some, others, strict=True)
    return bare[0] == bare[1] and all(
        np.allclose(one.logprobs, other.logprobs, rtol=0, atol=case.logprob_atol) for one, other in pairs
    )


def test_same_seed_same_completions_other_seed_others(engine, case):
    first = generate(engine, [4, 7], 3, seed=5)
    assert are_equal(case, generate(engine, [4, 7], 3, seed=5), first)
    assert generate(engine, [4, 7], 3, seed=6) != first
    assert len({c.token_ids for c in first[:3]}) == 3, "members of a group must differ"


def test_key_decides_the_draw(engine):
    (prompt,) = make_prompts([4])
    sampling = SamplingParams(max_tokens=9)
    keys = [prompt.key, prompt.key, prompt.key + 1, prompt.key + 2**32]
    drawn = [engine.generate([dataclasses.replace(prompt, key=key)], sampling)[0].token_ids for key in keys]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_global_random_states_are_untouched(engine):
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    generate(engine, [4, 7], 3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


def test_starts_asleep_and_refuses(asleep):
    with pytest.raises(RuntimeError, match=r"asleep.*wake_up"):
        generate(asleep, [3])


def test_sleep_and_wake_up_may_be_repeated(engine, case):
    first = generate(engine, [3, 6], 2)
    engine.wake_up()
    assert are_equal(case, generate(engine, [3, 6], 2), first)
    engine.sleep()
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        generate(engine, [3])
    engine.wake_up()
    assert are_equal(case, generate(engine, [3, 6], 2), first)


def test_asleep_it_holds_no_memory(engine):
    generate(engine, [3, 3])
    engine.sleep()
    assert engine.kv_cache_bytes == engine.rollout_weight_bytes == 0


def test_asleep_it_keeps_no_more_than_it_may(engine, case):
    first = generate(engine, [3, 3])
    taken = engine.kv_cache_bytes + engine.rollout_weight_bytes
    for keep_bytes in (2 * taken, taken // 2, 0):
        engine.sleep(keep_bytes)
        assert engine.kv_cache_bytes + engine.rollout_weight_bytes <= min(keep_bytes, taken)
    engine.wake_up()
    assert are_equal(case, generate(engine, [3, 3]), first)


def test_policy_version_is_stamped(engine, model):
    assert {c.policy_version for c in generate(engine, [3, 3])} == {0}
    engine.update_weights(version=7)
    assert engine.policy_version == 7
    assert {c.policy_version for c in generate(engine, [3, 3])} == {7}


@pytest.mark.parametrize("is_asleep", [False, True], ids=["awake", "asleep"])
@pytest.mark.share(2)
def test_weights_updated_in_place_are_used_once_published(engine, model, case, is_asleep):
    assert engine.shares_weights == case.shares_weights
    before = generate(engine, [6, 9], temperature=0)
    for version in (1, 2):
        if is_asleep:
            engine.sleep()
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
                parameter.add_(noise.to(parameter.device), alpha=0.1)
        engine.update_weights(version)
        engine.wake_up()
        after = generate(engine, [6, 9], temperature=0)
        expected = [greedy_reference(model, p.token_ids, 9) for p in make_prompts([6, 9])]
        assert [list(c.token_ids) for c in after] == expected
        assert [c.token_ids for c in after] != [c.token_ids for c in before]
        before = after


def test_training_sees_no_side_effect(engine, model):
    model.train()
    causal_lm(model).lm_head.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    values = {name: parameter.clone() for name, parameter in model.named_parameters()}
    requires_grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    generate(engine, [3, 6], 2)
    assert {name: module.training for name, module in model.named_modules()} == modes
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name])
        assert parameter.requires_grad == requires_grad[name]
        assert parameter.grad is None and parameter.grad_fn is None
    model(torch.tensor([[1, 2, 3]], device=model.device)).logits.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ((), {}, "Prompt 5 is empty"),
        ((1, -1), {}, "from -1"),
        ((1,) * 10, {"max_tokens": MAX_POSITION - 9}, f"10 tokens.*{MAX_POSITION + 1}.*{MAX_POSITION}"),
        ((1,), {"max_tokens": 0}, "max_tokens=0"),
        ((1,), {"temperature": -0.1}, "temperature=-0.1"),
        ((1,), {"top_p": 0.0}, "top_p=0.0"),
        ((1,), {"top_k": -1}, "top_k=-1"),
        ((1,), {"min_p": 1.5}, "min_p=1.5"),
        ((1,), {"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    ],
)
def test_impossible_requests_are_refused_with_their_numbers(engine, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        engine.generate([Prompt(prompt, key=5)], SamplingParams(**{"max_tokens": 4, **options}))


def test_a_token_that_the_vocabulary_lacks_is_refused(engine, model):
    size = causal_lm(model).get_input_embeddings().num_embeddings
    with pytest.raises(ValueError, match=f"to {size}; .*vocabulary has {size}"):
        engine.generate([Prompt((1, size), key=5)], SamplingParams(4))


def test_the_whole_context_can_be_used(engine):
    (completion,) = generate(engine, [MAX_POSITION - 3], max_tokens=3)
    assert len(completion.token_ids) == 3


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=scripts(), temperature=st.sampled_from([0.0, 1.0]))
@pytest.mark.share(3)
def test_episodes_that_come_and_go_are_each_as_alone(open_engine, case, script, temperature):
    sampling = SamplingParams(MAX_TOKENS, temperature=temperature, stop_token_ids=(3, 5, 8))
    assert_each_is_as_alone(open_engine, script, sampling, logprob_atol=case.logprob_atol)
    assert not open_engine.is_busy


def test_a_short_turn_does_not_wait_for_a_long_one(open_engine, case):
    prompts = [  # long enough that a server does not come to its end before the short one is heard of
        dataclasses.replace(p, max_tokens=(n,)) for p, n in zip(make_prompts([5, 5]), (100, 2), strict=True)
    ]
    long, short = open_engine.submit(prompts, SamplingParams(100))
    first: dict[int, Completion] = {}
    while not first:
        first = open_engine.poll()
    assert first.keys() == ({short} if case.ends_one_by_one else {long, short})
    while open_engine.is_busy:
        first |= open_engine.poll()
    assert [len(first[number].token_ids) for number in (long, short)] == [100, 2]


def test_progress_is_the_beginning_of_what_a_turn_will_be(open_engine):
    prompts = [dataclasses.replace(p, max_tokens=(21, 21)) for p in make_prompts([5, 3], 2)]
    numbers = open_engine.submit(prompts, SamplingParams(30), keep=True)
    told: dict[int, list[tuple[int, ...]]] = {number: [(), ()] for number in numbers}
    for turn in range(2):
        ended: dict[int, Completion] = {}
        while open_engine.is_busy:
            ended |= open_engine.poll()
            for number in numbers:
                ids, logprobs = open_engine.progress(number, len(told[number][turn]))
                assert logprobs is None or len(logprobs) == len(ids)
                told[number][turn] += ids
        for number, completion in ended.items():
            ids = told[number][turn]
            assert completion.token_ids[: len(ids)] == ids
            assert open_engine.progress(number) == ((), None)
        if turn == 0:
            for number in numbers:
                open_engine.extend(number, [7], 8)
    assert ended.keys() == set(numbers)
    open_engine.abort(numbers)
    assert open_engine.progress(10**6) == ((), None)


class Noted(WorkCounts):
    """Counts that remember how many tokens there were after each addition."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def add(self, what, number=1):
        super().add(what, number)
        self.seen.append(self.done("tokens"))


def test_work_is_counted_while_it_is_done(engine):
    engine.counts = counts = Noted()
    drawn = generate(engine, lengths := [4, 7, 2], 2, max_tokens=9)
    num_tokens = sum(len(completion.token_ids) for completion in drawn)
    # Engines of several processes count what they draw together.
    assert counts.done("tokens") >= num_tokens and counts.done("completions") >= 2 * len(lengths)
    assert counts.share() == 1.0 and "tokens" in counts.words() and "completions" in counts.words()
    if isinstance(engine, (NativeEngine, TransformersEngine)):  # others answer for whole turns
        assert len({tokens for tokens in counts.seen if 0 < tokens < num_tokens}) > 1


def test_turns_are_counted_too(open_engine):
    open_engine.counts = counts = Noted()
    open_engine.submit(make_prompts([4, 7], 2), SamplingParams(9))
    ended: dict[int, Completion] = {}
    while open_engine.is_busy:
        ended |= open_engine.poll()
    assert counts.words() == f"{sum(len(turn.token_ids) for turn in ended.values())} tokens"


@pytest.mark.share(3)
def test_a_generate_in_between_leaves_open_sequences_alone(open_engine):
    sampling = SamplingParams(MAX_TOKENS)
    (prompt,), others = make_prompts([6]), make_prompts([4, 9], 2, seed=1)
    expected, alone = open_engine.generate([prompt], sampling), open_engine.generate(others, sampling)
    (number,) = open_engine.submit([prompt], sampling)
    assert [c.token_ids for c in open_engine.generate(others, sampling)] == [c.token_ids for c in alone]
    found = {}
    while open_engine.is_busy:
        found |= open_engine.poll()
    assert found.keys() == {number}
    assert found[number].token_ids == expected[0].token_ids
    assert open_engine.poll() == {}


def test_open_sequences_outlive_a_sleep(open_engine, model):
    sampling = SamplingParams(MAX_TOKENS)
    prompts = make_prompts([6, 3], 2)
    alone = open_engine.generate(prompts, sampling)
    numbers = open_engine.submit(prompts, sampling)
    found = open_engine.poll()
    open_engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        open_engine.poll()
    open_engine.wake_up()
    while open_engine.is_busy:
        found |= open_engine.poll()
    assert [found[number].token_ids for number in numbers] == [c.token_ids for c in alone]


def test_impossible_extensions_are_refused_with_their_numbers(open_engine, model):
    sampling = SamplingParams(20)
    prompts = [dataclasses.replace(prompt, max_tokens=(5,)) for prompt in make_prompts([4, 4])]
    kept, done = open_engine.submit(prompts[:1], sampling, keep=True) + open_engine.submit(
        prompts[1:], sampling
    )
    with pytest.raises(ValueError, match="cannot be extended: it has a turn under way"):
        open_engine.extend(kept, [1], 5)
    with pytest.raises(ValueError, match="The engine still has sequences"):
        open_engine.submit(prompts, SamplingParams(21))
    while open_engine.is_busy:
        open_engine.poll()
    for number in (done, 12345):
        with pytest.raises(ValueError, match=f"Sequence {number} cannot be extended"):
            open_engine.extend(number, [1], 5)
    with pytest.raises(ValueError, match=r"5 tokens after its prompt of 4; 6 more and 10 to .* at most 9"):
        open_engine.extend(kept, [1] * 6, 10)
    with pytest.raises(ValueError, match="at least 1 token"):
        open_engine.extend(kept, [1], 0)
    with pytest.raises(ValueError, match=str(model.config.get_text_config().vocab_size)):
        open_engine.extend(kept, [10**6], 5)
    open_engine.extend(kept, [1] * 6, 9)
    assert open_engine.is_busy
    open_engine.abort([kept, done, 12345])
    # All of the context may be used, by an episode whose prompt leaves less than max_tokens.
    (kept,) = open_engine.submit(
        [dataclasses.replace(prompt, max_tokens=(5,)) for prompt in make_prompts([MAX_POSITION - 9])],
        sampling,
        keep=True,
    )
    while open_engine.is_busy:
        open_engine.poll()
    with pytest.raises(ValueError, match=r"make 10, and 9 may follow"):
        open_engine.extend(kept, [1], 4)
    open_engine.extend(kept, [1], 3)
    while open_engine.is_busy:
        open_engine.poll()
    open_engine.abort([kept])
    assert not open_engine.is_busy


def test_closed_is_closed(engine):
    engine.close()
    with pytest.raises(RuntimeError):
        generate(engine, [3])
    with pytest.raises(RuntimeError, match="closed"):
        engine.wake_up()
