"""What checkpoints will take on the disk, before the first one is written."""

from __future__ import annotations

import shutil
from collections import namedtuple

import pytest
import torch
from peft import LoraConfig

from colocate.checkpoints.disk_space import check, most_at_once, steps_to_save
from colocate.run.checkpoints import _checkpoint_bytes
from tiny import make_model, make_trainer, sums

Usage = namedtuple("Usage", "total used free")
MB = 1_000_000


def with_free(monkeypatch, num_bytes: int, total: int = 10**12) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(total, total - num_bytes, num_bytes))


@pytest.mark.parametrize(
    ("options", "num_rows"),
    [
        (dict(save_strategy="steps", save_steps=2), 3),
        (dict(save_strategy="steps", save_steps=0.5), 3),
        (dict(save_strategy="epoch"), 3),
        (dict(save_strategy="epoch", num_generations=4, per_device_train_batch_size=8), 3),
    ],
    ids=str,
)
@pytest.mark.share(2)
def test_the_steps_to_save_are_those_after_which_a_run_saves(tmp_path, options, num_rows):
    trainer = make_trainer(tmp_path, max_steps=5, train_dataset=sums(num_rows), **options)
    expected = steps_to_save(trainer.journal.save_interval, 0, 5)
    trainer.train()
    found = sorted(int(d.name.rpartition("-")[2]) for d in tmp_path.glob("checkpoint-*"))
    assert found == expected and len(found) > 1
    resumed = make_trainer(tmp_path, max_steps=9, train_dataset=sums(num_rows), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{found[0]}"))
    now = {int(d.name.rpartition("-")[2]) for d in tmp_path.glob("checkpoint-*")}
    assert now == {*found, *steps_to_save(resumed.journal.save_interval, found[0], 9)}


def test_steps_of_evaluations_and_of_a_run_that_is_over():
    assert steps_to_save(None, 0, 5) == [5]
    assert steps_to_save(2, 5, 5) == []
    assert steps_to_save(1 / 3, 0, 2) == [1, 2]


def test_how_many_are_there_at_once(tmp_path):
    steps = [2, 4, 6, 8]
    assert most_at_once(tmp_path, steps, None) == 4
    assert most_at_once(tmp_path, steps, 1) == 2, "the next one is whole before the last one goes"
    assert most_at_once(tmp_path, steps, 9) == 4
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "manifest.json").write_text("{}")
    assert most_at_once(tmp_path, steps, None) == 3, "two more, and one beside the one that it replaces"
    assert most_at_once(tmp_path, [6, 8], None) == 2
    assert most_at_once(tmp_path, [6, 8], 2) == most_at_once(tmp_path, [6, 8], 1) == 1


def test_no_room_for_one_is_refused_with_the_arithmetic(tmp_path, monkeypatch):
    parts = {"weights": 3 * MB, "masters": 6 * MB, "moments": 12 * MB}
    with_free(monkeypatch, 20 * MB)
    with pytest.raises(ValueError, match=r"20\.0 MB free.* takes 21\.0 MB at least: 3\.0 MB of weights") as e:
        check(tmp_path, parts, 1)
    assert "save_only_model=True (3.0 MB)" in str(e.value) and "save_strategy='no'" in str(e.value)
    with_free(monkeypatch, 21 * MB)
    assert check(tmp_path, parts, 1) is None
    with pytest.raises(ValueError) as e:
        with_free(monkeypatch, 2 * MB)
        check(tmp_path, {"weights": 3 * MB}, 1)
    assert "save_only_model" not in str(e.value)


def test_room_for_fewer_than_will_be_there_is_a_warning(tmp_path, monkeypatch):
    with_free(monkeypatch, 59 * MB)
    warning = check(tmp_path, {"weights": 20 * MB}, 3)
    assert warning is not None and "3 × 20.0 MB = 60.0 MB, and 2 fit" in warning
    with_free(monkeypatch, 60 * MB)
    assert check(tmp_path, {"weights": 20 * MB}, 3) is None
    with_free(monkeypatch, 0, total=0)
    assert check(tmp_path, {"weights": 20 * MB}, 3) is None, "the file system tells nothing"


LORA = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (dict(), ["weights", "masters", "moments"]),
        (dict(bf16=True), ["weights", "masters", "moments"]),
        (dict(optim="sgd"), ["weights", "masters", "moments"]),
        (dict(save_only_model=True), ["weights"]),
        (dict(peft_config=LORA), ["weights", "masters", "moments"]),
        (
            dict(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1),
            ["weights", "masters", "moments", "the reference"],
        ),
    ],
    ids=lambda value: "" if isinstance(value, list) else ",".join(value),
)
@pytest.mark.share(2)
def test_the_bytes_are_those_of_the_files(tmp_path, options, parts):
    """Beside some kilobytes of text and of completions that wait."""
    trainer = make_trainer(
        tmp_path, model=make_model(), save_strategy="steps", save_steps=1, max_steps=1, **options
    )
    expected = _checkpoint_bytes(trainer.run)
    assert list(expected) == parts
    trainer.train()
    sizes = {
        file.name: file.stat().st_size
        for file in (tmp_path / "checkpoint-1").iterdir()
        if file.name.endswith((".safetensors", "optimizer.pt"))
    }
    assert sum(expected.values()) <= sum(sizes.values()) < sum(expected.values()) + 40_000


def test_an_optimizer_of_the_users_is_counted_without_moments(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = make_trainer(tmp_path, model=model, optimizers=(optimizer, None))
    assert list(_checkpoint_bytes(trainer.run)) == ["weights", "masters"]


def test_a_run_says_it_before_its_first_step(tmp_path, monkeypatch, caplog):
    options = dict(save_strategy="steps", save_steps=1, max_steps=3)
    trainer = make_trainer(tmp_path, **options)
    needed = sum(_checkpoint_bytes(trainer.run).values())
    with_free(monkeypatch, needed - 1)
    with pytest.raises(ValueError, match="The first one could not be saved"):
        trainer.train()
    assert trainer.state.global_step == 0 and not (tmp_path / "metrics.jsonl").exists()

    make_trainer(tmp_path / "off", save_strategy="no", max_steps=1).train()
    with_free(monkeypatch, 3 * needed - 1)
    caplog.clear()
    make_trainer(tmp_path / "few", **options).train()
    assert sum("and 2 fit" in record.getMessage() for record in caplog.records) == 1
    caplog.clear()
    make_trainer(tmp_path / "enough", **options, save_total_limit=1).train()
    assert not any("save_total_limit" in record.getMessage() for record in caplog.records)
