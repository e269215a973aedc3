"""Tools as models see them: schemas are transformers' own, and what cannot be described is refused."""

import functools

import pytest
from transformers.utils import get_json_schema

from colocate.episodes.tools import Toolbox


def add(a: int, b: int = 0) -> int:
    """
    Add two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their sum.
    """
    return a + b


async def fetch(url: str, tries: list[int] | None = None) -> str:
    """Fetch a page.

    Args:
        url: Where it is.
        tries: Seconds to wait (choices: [[1], [2]])
    """
    return url


class Counter:
    def __init__(self, step):
        self.step = step

    def count(self, times: int) -> int:
        """Count on.

        Args:
            times: How often.
        """
        return self.step * times


def test_schemas_are_those_of_transformers():
    functions = [add, fetch, Counter(1).count]
    box = Toolbox(functions)
    assert box.schemas == [get_json_schema(function) for function in functions]
    assert box.names == ("add", "fetch", "count") and len(box) == 3
    assert Toolbox().schemas == [] and len(Toolbox()) == 0


def test_methods_of_another_object_take_the_place_of_the_first_ones():
    box = Toolbox([add, Counter(1).count])
    other = box.with_functions({"count": Counter(5).count})
    message = {"tool_calls": [call("count", times=2), call("add", a=1)]}
    assert [c.function(**c.arguments) for c in box.calls(message)] == [2, 1]
    assert [c.function(**c.arguments) for c in other.calls(message)] == [10, 1]
    assert other.schemas == box.schemas


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_keep_their_order_and_say_what_is_wrong_with_them():
    box = Toolbox([add])
    malformed = [{"type": "function"}, {"type": "function", "function": {"name": ["add"]}}, "add(1)", None]
    calls = box.calls(
        {"tool_calls": [call("add", a=1), call("sub"), {"type": "web", "name": "x"}, *malformed]}
    )
    assert [(c.function, c.name) for c in calls[:3]] == [(add, "add"), (None, "sub"), (None, "x")]
    assert [c.problem for c in calls[:3]] == ["", "Tool sub not found.", "Unsupported tool call type: web"]
    assert all(c.function is None and c.problem for c in calls[3:]) and len(calls) == 7
    for silent in ({}, {"tool_calls": None}, {"tool_calls": []}):
        assert box.calls(silent) == []


def no_docstring(a: int) -> int:
    return a


def no_types(a):
    """Add.

    Args:
        a: A number.
    """
    return a


def no_description(a: int) -> int:
    """Add."""
    return a


def odd_type(a: Counter) -> int:
    """Add.

    Args:
        a: A counter.
    """
    return a.step


def unknown_type(a: "NoSuchType") -> int:  # noqa: F821
    """Add.

    Args:
        a: A thing.
    """
    return a


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_docstring, "no docstring"),
        (no_types, "missing a type hint"),
        (no_description, "no description for the argument 'a'"),
        (odd_type, "Counter"),
        (unknown_type, "NoSuchType"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused_with_an_example(function, words):
    with pytest.raises(ValueError, match=words) as refusal:
        Toolbox([add, function])
    assert f"'{function.__name__}' ({__file__}:{function.__code__.co_firstlineno})" in str(refusal.value)
    example = str(refusal.value).partition("\n\n")[2]
    namespace = {}
    exec(f"class Example:\n{example}\n        return a + b", namespace)  # what it advises is taken
    Toolbox([namespace["Example"]().add if "self" in example else namespace["Example"].add])


@pytest.mark.parametrize(
    "thing", [functools.partial(add, 1), Counter(1), Counter, get_json_schema(add), "add", len]
)
def test_what_is_no_function_is_refused(thing):
    with pytest.raises(ValueError, match=r"A tool is a function or a method; got .* `def`"):
        Toolbox([thing])


def test_two_tools_of_one_name_are_refused_with_both_places():
    def other():
        def add(a: int) -> int:
            """Add.

            Args:
                a: A number.
            """
            return a

        return add

    with pytest.raises(
        ValueError, match=r"Two tools have the name 'add': 'add' \(.*\) and .*<locals>.add' \(.*rename"
    ):
        Toolbox([add, other()])
