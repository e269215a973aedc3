"""Every method of PEFT: trained beside a reference that is the policy at the start, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, PeftModel, get_peft_model
from transformers import TrainingArguments

from colocate.engines.transformers_engine import TransformersEngine
from colocate.policy.model.loading import add_adapter
from colocate.policy.model.trained_weights import check_trained_weights
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy
from colocate.policy.reference import make_reference
from colocate.types import Sample
from tiny import VOCAB_SIZE, make_model, make_trainer

TARGETS = ["q_proj", "down_proj"]
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": dict(total_step=10),
    "C3A": dict(block_size=8),
    "IA3": dict(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "MISS": dict(r=8),
    "ROAD": dict(group_size=8),
    "SHIRA": dict(r=2),
    "VBLORA": dict(vector_length=8, num_vectors=16),
    "WAVEFT": dict(n_frequency=16),
    "TRAINABLE_TOKENS": dict(token_indices=[3, 4]),
    "ADAPTION_PROMPT": dict(adapter_len=2, adapter_layers=1),
}
"""What a tiny model needs besides, or instead of, `target_modules`."""
WITHOUT_TARGETS = {
    *("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING"),
    *("P_TUNING", "XLORA", "LN_TUNING", "TRAINABLE_TOKENS"),
}
REFUSED = {
    "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING",
    "XLORA", "POLY", "SHADOW", "ADALORA", "LILY",
}  # fmt: skip
NEEDS_ANOTHER_PACKAGE = {"ADAMSS"}  # scikit-learn
VARIANTS = {
    "bias": dict(bias="all"),
    "dora": dict(use_dora=True),
    "pissa": dict(init_lora_weights="pissa"),
    "pissa_niter": dict(init_lora_weights="pissa_niter_4"),
    "olora": dict(init_lora_weights="olora"),
    "orthogonal": dict(init_lora_weights="orthogonal"),
    "random": dict(init_lora_weights=False),
    "modules_to_save": dict(modules_to_save=["embed_tokens"]),
    "tokens": dict(trainable_token_indices=[3, 4]),
    "embedding": dict(target_modules=["q_proj", "embed_tokens"]),
}
"""LoRA with settings by which a start differs from the base, or more than A and B is trained."""


def config_of(kind: str) -> Any:
    if kind in VARIANTS:
        return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": TARGETS, **VARIANTS[kind]})
    options = {} if kind in WITHOUT_TARGETS else {"target_modules": TARGETS}
    return PEFT_TYPE_TO_CONFIG_MAPPING[kind](task_type="CAUSAL_LM", **{**options, **OPTIONS.get(kind, {})})


KINDS = sorted({str(kind.value) for kind in PEFT_TYPE_TO_CONFIG_MAPPING} - NEEDS_ANOTHER_PACKAGE - REFUSED)


KINDS_BEGINNING_AT_BASE = {*KINDS} - {"LORA", "IA3"}
"""Methods of which a new adapter is the base model, for two of which every run shows it."""


def make_samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in (3, 5, 9, 2, 2, 8)]
    pairs = zip(ids[::2], ids[1::2], strict=True)
    return [Sample(prompt, completion, torch.ones(len(completion)), 0.0) for prompt, completion in pairs]


SAMPLES = make_samples()


def make_policy(model: PeftModel, *, is_new: bool) -> Policy:
    arguments = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    reference = make_reference(model, has_new_adapter=is_new)
    optimizer = PolicyOptimizer(model, arguments, 1)
    return Policy(model, optimizer, temperature=1.0, max_grad_norm=1.0, reference=reference)


def assert_lists_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def perturb(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def by_peft(model: Any) -> list[torch.Tensor]:
    """Log-probs of the samples by the wrapper's own forward, one unpadded sequence at a time."""
    result = []
    for sample in SAMPLES:
        ids = torch.cat([sample.prompt_ids, sample.completion_ids])[None]
        with torch.no_grad():
            logits = model.eval()(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, sample.completion_ids[:, None])[:, 0]
        result.append(logprobs)
    return result


@pytest.mark.parametrize(
    ("kind", "is_new"),
    [
        pytest.param(
            kind, is_new, marks=[pytest.mark.slow] if is_new and kind in KINDS_BEGINNING_AT_BASE else []
        )
        for is_new in (True, False)
        for kind in (*KINDS, *VARIANTS)
    ],
)
@pytest.mark.share(4)
def test_the_reference_is_the_policy_at_the_start(kind, is_new):
    torch.manual_seed(2)
    model = add_adapter(make_model("llama"), config_of(kind))
    if not is_new:
        perturb(model)
    check_trained_weights(model)
    start = by_peft(model)
    policy = make_policy(model, is_new=is_new)
    assert_lists_close([logprobs for logprobs, _ in policy.logprobs(SAMPLES)], start)
    assert_lists_close(policy.reference_logprobs(SAMPLES), start)
    perturb(model)
    trained = {name: p.clone() for name, p in model.state_dict().items()}
    now = by_peft(model)
    assert max((a - b).abs().max() for a, b in zip(now, start, strict=True)) > 1e-4
    assert_lists_close([logprobs for logprobs, _ in policy.logprobs(SAMPLES)], now)
    assert_lists_close(policy.reference_logprobs(SAMPLES), start)
    assert all(torch.equal(p, trained[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_method_of_the_wrapper_or_of_every_step_is_refused_by_name(kind):
    config = config_of(kind)
    with pytest.raises(ValueError, match=type(config).__name__):
        add_adapter(make_model("llama"), config)


def test_replicated_layers_are_refused_by_name():
    config = LoraConfig(target_modules=TARGETS, layer_replication=[(0, 2), (1, 2)])
    with pytest.raises(ValueError, match="layer_replication"):
        add_adapter(make_model("llama"), config)


def alora() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS, alora_invocation_tokens=[5, 6])


def adalora() -> Any:
    return config_of("ADALORA")


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    ("make", "words"),
    [(alora, "alora_invocation_tokens"), (adalora, "update_and_allocate")],
    ids=["alora", "adalora"],
)
@pytest.mark.parametrize("is_new", [True, False], ids=["peft_config", "PeftModel"])
def test_a_run_refuses_it_at_every_door(tmp_path, make, words, beta, is_new):
    model = make_model() if is_new else get_peft_model(make_model(), make())
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, model=model, peft_config=make() if is_new else None, beta=beta)


def test_an_engine_refuses_what_works_in_the_wrapper():
    with pytest.raises(ValueError, match="alora_invocation_tokens"):
        TransformersEngine(get_peft_model(make_model("gpt2"), alora_of_gpt2()), pad_token_id=0)


def alora_of_gpt2() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], alora_invocation_tokens=[5, 6])


def test_a_merged_adapter_is_refused(tmp_path):
    model = get_peft_model(make_model(), LoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS))
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        make_trainer(tmp_path, model=model)
