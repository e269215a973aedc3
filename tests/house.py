"""The package as rooms on floors: each folder and each file of the root stands above all that it imports.

`python -m tests.house` draws the map in CONTRIBUTING.md anew.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "colocate"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
_MAP = re.compile(r"(?<=<!-- map -->\n)```text\n.*?```", re.DOTALL)


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


def room_of(module: str) -> str:
    """The room of a file: its folder ("engines/"), or the file itself at the root."""
    folder, is_inside, _ = module.partition("/")
    return f"{folder}/" if is_inside else module


@cache
def arrows() -> dict[str, set[str]]:
    """To each room those that it imports from."""
    found: dict[str, set[str]] = {room_of(module): set() for module in modules()}
    for module, path in modules().items():
        room = room_of(module)
        found[room] |= {room_of(imported) for imported in imports_of(path)} - {room}
    return found


def circle() -> list[str]:
    """Rooms that import each other in a circle; none if there is no such."""
    left = dict(arrows())
    while free := [room for room, imported in left.items() if not imported & left.keys()]:
        for room in free:
            del left[room]
    return sorted(left)


def floors() -> list[list[str]]:
    """The rooms floor by floor, from the ground, each right above the highest that it imports from."""
    if circle():
        raise ValueError(f"circle of rooms: {circle()}")
    height: dict[str, int] = {}

    def above(room: str) -> int:
        if room not in height:
            height[room] = 1 + max((above(imported) for imported in arrows()[room]), default=-1)
        return height[room]

    for room in arrows():
        above(room)
    return [
        sorted(room for room, floor in height.items() if floor == number)
        for number in range(max(height.values()) + 1)
    ]


def picture() -> str:
    """The map: a line for each room, from the top floor to the ground, with its first sentence."""
    lines = []
    for number, rooms in reversed(list(enumerate(floors(), 1))):
        for room in rooms:
            path = PACKAGE / (f"{room}__init__.py" if room.endswith("/") else room)
            text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
            first = re.split(r"(?<=\.) ", text.replace("\n", " "))[0]
            lines.append(f"{number if room == rooms[0] else '':>2}  {room:<16} {first}".rstrip())
    return "```text\n" + "\n".join(lines) + "\n```"


def drawn() -> str:
    """The map that CONTRIBUTING.md has."""
    found = _MAP.search(CONTRIBUTING.read_text(encoding="utf-8"))
    return found[0] if found else ""


def draw() -> None:
    """Write the map into CONTRIBUTING.md."""
    text = CONTRIBUTING.read_text(encoding="utf-8")
    CONTRIBUTING.write_text(_MAP.sub(lambda _: picture(), text), encoding="utf-8")


if __name__ == "__main__":
    draw()
