"""Errors in the words of the command that shows them.

Messages of parts that commands share advise options of a run. `colocate chat` and others have other names for
some of these, and lack most of them. So before a message is shown, options get the names that the command
has, and advice on options that it lacks is left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

EQUIVALENTS: dict[str, dict[str, str]] = {
    "chat": {"max_completion_length": "max_tokens", "kv_cache_tokens": "max_context"},
    "eval": {
        "max_completion_length": "max_tokens",
        "dataset_name": "dataset",
        "dataset_test_split": "split",
        "output_dir": "output",
    },
    "serve": {"vllm_max_model_length": "max_model_len"},
    "rollout-serve": {"vllm_max_model_length": "max_model_len", "model_revision": "revision"},
}
"""Names that commands have for options of a run, where they differ."""

TAKE_RUN_OPTIONS = ("train", "plan")
"""The commands that take every option of a run."""

_SENTENCES = re.compile(r"(?<=[.;])\s+(?=[A-Z])|\n")
_ALTERNATIVES = re.compile(
    r"(,? or (?=set|lower|raise|give|pass|use|free|shorten|train|name|let)|, or (?=\w))"
)
_ADVISES = re.compile(r"\b(set|lower|raise|give|pass|use|add|increase|reduce)\b", re.IGNORECASE)


def in_words_of(command: str, message: str, own: Collection[str], options: Collection[str]) -> str:
    """The message as `command` shows it.

    Args:
        own: the options of the command, with their dashes.
        options: the names of all options of a run.
    """
    if command in TAKE_RUN_OPTIONS:
        return message
    names = EQUIVALENTS.get(command, {})
    lacking = {name for name in options if f"--{name}" not in own and name not in names}
    kept = []
    for sentence in _with_ends(_SENTENCES, message):
        body, end = sentence
        # Advice is in the command's words, and what it calls otherwise is nowhere called as a run does.
        body = _renamed(body, names, own, advised(body, options) | _names(body, names))
        if _ADVISES.search(body):
            body = _possible(body, lacking)
        if body.strip():
            kept.append(body + end)
    return "".join(kept).strip() or message


def advised(text: str, options: Collection[str]) -> set[str]:
    """The options of a run that a text of advice names."""
    return _names(text, options) if _ADVISES.search(text) else set()


def _names(text: str, options: Collection[str]) -> set[str]:
    words = re.findall(r"(--)?\b([a-z][a-z0-9]*(?:_[a-z0-9]+)*)\b(=?)", text)
    return {name for dashes, name, value in words if name in options and (dashes or value or "_" in name)}


def _renamed(text: str, names: Mapping[str, str], own: Collection[str], found: Collection[str]) -> str:
    """The text with the command's own names, dashes included, in place of the `found` options that it has."""
    for name in found:
        called = names.get(name, name)
        if f"--{called}" in own:
            text = re.sub(rf"(?<![\w-])(?:--)?{name}=", f"--{called} ", text)
            text = re.sub(rf"(?<![\w-])(?:--)?{name}\b", f"--{called}", text)
    return text


def _possible(sentence: str, lacking: Collection[str]) -> str:
    """The sentence without the alternatives that the command has no options for; empty if it has none."""
    if not advised(sentence, lacking):
        return sentence
    parts = _ALTERNATIVES.split(sentence)
    left = [part for part in parts[::2] if len(part.split()) > 1 and not _names(part, lacking)]
    if not left:  # what comes before the advice stays
        stated = re.split(r"[:;,] (?=[^:;,]*\b(?:set|lower|raise|give|pass)\b)", sentence, maxsplit=1)[0]
        is_fact = stated != sentence and not _ADVISES.search(stated)
        return stated + "." if is_fact else ""
    text = " or ".join(part.strip().rstrip(",") for part in left).strip()
    text = text[0].upper() + text[1:]
    return text if text.endswith((".", ":", ";")) else text + "."


def _with_ends(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    """Pieces of a text between matches of the pattern, each with the match that follows it."""
    pieces, start = [], 0
    for match in pattern.finditer(text):
        pieces.append((text[start : match.start()], match.group()))
        start = match.end()
    return [*pieces, (text[start:], "")]
