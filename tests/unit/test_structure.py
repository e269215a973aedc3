"""The house as CONTRIBUTING.md draws it: a map of rooms, no circles, short functions, whole sentences."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import PACKAGE, ROOT, circle, drawn, imports_of, modules, picture

LONGEST_FUNCTION = 60
KERNEL_ROOMS = ("kernels/",)
"""A kernel's body and its launcher are as long as their arguments are many."""
ROOT_FILES = 8


def test_no_rooms_import_each_other_in_a_circle():
    assert circle() == []


def test_the_map_of_rooms_is_drawn_from_the_imports():
    assert drawn() == picture(), "python -m tests.house draws it anew"
    assert all(line[20:].strip() for line in drawn().splitlines()[1:-1]), (
        "a room says in a sentence what it is"
    )


def test_the_root_has_only_what_a_reader_starts_with():
    assert len([module for module in modules() if "/" not in module]) <= ROOT_FILES


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


def test_an_engine_that_is_a_distribution_is_named_only_where_it_says_what_to_install():
    """The package knows of it what its entry point tells, so that another's engine can do the same."""
    named = re.compile(r"trtllm|tensorrt|trt-llm", re.IGNORECASE)
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js")]
    found = [path for path in files if named.search(path.name + path.read_text(encoding="utf-8"))]
    assert found == [PACKAGE / "options" / "distributions.py"]


@pytest.mark.parametrize(("file", "most"), [("loop.py", 160), ("trainer.py", 300)])
def test_what_is_read_first_is_short(file, most):
    assert len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) <= most


def test_no_two_files_of_the_tests_share_a_name():
    """Without packages, pytest imports a test file by its bare name: the second of two would be the first."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


SHARED_NAMES = {
    "Group": "the completions of a prompt: as the engine draws them, and as they are rewarded",
    "Projection": "a matrix product: of the engine's, and of the policy's with its gradient",
    "Rollout": "a generation batch: under way in the engine, and scored",
}
"""Classes that two rooms have under one name, with the reason; at most eight."""


def test_classes_have_names_of_their_own():
    counts = Counter(
        node.name.lstrip("_")
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in counts.items() if count > 1} <= SHARED_NAMES.keys()
    assert len(SHARED_NAMES) <= 8 and max(counts.values()) <= 2


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
    fragment = re.compile(
        r"^(Likewise|The same|Those|Whose|What|Who|Its|It|That|None:|See|While|Since|"
        r"Of|In|By|To|For|With|Within|Without|At|On|As|Between|Among|Behind|Before|After|Over|Under|Up to|"
        r"Beside|Besides|Per|Through|During|Into|Against)\b|\b[Ll]ikewise\b"
    )
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
    [
        "rollout engine",
        "loss",
        "advantage",
        "option",
        "metric",
        "reward",
        "subcommand",
        "family of models",
        "text environment",
    ],
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
        ("metric", "policy_loss"),
        ("reward", "reasoning_accuracy_reward"),
        ("subcommand", "commands import .*export"),
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
