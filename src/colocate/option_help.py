"""What `colocate train --help` says of every option.

Names, defaults, choices and docstrings are read from the source of the classes: importing them would load
torch.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_WIDTH, _INDENT = 110, " " * 8
_CLASSES = {
    "RunConfig": "run_config.py",
    "GRPOConfig": "config.py",
    "AdvantageOptions": "algorithms/advantages.py",
    "ObjectiveParams": "algorithms/objective_params.py",
    "LossOptions": "algorithms/losses.py",
}
"""In the order of inheritance: in a section, the options of a base class come first."""
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
    sections: dict[str, list[_Option]] = {}
    for class_name, file in _CLASSES.items():
        options = list(_options_of((Path(__file__).parent / file).read_text(), class_name))
        for heading in dict.fromkeys(option.heading for option in options):
            own = [option for option in options if option.heading == heading]
            sections[heading] = own + sections.get(heading, [])
    lines = []
    for heading, options in sections.items():
        if heading.startswith(_REFUSED):
            continue
        lines += ["", f"{heading}:"]
        for option in options:
            shown = "" if option.default == "None" else f" (default: {option.default})"
            lines.append(f"  --{option.name}{shown}")
            text = " ".join(option.text.split())
            lines += textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    lines += ["", "Further: every option of transformers.TrainingArguments that is not refused by name."]
    return "\n".join(lines).lstrip("\n")


def _options_of(source: str, class_name: str) -> Iterator[_Option]:
    source_lines = source.splitlines()
    module = ast.parse(source)
    definition = next(
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name == class_name
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
        if table := re.search(r"OneOf\((\w+)\)", ast.unparse(node.annotation)):
            text = f"{text} One of {', '.join(_names_of(table[1], module))}."
        yield _Option(ast.unparse(node.target), _default(node.value), text, heading)


def _names_of(table: str, module: ast.Module) -> list[str]:
    """The keys of a dictionary or the members of a tuple, in a source or where that imports them from."""
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and table in (alias.name for alias in node.names):
            file = Path(__file__).parents[1] / f"{str(node.module).replace('.', '/')}.py"
            return _names_of(table, ast.parse(file.read_text()))
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, (ast.Dict, ast.Tuple)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            members = node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts
            if [ast.unparse(target) for target in targets] == [table]:
                return [ast.literal_eval(member) for member in members if member is not None]
    raise LookupError(f"no table {table}")


def _default(value: ast.expr) -> str:
    """As one would write it on the command line; of `field(default_factory=list)` an empty one."""
    if isinstance(value, ast.Call):
        return "None"
    return str(ast.literal_eval(value))
