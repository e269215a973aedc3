"""Whole runs of the trainer: what trains, what must not, and that every option does something."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

from colocate import GRPOConfig, GRPOTrainer
from colocate.policy.stack.stack import DecoderStack
from colocate.weights import layouts
from colocate.weights.adapters import base_linear
from tiny import (
    StubEngine,
    changed_weights,
    count_digits,
    logged,
    make_config,
    make_model,
    make_tokenizer,
    make_trainer,
    sums,
    train,
    weights_of,
)

LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")


def test_train_changes_every_parameter(tmp_path):
    trainer = make_trainer(tmp_path)
    before = weights_of(trainer.model)
    output = trainer.train()
    assert changed_weights(trainer.model, before) == set(before)
    assert isinstance(output, TrainOutput)
    assert output.global_step == trainer.state.global_step == 2
    assert output.training_loss == pytest.approx(sum(logged(trainer, "loss")) / 2)
    assert output.metrics["train_loss"] == output.training_loss and output.metrics["epoch"] == 2 / 12
    assert {"train_runtime", "train_samples_per_second", "train_steps_per_second"} < set(output.metrics)


def test_learns_what_is_rewarded(tmp_path):
    """Not only does something change: the reward goes up, far beyond its noise."""
    trainer = make_trainer(
        tmp_path,
        max_steps=25,
        per_device_train_batch_size=16,
        num_generations=8,
        learning_rate=0.01,
        logging_steps=5,
    )
    trainer.train()
    rewards = logged(trainer, "reward")
    assert rewards[-1] > rewards[0] + 2.0, rewards  # of at most 6 digits


@pytest.mark.parametrize("offload", [True, None])
def test_the_optimizers_state_is_away_while_the_engine_is_awake(tmp_path, offload):
    trainer = make_trainer(
        tmp_path,
        bf16=True,
        offload_optimizer=offload,
        eval_dataset=sums(2),
        eval_strategy="steps",
        eval_steps=1,
    )
    seen = []
    generate = trainer.engine.generate

    def watched(*args):
        seen.append(trainer.policy.optimizer.num_bytes)
        return generate(*args)

    trainer.engine.generate = watched
    trainer.train()
    resident_bytes = trainer.policy.optimizer.num_bytes
    assert resident_bytes > 12 * sum(p.numel() for p in trainer.model.parameters())
    # Only what is too small to be worth a copy stays.
    assert all((num_bytes < resident_bytes / 4) == bool(offload) for num_bytes in seen[1:])
    assert len(seen) == 4  # rollouts and evaluations
    phases = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["phases"]
    assert ("offload" in phases) == bool(offload)


def test_model_by_name_loads_its_tokenizer(tmp_path, model_dir):
    trainer = GRPOTrainer(
        model=model_dir,
        reward_funcs=count_digits,
        args=make_config(tmp_path),
        train_dataset=sums(),
    )
    assert trainer.processing_class.get_vocab() == make_tokenizer().get_vocab()
    assert next(trainer.model.parameters()).dtype == torch.float32
    assert train(trainer) == set(dict(trainer.model.named_parameters()))


def test_default_arguments(tmp_path, model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = GRPOTrainer(model_dir, count_digits, train_dataset=sums(64))
    assert type(trainer.args) is GRPOConfig
    assert trainer.args.output_dir == "tiny-qwen3-GRPO"
    assert trainer.args.num_generations == trainer.args.per_device_train_batch_size == 8


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_other_architectures(tmp_path, architecture):
    """Tied embeddings; and one that the native engine does not know and that runs padded."""
    trainer = make_trainer(tmp_path, model=make_model(architecture))
    assert type(trainer.engine).__name__ == (
        "NativeEngine" if architecture == "qwen2" else "TransformersEngine"
    )
    unused = {"transformer.wpe.weight"} if architecture == "gpt2" else set()
    assert train(trainer) | unused == set(dict(trainer.model.named_parameters()))


def test_iterable_dataset(tmp_path):
    visited = []

    def reward(prompts, completions, **kwargs):
        visited.append(prompts[0])
        return count_digits(completions)

    stream = sums().to_iterable_dataset()
    trainer = make_trainer(
        tmp_path, train_dataset=stream, reward_funcs=reward, shuffle_dataset=False, max_steps=3
    )
    assert train(trainer)
    assert visited == sums()["prompt"][:3]
    assert trainer.state.epoch == 1.0


def test_iterable_dataset_without_max_steps(tmp_path):
    with pytest.raises(ValueError, match="set max_steps"):
        make_trainer(tmp_path, train_dataset=sums().to_iterable_dataset(), max_steps=-1)


def test_peft_config_trains_the_adapter_only(tmp_path):
    trainer = make_trainer(tmp_path, peft_config=LoraConfig(**LORA), max_steps=3)
    assert isinstance(trainer.model, PeftModel)
    adapter = {name for name, _ in trainer.model.named_parameters() if "lora_" in name}
    assert len(adapter) == 2 * 2 * 3  # layers x (A, B) x matrices
    assert train(trainer) == adapter


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_peft_model_continues_its_adapter(tmp_path, beta):
    """With a KL penalty the reference is the adapter as it was, not the base model."""
    model = get_peft_model(make_model(), LoraConfig(**LORA))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    trainer = make_trainer(tmp_path, model=model, beta=beta)
    assert train(trainer) == {name for name, _ in model.named_parameters() if ".default." in name}
    if beta:
        assert logged(trainer, "kl")[0] == pytest.approx(0.0, abs=1e-6)  # policy == reference at first
        assert logged(trainer, "kl")[1] > 1e-6


def test_peft_model_with_peft_config_is_refused(tmp_path):
    model = get_peft_model(make_model(), LoraConfig(**LORA))
    with pytest.raises(ValueError, match="has an adapter already"):
        make_trainer(tmp_path, model=model, peft_config=LoraConfig(**LORA))


@pytest.mark.parametrize("peft_config", [None, LoraConfig(**LORA)])
def test_the_model_inside_of_a_peft_model_is_refused(tmp_path, peft_config):
    """It could be trained, and would be saved with names that nothing can load."""
    base = make_model()
    first = make_trainer(tmp_path, model=base, peft_config=LoraConfig(**LORA))
    with pytest.raises(ValueError, match=r"adapter's layers inside.* pass the PeftModel \(trainer.model\)"):
        make_trainer(tmp_path, model=base, peft_config=peft_config)
    merged = first.model.merge_and_unload()
    with pytest.raises(ValueError, match=r"no trainable parameter.*requires_grad_\(True\), as after merge"):
        make_trainer(tmp_path, model=merged)
    assert train(make_trainer(tmp_path, model=merged.requires_grad_(True))) >= {"model.norm.weight"}


def test_own_optimizer_and_scheduler(tmp_path):
    model = make_model()
    head = model.lm_head.weight
    optimizer = torch.optim.SGD([head], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    trainer = make_trainer(tmp_path, model=model, optimizers=(optimizer, scheduler))
    assert trainer.optimizer is optimizer and trainer.lr_scheduler is scheduler
    assert train(trainer) == {"lm_head.weight"}
    assert logged(trainer, "learning_rate") == pytest.approx([0.5, 0.05])


# ── Batches ──────────────────────────────────────────────────────────────────────────────────────────────


def calls_of(tmp_path, **arguments) -> tuple[list[int], GRPOTrainer]:
    """The number of completions in each call of the reward function."""
    calls: list[int] = []

    def reward(completions, **kwargs):
        calls.append(len(completions))
        return count_digits(completions)

    trainer = make_trainer(tmp_path, reward_funcs=reward, **arguments)
    assert train(trainer)
    return calls, trainer


def test_multiple_iterations_generate_once(tmp_path):
    calls, trainer = calls_of(tmp_path, num_iterations=2, max_steps=4, learning_rate=0.1)
    assert calls == [4, 4]
    on_policy, off_policy = logged(trainer, "clip_ratio/region_mean")[:2]
    assert on_policy == 0.0 < off_policy


def test_num_generations_larger_than_batch_size(tmp_path):
    calls, _ = calls_of(
        tmp_path, num_generations=6, per_device_train_batch_size=3, gradient_accumulation_steps=2
    )
    assert calls == [6, 6]


def test_steps_per_generation(tmp_path):
    calls, _ = calls_of(tmp_path, steps_per_generation=3, max_steps=4)
    assert calls == [12, 12]


def test_num_generations_eval(tmp_path):
    calls, trainer = calls_of(
        tmp_path,
        eval_dataset=sums(3),
        eval_strategy="steps",
        eval_steps=2,
        num_generations_eval=2,
        per_device_eval_batch_size=2,
    )
    assert calls == [4, 4, 6]
    (evaluation,) = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert evaluation["step"] == 2 and math.isfinite(evaluation["eval_loss"])


def test_single_completion_in_evaluation(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=sums(3), num_generations_eval=1)
    metrics = trainer.evaluate()
    assert metrics["eval_frac_reward_zero_std"] == 1.0 and metrics["eval_loss"] == 0.0


# ── Every option has an effect ───────────────────────────────────────────────────────────────────────────

# Long enough that completions end at different lengths, and steps large enough that ratios leave the bounds.
TWO_PASSES = dict(num_iterations=2, max_steps=4, learning_rate=0.05, max_completion_length=24)
_weights_after: dict[str, dict[str, torch.Tensor]] = {}


def weights_after(tmp_path_factory, **options) -> dict[str, torch.Tensor]:
    """What a run with these options ends with; runs are deterministic, so each is made once."""
    key = repr(sorted(options.items()))
    if key not in _weights_after:
        trainer = make_trainer(tmp_path_factory.mktemp("run"), **options)
        changed = train(trainer)
        assert changed == set(dict(trainer.model.named_parameters())), f"not trained with {options}"
        _weights_after[key] = weights_of(trainer.model)
    return _weights_after[key]


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_runs_are_deterministic(tmp_path, tmp_path_factory):
    expected = weights_after(tmp_path_factory)
    again = make_trainer(tmp_path)
    again.train()
    assert distance(weights_of(again.model), expected) == 0.0


@pytest.mark.parametrize(
    "options",
    [
        dict(loss_type="grpo"),
        dict(loss_type="bnpo", gradient_accumulation_steps=2),
        dict(loss_type="dr_grpo"),
        dict(loss_type="luspo", importance_sampling_level="sequence"),
        dict(loss_type="cispo", epsilon_high=0.01),
        dict(loss_type="dppo", epsilon=0.001),
        dict(loss_type="sapo"),
        dict(loss_type="vespo"),
        dict(importance_sampling_level="sequence"),
        dict(importance_sampling_level="sequence", loss_type="grpo"),
        dict(epsilon=0.01, epsilon_high=0.9),
        dict(delta=1.21),
        dict(beta=0.5),
        dict(beta=0.5, use_bias_correction_kl=False),
        dict(off_policy_mask_threshold=1e-4),
        dict(top_entropy_quantile=0.3),
        dict(entropy_coef=0.5),
        dict(use_adaptive_entropy=True, entropy_coef=0.5, entropy_target=10.0),
        dict(scale_rewards="none"),
        dict(scale_rewards="mean"),
        dict(scale_rewards="batch", per_device_train_batch_size=8),
        dict(vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_max=1.0),
        dict(temperature=0.7),
        dict(top_k=5),
        dict(repetition_penalty=2.0),
        dict(weight_decay=0.1),
        dict(max_grad_norm=0.01, optim="sgd"),
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
@pytest.mark.share(3)
def test_option_trains_and_has_an_effect(tmp_path_factory, options):
    shared = {name: options[name] for name in ("gradient_accumulation_steps", "optim") if name in options}
    if "scale_rewards" in options and "per_device_train_batch_size" in options:
        shared["per_device_train_batch_size"] = options["per_device_train_batch_size"]
    default = weights_after(tmp_path_factory, **{**TWO_PASSES, **shared})
    assert distance(weights_after(tmp_path_factory, **{**TWO_PASSES, **options}), default) > 1e-6


@pytest.mark.parametrize(("given", "meaning"), [(True, "group"), (False, "none")])
def test_scale_rewards_takes_booleans(tmp_path_factory, given, meaning):
    assert (
        distance(
            weights_after(tmp_path_factory, scale_rewards=given),
            weights_after(tmp_path_factory, scale_rewards=meaning),
        )
        == 0.0
    )


@pytest.mark.parametrize("correction", [True, False])
def test_importance_sampling_correction(tmp_path, correction):
    """An engine whose log-probs are off by 2 nats per token: with the correction nothing is trained on."""
    trainer = make_trainer(tmp_path, vllm_importance_sampling_correction=correction)
    generate = trainer.engine.generate

    def biased(prompts, sampling):
        completions = generate(prompts, sampling)
        return [replace(c, logprobs=tuple(x - 2 for x in c.logprobs)) for c in completions]

    trainer.engine.generate = biased
    assert bool(train(trainer)) is not correction
    assert logged(trainer, "sampling/importance_sampling_ratio/max") == ([0.0, 0.0] if correction else [])
    if correction:
        assert logged(trainer, "sampling/sampling_logp_difference/mean") == pytest.approx(
            [2.0, 2.0], abs=1e-4
        )


def test_entropy_bonus_raises_entropy(tmp_path):
    entropies = {}
    for coef in (0.0, 5.0):
        trainer = make_trainer(tmp_path / str(coef), entropy_coef=coef, max_steps=6)
        trainer.train()
        entropies[coef] = logged(trainer, "entropy")[-1]
    assert entropies[5.0] > entropies[0.0] + 0.05


def test_adaptive_entropy_coefficient_moves_with_the_entropy(tmp_path):
    options = dict(use_adaptive_entropy=True, entropy_coef=0.1, entropy_coef_delta=0.02, max_steps=3)
    for target, expected in ((10.0, [0.12, 0.14, 0.16]), (0.0, [0.08, 0.06, 0.04])):
        trainer = make_trainer(tmp_path / str(target), entropy_target=target, **options)
        trainer.train()
        assert logged(trainer, "entropy_coef") == pytest.approx(expected)
        assert len(logged(trainer, "policy_loss")) == 3


def test_beta_penalises_the_distance_to_the_initial_model(tmp_path):
    distances = {}
    for beta in (0.01, 10.0):
        trainer = make_trainer(tmp_path / str(beta), beta=beta, max_steps=8)
        assert train(trainer)
        kl = logged(trainer, "kl")
        assert kl[0] == pytest.approx(0.0, abs=1e-6) and min(kl[1:]) > 0.0
        distances[beta] = kl[-1]
    assert distances[10.0] < distances[0.01]


def test_sync_ref_model(tmp_path):
    trainer = make_trainer(
        tmp_path,
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=1.0,
        max_steps=3,
    )
    initial = weights_of(trainer.model)
    by_step = {}

    class Recorder(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            by_step[state.global_step] = weights_of(model)

    trainer.add_callback(Recorder)
    trainer.train()
    with trainer.policy.reference.model() as reference:
        synced = weights_of(reference)
    assert distance(synced, by_step[2]) == 0.0  # alpha = 1: the policy as it was at step 2
    assert distance(synced, initial) > 0.0
    assert distance(synced, weights_of(trainer.model)) > 0.0


# ── Truncated completions ────────────────────────────────────────────────────────────────────────────────


def test_mask_truncated_completions(tmp_path):
    """What the completion that was cut off says does not matter, only how it was rewarded."""
    weights = []
    for last_token in (10, 11):
        stub = StubEngine(
            lambda prompt, member, last=last_token: [8, 9, last] if member == 3 else [5 + member, 8, 1]
        )
        trainer = make_trainer(
            tmp_path / str(last_token), mask_truncated_completions=True, max_steps=1, stub=stub
        )
        assert train(trainer)
        assert logged(trainer, "completions/clipped_ratio") == [0.25]
        weights.append(weights_of(trainer.model))
    assert distance(*weights) == 0.0


def test_mask_truncated_completions_all_masked(tmp_path):
    stub = StubEngine(lambda prompt, member: [5 + member, 8, 9])
    trainer = make_trainer(tmp_path, mask_truncated_completions=True, stub=stub)
    assert train(trainer) == set()
    assert logged(trainer, "loss") == logged(trainer, "grad_norm") == [0.0, 0.0]
    assert logged(trainer, "completions/clipped_ratio") == [1.0, 1.0]


# ── What the rollout engine reads ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("peft_config", [None, LoraConfig(**LORA)], ids=["full", "lora"])
def test_next_rollout_uses_the_new_weights(tmp_path, peft_config):
    """By storage: no byte is copied. By output: log-probs of the rollout are the updated policy's own."""
    trainer = make_trainer(tmp_path, peft_config=peft_config, max_steps=3, learning_rate=0.05)
    pointers = {name: p.data_ptr() for name, p in trainer.model.named_parameters()}
    versions, differences = [], []
    score = trainer.run.judge.score

    def recorded(request, episodes):
        rollout = score(request, episodes)
        versions.append({v for e in episodes for node in e.nodes for v in node.policy_versions})
        current = trainer.policy.logprobs(rollout.samples)
        differences.append(
            max(
                (sample.rollout_logprobs - logprobs).abs().max().item()
                for sample, (logprobs, _) in zip(rollout.samples, current, strict=True)
            )
        )
        return rollout

    trainer.run.judge.score = recorded
    before = weights_of(trainer.model)
    trainer.train()
    assert changed_weights(trainer.model, before)
    assert versions == [{0}, {1}, {2}]
    assert max(differences) < 1e-4
    assert pointers == {name: p.data_ptr() for name, p in trainer.model.named_parameters()}
    # What the engine reads as one matrix is where the trainer's q, k and v are.
    for layer in trainer.engine._layout.layers:
        q, k, v = (base_linear(module).weight for module in layer.qkv)
        assert q.data_ptr() + q.nbytes == k.data_ptr() and k.data_ptr() + k.nbytes == v.data_ptr()
        assert {q.data_ptr(), k.data_ptr(), v.data_ptr()} <= set(pointers.values())


@pytest.mark.parametrize(
    ("lora", "beta", "num_layouts", "num_stacks"),
    [(False, 0.0, 1, 2), (False, 0.1, 2, 3), (True, 0.0, 1, 2), (True, 0.1, 1, 3)],
)
def test_layout_and_stack_are_found_once_a_model(tmp_path, monkeypatch, lora, beta, num_layouts, num_stacks):
    """Updates, log-probs and a reference have a stack each; a reference that is a copy has its own layout."""
    found, made = [], []
    resolved, init = layouts._resolved, DecoderStack.__init__
    monkeypatch.setattr(layouts, "_resolved", lambda base: found.append(base) or resolved(base))
    monkeypatch.setattr(DecoderStack, "__init__", lambda *args, **kw: made.append(0) or init(*args, **kw))
    peft_config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1) if lora else None
    trainer = make_trainer(tmp_path, max_steps=3, beta=beta, peft_config=peft_config, disable_dropout=False)
    checked = len(made)
    trainer.train()
    assert len(found) == num_layouts
    assert len(made) - checked == num_stacks
    assert trainer.engine._layout is layouts.layout_for(trainer.model)


# ── Evaluation ───────────────────────────────────────────────────────────────────────────────────────────


def test_evaluate_before_and_after_training(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=sums(3), beta=0.1, max_steps=3)
    before = weights_of(trainer.model)
    first = trainer.evaluate()
    assert not changed_weights(trainer.model, before)
    assert first["eval_num_tokens"] == 0 and first["epoch"] == 0
    assert first["eval_kl"] == pytest.approx(0.0, abs=1e-6)
    trainer.train()
    trained = weights_of(trainer.model)
    second = trainer.evaluate()
    assert not changed_weights(trainer.model, trained)
    assert second["eval_num_tokens"] > 0 and second["epoch"] == 0.25
    assert second["eval_kl"] > 0.0
    assert set(first) == set(second)
    assert second["eval_entropy"] != first["eval_entropy"]


def test_evaluation_does_not_disturb_training(tmp_path, tmp_path_factory):
    trainer = make_trainer(
        tmp_path, eval_dataset=sums(3), eval_strategy="steps", eval_steps=1, eval_on_start=True
    )
    trainer.train()
    assert distance(weights_of(trainer.model), weights_after(tmp_path_factory)) == 0.0
    assert [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry] == [0, 1, 2]


def test_eval_dataset_dict(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset={"easy": sums(2), "hard": sums(3)})
    metrics = trainer.evaluate()
    for name in ("easy", "hard"):
        assert {f"eval_{name}_reward", f"eval_{name}_loss", f"eval_{name}_runtime"} < set(metrics)
    other = trainer.evaluate(sums(1), metric_key_prefix="test")
    assert "test_reward" in other and not any(name.startswith("eval_") for name in other)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "luspo"])
def test_eval_loss_is_the_objective_over_the_whole_evaluation(tmp_path, loss_type):
    """On policy every ratio is 1: a token's loss is minus its sequence's advantage."""
    lengths = [[2, 4, 1, 5], [3, 3, 6, 1]]
    trainer = make_trainer(
        tmp_path,
        loss_type=loss_type,
        eval_dataset=sums(2),
        max_completion_length=6,
        importance_sampling_level="token",
        stub=StubEngine(lambda prompt, member: [8 + member] * (lengths[-1 - prompt.key][member] - 1) + [1]),
    )
    metrics = trainer.evaluate()
    rewards = torch.tensor([[n - 1.0 for n in row] for row in lengths])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    advantages, n = advantages.flatten().double(), torch.tensor(lengths).flatten().double()
    expected = {
        "grpo": -advantages.mean(),
        "dapo": -(advantages * n).sum() / n.sum(),
        "bnpo": -(advantages * n).sum() / n.sum(),
        "dr_grpo": -(advantages * n).sum() / (8 * 6),
        "luspo": -(advantages * n).mean(),
    }[loss_type]
    assert metrics["eval_loss"] == pytest.approx(expected.item(), abs=1e-5)


def test_evaluate_without_a_dataset(tmp_path):
    with pytest.raises(ValueError, match="needs an eval_dataset"):
        make_trainer(tmp_path).evaluate()


def test_remove_unused_columns(tmp_path):
    columns = []

    def reward(completions, **kwargs):
        columns.append(set(kwargs))
        return count_digits(completions)

    trainer = make_trainer(tmp_path, reward_funcs=reward, remove_unused_columns=True, eval_dataset=sums(2))
    trainer.evaluate()
    trainer.train()
    assert len(columns) == 3 and not any("answer" in names for names in columns)


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────


def test_training_twice_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    with pytest.raises(RuntimeError, match="make a new trainer"):
        trainer.train()


def test_a_group_without_differences_teaches_nothing(tmp_path, caplog):
    def constant(completions, **kwargs):
        return [1.0] * len(completions)

    trainer = make_trainer(tmp_path, reward_funcs=constant)
    with caplog.at_level(logging.WARNING):
        assert train(trainer) == set()
    assert logged(trainer, "frac_reward_zero_std") == [1.0, 1.0]
    assert logged(trainer, "reward_std") == [0.0, 0.0]
