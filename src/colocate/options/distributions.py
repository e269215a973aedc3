"""Engines of this repository that are distributions of their own, and how each is installed."""

from __future__ import annotations

from collections.abc import Collection

BROUGHT_BY: dict[str, str] = {"trtllm": "colocate-trtllm"}
"""The distribution of each such engine. In a checkout it is in `distributions/`, under the engine's name."""


def how_to_install(name: str, known: Collection[str]) -> str:
    """How to install the engine that has this name or an option of this name; "" if that is not missing.

    Args:
        known: the names of engines or options that there are.
    """
    for engine, distribution in BROUGHT_BY.items():
        own = [each for each in (name, *known) if each == engine or each.startswith(f"{engine}_")]
        if own == [name]:
            return (
                f"; {distribution} brings it, which is not installed here: pip install {distribution}, or in "
                f"a checkout of colocate pip install ./distributions/{engine}."
            )
    return ""
