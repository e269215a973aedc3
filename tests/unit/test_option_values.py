"""Values of options: one reading for Python, files and command lines, and messages of bounded size."""

import dataclasses
import enum
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colocate.config.grpo_config import GRPOConfig
from colocate.config.run_config import parse_run
from colocate.options.declared import declared
from colocate.options.values import coerce, shown
from colocate.options.yaml_text import read_yaml, write_yaml


@dataclasses.dataclass
class Options:
    rate: float = 0.1
    number: int | None = None
    names: list[str] | None = None
    some_kwargs: dict | str | None = None
    some_config: dict | str | None = None


# ── Numbers ──────────────────────────────────────────────────────────────────────────────────────────────


@given(number=st.integers(-(2**63) + 1, 2**63 - 1), form=st.sampled_from([int, str, np.int64, Decimal]))
def test_whole_numbers_are_exact(number, form):
    """Also beyond 2⁵³, where floats skip every other one."""
    text = str(number) if form is Decimal else form(number)
    assert coerce("n", text, int) == number


@given(number=st.floats(-1e18, 1e18), form=st.sampled_from([float, repr, np.float64]))
def test_numbers_are_what_float_makes_of_them(number, form):
    assert coerce("x", form(number), float) == number
    assert type(coerce("x", form(number), float)) is float


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        ("fast", float, "x='fast' is not a number."),
        ([1, 2], float, "x=[1, 2] is not a number."),
        (True, float, "x=True is not a number."),
        (None, int, "x=None is not a whole number."),
        ("", int | None, "x='' is not a whole number or None."),
        (1.5, int, "x=1.5 is not a whole number."),
        ("nan", float, "x='nan' is not finite; set a finite number."),
        (float("-inf"), int, "x=-inf is not finite"),
        ("1e30", int, "x='1e30' is too large: numbers lie below 2**63"),
        ("1e999999999", float, "is too large"),
        (2**63, int, "is too large"),
        pytest.param(10**5000, float, "x=<a whole number of 16,610 bits> is too large", id="5000 digits"),
        (["a", None], list[float], "x=['a', None] has 'a', which is not a number."),
        ([1, float("nan")], list[float], "has nan, which is not finite"),
        ("[1, ", list[float], "x='[1, ' is no list that can be read"),
        ("{", dict | str | None, "x='{' is no mapping that can be read"),
        ({"a", "b"}, list[str], "is not a list."),
        (3, str, "x=3 is not text."),
        (b"a", str, "is not text."),
        ("maybe", bool, "x='maybe' is not true or false."),
        (1.0, bool, "x=1.0 is not true or false."),
    ],
)
def test_what_does_not_fit_is_named_with_what_would(value, hint, message):
    with pytest.raises(ValueError) as error:
        coerce("x", value, hint)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("value", "hint", "read"),
    [
        (torch.tensor(3), int, 3),
        (np.float32(0.5), float, 0.5),
        (np.bool_(True), bool, True),
        (np.array([1.0, 2.0]), list[float], [1.0, 2.0]),
        ((1, "2"), list[float], [1.0, 2.0]),
        (Path("a/b"), str, "a/b"),
        ('{"a": [1, null]}', dict, {"a": [1, None]}),
        ("9007199254740993", int, 2**53 + 1),
        (False, str | bool, False),
    ],
)
def test_values_of_pythons_world(value, hint, read):
    assert coerce("x", value, hint) == read and type(coerce("x", value, hint)) is type(read)


def test_infinity_only_where_it_is_asked_for():
    assert coerce("x", "inf", float | None, may_be_infinite=True) == float("inf")
    for value in ("-inf", "nan"):
        with pytest.raises(ValueError, match="not finite"):
            coerce("x", value, float, may_be_infinite=True)


def test_text_for_a_mapping_is_its_json_but_a_config_may_be_a_file():
    types = {name: option.hint for name, option in declared(Options).items()}
    assert coerce("some_config", "file.json", types["some_config"]) == "file.json"
    with pytest.raises(ValueError, match=r"some_kwargs='file.json' is not a mapping or None"):
        coerce("some_kwargs", "file.json", types["some_kwargs"])


@pytest.mark.parametrize(
    ("name", "text"), [("learning_rate", "1e-5"), ("seed", "7"), ("report_to", "none"), ("bf16", "false")]
)
def test_python_takes_what_the_command_line_takes(name, text, tmp_path):
    _, options = parse_run({name: text})
    given_to_python = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{name: text})
    from_command_line = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)
    assert given_to_python.to_dict() == from_command_line.to_dict()


# ── Messages ─────────────────────────────────────────────────────────────────────────────────────────────


class Colour(enum.Enum):
    RED = "red"


class Nameless:
    def __repr__(self):
        raise RuntimeError


def test_what_is_shown_is_short_and_quick():
    bomb = ["x"] * 9
    for _ in range(40):
        bomb = [bomb] * 9
    start = time.monotonic()
    for value in (bomb, {"a": bomb}, "y" * 10**7, 10**100_000, list(range(10**6)), Nameless(), b"z" * 10**6):
        assert 0 < len(shown(value)) <= 200
    assert time.monotonic() - start < 30  # of years
    assert [shown(x) for x in (1.5, "a", {"b": [None]}, Colour.RED)] == [
        "1.5",
        "'a'",
        "{'b': [None]}",
        "'red'",
    ]


# ── YAML ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a: 1\nb: 2\na: 3\n", ("'a'", "line 1 ", "line 3")),
        ("top:\n  c: 1\n  c: 1\n", ("'c'", "line 2 ", "line 3")),
        ("list:\n- d: 1\n- {e: 1, e: 2}\n", ("'e'", "line 3 ", "line 3")),
    ],
)
def test_a_key_given_twice_is_refused_with_both_lines(text, lines):
    with pytest.raises(ValueError) as error:
        read_yaml(text)
    assert all(line in str(error.value) for line in lines)


def test_keys_of_other_mappings_and_merged_ones_may_repeat():
    assert read_yaml("a: {k: 1}\nb: {k: 2}") == {"a": {"k": 1}, "b": {"k": 2}}
    assert read_yaml("a: &a {k: 1, l: 2}\nb: {<<: *a, k: 3}")["b"] == {"k": 3, "l": 2}


def test_aliases_up_to_a_limit():
    assert read_yaml("a: &a [1, 2]\nb: [*a, *a]")["b"] == [[1, 2], [1, 2]]
    bomb = "\n".join(
        ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40))]
    )
    for text, message in (
        (bomb, "more than 100,000 values"),
        ("&a [*a]", "itself"),
        ("[" * 3000, "too deeply"),
    ):
        with pytest.raises(ValueError, match=message):
            read_yaml(text)


def test_plain_scalars_are_yaml_1_2s_and_survive_writing():
    text = "[010, 0x10, 0o10, 1e3, .5, 1:30, 2026-13-45, no, true, .inf, ~]"
    values = read_yaml(text)
    assert values == [10, 16, 8, 1000.0, 0.5, "1:30", "2026-13-45", "no", True, float("inf"), None]
    strings = ["010", "1:30", "2026-11-22", "no", "true", "1e3", "0x1", ".5", "null", "a: b"]
    assert read_yaml(write_yaml(strings)) == strings
