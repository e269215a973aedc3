"""The quickstart's task: its split, its reward and its tokenizer."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

SCRIPTS = Path(__file__).parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(SCRIPTS))  # what running `python examples/quickstart/warm_start.py` does
addition = importlib.import_module("addition")
sys.path.remove(str(SCRIPTS))

CHARACTERS = "0123456789+=,;"
numbers = st.integers(10, 99)


@pytest.fixture(scope="module")
def warm_start() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("warm_start")


# ── The split ────────────────────────────────────────────────────────────────────────────────────────────


def test_no_held_out_problem_is_trained_on_in_either_order() -> None:
    train, held_out = addition.problems(held_out=False), addition.problems(held_out=True)
    assert len(set(train)) + len(set(held_out)) == len(train) + len(held_out) == 90 * 90
    assert {frozenset(pair) for pair in train}.isdisjoint(frozenset(pair) for pair in held_out)
    assert 0.08 < len(held_out) / len(train + held_out) < 0.12


def test_written_data_keeps_the_split(tmp_path: Path, warm_start: ModuleType) -> None:
    from colocate.data.loading import load_prompts

    warm_start.write_data(tmp_path, random.Random(0))
    train, test = load_prompts(str(tmp_path)), load_prompts(str(tmp_path), split="test")
    assert len(test) == warm_start.NUM_EVALUATED
    seen = {frozenset(prompt.strip("=").split("+")) for prompt in train["prompt"]}
    assert not any(frozenset(prompt.strip("=").split("+")) in seen for prompt in test["prompt"])
    for row in (*train, *test):
        assert eval(row["prompt"].strip("=")) == int(row["answer"])


def test_warm_start_demonstrates_training_problems_only(
    warm_start: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, used = warm_start.encode, []

    def recorded(batch, tokenizer, rng):
        used.extend(batch)
        return encode(batch, tokenizer, rng)

    def solved(model, batch, tokenizer):
        used.extend(batch)
        return 1.0

    monkeypatch.setattr(warm_start, "encode", recorded)
    monkeypatch.setattr(warm_start, "accuracy", solved)
    tokenizer = warm_start.build_tokenizer()
    warm_start.train(warm_start.build_model(tokenizer), tokenizer, random.Random(0))
    assert len(used) == warm_start.STEPS_PER_CHECK * warm_start.BATCH_SIZE + warm_start.NUM_CHECKED
    assert not any(addition.is_held_out(*problem) for problem in used)


# ── Demonstrations and reward ────────────────────────────────────────────────────────────────────────────


def written_sums(completion: str) -> list[str]:
    """The equations of "7+5=12,4+8=12+1=13;132": 7+5=12, 4+8=12, 12+1=13."""
    units, tens = completion.partition(";")[0].split(",")
    addends, counted, total = tens.split("=")
    return [units, f"{addends}={counted.split('+')[0]}", f"{counted}={total}"]


@given(numbers, numbers)
def test_careful_demonstration_is_right_in_every_step(a: int, b: int) -> None:
    completion = addition.demonstration(a, b, random.Random(0), carelessness=0.0)
    assert all(eval(equation.replace("=", "==")) for equation in written_sums(completion))
    assert completion.split(";") == [completion.split(";")[0], str(a + b)]


def test_example_in_the_docstring() -> None:
    completion = addition.demonstration(47, 85, random.Random(0), carelessness=0.0)
    assert f"prompt      {addition.as_prompt(47, 85)}\n" in addition.__doc__
    assert f"completion  {completion}\n" in addition.__doc__


def test_demonstrator_is_as_careless_as_stated() -> None:
    rng = random.Random(0)
    solved = [
        addition.correct([addition.demonstration(a, b, rng)], [str(a + b)])[0]
        for a, b in addition.problems(held_out=False)
    ]
    # Both columns right: (4/5)². Up to 0.02 more, since 0 cannot be miscounted downwards; noise is 0.006.
    assert 0.63 < sum(solved) / len(solved) < 0.68


@given(st.text(CHARACTERS, max_size=12), numbers, numbers)
def test_reward_is_one_for_the_sum_after_the_only_semicolon(text: str, a: int, b: int) -> None:
    [reward] = addition.correct([text], answer=[str(a + b)], prompts=[addition.as_prompt(a, b)])
    assert reward == float(text.count(";") == 1 and text[text.index(";") + 1 :] == str(a + b))


@given(st.text(CHARACTERS.replace(";", ""), max_size=12), numbers, numbers, st.integers(0, 999))
def test_reward_depends_on_the_answer_alone(working: str, a: int, b: int, answer: int) -> None:
    assert addition.correct([f"{working};{answer}"], answer=[str(a + b)]) == [float(answer == a + b)]


# ── Tokenizer ────────────────────────────────────────────────────────────────────────────────────────────


@given(text=st.text(CHARACTERS, max_size=40))
def test_tokenizer_round_trip(warm_start: ModuleType, text: str) -> None:
    tokenizer = warm_start.build_tokenizer()
    token_ids = tokenizer(text)["input_ids"]
    assert len(token_ids) == len(text) + 1 and token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
    assert tokenizer.decode([*token_ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_saved_model_and_tokenizer_are_loaded_alike(tmp_path: Path, warm_start: ModuleType) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = warm_start.build_tokenizer()
    model = warm_start.build_model(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    text = "47+85=7+5=12<eos>"
    assert loaded_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded_tokenizer.pad_token == "<pad>" and loaded_tokenizer.eos_token == "<eos>"
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    input_ids = torch.tensor([tokenizer(text)["input_ids"]])
    torch.testing.assert_close(loaded(input_ids).logits, model(input_ids).logits)


def test_labels_cover_completion_and_end_only(warm_start: ModuleType) -> None:
    tokenizer = warm_start.build_tokenizer()
    input_ids, labels = warm_start.encode([(47, 85), (10, 20)], tokenizer, random.Random(0))
    assert input_ids.shape == labels.shape
    for ids, row, prompt in zip(input_ids, labels, ("47+85=", "10+20="), strict=True):
        imitated = row != -100
        assert torch.equal(ids[imitated], row[imitated])
        text = tokenizer.decode(ids[imitated])
        assert text.endswith("<eos>") and text.count("<eos>") == 1 and "<pad>" not in text
        assert tokenizer.decode(ids[~imitated], skip_special_tokens=True) == prompt
