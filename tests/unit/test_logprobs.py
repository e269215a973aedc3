"""Log-probabilities in chunks against the whole softmax in float64, values, gradients and memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from test_policy import LargestTensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
)

from colocate.policy.checks.head_check import check_output_head
from colocate.policy.head.logprobs import token_logprobs
from colocate.policy.head.output_head import OutputHead, output_head


def reference(hidden, weight, bias, targets, scale, softcap, temperature):
    """All logits at once, by autograd, in the precision of the inputs."""
    logits = hidden @ weight.T * 1.0
    logits = scale * (logits + bias if bias is not None else logits)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def make_inputs(n, v, d, has_bias, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(n, d, generator=generator), torch.randn(v, d, generator=generator)]
    if has_bias:
        tensors.append(torch.randn(v, generator=generator))
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    return leaves, torch.randint(v, (n,), generator=generator)


@settings(max_examples=40)
@given(
    n=st.integers(1, 17),
    chunk_size=st.integers(1, 20),
    has_bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.25]),
    softcap=st.sampled_from([None, 5.0]),
    temperature=st.sampled_from([1.0, 0.7]),
    uses=st.sampled_from(["logprobs", "entropies", "both"]),
    trains_head=st.booleans(),
    keep_softmax=st.booleans(),
)
def test_equals_whole_softmax_in_float64(
    n, chunk_size, has_bias, scale, softcap, temperature, uses, trains_head, keep_softmax
):
    leaves, targets = make_inputs(n, 29, 8, has_bias)
    for leaf in leaves[1:]:
        leaf.requires_grad_(trains_head)
    exact = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    head = OutputHead(leaves[1], leaves[2] if has_bias else None, scale, softcap)
    got = token_logprobs(
        leaves[0],
        targets,
        head,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy_gradient=uses != "logprobs",
        keep_softmax=keep_softmax,
    )
    bias = exact[2] if has_bias else None
    want = reference(exact[0], exact[1], bias, targets, scale, softcap, temperature)
    weights = torch.linspace(-1, 2, n)
    parts = {"logprobs": [0], "entropies": [1], "both": [0, 1]}[uses]
    sum((got[i] * (weights + i)).sum() for i in parts).backward()
    sum((want[i] * (weights.double() + i)).sum() for i in parts).backward()
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(leaves, exact, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=2e-5)


def test_gradients_by_finite_differences():
    (hidden, weight, bias), targets = make_inputs(5, 7, 3, True, torch.float64)

    def compute(hidden, weight, bias):
        return token_logprobs(
            hidden, targets, OutputHead(weight, bias, 0.5, 3.0), temperature=0.8, chunk_size=2
        )

    assert torch.autograd.gradcheck(compute, (hidden, weight, bias))


def test_bf16_inputs_lose_nothing_but_their_own_rounding():
    (hidden, weight), targets = make_inputs(9, 31, 64, False, torch.bfloat16)
    got = token_logprobs(hidden, targets, OutputHead(weight), chunk_size=4)[0]
    want = reference(hidden.double(), weight.double(), None, targets, 1.0, None, 1.0)[0]
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)
    got.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("keep_softmax", [False, True])
@pytest.mark.parametrize("trains_head", [False, True])
def test_gradients_of_bf16_inputs_round_a_few_times_at_most(trains_head, keep_softmax):
    """The logits' gradient, the product, and what is scaled after or before it: 2^-9 of a value each."""
    (hidden, weight), targets = make_inputs(64, 31, 64, False, torch.bfloat16)
    weight.requires_grad_(trains_head)
    factors = torch.linspace(-1e-4, 2e-4, 64)
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    want = reference(*exact, None, targets, 1.0, None, 1.0)[0]
    (want * factors).sum().backward()
    got, entropies = token_logprobs(
        hidden, targets, OutputHead(weight), chunk_size=16, entropy_gradient=False, keep_softmax=keep_softmax
    )
    assert not entropies.requires_grad
    (got * factors).sum().backward()
    for mine, theirs in zip((hidden, weight), exact, strict=True):
        if mine.requires_grad:
            error = (mine.grad.double() - theirs.grad).norm() / theirs.grad.norm()
            assert error < 2.0**-8


def test_backward_again_gives_the_same():
    (hidden, weight), targets = make_inputs(9, 31, 16, False)
    weight.requires_grad_(False)
    logprobs = token_logprobs(hidden, targets, OutputHead(weight), entropy_gradient=False)[0]
    first, second = (torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert first.equal(second)


def test_no_tensor_of_tokens_times_vocabulary_forward_or_backward():
    n, v, d, chunk = 256, 128, 8, 16
    (hidden, weight), targets = make_inputs(n, v, d, False)
    with LargestTensor() as seen:
        logprobs, entropies = token_logprobs(hidden, targets, OutputHead(weight), chunk_size=chunk)
        (logprobs.sum() + entropies.sum()).backward()
    assert max(chunk * v, n * d) <= seen.largest <= max(chunk * v, n * d, v * d) < n * v / 10
    with LargestTensor() as seen:  # the instrument sees what it should
        reference(hidden, weight, None, targets, 1.0, None, 1.0)
    assert seen.largest == n * v


TINY = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY),
        Gemma2Config(**TINY, head_dim=8, num_key_value_heads=1, final_logit_softcapping=20.0),
        GraniteConfig(**TINY, logits_scaling=8.0),
        CohereConfig(**TINY, logit_scale=0.0625),
        GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=32),
    ],
    ids=lambda config: config.model_type,
)
def test_head_check_accepts_what_it_knows(config):
    check_output_head(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("attribute", ["final_logit_softcapping", "logits_scaling"])
def test_head_check_refuses_a_head_that_computes_something_else(attribute):
    # Llama applies neither, so a config that claims it makes the head here differ from the model's own.
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    setattr(model.config, attribute, 20.0)
    with pytest.raises(ValueError, match="LlamaForCausalLM computes its logits"):
        check_output_head(model)


def test_head_check_refuses_an_unknown_multiplier():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    check_output_head(model)
    model.lm_head.register_forward_hook(lambda module, args, logits: 3 * logits)
    with pytest.raises(ValueError, match="LlamaForCausalLM computes its logits"):
        check_output_head(model)


def test_head_under_peft():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    base = model.lm_head.weight
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    trained = output_head(model).weight
    assert trained.requires_grad and trained is not base
    with model.disable_adapter():
        assert output_head(model).weight is base
    check_output_head(model)
    lora_on_head = get_peft_model(
        AutoModelForCausalLM.from_config(LlamaConfig(**TINY)), LoraConfig(target_modules=["lm_head"])
    )
    with pytest.raises(ValueError, match="target_modules"):
        output_head(lora_on_head)
