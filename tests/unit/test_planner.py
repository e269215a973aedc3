"""The planner against real allocations of tiny models: bytes must be equal, not similar."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    TrainingArguments,
)

from colocate.memory.planner import Workload, kv_bytes_per_token, plan
from colocate.policy.optimizer import PolicyOptimizer

SHAPE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
CONFIGS = [
    pytest.param(Qwen2Config(**SHAPE, tie_word_embeddings=True), id="qwen2-tied"),
    pytest.param(LlamaConfig(**SHAPE, tie_word_embeddings=False), id="llama-untied"),
    pytest.param(Qwen3Config(**SHAPE, tie_word_embeddings=True), id="qwen3-tied"),
    pytest.param(MistralConfig(**SHAPE), id="mistral"),
]
DTYPES = [torch.bfloat16, torch.float32]


def workload(**changes):
    return Workload(
        **{
            "parameter_dtype": torch.bfloat16,
            "max_sequence_length": 40,
            "tokens_per_microbatch": 64,
            "max_num_seqs": 4,
            **changes,
        }
    )


def size_of(result, name):
    return next(row.size_bytes for row in result.rows if row.name == name)


def allocated(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_config", CONFIGS)
def test_weights_masters_moments_and_gradients(model_config, dtype):
    model = AutoModelForCausalLM.from_config(model_config).to(dtype)
    result = plan(model_config, workload(parameter_dtype=dtype, has_reference=True))

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
    assert size_of(result, "gradients") == allocated(master.grad for master in masters)
    if dtype == torch.bfloat16:
        assert size_of(result, "float32 masters") == allocated(masters)
    else:
        assert "float32 masters" not in {row.name for row in result.rows}


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "adamw_8bit", "sgd"])
@pytest.mark.parametrize("lora_rank", [None, 64])
def test_moments_of_every_optimizer(optim, lora_rank, tmp_path):
    model_config = Qwen2Config(**SHAPE | dict(hidden_size=72, intermediate_size=130))
    model = AutoModelForCausalLM.from_config(model_config)
    if lora_rank:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=lora_rank, target_modules="all-linear"))
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
    planned = plan(model_config, workload(optim=optim, lora_rank=lora_rank, lora_target_modules="all-linear"))
    assert size_of(planned, "moments") == allocated(moments)
    if "8bit" in optim:
        assert {value.dtype for value in moments} >= {torch.uint8, torch.float32}


def saved_for_backward(model, num_tokens):
    """Bytes that autograd keeps of one forward pass, parameters excepted."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.arange(num_tokens)[None] % model.config.vocab_size
        output = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert output.requires_grad
    return allocated(kept.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_config", CONFIGS)
def test_activations_are_what_autograd_keeps(model_config, dtype):
    model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa").to(dtype).train()
    result = plan(model_config, workload(parameter_dtype=dtype, gradient_checkpointing=False))
    assert size_of(result, "activations") == saved_for_backward(model, num_tokens=64)


def test_checkpointed_layers_keep_their_input_only():
    model_config = Qwen2Config(**SHAPE)
    sizes = {}
    for num_layers in (2, 3):
        model_config.num_hidden_layers = num_layers
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa").train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        planned = size_of(plan(model_config, workload(parameter_dtype=torch.float32)), "activations")
        sizes[num_layers] = (planned, saved_for_backward(model, num_tokens=64))
    planned, kept = (b - a for a, b in zip(sizes[2], sizes[3], strict=True))
    assert planned == kept == 64 * 32 * 4
    # Beyond what is kept the plan counts one layer, computed again in the backward pass.
    assert sizes[3][0] > sizes[3][1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_cache_is_a_tensor_of_its_shape(dtype):
    result = plan(LlamaConfig(**SHAPE), workload(parameter_dtype=dtype, page_size=16))
    pages = 4 * 3  # four sequences of 40 tokens in pages of 16
    cache = torch.empty(2, 3, pages, 16, 2, 8, dtype=dtype)  # [key/value, layers, pages, page, K, D]
    assert result.kv_cache_tokens == pages * 16
    assert size_of(result, "KV cache") == cache.nbytes
    assert kv_bytes_per_token(3, 2, 8, dtype) * pages * 16 == cache.nbytes


def test_decode_logits_are_two_copies_or_one_buffer_with_attentions_partial_results():
    sequences = size_of(plan(LlamaConfig(**SHAPE), workload()), "decode logits")
    assert sequences == 2 * torch.empty(4, 96).nbytes
    buffer = plan(LlamaConfig(**SHAPE), workload(decode_rows=8, decode_partials_bytes=1000))
    assert size_of(buffer, "decode logits") == torch.empty(8, 96).nbytes + 1000


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
    result = plan(
        model_config, workload(lora_rank=4, lora_target_modules=targets, has_reference=True, optim="sgd")
    )
    assert size_of(result, "LoRA adapters") == allocated(trained)
    assert size_of(result, "gradients") == 4 * sum(p.numel() for p in trained)
    assert size_of(result, "moments") == 0
    assert not {"reference", "float32 masters"} & {row.name for row in result.rows}


def test_unknown_lora_targets_list_the_models_own():
    with pytest.raises(ValueError, match=r"'qkv'.*'down_proj'"):
        plan(Qwen2Config(**SHAPE), workload(lora_rank=4, lora_target_modules=("qkv",)))


def test_log_prob_chunk_is_no_longer_than_the_micro_batch():
    chunk = {
        size: size_of(plan(Qwen2Config(**SHAPE), workload(logprob_chunk_size=size)), "log-prob chunk")
        for size in (32, 64, 1024)
    }
    assert chunk[32] == 32 * 96 * (2 + 4 + 4)
    assert chunk[64] == chunk[1024] == 2 * chunk[32]


def test_phases_take_turns():
    result = plan(Qwen2Config(**SHAPE), workload())
    by_phase = {phase: result.phase_bytes(phase) for phase in ("resident", "rollout", "train")}
    assert sum(by_phase.values()) == sum(row.size_bytes for row in result.rows)
    assert result.peak_bytes == by_phase["resident"] + max(by_phase["rollout"], by_phase["train"])
    assert result.fits is None
    assert json.loads(json.dumps(result.to_dict()))["peak_bytes"] == result.peak_bytes


def test_kv_cache_shrinks_to_what_is_left_and_then_the_run_fits():
    # Many sequences, so that the cache is the largest user.
    wishes = dict(max_num_seqs=64, tokens_per_microbatch=40, logprob_chunk_size=8)
    full = plan(Qwen2Config(**SHAPE), workload(**wishes))
    assert full.phase_bytes("rollout") > full.phase_bytes("train")
    tight = plan(Qwen2Config(**SHAPE), workload(**wishes), device_memory_bytes=int(full.peak_bytes * 0.9))
    assert tight.fits and tight.remedies == ()
    assert 48 <= tight.kv_cache_tokens < full.kv_cache_tokens
    assert tight.kv_cache_tokens % 16 == 0
    # An explicit size is not changed behind the user's back.
    asked = plan(
        Qwen2Config(**SHAPE),
        workload(**wishes, kv_cache_tokens=full.kv_cache_tokens),
        device_memory_bytes=int(full.peak_bytes * 0.9),
    )
    assert asked.kv_cache_tokens == full.kv_cache_tokens and not asked.fits
    remedy = next(r for r in asked.remedies if r.startswith("kv_cache_tokens="))
    tokens = int(remedy.split("=")[1].split(":")[0])
    assert tokens == tight.kv_cache_tokens


def test_the_micro_batch_remedy_fits():
    wishes = dict(max_sequence_length=32, tokens_per_microbatch=4096, gradient_checkpointing=True)
    full = plan(Qwen2Config(**SHAPE), workload(**wishes))
    device = int(full.peak_bytes * 0.7)
    tight = plan(Qwen2Config(**SHAPE), workload(**wishes), device_memory_bytes=device)
    assert tight.fits is False
    remedy = next(r for r in tight.remedies if r.startswith("max_tokens_per_microbatch="))
    tokens = int(remedy.split("=")[1].split(":")[0])
    for size, fits in ((tokens, True), (tokens + 1, False)):
        wishes["tokens_per_microbatch"] = size
        assert plan(Qwen2Config(**SHAPE), workload(**wishes), device_memory_bytes=device).fits is fits


def test_a_model_too_large_is_told_so():
    result = plan(Qwen2Config(**SHAPE), workload(has_reference=True), device_memory_bytes=1000)
    assert not result.fits
    assert any(r.startswith("beta=0.0") for r in result.remedies)
    assert any(r.startswith("use_peft=True") for r in result.remedies)


def test_an_optimizer_of_unknown_size_is_refused():
    with pytest.raises(ValueError, match="lomo"):
        plan(Qwen2Config(**SHAPE), workload(optim="lomo"))
