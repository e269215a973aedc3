"""Content of tools and environments that a model may read: text that tokenizers take, of a bounded length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from colocate.rewards.arguments import own_copy

MAX_CHARS = 1_000_000
"""Content that is longer is an error: no model reads it, but its tokens would have to be counted."""

_MEDIA = frozenset({"image", "image_url", "input_image", "video", "video_url", "audio", "input_audio"})
_MEDIA_KEYS = _MEDIA | {"type", "url", "path", "base64", "data", "source", "format", "detail", "mime_type"}


class MediaError(ValueError):
    """A tool has returned an image, a video or sound, which a text model cannot see."""


def content_of(value: Any, name: str, max_chars: int = MAX_CHARS) -> str | list[Any]:
    """Return the content of a tool's message: a list as it is, if JSON can write it, or else text.

    Args:
        value: the tool's result.
        name: the tool's name.

    Raises:
        MediaError: the list has a block of an image, a video or sound.
        ValueError: the content has more characters than `max_chars`.
    """
    if isinstance(value, list):
        check_no_media(value, f"The tool {name!r}")
        value = value if is_json(value) else str(value)
    return readable(value if isinstance(value, list) else str(value), "The result", max_chars)


def readable(content: Any, kind: str, max_chars: int = MAX_CHARS) -> Any:
    """Return a copy of content that is not too long, with texts that tokenizers can read.

    Args:
        content: text, or a list.
        kind: what it is, for the message.

    Raises:
        ValueError: it has more characters than `max_chars`.
    """
    num_chars = len(content) if isinstance(content, str) else sum(len(str(part)) for part in content)
    if num_chars > max_chars:
        raise ValueError(f"{kind} has {num_chars} characters, more than the {max_chars} that it may have.")
    return encodable(content)


def check_no_media(content: Any, whose: str) -> None:
    """Raises MediaError if one of the content's blocks is no text, as in
    `[{"type": "image", "image": picture}]`."""
    for block in content if isinstance(content, list) else ():
        if not isinstance(block, Mapping) or not set(block) <= _MEDIA_KEYS:
            continue
        if (kind := block.get("type")) in _MEDIA and len(block) > 1:
            raise MediaError(
                f"{whose} has returned a block of the type {kind!r}, but the model is trained on text: its "
                "chat template would write the marks of a picture, with nothing behind them. Return text."
            )


def is_json(value: Any) -> bool:
    """Whether JSON can write a value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # a set, say, or a list within itself
        return False
    return True


def encodable(value: Any) -> Any:
    """Return a copy in which lone surrogates, which UTF-8 does not have, are question marks."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [encodable(item) for item in value]
    if isinstance(value, Mapping):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return own_copy(value)
