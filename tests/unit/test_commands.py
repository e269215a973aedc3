"""Commands for benchmarks in pages, Makefile and docstrings: each is there and has its options."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {path: path.read_text() for path in sorted((ROOT / "benchmarks").rglob("*.py"))}
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")] + sorted(
    (ROOT / "docs").glob("*.md")
)
TEXTS = {path: path.read_text() for path in PAGES} | SOURCES
COMMANDS = re.findall(r"-m benchmarks\.([\w.]+)(.*(?:\n        .*)*)", "\n".join(TEXTS.values()))
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path, text in SOURCES.items()
    if '__name__ == "__main__"' in text and path.name != "device_watch.py"  # which DeviceWatch starts
)


def shown_help(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("module", MODULES)
def test_every_benchmark_explains_the_options_that_its_commands_have(module, monkeypatch, capsys) -> None:
    pytest.importorskip("triton")
    shown = shown_help(module, monkeypatch, capsys)
    named = {
        word.split("=")[0].rstrip("],.")
        for command, words in COMMANDS
        if f"benchmarks.{command}" == module
        for word in shlex.split(words.replace("[", " "), comments=True)
        if word.startswith("--")
    }
    assert not named - set(re.findall(r"--[\w-]+", shown))


def test_every_benchmark_that_a_text_names_is_there() -> None:
    for path, text in TEXTS.items():
        for file in re.findall(r"benchmarks/[\w/]+\.(?:py|json)\b", text):
            assert (ROOT / file).exists(), f"{path.name} names {file}"
    assert {f"benchmarks.{command}" for command, _ in COMMANDS} <= set(MODULES)


def test_every_target_of_make_that_a_text_names_is_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = re.compile(r"(?:^|`|timed \"[\w-]+\" )make ([a-z-]+)(?=`|\s|$)", flags=re.MULTILINE)
    texts = [*(path.read_text() for path in PAGES), (ROOT / ".ci/run").read_text()]
    named = {name for text in texts for name in commands.findall(text)}
    assert {"quickstart", "lint", "test", "gpu-test", "docs", "vllm-test"} <= named <= targets


def test_every_result_has_a_benchmark_that_writes_it() -> None:
    names = {json.loads(path.read_text())["name"] for path in (ROOT / "benchmarks/results").glob("*.json")}
    written = "\n".join(SOURCES.values())
    # The probe's question is answered; its result names the commit that has the program.
    assert {name for name in names if f'"{name}"' not in written} == {"sharding-probe"}


def test_commands_of_results_name_no_folder_of_one_machine() -> None:
    """Records and models lie where anybody may put them; the temporary directory is everybody's."""
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        words = json.loads(path.read_text())["command"].split()
        assert [w for w in words if w.startswith(("/", "~")) and not w.startswith("/tmp/")] == [], path
