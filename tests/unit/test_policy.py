"""The policy against plain `model(...).logits` and autograd: packing, cutting and ranks change nothing."""

import copy
import math
import tempfile
from dataclasses import replace
from typing import Any

import engine_models
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from engine_models import FAMILIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainingArguments

from colocate.algorithms.objective import Objective, ObjectiveParams
from colocate.memory.train_plan import TrainPlan
from colocate.policy.head.logprobs import token_logprobs
from colocate.policy.head.output_head import output_head
from colocate.policy.model.loading import enable_gradient_checkpointing
from colocate.policy.model.precision import cast_to_bf16
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy, UpdateResult
from colocate.policy.reference import AdapterOff, FrozenAdapter, FrozenCopy, make_reference
from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.stack import DecoderStack, runs_packed
from colocate.reporting.metrics import Metrics
from colocate.types import Sample
from colocate.weights.weight_parts import splits_of
from processes import FORKS

VOCAB = 61
PACKED = [*FAMILIES, "mistral-window", "qwen2-window", "qwen3-tied"]
PADDED = ["gpt2", "gemma2"]
TEMPERATURE = 0.8


def make_model(name: str = "llama", seed: int = 0):
    sizes: dict[str, Any] = dict(vocab_size=VOCAB)
    if name == "gpt2":
        sizes.update(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return engine_models.make_model(name, seed=seed, **sizes).train()


def make_samples(lengths: list[tuple[int, int]], seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def one(prompt: int, completion: int) -> Sample:
        return Sample(
            prompt_ids=torch.randint(VOCAB, (prompt,), generator=generator),
            completion_ids=torch.randint(VOCAB, (completion,), generator=generator),
            completion_mask=(torch.rand(completion, generator=generator) < 0.9).float(),
            advantage=torch.randn((), generator=generator).item(),
            loss_weight=0.1,
            entropy_weight=0.03,
        )

    return [one(p, c) for p, c in lengths]


SAMPLES = make_samples([(3, 5), (1, 1), (9, 2), (2, 12), (6, 6), (1, 9), (4, 3), (12, 1)])


def plain(model, samples: list[Sample]) -> list[tuple[Tensor, Tensor]]:
    """Log-probs and entropies by whole logits, one sequence at a time: nothing is packed or padded."""
    results = []
    for sample in samples:
        ids = torch.cat([sample.prompt_ids, sample.completion_ids])[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
        log_p = torch.log_softmax(logits.float() / TEMPERATURE, -1)
        logprobs = log_p.gather(-1, sample.completion_ids[:, None])[:, 0]
        results.append((logprobs, -(log_p.exp() * log_p).sum(-1)))
    return results


def objective(logprobs: Tensor, entropies: Tensor, batch) -> tuple[Tensor, Metrics]:
    """A plain policy gradient with an entropy bonus."""
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    gain = ((logprobs - old).exp() * batch.mask).sum(1) * batch.advantages * batch.loss_weights
    bonus = (entropies * batch.mask).sum(1) * batch.entropy_weights
    metrics = Metrics()
    metrics.add_mean("entropy", (entropies.detach() * batch.mask).sum(), batch.mask.sum())
    return -(gain.sum() + bonus.sum()), metrics


def plain_loss(model, samples: list[Sample]) -> Tensor:
    loss = torch.zeros(())
    for sample, (logprobs, entropies) in zip(samples, plain(model, samples), strict=True):
        ratio = (logprobs - logprobs.detach()).exp()
        loss = loss - (ratio * sample.completion_mask).sum() * sample.advantage * sample.loss_weight
        loss = loss - (entropies * sample.completion_mask).sum() * sample.entropy_weight
    return loss


def make_policy(
    model,
    *,
    budget: int = 32,
    max_grad_norm=None,
    reference=None,
    plan=None,
    planner=None,
    mesh=None,
    **kwargs,
) -> Policy:
    defaults = dict(output_dir="unused", use_cpu=True, report_to=[], optim="sgd", learning_rate=1.0)
    args = TrainingArguments(**(defaults | dict(lr_scheduler_type="constant") | kwargs))
    optimizer = PolicyOptimizer(model, args, 10, mesh=mesh, splits=splits_of(model))
    return Policy(
        model,
        optimizer,
        temperature=TEMPERATURE,
        plan=plan or TrainPlan(tokens_per_microbatch=budget, logprob_chunk_size=7),
        planner=planner,
        max_grad_norm=max_grad_norm,
        reference=reference,
        mesh=mesh,
    )


def step_gradients(policy: Policy, samples=SAMPLES) -> tuple[dict[str, Tensor], UpdateResult]:
    """The gradient of an update, read from the change that SGD with learning rate 1 makes."""
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    result = policy.update(samples, objective)
    return {n: before[n] - p.detach() for n, p in policy.model.named_parameters()}, result


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], scale: float = 1.0) -> None:
    assert got.keys() == want.keys()
    largest = max(g.abs().max().item() for g in want.values())
    assert largest > 1e-2
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5 * largest)


def assert_lists_close(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_last_hidden_states_are_gone_when_the_layers_go_backward(monkeypatch):
    """They are [tokens, hidden], and the planner counts them for the log-probs' part of a step only."""
    policy = make_policy(make_model("llama"))
    seen, alive = [], []
    whole = DecoderStack.last_states

    def last_states(*args):
        states = whole(*args)
        seen.append(StorageWeakRef(states.untyped_storage()))
        return states

    monkeypatch.setattr(DecoderStack, "last_states", last_states)
    policy.model.model.layers[0].input_layernorm.weight.register_hook(
        lambda grad: alive.append(any(not states.expired() for states in seen))
    )
    policy.update(SAMPLES, objective)
    assert seen and alive == [False] * len(seen)


class LargestTensor(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


class TestForward:
    @pytest.mark.parametrize("name", PACKED)
    @settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
    @given(lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
    def test_packed_equals_one_sequence_at_a_time(self, name, lengths):
        model, samples = make_model(name), make_samples(lengths)
        assert runs_packed(model)
        stack = DecoderStack(model, HostActivations())
        hidden = stack.hidden_states(stack.pack(samples), "keep")
        targets = torch.cat([s.completion_ids for s in samples])
        logprobs, entropies = token_logprobs(
            hidden, targets, output_head(model), temperature=TEMPERATURE, chunk_size=4
        )
        want = plain(model, samples)
        torch.testing.assert_close(logprobs, torch.cat([w[0] for w in want]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropies, torch.cat([w[1] for w in want]), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", [*PACKED, *PADDED])
    def test_update_equals_autograd_on_whole_logits(self, name):
        model = make_model(name)
        assert runs_packed(model) == (name in PACKED)
        policy = make_policy(model)
        want = plain(model.eval(), SAMPLES)
        loss = plain_loss(model, SAMPLES)
        loss.backward()
        exact = {n: p.grad.clone() for n, p in model.named_parameters()}
        got, result = step_gradients(policy)
        assert_same(got, exact)
        assert_lists_close(result.logprobs, [w[0].detach() for w in want])
        metrics = result.metrics.compute()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        norm = math.sqrt(sum(g.square().sum().item() for g in exact.values()))
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["learning_rate"] == 1.0 and not result.skipped and policy.version == 1

    @pytest.mark.parametrize("name", ["mistral-window", "gpt2"])
    def test_logprobs_without_gradient(self, name):
        policy = make_policy(make_model(name))
        got = policy.logprobs(SAMPLES)
        want = plain(policy.model.eval(), SAMPLES)
        for column in (0, 1):
            assert_lists_close([g[column] for g in got], [w[column].detach() for w in want])
        assert not got[0][0].requires_grad

    def test_no_mask_over_the_pack(self):
        samples = make_samples([(2, 3)] * 200)
        model = make_model("mistral-window")
        with LargestTensor() as seen:
            stack = DecoderStack(model, HostActivations())
            stack.hidden_states(stack.pack(samples), "keep").sum().backward()
        tokens, width = 800, 2 * model.config.intermediate_size
        assert seen.largest <= tokens * width < tokens**2 / 6

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_gradient_checkpointing_changes_nothing(self, use_reentrant):
        want, _ = step_gradients(make_policy(make_model("gpt2")))
        model = make_model("gpt2")
        enable_gradient_checkpointing(model, {"use_reentrant": use_reentrant})
        got, _ = step_gradients(make_policy(model))
        assert_same(got, want)

    def test_the_model_keeps_its_own_attention(self):
        model = make_model()
        own = model.config._attn_implementation
        policy = make_policy(model)
        policy.update(SAMPLES, objective)
        policy.logprobs(SAMPLES)
        assert model.config._attn_implementation == own


class TestUpdate:
    @pytest.mark.parametrize("name", ["qwen3-tied", "gpt2"])
    def test_token_budget_does_not_change_the_gradient(self, name):
        whole, _ = step_gradients(make_policy(make_model(name), budget=10_000))
        for budget in (1, 20, 45):
            cut, _ = step_gradients(make_policy(make_model(name), budget=budget))
            assert_same(cut, whole)

    def test_first_pass_hands_back_the_old_logprobs_of_the_second(self):
        policy = make_policy(make_model(), learning_rate=1e-2)
        before = [logprobs for logprobs, _ in policy.logprobs(SAMPLES)]
        first = policy.update(SAMPLES, objective)
        assert_lists_close(first.logprobs, before)
        ratios = []

        def seeing(logprobs, entropies, batch):
            ratios.append((logprobs.detach() - batch.old_logprobs).abs().max().item())
            return objective(logprobs, entropies, batch)

        again = [replace(s, old_logprobs=old) for s, old in zip(SAMPLES, first.logprobs, strict=True)]
        policy.update(again, seeing)
        assert max(ratios) > 1e-3
        with pytest.raises(ValueError, match="old_logprobs"):
            policy.update([again[0], SAMPLES[1]], objective)

    def test_clipping(self):
        unclipped, result = step_gradients(make_policy(make_model()))
        norm = result.metrics.compute()["grad_norm"]
        clipped, result = step_gradients(make_policy(make_model(), max_grad_norm=norm / 2))
        assert_same(clipped, {name: g / 2 for name, g in unclipped.items()})
        assert result.metrics.compute()["grad_norm"] == pytest.approx(norm)

    def test_bf16_parameters_change_in_place_and_equal_their_masters(self):
        model = make_model()
        originals = cast_to_bf16(model)
        args = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], learning_rate=1e-2)
        optimizer = PolicyOptimizer(model, args, 10, original_weights=originals)
        policy = Policy(
            model, optimizer, temperature=1.0, plan=TrainPlan(tokens_per_microbatch=32), max_grad_norm=1.0
        )
        before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
        policy.update(SAMPLES, objective)
        assert all(leaf.grad is None for leaf in [*optimizer.leaves, *model.parameters()])
        for parameter, master, (pointer, old) in zip(
            model.parameters(), optimizer.leaves, before, strict=True
        ):
            assert parameter.data_ptr() == pointer and master.dtype == torch.float32
            assert torch.equal(parameter, master.to(torch.bfloat16))
            assert not torch.equal(parameter, old)

    @pytest.mark.parametrize("fault", ["loss", "gradient"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_step_that_is_not_finite_changes_nothing(self, fault, dtype):
        model = make_model()
        if dtype == torch.bfloat16:
            cast_to_bf16(model)
        policy = make_policy(model, optim="adamw_torch", lr_scheduler_type="linear", learning_rate=1e-3)
        policy.update(SAMPLES, objective)
        state = copy.deepcopy((dict(model.named_parameters()), policy.optimizer.state_dict()))

        def faulty(logprobs, entropies, batch):
            loss, metrics = objective(logprobs, entropies, batch)
            if fault == "loss":
                return loss + float("nan"), metrics
            return loss + (logprobs - logprobs.detach()).sum() * 1e38 * 1e38, metrics

        result = policy.update(SAMPLES, faulty)
        assert result.skipped and policy.num_skipped_updates == 1 and policy.version == 1
        assert result.metrics.compute()["skipped_updates"] == 1
        now = (dict(model.named_parameters()), policy.optimizer.state_dict())
        for a, b in zip(tree_leaves(now), tree_leaves(state), strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
        assert not policy.update(SAMPLES, objective).skipped
        assert policy.version == 2 and all(p.isfinite().all() for p in model.parameters())

    def test_an_update_that_died_leaves_no_gradient_behind(self):
        want, _ = step_gradients(make_policy(make_model()))
        policy = make_policy(make_model())
        calls = []

        def dying(*args):
            calls.append(None)
            if len(calls) == 2:
                raise MemoryError
            return objective(*args)

        with pytest.raises(MemoryError):
            policy.update(SAMPLES, dying)
        got, _ = step_gradients(policy)
        assert_same(got, want)

    def test_bad_samples_and_temperature(self):
        policy = make_policy(make_model())
        with pytest.raises(ValueError, match="Sample 1 has 3 prompt and 0 completion"):
            policy.update([SAMPLES[0], *make_samples([(3, 0)])], objective)
        with pytest.raises(RuntimeError, match="no reference"):
            policy.reference_logprobs(SAMPLES)
        with pytest.raises(ValueError, match="temperature=0"):
            Policy(make_model(), policy.optimizer, temperature=0, max_grad_norm=1)


def lora_model(name: str = "llama") -> PeftModel:
    torch.manual_seed(1)
    return get_peft_model(make_model(name), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))


def perturb(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)


class TestReference:
    def test_full_copy_stays_and_syncs(self):
        model = make_model()
        reference = make_reference(model)
        assert isinstance(reference, FrozenCopy)
        policy = make_policy(model, reference=reference, learning_rate=1e-2)
        start = [logprobs for logprobs, _ in policy.logprobs(SAMPLES)]
        policy.update(SAMPLES, objective)
        assert_lists_close(policy.reference_logprobs(SAMPLES), start)
        with reference.model() as frozen:
            old = [p.clone() for p in frozen.parameters()]
        reference.sync(model, 0.25)
        with reference.model() as frozen:
            for now, before, theirs in zip(frozen.parameters(), old, model.parameters(), strict=True):
                torch.testing.assert_close(now, 0.75 * before + 0.25 * theirs)
        reference.sync(model, 1.0)
        assert_lists_close(policy.reference_logprobs(SAMPLES), [lp for lp, _ in policy.logprobs(SAMPLES)])

    def test_new_adapter_only_it_trains_and_reference_is_the_base(self):
        base = [w[0].detach() for w in plain(make_model().eval(), SAMPLES)]
        model = lora_model()
        reference = make_reference(model, has_new_adapter=True)
        assert isinstance(reference, AdapterOff)
        policy = make_policy(model, reference=reference)
        perturb(model)
        exact = dict(model.named_parameters())
        plain_loss(model.eval(), SAMPLES).backward()
        want = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in exact.items()}
        got, result = step_gradients(policy)
        assert_same(got, want)
        assert {n for n, g in got.items() if g.any()} == {n for n in got if "lora_" in n}
        assert_lists_close(policy.reference_logprobs(SAMPLES), base)
        assert (result.logprobs[0] - base[0]).abs().max() > 1e-3

    def test_adapter_trained_before_is_frozen_as_reference(self):
        model = lora_model()
        perturb(model)
        start = [w[0].detach() for w in plain(model.eval(), SAMPLES)]
        for name, parameter in model.named_parameters():
            if "lora_A" in name:  # the user's choice, which switching adapters must not undo
                parameter.requires_grad_(False)
        trainable = {n for n, p in model.named_parameters() if p.requires_grad}
        reference = make_reference(model)
        assert isinstance(reference, FrozenAdapter)
        policy = make_policy(model, reference=reference, learning_rate=0.1)
        policy.update(SAMPLES, objective)
        assert_lists_close(policy.reference_logprobs(SAMPLES), start)
        assert {n for n, p in model.named_parameters() if p.requires_grad} == trainable
        assert model.active_adapter == "default"
        assert (policy.logprobs(SAMPLES)[0][0] - start[0]).abs().max() > 1e-3


def run_rank(rank: int, rendezvous: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    # 20 tokens a micro-batch: the ranks' halves make 4 and 2 of them.
    policy = make_policy(make_model(), budget=20, optim="adamw_torch", learning_rate=1e-2, max_grad_norm=1.0)
    half = SAMPLES[:5] if rank == 0 else SAMPLES[5:]
    norms = [policy.update(half, objective).metrics.compute()["grad_norm"] for _ in range(3)]

    def faulty(logprobs, entropies, batch):
        loss, metrics = objective(logprobs, entropies, batch)
        return loss + (float("nan") if rank == 1 else 0.0), metrics

    skipped = policy.update(half, faulty).skipped
    policy.update([] if rank == 1 else half, objective)
    torch.save((norms, skipped, policy.version, policy.model.state_dict()), f"{out}/{rank}")
    dist.destroy_process_group()


def test_two_ranks_equal_one_process():
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            run_rank, (f"{folder}/rendezvous", folder), nprocs=2, start_method=FORKS.get_start_method()
        )
        results = [torch.load(f"{folder}/{rank}") for rank in range(2)]
    # Ranks are averaged, so one process with all samples gives each half its weight.
    halved = [replace(s, loss_weight=s.loss_weight / 2, entropy_weight=s.entropy_weight / 2) for s in SAMPLES]
    policy = make_policy(make_model(), budget=20, optim="adamw_torch", learning_rate=1e-2, max_grad_norm=1.0)
    norms = [policy.update(halved, objective).metrics.compute()["grad_norm"] for _ in range(3)]
    policy.update(halved[:5], objective)
    for theirs, skipped, version, state in results:
        assert theirs == pytest.approx(norms, rel=1e-4)
        assert skipped and version == 4
        for name, value in policy.model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)


# ── Steps without a signal ───────────────────────────────────────────────────────────────────────────────

OPTIMIZERS = {
    "adamw": dict(optim="adamw_torch", weight_decay=0.1, learning_rate=1e-2),
    "momentum": dict(optim="sgd", optim_args="momentum=0.9", weight_decay=0.1, learning_rate=1e-1),
    "adafactor": dict(optim="adafactor", learning_rate=1e-2),
}


def without_advantages(by_token: bool = False) -> list[Sample]:
    zero = [torch.zeros(len(s.completion_ids)) if by_token else 0.0 for s in SAMPLES]
    return [replace(s, advantage=x) for s, x in zip(SAMPLES, zero, strict=True)]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_a_step_without_a_signal_makes_no_pass_and_moves_the_weights_alike(architecture, optim, monkeypatch):
    """Bit for bit what the passes would have led to: Adam's moments and weight decay act on."""
    passes: list[int] = []
    scored = Policy._scored

    def counted(self, *args, **kwargs):
        passes.append(1)
        return scored(self, *args, **kwargs)

    monkeypatch.setattr(Policy, "_scored", counted)
    grpo = Objective(ObjectiveParams())
    weights = []
    for keep_logprobs in (True, False):
        policy = make_policy(make_model(architecture), **OPTIMIZERS[optim])
        for samples in (SAMPLES, without_advantages(), without_advantages(by_token=True), SAMPLES):
            passes.clear()
            before = [p.detach().clone() for p in policy.model.parameters()]
            result = policy.update(samples, grpo, keep_logprobs=keep_logprobs)
            is_made = keep_logprobs or samples is SAMPLES
            assert result.has_signal == is_made and bool(passes) == is_made
            assert not all(map(torch.equal, before, policy.model.parameters())) or optim == "adafactor"
            told = result.metrics.compute()
            assert told["updates_without_signal"] == (not is_made) and told["skipped_updates"] == 0
            if samples is not SAMPLES:
                assert told["loss"] == 0 and told["grad_norm"] == 0
        weights.append([p.detach().clone() for p in policy.model.parameters()])
        assert policy.version == 4
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(
    "params",
    [
        ObjectiveParams(beta=0.1),
        ObjectiveParams(entropy_coef=0.1),
        ObjectiveParams(use_adaptive_entropy=True),
    ],
)
def test_a_step_with_another_part_of_the_loss_is_made(params):
    samples = [
        replace(s, reference_logprobs=torch.zeros(len(s.completion_ids))) for s in without_advantages()
    ]
    policy = make_policy(make_model("llama"))
    result = policy.update(samples, Objective(params), keep_logprobs=False)
    assert result.has_signal and "entropy" in result.metrics.compute()
