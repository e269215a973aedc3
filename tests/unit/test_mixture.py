"""Several datasets in one: their shares, their passes, the place where a run goes on, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.data.mixture import mix, read_entries
from colocate.data.order import Mixed
from colocate.data.sampler import PromptBatches


@st.composite
def mixtures(draw):
    """The rows of each dataset, and weights that sum to 1."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    parts = [draw(st.integers(1, 20)) for _ in sizes]
    names = [f"d{i}" for i in range(len(sizes))]
    sources = [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
    draw(st.randoms(use_true_random=False)).shuffle(sources)
    return sources, {name: part / sum(parts) for name, part in zip(names, parts, strict=True)}


def epochs(order: Mixed, number: int) -> list[int]:
    """The rows that the first epochs visit."""
    return [row for epoch in range(number) for row in order.epoch(epoch).tolist()]


@given(mixtures(), st.booleans())
def test_shares_hold_in_every_stretch_of_an_epoch(mixture, shuffle):
    sources, weights = mixture
    order = Mixed(sources, weights, shuffle=shuffle, seed=0)
    rows = order.epoch(0).tolist()
    assert len(rows) == order.num_rows
    seen: Counter[str] = Counter()
    for number, row in enumerate(rows, start=1):
        seen[sources[row]] += 1
        for name, weight in weights.items():
            # Rounding moves each dataset's count by half a row in the epoch, or to the one row that it has
            # at least.
            assert abs(seen[name] - weight * number) <= 1 + len(weights) / 2


@given(mixtures(), st.booleans(), st.integers(1, 4))
def test_each_row_is_visited_once_before_any_row_of_its_dataset_again(mixture, shuffle, num_epochs):
    sources, weights = mixture
    rows = epochs(Mixed(sources, weights, shuffle=shuffle, seed=1), num_epochs)
    for name in weights:
        own = [row for row in rows if sources[row] == name]
        size = sources.count(name)
        for start in range(0, len(own), size):
            visited = own[start : start + size]
            assert len(set(visited)) == len(visited)
            assert shuffle or visited == sorted(visited)


@given(mixtures())
def test_an_epoch_is_trls_mixture(mixture):
    """The first dataset is used up, and of the others there is as much as TRL's `fraction` takes."""
    sources, weights = mixture
    total = min(sources.count(name) / weight for name, weight in weights.items())
    counts = Counter(sources[row] for row in Mixed(sources, weights, shuffle=True, seed=2).epoch(0).tolist())
    if min(weights.values()) * total >= 1:
        assert counts == {name: round(weight * total) for name, weight in weights.items()}
    else:  # TRL would leave a dataset out
        assert min(counts.values()) >= 1 and set(counts) == set(weights)


def test_any_ten_prompts_have_the_shares_that_the_page_says():
    sources = ["a"] * 23 + ["b"] * 31
    rows = epochs(Mixed(sources, {"a": 0.7, "b": 0.3}, shuffle=True, seed=0), 5)
    counts = {sum(sources[row] == "a" for row in rows[start : start + 10]) for start in range(len(rows) - 9)}
    assert 7 in counts and counts <= {5, 6, 7, 8, 9}


def test_the_order_of_a_dataset_depends_on_the_seed_and_on_no_other_dataset():
    two = Mixed(["a"] * 9 + ["b"] * 9, {"a": 0.5, "b": 0.5}, shuffle=True, seed=3)
    three = Mixed(["a"] * 9 + ["b"] * 9 + ["c"] * 9, {"a": 0.25, "b": 0.5, "c": 0.25}, shuffle=True, seed=3)
    first, other = ([row for row in epochs(order, 3) if row < 9][:9] for order in (two, three))
    assert first == other and first != sorted(first)
    fourth = Mixed(["a"] * 9, {"a": 1.0}, shuffle=True, seed=4)
    assert fourth.epoch(0).tolist() != first and fourth.epoch(0).tolist() != fourth.epoch(1).tolist()


@settings(max_examples=40)
@given(mixtures(), st.integers(1, 3), st.integers(0, 20), st.booleans())
def test_a_run_goes_on_in_the_mixture_where_it_stopped(mixture, num_prompts, num_taken, shuffle):
    sources, weights = mixture
    dataset = datasets.Dataset.from_dict(
        {"prompt": [str(row) for row in range(len(sources))], "dataset": sources}
    )
    options = dict(shuffle=shuffle, weights=weights)
    if Mixed(sources, weights, shuffle=False, seed=0).num_rows < num_prompts:
        with pytest.raises(ValueError, match="no epoch would have a batch"):
            PromptBatches(dataset, num_prompts, **options)
        return
    uninterrupted = list(islice(PromptBatches(dataset, num_prompts, **options), num_taken + 5))
    stopped = PromptBatches(dataset, num_prompts, **options)
    list(islice(stopped, num_taken))
    resumed = PromptBatches(dataset, num_prompts, **options)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert list(islice(resumed, 5)) == uninterrupted[num_taken:]


def test_a_position_in_another_mixture_is_refused():
    dataset = datasets.Dataset.from_dict({"prompt": list("abcdef"), "dataset": ["x"] * 3 + ["y"] * 3})
    state = PromptBatches(dataset, 1, weights={"x": 0.5, "y": 0.5}).state_dict()
    for weights in ({"x": 0.25, "y": 0.75}, None):
        with pytest.raises(ValueError, match=r"taken with weights=.*Resume with the same dataset, weights"):
            PromptBatches(dataset, 1, weights=weights).load_state_dict(state)
    plain = PromptBatches(dataset, 1)
    older = {name: value for name, value in plain.state_dict().items() if name != "weights"}
    plain.load_state_dict(older)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"x": 0.7, "y": 0.4},
            r"must sum to 1, but 0.7 \+ 0.4 = 1.1. In the same ratio they are x: 0.6364, y: 0.3636",
        ),
        ({"x": 1.0, "y": 1e-300}, "'y' has weight=1e-300, one prompt in 1e.300: a share is at least 1e-06"),
        ({"x": 1.5, "y": -0.5}, "'y' has weight=-0.5, but a weight is the dataset's share"),
        ({"x": 1.0, "y": 0}, "'y' has weight=0.*Leave out a dataset"),
        ({"x": float("nan"), "y": 0.5}, "'x' has weight=nan"),
        ({"x": "much", "y": 0.5}, "'x' has weight='much'"),
        ({"x": 1.0}, r"names \['x'\], but the column 'dataset' of the training data has \['x', 'y'\]"),
        ({"x": 0.5, "z": 0.5}, r"names \['x', 'z'\]"),
    ],
)
def test_weights_that_are_no_shares_are_refused_with_the_arithmetic(weights, message):
    dataset = datasets.Dataset.from_dict({"prompt": list("abcd"), "dataset": ["x", "y", "x", "y"]})
    with pytest.raises(ValueError, match=message):
        PromptBatches(dataset, 1, weights=weights)


def test_weights_need_rows_and_their_datasets_names():
    dataset = datasets.Dataset.from_dict({"prompt": list("abcd")})
    with pytest.raises(ValueError, match=r"needs the column 'dataset'.*the training data has 'prompt'"):
        PromptBatches(dataset, 1, weights={"x": 1.0})
    with pytest.raises(ValueError, match="is a stream: load it without streaming"):
        PromptBatches(dataset.to_iterable_dataset(), 1, weights={"x": 1.0})


# ── Entries of a run file ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["gsm8k"], "has 'gsm8k', which is no mapping; write `- name: DATASET`"),
        ([{"path": "gsm8k"}], "where 'path' is no key; write name"),
        ([{"name": "a", "fraction": 0.5}], "where 'fraction' is no key; write weight"),
        ([{"name": "a", "prompt_colum": "q"}], "'prompt_colum' is no key; did you mean 'prompt_column'"),
        ([{"split": "train"}], "has no name: add the dataset's name or path"),
        ([{"name": "a/x.jsonl"}, {"name": "b/x.jsonl"}], "two entries that are called 'x'.*`label: NAME`"),
        ([{"name": "a", "weight": 1.0}, {"name": "b"}], r"\['a'\] has a weight and \['b'\] has none"),
        ([{"name": "a", "weight": 0.5}, {"name": "b", "weight": 0.6}], r"0.5 \+ 0.6 = 1.1"),
        ([{"name": "a", "weight": -1}, {"name": "b", "weight": 2}], "'a' has weight=-1"),
        ([{"name": "a", "weight": "half"}], "datasets: weight='half' is not a number or None"),
        ([{"name": "a", "max_rows": 0}], "datasets: max_rows=0 must be at least 1"),
        ([{"name": "a", "options": {"split": "test"}}], "set it beside `name`"),
        ([{"name": "a", "prompt_column": "q", "prompt_template": "{q}"}], "both say what the prompt is"),
    ],
)
def test_wrong_entries_are_refused_before_anything_is_loaded(entries, message):
    with pytest.raises(ValueError, match=message):
        read_entries("datasets", entries, {})


def test_entries_take_the_runs_options_unless_they_have_their_own():
    run = {"prompt_column": "question", "prompt_template": None, "system_prompt": "Think.", "max_rows": 9}
    first, second, third = read_entries(
        "datasets",
        [
            {"name": "openai/gsm8k"},
            {"name": "data/math.jsonl", "prompt_template": "{problem}", "max_rows": 2},
            {"name": "reasoning_gym:chain_sum", "system_prompt": None},
        ],
        run,
    )
    assert [entry.label for entry in (first, second, third)] == ["gsm8k", "math", "chain_sum"]
    assert (first.prompt_column, first.system_prompt, first.max_rows) == ("question", "Think.", 9)
    assert (second.prompt_column, second.prompt_template, second.max_rows) == (None, "{problem}", 2)
    assert third.system_prompt is None


def rows(**columns):
    return datasets.Dataset.from_dict(columns)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"a": rows(prompt=["x"], solution=["1"]), "b": rows(prompt=["y"], solution=["2"], level=[3])},
            r"different columns. All have 'prompt', 'solution'; 'b' also 'level'. .*\{old: new\}.*\{old: "
            r"null\}",
        ),
        (
            {"a": rows(prompt=["x"], solution=["1"]), "b": rows(prompt=["y"], solution=[2])},
            "'solution' is not of one type in all datasets: string in 'a', int64 in 'b'",
        ),
        (
            {"a": rows(prompt=["x"]), "b": rows(prompt=[[{"role": "user", "content": "y"}]])},
            "'prompt' is not of one type.*string in 'a', messages in 'b'. Set system_prompt or "
            "apply_chat_template",
        ),
        ({"a": rows(prompt=["x"], dataset=["d"])}, "'a' has the column 'dataset', which in a mixture names"),
        (
            {"a": rows(prompt=["x"]), "b": rows(prompt=["y"]).to_iterable_dataset()},
            r"\['b'\] are streams, whose rows are not known",
        ),
    ],
)
def test_datasets_that_do_not_go_together_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        mix(parts, is_weighted=False)


def test_a_mixture_names_the_dataset_of_each_row():
    parts = {"a": rows(prompt=["x", "y"]), "b": rows(prompt=["z"])}
    assert mix(parts, is_weighted=True).to_list() == [
        {"prompt": "x", "dataset": "a"}, {"prompt": "y", "dataset": "a"}, {"prompt": "z", "dataset": "b"},
    ]  # fmt: skip
    streams = {label: part.to_iterable_dataset() for label, part in parts.items()}
    assert [row["dataset"] for row in mix(streams, is_weighted=False)] == ["a", "a", "b"]
    with pytest.raises(ValueError, match="can neither be given weights"):
        mix(streams, is_weighted=True)
