"""Callbacks of transformers, what they see and what they may ask for; logs; trackers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import PrinterCallback, TrainerCallback

from tiny import count_digits, logged, make_model, make_trainer, sums, weights_of


class Recorder(TrainerCallback):
    """Notes every event, and sets a flag of `control` at (event, step)."""

    def __init__(self, ask: dict[tuple[str, int], str] | None = None) -> None:
        self.events: list[tuple[str, int]] = []
        self.received: dict[str, set[str]] = {}
        self._ask = ask or {}

    def _note(self, event, state, control, kwargs):
        self.events.append((event, state.global_step))
        self.received[event] = {name for name, value in kwargs.items() if value is not None}
        flag = self._ask.get((event, state.global_step))
        if flag is not None:
            setattr(control, flag, True)


def _noting(event):
    def method(self, args, state, control, **kwargs):
        self._note(event, state, control, kwargs)

    return method


for _name in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(Recorder, _name, _noting(_name))


def steps_with(trainer, name: str) -> list[int]:
    return [entry["step"] for entry in trainer.state.log_history if name in entry]


def run(tmp_path, ask=None, **options):
    recorder = Recorder(ask)
    trainer = make_trainer(tmp_path, callbacks=[recorder], **options)
    trainer.train()
    return recorder, trainer


def test_keyword_arguments_of_events(tmp_path):
    recorder, trainer = run(tmp_path, eval_dataset=sums(1), eval_strategy="steps", eval_steps=1, max_steps=1)
    for event, received in recorder.received.items():
        assert {"model", "processing_class", "optimizer", "lr_scheduler"} <= received, event
    assert "logs" in recorder.received["on_log"] and "metrics" in recorder.received["on_evaluate"]
    handler = trainer.journal.handler
    assert handler.model is trainer.model and handler.processing_class is trainer.processing_class
    assert handler.optimizer is trainer.optimizer and handler.lr_scheduler is trainer.lr_scheduler


def test_gradients_can_be_inspected_before_the_optimizer_steps(tmp_path):
    norms = []

    class Inspector(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            norms.append(sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5)

    trainer = make_trainer(tmp_path, callbacks=[Inspector], max_grad_norm=0.0)
    trainer.train()
    assert norms == pytest.approx(logged(trainer, "grad_norm"))


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_log", "on_evaluate"])
def test_a_callback_may_stop_the_run(tmp_path, event):
    step = 1 if event == "on_step_begin" else 2
    recorder, trainer = run(
        tmp_path,
        {(event, step): "should_training_stop"},
        max_steps=5,
        eval_dataset=sums(1),
        eval_strategy="steps",
        eval_steps=2,
    )
    assert trainer.state.global_step == 2
    assert [name for name, _ in recorder.events][-3:] == ["on_epoch_end", "on_log", "on_train_end"]


def test_a_callback_may_ask_for_a_log_an_evaluation_and_a_checkpoint(tmp_path):
    ask = {("on_step_end", 1): "should_log", ("on_step_begin", 2): "should_log"}
    ask |= {("on_step_end", 2): "should_evaluate", ("on_step_end", 3): "should_save"}
    recorder, trainer = run(tmp_path, ask, max_steps=4, logging_strategy="no", eval_dataset=sums(1))
    # What is asked for at the beginning of a step happens at its end. The last loss comes with the summary.
    assert steps_with(trainer, "loss") == [1, 3, 4]
    assert steps_with(trainer, "eval_loss") == [2]
    assert [d.name for d in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert ("on_save", 3) in recorder.events


def test_early_stopping_of_ones_own(tmp_path):
    class StopWhenGood(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            control.should_training_stop = metrics["eval_reward"] > -1.0

    trainer = make_trainer(
        tmp_path,
        callbacks=[StopWhenGood],
        max_steps=6,
        eval_dataset=sums(1),
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    assert trainer.state.global_step == 2


def test_ending_an_epoch_early_is_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="should_epoch_stop"):
        run(tmp_path, {("on_step_end", 1): "should_epoch_stop"})


def test_callbacks_come_and_go(tmp_path):
    trainer = make_trainer(tmp_path)
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.add_callback(PrinterCallback)
    assert isinstance(trainer.pop_callback(PrinterCallback), PrinterCallback)
    assert trainer.pop_callback(PrinterCallback) is None
    trainer.train()
    assert recorder.events[0] == ("on_train_begin", 0)
    trainer.remove_callback(recorder)
    count = len(recorder.events)
    trainer.args.eval_strategy = "no"
    trainer.evaluate(sums(1))
    assert len(recorder.events) == count


# ── When it logs ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(logging_steps=2), [2, 4]),
        (dict(logging_steps=3, logging_first_step=True), [1, 3]),
        (dict(logging_steps=0.5), [2, 4]),
        (dict(logging_strategy="no"), []),
        (dict(logging_strategy="epoch", train_dataset=sums(3)), [3, 4]),
    ],
    ids=str,
)
@pytest.mark.share(2)
def test_logging_intervals(tmp_path, options, expected):
    _, trainer = run(tmp_path, max_steps=4, **options)
    logs = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    assert [entry["step"] for entry in logs] == expected
    assert "train_runtime" in trainer.state.log_history[-1]
    # One line per step whatever the interval.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    # A log is the mean of its steps, but the newest learning rate.
    by_step = {line["step"]: line for line in lines}
    first = 1
    for entry in logs:
        steps = [by_step[i] for i in range(first, entry["step"] + 1)]
        assert entry["loss"] == pytest.approx(sum(line["loss"] for line in steps) / len(steps))
        assert entry["reward"] == pytest.approx(sum(line["reward"] for line in steps) / len(steps))
        assert entry["learning_rate"] == steps[-1]["learning_rate"]
        assert entry["num_tokens"] == steps[-1]["num_tokens"]
        first = entry["step"] + 1


def test_the_terminal_shows_the_reward_at_every_step_that_a_rollout_feeds(tmp_path, capsys):
    run(tmp_path, max_steps=4, steps_per_generation=2, logging_steps=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(" | ")[0] for line in lines] == [f"step {step}/4" for step in (1, 2, 3, 4)]
    rewards = [line.split(" | ")[1] for line in lines]
    assert all(reward.startswith("reward ") for reward in rewards)
    assert rewards[0] == rewards[1] != rewards[2] == rewards[3]


def test_the_terminal_says_what_an_evaluation_found(tmp_path, capsys):
    _, trainer = run(tmp_path, eval_dataset=sums(2), max_steps=2, eval_strategy="steps", eval_steps=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "eval_reward" in line]
    assert [line.split(" | ")[0] for line in lines] == ["step 1", "step 2"]
    shown = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(shown) == 2 and shown == pytest.approx(logged(trainer, "eval_reward"), rel=1e-2)


def test_train_loss_is_the_mean_of_all_steps(tmp_path):
    _, trainer = run(tmp_path, max_steps=5, logging_steps=3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = sum(line["loss"] for line in lines) / 5
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(expected)


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_evaluation_intervals(tmp_path, strategy):
    interval = {"eval_steps": 2} if strategy == "steps" else {}
    _, trainer = run(
        tmp_path, max_steps=5, train_dataset=sums(3), eval_dataset=sums(1), eval_strategy=strategy, **interval
    )
    assert steps_with(trainer, "eval_loss") == ([2, 4, 5] if strategy == "steps" else [3, 5])
    assert [entry["epoch"] for entry in trainer.state.log_history][-1] == pytest.approx(5 / 3)


def test_step_time_leaves_out_evaluation(tmp_path, monkeypatch):
    now_s = 0

    def slow_when_evaluating(completions, answer, **kwargs):
        nonlocal now_s
        now_s += 100 if "held out" in answer else 1
        return count_digits(completions)

    monkeypatch.setattr("colocate.memory.timeline.time", SimpleNamespace(perf_counter=lambda: now_s))
    held_out = sums(1).map(lambda row: {"answer": "held out"})
    _, trainer = run(
        tmp_path,
        reward_funcs=slow_when_evaluating,
        eval_dataset=held_out,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=3,
    )
    assert logged(trainer, "step_time") == [1, 1, 1]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluating = [line["phases"].get("evaluate", 0.0) for line in lines if "phases" in line]
    assert evaluating == [0, 100, 100]  # in the record of the step that came after


def test_tensorboard_event_files(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    _, trainer = run(
        tmp_path / "out", report_to="tensorboard", eval_dataset=sums(1), eval_strategy="steps", eval_steps=2
    )
    trainer.evaluate()  # goes into the same file
    (file,) = (tmp_path / "runs").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    for tag, name in (("train/reward", "reward"), ("train/loss", "loss"), ("eval/reward", "eval_reward")):
        recorded = [(event.step, event.value) for event in events.Scalars(tag)]
        expected = [(e["step"], e[name]) for e in trainer.state.log_history if name in e]
        assert [step for step, _ in recorded] == [step for step, _ in expected]
        assert [value for _, value in recorded] == pytest.approx([value for _, value in expected])


class Scaling(TrainerCallback):
    """Multiplies the weights by two at one event of each step."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._scale)

    def _scale(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)


@pytest.mark.parametrize("options", [{}, {"max_policy_lag": 1, "engine": "native"}, {"num_iterations": 2}])
@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_evaluate"])
@pytest.mark.share(3)
def test_what_a_callback_does_to_the_weights_stays(tmp_path, event, options):
    """Steps at a learning rate of zero round the masters into the weights, and change nothing."""
    model = make_model().to(torch.bfloat16)
    before = weights_of(model)
    options = options | dict(learning_rate=0.0, max_steps=3, eval_strategy="steps", eval_steps=1)
    trainer = make_trainer(tmp_path, model=model, eval_dataset=sums(1), callbacks=[Scaling(event)], **options)
    trainer.train()
    after = weights_of(model)
    assert all(torch.equal(after[name], 8 * weight) for name, weight in before.items())
