"""The planner against real allocations of tiny models, where bytes must be equal and not similar, and the
choices it makes against what must hold for any device."""

import json
import re
from dataclasses import replace

import pytest
import torch
from engine_models import FAMILIES, config_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quantized_models import linear_4bit, make_4bit_model
from test_stack import samples_of
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    TrainingArguments,
)

from colocate.config.grpo_config import GRPOConfig
from colocate.data.packing import pack
from colocate.engines.native.capacity import useful_pages
from colocate.engines.native.footprint import least_kv_tokens, useful_kv_tokens
from colocate.memory.rows import total_bytes
from colocate.memory.train_plan import ACTIVATION_POLICIES, ENOUGH_TOKENS, TrainPlan
from colocate.memory.workload import Workload
from colocate.planning.cut_groups import CutGroup
from colocate.planning.memory_plan import account, train_bytes
from colocate.planning.planner import (
    LOGPROB_CHUNKS,
    MARGIN,
    MAX_TOKENS_FOR_GROUP,
    OVERHEAD_TOKENS,
    TOKEN_STEP,
    Constraints,
    Planner,
    choose_train_plan,
    plan,
)
from colocate.planning.run_options import constraints_of, planner_for, workload_of
from colocate.policy.footprint import Microbatch, kept_bytes_per_token, train_flops_per_token
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.stack import DecoderStack
from colocate.run.build import first_plan
from colocate.types import Prompt
from colocate.weights.shapes import FourBit, Lora, ModelShapes
from tiny import shapes_of

SHAPE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
CONFIGS = [pytest.param(config_of(name, **SHAPE), id=name) for name in [*FAMILIES, "qwen3-tied"]]
DTYPES = [torch.bfloat16, torch.float32]
LARGE = Qwen2Config(
    vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
    num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
LARGE_SHAPES = shapes_of(LARGE)
LORA_SHAPES = shapes_of(LARGE, lora=Lora(32, "all-linear"))
GIB = 2**30


def workload(**changes):
    return Workload(
        **{
            "parameter_dtype": torch.bfloat16,
            "prompt_tokens": 24,
            "completion_tokens": 16,
            "num_generations": 4,
            "num_step_sequences": 8,
            "num_rollout_sequences": 8,
            "is_gpu": False,
            "max_num_seqs": 4,
            "page_size": 16,
            **changes,
        }
    )


def on_gpu(**changes):
    """A workload worth planning for."""
    sizes = dict(prompt_tokens=256, completion_tokens=512, num_generations=8, num_step_sequences=256)
    defaults = dict(num_rollout_sequences=256, is_gpu=True, max_num_seqs=512, page_size=64)
    return workload(**{**sizes, **defaults, "decode_scratch_bytes": 2**28, **changes})


def planned(model_config, load=None, **shape_options):
    return plan(shapes_of(model_config, **shape_options), load or workload())


def size_of(result, name, moment=None):
    return next(row.size_bytes for row in result.rows if row.name == name and row.moment in (None, moment))


def allocated(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# ── Rows against real tensors ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_config", CONFIGS)
def test_weights_masters_moments_and_gradients(model_config, dtype):
    model = AutoModelForCausalLM.from_config(model_config).to(dtype)
    result = planned(model_config, workload(parameter_dtype=dtype, has_reference=True))

    # What mixed-precision training holds: a float32 copy that the optimizer steps, its moments and gradients.
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters)
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim > 0]

    assert size_of(result, "weights") == allocated(model.parameters())
    assert size_of(result, "reference") == allocated(model.parameters())
    assert size_of(result, "moments") == allocated(moments)
    assert size_of(result, "gradients", "step") == allocated(master.grad for master in masters)
    if dtype == torch.bfloat16:
        assert size_of(result, "float32 masters") == allocated(masters)
    else:
        assert "float32 masters" not in {row.name for row in result.rows}


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "adamw_8bit", "sgd"])
@pytest.mark.parametrize("rank", [None, 64])
def test_moments_of_every_optimizer(optim, rank, tmp_path):
    model_config = Qwen2Config(**SHAPE | dict(hidden_size=72, intermediate_size=130))
    model = AutoModelForCausalLM.from_config(model_config)
    lora = None
    if rank:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))
        lora = Lora(rank, "all-linear")
    args = TrainingArguments(output_dir=str(tmp_path), optim=optim, use_cpu=True, report_to=[])
    optimizer = PolicyOptimizer(model, args, 1)
    optimizer.gradients()
    optimizer.step()
    tables = {"qmap1", "qmap2"}  # of 1 KiB, one for all tensors
    moments = [
        value
        for state in optimizer.optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim > 0 and name not in tables
    ]
    result = planned(model_config, workload(optim=optim), lora=lora)
    assert size_of(result, "moments") == allocated(moments)
    if "8bit" in optim:
        assert {value.dtype for value in moments} >= {torch.uint8, torch.float32}


@pytest.mark.parametrize("policy", ["keep", "selective", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_config", CONFIGS)
def test_layers_keep_what_is_planned(model_config, dtype, policy):
    model = AutoModelForCausalLM.from_config(model_config).to(dtype).train()
    samples = samples_of([(9, [5, 3]), (4, [7])])
    stack = DecoderStack(model, HostActivations())
    pack = stack.pack(samples)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = []

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = stack.hidden_states(pack, policy)
    assert hidden.requires_grad
    shapes = ModelShapes.of(model)
    layers_bytes = pack.num_tokens * shapes.num_layers * kept_bytes_per_token(shapes, dtype, policy)
    # Beside the layers: token ids, the indices of what is predicted, and the last norm's input.
    outside = pack.token_ids.nbytes + pack.predicting.nbytes + hidden.nbytes
    assert allocated(kept) == layers_bytes + outside


def quantized_bytes(weight):
    state = weight.quant_state
    return allocated([weight, state.absmax] + ([state.state2.absmax] if state.nested else []))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("size", [(64, 64), (200, 96), (40, 7)])
def test_four_bit_weights_are_bitsandbytes(size, double):
    linear = linear_4bit(*size, dtype=torch.float32, compress_statistics=double)
    assert FourBit(double).weight_bytes(size[0] * size[1]) == quantized_bytes(linear.weight)


def test_a_4bit_models_shapes_are_read_off_it():
    model = make_4bit_model("llama3")
    shapes = ModelShapes.of(model)
    quantized = [p for p in model.parameters() if hasattr(p, "quant_state")]
    others = [p for p in model.parameters() if not hasattr(p, "quant_state")]
    assert shapes.four_bit == FourBit(double_quantized=quantized[0].quant_state.nested)
    assert shapes.weight_bytes(torch.float32) == sum(map(quantized_bytes, quantized)) + allocated(others)
    planned_shapes = shapes_of(model.config, four_bit=shapes.four_bit)
    assert planned_shapes.num_parameters == shapes.num_parameters


@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj"), "all-linear"])
def test_lora_adapters_are_pefts(targets):
    import peft

    model_config = Qwen2Config(**SHAPE)
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_config(model_config).to(torch.bfloat16),
        peft.LoraConfig(
            r=4,
            target_modules=list(targets) if isinstance(targets, tuple) else targets,
            task_type="CAUSAL_LM",
        ),
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    planned_shapes = shapes_of(model_config, lora=Lora(4, targets))
    result = plan(planned_shapes, workload(has_reference=True, optim="sgd"))
    assert size_of(result, "LoRA adapters") == allocated(trained)
    assert size_of(result, "gradients", "step") == 4 * sum(p.numel() for p in trained)
    assert size_of(result, "moments") == 0
    assert not {"reference", "float32 masters"} & {row.name for row in result.rows}
    # What is read off the loaded model is what was planned before it was.
    loaded = ModelShapes.of(model)
    assert sorted(loaded.trained_sizes) == sorted(planned_shapes.trained_sizes)
    assert replace(loaded, trained_sizes=(), adapter_sizes=()) == replace(
        planned_shapes, trained_sizes=(), adapter_sizes=()
    )


def test_unknown_lora_targets_list_the_models_own():
    with pytest.raises(ValueError, match=r"'qkv'.*'down_proj'"):
        shapes_of(Qwen2Config(**SHAPE), lora=Lora(4, ("qkv",)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_cache_is_a_tensor_of_its_shape(dtype):
    load = workload(parameter_dtype=dtype, kv_cache_tokens=190)
    result = planned(LlamaConfig(**SHAPE), load)
    cache = torch.empty(2, 3, 12, 16, 2, 8, dtype=dtype)  # [key/value, layers, pages, page, K, D]
    assert result.kv_cache_tokens == 12 * 16
    assert size_of(result, "KV cache") == cache.nbytes


@settings(max_examples=60)
@given(
    prompt=st.integers(1, 200), completion=st.integers(1, 200), groups=st.integers(1, 6),
    generations=st.integers(2, 5), rows=st.integers(1, 40), page=st.sampled_from([16, 64]),
)  # fmt: skip
def test_the_kv_cache_that_is_of_use_is_the_engines(prompt, completion, groups, generations, rows, page):
    prompts = [Prompt((1,) * prompt, key, range(generations)) for key in range(groups)]
    load = workload(
        prompt_tokens=prompt, completion_tokens=completion, num_generations=generations,
        num_rollout_sequences=groups * generations, max_num_seqs=rows, page_size=page,
    )  # fmt: skip
    assert useful_kv_tokens(load) == page * useful_pages(prompts, completion, page, rows)


def test_micro_batches_of_a_budget():
    load = on_gpu(prompt_tokens=100, completion_tokens=50, num_generations=4, num_step_sequences=8)
    assert load.step_tokens == 2 * (100 + 4 * 50)
    # Half a group: the prompt and two completions.
    assert Microbatch.of(load, 200) == Microbatch(num_tokens=200, num_predicted=100, num_shared=100)
    # Never less than a sequence, which shares its prompt with nobody; never more than a step.
    assert Microbatch.of(load, 10) == Microbatch(num_tokens=150, num_predicted=50, num_shared=0)
    assert Microbatch.of(load, 10**6).num_tokens == 600
    apart = replace(load, share_prompts=False)
    assert apart.step_tokens == 8 * 150 and Microbatch.of(apart, 10**6).num_shared == 0


def test_an_optimizer_of_unknown_size_is_refused():
    with pytest.raises(ValueError, match="lomo"):
        planned(Qwen2Config(**SHAPE), workload(optim="lomo"))


# ── Sums ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shapes", [LARGE_SHAPES, LORA_SHAPES])
def test_totals_are_the_sums_of_rows(shapes):
    result = plan(shapes, on_gpu(), device_memory_bytes=80 * GIB)
    widest = [r for r in result.rows if r.phase != "train" or r.moment in (None, result.widest_moment)]
    phases = {p: result.phase_bytes(p) for p in ("resident", "rollout", "train")}
    assert total_bytes(widest) == sum(phases.values())
    for moment in ("head", "layer", "embedding", "step"):
        assert result.moment_bytes(moment) <= result.moment_bytes(result.widest_moment)
    assert result.peak_bytes == phases["resident"] + max(phases["rollout"], phases["train"])
    assert result.peak_bytes <= result.occupied_bytes <= 80 * GIB
    assert json.loads(json.dumps(result.to_dict()))["peak_bytes"] == result.peak_bytes


def test_without_a_device_nothing_is_chosen():
    result = plan(LARGE_SHAPES, on_gpu(), constraints=Constraints(sequences_per_microbatch=4))
    assert result.train_plan == TrainPlan("keep", None, 4, 1024)
    assert result.fits is None and result.shortage is None


policies = st.sampled_from(ACTIVATION_POLICIES)
any_shapes = st.sampled_from([LARGE_SHAPES, LORA_SHAPES])


@settings(max_examples=60)
@given(shapes=any_shapes, policy=policies, tokens=st.integers(800, 40000), more=st.integers(1, 40000))
def test_more_tokens_or_layers_never_take_less(shapes, policy, tokens, more):
    def needed(model_shapes, budget):
        train_plan = TrainPlan(policy, budget, logprob_chunk_size=1024)
        # With as many micro-batches: the only one of a step finds no gradients there.
        load = on_gpu(num_step_sequences=4096)
        return train_bytes(model_shapes, load, train_plan, 1.0)

    # Log-probs take the vocabulary in whole tiles of columns, so a few more tokens may come with a tile less.
    assert needed(shapes, tokens) <= 1.01 * needed(shapes, tokens + more)
    deeper = replace(shapes, num_layers=shapes.num_layers + 1)
    assert needed(shapes, tokens) <= needed(deeper, tokens)


# ── The choice ───────────────────────────────────────────────────────────────────────────────────────────

devices = st.integers(4 * GIB, 150 * GIB)
loads = st.builds(
    on_gpu,
    prompt_tokens=st.integers(16, 4096),
    completion_tokens=st.integers(16, 40000),
    num_generations=st.sampled_from([2, 8]),
    num_step_sequences=st.sampled_from([2, 8, 256]),
)


def least_plan(load):
    return TrainPlan("offload", load.max_sequence_length, logprob_chunk_size=LOGPROB_CHUNKS[0])


def trains_within(shapes, load, train_plan, device):
    result = account(shapes, load, train_plan, device)
    return result.phase_bytes("resident") + result.phase_bytes("train") <= (1 - MARGIN) * device


@example(
    LORA_SHAPES,
    on_gpu(prompt_tokens=16, completion_tokens=16, num_generations=2, num_step_sequences=2),
    4_667_143_941,
)
@settings(max_examples=60)
@given(shapes=any_shapes, load=loads, device=devices)
def test_the_chosen_plan_fits_when_any_does(shapes, load, device):
    chosen = choose_train_plan(shapes, load, device)
    least = replace(least_plan(load), offload_optimizer=chosen.offload_optimizer)
    if not trains_within(shapes, load, chosen, device):
        assert chosen == least
        # Not only the least: a micro-batch that is all of its step finds no gradients, and may take less.
        budgets = (load.max_sequence_length, *range(1024, 2**15 + 1, 1024))
        assert not any(
            trains_within(shapes, load, candidate, device)
            for policy in ACTIVATION_POLICIES
            for budget in budgets
            if budget <= load.step_tokens + 1024
            for candidate in [replace(least, activation_policy=policy, tokens_per_microbatch=budget)]
        )
    assert chosen.logprob_chunk_size in LOGPROB_CHUNKS
    assert chosen.budget(0) == load.max_sequence_length or chosen.budget(0) % 1024 == 0


@settings(max_examples=60)
@given(shapes=any_shapes, load=loads, device=devices, more=st.integers(0, 40 * GIB), offload=st.booleans())
def test_more_memory_never_leads_to_more_recomputation(shapes, load, device, more, offload):
    constraints = Constraints(offload_optimizer=offload)
    small, large = (choose_train_plan(shapes, load, size, constraints) for size in (device, device + more))
    levels = [ACTIVATION_POLICIES.index(chosen.activation_policy) for chosen in (small, large)]
    assert levels[1] <= levels[0]
    if levels[0] == levels[1]:
        assert small.budget(0) <= large.budget(0)


@settings(max_examples=60)
@given(
    prompt=st.integers(1, 3000), completion=st.integers(1, 3000), generations=st.integers(1, 9),
    sequences=st.integers(1, 9), budget=st.integers(1, 20000), shared=st.booleans(),
)  # fmt: skip
def test_groups_are_cut_as_packing_cuts_them(prompt, completion, generations, sequences, budget, shared):
    load = on_gpu(
        prompt_tokens=prompt, completion_tokens=completion, num_generations=generations,
        num_step_sequences=sequences, share_prompts=shared,
    )  # fmt: skip
    group = CutGroup.of(load, budget)
    size = min(generations, sequences) if shared else 1
    bins = pack([range(size)], [prompt] * size, [prompt + completion] * size, budget)
    assert (group.num_completions, group.num_parts) == (size, len(bins))
    assert group.computed_tokens == sum(prompt + len(members) * completion for members in bins)
    assert group.whole_tokens == prompt + size * completion
    assert pack([range(size)], [prompt] * size, [prompt + completion] * size, group.whole_tokens) == [
        list(range(size))
    ]


@settings(max_examples=60)
@given(
    shapes=any_shapes, device=devices, prompt=st.integers(4096, 60000), completion=st.integers(512, 8192),
    num_step_sequences=st.sampled_from([8, 32]), policy=policies,
)  # fmt: skip
def test_no_prompt_is_computed_again_where_another_policy_would_be_faster(
    shapes, device, prompt, completion, num_step_sequences, policy
):
    load = on_gpu(prompt_tokens=prompt, completion_tokens=completion, num_step_sequences=num_step_sequences)
    whole = -(-CutGroup.of(load, 1).whole_tokens // TOKEN_STEP) * TOKEN_STEP
    chosen = choose_train_plan(shapes, load, device)
    other = TrainPlan(policy, whole, logprob_chunk_size=LOGPROB_CHUNKS[0])
    other = replace(other, offload_optimizer=chosen.offload_optimizer)
    if whole <= MAX_TOKENS_FOR_GROUP and trains_within(shapes, load, other, device):
        work = CutGroup.of(load, chosen.budget(0)).work
        per_token = [
            train_flops_per_token(shapes, load, taken.activation_policy) for taken in (chosen, other)
        ]
        assert per_token[0] * work <= per_token[1] * (1 + OVERHEAD_TOKENS / ENOUGH_TOKENS)


def test_a_group_with_a_long_prompt_is_held_whole():
    load = on_gpu(prompt_tokens=32768, completion_tokens=1024, num_step_sequences=8)
    chosen = choose_train_plan(LORA_SHAPES, load, 80 * GIB)
    assert chosen.tokens_per_microbatch == 32768 + 8 * 1024
    # With short prompts cutting costs nothing, and matrix products gain nothing from more tokens.
    load = on_gpu(prompt_tokens=512, completion_tokens=8192, num_step_sequences=8)
    assert choose_train_plan(LORA_SHAPES, load, 140 * GIB).tokens_per_microbatch == 32768


@settings(max_examples=30)
@given(
    shapes=any_shapes, device=devices, policy=policies, tokens=st.integers(100, 20000),
    chunk=st.integers(64, 5000), offload=st.booleans(),
)  # fmt: skip
def test_what_the_user_sets_is_kept(shapes, device, policy, tokens, chunk, offload):
    constraints = Constraints(policy, tokens, chunk, offload)
    chosen = choose_train_plan(shapes, on_gpu(), device, constraints)
    assert replace(chosen, keep_softmax=False) == TrainPlan(policy, tokens, 1, chunk, offload)
    partly = choose_train_plan(shapes, on_gpu(), device, Constraints(tokens_per_microbatch=tokens))
    assert partly.tokens_per_microbatch == tokens


def test_a_large_device_keeps_everything_and_a_small_one_recomputes():
    chosen = [choose_train_plan(LARGE_SHAPES, on_gpu(), gib * GIB) for gib in (140, 40, 33, 30)]
    assert chosen[0].activation_policy == "keep" and chosen[0].tokens_per_microbatch == 32768
    levels = [ACTIVATION_POLICIES.index(c.activation_policy) for c in chosen]
    assert levels == sorted(levels) and levels[-1] > 0
    # Long sequences cannot be cut, so the policy has to give way.
    long = on_gpu(prompt_tokens=512, completion_tokens=90000, num_generations=2, num_step_sequences=2)
    assert choose_train_plan(LORA_SHAPES, long, 40 * GIB).activation_policy in ("full", "offload")


def test_the_softmax_is_kept_where_the_head_is_trained_and_memory_is_to_spare():
    assert choose_train_plan(LARGE_SHAPES, on_gpu(), 140 * GIB).keep_softmax
    assert not choose_train_plan(LARGE_SHAPES, on_gpu(), 30 * GIB).keep_softmax
    assert not choose_train_plan(LORA_SHAPES, on_gpu(), 140 * GIB).keep_softmax
    assert not choose_train_plan(LARGE_SHAPES, on_gpu(entropy_gradient=True), 140 * GIB).keep_softmax


def test_the_optimizer_leaves_when_the_cache_is_short():
    ample = choose_train_plan(LARGE_SHAPES, on_gpu(), 140 * GIB)
    wide = on_gpu(prompt_tokens=8192, completion_tokens=8192)
    assert not ample.offload_optimizer
    assert choose_train_plan(LARGE_SHAPES, wide, 30 * GIB).offload_optimizer
    kept, moved = (
        plan(
            LARGE_SHAPES,
            wide,
            device_memory_bytes=30 * GIB,
            constraints=Constraints(offload_optimizer=offload),
        )
        for offload in (False, True)
    )
    assert moved.kv_cache_tokens > 1.5 * kept.kv_cache_tokens
    assert moved.phase_bytes("resident") < kept.phase_bytes("resident")


def test_a_run_that_is_too_large_says_so():
    result = plan(LARGE_SHAPES, on_gpu(has_reference=True), device_memory_bytes=20 * GIB)
    assert not result.fits and result.free_bytes == 20 * GIB - result.peak_bytes
    assert "resident" in result.shortage and "20.00 GiB" in result.shortage
    asked = on_gpu(kv_cache_tokens=10**8)
    too_much = plan(LORA_SHAPES, asked, device_memory_bytes=40 * GIB)
    assert too_much.kv_cache_tokens >= 10**8 and not too_much.fits


def test_a_run_that_starts_too_large_is_told_what_suffices(caplog):
    first_plan(Planner(LARGE_SHAPES, on_gpu(has_reference=True), 22 * GIB))
    (line,) = [message for message in caplog.messages if "may run out of memory" in message]
    assert "To make it fit, set beta=0.0 optim=adamw_bnb_8bit; or use_peft=True" in line
    caplog.clear()
    first_plan(Planner(LARGE_SHAPES, on_gpu(), 1 * GIB))
    assert "Nothing that can be set would make it fit" in caplog.text


def test_a_run_that_fits_says_when_it_is_tight():
    roomy = plan(LARGE_SHAPES, on_gpu(), device_memory_bytes=140 * GIB)
    assert roomy.fits and roomy.why_tight is None
    # The cache takes what is left, and the optimizer has left for it, but many sequences wait.
    long = on_gpu(prompt_tokens=8192, completion_tokens=8192, num_rollout_sequences=512)
    waiting = plan(LORA_SHAPES, long, device_memory_bytes=16 * GIB)
    assert waiting.fits and waiting.kv_cache_sequences < 512
    assert f"holds {waiting.kv_cache_sequences:,} of the 512 sequences" in waiting.why_tight
    # Hardly more than what it cannot do without.
    needed = plan(LARGE_SHAPES, on_gpu(), device_memory_bytes=20 * GIB).peak_bytes
    barely = plan(LARGE_SHAPES, on_gpu(), device_memory_bytes=int(needed * 1.01))
    assert barely.fits and "cannot do with less than" in barely.why_tight
    assert plan(LARGE_SHAPES, on_gpu()).why_tight is None
    with pytest.raises(ValueError, match="device is not known"):
        _ = plan(LARGE_SHAPES, on_gpu()).free_bytes


def test_a_4bit_model_decodes_from_a_copy_if_that_leaves_a_cache():
    shapes = replace(LORA_SHAPES, four_bit=FourBit())
    sizes = {}
    for gib in (80, 6):
        result = plan(shapes, on_gpu(), device_memory_bytes=gib * GIB)
        sizes[gib] = size_of(result, "dequantised weights")
        assert result.kv_cache_tokens >= least_kv_tokens(on_gpu())
    # The A of each adapter, 32 rows, lies below its weights; the input of down_proj is as wide as the MLP.
    assert sizes[80] == (shapes.num_projection_weights + 28 * 32 * (6 * 1536 + 8960)) * 2
    assert sizes[6] == 2 * 1536 * 8960 * 2  # gate and up


# ── Refinement ───────────────────────────────────────────────────────────────────────────────────────────


def record(before, after, peak):
    span = {"phase": "train", "before_bytes": before, "after_bytes": after, "peak_bytes": peak}
    return {"device": "cuda:0", "spans": [{**span, "phase": "rollout"}, span]}


def test_a_step_as_predicted_changes_nothing():
    planner = Planner(LARGE_SHAPES, on_gpu(), 40 * GIB)
    chosen = planner.plan().train_plan
    measured = train_bytes(LARGE_SHAPES, on_gpu(), chosen, 1.0)
    assert planner.refine(chosen, measured, chosen.budget(0)) == chosen


@settings(max_examples=30)
@given(ratios=st.lists(st.floats(0.3, 3.0), min_size=1, max_size=6))
def test_a_plan_grows_at_most_once_and_then_only_shrinks(ratios):
    planner = Planner(LARGE_SHAPES, on_gpu(), 40 * GIB)
    current = planner.plan().train_plan
    for number, ratio in enumerate(ratios):
        predicted = train_bytes(LARGE_SHAPES, on_gpu(), current, 1.0)
        refined = planner.refine(current, int(ratio * predicted), current.budget(0))
        levels = [ACTIVATION_POLICIES.index(p.activation_policy) for p in (current, refined)]
        if number > 0:
            assert (levels[1], -refined.budget(0)) >= (levels[0], -current.budget(0))
        elif ratio > 1.1:
            assert (levels[1], -refined.budget(0)) > (levels[0], -current.budget(0))
        current = refined


def test_only_the_planners_own_plan_may_grow():
    planner = Planner(LARGE_SHAPES, on_gpu(), 40 * GIB)
    shrunk = planner.plan().train_plan.smaller(768)
    assert planner.refine(shrunk, 1, shrunk.budget(0)) == shrunk


def test_steps_that_tell_nothing_are_passed_over():
    planner = Planner(LARGE_SHAPES, on_gpu(), 40 * GIB)
    chosen = planner.plan().train_plan
    # The moments were made in this step: after it more is in use than before.
    assert planner.refined(chosen, record(10 * GIB, 20 * GIB, 21 * GIB), 4096) == chosen
    assert planner.refined(chosen, record(10 * GIB, 10 * GIB, 35 * GIB), 0) == chosen
    assert planner.refined(chosen, record(10 * GIB, 10 * GIB, 60 * GIB), chosen.budget(0)) != chosen


def test_longer_prompts_than_assumed_lead_to_a_smaller_plan():
    load = on_gpu(completion_tokens=2048)
    planner = Planner(LORA_SHAPES, load, 16 * GIB)
    chosen = planner.plan().train_plan
    assert planner.with_prompts(chosen, 100) == chosen
    assert planner.with_prompts(chosen, load.prompt_tokens) == chosen
    longer = planner.with_prompts(chosen, 30000)
    levels = [ACTIVATION_POLICIES.index(p.activation_policy) for p in (chosen, longer)]
    assert levels[1] > levels[0]
    assert planner.with_prompts(longer, 100) == longer


def test_prompts_that_are_computed_again_are_said_with_the_memory_that_would_spare_it(caplog):
    load = on_gpu(prompt_tokens=32768, completion_tokens=1024, num_step_sequences=8)
    line = plan(LORA_SHAPES, load, device_memory_bytes=6 * GIB).repeated_prompts
    assert "8 completions is trained in 8 micro-batches" in line
    assert "8 × 32,768 + 8 × 1,024 = 270,336 tokens, 6.6 times the 40,960 of" in line
    device_gib, policy, more_gib = re.search(
        r"a device of ([\d.]+) GiB with activation_policy='(\w+)', ([\d.]+) GiB more", line
    ).groups()
    assert float(device_gib) - float(more_gib) == pytest.approx(6, abs=0.011)
    # So much memory does spare it, and no less.
    for gib, is_spared in ((float(device_gib) + 0.01, True), (float(device_gib) - 0.01, False)):
        result = plan(LORA_SHAPES, load, device_memory_bytes=int(gib * GIB), constraints=Constraints(policy))
        assert (result.repeated_prompts is None) == is_spared
        assert (result.train_plan.budget(0) >= 40960) == is_spared
    # A run says so when it starts, or, as the longest prompt may come late, then and once.
    first_plan(Planner(LORA_SHAPES, load, 6 * GIB))
    assert caplog.messages.count(line) == 1
    caplog.clear()
    planner = Planner(LORA_SHAPES, replace(load, prompt_tokens=512), 6 * GIB)
    chosen = planner.plan().train_plan
    for length in (700, 32768, 32769):
        chosen = planner.with_prompts(chosen, length)
    assert caplog.messages == [line]


def test_prompts_computed_again_by_the_users_choice_need_no_memory():
    load = on_gpu(prompt_tokens=8192, completion_tokens=1024, num_step_sequences=8)
    cut = Constraints(tokens_per_microbatch=10240)
    line = plan(LORA_SHAPES, load, device_memory_bytes=80 * GIB, constraints=cut).repeated_prompts
    assert "in 4 micro-batches" in line and "this one will do: set max_tokens_per_microbatch=16384." in line
    assert plan(LORA_SHAPES, load, constraints=cut).repeated_prompts is None
    apart = replace(load, share_prompts=False)
    for others in (apart, replace(load, prompt_tokens=64), replace(load, num_generations=1)):
        assert (
            plan(LORA_SHAPES, others, device_memory_bytes=80 * GIB, constraints=cut).repeated_prompts is None
        )


def test_longer_prompts_than_assumed_keep_their_groups_whole():
    load = on_gpu(prompt_tokens=512, completion_tokens=1024, num_step_sequences=8)
    whole = 32768 + 8 * 1024
    planner = Planner(LORA_SHAPES, load, 40 * GIB)
    assert planner.with_prompts(planner.plan().train_plan, 32768).tokens_per_microbatch == whole
    # Not after memory ran out with less.
    planner = Planner(LORA_SHAPES, load, 40 * GIB)
    shrunk = replace(planner.plan().train_plan, activation_policy="offload", tokens_per_microbatch=4096)
    assert planner.with_prompts(shrunk, 32768) == shrunk


def test_nothing_is_planned_on_a_cpu(tmp_path):
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE))
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    assert planner_for(model, args) is None
    load = workload_of(args, ModelShapes.of(model), torch.float32, is_gpu=True)
    assert (load.num_step_sequences, load.num_rollout_sequences, load.prompt_tokens) == (8, 8, 512)
    assert load.decode_rows == 512 and load.decode_scratch_bytes > 512 * 96 * 4
    assert constraints_of(args) == Constraints(sequences_per_microbatch=8)
