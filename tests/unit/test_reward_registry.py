import pytest

from colocate import rewards
from colocate.rewards import get_reward_function


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
