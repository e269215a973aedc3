"""What of the project is Ray's: which modules import it, how long the launcher is, and that all is public."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "colocate"
LAUNCHER = SOURCE / "clusters"
LOOPBACK_SWITCH = "ray._private.ray_constants"
"""Ray has no public one that keeps the ports of a cluster of one machine from others."""
MOST_LINES = 900
"""Of the launcher, that is of all modules of the package, those without Ray, too. Not counted is what needs
no Ray and is beside it: `parallel/ray_cluster.py` and `slices.py`."""
ADAPTER = ROOT / "distributions/trtllm/src/colocate_trtllm/ray_server.py"
"""TensorRT-LLM's server is an actor beside a rank."""


def ray_names(path: Path) -> set[str]:
    """The names of Ray that a module uses, whole, such as ray.util.get_placement_group."""
    names: set[str] = set()
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if re.search(r"(import|from) ray\b", text) else ():
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names if each.name.split(".")[0] == "ray"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            names |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith("ray.") and dotted.replace(".", "").isidentifier():  # no call in between
                names.add(dotted)
    return names


@functools.cache
def of_ray() -> dict[str, set[str]]:
    """The modules that import Ray, with the names that they use."""
    files = [*sorted(SOURCE.rglob("*.py")), *ADAPTER.parent.glob("*.py")]
    found = {str(path.relative_to(ROOT)): ray_names(path) for path in files}
    return {path: names for path, names in found.items() if names}


def test_only_the_launcher_and_one_adapter_import_ray():
    names = ("actor", "cluster", "process", "replica", "start")
    modules = [f"src/colocate/clusters/{name}.py" for name in names]
    assert list(of_ray()) == [*modules, str(ADAPTER.relative_to(ROOT))]


def test_the_launcher_is_short():
    lines = {path.name: len(path.read_text().splitlines()) for path in LAUNCHER.rglob("*.py")}
    assert sum(lines.values()) < MOST_LINES, lines


def test_every_name_of_ray_is_public():
    names = set().union(*of_ray().values())
    assert {"ray.init", "ray.util.placement_group.placement_group", "ray.get_runtime_context"} <= names
    for name in names - {LOOPBACK_SWITCH}:
        parts = name.split(".")
        assert not any(part.startswith("_") for part in parts) and "internal" not in name, name


def resolved(name: str) -> Any:
    """What has this name; where a module and a function of one package have one, the module."""
    module, thing = "ray", importlib.import_module("ray")
    for part in name.split(".")[1:]:
        module = f"{module}.{part}"
        try:
            thing = importlib.import_module(module)
        except ModuleNotFoundError:
            thing = getattr(thing, part)
    return thing


def test_ray_itself_has_marked_them_public():
    """Ray marks what is public, for developers, or deprecated; what is not marked is in its reference."""
    pytest.importorskip("ray")
    for name in sorted(set().union(*of_ray().values())):
        thing = resolved(name)
        if not inspect.ismodule(thing):
            mark = getattr(thing, "_annotated_type", None)
            assert mark is None or mark.name in ("PUBLIC_API", "DEVELOPER_API"), (name, mark)


def test_the_private_is_found(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("import ray\nfrom ray._private.services import x\n\ndef f():\n    ray._raylet.y()\n")
    assert ray_names(module) == {"ray", "ray._private.services.x", "ray._raylet", "ray._raylet.y"}
