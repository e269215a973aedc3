"""What a command or an import loads: modules are counted, since seconds depend on the machine."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading

import pytest

from colocate.checkpoints.lock import RunLock
from colocate.commands import import_ahead
from tiny import make_model, make_tokenizer

HEAVY = {
    "accelerate", "bitsandbytes", "datasets", "matplotlib", "numpy", "pandas", "peft", "pyarrow", "ray",
    "rich", "tensorboard", "torch", "trackio", "transformers", "triton", "wandb",
}  # fmt: skip
"""Packages that take from a tenth of a second to seconds to import."""

NEVER = {"matplotlib", "ray", "tensorboard", "trackio", "trl", "vllm", "wandb"}
"""What no run loads that does not ask for it."""

TRAIN = "train --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward"

OF_TRAINING = {
    "datasets",
    "pandas",
    "pyarrow",
    "colocate.run.build",
    "colocate.data.sampler",
    "colocate.loop",
}
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
    """A run to report on; beside it a wrong run file, a whole model, and a directory that is in use."""
    directory = tmp_path_factory.mktemp("runs")
    (directory / "wrong.yaml").write_text("learning_rat: 1e-6\n")
    (directory / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text("{}")
    with RunLock(directory / "busy"):
        yield directory


@pytest.mark.parametrize(
    ("words", "message", "allowed"),
    [
        ("--version", "", ()),
        ("train --help", "", ()),
        ("train wrong.yaml", "did you mean 'learning_rate'?", ()),
        ("train --max_steps 3", "model_name_or_path is not set", ()),
        (f"{TRAIN} --num_generations 3", "8 completions is not a whole number of groups of num_gen", ()),
        (f"{TRAIN} --output_dir /proc/none/out", "output_dir='/proc/none/out' cannot be written to", ()),
        (f"{TRAIN} --output_dir busy", "Another run is writing into busy: process ", ()),
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
@pytest.mark.share(3)
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
    assert {"colocate.run.build", "datasets"} <= of_trainer and NEVER.isdisjoint(of_trainer)


@pytest.fixture(autouse=True)
def thawed():
    """Later tests free what this process has now."""
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that is imported in place of SymPy, and says in which thread."""
    file = tmp_path / "large.py"
    file.write_text("import threading\nTHREAD = threading.current_thread()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(import_ahead, "SYMBOLS", "large")
    yield file
    sys.modules.pop("large", None)


def test_a_package_is_imported_by_a_thread_and_is_there_at_the_end(package, monkeypatch):
    with import_ahead.importing_ahead():
        pass
    assert "large" not in sys.modules  # PyTorch is there already
    monkeypatch.delitem(sys.modules, "torch")
    with import_ahead.importing_ahead():
        pass
    assert sys.modules["large"].THREAD is not threading.main_thread()


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_during_imports(collects, monkeypatch):
    with import_ahead.importing_ahead():
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0  # PyTorch is there already
    monkeypatch.delitem(sys.modules, "torch")
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ImportError), import_ahead.importing_ahead():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == collects and gc.get_freeze_count() > 0
    finally:
        gc.enable()


def test_what_cannot_be_imported_is_left_to_who_needs_it(package, monkeypatch):
    package.write_text("raise RuntimeError('broken')\n")
    monkeypatch.delitem(sys.modules, "torch")
    with import_ahead.importing_ahead():
        pass
    with pytest.raises(RuntimeError, match="broken"):
        import large  # noqa: F401


@pytest.fixture
def scores(tmp_path, monkeypatch):
    """A package where scikit-learn would be."""
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").touch()
    (tmp_path / "sklearn" / "metrics.py").write_text("def roc_curve(*at, drop):\n    return at, drop\n")
    for name in ("sklearn", "sklearn.metrics"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("sklearn", "sklearn.metrics"):
        sys.modules.pop(name, None)


def test_scores_are_imported_when_they_are_called(scores):
    with import_ahead.importing_ahead():
        from sklearn.metrics import roc_curve
    assert "sklearn" not in sys.modules and "sklearn.metrics" not in sys.modules
    assert roc_curve(1, 2, drop=3) == ((1, 2), 3)
    assert sys.modules["sklearn.metrics"].roc_curve(4, drop=5) == ((4,), 5)


def test_whoever_wants_more_of_them_gets_them_at_once(scores):
    with import_ahead.importing_ahead():
        with pytest.raises(ImportError, match="no_such_score"):
            from sklearn.metrics import no_such_score  # noqa: F401
        real = sys.modules["sklearn.metrics"]
    assert sys.modules["sklearn.metrics"] is real and real.roc_curve(6, drop=7) == ((6,), 7)
