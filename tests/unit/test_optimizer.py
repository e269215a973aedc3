"""fp32 masters under bf16 parameters: small steps survive, gradients add up, state continues exactly."""

import io
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen2Config, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from colocate.config.grpo_config import GRPOConfig
from colocate.config.transformers_options import transformers_options
from colocate.policy.footprint import MOMENTS_BYTES
from colocate.policy.model.precision import cast_to_bf16
from colocate.policy.optimizer.masters import Masters, MasterShards
from colocate.policy.optimizer.names import ARGUMENTS, REFUSED_OPTIMIZERS
from colocate.policy.optimizer.names import OPTIMIZERS as NAMES
from colocate.policy.optimizer.optimizer import PolicyOptimizer


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # transformers' Trainer creates its output_dir


def arguments(**kwargs) -> TrainingArguments:
    defaults = dict(output_dir="unused", use_cpu=True, report_to=[], lr_scheduler_type="constant")
    return TrainingArguments(**(defaults | kwargs))


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


AVAILABLE = [
    *(
        "adamw_torch_fused",
        "adamw_torch",
        "sgd",
        "adafactor",
        "adagrad",
        "rmsprop",
        "adamw_8bit",
        "adamw_bnb_8bit",
    ),
    *(
        "paged_adamw_32bit",
        "paged_adamw_8bit",
        "lion_32bit",
        "lion_8bit",
        "paged_lion_32bit",
        "paged_lion_8bit",
    ),
    *("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
]
"""Of transformers' optimizers those that PyTorch, transformers and bitsandbytes bring."""


def backward(model: nn.Module, step: int, optimizer: object) -> float:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 16, generator=generator).bfloat16()
    targets = torch.randint(8, (32,), generator=generator)
    loss = F.cross_entropy(model(inputs.to(next(model.parameters()).dtype)).float(), targets)
    ours = isinstance(optimizer, PolicyOptimizer)
    with optimizer.collecting_gradients() if ours else nullcontext():
        loss.backward()
    return loss.item()


def moved(model_or_masters, start) -> torch.Tensor:
    return torch.cat([(a - b).flatten() for a, b in zip(model_or_masters, start, strict=True)])


def test_masters_follow_fp32_at_a_learning_rate_that_bf16_loses():
    args = arguments(learning_rate=1e-6, max_grad_norm=0)
    exact, ours, naive = small_model(), small_model(), small_model()
    originals = cast_to_bf16(ours)
    start = [p.detach().clone() for p in exact.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(originals.values(), start, strict=True))
    naive.to(torch.bfloat16)
    naive_start = [p.detach().float() for p in naive.parameters()]
    ours_optimizer = PolicyOptimizer(ours, args, 50, original_weights=originals)
    exact_optimizer, naive_optimizer = (
        torch.optim.AdamW(m.parameters(), lr=1e-6, weight_decay=0) for m in (exact, naive)
    )
    for step in range(50):
        for model, optimizer in ((exact, exact_optimizer), (ours, ours_optimizer), (naive, naive_optimizer)):
            backward(model, step, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    want = moved([p.detach() for p in exact.parameters()], start)
    got = moved([p.detach() for p in ours_optimizer.leaves], start)
    lost = moved([p.detach().float() for p in naive.parameters()], naive_start)
    assert (got - want).norm() / want.norm() < 0.05
    assert (lost - want).norm() / want.norm() > 0.5
    for parameter, master in zip(ours.parameters(), ours_optimizer.leaves, strict=True):
        assert torch.equal(parameter, master.to(torch.bfloat16))


@pytest.mark.parametrize("number", range(6))
def test_any_weight_that_somebody_else_has_changed_is_noticed(number, monkeypatch):
    # A few tensors to a bucket: the last one's and a lone one's count, too.
    monkeypatch.setattr("colocate.policy.optimizer.masters.BUCKET_BYTES", 600)
    model = small_model()
    optimizer = PolicyOptimizer(model, arguments(), 2, original_weights=cast_to_bf16(model))
    backward(model, 0, optimizer)
    optimizer.step()
    assert optimizer.has_current_masters()
    weights = list(model.parameters())[number].data.flatten()
    for value in (torch.nextafter(weights[-1], torch.tensor(torch.inf).bfloat16()), torch.nan):
        weights[-1] = value
        assert not optimizer.has_current_masters()
    optimizer.take_parameters()
    weights[-1] = 0.5
    assert not optimizer.has_current_masters()
    optimizer.take_parameters()
    assert optimizer.has_current_masters()


@pytest.mark.parametrize("rank", range(4))
def test_ranks_without_rows_of_a_weight_find_it_unchanged(rank):
    weights = {"scale": torch.ones(()), "few": torch.ones(2, 3), "many": torch.ones(9, 3)}
    parameters = {name: nn.Parameter(weight.bfloat16()) for name, weight in weights.items()}
    masters = Masters(
        parameters, MasterShards(SimpleNamespace(num_replicas=4, replica=rank, replica_group=None))
    )
    masters.make({}, {})
    assert masters.are_current()
    for name, num_ranks in (("scale", 1), ("few", 2), ("many", 3)):
        parameters[name].data += 1  # ceil(rows / 4) rows are a rank's, from the first rank on
        assert masters.are_current() == (rank >= num_ranks), name
        parameters[name].data -= 1


def test_gradients_add_up_in_fp32():
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = PolicyOptimizer(model, arguments(), 1)
    with optimizer.collecting_gradients():
        for _ in range(1000):
            model.weight.sum().backward()
            assert model.weight.grad is None
    assert optimizer.gradients()[0].item() == 1000  # bf16 sums of ones stop at 256
    optimizer.zero_grad()
    assert optimizer.leaves[0].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optim", AVAILABLE)
def test_state_round_trip_continues_bit_for_bit(optim, dtype):
    momentum = "momentum=0.9" if optim in ("sgd", "rmsprop", "rmsprop_bnb") else None
    args = arguments(
        optim=optim, optim_args=momentum, learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=2
    )

    def make(seed):
        model = small_model(seed).to(dtype)
        return model, PolicyOptimizer(model, args, 10)

    def train(model, optimizer, steps):
        for step in steps:
            backward(model, step, optimizer)
            optimizer.step()

    model, optimizer = make(0)
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(4, 8))

    resumed, resumed_optimizer = make(1)
    file.seek(0)
    saved = torch.load(file)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    train(resumed, resumed_optimizer, range(4, 8))
    for a, b in zip(optimizer.leaves, resumed_optimizer.leaves, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert optimizer.learning_rate == resumed_optimizer.learning_rate != args.learning_rate


def large_model(seed: int = 0) -> nn.Sequential:
    """Every rule of the 8-bit state applies: the first weight is quantized, the others are too small."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 300), nn.LayerNorm(300), nn.Linear(300, 8))


def bits(optimizer: PolicyOptimizer) -> list[torch.Tensor]:
    """Everything that a step changes, copied to the host: parameters, masters, moments, step counters."""
    state = [optimizer.optimizer.state.get(leaf, {}) for leaf in optimizer.leaves]
    values = [torch.as_tensor(x) for entry in state for _, x in sorted(entry.items())]
    tensors = [*optimizer._parameters.values(), *optimizer.leaves, *values]
    return [x.detach().cpu().clone() for x in tensors]


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("optim", AVAILABLE)
def test_it_learns_with_the_state_that_the_planner_counts(optim, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 8)).to(torch.bfloat16)
    is_slow = optim.startswith("sgd")
    optimizer = PolicyOptimizer(model, arguments(optim=optim, learning_rate=0.5 if is_slow else 3e-3), 40)
    losses = []
    for _ in range(40):
        losses.append(backward(model, 0, optimizer))
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    assert (optim in MOMENTS_BYTES) != ("the planner does not know" in caplog.text)
    if optim in MOMENTS_BYTES:
        sizes = [leaf.numel() for leaf in optimizer.leaves]
        # bitsandbytes' table of the 256 values is shared by all; masters are float32; torch counts steps.
        tables_bytes = 2 * 4 * 256 if "8bit" in optim else 0
        counted = sum(map(MOMENTS_BYTES[optim], sizes)) + 4 * sum(sizes)
        assert 0 <= optimizer.num_bytes - counted <= tables_bytes + 4 * len(sizes)


OPTIMIZERS = ["adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "sgd"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optim", [*OPTIMIZERS, "adafactor", "adagrad", "ademamix_8bit", "own momentum"])
def test_offloaded_between_steps_trains_bit_for_bit(optim, dtype):
    def make():
        model = large_model().to(dtype)
        if optim != "own momentum":
            return model, PolicyOptimizer(model, arguments(optim=optim, learning_rate=1e-2), 10)
        own = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        return model, PolicyOptimizer(model, arguments(), 10, optimizers=(own, None))

    (kept, kept_optimizer), (moved, moved_optimizer) = make(), make()
    for step in range(4):
        resident = moved_optimizer.num_bytes
        moved_optimizer.offload()
        moved_optimizer.offload()
        state = (x for entry in moved_optimizer.optimizer.state.values() for x in entry.values())
        tensors = (*moved_optimizer._masters.of_low.values(), *state)
        movable = [x for x in tensors if isinstance(x, torch.Tensor)]
        moved_bytes = sum(x.nbytes for x in movable if x.nbytes >= 2048)
        assert moved_bytes >= 4 * (16 * 300 + 300 * 8) or dtype == torch.float32 or "own" in optim
        assert moved_optimizer.num_bytes == resident - moved_bytes
        assert all(p.untyped_storage().nbytes() for p in moved.parameters())
        if step % 2:
            moved_optimizer.prefetch()
        backward(kept, step, kept_optimizer), backward(moved, step, moved_optimizer)
        kept_optimizer.step(), moved_optimizer.step()
        assert moved_optimizer.num_bytes >= resident
        assert moved_optimizer.num_bytes == kept_optimizer.num_bytes
        assert_equal(bits(moved_optimizer), bits(kept_optimizer))


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_state_is_saved_and_restored_while_it_is_offloaded(optim):
    def make(seed):
        model = large_model(seed).to(torch.bfloat16)
        return model, PolicyOptimizer(model, arguments(optim=optim, learning_rate=1e-2), 10)

    (model, optimizer), (resumed, resumed_optimizer) = make(0), make(1)
    for each, its_optimizer in ((model, optimizer), (resumed, resumed_optimizer)):
        backward(each, 0, its_optimizer)
        its_optimizer.step()
        its_optimizer.offload()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed_optimizer.load_state_dict(torch.load(file))
    optimizer.offload(), resumed_optimizer.offload()
    backward(model, 1, optimizer), backward(resumed, 1, resumed_optimizer)
    optimizer.step(), resumed_optimizer.step()
    assert_equal(bits(resumed_optimizer), bits(optimizer))


def test_state_that_shares_memory_with_a_parameter_is_not_moved():
    model = large_model()
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = PolicyOptimizer(model, arguments(), 10, optimizers=(own, None))
    own.state[model[0].weight]["slow_weights"] = model[0].weight.detach()
    with pytest.raises(ValueError, match="in use"):
        optimizer.offload()
    assert torch.isfinite(model[0].weight).all()


class OutOfMemory:
    """The n-th allocation of zeros, and every later one, fails while it is armed."""

    def __init__(self, monkeypatch, num_allowed: int) -> None:
        self.is_armed, self.num_left = True, num_allowed
        for name in ("zeros", "zeros_like"):
            monkeypatch.setattr(torch, name, self.failing(getattr(torch, name)))

    def failing(self, allocate):
        def limited(*args, **kwargs):
            if self.is_armed:
                if self.num_left == 0:
                    raise torch.OutOfMemoryError("injected")
                self.num_left -= 1
            return allocate(*args, **kwargs)

        return limited


def num_allocations_of_first_step(monkeypatch, make) -> int:
    with monkeypatch.context() as patch:
        counter = OutOfMemory(patch, 10**6)
        model, optimizer = make()
        backward(model, 0, optimizer)
        counter.num_left = 10**6
        optimizer.step()
        return 10**6 - counter.num_left


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_bnb_8bit", "ademamix", "own foreach"])
def test_a_step_that_ran_out_of_memory_is_repeated_bit_for_bit(optim, monkeypatch):
    args = arguments(
        optim="sgd" if optim.startswith("own") else optim, learning_rate=1e-2, weight_decay=0.1,
        lr_scheduler_type="linear", warmup_steps=2,
    )  # fmt: skip

    def make():
        model = large_model().to(torch.float32 if optim.startswith("own") else torch.bfloat16)
        own = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True) if "own" in optim else None
        return model, PolicyOptimizer(model, args, 10, optimizers=(own, None))

    undisturbed, undisturbed_optimizer = make()
    for step in range(2):
        backward(undisturbed, step, undisturbed_optimizer)
        undisturbed_optimizer.step()
    num_allocations = num_allocations_of_first_step(monkeypatch, make)
    assert num_allocations >= 12  # two moments of six parameters
    for num_allowed in range(num_allocations):
        model, optimizer = make()
        backward(model, 0, optimizer)
        before = [x.detach().clone() for x in (*model.parameters(), *optimizer.leaves)]
        gradients = [g.clone() for g in optimizer.gradients()]
        with monkeypatch.context() as patch:
            OutOfMemory(patch, num_allowed)
            for _ in range(2):  # not even the second time
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
        assert_equal([*model.parameters(), *optimizer.leaves], before)
        assert_equal(optimizer.gradients(), gradients)
        assert not optimizer.optimizer.state and optimizer.learning_rate == 0
        optimizer.step()
        backward(model, 1, optimizer)
        optimizer.step()
        assert_equal(bits(optimizer), bits(undisturbed_optimizer))
        assert optimizer.learning_rate == undisturbed_optimizer.learning_rate > 0


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_no_step_but_the_first_makes_tensors_that_stay_or_zeros(optim, monkeypatch):
    model = large_model().to(torch.bfloat16)
    optimizer = PolicyOptimizer(model, arguments(optim=optim, weight_decay=0.1), 10)
    backward(model, 0, optimizer)
    optimizer.step()
    backward(model, 1, optimizer)
    OutOfMemory(monkeypatch, 0)
    before = optimizer.num_bytes
    optimizer.step()
    assert optimizer.num_bytes == before


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_torchs_own_step_allocates_nothing_as_large_as_a_weight(optim):
    model = large_model()
    optimizer = PolicyOptimizer(model, arguments(optim=optim, weight_decay=0.1), 10)
    backward(model, 0, optimizer)
    optimizer.step()
    backward(model, 1, optimizer)
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.optimizer.step()
    allocated = [event.self_cpu_memory_usage for event in profile.events()]
    assert max(allocated) < 1024  # the weights have 19,200 and 9,600 bytes


def test_out_of_memory_inside_an_optimizer_is_not_repeatable():
    class Greedy(torch.optim.SGD):
        def step(self, closure=None):
            raise torch.OutOfMemoryError("injected")

    model = small_model()
    own = Greedy(model.parameters(), lr=1.0)
    optimizer = PolicyOptimizer(model, arguments(), 10, optimizers=(own, None))
    backward(model, 0, optimizer)
    with pytest.raises(RuntimeError, match=r"Greedy ran out of memory .* cannot be repeated") as caught:
        optimizer.step()
    assert not isinstance(caught.value, torch.OutOfMemoryError)


def test_parameters_keep_their_storage():
    model = small_model().to(torch.bfloat16)
    before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    optimizer = PolicyOptimizer(model, arguments(learning_rate=0.1), 10)
    backward(model, 0, optimizer)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    for parameter, (pointer, old) in zip(model.parameters(), before, strict=True):
        assert parameter.data_ptr() == pointer
        assert not torch.equal(parameter, old)


def test_weight_decay_groups_are_those_of_transformers():
    config = Qwen2Config(
        vocab_size=31, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    args = arguments(weight_decay=0.1)
    theirs = Trainer(model, args).create_optimizer()
    ours = PolicyOptimizer(model, args, 10).optimizer
    assert len(ours.param_groups) == len(theirs.param_groups) == 2
    for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert mine["weight_decay"] == other["weight_decay"]
        assert {id(p) for p in mine["params"]} == {id(p) for p in other["params"]}
    # The same groups over masters.
    cast_to_bf16(model)
    sizes = [len(g["params"]) for g in PolicyOptimizer(model, args, 10).optimizer.param_groups]
    assert sizes == [len(g["params"]) for g in theirs.param_groups]


def test_schedule_and_learning_rate():
    optimizer = PolicyOptimizer(
        small_model(), arguments(learning_rate=1.0, lr_scheduler_type="linear", warmup_steps=2), 6
    )
    rates = []
    for _ in range(6):
        rates.append(optimizer.learning_rate)
        optimizer.gradients()
        optimizer.step()
    assert rates == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25])


def test_users_optimizer_is_used_as_it_is(caplog):
    model = small_model()
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.1)
    optimizer = PolicyOptimizer(model, arguments(), 10, optimizers=(own, schedule))
    assert optimizer.optimizer is own and optimizer.scheduler is schedule
    backward(model, 0, optimizer)
    want = [p.detach() - p.grad for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want, strict=True))
    assert optimizer.learning_rate == pytest.approx(0.1)
    assert not caplog.records
    low = small_model().to(torch.bfloat16)
    PolicyOptimizer(low, arguments(), 10, optimizers=(torch.optim.SGD(low.parameters(), lr=1.0), None))
    assert "bf16=False" in caplog.text


def test_projected_gradients_are_those_of_the_masters(monkeypatch, caplog):
    """GaLore's and APOLLO's groups name parameters of the model; what steps are the masters."""

    class Projecting(torch.optim.SGD):
        def __init__(self, params, lr):
            self.ranks = [group.pop("rank", None) for group in params]
            super().__init__(params, lr)

    def choose(args, model):
        groups = [
            {"params": [p for n, p in model.named_parameters() if n != "2.weight"]},
            {"params": [model[2].weight], "rank": 4},
        ]
        return Projecting, {"lr": args.learning_rate, "params": groups}

    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(choose))
    model = small_model().to(torch.bfloat16)
    model[0].requires_grad_(False)
    before = model[2].weight.detach().clone()
    optimizer = PolicyOptimizer(model, arguments(optim="galore_adamw", learning_rate=1.0), 10)
    assert "no run can be resumed" in caplog.text
    assert optimizer.optimizer.ranks == [None, 4]
    held = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(leaf) for leaf in optimizer.leaves} and len(held) == 4
    backward(model, 0, optimizer)
    optimizer.step()
    assert not torch.equal(model[2].weight, before)


def test_every_optimizer_of_transformers_is_taken_or_refused_with_a_reason():
    names = {optimizer.value for optimizer in OptimizerNames}
    assert {*NAMES, *REFUSED_OPTIMIZERS} == names and not {*NAMES} & REFUSED_OPTIMIZERS.keys()
    assert {*AVAILABLE, *ARGUMENTS} <= {*NAMES}
    for name in REFUSED_OPTIMIZERS:
        with pytest.raises(ValueError, match=f"optim='{name}' is not supported: it "):
            GRPOConfig("unused", optim=name, use_cpu=True)
        with pytest.raises(ValueError, match=f"optim='{name}' is not supported: it "):
            transformers_options()["optim"].read(name)  # as a run file and a command line do


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(optim_args="momentum=0.9"), "'adamw_torch_fused' does not read momentum: it reads none"),
        (dict(optim="sgd", optim_args="momentun=0.9"), "may set momentum, dampening, nesterov"),
        (dict(optim="sgd", optim_args="momentum"), "must be a list like"),
        (dict(optim="galore_adamw"), "name them in optim_target_modules"),
        (dict(optim="sgd", optim_target_modules=["q_proj"]), "only read with optim=galore_adamw"),
    ],
)
def test_arguments_that_nothing_would_read_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig("unused", use_cpu=True, **options)


def test_errors_say_what_to_do(monkeypatch):
    model = small_model()
    with pytest.raises(ValueError, match="holds none of the 6 trainable parameters"):
        other = torch.optim.SGD(small_model().parameters(), lr=1.0)
        PolicyOptimizer(model, arguments(), 10, optimizers=(other, None))
    with pytest.raises(ValueError, match="lr_scheduler_type"):
        plateau = arguments(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps")
        PolicyOptimizer(model, plateau, 10)
    with pytest.raises(ValueError, match=r"Call model.requires_grad_\(True\)"):
        PolicyOptimizer(small_model().requires_grad_(False), arguments(), 10)
    frozen = get_peft_model(small_model(), LoraConfig(target_modules=["0"])).requires_grad_(False)
    with pytest.raises(ValueError, match="is_trainable=True"):
        PolicyOptimizer(frozen, arguments(), 10)
    state = PolicyOptimizer(model, arguments(), 10).state_dict()
    name, weight = state["weights"].popitem()
    with pytest.raises(ValueError, match=f"weights of 5 parameters, this run of 6; 1 differ, {name} for one"):
        PolicyOptimizer(small_model(), arguments(), 10).load_state_dict(state)
    state["weights"][name] = weight.double()
    with pytest.raises(ValueError, match=f"1 differ, {name} for one"):
        PolicyOptimizer(small_model(), arguments(), 10).load_state_dict(state)
    with pytest.raises(
        ImportError, match="'grokadamw' needs a library that is not installed: Please install"
    ):
        PolicyOptimizer(model, arguments(optim="grokadamw"), 10)
    missing = staticmethod(lambda args, model: exec("raise ImportError('install `bitsandbytes`')"))
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", missing)
    with pytest.raises(ImportError, match=r"'adamw_bnb_8bit' needs .* pip install 'bitsandbytes>="):
        PolicyOptimizer(model, arguments(optim="adamw_bnb_8bit"), 10)
    factory = staticmethod(lambda args, model: (torch.optim.SGD, {"model": model}))
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", factory)
    with pytest.raises(ValueError, match="adamw_torch_fused"):
        PolicyOptimizer(model, arguments(), 10)
