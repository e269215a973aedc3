"""fp32 masters under bf16 parameters: small steps survive, gradients add up, state continues exactly."""

import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen2Config, Trainer, TrainingArguments

from colocate.policy.loading import cast_to_bf16
from colocate.policy.optimizer import PolicyOptimizer


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


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 16, generator=generator).bfloat16()
    targets = torch.randint(8, (32,), generator=generator)
    F.cross_entropy(model(inputs.to(next(model.parameters()).dtype)).float(), targets).backward()


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
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    want = moved([p.detach() for p in exact.parameters()], start)
    got = moved([p.detach() for p in ours_optimizer.leaves], start)
    lost = moved([p.detach().float() for p in naive.parameters()], naive_start)
    assert (got - want).norm() / want.norm() < 0.05
    assert (lost - want).norm() / want.norm() > 0.5
    for parameter, master in zip(ours.parameters(), ours_optimizer.leaves, strict=True):
        assert torch.equal(parameter, master.to(torch.bfloat16))


def test_gradients_add_up_in_fp32():
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = PolicyOptimizer(model, arguments(), 1)
    for _ in range(1000):
        model.weight.sum().backward()
        assert model.weight.grad is None
    assert optimizer.gradients()[0].item() == 1000  # bf16 sums of ones stop at 256
    optimizer.zero_grad()
    assert optimizer.leaves[0].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"])
def test_state_round_trip_continues_bit_for_bit(optim, dtype):
    args = arguments(optim=optim, learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=2)

    def make(seed):
        model = small_model(seed).to(dtype)
        return model, PolicyOptimizer(model, args, 10)

    def train(model, optimizer, steps):
        for step in steps:
            backward(model, step)
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


def test_parameters_keep_their_storage():
    model = small_model().to(torch.bfloat16)
    before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    optimizer = PolicyOptimizer(model, arguments(learning_rate=0.1), 10)
    backward(model, 0)
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
    backward(model, 0)
    want = [p.detach() - p.grad for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want, strict=True))
    assert optimizer.learning_rate == pytest.approx(0.1)
    assert not caplog.records
    low = small_model().to(torch.bfloat16)
    PolicyOptimizer(low, arguments(), 10, optimizers=(torch.optim.SGD(low.parameters(), lr=1.0), None))
    assert "bf16=False" in caplog.text


def test_errors_say_what_to_do(monkeypatch):
    model = small_model()
    with pytest.raises(ValueError, match="holds none of the 6 trainable parameters"):
        other = torch.optim.SGD(small_model().parameters(), lr=1.0)
        PolicyOptimizer(model, arguments(), 10, optimizers=(other, None))
    with pytest.raises(ValueError, match="lr_scheduler_type"):
        plateau = arguments(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps")
        PolicyOptimizer(model, plateau, 10)
    with pytest.raises(ValueError, match="is_trainable=True"):
        PolicyOptimizer(small_model().requires_grad_(False), arguments(), 10)
    state = PolicyOptimizer(model, arguments(), 10).state_dict()
    name, weight = state["weights"].popitem()
    with pytest.raises(ValueError, match=f"weights of 5 parameters, this run of 6; 1 differ, {name} for one"):
        PolicyOptimizer(small_model(), arguments(), 10).load_state_dict(state)
    state["weights"][name] = weight.double()
    with pytest.raises(ValueError, match=f"1 differ, {name} for one"):
        PolicyOptimizer(small_model(), arguments(), 10).load_state_dict(state)
    factory = staticmethod(lambda args, model: (torch.optim.SGD, {"params": []}))
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", factory)
    with pytest.raises(ValueError, match="adamw_torch_fused"):
        PolicyOptimizer(model, arguments(), 10)
