"""A run that was killed and resumed is, bit for bit, the run that never was."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
from small_runs import VOCAB_SIZE, make_dataset, make_model, make_trainer, read_metrics, without_timings
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from colocate.checkpoints import sealed
from colocate.checkpoints.sealed import CheckpointError, list_checkpoints
from processes import FORKS

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import engine_models

NUM_STEPS = 7


@pytest.fixture(autouse=True)
def one_thread():
    """Sums of floats depend on how many threads share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ── Every part of the state, in process ──────────────────────────────────────────────────────────────────


def moody_reward(completion_ids, **_: Any) -> list[float]:
    """A judge that draws: its generator is part of the run."""
    return [random.random() + sum(token < 12 for token in ids) / len(ids) for ids in completion_ids]


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options)


def make_mixture() -> datasets.Dataset:
    rows = make_dataset(10)
    return rows.add_column("dataset", ["small"] * 3 + ["large"] * 7)


def trained_adapter() -> Any:
    """A PEFT model whose adapter has learnt something, so that it is no reference-free start."""
    model = peft.get_peft_model(make_model(), lora())
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


CASES: dict[str, dict[str, Any]] = {
    "two_iterations": dict(num_iterations=2),
    "rollout_feeds_two_steps": dict(steps_per_generation=4, gradient_accumulation_steps=2, num_iterations=2),
    "step_spans_rollouts": dict(
        per_device_train_batch_size=4, steps_per_generation=3, gradient_accumulation_steps=2, num_iterations=3
    ),
    "step_needs_two_rollouts": dict(
        per_device_train_batch_size=4, steps_per_generation=2, gradient_accumulation_steps=3
    ),
    "bf16_with_masters": dict(bf16=True, learning_rate=1e-3, num_iterations=2),
    "dropout": dict(model="gpt2", num_iterations=2),
    "stream": dict(train_dataset="stream"),
    # Epochs of 6 prompts: the small dataset is used up in each, the large one goes on in the next.
    "mixture": dict(train_dataset=make_mixture(), dataset_weights={"small": 0.5, "large": 0.5}),
    "many_epochs": dict(train_dataset=make_dataset(3), eval_dataset=make_dataset(1), eval_strategy="epoch"),
    "kl": dict(beta=0.1, num_iterations=2),
    "moving_reference": dict(beta=0.1, sync_ref_model=True, ref_model_sync_steps=2),
    "lora": dict(peft_config=lora(lora_dropout=0.2), beta=0.1, num_iterations=2),
    "older_adapter": dict(model="trained_adapter", beta=0.1),
    "adaptive_entropy": dict(
        use_adaptive_entropy=True, entropy_target=4.0, entropy_coef=0.02, entropy_coef_delta=0.01
    ),
    "entropy_quantile": dict(top_entropy_quantile=0.5, num_iterations=2),
    "drawing_reward_and_rare_logs": dict(reward_funcs=moody_reward, logging_steps=3, num_iterations=2),
    "offloaded": dict(
        bf16=True,
        offload_optimizer=True,
        num_iterations=2,
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=make_dataset(1),
    ),
    # Wide enough that most of its moments have 8 bits.
    "offloaded_8bit": dict(model="wide", bf16=True, optim="adamw_bnb_8bit", offload_optimizer=True),
    "gemma3": dict(model="gemma3_text", num_iterations=2),
    "glm4": dict(model="glm4", peft_config=lora()),
    "weight_decay_sgd": dict(optim="sgd", weight_decay=0.1, lr_scheduler_type="constant_with_warmup"),
}


def build(output_dir: Path, case: dict[str, Any], **options: Any) -> Any:
    case = {"save_strategy": "steps", "save_steps": 1, "max_steps": NUM_STEPS, **case, **options}
    if case.get("train_dataset") == "stream":
        case["train_dataset"] = make_dataset(5).to_iterable_dataset(num_shards=2)
    if case.get("model") == "trained_adapter":
        case["model"] = trained_adapter()
    if case.get("model") == "wide":
        case["model"] = make_model(hidden_size=128)
    if case.get("model") in engine_models.FAMILIES:
        case["model"] = engine_models.make_model(case["model"], vocab_size=VOCAB_SIZE)
    return make_trainer(output_dir, **case)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """By name of the case, a finished run with a checkpoint after every step."""
    runs: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name not in runs:
            runs[name] = build(tmp_path_factory.mktemp(name), CASES[name])
            runs[name].train()
        return runs[name]

    return run


WITHIN_A_ROLLOUT = ("two_iterations", "rollout_feeds_two_steps", "step_spans_rollouts", "lora")
"""Cases of which step 1, where completions wait for further steps, is resumed in every run."""


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param(
            name, step, marks=[pytest.mark.slow] if step == 1 and name not in WITHIN_A_ROLLOUT else []
        )
        for step in (1, 4)
        for name in CASES
    ],
)
@pytest.mark.share(4)
def test_resumed_equals_uninterrupted(uninterrupted, name, step, tmp_path):
    whole = uninterrupted(name)
    # As a kill leaves it: the record goes on beyond the checkpoint.
    shutil.copytree(whole.args.output_dir, tmp_path, dirs_exist_ok=True)
    for later in range(step + 1, NUM_STEPS + 1):
        shutil.rmtree(tmp_path / f"checkpoint-{later}")
    torch.manual_seed(999), random.seed(999)  # a new process starts with other random numbers

    resumed = build(tmp_path, CASES[name])
    resumed.train(resume_from_checkpoint=True)

    assert_same_run(resumed, whole)


def test_saving_does_not_change_a_run(uninterrupted, tmp_path):
    whole = uninterrupted("dropout")
    unsaved = build(tmp_path, CASES["dropout"], save_strategy="no")
    unsaved.train()
    assert not list_checkpoints(tmp_path)
    assert_same_run(unsaved, whole)


@pytest.mark.parametrize("name", ["offloaded", "offloaded_8bit"])
def test_where_the_optimizer_waits_does_not_change_a_run(uninterrupted, name, tmp_path):
    whole = uninterrupted(name)
    resident = build(tmp_path, CASES[name], offload_optimizer=False)
    resident.train()
    assert_same_run(resident, whole)


def assert_same_run(run: Any, expected: Any) -> None:
    names = [name for name, _ in run.model.named_parameters()]
    assert names == [name for name, _ in expected.model.named_parameters()]
    assert_same(dict(run.model.named_parameters()), dict(expected.model.named_parameters()))
    assert_same(run.policy.state_dict(), expected.policy.state_dict())
    assert_same(
        [without_timings(entry) for entry in run.state.log_history],
        [without_timings(entry) for entry in expected.state.log_history],
    )
    records = read_metrics(run.args.output_dir)
    assert [r["step"] for r in records if "eval" not in r] == list(range(1, NUM_STEPS + 1))
    assert_same(records, read_metrics(expected.args.output_dir))
    completions = [Path(r.args.output_dir, "completions.jsonl").read_text() for r in (run, expected)]
    assert completions[0] == completions[1] != ""


def assert_same(actual: Any, expected: Any, path: str = "") -> None:
    """Equal down to the bits, with NaN equal to itself."""
    assert type(actual) is type(expected), path
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected), path
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key in expected:
            assert_same(actual[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), path
        for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, b, f"{path}/{index}")
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(actual), path
    else:
        assert actual == expected, f"{path}: {actual} != {expected}"


# ── Kills, in processes of their own ─────────────────────────────────────────────────────────────────────


def start(target: Any, *args: Any) -> Any:
    process = FORKS.Process(target=target, args=args)
    process.start()
    return process


def train_in_child(output_dir: Path, name: str, resume: bool, slow_step_s: float, slow_file_s: float) -> None:
    torch.set_num_threads(1)
    trainer = build(output_dir, CASES[name], save_strategy="steps" if slow_file_s else "no")
    generate, flush = trainer.engine.generate, sealed._flush
    trainer.engine.generate = lambda *args: (time.sleep(slow_step_s), generate(*args))[1]
    sealed._flush = lambda path: (time.sleep(slow_file_s), flush(path))[1]
    (output_dir / "begun").touch()
    trainer.train(resume_from_checkpoint=resume)


def train_until_signalled(output_dir: Path, name: str) -> None:
    """Train, and stay in the second rollout, which the file `staying` tells, until there is `signalled`."""
    torch.set_num_threads(1)
    trainer = build(output_dir, CASES[name], save_strategy="no")
    generate, numbers = trainer.engine.generate, itertools.count()

    def stay(*args: Any) -> Any:
        if next(numbers):
            (output_dir / "staying").touch()
            while not (output_dir / "signalled").exists():
                time.sleep(0.01)
        return generate(*args)

    trainer.engine.generate = stay
    trainer.train()


def wait_for(condition: Any, process: Any, timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.is_alive(), f"the run ended with {process.exitcode}"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def num_steps_recorded(output_dir: Path) -> int:
    file = output_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def test_sigterm_saves_the_step_in_hand(uninterrupted, tmp_path):
    process = start(train_until_signalled, tmp_path, "two_iterations")
    wait_for((tmp_path / "staying").exists, process)
    assert num_steps_recorded(tmp_path) == 2  # both passes over the first rollout
    os.kill(process.pid, signal.SIGTERM)  # in the middle of step 3's rollout
    (tmp_path / "signalled").touch()
    process.join(200)
    assert process.exitcode == 143
    assert [c.name for c in list_checkpoints(tmp_path)] == ["checkpoint-3"]
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]

    resumed = build(tmp_path, CASES["two_iterations"])
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == NUM_STEPS
    assert_same_run(resumed, uninterrupted("two_iterations"))


def test_killed_again_and_again_at_random_moments(uninterrupted, tmp_path):
    name = "rollout_feeds_two_steps"
    rng = random.Random(8)
    delays = [rng.uniform(0.02, 0.5) for _ in range(4)]
    for delay_s in delays:
        process = start(train_in_child, tmp_path, name, bool(list_checkpoints(tmp_path)), 0.05, 0.02)
        wait_for((tmp_path / "begun").exists, process)
        time.sleep(delay_s)
        process.kill()
        process.join()
        (tmp_path / "begun").unlink()
        for directory in list_checkpoints(tmp_path):
            sealed.verify(directory)
    resumed = build(tmp_path, CASES[name])
    resumed.train(resume_from_checkpoint=bool(list_checkpoints(tmp_path)))
    assert not list(tmp_path.glob("partial-*")), delays
    assert_same_run(resumed, uninterrupted(name))


def kill_at(moment: str, output_dir: Path) -> None:
    """Train, and die in the second checkpoint at a moment of its writing."""
    torch.set_num_threads(1)
    trainer = build(output_dir, CASES["two_iterations"], save_steps=2, save_total_limit=1)

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Arm(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                trainer.policy.state_dict = die if moment == "optimizer" else trainer.policy.state_dict
                sealed._fingerprint = die if moment == "manifest" else sealed._fingerprint
                sealed._flush = die if moment == "flush" else sealed._flush
                sealed.rotate = die if moment == "rotate" else sealed.rotate
                if moment == "delete":
                    os.rmdir = die  # shutil.rmtree has deleted the files by then

    trainer.journal.handler.add_callback(Arm())
    trainer.train()


@pytest.mark.parametrize(
    ("moment", "left", "sealed"),
    [
        ("optimizer", {"checkpoint-2", "partial-checkpoint-4"}, "checkpoint-2"),
        ("manifest", {"checkpoint-2", "partial-checkpoint-4"}, "checkpoint-2"),
        ("flush", {"checkpoint-2", "partial-checkpoint-4"}, "checkpoint-2"),
        ("rotate", {"checkpoint-2", "checkpoint-4"}, "checkpoint-4"),
        ("delete", {"partial-checkpoint-2", "checkpoint-4"}, "checkpoint-4"),
    ],
)
@pytest.mark.share(2)
def test_killed_while_a_checkpoint_is_written(uninterrupted, moment, left, sealed, tmp_path):
    process = start(kill_at, moment, tmp_path)
    process.join(200)
    assert process.exitcode == -signal.SIGKILL
    assert {d.name for d in tmp_path.iterdir() if d.is_dir()} == left
    assert list_checkpoints(tmp_path)[-1].name == sealed

    resumed = build(tmp_path, CASES["two_iterations"], save_steps=2, save_total_limit=1)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, uninterrupted("two_iterations"))
    assert [d.name for d in tmp_path.iterdir() if d.is_dir()] == [f"checkpoint-{NUM_STEPS}"]


# ── What a checkpoint is ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["two_iterations", "bf16_with_masters", "dropout"])
def test_checkpoint_is_a_plain_model(uninterrupted, name):
    run = uninterrupted(name)
    directory = Path(run.args.output_dir, f"checkpoint-{NUM_STEPS}")
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert_same(dict(loaded.named_parameters()), dict(run.model.named_parameters()))
    state = json.loads((directory / "trainer_state.json").read_text())
    assert state["global_step"] == NUM_STEPS and len(state["log_history"]) == NUM_STEPS


@pytest.mark.parametrize("name", ["lora", "older_adapter"])
def test_checkpoint_is_a_plain_adapter(uninterrupted, name):
    run = uninterrupted(name)
    directory = Path(run.args.output_dir, f"checkpoint-{NUM_STEPS}")
    loaded = peft.PeftModel.from_pretrained(make_model(), directory)
    expected = dict(run.model.named_parameters())
    assert_same({n: p.data for n, p in loaded.named_parameters()}, {n: p.data for n, p in expected.items()})
    assert not (directory / "model.safetensors").exists()  # the base is not copied


def test_the_order_of_writing_decides(tmp_path):
    build(tmp_path, CASES["two_iterations"], max_steps=4, save_steps=4).train()
    # Another run in the same directory: its checkpoints have smaller numbers but are the newer ones.
    build(tmp_path, CASES["two_iterations"], max_steps=3, save_total_limit=2).train()
    assert [c.name for c in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3"]


def test_the_best_is_kept(tmp_path):
    class Choose(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                state.best_model_checkpoint = f"{args.output_dir}/checkpoint-2"

    options = dict(save_total_limit=2, callbacks=[Choose])
    build(tmp_path, CASES["two_iterations"], **options, max_steps=4).train()
    assert [c.name for c in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    # Which one is the best is remembered.
    build(tmp_path, CASES["two_iterations"], save_total_limit=2, max_steps=6).train(True)
    assert [c.name for c in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-6"]


def test_a_finished_run_has_nothing_left_to_do(uninterrupted, tmp_path):
    whole = uninterrupted("two_iterations")
    shutil.copytree(whole.args.output_dir, tmp_path, dirs_exist_ok=True)
    again = build(tmp_path, CASES["two_iterations"])
    assert again.train(resume_from_checkpoint=True).global_step == NUM_STEPS
    assert_same(dict(again.model.named_parameters()), dict(whole.model.named_parameters()))
    # It may be given more to do.
    longer = build(tmp_path, CASES["two_iterations"], max_steps=NUM_STEPS + 2)
    assert longer.train(resume_from_checkpoint=True).global_step == NUM_STEPS + 2


# ── What cannot be resumed ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stopped(uninterrupted, tmp_path):
    """A copy of a run's directory."""

    def copy(name: str) -> Path:
        shutil.copytree(uninterrupted(name).args.output_dir, tmp_path, dirs_exist_ok=True)
        return tmp_path

    return copy


def test_nothing_to_resume(tmp_path):
    trainer = build(tmp_path, CASES["two_iterations"])
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*checkpoint-5"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert not (tmp_path / "metrics.jsonl").exists()


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(flip_a_bit, "checksum"), (truncate, "bytes"), (Path.unlink, "is missing")],
)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rank0.pt", "config.json"])
@pytest.mark.share(3)
def test_a_damaged_checkpoint_is_refused(stopped, damage, message, name):
    directory = stopped("two_iterations")
    damage(directory / f"checkpoint-{NUM_STEPS}" / name)
    trainer = build(directory, CASES["two_iterations"])
    with pytest.raises(CheckpointError, match=f"corrupt: {name}.*{message}") as caught:
        trainer.train(resume_from_checkpoint=True)
    good = directory / f"checkpoint-{NUM_STEPS - 1}"
    assert f"The newest other checkpoint is {good}: set resume_from_checkpoint to it" in str(caught.value)
    assert trainer.train(resume_from_checkpoint=str(good)).global_step == NUM_STEPS


def test_a_damaged_manifest_is_refused(stopped):
    directory = stopped("two_iterations")
    manifest = directory / f"checkpoint-{NUM_STEPS}" / "manifest.json"
    manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(CheckpointError, match=r"corrupt: manifest\.json is not readable"):
        build(directory, CASES["two_iterations"]).train(resume_from_checkpoint=True)


def test_auto_goes_on_from_the_newest_whole_checkpoint(stopped, caplog):
    """A job that goes back into a queue must not need a person because a disk has spoilt one file."""
    directory = stopped("two_iterations")
    for step, damage in ((NUM_STEPS, truncate), (NUM_STEPS - 1, flip_a_bit)):
        damage(directory / f"checkpoint-{step}" / "optimizer.pt")
    (directory / f"checkpoint-{NUM_STEPS - 2}" / "manifest.json").write_text('{"format": 2, "written_at"')
    trainer = build(directory, CASES["two_iterations"])
    begun = []
    trainer.add_callback(OnBegin(begun))
    trainer.train(resume_from_checkpoint="auto")
    assert begun == [NUM_STEPS - 3]
    assert f"checkpoint-{NUM_STEPS - 1} is corrupt: optimizer.pt has" in caplog.text
    assert (
        f"Going on from {directory / f'checkpoint-{NUM_STEPS - 3}'}, the newest that is whole" in caplog.text
    )


def test_auto_does_not_begin_anew_where_all_checkpoints_are_corrupt(stopped):
    directory = stopped("two_iterations")
    for checkpoint in list_checkpoints(directory):
        (checkpoint / "rank0.pt").unlink()
    with pytest.raises(
        CheckpointError, match=rf"No checkpoint in {directory} is whole: .*rank0.pt is missing"
    ):
        build(directory, CASES["two_iterations"]).train(resume_from_checkpoint="auto")


class OnBegin(TrainerCallback):
    """Notes the step at which training begins."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps[:] = self.steps or [state.global_step]


def test_weights_alone_cannot_be_resumed(tmp_path):
    options = dict(save_only_model=True, max_steps=1)
    build(tmp_path, CASES["two_iterations"], **options).train()
    with pytest.raises(CheckpointError, match="save_only_model=True: there is no optimizer state"):
        build(tmp_path, CASES["two_iterations"]).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("two_iterations", dict(num_iterations=3), "option num_iterations was 2 .* and is 3 now"),
        ("two_iterations", dict(peft_config=lora()), r"parameter \S+ was .* when it was written"),
        ("two_iterations", dict(model="gpt2"), r"parameter \S+ was .* when it was written"),
        ("lora", dict(model="other weights"), "checksum of the frozen weights"),
        ("kl", dict(model="other weights"), "checksum of the frozen weights"),
    ],
)
def test_another_run_cannot_continue_it(stopped, name, changed, message):
    directory = stopped(name)
    if changed.get("model") == "other weights":  # the same shapes, other weights
        changed = dict(model=make_model(seed=1))
    trainer = build(directory, CASES[name] | changed)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(CheckpointError, match=message):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 0  # nothing half done
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_another_order_of_the_data_cannot_continue_it(stopped):
    trainer = build(stopped("two_iterations"), CASES["two_iterations"], train_dataset=make_dataset(12))
    with pytest.raises(ValueError, match="num_rows=10, but this run has 12"):
        trainer.train(resume_from_checkpoint=True)
