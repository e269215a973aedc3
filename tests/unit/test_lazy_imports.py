"""What a command or an import loads: modules are counted, since seconds depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from colocate import import_ahead
from tiny import make_model, make_tokenizer

HEAVY = {
    "accelerate", "bitsandbytes", "datasets", "matplotlib", "numpy", "pandas", "peft", "pyarrow", "ray",
    "rich", "tensorboard", "torch", "trackio", "transformers", "triton", "wandb",
}  # fmt: skip
"""Packages that take from a tenth of a second to seconds to import."""

NEVER = {"matplotlib", "ray", "tensorboard", "trackio", "trl", "vllm", "wandb"}
"""What no run loads that does not ask for it."""

OF_TRAINING = {"datasets", "pandas", "pyarrow", "colocate.build", "colocate.data", "colocate.loop"}
"""What a model in hand does not need."""


def loaded(program: str, *words: str, typed: str = "") -> list[set[str]]:
    """The modules that a new interpreter has loaded at each call of `note` in a program, and at its end,
    whatever its exit code."""
    note = "def note(): print(json.dumps(list(sys.modules)))\natexit.register(note)"
    command = [sys.executable, "-c", f"import atexit, json, sys\n{note}\n{program}", *words]
    done = subprocess.run(command, input=typed, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('["')]
    assert lines, done.stderr
    return [set(json.loads(line)) for line in lines]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A run that is reported on, with a wrong run file and a whole model beside it."""
    directory = tmp_path_factory.mktemp("runs")
    (directory / "wrong.yaml").write_text("learning_rat: 1e-6\n")
    (directory / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("words", "message", "allowed"),
    [
        ("--version", "", ()),
        ("train --help", "", ()),
        ("train wrong.yaml", "did you mean 'learning_rate'?", ()),
        ("train --max_steps 3", "model_name_or_path is not set", ()),
        ("plan wrong.yaml", "did you mean 'learning_rate'?", ()),
        ("plan --model_name_or_path ./nowhere", "There is no directory", ()),
        ("report .", "", ("numpy", "rich")),
        ("chat ./nowhere", "There is no directory", ()),
        ("eval ./nowhere", "There is no directory", ()),
        ("serve ./nowhere", "There is no directory", ()),
        ("merge model out", "is a whole model", ()),
        ("export ./nowhere out", "There is no directory", ()),
    ],
)
def test_what_needs_no_model_loads_no_library(words, message, allowed, directory):
    program = f"""import contextlib, io, os
from colocate.cli import main
os.chdir({str(directory)!r})
with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.suppress(SystemExit):
    main()
assert {message!r} in errors.getvalue(), errors.getvalue()
note()"""
    answered, _ = loaded(program, *words.split())  # one set alone: the message was another
    assert (HEAVY - set(allowed)).isdisjoint(answered)


def test_the_package_loads_no_library_until_a_name_is_asked_for():
    (found,) = loaded("import colocate; dir(colocate); colocate.__version__")
    assert HEAVY.isdisjoint(found)


def test_a_chat_loads_nothing_of_training_and_a_trainer_no_tracker(tmp_path):
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    of_chat, of_trainer, _ = loaded(
        "from colocate.cli import main\n"
        "assert main() == 0\n"
        "note()\n"
        "import colocate; colocate.GRPOTrainer, colocate.GRPOConfig; note()",
        *("chat", str(tmp_path), "--use_cpu", "--raw", "--max_tokens", "2"),
        typed="1 plus 1\n",
    )
    assert {"torch", "colocate.engines.native.engine"} <= of_chat and OF_TRAINING.isdisjoint(of_chat)
    assert {"colocate.build", "datasets"} <= of_trainer and NEVER.isdisjoint(of_trainer)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two packages that wait for one another, which only threads can import."""
    barrier = threading.Barrier(2, timeout=60)
    for name in ("one_of_two", "other_of_two"):
        (tmp_path / f"{name}.py").write_text("import threading\nthreading.barrier_of_test.wait()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(threading, "barrier_of_test", barrier, raising=False)
    monkeypatch.setattr(import_ahead, "SYMBOLS", "one_of_two")
    monkeypatch.setattr(import_ahead, "SCORES", "other_of_two")
    yield {"one_of_two", "other_of_two"}
    for name in ("one_of_two", "other_of_two"):
        sys.modules.pop(name, None)


def test_packages_are_imported_side_by_side_and_are_there_at_the_end(packages, monkeypatch):
    with import_ahead.importing_ahead():
        pass
    assert packages.isdisjoint(sys.modules)  # PyTorch is there already
    monkeypatch.delitem(sys.modules, "torch")
    with import_ahead.importing_ahead():
        pass
    assert packages <= set(sys.modules)


def test_what_cannot_be_imported_is_left_to_who_needs_it(packages, monkeypatch, tmp_path):
    (tmp_path / "one_of_two.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.setattr(import_ahead, "SCORES", "no_such_package.at_all")
    monkeypatch.delitem(sys.modules, "torch")
    with import_ahead.importing_ahead():
        pass
    with pytest.raises(RuntimeError, match="broken"):
        import one_of_two  # noqa: F401
