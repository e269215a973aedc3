"""Whole runs against TRL 1.16.0's GRPOTrainer: names and order of everything, and the weights at the end.

Where numbers are compared, both trainers are given the same completions: TRL's generation is replaced by the
function that a stub engine gives to ours. All the rest of TRL is TRL's.
"""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import trl
import trl.trainer.grpo_trainer
from peft import LoraConfig, PeftConfig, PeftModel, TrainableTokensConfig, get_peft_model
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig, TrainerCallback

import colocate
from tiny import EOS, PAD, VOCAB_SIZE, StubEngine, count_digits, make_tokenizer, sums, weights_of

MAX_COMPLETION_LENGTH = 10
SHARED: dict[str, Any] = dict(
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=MAX_COMPLETION_LENGTH,
    max_steps=5,
    learning_rate=1e-3,
    # Adam turns a gradient that is zero but for rounding into a whole step of either sign; this stops it.
    adam_epsilon=1e-5,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)

SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    num_experts_per_tok=2,
    initializer_range=0.2,
)


def completion(prompt_ids, member: int, call: int) -> list[int]:
    """Random tokens, the pad token among them, and a stop token or none; a function of its arguments."""
    rng = random.Random(repr((tuple(prompt_ids), member, call)))
    tokens = (PAD, *range(5, VOCAB_SIZE))
    ids = [rng.choice(tokens) for _ in range(rng.randint(1, MAX_COMPLETION_LENGTH))]
    return ids if len(ids) == MAX_COMPLETION_LENGTH else [*ids, EOS]


def make_either(
    package,
    output_dir,
    model_dir,
    *,
    reward_func=count_digits,
    callbacks=(),
    train_dataset=None,
    eval_dataset=None,
    adapter=None,
    **options,
):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    if adapter is not None:
        torch.manual_seed(0)
        model = get_peft_model(model, adapter)
    return package.GRPOTrainer(
        model,
        reward_funcs=[reward_func],
        args=package.GRPOConfig(output_dir=str(output_dir), **{**SHARED, **options}),
        train_dataset=sums() if train_dataset is None else train_dataset,
        eval_dataset=eval_dataset,
        processing_class=make_tokenizer(),
        callbacks=list(callbacks),
    )


their_trainer, our_trainer = partial(make_either, trl), partial(make_either, colocate)


def with_scripted_completions(theirs, ours) -> None:
    """Make both generate the same."""
    their_calls = iter(range(10**6))

    def generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        call = next(their_calls)
        return [completion(ids, index % num_generations, call) for index, ids in enumerate(prompt_ids)], None

    theirs._generate_single_turn = generate_single_turn

    our_calls = iter(range(10**6))

    def generate(prompts, sampling):
        call = next(our_calls)
        stub = StubEngine(lambda prompt, member: completion(prompt.token_ids, member, call))
        return stub.generate(prompts, sampling)

    ours.engine.generate = generate


def train_theirs(theirs, seed: int) -> None:
    """Train, the completions of a rollout shuffled as ours are, not by TRL's global generator."""
    shuffle, calls = trl.trainer.grpo_trainer.shuffle_sequence_dict, iter(range(10**6))

    def in_our_order(batch):
        generator = torch.Generator().manual_seed(seed + next(calls))
        randperm = torch.randperm
        with mock.patch("torch.randperm", lambda n: randperm(n, generator=generator)):
            return shuffle(batch)

    with mock.patch.object(trl.trainer.grpo_trainer, "shuffle_sequence_dict", in_our_order):
        theirs.train()


# ── The same completions lead to the same weights ────────────────────────────────────────────────────────

CASES = {
    "dapo": dict(lr_scheduler_type="cosine", warmup_steps=2),
    "grpo-accumulated": dict(loss_type="grpo", gradient_accumulation_steps=2),
    "bnpo-accumulated": dict(loss_type="bnpo", gradient_accumulation_steps=2, lr_scheduler_type="constant"),
    "dr_grpo-two-passes": dict(loss_type="dr_grpo", num_iterations=2, lr_scheduler_type="polynomial"),
    "dapo-two-passes": dict(num_iterations=2, learning_rate=3e-3),
    "dapo-two-steps-per-rollout": dict(steps_per_generation=2, learning_rate=3e-3),
    "dapo-rollout-of-four-slices": dict(
        steps_per_generation=4, gradient_accumulation_steps=2, num_iterations=2, learning_rate=3e-3
    ),
    "gspo": dict(
        loss_type="grpo",
        importance_sampling_level="sequence",
        num_iterations=2,
        epsilon=3e-4,
        epsilon_high=4e-4,
    ),
    "cispo": dict(loss_type="cispo", epsilon_high=5.0, num_iterations=2),
    "sapo": dict(loss_type="sapo", num_iterations=2, learning_rate=3e-3),
    "vespo": dict(loss_type="vespo", num_iterations=2),
    "luspo": dict(loss_type="luspo", importance_sampling_level="sequence", num_iterations=2),
    "kl": dict(beta=0.3, num_iterations=2),
    "moving-reference": dict(beta=0.3, sync_ref_model=True, ref_model_sync_steps=2),
    "truncation-masked": dict(mask_truncated_completions=True, weight_decay=0.1, adam_beta2=0.95),
    "batch-scaled": dict(scale_rewards="batch", per_device_train_batch_size=8, max_grad_norm=0.1),
    "entropy": dict(entropy_coef=0.1, top_entropy_quantile=0.5, num_iterations=2),
    "adaptive-entropy": dict(use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=10.0),
    "temperature": dict(temperature=0.7, num_iterations=2),
    "no-clipping": dict(max_grad_norm=-1.0),
}
EMBEDDING_ADAPTERS: dict[str, PeftConfig] = {
    "embed_tokens": LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]),
    "trainable_token_indices": LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[7, 8, 9]),
    "TrainableTokensConfig": TrainableTokensConfig(token_indices=[7, 8, 9]),
}
CASES |= {
    name: dict(adapter=adapter, num_iterations=2, learning_rate=1e-2)
    for name, adapter in EMBEDDING_ADAPTERS.items()
}
AVERAGED_DIFFERENTLY = ("entropy", "clip_ratio/", "policy_loss")
"""Of a step of several micro-batches TRL averages the averages; here every token counts once."""


def _check_saved(ours, model_dir, directory) -> None:
    """An adapter that is saved and loaded again has the weights that were trained."""
    ours.save_model(str(directory))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), directory)
    expected = weights_of(ours.model)
    assert all(torch.equal(p, expected[name]) for name, p in weights_of(loaded).items())


@pytest.mark.parametrize("name", CASES)
def test_same_completions_give_the_same_weights_and_logs(tmp_path, model_dir, name):
    options = CASES[name]
    theirs, ours = (
        make(tmp_path, model_dir, **copy.deepcopy(options)) for make in (their_trainer, our_trainer)
    )
    initial = weights_of(theirs.model)
    with_scripted_completions(theirs, ours)
    train_theirs(theirs, ours.args.seed)
    ours.train()

    # TRL's model keeps a second name for its head; compare by ours.
    expected, actual = weights_of(theirs.model), weights_of(ours.model)
    moved = torch.cat([(expected[n] - initial[n]).flatten() for n in actual])
    error = torch.cat([(actual[n] - expected[n]).flatten() for n in actual])
    assert moved.abs().max() > 1e-3
    assert error.norm() < 2e-4 * moved.norm(), name
    # Adam's first steps divide a gradient by its own size: one that is nearly 0 decides by its rounding.
    assert error.abs().max() < 1e-2 * moved.abs().max(), name
    assert error.norm() < 1e-4 * moved.norm()
    if "adapter" in options:
        _check_saved(ours, model_dir, tmp_path / "saved")

    is_accumulated = options.get("gradient_accumulation_steps", 1) > 1
    assert len(theirs.state.log_history) == len(ours.state.log_history)
    for their_log, our_log in zip(theirs.state.log_history[:-1], ours.state.log_history[:-1], strict=True):
        for key, value in their_log.items():
            is_average = is_accumulated and key.startswith(AVERAGED_DIFFERENTLY)
            if key != "step_time" and not is_average:
                assert our_log[key] == pytest.approx(value, rel=2e-4, abs=2e-5), (key, their_log["step"])


def test_steps_without_a_signal_move_the_weights_as_trls_do(tmp_path, model_dir):
    """By weight decay and by what Adam remembers; only the passes that compute zeros are left out."""
    calls: dict[str, int] = {"theirs": 0, "ours": 0}

    def reward_of(name: str) -> Any:
        def sometimes(completions, **_):
            calls[name] += 1
            return [1.0] * len(completions) if calls[name] in (2, 3, 5) else count_digits(completions)

        return sometimes

    theirs, ours = (
        make(tmp_path, model_dir, reward_func=reward_of(name), weight_decay=0.1, max_steps=5)
        for make, name in ((their_trainer, "theirs"), (our_trainer, "ours"))
    )
    initial = weights_of(theirs.model)
    with_scripted_completions(theirs, ours)
    train_theirs(theirs, ours.args.seed)
    ours.train()
    expected, actual = weights_of(theirs.model), weights_of(ours.model)
    for name in actual:
        moved, error = expected[name] - initial[name], actual[name] - expected[name]
        assert error.norm() < 2e-4 * moved.norm(), name
    logs = list(zip(theirs.state.log_history[:-1], ours.state.log_history[:-1], strict=True))
    assert [ours["updates_without_signal"] for _, ours in logs] == [0, 1, 1, 0, 1]
    for theirs_log, our_log in logs:
        missing = {key for key in theirs_log.keys() - our_log.keys() if not key.startswith("clip_ratio/")}
        assert missing == ({"entropy"} if our_log["updates_without_signal"] else set())
        for key in theirs_log.keys() & our_log.keys() - {"step_time"}:
            assert our_log[key] == pytest.approx(theirs_log[key], rel=2e-4, abs=2e-5), key


def test_reward_function_that_changes_its_arguments(tmp_path, model_dir):
    """A judge that appends the completion to the prompt, as is natural, and drops the end of the tokens."""
    seen = []

    def judge(prompts, completions, completion_ids, **kwargs):
        rewards = []
        for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True):
            prompt.append(completion[0])
            seen.append((len(prompt), len(ids)))
            ids.pop()
            rewards.append(float(len(ids) + 3 * len(prompt)))
        return rewards

    options = dict(
        reward_func=judge,
        train_dataset=sums(conversational=True),
        mask_truncated_completions=True,
        max_steps=2,
    )
    theirs, ours = (make(tmp_path, model_dir, **options) for make in (their_trainer, our_trainer))
    with_scripted_completions(theirs, ours)
    train_theirs(theirs, ours.args.seed)
    they_saw = seen.copy()
    seen.clear()
    ours.train()
    assert seen == they_saw and {num_messages for num_messages, _ in seen} == {2}
    for key in ("reward", "completions/mean_terminated_length", "grad_norm"):
        their_values, our_values = ([e[key] for e in t.state.log_history[:-1]] for t in (theirs, ours))
        assert our_values == pytest.approx(their_values, rel=2e-4)


MIXTURES = {
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, moe_intermediate_size=16, router_aux_loss_coef=0.5
    ),
    # Whether the configuration asks for the routers' logits changes nothing.
    "mixtral": MixtralConfig(
        **SIZES, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1
    ),
}
MIXTURE_CASES = [
    ("qwen3-moe", dict(gradient_checkpointing=True, loss_type="grpo")),
    ("mixtral", dict(router_aux_loss_coef=1.0)),
    ("mixtral", dict(router_aux_loss_coef=0.0)),
]


@pytest.mark.parametrize(("name", "options"), MIXTURE_CASES, ids=str)
def test_a_mixture_of_experts_has_trls_auxiliary_loss(tmp_path, name, options):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MIXTURES[name]).save_pretrained(tmp_path / "model")
    options = dict(max_steps=3, learning_rate=1.0, optim="sgd", max_grad_norm=0.0, **options)
    theirs, ours = (make(tmp_path, tmp_path / "model", **options) for make in (their_trainer, our_trainer))
    initial = weights_of(ours.model)
    with_scripted_completions(theirs, ours)
    train_theirs(theirs, ours.args.seed)
    ours.train()
    expected, actual = weights_of(theirs.model), weights_of(ours.model)
    for router in [name for name in actual if name.endswith("gate.weight")]:
        moved = expected[router] - initial[router]
        assert (actual[router] - expected[router]).norm() < 1e-3 * moved.norm(), router
    assert all(
        (actual[n] - expected[n]).norm() < 1e-3 * (expected[n] - initial[n]).norm() + 1e-6 for n in actual
    )
    for their_log, our_log in zip(theirs.state.log_history[:-1], ours.state.log_history[:-1], strict=True):
        assert ("aux_loss" in our_log) == (options.get("router_aux_loss_coef") != 0.0)
        for key in {"loss", "grad_norm", "aux_loss"} & their_log.keys():
            assert our_log[key] == pytest.approx(their_log[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize(
    "filters",
    [
        dict(top_k=10),
        dict(top_p=0.8, temperature=0.7),
        dict(min_p=0.1),
        dict(repetition_penalty=1.5),
    ],
    ids=lambda filters: "-".join(filters),
)
def test_filtered_completions_have_trls_gradient(tmp_path, model_dir, filters):
    # Generated by our engine, and given to TRL, whose default engine corrects nothing.
    options = dict(filters, max_steps=1, per_device_train_batch_size=8)
    theirs, ours = (make(tmp_path, model_dir, **options) for make in (their_trainer, our_trainer))
    for trainer in (theirs, ours):
        trainer.model.get_input_embeddings().padding_idx = None  # padding may be drawn like any token
    generate, generated = ours.engine.generate, []
    ours.engine.generate = lambda *request: generated.extend(generate(*request)) or list(generated)
    ours.train()
    theirs._generate_single_turn = lambda *_, **__: ([list(c.token_ids) for c in generated], None)
    theirs.train()
    ours_norm, their_norm = (trainer.state.log_history[0]["grad_norm"] for trainer in (ours, theirs))
    assert ours_norm == pytest.approx(their_norm, rel=1e-3)
    assert their_norm > 0


def test_clipping_was_seen(tmp_path, model_dir):
    """The cases above would agree on clip ratios for nothing if they were always zero."""
    ours = our_trainer(tmp_path, model_dir, **CASES["gspo"])
    with_scripted_completions(mock.Mock(), ours)
    ours.train()
    clipped = [entry.get("clip_ratio/region_mean", 0.0) for entry in ours.state.log_history]
    assert max(clipped) > 0.0


# ── Names of what is logged ──────────────────────────────────────────────────────────────────────────────

NOT_LOGGED = {"total_flos"}  # TRL's is always 0: it does not count GRPO's operations


@pytest.fixture(scope="module")
def histories(tmp_path_factory, model_dir) -> tuple[list[dict], list[dict]]:
    """Logs of a run with evaluation, KL and entropy bonus."""
    options = dict(
        beta=0.1,
        entropy_coef=0.1,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=8,
        max_steps=3,
    )
    histories = []
    for make in (their_trainer, our_trainer):
        trainer = make(tmp_path_factory.mktemp("run"), model_dir, eval_dataset=sums(2), **options)
        trainer.train()
        trainer.evaluate()
        histories.append(trainer.state.log_history)
    return histories[0], histories[1]


def test_log_history_has_trls_entries_and_names(histories):
    theirs, ours = histories
    assert [entry["step"] for entry in theirs] == [entry["step"] for entry in ours]
    assert [entry["epoch"] for entry in theirs] == [entry["epoch"] for entry in ours]
    for their_entry, our_entry in zip(theirs, ours, strict=True):
        missing = their_entry.keys() - NOT_LOGGED - our_entry.keys()
        assert not missing
        types = {name: type(value) for name, value in our_entry.items() if name not in ("step", "epoch")}
        assert set(types.values()) <= {int, float}, types


def test_names_beyond_trls(histories):
    """Nothing comes unannounced: whoever adds a metric names it here and in the documentation."""
    theirs, ours = histories
    beyond = {
        name.removeprefix("eval_")
        for their_entry, our_entry in zip(theirs, ours, strict=True)
        for name in our_entry.keys() - their_entry.keys()
    }
    sampling = {
        *(f"sampling/sampling_logp_difference/{x}" for x in ("mean", "max")),
        *(f"sampling/importance_sampling_ratio/{x}" for x in ("min", "mean", "max")),
    }
    assert beyond == sampling | {"skipped_updates", "updates_without_signal", "entropy_trained"}


def test_evaluation_numbers(tmp_path, model_dir):
    """One batch of the same completions: every metric is TRL's."""
    options = dict(beta=0.2, per_device_eval_batch_size=12)
    theirs, ours = (
        make(tmp_path, model_dir, eval_dataset=sums(3), **options) for make in (their_trainer, our_trainer)
    )
    with_scripted_completions(theirs, ours)
    with torch.no_grad():  # away from the reference, so that the KL penalty is in the loss
        for trainer in (theirs, ours):
            generator = torch.Generator().manual_seed(0)
            for parameter in trainer.model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    expected, actual = theirs.evaluate(), ours.evaluate()
    assert expected["eval_kl"] > 1e-3
    for name, value in expected.items():
        if not name.endswith(("_runtime", "_per_second", "_model_preparation_time")):
            assert actual[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


# ── Order of events ──────────────────────────────────────────────────────────────────────────────────────

NOT_CALLED = {"on_substep_end", "on_prediction_step"}  # there are no such steps: batches are packed by tokens


class EventRecorder(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[tuple[str, int, float]] = []


def _record(event):
    def method(self, args, state, control, **kwargs):
        self.events.append((event, state.global_step, state.epoch))

    return method


for _name in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(EventRecorder, _name, _record(_name))

EPOCHS = dict(save_strategy="epoch", logging_strategy="epoch")
SCHEDULES = {
    "steps": dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=3, max_steps=4),
    "epochs": dict(eval_strategy="epoch", max_steps=-1, num_train_epochs=2, **EPOCHS),
    "in-the-middle-of-an-epoch": dict(max_steps=4, **EPOCHS),
    "at-the-start": dict(eval_on_start=True, eval_strategy="steps", eval_steps=1, eval_delay=2),
    "first-step": dict(logging_first_step=True, logging_steps=3),
    "accumulated": dict(gradient_accumulation_steps=2, logging_steps=2, max_steps=4),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_events_come_in_trls_order(tmp_path, model_dir, schedule):
    recorded = []
    for make in (their_trainer, our_trainer):
        recorder = EventRecorder()
        trainer = make(
            tmp_path / str(len(recorded)),
            model_dir,
            callbacks=[recorder],
            train_dataset=sums(3),
            eval_dataset=sums(2),
            per_device_eval_batch_size=8,
            save_only_model=True,
            **SCHEDULES[schedule],
        )
        trainer.train()
        recorded.append([event for event in recorder.events if event[0] not in NOT_CALLED])
    theirs, ours = recorded
    assert [event[:2] for event in ours] == [event[:2] for event in theirs]
    assert [event[2] for event in ours] == pytest.approx([event[2] for event in theirs])


# ── Length of a run ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("num_rows", "epochs", "options"),
    [
        (12, 1, {}),
        (12, 2.5, dict(gradient_accumulation_steps=2)),
        (7, 3, dict(gradient_accumulation_steps=3)),  # 2 whole batches and a rest that is dropped
        (5, 0.5, {}),
        (9, 1.01, dict(num_iterations=2)),
        (10, 1, dict(steps_per_generation=4, gradient_accumulation_steps=2, num_iterations=3)),
        (6, 1.5, dict(generation_batch_size=12)),
        (8, 1, dict(num_generations=2, per_device_train_batch_size=2, gradient_accumulation_steps=4)),
    ],
    ids=str,
)
def test_steps_of_epochs(tmp_path, model_dir, num_rows, epochs, options):
    options = {**options, "max_steps": -1, "num_train_epochs": epochs, "train_dataset": sums(num_rows)}
    theirs = their_trainer(tmp_path, model_dir, **options)
    values = theirs.set_initial_training_values(theirs.args, theirs.get_train_dataloader())
    num_epochs, max_steps = values[0], values[-1]
    ours = our_trainer(tmp_path, model_dir, **options)
    assert (ours.state.max_steps, ours.state.num_train_epochs) == (max_steps, num_epochs)


def test_no_step_is_cut_short_at_the_end_of_an_epoch(tmp_path, model_dir):
    """3 slices an epoch, 2 a step: TRL's second step has one slice, ours one of the next epoch too."""
    options = dict(
        train_dataset=sums(3),
        steps_per_generation=1,
        gradient_accumulation_steps=2,
        max_steps=-1,
        num_train_epochs=2,
    )
    theirs = their_trainer(tmp_path, model_dir, **options)
    assert theirs.set_initial_training_values(theirs.args, theirs.get_train_dataloader())[-1] == 4
    ours = our_trainer(tmp_path, model_dir, **options)
    assert ours.train().global_step == 3
    assert ours.state.epoch == 2.0
