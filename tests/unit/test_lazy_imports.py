"""What a command or an import loads: modules are counted, since seconds depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from colocate import import_ahead

HEAVY = ("accelerate", "datasets", "matplotlib", "numpy", "pandas", "peft", "torch", "transformers", "triton")


def loaded(program: str, after: str = "") -> set[str]:
    """The modules that a new interpreter loads in a program, beside those that `after` has loaded before."""
    program = f"import json, sys\n{after}\nbefore = set(sys.modules)\n{program}\n"
    program += "print(json.dumps(list(set(sys.modules) - before)))"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "program",
    [
        "import colocate, colocate.cli, colocate.train_command, colocate.import_ahead",
        "from colocate.cli import main; main(['report', '/nowhere'])",
        "from colocate.cli import main; main([])",
        "from colocate.cli import main; main(['train', '--max_steps', '3'])",
        "from colocate.cli import main; main(['plan', '--no_such_option', '3'])",
    ],
)
def test_a_command_that_needs_no_model_loads_no_library(program):
    assert loaded(program).isdisjoint(HEAVY)


def test_the_native_engine_loads_little_beside_the_model():
    before = "import torch, triton\nfrom transformers import AutoModelForCausalLM, Qwen2ForCausalLM"
    added = loaded("from colocate.engines.native.engine import NativeEngine", after=before)
    packages = {name.partition(".")[0] for name in added}
    assert packages.isdisjoint({"datasets", "matplotlib", "pandas", "peft", "rich", "trl", "vllm"})
    own = {name for name in added if name.startswith("colocate")}
    # The five architectures with their parents are some 20 of transformers' modules.
    assert len(own) < 80 and len(added - own) < 40


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two packages that wait for one another, which only threads can import."""
    barrier = threading.Barrier(2, timeout=10)
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
