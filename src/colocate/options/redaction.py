"""Keeps secrets out of files and messages: tokens, passwords and keys that are given as options.

Everything that is written or shown of a run's options (config.yaml, training_args.bin, run.json, the
trackers' copies, messages) goes through `redacted`. A secret becomes its name, `<HF_TOKEN>`, as in
transformers' `TrainingArguments.to_dict`; a run that is started from such a file is told which secret is
missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SECRETS = _names(
    """
    token password passwd passphrase passcode pwd secret secrets passwords credential credentials
    authorization cookie apikey
    """
)
_SECRET_KEYS = _names(
    "api secret access private server auth shared signing encryption ssh account service license"
)
"""Words before `_key` or `_keys` that make it a secret: `api_key` is one, `sort_key` is not."""
_TEXT_TOKENS = _names(
    """
    pad eos bos unk sep cls mask stop start end image video audio special next first last begin per new think
    """
)
"""Words before `_token` that make it a piece of text: `eos_token` is not a secret, `hf_token` is."""
_PLURALS = _names("api auth access bearer hf hub refresh session")

# Bounded, since an unbounded one takes a time quadratic in a text such as "a-a-a-...".
_NAME = r"(?P<name>(?<![\w.])[A-Za-z][\w.-]{0,80})"
_WORD = r"(?P<value>[^\s'\",;&#<>(){}\[\]]+)"
_URL_USER = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{0,30}:/{1,2})(?!/)[^/\s?#]*@")
_NAMED = [
    re.compile(pattern)
    for pattern in (
        rf"(?P<before>{_NAME}['\"]?\s*[=:]\s*b?)(?P<quote>['\"])(?P<value>(?:\\.|(?!(?P=quote))[^\\])+)(?P=quote)",
        rf"(?P<before>{_NAME}=){_WORD}",  # also in an address: ?name=value
        rf"(?P<before>[{{,]\s*{_NAME}\s*:\s*){_WORD}",  # YAML
        rf"(?P<before>--{_NAME}\s+)(?!-){_WORD}",
    )
]
"""Patterns of text that gives a value to a name, such as `name='value'`."""
_KNOWN_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})\b"
    r"|(?<=\bBearer )[A-Za-z0-9._~+/=-]{8,}"
)
_USER = "<USER>"
_ANY = "<REDACTED_SECRET>"
_PLACEHOLDER = re.compile(r"(?:^|[=:]\s*['\"]?)<([A-Z][A-Z0-9_-]*)>")


def is_secret(name: str) -> bool:
    """True if an option or key of this name holds a secret: `hf_token`, `apiKey`, `AWS_SECRET_ACCESS_KEY`."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", str(name))]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return before not in _TEXT_TOKENS
    if last in ("key", "keys"):
        return before in _SECRET_KEYS
    return last in _SECRETS or (last == "tokens" and before in _PLURALS)


def redacted(value: Any, name: str = "") -> Any:
    """`value` without the secrets in it, at any depth; the same object if there are none.

    Mappings, lists and tuples are searched for keys that `is_secret` knows; text for addresses with a user
    (`http://user:password@host`), for `name='value'` and `?name=value` with such a name, and for what tokens
    of well-known services look like. None and truth values, which say whether there is a secret, stay; so do
    numbers called `..._token`, which are token ids.

    Args:
        name: the name of the option that has this value.
    """
    if value is None or isinstance(value, bool) or (isinstance(value, str) and not value):
        return value
    if is_secret(name) and not (isinstance(value, int | float) and name.lower().endswith("token")):
        return _placeholder(name)
    if isinstance(value, str):
        text = _redacted_text(value)
        return value if text == value else text  # an enum's text stays one
    if isinstance(value, Mapping):
        items = {key: redacted(item, str(key)) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in items) else items
    if type(value) is list or type(value) is tuple:
        parts = type(value)(redacted(item) for item in value)
        return value if all(part is item for part, item in zip(parts, value, strict=True)) else parts
    return value


def check_complete(options: Mapping[str, Any]) -> None:
    """Refuse options that were read from a file in which secrets are left out.

    Raises:
        ValueError: a value holds what `redacted` puts in a secret's place; the message says where.
    """
    missing = {
        place: (name, text) for name, value in options.items() for place, text in _placeholders(value, name)
    }
    if missing:
        what = ", ".join(f"{place}={text!r}" for place, (_, text) in missing.items())
        flags = ", ".join(dict.fromkeys(f"--{name}" for name, _ in missing.values()))
        raise ValueError(
            f"{what}: that stands for a secret, which is never written to a file. Give it again (on the "
            f"command line with {flags}; a mapping as a whole), or remove it if this machine needs none."
        )


def _placeholders(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Each place in an option's value where a placeholder stands for a secret (`model_init_kwargs.token`),
    with the placeholder."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _placeholders(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _placeholders(item, f"{place}[{index}]")
    elif isinstance(value, str) and (
        any(is_secret(name) for name in _PLACEHOLDER.findall(value))
        or f"://{_USER}@" in value
        or _ANY in value
    ):
        yield place, value


def _placeholder(name: str) -> str:
    return "<" + re.sub(r"\W+", "_", name.rpartition(".")[2]).upper() + ">"


def _redacted_text(text: str) -> str:
    text = _URL_USER.sub(rf"\g<scheme>{_USER}@", text)
    for pattern in _NAMED:
        text = pattern.sub(_without_value, text)
    return _KNOWN_FORMS.sub(_ANY, text)


def _without_value(match: re.Match[str]) -> str:
    if not is_secret(match["name"]) or match["value"] in ("None", "True", "False", "null", "true", "false"):
        return match[0]
    quote = match.groupdict().get("quote") or ""
    return f"{match['before']}{quote}{_placeholder(match['name'])}{quote}"
