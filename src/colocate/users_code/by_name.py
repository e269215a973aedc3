"""Users' functions by name, a dotted path or `file.py:function`, for the command line and run files."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from colocate.users_code.exits import LoudExits, place_of_exit


def get_tool(name: str) -> Callable:
    """Find a tool or the class of an environment by a dotted path or `"path/to/file.py:function"`.

    Raises:
        ValueError, FileNotFoundError: as `import_function` does.
    """
    if "." not in name:
        raise ValueError(
            f"Unknown tool or environment {name!r}: tools and environments are given as "
            "package.module.function or path/to/file.py:function."
        )
    return import_function(name, "tool or environment")


def import_function(name: str, kind: str, known: Iterable[str] = ()) -> Callable:
    """Import a function by a dotted path, from the working directory too, or `path/to/file.py:function`.

    Args:
        kind: the word for its role, for errors.
        known: names without a module that may have been meant.

    Raises:
        ValueError: there is no such module or function, or what has the name cannot be called.
        FileNotFoundError: there is no such file.
    """
    if name.endswith((".py", ".py:")):
        file = name.removesuffix(":")
        raise ValueError(
            f"{name!r} names no {kind}, only a file: write {file}:NAME, with the name in that file."
        )
    if ".py:" in name:
        path, _, attribute = name.rpartition(":")
        module = _import_file(Path(path).expanduser())
    else:
        path, _, attribute = name.rpartition(".")
        module = _import_module(path, name, kind, known)
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    function = getattr(module, attribute, None)
    if not callable(function):
        problem = "has no function" if function is None else "has, but cannot call,"
        own = [key for key in functions if getattr(vars(module)[key], "__module__", None) == module.__name__]
        hint = did_you_mean(attribute, functions) or (f" It has {', '.join(own[:20])}." if own else "")
        raise ValueError(f"{path!r} {problem} {attribute!r}.{hint}")
    return function


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the known names nearest to one that is unknown, or nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=3)
    return f" Did you mean {', '.join(map(repr, nearest))}?" if nearest else ""


def _import_module(path: str, name: str, kind: str, known: Iterable[str]) -> ModuleType:
    if (
        os.getcwd() not in sys.path
    ):  # a console script, unlike `python -m`, does not search the working directory
        sys.path.insert(0, os.getcwd())
    try:
        with LoudExits():
            return importlib.import_module(path)
    except SystemExit as error:
        raise ValueError(_calls_exit(path, error)) from error
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            raise  # the module exists, but something that it imports does not
        raise ValueError(
            f"Unknown {kind} {name!r}: there is no module {error.name!r}."
            f"{did_you_mean(name.rpartition('.')[2], known)} A file is given as path/to/file.py:function."
        ) from error


def _import_file(path: Path) -> ModuleType:
    """The module in a file, as a neighbour of the file would import it.

    Its directory stays on Python's path, behind all others: the file may import its neighbours while a
    function of it runs, and a process that is spawned finds the function by the module's name.
    """
    if not path.is_file():
        siblings = [str(file) for file in path.parent.glob("*.py")]
        raise FileNotFoundError(f"No file {str(path)!r}.{did_you_mean(str(path), siblings)}")
    file = path.resolve()
    module_name = _module_name(file)
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # pickling a function looks its module up by name
    directory = str(file.parent)
    sys.path.insert(0, directory)  # the file may import its neighbours, as it may when Python runs it
    try:
        with LoudExits():
            spec.loader.exec_module(module)
    except SystemExit as error:
        del sys.modules[module_name]
        raise ValueError(_calls_exit(path, error)) from error
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(directory)
    if directory not in sys.path:
        sys.path.append(directory)
    return module


def _calls_exit(module: Path | str, error: SystemExit) -> str:
    """A message about a module that ends the process which imports it, with any status."""
    return (
        f"{module} calls exit() when it is imported, at {place_of_exit(error)}. Let it define functions, "
        'and put what is to run as a script under `if __name__ == "__main__":`.'
    )


def _module_name(file: Path) -> str:
    """The name under which a file is imported: its own, unless that is another module's. A file called
    json.py must not stand in for the real json."""
    own = file.stem
    if own in sys.modules:
        found = getattr(sys.modules[own], "__file__", None)
    else:
        spec = importlib.util.find_spec(own) if own.isidentifier() else None
        found = spec.origin if spec is not None else str(file)
    if own.isidentifier() and found is not None and Path(found).resolve() == file:
        return own
    # Without a dot: to unpickle a function, Python imports what stands before it as a package.
    return f"colocate_reward_file:{file}".replace(".", "_")
