"""Requirements of an option's value, declared where the option is.

    epsilon: Annotated[float, FRACTION] = 0.2
    engine: Annotated[str, OneOf(("auto", "native"))] = "auto"

The field's type is still `float` or `str` to everybody else: `typing.get_type_hints` leaves the annotation
out.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from colocate.options.distributions import how_to_install
from colocate.options.values import shown


class Requirement(NamedTuple):
    """A condition on a number. Whether the option may be None is for its type to say."""

    words: str
    """The words that follow the number in the message of an error."""
    holds: Callable[[Any], bool]


AT_LEAST_ONE = Requirement("must be at least 1 and less than 2**31", lambda v: 1 <= v < 2**31)
FEW = Requirement("must be at least 1 and at most 2**20", lambda v: 1 <= v <= 2**20)
LEAST_TEMPERATURE = 1e-6
"""Logits are divided by the temperature in float32: below this, large ones could become infinite."""
TEMPERATURE = Requirement(
    f"must be positive and at least {LEAST_TEMPERATURE:g}: logits are divided by it",
    lambda v: v >= LEAST_TEMPERATURE,
)
POSITIVE = Requirement("must be positive", lambda v: v > 0)
NOT_NEGATIVE = Requirement("must not be negative", lambda v: v >= 0)
FRACTION = Requirement("must lie between 0 and 1", lambda v: 0 <= v <= 1)
SHARE = Requirement("must be greater than 0 and at most 1", lambda v: 0 < v <= 1)
BELOW_ONE = Requirement("must be at least 0 and less than 1", lambda v: 0 <= v < 1)
TIMEOUT = Requirement("must be greater than 0 and less than 2**31 seconds", lambda v: 0 < v < 2**31)
SECONDS = Requirement("must be greater than 0 and at most 1e9 seconds", lambda v: 0 < v <= 1e9)
PORT = Requirement("must be a port, 1 to 65535", lambda v: 1 <= v <= 65535)
INTERVAL = Requirement(
    "must be a whole number of steps, at least 1, or a share of the run between 0 and 1; for never set the "
    "strategy to 'no'",
    lambda v: 0 < v < 1 or (v >= 1 and v == int(v)),
)


@dataclass(frozen=True, eq=False)
class OneOf:
    """The values that an option takes, names or numbers, in the order in which an error lists them."""

    names: Collection[Any]
    older: Mapping[Any, Any] = field(default_factory=dict)
    """Older names, and those here that they stand for."""
    refused: Mapping[Any, str] = field(default_factory=dict)
    """Names that others take, and the reasons why they are not supported."""


class Elsewhere(NamedTuple):
    """The reason why an option of one engine has no effect with another, or must not be set with it."""

    reason: str
    is_refused: bool = False


class Mark:
    """A property of an option besides its type; two marks are equal only if they are the same."""


MAY_BE_INFINITE = Mark()
"""Marks an upper bound: infinity means "no bound". All other numbers are finite."""
IN_COMPLETIONS = Mark()
"""Marks an option with which completions are drawn, scored and weighed: those that were made before it was
changed are not what the run would make now."""


def check_range(name: str, value: Any, requirement: Requirement) -> None:
    """Raises ValueError when `value` is a number that does not satisfy the requirement."""
    if value is not None and not requirement.holds(value):
        raise ValueError(f"{name}={shown(value)} {requirement.words}.")


def check_choice(option: str, value: object, choices: Collection[Any]) -> None:
    """Refuse a value that is not one of `choices`.

    Raises:
        ValueError: with every valid value, and the nearest one if the value looks like a slip of the pen.
    """
    if value in choices:
        return
    names = [str(choice) for choice in choices]
    if option == "engine" and (hint := how_to_install(str(value), names)):
        raise ValueError(f"engine={shown(value)} is none of {', '.join(names)}{hint}")
    nearest = difflib.get_close_matches(str(value)[:100], names, n=1)
    suggestion = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"{option}={shown(value)} is unknown; it is one of {', '.join(names)}.{suggestion}")
