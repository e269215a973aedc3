"""Trainers whose models call tools, play in environments, or leave the rollout to a function."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from colocate import generate_rollout_completions
from colocate.episodes.renderer import Renderer
from colocate.types import Prompt
from tiny import StubEngine, logged, make_model, make_trainer, train
from tool_chat import add, call, make_chat_tokenizer, user

TOKENIZER = make_chat_tokenizer()
STOP = TOKENIZER.eos_token_id
OPTIONS: dict[str, Any] = dict(
    processing_class=TOKENIZER, max_completion_length=300, num_generations=4, per_device_train_batch_size=4
)


def chat_model() -> Any:
    return make_model(vocab_size=len(TOKENIZER), eos_token_id=STOP)


def questions(num_rows: int = 4, **columns: Any) -> Dataset:
    return Dataset.from_list([{"prompt": user(f"{n} + 1"), "n": n, **columns} for n in range(num_rows)])


def writing(write: Any) -> StubEngine:
    def complete(prompt: Prompt, member: int) -> list[int]:
        return [*TOKENIZER(write(TOKENIZER.decode(prompt.token_ids), member))["input_ids"], STOP]

    return StubEngine(complete)


def calls_once(text: str, member: int) -> str:
    if "<|im_start|>tool\n" in text:
        return text.split("<|im_start|>tool\n")[-1].partition("<|im_end|>")[0]
    n = int(text.split("<|im_start|>user\n")[1].split(" ")[0])
    return call("add", a=n, b=1) if member % 2 else "no idea"


def test_a_model_that_calls_a_tool_is_rewarded_for_what_it_says_then(tmp_path, capsys):
    seen: list[Any] = []

    def is_right(prompts, completions, n, **columns) -> list[float]:
        seen.extend(completions)
        return [float(c[-1]["content"] == str(m + 1)) for c, m in zip(completions, n, strict=True)]

    trainer = make_trainer(
        tmp_path,
        model=chat_model(),
        stub=writing(calls_once),
        reward_funcs=is_right,
        train_dataset=questions(),
        tools=[add],
        **OPTIONS,
    )
    assert train(trainer)
    assert "turns     tools add" in capsys.readouterr().out
    assert logged(trainer, "reward") == [0.5, 0.5]
    assert logged(trainer, "tools/call_frequency") == [0.5, 0.5]
    assert logged(trainer, "tools/failure_frequency") == [0, 0]
    with_call = [completion for completion in seen if len(completion) > 1]
    assert [[m["role"] for m in c] for c in with_call] == [["assistant", "tool", "assistant"]] * 4
    sampled = [len(call("add", a=0, b=1)) - len("<tool_call></tool_call>") + 3 + 2, len("no idea") + 1]
    assert logged(trainer, "completions/mean_length") == [sum(sampled) / 2] * 2


@pytest.mark.parametrize("tool_workers", [0, 2])
def test_no_thread_of_tools_is_left_after_a_run_and_a_later_one_starts_its_own(tmp_path, tool_workers):
    seen: dict[str, list[Any]] = {"loop": [], "thread": []}

    async def later(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        await asyncio.sleep(0)
        seen["loop"].append(asyncio.get_running_loop())
        seen["thread"].append(threading.current_thread())
        return add(a, b)

    def calls_both(text: str, member: int) -> str:
        if "<|im_start|>tool\n" in text:
            return "done"
        return call("later" if member % 2 else "add", a=1, b=1)

    def is_right(completions: list[Any], trainer_state: Any, **columns: Any) -> list[float]:
        if trainer_state.global_step == fails_at:
            raise ValueError("on purpose")
        return [float(c[-2]["content"] == "2") * n for n, c in enumerate(completions)]

    before = set(threading.enumerate())

    def no_thread_is_left() -> bool:
        threads = [t for t in threading.enumerate() if t.name in ("tools", "tool_workers")]
        for thread in set(threads) - before:
            thread.join(60.0)  # one that takes jobs ends when it sees that there are none
        return not any(thread.is_alive() for thread in set(threads) - before)

    fails_at = -1
    trainer = make_trainer(
        tmp_path,
        model=chat_model(),
        stub=writing(calls_both),
        reward_funcs=is_right,
        train_dataset=questions(),
        eval_dataset=questions(2),
        tools=[add, later],
        tool_workers=tool_workers,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        **OPTIONS,
    )
    trainer.train()
    assert no_thread_is_left()
    # One thread for all steps and the evaluations between them, and one loop even after them: what tools keep
    # connections on.
    assert len(set(seen["thread"])) == 1
    assert trainer.evaluate()["eval_reward"] == 3.5
    assert no_thread_is_left()
    assert len(set(seen["thread"])) == 2 and len(set(seen["loop"])) == 1
    num_calls = len(seen["thread"])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 2 and len(seen["thread"]) > num_calls
    assert no_thread_is_left()
    fails_at = 1
    with pytest.raises(Exception, match="on purpose"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert no_thread_is_left()


class Counter:
    """An environment that owns its questions."""

    def reset(self, **row: Any) -> str:
        self.count, self.done = 0, False
        return "count"

    def step(self) -> str:
        """Count one further."""
        self.count += 1
        self.done = self.count == 3
        return str(self.count)

    def get_reward(self) -> float:
        return self.count / 3


@pytest.mark.parametrize("dataset", [None, Dataset.from_list([{"level": 1}] * 4)], ids=["none", "no prompts"])
def test_an_environment_may_bring_the_prompts_and_the_reward(tmp_path, dataset):
    trainer = make_trainer(
        tmp_path,
        model=chat_model(),
        stub=writing(lambda text, member: call("step") if member else "stop"),
        reward_funcs=None,
        train_dataset=dataset,
        environment_factory=Counter,
        **OPTIONS,
    )
    assert train(trainer)
    assert logged(trainer, "reward") == [0.75, 0.75]
    assert logged(trainer, "rewards/Counter/mean") == [0.75, 0.75]


@pytest.mark.parametrize("is_dict", [False, True], ids=["one", "dict"])
def test_an_environment_brings_the_prompts_of_evaluation_too(tmp_path, is_dict):
    levels = Dataset.from_list([{"level": 1}] * 2)
    stream = levels.to_iterable_dataset()
    trainer = make_trainer(
        tmp_path,
        model=chat_model(),
        stub=writing(lambda text, member: call("step") if member else "stop"),
        reward_funcs=None,
        train_dataset=None,
        eval_dataset={"rows": levels, "stream": stream} if is_dict else levels,
        environment_factory=Counter,
        eval_strategy="steps",
        eval_steps=2,
        **OPTIONS,
    )
    trainer.train()
    for name in ("eval_rows_reward", "eval_stream_reward") if is_dict else ("eval_reward",):
        assert logged(trainer, name) == [0.75]
    assert trainer.evaluate(levels)["eval_reward"] == 0.75


def test_environments_by_name_and_their_own_weights(tmp_path):
    class Other(Counter):
        """Counts by two."""

        def leap(self) -> str:
            """Count two further."""
            self.count, self.done = 3, True
            return "3"

    trainer = make_trainer(
        tmp_path,
        model=chat_model(),
        stub=writing(lambda text, member: call("leap") if "leap" in text else call("step")),
        reward_funcs=lambda environments, **columns: [float(type(e) is Other) for e in environments],
        reward_weights=[10.0],
        train_dataset=Dataset.from_list(
            [{"prompt": user("q"), "environment": name} for name in ("other", "counter") * 2]
        ),
        environment_factory={"counter": Counter, "other": Other},
        shuffle_dataset=False,
        **OPTIONS,
    )
    trainer.train()
    assert logged(trainer, "reward") == [11.0, 1.0]


def test_a_function_may_play(tmp_path):
    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        assert len(prompts) == 4 and prompts[0] == prompts[3]  # a prompt for each member
        outputs = generate_rollout_completions(trainer, prompts)
        given = TOKENIZER("given")["input_ids"]
        return {
            "prompt_ids": [output["prompt_ids"] for output in outputs],
            "completion_ids": [output["completion_ids"] + given + [STOP] for output in outputs],
            "logprobs": [output["logprobs"] + [0.0] * 5 + [-1.0] for output in outputs],
            "env_mask": [[1] * len(output["completion_ids"]) + [0] * 5 + [1] for output in outputs],
            "score": [float(n) for n in range(len(prompts))],
        }

    trainer = make_trainer(
        tmp_path,
        model=chat_model(),
        reward_funcs=lambda score, **columns: score,
        train_dataset=questions(),
        rollout_func=play,
        **{**OPTIONS, "max_completion_length": 6},
    )
    assert train(trainer)
    assert logged(trainer, "reward") == [1.5, 1.5]
    assert all(length <= 7 for length in logged(trainer, "completions/mean_length"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": [[5]] * 3}, r"given 4 prompts.*returned 3 entries in 'prompt_ids'"),
        ({"logprobs": [[0.0]] * 4}, r"returned 2 completion_ids and 1 logprobs for prompt 0"),
        ({"env_mask": [[1, 1, 1]] * 4}, r"returned 2 completion_ids and 3 env_mask for prompt 0"),
        ({"env_mask": [[0, 0]] * 4}, r"no sampled token for prompt 0"),
        ({"completion_ids": None}, r"'completion_ids' is missing"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_function_returns_is_checked(tmp_path, change, message):
    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        whole = {"prompt_ids": [[5]] * 4, "completion_ids": [[5, 6]] * 4, "logprobs": [[-1.0, -1.0]] * 4}
        return {name: value for name, value in {**whole, **change}.items() if value is not None}

    trainer = make_trainer(
        tmp_path, model=chat_model(), train_dataset=questions(), rollout_func=play, **OPTIONS
    )
    with pytest.raises(ValueError, match=message):
        trainer.train()


SHORT_TURNS = {"stop_token_ids": list(range(20, 30))}


def by_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def always_calling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a model of random weights writes is a call of `add`."""
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    monkeypatch.setattr(Renderer, "parse", lambda renderer, *_: json.loads(json.dumps(message)))


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_log_probs_of_every_turn_are_the_trainers(tmp_path, monkeypatch, engine):
    always_calling(monkeypatch)
    trainer = make_trainer(
        tmp_path,
        model=chat_model(),
        train_dataset=questions(),
        tools=[add],
        reward_funcs=by_tokens,
        engine=engine,
        max_tool_calling_iterations=3,
        generation_kwargs=SHORT_TURNS,
        **{**OPTIONS, "max_completion_length": 200},
    )
    seen: list[Any] = []
    check = trainer.run.agreement.check
    monkeypatch.setattr(type(trainer.run.agreement), "check", lambda self, s: (seen.extend(s), check(s))[1])
    assert train(trainer)
    num_turns = [int((s.completion_mask.diff() == 1).sum()) + 1 for s in seen[:4]]
    assert max(num_turns) > 2
    fresh = make_trainer(tmp_path / "fresh", model=chat_model(), train_dataset=questions(), **OPTIONS)
    for sample, (logprobs, _) in zip(seen[:4], fresh.policy.logprobs(seen[:4]), strict=True):
        drawn = sample.completion_mask.bool()
        torch.testing.assert_close(sample.rollout_logprobs[drawn], logprobs[drawn], atol=1e-5, rtol=1e-5)
        assert sample.rollout_logprobs[~drawn].isnan().all()


def test_a_run_goes_on_in_the_middle_of_a_batch_of_episodes_bit_for_bit(tmp_path, monkeypatch):
    always_calling(monkeypatch)

    def trainer_in(directory: Path, max_steps: int) -> Any:
        return make_trainer(
            directory,
            model=chat_model(),
            train_dataset=questions(),
            tools=[add],
            reward_funcs=by_tokens,
            generation_kwargs=SHORT_TURNS,
            max_steps=max_steps,
            lr_scheduler_type="constant",
            steps_per_generation=2,
            save_strategy="steps",
            save_steps=1,
            max_tool_calling_iterations=2,
            **{**OPTIONS, "max_completion_length": 120, "per_device_train_batch_size": 4},
        )

    whole = trainer_in(tmp_path / "whole", 4)
    whole.train()
    cut = trainer_in(tmp_path / "cut", 3)
    cut.train()
    resumed = trainer_in(tmp_path / "cut", 4)
    resumed.train(resume_from_checkpoint=True)
    expected = dict(whole.model.named_parameters())
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, expected[name])


OWN_DATA: dict[str, Any] = {"train_dataset": None, "reward_funcs": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": [lambda x: x]}, "docstring"),
        ({"tools": [add, add]}, "Two tools have the name 'add'"),
        ({"environment_factory": object}, "needs a method"),
        ({"tools": [add], "rollout_func": lambda prompts, trainer: {}}, "Pass either it or them"),
        (
            {"tools": [add], "max_completion_length": 8},
            r"max_completion_length=8 .* takes \d+ already",
        ),
        ({"tools": [add], "max_tool_calling_iterations": -1}, "max_tool_calling_iterations"),
        (OWN_DATA | {"environment_factory": Counter, "max_steps": -1}, "max_steps=-1 must be set"),
        (OWN_DATA | {"environment_factory": {"a": Counter}}, "requires a `train_dataset` .* `environment`"),
    ],
)
def test_what_cannot_be_played_is_refused_at_the_start(tmp_path, arguments, message):
    arguments = {"train_dataset": questions(), **OPTIONS, **arguments}
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, model=chat_model(), **arguments)


def test_trls_names_say_what_plays(tmp_path):
    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {}

    common = {"model": chat_model(), "train_dataset": questions(), **OPTIONS}
    plain = make_trainer(tmp_path / "plain", **common)
    assert (plain.tools, plain.environments, plain.rollout_func) == ([], None, None)
    assert plain.use_transformers_continuous_batching is False
    assert make_trainer(tmp_path / "tools", tools=[add], **common).tools == [add]
    assert make_trainer(tmp_path / "function", rollout_func=play, **common).rollout_func is play
    playing = make_trainer(
        tmp_path / "environment",
        tools=[add],
        environment_factory=Counter,
        stub=writing(lambda text, member: call("step")),
        **common,
    )
    assert [tool.__name__ for tool in playing.tools] == ["add", "step"] and playing.environments is None
    playing.train()
    assert [type(environment) for environment in playing.environments] == [Counter] * 4


def test_a_template_without_tools_is_refused(tmp_path):
    plain = make_chat_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(ValueError, match="does not carry the tools' schemas"):
        make_trainer(
            tmp_path,
            model=chat_model(),
            train_dataset=questions(),
            tools=[add],
            **{**OPTIONS, "processing_class": plain},
        )
