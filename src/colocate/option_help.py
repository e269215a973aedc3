"""What `colocate train --help` says of every option.

Names, defaults and docstrings are read from the source of the two classes: importing these would load torch.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_WIDTH, _INDENT = 110, " " * 8
_CLASSES = {"run_config.py": "RunConfig", "config.py": "GRPOConfig"}
_FIRST_HEADING = {"RunConfig": "What to train on what"}
_REFUSED = "Accepted so that existing scripts run"
"""Heading of the options that are not listed: `options.py` answers for these."""
_HEADING = re.compile(r" *# ── (.+?) ─+$")


class _Option(NamedTuple):
    name: str
    default: str
    text: str
    heading: str


def option_help() -> str:
    """All options by the sections that the classes divide theirs into."""
    lines, heading = [], None
    for file, class_name in _CLASSES.items():
        for option in _options_of(Path(__file__).with_name(file).read_text(), class_name):
            if option.heading.startswith(_REFUSED):
                continue
            if option.heading != heading:
                heading = option.heading
                lines += ["", f"{heading}:"]
            shown = "" if option.default == "None" else f" (default: {option.default})"
            lines.append(f"  --{option.name}{shown}")
            text = " ".join(option.text.split())
            lines += textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    lines += ["", "Further: every option of transformers.TrainingArguments that is not refused by name."]
    return "\n".join(lines).lstrip("\n")


def _options_of(source: str, class_name: str) -> Iterator[_Option]:
    source_lines = source.splitlines()
    definition = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    heading, last_line = _FIRST_HEADING.get(class_name, ""), definition.lineno
    for node, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        for line in source_lines[last_line : node.lineno]:
            if match := _HEADING.match(line):
                heading = match[1]
        last_line = node.lineno
        if not isinstance(node, ast.AnnAssign) or node.value is None:
            continue
        is_documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        text = str(following.value.value) if is_documented else ""  # type: ignore[union-attr]
        yield _Option(ast.unparse(node.target), _default(node.value), text, heading)


def _default(value: ast.expr) -> str:
    """As one would write it on the command line; of `field(default_factory=list)` an empty one."""
    if isinstance(value, ast.Call):
        return "None"
    return str(ast.literal_eval(value))
