"""The decoder stack against autograd through transformers' modules in float64: shared prompts, activation
policies, tiles and dropout give the gradients of one whole sequence at a time."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from test_policy import PACKED, make_model, make_samples
from torch import Tensor

from colocate.memory.train_plan import ACTIVATION_POLICIES
from colocate.policy.attention.pack import Pack
from colocate.policy.stack import layer as layer_module
from colocate.policy.stack import projections
from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.stack import DecoderStack
from colocate.types import Sample
from colocate.weights.layouts import causal_lm

Gradients = dict[str, Tensor]


def double_model(name: str, *, lora: bool = False, dropout: float = 0.0):
    model = make_model(name).double()
    if lora:
        config = LoraConfig(r=3, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
        model = get_peft_model(model, config).double()
    return exact_norms(model)


def exact_norms(model):
    """transformers computes norms and rotations in float32 whatever the model's type; here in float64."""

    def norm_forward(self, x):
        is_gemmas = not hasattr(self, "variance_epsilon")
        weight, eps = (1 + self.weight, self.eps) if is_gemmas else (self.weight, self.variance_epsilon)
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm_forward.__get__(module)
    return model


def samples_of(groups: list[tuple[int, list[int]]]) -> list[Sample]:
    """Groups of a prompt's length and its completions' lengths; members of the groups take turns."""
    samples = []
    for key, (prompt, completions) in enumerate(groups):
        members = make_samples([(prompt, completion) for completion in completions], seed=key)
        samples.append([replace(s, prompt_ids=members[0].prompt_ids, prompt_key=key) for s in members])
    longest = max(len(group) for group in samples)
    return [group[i] for i in range(longest) for group in samples if i < len(group)]


def weights_like(hidden: Tensor) -> Tensor:
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return weights.to(hidden.device, hidden.dtype)


def gradients_of(model, hidden: Tensor) -> Gradients:
    model.zero_grad()
    (hidden * weights_like(hidden)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_modules(model, samples: list[Sample]) -> Tensor:
    """Hidden states by transformers' own modules, sequence by sequence."""
    states = []
    for sample in samples:
        ids = torch.cat([sample.prompt_ids, sample.completion_ids])[None]
        states.append(causal_lm(model).base_model(input_ids=ids).last_hidden_state[0])
    return torch.cat([x[len(s.prompt_ids) - 1 : -1] for x, s in zip(states, samples, strict=True)])


def one_at_a_time(model, samples: list[Sample]) -> tuple[Tensor, Gradients]:
    hidden = by_modules(model, samples)
    return hidden.detach(), gradients_of(model, hidden)


def by_stack(
    model, samples: list[Sample], policy="keep", *, share_prompts=True
) -> tuple[Tensor, Gradients, Pack]:
    stack = DecoderStack(model, HostActivations(), share_prompts=share_prompts)
    pack = stack.pack(samples)
    hidden = stack.hidden_states(pack, policy)
    return hidden.detach(), gradients_of(model, hidden), pack


def assert_equal(
    got: tuple[Tensor, Gradients, Pack], want: tuple[Tensor, Gradients], tolerance: float
) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == want[1].keys()
    for name, value in want[1].items():
        assert (got[1][name] - value).abs().max() <= tolerance * (1 + value.abs().max()), name


GROUPS = [(6, [4, 1, 7]), (3, [5]), (5, [1, 1]), (2, [9, 3])]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.share(2)
def test_every_activation_policy_gives_the_gradients_of_whole_sequences(name, lora, monkeypatch):
    monkeypatch.setattr(layer_module, "MLP_TILE_TOKENS", 11)
    model, samples = double_model(name, lora=lora), samples_of(GROUPS)
    want = one_at_a_time(model, samples)
    for share_prompts in (True, False):
        results = [by_stack(model, samples, p, share_prompts=share_prompts) for p in ACTIVATION_POLICIES]
        for got in results:
            # transformers' rotary embedding is in float32.
            assert_equal(got, want, 1e-4)
            assert_equal(got, results[0][:2], 1e-12)


def test_padding_inside_a_completion_has_the_modules_gradient():
    """A row that `padding_idx` keeps at 0 has norm 0: RMSNorm would enlarge its gradient a thousandfold."""
    model = double_model("qwen3")
    embedding = model.model.embed_tokens
    embedding.padding_idx = 3
    embedding.weight.data[3] = 0.0
    samples = [replace(s, completion_ids=s.completion_ids.clone()) for s in samples_of(GROUPS)]
    samples[0].completion_ids[1] = samples[2].prompt_ids[0] = 3
    want = one_at_a_time(model, samples)
    assert not want[1]["model.embed_tokens.weight"][3].any()
    assert_equal(by_stack(model, samples), want, 1e-4)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_a_shared_prompt_changes_no_gradient(groups):
    model, samples = double_model("qwen3"), samples_of(groups)
    shared, apart = (by_stack(model, samples, share_prompts=share) for share in (True, False))
    assert_equal(shared, apart[:2], 1e-11)
    assert apart[2].num_tokens == sum(p + c - 1 for p, completions in groups for c in completions)
    assert shared[2].num_tokens == sum(p + sum(c - 1 for c in completions) for p, completions in groups)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    forks=st.lists(
        st.tuples(
            st.integers(1, 12),  # tokens that all rows of the episode begin with
            st.lists(st.tuples(st.integers(1, 14), st.integers(1, 9)), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_a_fork_changes_no_gradient(forks):
    """Rows of an episode share a beginning that may end before their prompt does, or within a completion."""
    samples = samples_of(GROUPS[:2])
    for episode, (num_shared, rows) in enumerate(forks):
        (shared,) = make_samples([(num_shared, 1)], seed=episode)
        for number, (num_prompt, num_own) in enumerate(rows):
            (row,) = make_samples([(num_own, num_shared + num_own)], seed=9 + number)
            ids = torch.cat([shared.prompt_ids, row.prompt_ids])
            num_prompt = min(num_prompt, len(ids) - 1)
            fields = dict(prompt_ids=ids[:num_prompt], completion_ids=ids[num_prompt:], prompt_key=0)
            samples.insert(number, replace(row, **fields, fork=(0, episode, num_shared)))
    model = double_model("qwen3")
    shared, apart = (by_stack(model, samples, share_prompts=share) for share in (True, False))
    assert_equal(shared, apart[:2], 1e-11)
    assert shared[2].num_tokens == 6 + (3 + 0 + 6) + (3 + 4) + sum(
        num_shared + sum(num_own - 1 for _, num_own in rows) for num_shared, rows in forks
    )


def test_a_window_inside_a_sequence_keeps_prompts_apart():
    samples = samples_of([(3, [4, 4])])
    assert by_stack(double_model("mistral-window"), samples)[2].to_prompts is None
    model = double_model("mistral-window")
    for layer in causal_lm(model).model.layers:
        layer.self_attn.config.sliding_window = 7
    got = by_stack(model, samples)
    assert got[2].to_prompts is not None
    assert_equal(got, one_at_a_time(model, samples), 1e-4)


def test_samples_without_a_key_share_nothing():
    samples = [replace(sample, prompt_key=None) for sample in samples_of(GROUPS)]
    assert by_stack(double_model("llama"), samples)[2].to_prompts is None


@pytest.mark.parametrize("policy", ACTIVATION_POLICIES)
def test_dropout_in_backward_is_that_of_forward(policy, monkeypatch):
    """Finite differences along the gradient, with the same masks each time."""
    monkeypatch.setattr(layer_module, "MLP_TILE_TOKENS", 11)
    model, samples = double_model("llama", lora=True, dropout=0.4), samples_of(GROUPS)
    weights = None

    def loss() -> Tensor:
        nonlocal weights
        torch.manual_seed(5)
        stack = DecoderStack(model, HostActivations())
        hidden = stack.hidden_states(stack.pack(samples), policy)
        weights = weights_like(hidden) if weights is None else weights
        return (hidden * weights).sum()

    model.eval()
    without = loss().item()
    model.train()
    assert loss().item() != pytest.approx(without, rel=1e-3)
    loss().backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    directions = [p.grad.clone() for p in trained]
    slope = sum(d.square().sum().item() for d in directions)
    losses = []
    for sign in (1, -1):
        for parameter, direction in zip(trained, directions, strict=True):
            parameter.data.add_(direction, alpha=sign * 1e-8)
        losses.append(loss().item())
        for parameter, direction in zip(trained, directions, strict=True):
            parameter.data.add_(direction, alpha=-sign * 1e-8)
    assert (losses[0] - losses[1]) / 2e-8 == pytest.approx(slope, rel=1e-4)


def test_dropout_masks_differ_between_projections_layers_and_passes(monkeypatch):
    masks = []
    dropped = projections.AdapterGroup.dropped

    def recording(self, x, seed):
        result = dropped(self, x, seed)
        masks.append(tuple((result != 0).flatten()[:64].tolist()))
        return result

    monkeypatch.setattr(projections.AdapterGroup, "dropped", recording)
    model = double_model("llama", lora=True, dropout=0.5).train()
    stack = DecoderStack(model, HostActivations())
    for _ in range(2):
        stack.hidden_states(stack.pack(samples_of(GROUPS)), "keep")
    assert len(masks) == 2 * 2 * 7
    assert len(set(masks)) == len(masks)


def saved_values(model, samples, policy) -> int:
    """Values that the layers keep between forward and backward, parameters not counted."""
    kept: dict[int, int] = {}
    stack = DecoderStack(model, HostActivations())  # which moves parameters into fused storage
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack_hook(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in parameters and x.is_floating_point():
            kept[x.untyped_storage().data_ptr()] = x.numel()
        return x

    pack = stack.pack(samples)
    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda x: x):
        hidden = stack.hidden_states(pack, policy)
    hidden.sum().backward()
    return sum(kept.values())


def test_each_policy_keeps_what_it_says():
    model, samples = double_model("llama"), samples_of([(4, [5, 6, 7])])
    config, tokens, rows = model.config, 4 + 4 + 5 + 6, 18
    h, i, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads = config.num_attention_heads
    kv = 2 * config.num_key_value_heads * h // heads
    attention = h + kv + h  # q, k and v; the output
    outside = rows * h  # the last norm's input
    assert saved_values(model, samples, "full") == layers * tokens * h + outside
    selective = layers * tokens * (2 * h + attention + heads) + outside
    assert saved_values(model, samples, "selective") == selective
    assert saved_values(model, samples, "keep") == selective + layers * tokens * 2 * i
    assert saved_values(model, samples, "offload") == outside
