"""Dynamic sampling: groups without variance are replaced until the batch is full."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset

from tiny import logged, make_trainer, train, unexplained

OPTIONS: dict[str, Any] = dict(
    num_generations=4, per_device_train_batch_size=16, max_refill_rounds=6, shuffle_dataset=False
)


def numbered(num_rows: int = 40) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{n} +" for n in range(num_rows)], "n": list(range(num_rows))})


def differs_if(is_bright: Any) -> Any:
    """A reward that differs within the groups of some rows, and is 1 in all others."""

    def bright(n, completions, **columns) -> list[float]:
        return [float(i % 2) if is_bright(m) else 1.0 for i, m in enumerate(n)]

    return bright


def trained_keys(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts' keys of each batch that the window gets; filled while training."""
    batches: list[list[int]] = []
    add = trainer.run.window.add

    def noted(slices, old_logprobs):
        if slices:
            batches.append(sorted({s.prompt_key for samples in slices for s in samples}))
            assert sum(len(samples) for samples in slices) == 16
        add(slices, old_logprobs)

    monkeypatch.setattr(trainer.run.window, "add", noted)
    return batches


def test_dull_groups_are_replaced_until_the_batch_is_full(tmp_path, monkeypatch):
    odd = differs_if(lambda n: n % 2)
    trainer = make_trainer(tmp_path, reward_funcs=odd, train_dataset=numbered(), **OPTIONS)
    batches = trained_keys(trainer, monkeypatch)
    assert train(trainer)
    # 4 prompts, of which 2 are odd; 2, of which 1 is; 1, which is even; 1, which is odd. Then 8 at once.
    assert batches == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert logged(trainer, "refill/dull_groups") == [0.5, 0.5]
    assert logged(trainer, "refill/unused_groups") == [0.0, 0.0]
    assert logged(trainer, "refill/rounds") == [3, 0]
    assert logged(trainer, "reward") == [0.75, 0.75]  # of all that was generated
    assert logged(trainer, "num_tokens")[-1] > 0
    assert unexplained(trainer) == set()


def test_after_the_last_round_the_batch_is_filled_with_dull_groups(tmp_path, monkeypatch):
    one = differs_if(lambda n: n in (2, 12))
    options = {**OPTIONS, "max_refill_rounds": 1}
    trainer = make_trainer(tmp_path, reward_funcs=one, train_dataset=numbered(), **options)
    batches = trained_keys(trainer, monkeypatch)
    assert train(trainer)
    assert batches == [[0, 1, 2, 3], [7, 8, 9, 12]]


def test_what_is_not_needed_is_left_out_in_the_order_of_the_prompts(tmp_path, monkeypatch):
    """The first step finds half of its groups dull, so the second asks for 8 prompts, none of which is."""
    late = differs_if(lambda n: n >= 4)
    trainer = make_trainer(tmp_path, reward_funcs=late, train_dataset=numbered(), **OPTIONS, max_steps=3)
    batches = trained_keys(trainer, monkeypatch)
    assert train(trainer)
    # What is dull in half of all cases by one step, and never by the next, is expected in a quarter.
    assert batches == [[4, 5, 6, 7], [8, 9, 10, 11], [16, 17, 18, 19]]
    assert logged(trainer, "refill/unused_groups") == [0.0, 0.5, 2 / 6]
    assert logged(trainer, "refill/rounds") == [1, 0, 0]


def test_a_batch_has_at_most_as_many_prompts_as_its_rounds_would(tmp_path, monkeypatch):
    """Where all groups are dull, the second step asks for all at once, and for no more then."""
    options = {**OPTIONS, "max_refill_rounds": 2}
    none = differs_if(lambda n: False)
    trainer = make_trainer(tmp_path, reward_funcs=none, train_dataset=numbered(), **options)
    batches = trained_keys(trainer, monkeypatch)
    trainer.train()
    assert batches == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert logged(trainer, "refill/rounds") == [2, 0]


def test_an_epochs_end_needs_no_more_than_what_is_missing(tmp_path, monkeypatch):
    """The second step would take 8 prompts, and the epoch has 6 left, of which it needs 4."""
    odd = differs_if(lambda n: n % 2)
    rows = numbered(14)
    trainer = make_trainer(tmp_path, reward_funcs=odd, train_dataset=rows, **OPTIONS, max_steps=3)
    batches = trained_keys(trainer, monkeypatch)
    trainer.train()
    assert batches[0] == [1, 3, 5, 7]
    assert batches[1] == [9, 11, 13, 15]  # the last one is of the second epoch, whose first key is 14
    assert logged(trainer, "refill/rounds")[1] == 1


def test_a_reward_may_be_chosen_in_which_groups_must_differ(tmp_path, monkeypatch):
    def shaped(completions, **columns) -> list[float]:
        return [0.01 * (i % 4) for i in range(len(completions))]

    trainer = make_trainer(
        tmp_path,
        reward_funcs=[shaped, differs_if(lambda n: n % 2)],
        train_dataset=numbered(),
        refill_reward="bright",
        **OPTIONS,
    )
    batches = trained_keys(trainer, monkeypatch)
    trainer.train()
    assert batches == [[1, 3, 5, 7], [9, 11, 13, 15]]


def test_a_run_with_refills_goes_on_bit_for_bit(tmp_path):
    def trainer_in(directory: Any, max_steps: int) -> Any:
        return make_trainer(
            directory,
            reward_funcs=differs_if(lambda n: n % 3 == 1),
            train_dataset=numbered(),
            max_steps=max_steps,
            lr_scheduler_type="constant",
            save_strategy="steps",
            save_steps=1,
            **OPTIONS,
        )

    whole = trainer_in(tmp_path / "whole", 4)
    whole.train()
    trainer_in(tmp_path / "cut", 2).train()
    resumed = trainer_in(tmp_path / "cut", 4)
    resumed.train(resume_from_checkpoint=True)
    expected = dict(whole.model.named_parameters())
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, expected[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refill_reward": "other"}, "'other' is none of the reward functions: 'count_digits'"),
        ({"refill_reward": "count_digits", "max_refill_rounds": 0}, "max_refill_rounds=0 that none is"),
        ({"max_refill_rounds": -1}, "max_refill_rounds"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **{**OPTIONS, **options})
