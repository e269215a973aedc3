import asyncio
import contextlib
import copy
import functools
import itertools
import logging
import math
import operator
import os
import pickle
import re
import sys
import threading

import numpy as np
import pytest
import reasoning_gym
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaForSequenceClassification

import colocate.trainer  # noqa: F401 - its parts reserve the names of their metrics
from colocate import rewards
from colocate.data.loading import load_prompts
from colocate.data.reasoning_gym import encode_entry
from colocate.rewards import reasoning_gym_reward
from colocate.rewards.base import RewardFunctions
from colocate.rewards.models import RewardModel
from colocate.users_code.errors import RewardError
from colocate.users_code.exits import EXIT_CODE

PROMPTS = ["what is two", "what is two", "what is four"]
COMPLETIONS = ["two and no more", "it is four", "four it is"]
IDS = [[1, 2], [3], [4, 5, 6]]


def score(funcs, columns=None, state=None, prompts=PROMPTS, processing_classes=None, **options):
    with contextlib.closing(RewardFunctions(funcs, processing_classes, **options)) as functions:
        return functions.score(prompts, COMPLETIONS, IDS, columns or {}, state)


def constant(values):
    return lambda **kwargs: values


zero = constant([0, 0, 0])


# --- calling -----------------------------------------------------------------------------------------------


def test_functions_receive_trls_arguments():
    def reward(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **rest):
        assert (prompts, completions, completion_ids) == (PROMPTS, COMPLETIONS, IDS)
        assert (answer, trainer_state, rest) == (["a", "b", "c"], "the state", {})
        return [1, 2, 3]

    columns = {"prompt": PROMPTS, "completion": ["x"] * 3, "completion_ids": [[]] * 3}
    table = score(reward, {**columns, "answer": ["a", "b", "c"]}, "the state")
    assert table.rewards.tolist() == [[1.0], [2.0], [3.0]]
    assert table.rewards.dtype == torch.float32


def test_columns_follow_the_order_of_functions_whatever_their_kind():
    async def slow(**kwargs):
        await asyncio.sleep(0.01)
        return [1, 2, 3]

    class Judge:
        async def __call__(self, **kwargs):
            return [4, 5, 6]

    def scaled(factor, completion_ids, **kwargs):
        return [factor * len(ids) for ids in completion_ids]

    async def scaled_async(factor, completion_ids, **kwargs):
        return [factor * len(ids) for ids in completion_ids]

    funcs = [
        functools.partial(scaled, 10),
        slow,
        Judge(),
        lambda **kwargs: slow(),  # a function that returns a coroutine
        functools.partial(scaled_async, 100),
        lambda **kwargs: [None, True, 0.5],
    ]
    table = score(funcs)
    expected = [[20, 1, 4, 1, 200, math.nan], [10, 2, 5, 2, 100, 1], [30, 3, 6, 3, 300, 0.5]]
    assert np.array_equal(table.rewards.numpy(), np.array(expected), equal_nan=True)
    assert RewardFunctions(funcs).names == ["scaled", "slow", "Judge", "lambda", "scaled_async", "lambda_2"]


def test_async_functions_run_together_and_beside_the_sync_ones():
    # Each waits for all the others: in sequence, none would ever finish.
    barrier = threading.Barrier(3, timeout=60)

    async def judge(**kwargs):
        await asyncio.to_thread(barrier.wait)
        return [0, 0, 0]

    def sync(**kwargs):
        barrier.wait()
        return [1, 1, 1]

    assert score([sync, judge, judge]).rewards.tolist() == [[1, 0, 0]] * 3


def test_async_functions_keep_one_loop_and_run_inside_a_running_one():
    loops = []

    async def judge(**kwargs):
        loops.append(asyncio.get_running_loop())
        return [0, 0, 0]

    async def notebook_cell():
        functions = RewardFunctions(judge)
        for _ in range(2):
            functions.score(PROMPTS, COMPLETIONS, IDS, {}, None)
        functions.close()
        return asyncio.get_running_loop()

    mine = asyncio.run(notebook_cell())
    assert loops[0] is loops[1] is not mine


@pytest.mark.parametrize(
    "values",
    [
        (1, 0, 2),
        np.array([1.0, 0.0, 2.0]),
        torch.tensor([1.0, 0.0, 2.0]),
        [True, np.False_, torch.tensor(2)],
        [np.float32(1), np.int64(0), torch.tensor([2.0])],
        (x for x in (1, 0, 2)),
        [1, 0, torch.finfo(torch.float32).max],
    ],
)
def test_numbers_of_any_kind_are_rewards(values):
    largest = torch.finfo(torch.float32).max
    assert score(constant(values)).rewards.tolist() in ([[1], [0], [2]], [[1], [0], [largest]])


# --- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [math.nan, math.inf, -math.inf, "1", b"1", [1], {}, torch.ones(2), 1j, 10**400, np.nan, 1e39, -1e39],
)
def test_a_reward_that_is_no_finite_number_is_refused_with_its_completion(bad):
    with pytest.raises(RewardError, match=r"'lambda' returned .* for completion 1 \('it is four' to .*two"):
        score(constant([0, bad, 0]))


@pytest.mark.parametrize("values", [[], [1, 2], [1, 2, 3, 4]])
def test_wrong_counts_are_refused(values):
    with pytest.raises(RewardError, match=f"returned {len(values)} rewards, but 3 were expected"):
        score(constant(values))


@pytest.mark.parametrize("output", [None, 1.0, "abc", {"a": 1, "b": 2, "c": 3}, torch.tensor(1.0)])
def test_outputs_that_are_no_list_are_refused(output):
    with pytest.raises(RewardError, match="but a list of 3 rewards was expected"):
        score(constant(output))


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_is_refused_because_it_has_no_order(kind):
    with pytest.raises(RewardError, match=f"'lambda' returned a {kind.__name__}, which has no order"):
        score(constant(kind([1, 0, 2])))


def test_what_a_generator_raises_is_its_functions_error():
    def halves(completions, **kwargs):
        for completion in completions:
            yield 1 / (completion != "it is four")

    with pytest.raises(RewardError, match=r"'halves' raised ZeroDivisionError[\s\S]*on completion 1 \("):
        score(halves)
    with pytest.raises(RewardError, match="returned 4 rewards, but 3"):
        score(lambda **kwargs: itertools.count())


class Doom(BaseException):
    """Like pytest's own."""


def leave(error):
    raise error


async def judge_together(completions, leave):
    async def ask(completion):
        return leave() if completion == "it is four" else 0

    return await asyncio.gather(*map(ask, completions))


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(), Doom("now")])
def test_whatever_leaves_a_function_is_an_error(error):
    """A completion that is executed may call `exit()`: the run must not end as if all were well."""

    def plain(completions, **kwargs):
        return [leave(error) if completion == "it is four" else 0 for completion in completions]

    async def awaited(completions, **kwargs):
        return plain(completions)

    async def together(completions, **kwargs):  # raised by a task, where asyncio would leave the loop
        return await judge_together(completions, lambda: leave(error))

    def generated(completions, **kwargs):
        return (reward for reward in plain(completions))

    for func in (plain, awaited, together, generated):
        functions = RewardFunctions(func)
        for _ in range(2):  # the loop of the async ones is still there
            message = f"'{func.__name__}' raised {type(error).__name__}: "
            with pytest.raises(RewardError, match=message) as caught:
                functions.score(PROMPTS, COMPLETIONS, IDS, {}, None)
            assert "working on completion 1 ('it is four' to" in str(caught.value)
        functions.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_names_the_function_and_the_completion_at_hand(is_async):
    def parse(completion):
        return float(completion.split()[0])

    def plain(completions, **kwargs):
        return [0 if completion.startswith("two") else parse(completion) for completion in completions]

    async def awaited(completions, **kwargs):
        return plain(completions)

    with pytest.raises(RewardError, match=r"raised ValueError: could not convert.*'it'") as caught:
        score(awaited if is_async else plain)
    assert ("'awaited'" if is_async else "'plain'") in str(caught.value)
    assert re.search(rf"'it', at {re.escape(__file__)}:\d+ in parse\n", str(caught.value))
    assert "working on completion 1 ('it is four' to the prompt 'what is two')" in str(caught.value)
    assert type(caught.value.__cause__) is ValueError


def test_an_exception_without_a_completion_at_hand_blames_none():
    def offline(completions, **kwargs):
        first, second = completions[:2]  # both at hand: neither is to blame
        raise ConnectionError(f"no route to the judge {len(first) + len(second)}")

    with pytest.raises(RewardError, match="'offline' raised ConnectionError: no route") as caught:
        score(offline)
    assert "working on" not in str(caught.value)


def test_a_function_without_kwargs_is_told_to_declare_them():
    with pytest.raises(RewardError, match=r"unexpected keyword argument[\s\S]*declare \*\*kwargs"):
        score(lambda completions: [0, 0, 0])


def test_a_failing_function_does_not_leave_the_async_ones_running():
    cancelled = threading.Event()

    async def judge(**kwargs):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def broken(**kwargs):
        raise KeyError("solution")

    with contextlib.closing(RewardFunctions([judge, broken])) as functions:
        with pytest.raises(RewardError, match="'broken' raised KeyError"):
            functions.score(PROMPTS, COMPLETIONS, IDS, {}, None)
        assert cancelled.wait(timeout=60)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_copy_of_the_process_that_a_function_lets_go_on_is_ended(capfd):
    def forks(completions, **columns):
        child = os.fork()
        code = 0 if child == 0 else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return [code] * len(completions)

    assert set(score([forks]).rewards.flatten().tolist()) == {EXIT_CODE}
    assert "The reward function 'forks' has forked" in capfd.readouterr().err


def test_memory_errors_reach_the_trainer():
    with pytest.raises(torch.OutOfMemoryError):
        score(lambda **kwargs: leave(torch.OutOfMemoryError("CUDA out of memory")))


def test_wrong_numbers_of_weights_and_tokenizers_are_refused():
    assert RewardFunctions([zero, zero], reward_weights=[0.5, 2]).weights.tolist() == [0.5, 2.0]
    assert RewardFunctions([zero, zero]).weights.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="3 reward_weights for 2 reward functions"):
        RewardFunctions([zero, zero], reward_weights=[1, 2, 3])
    with pytest.raises(ValueError, match="1 reward_processing_classes for 2 reward functions"):
        RewardFunctions([zero, zero], [None])
    with pytest.raises(ValueError, match="No reward function"):
        RewardFunctions([])
    with pytest.raises(TypeError, match="a callable, a model or a model id; got 3"):
        RewardFunctions([zero, 3])


# --- None, and what functions log --------------------------------------------------------------------------


def test_a_completion_that_no_function_rewards_is_warned_of(caplog):
    funcs = [constant([None, 1, None]), constant([None, None, 2])]
    with caplog.at_level(logging.WARNING):
        table = score(funcs, {"answer": ["a", "b", "c"]}, "the state")
    assert table.rewards.isnan().tolist() == [[True, True], [False, True], [True, False]]
    assert "returned None for the following kwargs" in caplog.text
    assert "two and no more" in caplog.text and "'answer': 'a'" in caplog.text
    assert "the state" not in caplog.text


def test_a_batch_that_no_function_rewards_is_warned_of_and_goes_on(caplog):
    with caplog.at_level(logging.WARNING):
        table = score(constant([None, None, None]))
    assert table.rewards.isnan().all()
    assert "All reward functions returned None for the following kwargs:" in caplog.text
    assert "3 completions of 3 without a reward (from lambda)" in caplog.text


@pytest.mark.parametrize(
    ("values", "is_told"),
    [
        ([2**53, 2**53 + 1, 0], True),
        ([float(2**53), float(2**53 + 2), 0], True),
        ([1e-320, 2e-320, 0], True),
        ([np.float64(1 + 1e-9), 1.0, 0], True),
        ([torch.tensor(2.0**40, dtype=torch.float64) + 1, 2**40, 0], True),
        ([0.1 + 0.2, 0.3, 0], False),  # rounding
        ([0.0, 1.0, 2**53], False),
        ([1.0, 1.0, 1.0 + 1e-9], False),  # of another prompt
        ([None, 1.0, 0], False),
        ([None, None, 0], False),
    ],
)
def test_rewards_that_only_float32_makes_equal_are_warned_of_once(values, is_told, caplog):
    with contextlib.closing(RewardFunctions([constant(values)])) as functions:
        for _ in range(2):
            functions.score(PROMPTS, COMPLETIONS, IDS, {}, None)
    assert caplog.text.count("which are equal in float32") == int(is_told)


def test_logged_columns_and_metrics_are_collected():
    def first(log_extra, log_metric, **kwargs):
        log_extra("seen", ["a", "b"])
        log_extra("seen", ["c"])  # piece by piece
        log_metric("accuracy", torch.tensor(0.5))
        return [0, 0, 0]

    async def second(log_extra, log_metric, **kwargs):
        log_extra("seen", ["x", "y", "z"])
        log_extra("other", [1, 2, 3])
        log_metric("accuracy", 1)
        log_metric("accuracy", 0)
        return [0, 0, 0]

    table = score([first, second])
    assert table.extra_columns == {
        "seen": ["a", "b", "c"],
        "second/seen": ["x", "y", "z"],
        "other": [1, 2, 3],
    }
    assert table.metrics == {"accuracy": [0.5, 1.0, 0.0]}


@pytest.mark.parametrize("name", ["reward", "loss", "step", "num_tokens", "kl", "rewards/judge/mean"])
def test_metrics_of_the_trainers_own_names_are_refused(name):
    def judge(log_metric, **kwargs):
        log_metric(name, 777)
        return [0, 0, 0]

    with pytest.raises(RewardError, match=f"'judge' logged the metric '{name}'.*'judge/{name}'"):
        score(judge)


@pytest.mark.parametrize("name", ["prompt", "completion", "advantage", "step", "other"])
def test_columns_of_the_completions_table_are_refused(name):
    def judge(log_extra, **kwargs):
        log_extra(name, "abc")
        return [0, 0, 0]

    def other(**kwargs):
        return [0, 0, 0]

    with pytest.raises(RewardError, match=f"'judge' logged the column '{name}'"):
        score([judge, other])


def test_functions_may_change_what_they_are_given():
    message = {"role": "user", "content": "what is two"}
    prompt = [message]  # one object for a whole group
    prompts, columns = [prompt] * 3, {"tests": [[{"in": [1]}]] * 3, "array": [np.zeros(2)] * 3}
    completions = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    ids = [[1, 2], [3], [4, 5, 6]]
    before = copy.deepcopy((prompts, completions, ids, columns))
    seen = []

    def spoil(prompts, completions, completion_ids, tests, array, **kwargs):
        for p, c, i, t, a in zip(prompts, completions, completion_ids, tests, array, strict=True):
            seen.append((len(p), p[0]["content"], len(c), i[-1], t[0]["in"], a.sum().item()))
            p.append(c.pop())
            p[0]["content"] += "?"
            i.clear()
            t[0]["in"] = [*t[0]["in"], 2]
            a += 1
        prompts.clear()
        return [0, 0, 0]

    async def spoil_too(**kwargs):
        return spoil(**kwargs)

    with contextlib.closing(RewardFunctions([spoil, spoil_too, spoil])) as functions:
        functions.score(prompts, completions, ids, columns, None)
    assert sorted(seen) == sorted(3 * [(1, "what is two", 1, end, [1], 0.0) for end in (2, 3, 6)])
    assert all(map(operator.is_, prompts, [prompt] * 3)) and prompt == before[0][0]
    assert (completions, ids, columns["tests"]) == (before[1], before[2], before[3]["tests"])
    assert not any(array.any() for array in columns["array"])


def test_a_logged_column_of_another_length_is_refused():
    def reward(log_extra, **kwargs):
        log_extra("seen", ["a"])
        return [0, 0, 0]

    with pytest.raises(RewardError, match="'reward' logged 1 values in the column 'seen', but 3"):
        score(reward)


# --- reward models -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    of_texts = sorted({w for t in PROMPTS + COMPLETIONS for w in t.split()})
    words = ["<pad>", "<eos>", "<user>", "<assistant>", *of_texts]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    return tokenizer


@pytest.fixture(scope="module")
def reward_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 16}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, **layers, num_labels=1, name_or_path="org/tiny-reward")
    return LlamaForSequenceClassification(config).double().train()


def unpadded_rewards(model, tokenizer, texts):
    """One forward pass per text, the logit of its last token: no padding, no batch."""
    inputs = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
    with torch.no_grad():
        return [model.score(model.model(ids).last_hidden_state[0, -1]).item() for ids in inputs]


def test_reward_models_score_prompt_and_completion(reward_model, tokenizer, monkeypatch):
    # The order has to survive sorting and cutting.
    monkeypatch.setattr("colocate.rewards.models.BATCH_SIZE", 2)
    prompts = [p + " " for p in PROMPTS]
    functions = RewardFunctions([zero, reward_model], [None, tokenizer])
    assert functions.names == ["lambda", "tiny-reward"]
    assert functions.models == [reward_model]
    assert not reward_model.training
    table = functions.score(prompts, COMPLETIONS, IDS, {"answer": ["a"] * 3}, None)
    texts = [p + c for p, c in zip(prompts, COMPLETIONS, strict=True)]
    expected = unpadded_rewards(reward_model, tokenizer, texts)
    assert table.rewards[:, 1].tolist() == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) == 3


def test_reward_models_read_conversations_through_the_chat_template(reward_model, tokenizer):
    model = RewardModel(reward_model, tokenizer)
    prompts = [[{"role": "user", "content": p}] for p in PROMPTS]
    completions = [[{"role": "assistant", "content": c}] for c in COMPLETIONS]
    texts = [f"<user> {p} <assistant> {c} " for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    expected = unpadded_rewards(reward_model, tokenizer, texts)
    assert model(prompts=prompts, completions=completions) == pytest.approx(expected, rel=1e-6)


def test_a_reward_model_can_be_given_by_its_directory(reward_model, tokenizer, tmp_path):
    reward_model.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    functions = RewardFunctions(str(tmp_path / "judge"), model_init_kwargs={"dtype": torch.float64})
    assert functions.names == ["judge"]
    table = functions.score(PROMPTS, COMPLETIONS, IDS, {}, None)
    texts = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    expected = unpadded_rewards(reward_model, tokenizer, texts)
    assert table.rewards[:, 0].tolist() == pytest.approx(expected, rel=1e-6)


def test_reward_models_without_padding_token_pad_with_the_end(reward_model, tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    RewardModel(reward_model, bare)
    assert reward_model.config.pad_token_id == bare.pad_token_id == 1
    neither = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="neither a padding nor an end token"):
        RewardModel(reward_model, neither)


def test_reward_models_that_cannot_score_are_refused(reward_model, tokenizer):
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
    config = BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=1, num_labels=2)
    with pytest.raises(ValueError, match="'BertForSequenceClassification' has 2 labels"):
        RewardModel(BertForSequenceClassification(config), tokenizer)
    with pytest.raises(ValueError, match="20 tokens together, but the reward model 'tiny-reward' reads 16"):
        RewardModel(reward_model, tokenizer)(["two " * 10], ["four " * 10])


# --- built in ----------------------------------------------------------------------------------------------


def raw_entries():
    # Tuples that a verifier compares with (arc_1d, rearc), keys that are numbers (graph_color), plain ones.
    for task in ("chain_sum", "rearc", "graph_color", "countdown", "knights_knaves"):
        dataset = reasoning_gym.create_dataset(task, seed=5, size=2)
        yield from ((task, dataset, problem) for problem in dataset)


def test_generated_tasks_are_scored_by_their_own_verifier():
    for task, dataset, problem in raw_entries():
        entry = encode_entry(task, {"seed": 5, "size": 2}, problem)
        for answer in (str(problem["answer"]), f"{problem['answer']}0", "17", "no idea"):
            expected = dataset.score_answer(answer, problem)
            last = f"Hm. <answer>1</answer> <answer> {answer}</answer>"
            for text in (answer, f"<think> 4 </think>\n{answer}", last):
                assert reasoning_gym_reward([text], [entry]) == [expected], (task, answer)
                assert reasoning_gym_reward([[{"role": "assistant", "content": text}]], [entry]) == [expected]


def test_the_verifier_knows_the_tasks_parameters_and_dataset_rows_suffice():
    rows = load_prompts("reasoning_gym:chain_sum", size=3, min_terms=2, max_terms=2)
    sums = [eval(prompt.split(":")[1].rstrip(" =")) for prompt in rows["prompt"]]
    right = [f"<answer>{number}</answer>" for number in sums]
    wrong = [f"<answer>{number + 1}</answer>" for number in sums]
    assert reasoning_gym_reward(right, rows["entry"]) == [1.0] * 3
    assert max(reasoning_gym_reward(wrong, rows["entry"])) < 1.0


def test_an_answer_that_the_verifier_cannot_read_is_wrong():
    rows = load_prompts("reasoning_gym:prime_factorization", size=1)
    task = reasoning_gym.create_dataset("prime_factorization", seed=42, size=1)
    with pytest.raises(ValueError):
        task.score_answer("none at all", task[0])
    assert reasoning_gym_reward(["none at all"], rows["entry"]) == [0.0]


@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward"])
def test_missing_math_verify_is_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "math_verify", None)  # an import raises ImportError
    with pytest.raises(ImportError, match=r'pip install "math-verify>=0.8"'):
        getattr(rewards, name)(["</think> $3$"], ["3"])


def test_rewards_with_parameters_check_them_and_can_be_pickled():
    for make, message in (
        (lambda: rewards.get_repetition_penalty_reward(max_penalty=0.5), "would reward repetition"),
        (lambda: rewards.get_repetition_penalty_reward(ngram_size=0), "set 1 or more"),
        (lambda: rewards.get_soft_overlong_punishment(10, -1), "set 0 or more"),
        (lambda: rewards.get_cosine_scaled_reward(0), "set 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    ids = [[1, 1, 1, 1, 1, 1, 1, 1, 1]]
    for reward in (rewards.get_repetition_penalty_reward(), rewards.get_soft_overlong_punishment(10, 2)):
        assert pickle.loads(pickle.dumps(reward))(ids) == reward(ids) != [0.0]
