"""Agents with loops of their own are trained on what they have asked the policy, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import threading
import time
from typing import Any

import openai
import pytest
import torch
from datasets import Dataset
from openai import AsyncOpenAI, OpenAI

from chat_templates import make_tokenizer
from colocate.episodes.episode import Episode
from colocate.experience.players import agent_player
from colocate.rollout_server.trainer.pool import EnginePool
from native_replica import NativeReplica
from serving_case import QUESTION, STOP, TOKENIZER, TOOL, calling_model
from tiny import StubEngine, logged, make_model, make_trainer, train, weights_of
from tool_chat import user

BPE = make_tokenizer("qwen2_5")
IDS = {"return_token_ids": True}
OPTIONS: dict[str, Any] = dict(max_completion_length=200, num_generations=2, per_device_train_batch_size=4)


def bpe_model() -> Any:
    return make_model(vocab_size=len(BPE), eos_token_id=BPE.eos_token_id)


def questions(num_rows: int = 4) -> Dataset:
    return Dataset.from_list([{"prompt": user(f"the user said {n}"), "n": n} for n in range(num_rows)])


def count(completions: Any, **columns: Any) -> list[float]:
    """A reward that differs within groups: letters in all that the assistant has said."""
    said = ["".join(m["content"] for m in messages if m["role"] == "assistant") for messages in completions]
    return [float(sum(letter in "aeiou" for letter in text)) for text in said]


def trainer_of(
    directory: Any, agent: Any, *, on_pool: bool = False, **options: Any
) -> tuple[Any, list[Episode]]:
    """A trainer with an agent, and the episodes that it plays, each checked against the model right away."""
    options = {
        "model": bpe_model(), "processing_class": BPE, "train_dataset": questions(), "reward_funcs": count,
        **OPTIONS, **options,
    }  # fmt: skip
    if on_pool:
        options["stub"] = EnginePool([NativeReplica(options["model"]) for _ in range(2)])
    trainer = make_trainer(directory, agent=agent, **options)
    player, episodes = trainer.run.player, []
    play = player.play

    def checked(request: Any) -> list[Episode]:
        found = play(request)
        if not isinstance(options.get("stub"), StubEngine):
            for episode in found:
                check_logprobs(trainer.model, episode, trainer.args.temperature)
        episodes.extend(found)
        return found

    player.play = checked
    return trainer, episodes


@torch.no_grad()
def check_logprobs(model: Any, episode: Episode, temperature: float) -> None:
    """The log-probs of an episode's rows are those of the model's own forward, to 1e-5 at temperature 1."""
    seen = []
    for row in episode.rows():
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        logits = model(ids).logits[0, len(row.prompt_ids) - 1 : -1].float() / temperature
        logprobs = logits.log_softmax(-1).gather(1, ids[0, len(row.prompt_ids) :, None])[:, 0]
        sampled = torch.tensor(row.is_sampled)
        told = torch.tensor(row.logprobs)
        torch.testing.assert_close(told[sampled], logprobs[sampled], atol=1e-5 / temperature, rtol=0)
        seen += [node for node, is_new in zip(row.nodes, row.is_sampled, strict=True) if is_new]
    assert len(seen) == sum(len(node.sampled_ids) for node in episode.nodes)  # each is trained once


def client_of(endpoint: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


class Chatting:
    """An agent that says something, hears something else, and remembers the tokens that it was told."""

    def __init__(self, num_turns: int = 3, stagger_s: float = 0.0) -> None:
        self.num_turns, self.stagger_s = num_turns, stagger_s
        self.told: dict[str, list[tuple[list[int], list[int]]]] = {}

    async def __call__(self, row: dict[str, Any], endpoint: Any) -> dict[str, Any]:
        told = self.told.setdefault(endpoint.api_key, [])
        await asyncio.sleep(self.stagger_s * (len(self.told) % 3))
        async with client_of(endpoint) as client:
            messages = list(row["prompt"])
            for _ in range(self.num_turns):
                answer = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, max_tokens=12, extra_body=IDS
                )
                told.append((answer.prompt_token_ids, answer.choices[0].token_ids))
                messages += [answer.choices[0].message.model_dump(), *user("name arguments")]
        return {"num_said": len(messages)}


@pytest.mark.parametrize("on_pool", [False, True])
def test_an_agents_tokens_are_trained_as_they_were_drawn(tmp_path, on_pool):
    agent, seen = Chatting(stagger_s=0.02), []

    def reward(completions, num_said, agent_error, **columns) -> list[float]:
        seen.extend(zip(num_said, agent_error, completions, strict=True))
        return count(completions)

    trainer, episodes = trainer_of(tmp_path, agent, on_pool=on_pool, reward_funcs=reward)
    assert train(trainer)
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5
    assert len(episodes) == len(seen) == 8
    assert {said[:2] for said in seen} == {(7, None)}
    assert [m["role"] for m in seen[0][2]] == ["assistant", "user"] * 2 + ["assistant"]
    told = sorted(agent.told.values())
    rows = [[(row.prompt_ids + row.completion_ids) for row in episode.rows()] for episode in episodes]
    assert [len(found) for found in rows] == [1] * 8
    histories = sorted((tuple(context + drawn) for turns in told for context, drawn in turns[-1:]))
    assert histories == sorted(found[0] for found in rows)
    for turns in told:
        for (context, drawn), (following, _) in itertools.pairwise(turns):
            assert following[: len(context) + len(drawn)] == context + drawn
    # The text of what was drawn would become other tokens, most of the time.
    drawn = [ids for turns in told for _, ids in turns]
    again = [BPE(BPE.decode(ids))["input_ids"] for ids in drawn]
    assert sum(a != b for a, b in zip(drawn, again, strict=True)) > len(drawn) / 2


def test_agents_that_come_in_another_order_draw_the_same(tmp_path):
    runs = []
    for stagger_s in (0.0, 0.05):
        trainer, episodes = trainer_of(tmp_path / str(stagger_s), Chatting(2, stagger_s), max_steps=1)
        trainer.train()
        runs.append([[node.sampled_ids for node in episode.nodes] for episode in episodes])
    assert runs[0] == runs[1]
    assert len({ids for episode in runs[0] for ids in episode}) > 4, "members of a group draw alike"


async def summing_up(row: dict[str, Any], endpoint: Any) -> None:
    """Goes on from a summary in place of what was said."""
    async with client_of(endpoint) as client:
        options = dict(model=endpoint.model, max_tokens=10)
        first = await client.chat.completions.create(messages=row["prompt"], **options)
        summary = [{"role": "system", "content": "multiply"}, *user(first.choices[0].message.content or "-")]
        second = await client.chat.completions.create(messages=summary, **options)
        more = [*summary, second.choices[0].message.model_dump(), *user("the user said")]
        await client.chat.completions.create(messages=more, **options)


def test_a_rewritten_history_is_another_row(tmp_path):
    trainer, episodes = trainer_of(tmp_path, summing_up)
    assert train(trainer)
    assert [[node.parent for node in episode.nodes] for episode in episodes] == [[None, None, 1]] * 8
    assert [len(episode.rows()) for episode in episodes] == [2] * 8
    assert logged(trainer, "episodes/forks") == [1.0, 1.0]
    # The third call goes on where the second has ended; members of a group share their prompt besides.
    for episode in episodes:
        _, second, third = episode.nodes
        assert third.num_cached_tokens >= len(second.given_ids) + len(second.sampled_ids) - 1
    assert all(0 < share < 1 for share in logged(trainer, "episodes/cached_tokens"))


async def asking_twice(row: dict[str, Any], endpoint: Any) -> None:
    """Draws twice from one conversation, goes on from both, and asks for two choices at once."""
    async with client_of(endpoint) as client:
        options = dict(model=endpoint.model, max_tokens=10)
        two = await asyncio.gather(
            *(client.chat.completions.create(messages=row["prompt"], **options) for _ in range(2))
        )
        for answer in two:
            said = [*row["prompt"], answer.choices[0].message.model_dump(), *user("name")]
            await client.chat.completions.create(messages=said, **options)
        await client.chat.completions.create(messages=row["prompt"], n=2, **options)


def test_calls_that_were_made_twice_are_siblings(tmp_path):
    trainer, episodes = trainer_of(tmp_path, asking_twice)
    assert train(trainer)
    for episode in episodes:
        parents = [node.parent for node in episode.nodes]
        assert parents[:2] == parents[4:] == [None, None] and sorted(parents[2:4]) == [0, 1]  # type: ignore[type-var]
        roots = {node.sampled_ids for node in episode.nodes if node.parent is None}
        assert len(roots) == 4, "two calls have drawn the same"


def test_whatever_an_agent_asks_its_episode_is_what_it_was_told(tmp_path):
    """Agents go on from any earlier answer, rewrite, repeat and branch at random."""
    told: dict[str, list[tuple[int, ...]]] = {}
    words = ["the user said", "name", "multiply 12 by 7", "arguments", "a"]

    async def agent(row: dict[str, Any], endpoint: Any) -> None:
        draw = random.Random(len(told))
        own = told.setdefault(endpoint.api_key, [])
        async with client_of(endpoint) as client:
            known: list[list[Any]] = [row["prompt"]]
            for _ in range(6):
                messages = list(draw.choice(known))
                if draw.random() < 0.3:
                    messages = [{"role": "system", "content": draw.choice(words)}, *messages[-1:]]
                if messages[-1]["role"] == "assistant":
                    messages += user(draw.choice(words))
                answer = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, max_tokens=draw.randint(1, 9),
                    n=draw.choice([1, 1, 1, 2]), stop=draw.choice([None, "e"]), extra_body=IDS,
                )  # fmt: skip
                for choice in answer.choices:
                    own.append((*answer.prompt_token_ids, *choice.token_ids))
                    known.append([*messages, choice.message.model_dump()])

    trainer, episodes = trainer_of(tmp_path, agent, max_steps=3, max_completion_length=400)
    assert train(trainer)
    paths = []
    for episode in episodes:
        ends: list[tuple[int, ...]] = []
        for node in episode.nodes:
            before = () if node.parent is None else ends[node.parent]
            ends.append(before + node.given_ids + node.sampled_ids)
        paths.append(sorted(ends))
    assert sorted(paths) == sorted(sorted(own) for own in told.values())
    parents = [node.parent for episode in episodes for node in episode.nodes]
    assert 0.3 < sum(parent is None for parent in parents) / len(parents) < 0.9, "the test tries too little"


def test_text_and_token_ids_are_recorded_too(tmp_path):
    def agent(row: dict[str, Any], endpoint: Any) -> None:
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            text = client.completions.create(
                model=endpoint.model, prompt="the user", max_tokens=6, extra_body=IDS
            ).choices[0]
            context = [*text.prompt_token_ids, *text.token_ids, *BPE("said")["input_ids"]]
            client.completions.create(model=endpoint.model, prompt=context, max_tokens=6)

    trainer, episodes = trainer_of(
        tmp_path, agent, reward_funcs=lambda completions, **_: [len(str(c)) for c in completions]
    )
    assert train(trainer)
    assert {tuple(node.parent for node in episode.nodes) for episode in episodes} == {(None, 0)}
    assert {episode.nodes[1].given_ids for episode in episodes} == {tuple(BPE("said")["input_ids"])}


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_tools_of_its_own(tmp_path, stream):
    """A model that calls a tool; the agent runs it, and the episode is one row with the result as context."""

    async def agent(row: dict[str, Any], endpoint: Any) -> dict[str, Any]:
        async with client_of(endpoint) as client:
            messages = list(row["prompt"])
            while True:
                message = await reply(client, endpoint.model, messages)
                messages.append(message.model_dump(exclude={"parsed"}))
                if not message.tool_calls:
                    return {"answer": message.content}
                for call in message.tool_calls:
                    numbers = json.loads(call.function.arguments)
                    content = str(numbers["a"] + numbers["b"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    async def reply(client: AsyncOpenAI, model: str, messages: list[Any]) -> Any:
        options = dict(model=model, messages=messages, tools=[TOOL])
        if not stream:
            return (await client.chat.completions.create(**options)).choices[0].message
        async with client.chat.completions.stream(**options) as events:
            async for _ in events:
                pass
            return (await events.get_final_completion()).choices[0].message

    def reward(completions, answer, **columns) -> list[float]:
        assert {messages[0]["tool_calls"][0]["function"]["arguments"]["b"] for messages in completions} == {
            25
        }
        return [float("42" in text) for text in answer]

    rows = Dataset.from_list([{"prompt": QUESTION}] * 4)
    trainer, episodes = trainer_of(
        tmp_path, agent, model=calling_model(), processing_class=TOKENIZER, train_dataset=rows,
        reward_funcs=reward, temperature=0.5, learning_rate=1e-9,
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "reward") == [1.0, 1.0] and logged(trainer, "episodes/forks") == [0.0, 0.0]
    names = {name for entry in trainer.state.log_history for name in entry}
    assert not [name for name in names if name.startswith("tools/")], "which nobody knows but the agent"
    for episode in episodes:
        (row,) = episode.rows()
        text = TOKENIZER.decode(row.completion_ids)
        assert text.count("<|im_start|>tool\n42<|im_end|>") == 1 and 0 < row.num_sampled < len(row.is_sampled)
        assert [node.sampled_ids[-1] for node in episode.nodes] == [STOP, STOP]


# ── What goes wrong ──────────────────────────────────────────────────────────────────────────────────────


def ask(endpoint: Any, **options: Any) -> Any:
    with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=100) as client:
        options = {"messages": user("the user"), "model": endpoint.model, "max_tokens": 4, **options}
        return client.chat.completions.create(**options)


def test_an_agent_that_fails_ends_its_episode_and_reward_functions_are_told(tmp_path, caplog):
    errors: list[Any] = []
    numbers = iter(range(100))

    def agent(row: dict[str, Any], endpoint: Any) -> Any:
        ask(endpoint)
        number = next(numbers)
        if number % 4 == 0:
            raise OSError("no such file")
        if number % 4 == 1:
            sys.exit(0)
        if number % 4 == 2:
            time.sleep(60)
        return None

    def reward(completions, agent_error, **columns) -> list[float]:
        errors.append(sorted(agent_error, key=str))
        return count(completions)

    trainer, episodes = trainer_of(
        tmp_path, agent, reward_funcs=reward, agent_timeout_s=8.0, max_steps=1, num_generations=4
    )
    trainer.train()
    assert [len(episode.nodes) for episode in episodes] == [1] * 4
    assert errors == [
        [
            None,
            "OSError: no such file",
            "SystemExit: 0",
            "TimeoutError: It took longer than agent_timeout_s=8 s.",
        ]
    ]
    assert "An agent has failed: OSError: no such file" in caplog.text


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (lambda row, endpoint: None, "ended twice without a call of the model.*does it use the base_url"),
        (lambda row, endpoint: 1 / 0, "ended twice without a call of the model.*ZeroDivisionError"),
        (lambda row, endpoint: ask(endpoint) and 1 / 0, "failed in all 4 episodes .*ZeroDivisionError"),
        (lambda row, endpoint: ask(endpoint) and 5, "failed in all 4 episodes .*returns a dict .* not int"),
    ],
)
def test_agents_of_which_nothing_can_be_learnt_end_the_run(tmp_path, agent, words):
    trainer, _ = trainer_of(tmp_path, agent, max_steps=1)
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        trainer.train()
    for thread in threading.enumerate():
        if thread.name.startswith(("serving", "agents")):
            thread.join(60)
            assert not thread.is_alive()


def test_an_async_agent_that_blocks_the_others_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_player, "GRACE_S", 0.2)

    async def agent(row: dict[str, Any], endpoint: Any) -> None:
        time.sleep(2)

    trainer, _ = trainer_of(tmp_path, agent, agent_timeout_s=0.2, max_steps=1)
    with pytest.raises(RuntimeError, match="compute or sleep without `await`"):
        trainer.train()


def test_what_would_not_be_trained_on_is_refused(tmp_path):
    told: list[str] = []

    def agent(row: dict[str, Any], endpoint: Any) -> None:
        ask(endpoint, temperature=1.0, top_p=1)  # as the run draws
        for options in ({"temperature": 0.5}, {"top_p": 0.9}, {"seed": 3}, {"model": "gpt-5"}):
            with pytest.raises(openai.APIStatusError) as refused:
                ask(endpoint, **options)
            told.append(str(refused.value))
        with pytest.raises(openai.BadRequestError, match="max_completion_length=20") as refused:
            messages = [*user("the user"), {"role": "assistant", "content": "x"}]
            for _ in range(20):
                answer = ask(endpoint, messages=messages[:1])
                messages = [messages[0], answer.choices[0].message.model_dump(), *user("a" * 30)]
                ask(endpoint, messages=messages)
        assert refused.value.code == "context_length_exceeded"

    trainer, _ = trainer_of(tmp_path, agent, max_steps=1, max_completion_length=20)
    trainer.train()
    for words in (
        "temperature=0.5 is not how this run draws its completions, temperature=1 is",
        "top_p=0.9 is not how",
        "seed is not supported here",
        "no model 'gpt-5' here. The service has 'policy'",
    ):
        assert sum(words in text for text in told) == 4


def test_a_key_is_good_for_its_own_episode_alone(tmp_path):
    kept: list[Any] = []

    def agent(row: dict[str, Any], endpoint: Any) -> None:
        ask(endpoint)
        if kept:  # the episode of an earlier rollout, or of somebody else's that has ended
            with pytest.raises((openai.AuthenticationError, openai.PermissionDeniedError)):
                ask(kept[0])
        if not kept:
            kept.append(endpoint)

    trainer, episodes = trainer_of(tmp_path, agent, num_generations=2, per_device_train_batch_size=2)
    trainer.train()
    assert [len(episode.nodes) for episode in episodes[2:]] == [1, 1]


def test_while_the_trainer_trains_calls_wait_or_get_503(tmp_path, monkeypatch):
    """A visitor asks with the run's key while rewards are computed, when the engine is asleep."""
    key = "k" * 20
    monkeypatch.setenv("COLOCATE_SERVER_KEY", key)
    monkeypatch.setattr(agent_player, "MAX_WAIT_S", 0.3)
    answers: list[Any] = []
    endpoints: list[Any] = []

    def visit() -> None:
        base_url = endpoints[0].base_url
        with OpenAI(base_url=base_url, api_key=key, max_retries=100, timeout=100) as client:
            answers.append(
                client.chat.completions.create(
                    model="policy", messages=user("name"), temperature=0, max_tokens=5
                )
            )

    waiting = threading.Thread(target=visit)

    def agent(row: dict[str, Any], endpoint: Any) -> None:
        endpoints.append(endpoint)
        ask(endpoint)
        if waiting.is_alive():  # let the visitor have its turn in this rollout
            waiting.join(100)

    def reward(completions, **columns) -> list[float]:
        if not waiting.is_alive() and not answers:
            client = OpenAI(base_url=endpoints[0].base_url, api_key=key, max_retries=0)
            with client, pytest.raises(openai.InternalServerError) as refused:
                client.chat.completions.create(model="policy", messages=user("name"), max_tokens=5)
            assert refused.value.status_code == 503
            assert int(refused.value.response.headers["retry-after"]) > 0
            monkeypatch.setattr(agent_player, "RETRY_AFTER_S", 1)
            waiting.start()
        return count(completions)

    trainer, episodes = trainer_of(
        tmp_path, agent, reward_funcs=reward, num_generations=2, per_device_train_batch_size=2
    )
    trainer.train()
    waiting.join(100)
    assert len(answers) == 1 and answers[0].usage.completion_tokens >= 1
    assert [len(episode.nodes) for episode in episodes] == [1] * 4  # the visitor is in no episode


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"agent": 5}, "agent=5 cannot be called"),
        ({"agent": print, "rollout_func": print}, "rollout_func and agent play whole episodes"),
        ({"agent": print, "tools": [os.getcwd]}, "agent plays whole episodes itself"),
    ],
)
def test_arguments_that_cannot_go_together_are_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, **options)


def test_without_starlette_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"agent needs starlette and uvicorn.*pip install 'starlette"):
        trainer_of(tmp_path, Chatting())


def test_evaluation_plays_agents_too(tmp_path):
    trainer, episodes = trainer_of(tmp_path, Chatting(1), eval_dataset=questions(2), max_steps=1)
    before = weights_of(trainer.model)
    metrics = trainer.evaluate()
    assert len(episodes) == 4 and metrics["eval_reward"] >= 0
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
