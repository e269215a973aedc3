"""Reads and writes the YAML of run files and command lines.

Plain scalars are those of YAML 1.2, and a text that could mean two things is refused.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

MAX_VALUES = 100_000
"""The most scalars, lists and mappings in one text, where an alias counts as all that it stands for."""


class YAMLTextError(yaml.YAMLError):
    """The text is valid YAML, but it is refused here."""


class _Loader(yaml.SafeLoader):
    """A loader of YAML 1.2's scalars: PyYAML's own are those of YAML 1.1, where `2e-6` is a string, `no` is
    False and `010` is eight."""

    def get_single_node(self) -> Node | None:
        node = super().get_single_node()
        if node is not None and _num_values(node, {}) > MAX_VALUES:
            raise YAMLTextError(f"its aliases (*name) stand for more than {MAX_VALUES:,} values; write fewer")
        return node

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        # Before merge keys (<<) are resolved: those are there to be overridden.
        if isinstance(node, MappingNode):
            _refuse_double_keys(node)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: ScalarNode) -> Any:
        text = self.construct_scalar(node)
        try:
            return int(text, 0 if text[:2] in ("0x", "0o") else 10)
        except ValueError:  # thousands of digits: whoever knows the option's name refuses them
            return text


class _Dumper(yaml.SafeDumper):
    """A dumper that puts a string into quotes if `_Loader` would otherwise not read it back as a string."""


_INT, _FLOAT, _BOOL = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool"))
_SCALARS = (
    (_BOOL, r"^(?:true|false)$", "tTfF"),
    (_INT, r"^[-+]?\d+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$", "-+0123456789"),
    # One with a point, an exponent or both: a number without them is an integer.
    (
        _FLOAT,
        r"^[-+]?(?:\.\d+|\d+\.\d*)(?:[eE][-+]?\d+)?$|^[-+]?\d+[eE][-+]?\d+$|^[-+]?\.inf$|^\.nan$",
        "-+0123456789.",
    ),
)
_Loader.add_constructor(_INT, _Loader.construct_yaml_int)
for _class, _dropped in ((_Loader, ("tag:yaml.org,2002:timestamp",)), (_Dumper, ())):
    _replaced = {*_dropped, _INT, _FLOAT, _BOOL}
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _replaced]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for _tag, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(_tag, re.compile(_pattern, re.IGNORECASE), list(_first))


def read_yaml(text: str) -> Any:
    """The value that a YAML text stands for.

    Raises:
        ValueError: the text is not YAML, a mapping in it has a key twice (PyYAML would take the last), or its
            aliases stand for more than `MAX_VALUES` values or for themselves.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise ValueError("its lists or mappings are nested too deeply") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def write_yaml(values: Any) -> str:
    """The YAML text that `read_yaml` reads as `values`, with the keys in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def _num_values(node: Node, known: dict[int, int | None]) -> int:
    """How many values there are if each alias is replaced by what it stands for: ten levels of lists of ten
    aliases are 10¹⁰ values."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise YAMLTextError(f"the alias in line {node.start_mark.line + 1} stands for itself")
        return size
    known[id(node)] = None
    children = [] if isinstance(node, ScalarNode) else node.value
    if isinstance(node, MappingNode):
        children = [child for pair in children for child in pair]
    size = 1 + sum(_num_values(child, known) for child in children)
    known[id(node)] = size
    return size


def _refuse_double_keys(node: MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        line, first = key.start_mark.line + 1, lines.get((key.tag, key.value))
        if first is not None:
            raise YAMLTextError(f"{key.value!r:.100} is given twice, in line {first} and in line {line}")
        lines[key.tag, key.value] = line
