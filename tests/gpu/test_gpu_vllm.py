"""vLLM in the trainer's process on a GPU: shared weights, copies, sleep, and the memory of each.

Needs vLLM beside CUDA. One engine at a time, all in one process; the one with two GPUs starts its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import make_gpt2, make_lora, make_model, make_prompts, plain_logits, token_logprobs

from colocate.types import SamplingParams
from processes import TORCHRUN, run_python

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

WORKER = Path(__file__).parents[1] / "integration" / "vllm_worker.py"
NUM_TOKENS = 9
EAGER: dict[str, Any] = {"enforce_eager": True}
GRAPHS: dict[str, Any] = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
COMPILED: dict[str, Any] = {}
"""What vLLM does by itself: compiled, and captured. That takes longest to start."""
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
# Whole blocks of vocabulary and heads of a size that every attention backend has.
SIZES = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def sized(name: str, make: Callable[..., Any] = make_model, **overrides: Any) -> Any:
    sizes = {**SIZES, **overrides}
    if name in ("qwen2", "llama3"):  # their heads divide the hidden size
        del sizes["head_dim"]
    return make(name, **sizes).cuda()


def adapted(name: str) -> Any:
    """LoRA on all projections: adapters in float32 beside a base in bfloat16, as PEFT makes them."""
    model = sized(name, make=make_lora).bfloat16()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    from colocate.engines.vllm.engine import VLLMEngine

    engines: list[Any] = []

    def make(model: Any, **options: Any) -> Any:
        defaults = {"gpu_memory_utilization": 0.2, "max_num_seqs": 16}
        engines.append(VLLMEngine(model, **{**defaults, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def renew(model: Any, seed: int) -> None:
    """Weights that have nothing to do with those before, in place; logits of order one."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else 0.1 * noise)


def check_greedy(engine: Any, model: Any) -> None:
    """Greedy completions and their log-probs are the trainer's up to the rounding of bfloat16.

    Against float64 transformers' own log-probs of these models are off by 0.01 in the median and by up to
    0.13 in 1,600 tokens. The weights of the version before would be off by 3 and more in the mean.
    """
    prompts = make_prompts([1, 7, 30])
    below_best, gaps = [], []
    for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        logits = plain_logits(model, prompt.token_ids, completion.token_ids)
        logprobs = token_logprobs(logits, completion.token_ids)
        below_best.append(logits.log_softmax(-1).max(dim=-1).values - logprobs)
        gaps.append((torch.tensor(completion.logprobs) - logprobs).abs())
    for difference in (torch.cat(below_best), torch.cat(gaps)):
        assert difference.mean() < 0.05 and difference.max() < 0.4


def check_greedy_awake(engine: Any, model: Any) -> None:
    engine.wake_up()
    check_greedy(engine, model)
    engine.sleep()


@pytest.mark.parametrize(
    ("name", "engine_kwargs"),
    [("qwen3", EAGER), ("llama3", GRAPHS), ("qwen2", COMPILED)],
    ids=["qwen3-eager", "llama3-graphs", "qwen2-compiled"],
)
def test_shared_weights_publish_nothing_over_many_updates(start, name, engine_kwargs):
    model = sized(name).bfloat16()
    engine = start(model, weights="shared", engine_kwargs=engine_kwargs)
    assert engine.shares_weights and engine.rollout_weight_bytes == 0
    trainers = {parameter.data_ptr() for parameter in model.parameters()}
    inside = engine._llm.apply_model(lambda module: [p.data_ptr() for p in module.parameters()])[0]
    assert set(inside) <= trainers
    for version in range(1, 8):
        renew(model, version)
        engine.update_weights(version)
        check_greedy_awake(engine, model)
        assert engine.published_bytes == 0


def test_shared_weights_are_in_memory_once(start):
    sizes = {"num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 8192}
    model = sized("qwen3", **sizes).bfloat16()
    base_bytes = sum(parameter.nbytes for parameter in model.parameters())
    options = EAGER | {"kv_cache_memory_bytes": 2**26}
    engine = start(model, weights="shared", engine_kwargs=options)
    for _ in range(2):
        torch.cuda.empty_cache()
        asleep = torch.cuda.mem_get_info()[0]
        engine.wake_up()
        torch.cuda.empty_cache()
        taken = asleep - torch.cuda.mem_get_info()[0]
        own = engine.kv_cache_bytes + engine.rollout_weight_bytes
        # Beside them a table of rotary angles and the like.
        assert own <= taken + 2**20 and taken < own + base_bytes / 4
        engine.sleep()


@pytest.mark.parametrize(
    ("weights", "level", "with_adapter"),
    [("shared", 1, False), ("buckets", 2, False), ("auto", 2, True)],
    ids=["shared", "buckets", "lora"],
)
def test_every_one_of_50_steps_generates_with_its_own_weights(start, weights, level, with_adapter):
    model = adapted("qwen2") if with_adapter else sized("qwen3").bfloat16()
    # A small KV cache, which is quickly mapped and unmapped.
    engine = start(model, weights=weights, engine_kwargs=EAGER | {"kv_cache_memory_bytes": 2**28})
    assert engine.shares_weights == (weights == "shared")
    sleep, levels = engine._llm.sleep, []
    engine._llm.sleep = lambda level: levels.append(level) or sleep(level=level)
    for version in range(1, 51):
        renew(model, version)
        engine.update_weights(version)
        engine.wake_up()
        check_greedy(engine, model)
        engine.wake_up()
        engine.sleep()
        # A second phase without a new version: what was dropped comes back.
        if version % 25 == 0:
            check_greedy_awake(engine, model)
        assert (engine.published_bytes > 0) == (weights != "shared")
    assert set(levels) == {level} and len(levels) == 52


def test_the_trainers_products_have_their_workspace_while_the_engine_sleeps(start):
    # As in a new process: the first product of this thread is the one that merges an adapter for vLLM.
    torch._C._cuda_clearCublasWorkspaces()
    engine = start(adapted("qwen2"), weights="buckets", engine_kwargs=EAGER)
    assert engine.rollout_weight_bytes == 0
    # So long a sum that cuBLAS splits it, and adds the parts up in its workspace.
    a, b = (torch.randn(64, 2**16, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for product in (a @ b.T, torch.zeros(64, 64, device="cuda", dtype=a.dtype).addmm_(a, b.T)):
        expected = a.double() @ b.double().T
        torch.testing.assert_close(product.double(), expected, rtol=1e-2, atol=1.0)


@pytest.mark.parametrize("weights", ["shared", "buckets"])
def test_asleep_the_memory_is_the_trainers(start, weights):
    model = sized("qwen3", num_hidden_layers=8, hidden_size=1024, intermediate_size=4096).bfloat16()
    engine = start(model, weights=weights, engine_kwargs=EAGER)
    torch.cuda.empty_cache()
    asleep, total = torch.cuda.mem_get_info()
    engine.wake_up()
    torch.cuda.empty_cache()
    awake = torch.cuda.mem_get_info()[0]
    assert engine.kv_cache_bytes > 0.1 * total
    own = engine.kv_cache_bytes + engine.rollout_weight_bytes
    assert asleep - awake == pytest.approx(own, rel=0.05)
    # PyTorch counts what vLLM maps, asleep too; a run's pictures of memory leave it out.
    assert engine.pooled_bytes.reserved >= engine.pooled_bytes.allocated >= engine.kv_cache_bytes
    trainers = sum(parameter.nbytes for parameter in model.parameters())
    counted = torch.cuda.memory_allocated() - engine.pooled_bytes.allocated
    assert trainers <= counted < trainers + 256 * 2**20
    engine.sleep()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == pytest.approx(asleep, abs=256 * 2**20)


def test_a_kv_cache_of_the_rollouts_size_takes_nothing_from_pytorchs_reserve(start):
    model = sized("qwen3").bfloat16()
    engine = start(model, gpu_memory_utilization=None, usable_kv_cache_bytes=2**30, engine_kwargs=EAGER)
    torch.empty(2**33, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    engine.wake_up()
    assert 0.98 * 2**30 < engine.kv_cache_bytes <= 2**30
    assert torch.cuda.memory_reserved() >= reserved
    check_greedy(engine, model)
    engine.sleep()
    assert torch.cuda.memory_reserved() >= reserved


def test_expandable_segments_stay_on_for_the_trainer(start):
    from colocate.engines.vllm import internals

    before = internals.expands_segments()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    assert internals.expands_segments()
    try:
        model = sized("qwen3").bfloat16()
        engine = start(model, engine_kwargs=EAGER)
        assert internals.expands_segments()
        for _ in range(3):
            check_greedy_awake(engine, model)
            assert torch.ones(2**30, dtype=torch.uint8, device="cuda").all()  # segments still come and go
    finally:
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{before}")


def test_a_closed_engine_leaves_no_memory(start):
    model = sized("qwen3", num_hidden_layers=8, hidden_size=1024, intermediate_size=4096).bfloat16()
    free = []
    for weights, is_awake in (("shared", False), ("buckets", True), ("shared", True)):
        engine = start(model, weights=weights, engine_kwargs=EAGER)
        if is_awake:
            engine.wake_up()
            check_greedy(engine, model)
        engine.close()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[1:] == pytest.approx(free[:2], abs=256 * 2**20)
    assert torch.ones(2**30, dtype=torch.uint8, device="cuda").all()


def test_without_sleep_mode_everything_stays(start):
    model = sized("qwen3").bfloat16()
    engine = start(model, enable_sleep_mode=False, weights="buckets", engine_kwargs=EAGER)
    for version in (1, 2):
        renew(model, version)
        engine.update_weights(version)
        check_greedy_awake(engine, model)


def test_a_fault_of_the_reserve_is_told_with_its_arithmetic(start):
    with pytest.raises(ValueError, match=r"There is no memory for vLLM: 0\.9 × "):
        start(sized("qwen3"), gpu_memory_utilization=None, reserve_bytes=2**50)


def test_a_model_without_a_layout_gets_its_share_by_itself(start):
    model = make_gpt2(n_embd=128, n_head=2).cuda().bfloat16()
    engine = start(model, gpu_memory_utilization=None, engine_kwargs=EAGER)
    for version in (1, 2):
        check_greedy_awake(engine, model)
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
        engine.update_weights(version)


@pytest.mark.multi_gpu
def test_two_gpus_run_one_engine(tmp_path):
    run_python(*TORCHRUN, WORKER, tmp_path, "tensor_parallel", timeout_s=500, VLLM_LOGGING_LEVEL="WARNING")
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())["tensor_parallel"]
        assert found["group"] == 0 and found["published_bytes"] > 0
        assert found["num_alone"] == (6 if rank == 0 else 0)
        assert found["equal"] == [True] * 3


@pytest.mark.multi_gpu
def test_two_gpus_keep_the_contract():
    suite = WORKER.parents[1] / "unit" / "test_engine_contract.py"
    words = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", suite)
    printed = run_python(*TORCHRUN, *words, timeout_s=500, VLLM_LOGGING_LEVEL="ERROR")
    num_passed = [int(number) for number in re.findall(r"(\d+) passed in", printed)]
    assert len(num_passed) == 2 and min(num_passed) >= 40, printed[-4000:]
