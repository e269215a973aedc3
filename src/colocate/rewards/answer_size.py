"""Bounds how many digits a parsed answer would have, without working it out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MAX_BITS = 10_000_000
"""A number of more bits is too large to be compared or written: sympy would compute all of them."""


def is_too_large(parsed: Sequence[Any]) -> bool:
    """Whether any expression holds a number of more than `MAX_BITS` bits, as a tower of powers does.

    Args:
        parsed: The results of math-verify: sympy expressions, and texts, which are never too large.
    """
    return any(_bits(item) > MAX_BITS for item in parsed if not isinstance(item, str))


def _bits(expression: Any) -> float:
    """Return at least the binary logarithm of the largest number in the expression, in absolute value; `inf`
    if that is beyond all use."""
    # Parents come before their parts in `nodes`, so that the second loop finds all parts done, at any depth.
    nodes, waiting = [], [expression]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting.extend(getattr(node, "args", ()))
    bits: dict[int, float] = {}
    constant: dict[int, bool] = {}
    for node in reversed(nodes):
        parts = getattr(node, "args", ())
        sizes = [bits[id(part)] for part in parts]
        constant[id(node)] = not _is_symbol(node) and all(constant[id(part)] for part in parts)
        # What has a variable in it is not worked out, so that it is no larger than its parts.
        grows = constant[id(node)] or not sizes
        bits[id(node)] = _own_bits(node, sizes) if grows else max(sizes)
    return bits[id(expression)]


def _own_bits(node: Any, parts: list[float]) -> float:
    """Bound a constant, given the bounds of its arguments."""
    name = type(node).__name__
    if not parts:
        return _number_bits(node)
    if max(parts) > MAX_BITS:
        return math.inf
    if name == "Pow":
        return max(parts[0], parts[0] * _value(parts[1]))
    if name in ("factorial", "factorial2", "subfactorial", "gamma"):
        return _value(parts[0]) * parts[0]
    if name in ("binomial", "RisingFactorial", "FallingFactorial"):
        return min(_value(parts[0]), _value(parts[1]) * parts[0])
    if name == "exp":
        return 1.5 * _value(parts[0])
    if name == "Mul":
        return math.fsum(parts)
    return max(parts) + math.log2(len(parts))


def _value(bits: float) -> float:
    """Return the largest number of so many bits."""
    return math.inf if bits > 60 else 2.0**bits


def _is_symbol(node: Any) -> bool:
    return bool(getattr(node, "is_Symbol", False))


def _number_bits(node: Any) -> float:
    p, q = getattr(node, "p", None), getattr(node, "q", None)
    if isinstance(p, int) and isinstance(q, int):
        return math.log2(max(abs(p), q))
    if getattr(node, "is_Float", False):
        return max(1.0, float(abs(node._mpf_[2]) + node._mpf_[3]))  # exponent and bits of the mantissa
    return 3.0  # pi, say
