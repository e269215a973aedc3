"""What reward functions receive and return in a run of the trainer."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import os
import threading
import time
import traceback

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from transformers import TrainerState

from colocate import GRPOTrainer
from colocate.reporting.run_log import TRAINER_METRICS
from colocate.users_code.errors import RewardError
from colocate.users_code.exits import EXIT_CODE
from tiny import (
    StubEngine,
    changed_weights,
    count_digits,
    logged,
    make_config,
    make_reward_model,
    make_tokenizer,
    make_trainer,
    sums,
    train,
    weights_of,
)


def fixed_length(prompt, member):
    """Completions of 1, 2, 3, ... tokens and an end."""
    return [8] * (member + 1) + [1]


def num_threes(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


@pytest.mark.parametrize("conversational", [False, True])
def test_keyword_arguments_are_trls(tmp_path, conversational):
    calls, steps = [], []

    def reward(**kwargs):
        calls.append(kwargs)
        steps.append(kwargs["trainer_state"].global_step)
        return count_digits(kwargs["completions"])

    dataset = sums(conversational=conversational).add_column("level", list(range(12)))
    trainer = make_trainer(tmp_path, train_dataset=dataset, reward_funcs=reward, max_steps=3)
    assert train(trainer)
    own = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    assert steps == [0, 1, 2]
    tokenizer = make_tokenizer()
    for call in calls:
        assert set(call) == own | {"answer", "level"}  # every column but the prompt
        assert call["trainer_state"] is trainer.state and isinstance(trainer.state, TrainerState)
        (level,) = set(call["level"])  # one group: all the columns are the prompt's, once per completion
        row = dataset[level]
        assert call["prompts"] == [row["prompt"]] * 4 and call["answer"] == [row["answer"]] * 4
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in call["completion_ids"]]
        expected = [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts
        assert call["completions"] == expected
        assert all(isinstance(ids, list) and isinstance(ids[0], int) for ids in call["completion_ids"])


def test_reward_reads_an_additional_column(tmp_path):
    def is_answer(completions, answer, **kwargs):
        return [
            float(text.strip().startswith(right)) for text, right in zip(completions, answer, strict=True)
        ]

    digits = {str(d): 5 + d for d in range(10)}
    answers = {i: row["answer"] for i, row in enumerate(sums())}
    # Members 0 and 1 give the first digit of the right answer, the others something else.
    stub = StubEngine(
        lambda prompt, member: (
            [digits[c] for c in answers[prompt.key]] + [1] if member < 2 else [20 + member, 1]
        )
    )
    trainer = make_trainer(tmp_path, reward_funcs=is_answer, shuffle_dataset=False, stub=stub)
    assert train(trainer)
    assert logged(trainer, "rewards/is_answer/mean") == [0.5, 0.5]


def test_sync_and_async_functions(tmp_path):
    threads = {}

    async def slow(completions, **kwargs):
        threads["slow"] = threading.get_ident()
        await asyncio.sleep(0.01)
        return num_threes(completions)

    async def slower(completions, **kwargs):
        await asyncio.sleep(0.02)
        return [1.0] * len(completions)

    trainer = make_trainer(tmp_path, reward_funcs=[slow, num_threes, slower], stub=StubEngine(fixed_length))
    assert train(trainer)
    assert threads["slow"] != threading.get_ident()
    assert logged(trainer, "rewards/slow/mean") == logged(trainer, "rewards/num_threes/mean") == [2.5, 2.5]
    assert logged(trainer, "reward") == [6.0, 6.0]


def test_function_may_leave_completions_to_others(tmp_path):
    def only_long(completions, **kwargs):
        return [10.0 if len(c) > 2 else None for c in completions]

    def nothing(completions, **kwargs):
        return [None] * len(completions)

    trainer = make_trainer(
        tmp_path, reward_funcs=[num_threes, only_long, nothing], max_steps=1, stub=StubEngine(fixed_length)
    )
    assert train(trainer)
    (entry,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert entry["rewards/only_long/mean"] == 10.0
    assert entry["rewards/nothing/mean"] is None  # loggers cannot store NaN
    assert entry["reward"] == pytest.approx((1 + 2 + 13 + 14) / 4)


def test_warning_when_all_functions_return_none(tmp_path, caplog):
    def nothing(completions, **kwargs):
        return [None] * len(completions)

    trainer = make_trainer(tmp_path, reward_funcs=[nothing, nothing])
    with caplog.at_level(logging.WARNING):
        assert train(trainer) == set()
    assert "All reward functions" in caplog.text and "returned None" in caplog.text


def test_reward_weights(tmp_path):
    def ones(completions, **kwargs):
        return [1.0] * len(completions)

    trainer = make_trainer(
        tmp_path, reward_funcs=[num_threes, ones], reward_weights=[0.5, 3.0], stub=StubEngine(fixed_length)
    )
    assert train(trainer)
    assert logged(trainer, "reward") == [0.5 * 2.5 + 3.0] * 2
    assert logged(trainer, "reward_std")[0] == pytest.approx(0.5 * torch.tensor([1.0, 2, 3, 4]).std().item())


def test_normalize_then_sum(tmp_path):
    """A function on a scale a thousand times smaller counts as much as the other."""

    def reverse(completions, **kwargs):
        return [-0.001 * len(c) for c in completions]

    scales = {}
    for aggregation in ("sum_then_normalize", "normalize_then_sum"):
        trainer = make_trainer(
            tmp_path / aggregation,
            reward_funcs=[num_threes, reverse],
            multi_objective_aggregation=aggregation,
            max_steps=1,
            stub=StubEngine(fixed_length),
        )
        train(trainer)
        (scales[aggregation],) = logged(trainer, "grad_norm")
    # Alone, the two functions would cancel but for the 1e-4 added to the standard deviation.
    assert scales["normalize_then_sum"] < scales["sum_then_normalize"]


def test_log_extra_and_log_metric(tmp_path):
    def reward(completions, log_extra, log_metric, trainer_state, **kwargs):
        log_extra("length", [len(c) for c in completions])
        log_metric("accuracy", 0.25)
        log_metric("accuracy", 0.75 + trainer_state.global_step)
        return num_threes(completions)

    trainer = make_trainer(
        tmp_path,
        reward_funcs=reward,
        log_completions=True,
        eval_dataset=sums(2),
        log_unique_prompts=True,
        stub=StubEngine(fixed_length),
    )
    assert train(trainer)
    assert logged(trainer, "accuracy") == [0.5, 1.0]
    assert trainer.evaluate()["eval_accuracy"] == 1.5
    files = sorted((tmp_path / "completions").iterdir())
    assert [file.name for file in files] == ["completions_00001.parquet", "completions_00002.parquet"]
    table = pyarrow.parquet.read_table(files[1]).to_pydict()
    assert list(table) == ["step", "prompt", "completion", "reward", "length", "advantage"]
    assert table["length"] == [1, 2, 3, 4] and table["step"] == [2] * 4
    assert sum(table["advantage"]) == pytest.approx(0.0, abs=1e-5)


def test_completions_are_printed(tmp_path, capsys):
    stub = StubEngine(lambda prompt, member: [25, 26, 27, 28, 5 + member, 1])
    trainer = make_trainer(tmp_path, log_completions=True, num_completions_to_print=2, max_steps=1, stub=stub)
    trainer.train()
    printed = capsys.readouterr().out
    assert sum(f"klmn{member}" in printed for member in range(4)) == 2


@pytest.mark.parametrize("conversational", [False, True])
def test_reward_model_by_name_and_as_a_module(tmp_path, reward_model_dir, conversational):
    """Its reward is the logit of prompt and completion together, from a plain forward without padding."""
    tokenizer, texts = make_tokenizer(), []

    def spy(prompts, completions, **kwargs):
        for prompt, completion in zip(prompts, completions, strict=True):
            joined = prompt + completion
            texts.append(tokenizer.apply_chat_template(joined, tokenize=False) if conversational else joined)
        return [None] * len(completions)

    model = make_reward_model()
    frozen = weights_of(model)
    trainer = make_trainer(
        tmp_path,
        train_dataset=sums(conversational=conversational),
        reward_funcs=[reward_model_dir, model, spy],
        reward_processing_classes=[None, tokenizer, None],
        max_steps=1,
    )
    assert train(trainer)
    with torch.no_grad():
        rewards = [model(torch.tensor([tokenizer(text)["input_ids"]])).logits.item() for text in texts]
    (entry,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    for name in ("tiny-reward", "Qwen3ForSequenceClassification"):
        assert entry[f"rewards/{name}/mean"] == pytest.approx(sum(rewards) / 4, abs=1e-5)
    assert not changed_weights(model, frozen)


def test_reward_function_that_raises_says_which_and_where(tmp_path):
    def careless(completions, **kwargs):
        raise KeyError("ground_truth")

    trainer = make_trainer(tmp_path, reward_funcs=[count_digits, careless])
    with pytest.raises(Exception, match="careless") as error:
        trainer.train()
    assert "ground_truth" in str(error.value) or "ground_truth" in str(error.value.__cause__)


def test_reward_function_that_takes_too_long_ends_the_run_where_it_can_go_on(tmp_path):
    def judge(completions, trainer_state, **kwargs):
        for completion in completions:
            if trainer_state.global_step == 1 and completion is completions[2]:
                time.sleep(60)
        return num_threes(completions)

    trainer = make_trainer(
        tmp_path,
        reward_funcs=judge,
        reward_timeout_s=1.0,
        save_strategy="steps",
        save_steps=1,
        stub=StubEngine(fixed_length),
    )
    with pytest.raises(
        RewardError, match=r"'judge' took longer than reward_timeout_s=1, .*on completion 2 \("
    ):
        trainer.train()
    resumed = make_trainer(tmp_path, reward_funcs=num_threes, stub=StubEngine(fixed_length))
    assert resumed.train(resume_from_checkpoint=True).global_step == 2


def test_reward_function_that_exits_does_not_end_the_run_as_a_success(tmp_path):
    def judge(completions, **kwargs):
        try:
            exec("exit()")  # as a completion may say
        except Exception:
            return [0.0] * len(completions)

    with pytest.raises(RewardError, match="'judge' raised SystemExit"):
        make_trainer(tmp_path, reward_funcs=judge).train()


def test_metrics_that_the_trainer_logs_are_no_functions_to_log(tmp_path):
    trainer = make_trainer(
        tmp_path, max_steps=1, beta=0.1, entropy_coef=0.1, top_entropy_quantile=0.5, reward_funcs=num_threes
    )
    trainer.train()
    ours = {name for name in trainer.state.log_history[0] if not name.startswith("rewards/")}
    assert {"loss", "kl", "entropy", "reward"} <= ours
    assert ours - TRAINER_METRICS == set()
    written = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert written.keys() - TRAINER_METRICS == {f"rewards/num_threes/{what}" for what in ("mean", "std")}


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_large_rewards_count_like_small_ones(tmp_path, scale):
    """The square of a deviation of 2e38 is beyond float32."""
    weights, deviations = [], []
    for factor in (1.0, 1e38):
        trainer = make_trainer(
            tmp_path / str(factor),
            reward_funcs=lambda completions, f=factor, **kwargs: [f * n for n in num_threes(completions)],
            reward_weights=[0.75],
            scale_rewards=scale,
            max_steps=1,
            stub=StubEngine(lambda prompt, member: [8] * (member % 3 + 1) + [1]),
        )
        assert train(trainer)
        weights.append(weights_of(trainer.model))
        deviations.append(logged(trainer, "reward_std")[0] / factor)
    assert deviations[1] == pytest.approx(deviations[0])
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-4, rtol=1e-4)


def test_advantages_beyond_float32_are_refused(tmp_path):
    def judge(completions, **kwargs):
        return [3e38 * (-1) ** i for i in range(len(completions))]

    trainer = make_trainer(tmp_path, reward_funcs=judge, reward_weights=[5.0], scale_rewards="none")
    with pytest.raises(
        RewardError, match=r"completion 0 .* by 'judge', 3e\+38 with weight 5, makes an advantage"
    ):
        trainer.train()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("reward_weights", [1.0, math.nan], "reward_weights=.* has nan, which is not finite"),
        ("reward_weights", [-math.inf], "reward_weights=.* has -inf, which is not finite"),
        ("reward_weights", [1e39], r"reward_weights=.* has 1e\+39, which is too large"),
        *(("reward_timeout_s", value, "reward_timeout_s=.* must be") for value in (0, -1)),
        *(("reward_timeout_s", value, "reward_timeout_s=.* not finite") for value in (math.nan, math.inf)),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, option, value, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **{option: value})


@pytest.mark.parametrize("row", [0, 37])
def test_an_empty_prompt_is_found_before_anything_is_generated(tmp_path, row):
    prompts = [f"{i} + 1 =" for i in range(100)]
    prompts[row] = ""
    with pytest.raises(ValueError, match=rf"Row {row} .*The prompt '' has no tokens"):
        make_trainer(tmp_path, train_dataset=Dataset.from_dict({"prompt": prompts}))
    stream = Dataset.from_dict({"prompt": prompts[row:]}).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"Row 0 .*The prompt '' has no tokens"):
        make_trainer(tmp_path, train_dataset=stream, shuffle_dataset=False)
    stream = Dataset.from_dict({"prompt": ["1 + 1 =", *prompts[row:]]}).to_iterable_dataset()
    trainer = make_trainer(tmp_path, train_dataset=stream, shuffle_dataset=False)
    with pytest.raises(ValueError, match=r"The run's prompt 1 .*The prompt '' has no tokens"):
        trainer.train()


def test_rewards_in_the_run_record(tmp_path):
    trainer = make_trainer(
        tmp_path, max_steps=3, logging_steps=2, reward_funcs=num_threes, stub=StubEngine(fixed_length)
    )
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["rewards/num_threes/mean"] == 2.5 and math.isfinite(line["loss"]) for line in lines)
    assert all({"rollout", "score", "train", "publish"} <= set(line["phases"]) for line in lines)


def test_signature_is_trls(tmp_path):
    """Position and name of every argument (facts of TRL 1.16), and behind them one that TRL does not have."""
    names = (
        "self model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes "
        "callbacks optimizers quantization_config peft_config tools rollout_func environment_factory "
        "agent"
    )
    assert list(inspect.signature(GRPOTrainer.__init__).parameters) == names.split()


def leave(*arguments, **columns):
    os._exit(0)


def leave_in_a_thread(completions, **columns):
    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    return [0.0] * len(completions)


def let_a_child_leave(completions, **columns):
    child = os.fork() or leave()
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * len(completions)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ({"reward_funcs": leave}, EXIT_CODE),
        ({"reward_funcs": leave_in_a_thread}, EXIT_CODE),
        ({"rollout_func": leave}, EXIT_CODE),
        ({"environment_factory": leave}, EXIT_CODE),
        ({"reward_funcs": let_a_child_leave}, 0),
    ],
)
@pytest.mark.share(2)
def test_code_that_ends_the_process_does_not_end_it_as_a_success(tmp_path, capfd, arguments, status):
    child = os.fork()
    if child == 0:
        try:
            make_trainer(tmp_path, stub=StubEngine(fixed_length), **arguments).train()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    assert ("os._exit(0) was called in leave (" in capfd.readouterr().err) == bool(status)
