"""The house as CONTRIBUTING.md draws it: rows of rooms, no circles, short functions, whole sentences."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "colocate"
LONGEST_FUNCTION = 60
KERNEL_ROOMS = ("kernels/",)
"""A kernel's body and its launcher are as long as their arguments are many."""


def modules() -> dict[str, Path]:
    """Every file of the package by its path below it: "engines/base.py"."""
    return {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path: Path) -> set[str]:
    """The package's files that a file imports anywhere, also lazily and for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            place = f"{name.removeprefix('colocate.').replace('.', '/')}.py"
            if name.startswith("colocate.") and (PACKAGE / place).is_file():
                found.add(place)
    return found


def rows() -> list[list[str]]:
    """The table's rows from the top: names of rooms ("engines/") and of files ("config.py")."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Where things are")[2].partition("\n\n**")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [re.findall(r"`([\w/.]+)`", cell) for cell in cells]


def row_of(module: str) -> int:
    """The row that a file is in, by its own name or its room's."""
    places = [
        number
        for number, names in enumerate(rows())
        if module in names or f"{module.partition('/')[0]}/" in names
    ]
    assert len(places) == 1, f"{module} is in {len(places)} rows of CONTRIBUTING.md's table"
    return places[0]


def test_every_file_is_in_one_row_and_every_name_in_the_table_exists():
    for module in modules():
        row_of(module)
    for names in rows():
        for name in names:
            assert (PACKAGE / name).exists(), f"CONTRIBUTING.md names {name}, which there is not"


def test_a_file_imports_only_from_its_own_row_or_below():
    upward = [
        f"{module} imports {imported}"
        for module, path in modules().items()
        for imported in imports_of(path)
        if row_of(imported) < row_of(module)
    ]
    assert upward == []


def test_no_circle_of_files_even_by_lazy_imports():
    graph = {module: imports_of(path) for module, path in modules().items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_no_function_is_longer_than_a_screen_but_kernels_and_their_launchers():
    long = [
        f"{module}: {name} has {length} lines"
        for module, path in modules().items()
        if not module.startswith(KERNEL_ROOMS)
        for name, length in functions(path)
        if length > LONGEST_FUNCTION
    ]
    assert long == []


@pytest.mark.parametrize(("file", "most"), [("loop.py", 160), ("trainer.py", 300)])
def test_what_is_read_first_is_short(file, most):
    assert len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) <= most


def test_no_two_files_of_the_tests_share_a_name():
    """Without packages, pytest imports a test file by its bare name: the second of two would be the first."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those below attributes too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text.strip()


def test_docstrings_name_their_subjects():
    fragment = re.compile(r"^(Of|Likewise|The same|Those|Whose)\b|\b[Ll]ikewise\b")
    found = [
        f"{module}:{line}: {text.splitlines()[0]}"
        for module, path in modules().items()
        for line, text in docstrings(path)
        if fragment.search(text)
    ]
    assert found == []


def recipe(title: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition(f"**A new {title}**")[2].partition("\n\n")[0]


@pytest.mark.parametrize(
    "title",
    ["rollout engine", "loss", "advantage", "option", "metric", "family of models", "text environment"],
)
def test_files_that_a_recipe_names_are_there(title):
    paths = re.findall(r"`([\w/]+(?:\.py|/))`", recipe(title))
    assert paths
    for path in paths:
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("title", "example"),
    [
        ("rollout engine", "TransformersEngine"),
        ("loss", "luspo"),
        ("advantage", "normalize_then_sum"),
        ("family of models", "Phi3ForCausalLM"),
        ("text environment", "TextArenaEnvironment"),
    ],
)
def test_a_recipe_names_every_file_of_an_example(title, example):
    """What was added by the recipe is named in no other file of the package."""
    named = re.findall(r"`([\w/]+(?:\.py|/))`", recipe(title))
    for module, path in modules().items():
        if re.search(rf"\b{example}\b", path.read_text(encoding="utf-8")):
            assert any(module == name or module.startswith(name) for name in named), module
