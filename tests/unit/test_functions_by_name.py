import subprocess
import sys

import pytest

from colocate import rewards
from colocate.rewards import get_reward_function
from colocate.users_code.by_name import get_tool
from colocate.users_code.exits import EXIT_CODE


def test_reward_functions_are_found_by_name(tmp_path, monkeypatch):
    assert get_reward_function("think_format_reward") is rewards.think_format_reward
    assert (
        get_reward_function("colocate.rewards.length.get_cosine_scaled_reward")
        is rewards.get_cosine_scaled_reward
    )
    assert get_reward_function("get_soft_overlong_punishment")([[0] * 1152]) == [-0.5]  # 1280 - 256 / 2
    source = "import json\ndef brevity(completions, **kwargs):\n    return [-len(c) for c in completions]\n"
    (tmp_path / "json.py").write_text(source)
    (tmp_path / "rewards_of_mine.py").write_text(source)
    assert get_reward_function(f"{tmp_path}/json.py:brevity")(["abc"]) == [-3]
    assert __import__("json").loads("1") == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path.parent))  # restores sys.path afterwards
    assert get_reward_function("rewards_of_mine.brevity")(["abc"]) == [-3]


def test_unknown_names_name_the_nearest(tmp_path, monkeypatch):
    (tmp_path / "scores.py").write_text("def brevity(completions, **kwargs): ...\nlimit = 3\n")
    (tmp_path / "broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path.parent))
    for name, error, message in (
        ("acuracy_reward", ValueError, "Unknown .* Did you mean 'accuracy_reward'.* Built in are"),
        ("scores.brevty", ValueError, "has no function 'brevty'. Did you mean 'brevity'"),
        ("scores.py:brevty", ValueError, "has no function 'brevty'. Did you mean 'brevity'"),
        ("scores.limit", ValueError, "cannot call, 'limit'"),
        ("scores.py:correctness", ValueError, "has no function 'correctness'. It has brevity."),
        ("scores.py", ValueError, "'scores.py' names no reward function, only a file: write scores.py:NAME"),
        ("score.py:brevity", FileNotFoundError, r"No file 'score.py'. Did you mean 'scores.py'"),
        ("nowhere.brevity", ValueError, "no module 'nowhere'"),
        ("broken.reward", ModuleNotFoundError, "not_installed_anywhere"),
    ):
        with pytest.raises(error, match=message):
            get_reward_function(name)


@pytest.mark.parametrize("source", ["def f(:\n", "1 / 0\n", "import not_installed_anywhere\n"])
def test_a_file_that_cannot_be_imported_is_named_each_time(source, tmp_path):
    (tmp_path / "mine.py").write_text(source)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"mine\.py cannot be imported: \w+Error: "):
            get_reward_function(f"{tmp_path}/mine.py:f")


EXITS = "import sys\ndef f(completions, **k):\n    return [1.0] * len(completions)\n{0}\n"


@pytest.mark.parametrize("leave", ["sys.exit(0)", "raise SystemExit", "exit('no GPU')"])
@pytest.mark.parametrize("door", ["{0}/leaves.py:f", "leaves.f"])
@pytest.mark.parametrize("load", [get_reward_function, get_tool])
def test_a_file_that_exits_when_it_is_imported_is_named_each_time(leave, door, load, tmp_path, monkeypatch):
    (tmp_path / "leaves.py").write_text(EXITS.format(leave))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"leaves(\.py)? calls exit\(\) when it is imported.*leaves\.py:4"
        ):
            load(door.format(tmp_path))


def test_a_file_does_not_end_the_command_as_if_it_had_succeeded(model_dir, tmp_path):
    (tmp_path / "leaves.py").write_text(EXITS.format("import os; os._exit(0)"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    command = [sys.executable, "-m", "colocate", "train", "--model_name_or_path", model_dir, "--dataset_name"]
    command += ["rows.jsonl", "--reward_funcs", "leaves.py:f", "--output_dir", "out"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == EXIT_CODE
    assert "os._exit(0) was called in <module> (" in ended.stderr


def test_an_exit_anywhere_in_a_command_is_an_error(monkeypatch, capsys):
    from colocate import cli
    from colocate.commands import merge

    monkeypatch.setattr(merge, "run", lambda known: exec(compile("exit()", "model.py", "exec")))
    assert cli.main(["merge", "adapter", "merged"]) == 1
    assert "model.py:1 called exit(), which ended the command before it was done" in capsys.readouterr().err


POOLED = """
import multiprocessing

def double(number):
    return 2.0 * number

def pooled(completions, how="fork", **columns):
    import beside_it  # a neighbour of the file, not imported before

    with multiprocessing.get_context(how).Pool(1) as pool:
        return pool.map(double, map(beside_it.length, completions))
"""


@pytest.fixture
def directory_of_rewards(tmp_path, monkeypatch):
    """A directory with a file of a reward function that asks other processes, and with its neighbour."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it.py").write_text("def length(text):\n    return len(text)\n")
    yield tmp_path
    for name in [name for name, module in sys.modules.items() if is_within(tmp_path, module)]:
        del sys.modules[name]


def is_within(directory, module):
    return str(getattr(module, "__file__", None)).startswith(str(directory))


@pytest.mark.parametrize("name", ["rewards_with_pool", "json"])
def test_a_function_of_a_file_may_ask_processes_and_neighbours(name, directory_of_rewards):
    file = directory_of_rewards / f"{name}.py"
    file.write_text(POOLED)
    pooled = get_reward_function(f"{file}:pooled")
    assert pooled(["abc", "a"]) == [6.0, 2.0]
    assert get_reward_function(f"{file}:pooled") is pooled
    assert __import__("json").loads("1") == 1


def test_a_process_that_is_spawned_finds_the_file(directory_of_rewards):
    file = directory_of_rewards / "rewards_with_pool.py"
    file.write_text(POOLED)
    assert get_reward_function(f"{file}:pooled")(["abc", "a"], how="spawn") == [6.0, 2.0]
