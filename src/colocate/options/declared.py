"""The options that the classes of a run declare, read from the text of their sources.

Importing these classes would load torch, which takes seconds. Read as text, `colocate train --help` can list
the options, and a misspelt name or a wrong value is refused, in a few tenths of a second.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from colocate.options.values import nearest, shown

FIRST_HEADING = {"RunConfig": "What to train on what"}
_HEADING = re.compile(r" *# ── (.+?) ─+$")
_PACKAGE = Path(__file__).parents[1]
_DEFINED_IN = {"transformers": "transformers.training_args"}
"""The module that defines what a package imports from it and hands on."""
_LIGHT = (
    *("typing", "colocate.options.requirements", "colocate.engines.registry"),
    "colocate.engines.plugged_in",
)
"""Modules that declarations use and that are imported, since that takes no time."""
_ROOTS = {"RunConfig": _PACKAGE / "config/run_config.py", "GRPOConfig": _PACKAGE / "config/grpo_config.py"}


class Option(NamedTuple):
    """A field of a class that declares options; `default` and `annotation` are its source text."""

    name: str
    default: str
    text: str
    heading: str
    annotation: str


@functools.cache
def classes() -> dict[str, Path]:
    """The file of each class of this package that declares options of a run, a class before its bases."""
    found: dict[str, Path] = {}

    def add(class_name: str, file: Path) -> None:
        found.pop(class_name, None)
        found[class_name] = file
        for base_file, base_name in _bases(_parsed(file), file, class_name):
            if base_name != "TrainingArguments":
                add(base_name, base_file)

    for class_name, file in _ROOTS.items():
        add(class_name, file)
    return found


def options_of(class_name: str) -> Iterator[Option]:
    """The options that one of `classes()` declares itself, in order, each with the heading above it."""
    source_lines = classes()[class_name].read_text(encoding="utf-8").splitlines()
    module = _parsed(classes()[class_name])
    definition = _definition(module, class_name)
    heading, last_line = FIRST_HEADING.get(class_name, ""), definition.lineno
    for node, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        for line in source_lines[last_line : node.lineno]:
            if match := _HEADING.match(line):
                heading = match[1]
        last_line = node.lineno
        if not isinstance(node, ast.AnnAssign) or node.value is None:
            continue
        is_documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        text = str(following.value.value) if is_documented else ""  # type: ignore[union-attr]
        annotation = ast.unparse(node.annotation)
        if table := re.search(r"OneOf\((\w+)\)", annotation):
            text = f"{text} One of {', '.join(map(str, _Names(module)[table[1]]))}."
        yield Option(ast.unparse(node.target), _default(node.value), text, heading, annotation)


class _Names(dict[str, Any]):
    """The names of a module, each evaluated from the module's source when it is asked for.

    A name that stands for a dictionary has the dictionary's keys. Names that are neither assigned in a module
    of this package nor imported from one of `_LIGHT` are not there.
    """

    def __init__(self, module: ast.Module) -> None:
        super().__init__()
        self._body = module.body

    def __missing__(self, name: str) -> Any:
        for node in self._body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return _imported(node.module, alias.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if [ast.unparse(target) for target in targets] == [name]:
                    return self.evaluated(node.value)
        raise KeyError(name)

    def evaluated(self, expression: ast.expr) -> Any:
        """The value of an expression of the module.

        Raises:
            NameError: it has a name that is not there.
        """
        if isinstance(expression, ast.Dict):
            keys = [key for key in expression.keys if key is not None]
            expression = ast.copy_location(ast.Tuple(keys, ast.Load()), expression)
        return eval(compile(ast.Expression(expression), "<an option's declaration>", "eval"), {}, self)


def _imported(module: str, name: str) -> Any:
    if module in _LIGHT:
        return getattr(importlib.import_module(module), name)
    if not module.startswith("colocate."):
        raise KeyError(name)
    return _Names(_parsed(_file_of(module)))[name]


_OFTEN_MEANT = {
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "dataset": "dataset_name",
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "reward": "reward_funcs",
    "lora": "use_peft",
    "output": "output_dir",
}
"""Names that other programs have for an option, where those are spelled like another one of ours."""


def check_names(values: Mapping[str, object]) -> None:
    """Refuse a name that no option has, and an option without the value that it needs.

    Raises:
        ValueError: the message has the nearest name, or says that a value is missing.
    """
    types = _types()
    for name, value in values.items():
        if name not in types:
            if name == "config":
                raise ValueError(
                    "There is no option 'config': a run file stands alone, colocate train RUN.yaml"
                )
            meant = _OFTEN_MEANT.get(name)
            hint = f"; did you mean {meant!r}?" if meant else nearest(name, types) or "."
            raise ValueError(f"There is no option {shown(name)}{hint}")
        # An option without a value on the command line arrives as True, which only a switch can be.
        if value is True and not re.search(r"\b(bool|Any)\b", types[name]):
            raise ValueError(f"{name} needs a value: --{name} VALUE. {name}=True is not one of its values.")


@functools.cache
def declared_types() -> dict[str, Any]:
    """The type of every option, with its requirement if it has one, by name.

    Options whose type is a class of transformers' are left out.
    """
    found = {}
    for name, (annotation, module) in _declarations().items():
        try:
            found[name] = _Names(module).evaluated(annotation)
        except (NameError, TypeError):  # TypeError: a class that is named in quotes, in a union
            continue
    return found


@functools.cache
def declared_defaults() -> dict[str, Any]:
    """The default of every option that is written as a plain value, inherited ones included, by name."""
    found = {}
    for name, (_, module) in _declarations().items():
        value = _defaults_of(module).get(name)
        if isinstance(value, ast.Call):  # dataclasses.field(default=...)
            value = next((word.value for word in value.keywords if word.arg == "default"), None)
        with suppress(ValueError, TypeError):
            found[name] = ast.literal_eval(value)  # type: ignore[arg-type]
    return found


def _defaults_of(module: ast.Module) -> dict[str, ast.expr]:
    """The defaults that the classes of a module declare, by the names of fields."""
    declaring = (*classes(), "TrainingArguments")
    found = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name in declaring]
    return {
        node.target.id: node.value
        for definition in found
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }


def option_names() -> frozenset[str]:
    """The names of all options of a run. Imports nothing slow."""
    return frozenset(_declarations())


def _types() -> dict[str, str]:
    """The annotation of every option, inherited ones included, by name."""
    return {name: ast.unparse(annotation) for name, (annotation, _) in _declarations().items()}


@functools.cache
def _declarations() -> dict[str, tuple[ast.expr, ast.Module]]:
    """Each option's annotation, inherited ones included, and the module that it is in."""
    return {
        name: declaration
        for class_name, file in _ROOTS.items()
        for name, declaration in _fields(file, class_name).items()
    }


def _fields(file: Path, class_name: str) -> dict[str, tuple[ast.expr, ast.Module]]:
    """The annotations of a class's fields and of those that it inherits."""
    module = _parsed(file)
    found: dict[str, tuple[ast.expr, ast.Module]] = {}
    for base_file, base_name in reversed(_bases(module, file, class_name)):
        found |= _fields(base_file, base_name)
    for node in _definition(module, class_name).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = (node.annotation, module)
    return found


def _bases(module: ast.Module, file: Path, class_name: str) -> list[tuple[Path, str]]:
    """The file of each base class, and its name there."""
    sources = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in module.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    found = []
    for base in _definition(module, class_name).bases:
        if isinstance(base, ast.Name):
            imported_from, name = sources.get(base.id, (None, base.id))
            if imported_from in _LIGHT:  # a class that is made as it is imported
                made = getattr(importlib.import_module(imported_from), name)
                found += [(Path(inspect.getfile(each)), each.__name__) for each in made.__bases__]
                continue
            found.append((_file_of(imported_from) if imported_from else file, name))
    return found


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _file_of(module: str) -> Path:
    """The source file of a module, found without importing the module."""
    package, *inner = _DEFINED_IN.get(module, module).split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} is not installed: pip install {package}")
    return Path(spec.submodule_search_locations[0], *inner).with_suffix(".py")


def _definition(module: ast.Module, class_name: str) -> ast.ClassDef:
    return next(n for n in module.body if isinstance(n, ast.ClassDef) and n.name == class_name)


def _default(value: ast.expr) -> str:
    """The default as it is written on a command line; "None" for one that a call makes (an empty list)."""
    if isinstance(value, ast.Call):
        return "None"
    return str(ast.literal_eval(value))
