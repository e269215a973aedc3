"""Other libraries' environments, played through the pool and the runner as models play them.

The libraries are stand-ins (`environment_packages.py` says after which sources), but for reasoning-gym, which
is itself, and OpenEnv's server, which answers over a socket.
"""

import sys
from types import SimpleNamespace

import environment_packages as packages
import pytest

from colocate.data.loading import load_prompts
from colocate.episodes.adapters import (
    GymnasiumEnvironment,
    OpenEnvEnvironment,
    ReasoningGymEnvironment,
    SkyRLGymEnvironment,
    TextArenaEnvironment,
)
from colocate.episodes.environments import EnvironmentPool
from colocate.episodes.tool_runner import ToolRunner


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    for name in ("gymnasium", "skyrl_gym", "textarena", "openenv"):
        made = getattr(packages, name)()
        monkeypatch.setitem(sys.modules, name, made)
        if name == "openenv":
            monkeypatch.setitem(sys.modules, "openenv.core", made.core)


def play(pool, row, actions):
    """Play an episode until it is over: the prompt, what the model read, and what each turn earned."""
    runner, [scene] = ToolRunner(10.0), pool.begin([row])
    read, earned = [], []
    for action in actions:
        assert not scene.is_over, read
        message = {
            "tool_calls": [{"type": "function", "function": {"name": "act", "arguments": {"action": action}}}]
        }
        runner.start("turn", scene.toolbox.calls(message))
        [result] = runner.poll()["turn"]
        read.append(result.content)
        earned.append(scene.end_turn([result]))
    assert scene.is_over
    with pytest.raises(ValueError, match="The episode is over"):
        scene.environment.act("7")
    if earned[0] is None:  # the episode has the reward, not its turns
        earned = scene.environment.rewards
        assert scene.environment.get_reward() == sum(earned)
    else:
        assert scene.environment.get_reward() == 0.0
    pool.end(scene)
    runner.close()
    return scene.prompt, read, earned


ROW = {"prompt": [{"role": "user", "content": "A number: "}], "seed": 7, "answer": "unused"}
GUESS = [{"role": "user", "content": "A number: Guess."}]


def test_gymnasium():
    for environment in ("Guess-v0", packages.GymnasiumGuess):
        pool = EnvironmentPool(
            lambda environment=environment: GymnasiumEnvironment(environment, offset=1, per_turn=True)
        )
        assert pool.toolboxes[None].names == ("act",)
        prompt, read, earned = play(pool, ROW, ["5", "9", "8"])
        assert (prompt, read, earned) == (GUESS, ["too low", "too high", "right"], [0.1, 0.0, 1.0])
        _, read, earned = play(pool, ROW, ["a", "", "123", "1", "1", "1"])  # the first three are no actions
        assert all("is not an action of Text(1, 2)" in text for text in read[:3])
        assert read[3:] == ["too low"] * 3 and earned == [0.0, 0.0, 0.0, 0.1, 0.1, 0.1]
        play(pool, ROW, ["8"])  # in the same environment, from the beginning


def test_gymnasium_refuses_what_is_not_text():
    with pytest.raises(
        ValueError, match=r"action_space of 'Guess-v0' is Discrete\(4\).*gymnasium.spaces.Text"
    ):
        GymnasiumEnvironment("Guess-v0", action_space=packages.Discrete(4))


def test_skyrl_gym():
    row = {**ROW, "reward_spec": {"ground_truth": 7}}
    pool = EnvironmentPool(lambda: SkyRLGymEnvironment("guess", max_turns=2, per_turn=True))
    prompt, read, earned = play(pool, row, ["5", "7"])
    assert (prompt, read, earned) == (ROW["prompt"], ["too low", ""], [0.1, 1.0])
    play(pool, row, ["9", "9"])
    assert packages.SkyRLGuess.num_open == 1  # those of past episodes are closed


@pytest.mark.parametrize(
    ("opening", "content"),
    [
        (lambda prompt: [{**prompt[0], "content": prompt[0]["content"] + "Go."}], "A number: Go."),
        (lambda prompt: [*prompt, {"role": "user", "content": "Go."}], "A number: Go."),
        (lambda prompt: [{"role": "user", "content": "Another."}], None),
        (lambda prompt: [{"role": "system", "content": "Play."}, *prompt], None),
        (lambda prompt: [], None),
    ],
)
def test_skyrl_gym_may_add_to_the_prompt_but_not_rewrite_it(opening, content):
    environment = SkyRLGymEnvironment("guess", env_config={"opening": opening})
    pool, row = EnvironmentPool(lambda: environment), {**ROW, "reward_spec": {"ground_truth": 7}}
    if content is not None:
        assert pool.begin([row])[0].prompt == [{"role": "user", "content": content}]
    else:
        with pytest.raises(ValueError, match="'guess' rewrites the row's prompt"):
            environment.reset(**row)


@pytest.mark.parametrize(
    ("game", "lines"),
    [
        ("Guess-v0", ["[GAME] Guess.", "[Player 0] 5\n[GAME] too low", "[Player 0] 7\n[GAME] right"]),
        ("Guess-v0-raw", ["Guess.", "5\ntoo low", "7\nright"]),
    ],
)
def test_textarena(game, lines):
    pool = EnvironmentPool(lambda: TextArenaEnvironment(game))
    for _ in range(2):  # the wrapper would have shown the first game's history in the second
        prompt, read, earned = play(pool, ROW, ["5", "7"])
        assert prompt[0]["content"] == f"A number: {lines[0]}"
        assert (read, earned) == (lines[1:], [0.0, 1.0])


def test_openenv_over_a_socket():
    """Two sessions with one server at the same time, by the generic client and by one with classes."""
    with packages.OpenEnvServer() as url:
        pool = EnvironmentPool(
            {
                "generic": lambda: OpenEnvEnvironment(url, "message", "reply", per_turn=True),
                "typed": lambda: OpenEnvEnvironment(
                    lambda: packages.GenericEnvClient(base_url=url).sync(),
                    lambda text: SimpleNamespace(message=text),
                    lambda observation: observation["reply"].upper(),
                ),
            }
        )
        [other] = pool.begin([{**ROW, "environment": "generic", "seed": 3}])
        prompt, read, earned = play(pool, {**ROW, "environment": "generic"}, ["x", "5", "7"])
        assert prompt == GUESS and read[1:] == ["too low", "right"] and earned == [0.0, 0.1, 1.0]
        assert read[0].startswith("{'error': \"Server error: invalid literal")
        _, read, _ = play(pool, {**ROW, "environment": "typed"}, ["9", "9", "9"])
        assert read == ["TOO HIGH"] * 3
        assert other.environment.act("3") == "right" and other.is_over


def test_reasoning_gym():
    rows = load_prompts("reasoning_gym:basic_arithmetic", size=3, seed=1)
    pool = EnvironmentPool(lambda: ReasoningGymEnvironment(num_attempts=3, per_turn=True))
    for row in rows:
        answer = packages.json.loads(row["entry"])["problem"]["answer"]
        messages = [{"role": "user", "content": row["prompt"]}]
        asked, read, earned = play(pool, {"prompt": messages, "entry": row["entry"]}, ["none", f" {answer} "])
        assert asked == messages and earned[0] < 1.0 and sum(earned) == 1.0
        assert read == ["That is not right. Attempts left: 2.", "That is right."]
        asked, _, earned = play(pool, {"entry": row["entry"]}, [f"{answer} or so", "", f"{answer} or so"])
        assert asked == messages and 0.0 < earned[0] < 1.0  # scored in part
        assert earned[1:] == [0.0, 0.0]  # no attempt earns what one before has earned
    with pytest.raises(ValueError, match=r"'entry'; it has 'prompt'\. .*load_prompts"):
        ReasoningGymEnvironment().reset(prompt=[])


@pytest.mark.parametrize(
    ("package", "make", "requirement"),
    [
        ("gymnasium", lambda: GymnasiumEnvironment("Guess-v0"), "gymnasium>="),
        ("skyrl_gym", lambda: SkyRLGymEnvironment("guess"), "skyrl-gym>="),
        ("textarena", lambda: TextArenaEnvironment("Guess-v0"), "textarena>="),
        ("openenv", lambda: OpenEnvEnvironment("http://127.0.0.1:1", "a", "b"), "openenv>="),
        ("reasoning_gym", ReasoningGymEnvironment, "reasoning-gym>="),
    ],
)
def test_what_is_not_installed_is_named(package, make, requirement, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, f"{package}.core", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f'pip install "{requirement}'):
        make()
    if package != "reasoning_gym":  # a package that is there and lacks another is not called missing
        (tmp_path / f"{package}.py").write_text("import a_package_that_lacks")
        monkeypatch.delitem(sys.modules, package)
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModuleNotFoundError, match="a_package_that_lacks"):
            make()
