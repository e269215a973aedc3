"""Recipes that are run to the end: the chain at two steps, and what docs/recipes.md says of the runs."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.pages.pictures import draw_picture, picture
from benchmarks.pages.recipes import expectations_table, recipes_panels, recipes_table
from benchmarks.recipes import run as recipe_run
from benchmarks.recipes import seconds
from benchmarks.recipes.cases import ALGORITHMS, CASES, DIRECTORY, run_name, warm_start_words
from benchmarks.recipes.suite import compute_claims, published_runs, runs_of
from colocate.cli import main
from colocate.data.loading import load_prompts
from colocate.options.run_file import read_file
from colocate.reporting.memory_charts import MemoryCurve
from colocate.reporting.run import read_run
from colocate.rewards import reasoning_gym_reward
from colocate.users_code.by_name import get_tool

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
HANDOVER = RESULTS / "recipes/handover-h100"
"""The record of the run that the picture of the hand-over shows."""
PAGE = (ROOT / "docs/recipes.md").read_text()
SMALL_MODELS = ROOT / "examples/small_models"
FEW: dict[str, Any] = {
    "max_steps": 2,
    "eval_steps": 2,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 16,
    "max_num_seqs": 16,
    "per_device_eval_batch_size": 8,
    "max_eval_rows": 8,
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def warm_start() -> ModuleType:
    """examples/small_models/warm_start.py, whose neighbours it imports as a script does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SMALL_MODELS))
        spec = importlib.util.spec_from_file_location("small_warm_start", SMALL_MODELS / "warm_start.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "small_warm_start", module)
        spec.loader.exec_module(module)
        yield module


def start_of(recipe: str, warm_start: ModuleType, directory: Path) -> Path:
    """What the command at a run file's head writes, but for a model that has imitated hardly anything."""
    script, *words = warm_start_words(recipe)
    assert ROOT / script == SMALL_MODELS / "warm_start.py"
    shortened = [*words, "--size", "200k", "--imitation_steps", "2", "--output_dir", str(directory)]
    warm_start.main(shortened)
    return directory


# ── The whole chain ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def addition_start(warm_start: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start_of("addition", warm_start, tmp_path_factory.mktemp("addition"))


@pytest.mark.parametrize("framework", ["colocate", "trl"])
def test_a_run_leaves_the_same_curves_of_both_frameworks(
    framework: str, addition_start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    record = recipe_run.measure(framework, "addition", "grpo", 3, addition_start, FEW)
    assert (record["framework"], record["seed"], record["options"]["seed"]) == (framework, 3, 3)
    evaluations, rollouts = record["evaluations"], record["rollouts"]
    assert evaluations["step"] == [0, 2] and evaluations["train_s"][0] == 0
    assert len(rollouts["step"]) == 1 and 0 < rollouts["train_s"][0] <= record["train_s"]
    # A prompt has 7 characters, and 5 marks of the chat format; a completion is at most 16 tokens long.
    assert 16 * 12 < record["num_tokens"] <= 16 * (12 + 16)
    assert record["core_s"] > 0 and record["train_s"] < record["total_s"]
    assert 0.2e6 < record["num_parameters"] < 0.3e6
    imitation = record["imitation"]
    assert imitation["num_steps"] == 2 and imitation["core_s"] > 0
    # After two steps the model still knows next to nothing of its vocabulary of 27 tokens.
    assert imitation["loss"] == pytest.approx(math.log(27), abs=0.5)


@pytest.mark.parametrize("recipe", ["calculator", "game"])
def test_tools_and_environments_of_a_run_file_are_played(
    recipe: str, warm_start: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    start = start_of(recipe, warm_start, tmp_path / "start")
    record = recipe_run.measure("colocate", recipe, "gspo", 0, start, {**FEW, "max_completion_length": 60})
    assert record["evaluations"]["step"] == [0, 2]
    assert record["options"]["importance_sampling_level"] == "sequence"
    assert "tools" in record["options"] or record["options"]["environment_factory"].endswith("game.py:Game")


def test_a_tool_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    game = "examples/turns/game.py"
    for tool, message in {
        "dice": "Unknown tool or environment 'dice'",
        f"{ROOT / game}:Gama": "Did you mean 'Game'?",
        "no_such_module.roll": "Unknown tool or environment 'no_such_module.roll': there is no module",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
            get_tool(tool)
    words = ["--model_name_or_path", str(tmp_path), "--dataset_name", "data", "--tools", "dice"]
    assert main(["train", *words]) == 1
    assert "reward_funcs is not set" in capsys.readouterr().err


def test_a_run_with_tools_is_not_measured_without_them(
    addition_start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(addition_start / "model", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.yaml").write_text(f"""
model_name_or_path: {tmp_path}
dataset_name: {addition_start / "data"}
tools: [examples/turns/calculator.py:add]
""")
    assert main(["eval", str(tmp_path)]) == 1
    assert "completes prompts without either" in capsys.readouterr().err


# ── Tasks ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_demonstrator_is_as_careful_as_is_said(warm_start: ModuleType) -> None:
    columns, rng = sys.modules["columns"], random.Random(0)
    for num_digits in (1, 3, 8):
        for _ in range(200):
            a, b = columns.problem(rng, num_digits, held_out=False)
            said = columns.worked(a, b, rng, carelessness=0.0)
            working, answer = said.split(";")
            assert answer == str(a + b)
            assert all(eval(equation.replace("=", "==")) for equation in working.split(","))
            assert columns.correct([[{"content": said}]], answer=[answer]) == [1.0]
            assert columns.correct([[{"content": said + ";"}]], answer=[answer]) == [0.0]
    problems = [columns.problem(rng, 3, held_out=False) for _ in range(4000)]
    shares = [columns.worked(a, b, rng).split(";")[1] == str(a + b) for a, b in problems]
    # (1 - 1/4)^3 = 0.42, and a little more, since two slips may cancel out.
    assert 0.39 < sum(shares) / len(shares) < 0.46


def test_running_totals_end_in_the_answer_of_reasoning_gym(warm_start: ModuleType) -> None:
    import reasoning_gym

    chain_sum = sys.modules["chain_sum"]
    options = read_file(DIRECTORY / "chain_sum.yaml")
    sizes = [options[name] for name in ("dataset_options", "eval_dataset_options")]
    assert all(chain_sum.PARAMETERS.items() <= size.items() for size in sizes)
    assert len({chain_sum.SEED, *(size["seed"] for size in sizes)}) == 3
    trained, held_out = (
        {entry["question"] for entry in reasoning_gym.create_dataset("chain_sum", **size)} for size in sizes
    )
    assert len(trained & held_out) < 0.01 * len(held_out)
    problems = reasoning_gym.create_dataset("chain_sum", **{**sizes[0], "size": 50})
    for entry in problems:
        said = chain_sum.worked(entry["metadata"]["expression"], random.Random(0), carelessness=0.0)
        (answer,) = re.findall("<answer>(.*)</answer>", said)
        assert problems.score_answer(answer, entry) == 1.0


def test_a_part_of_the_right_number_is_not_rewarded(warm_start: ModuleType) -> None:
    (row,) = load_prompts(
        "reasoning_gym:chain_sum", size=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    right = json.loads(row["entry"])["problem"]["answer"]
    answers = [right, f"{right}0", f"1{right}", ""]
    completions = [[{"role": "assistant", "content": f"<answer>{answer}</answer>"}] for answer in answers]
    entry = [row["entry"]] * len(answers)
    assert reasoning_gym_reward(completions, entry)[:2] != [1.0, 0.0], "which is why"
    assert sys.modules["chain_sum"].solved(completions, entry=entry) == [1.0, 0.0, 0.0, 0.0]


def test_a_blind_player_wins_less_often_than_the_one_that_is_imitated(warm_start: ModuleType) -> None:
    game, rng = sys.modules["game"], random.Random(0)
    shown = [game.demonstration(rng) for _ in range(8000)]
    won = sum(conversation[-1]["content"] == "right" for conversation in shown) / len(shown)
    said = re.search(r"wins (\d+) % of\s+# the games", (DIRECTORY / "game.yaml").read_text())
    # Three standard errors of 8,000 games are 0.017. Whoever ignores the answers wins 3/7 of the games.
    assert abs(won - int(said[1]) / 100) < 0.02 and won - 3 / 7 > 0.05


# ── Records ──────────────────────────────────────────────────────────────────────────────────────────────


def test_seconds_are_of_training_alone() -> None:
    events = [
        {"time": 100.0, "step": 0, "eval_reward": 0.25, "eval_runtime": 9.0},
        {"time": 103.0, "step": 1, "reward": 0.3, "num_tokens": 50},
        {"time": 105.0, "step": 2, "num_tokens": 50},
        {"time": 109.0, "step": 2, "eval_reward": 0.5, "eval_runtime": 4.0, "num_tokens": 50},
        {"time": 111.0, "step": 3, "reward": 0.4, "num_tokens": 90},
        {"time": 112.0, "step": 4, "num_tokens": 90},
        {"time": 114.0, "step": 4, "eval_reward": 0.75, "eval_runtime": 2.0},
    ]
    curves = recipe_run.curves(events, lambda moment: 2 * moment, 64)
    assert curves["rollouts"] == {"step": [1, 3], "reward": [0.3, 0.4], "train_s": [6.0, 14.0]}
    assert curves["evaluations"]["train_s"] == [0.0, 10.0, 16.0] and curves["train_s"] == 16.0
    # Wilson's interval solves (p - s)² = z² s (1 - s) / n for s.
    bounds = (curves["evaluations"][name] for name in ("value", "low", "high"))
    for share, low, high in zip(*bounds, strict=True):
        for bound in (low, high):
            assert (share - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / 64)
    with pytest.raises(ValueError, match="eval_on_start"):
        recipe_run.curves(events[1:], float, 64)


def test_an_option_that_trl_lacks_is_not_left_out() -> None:
    with pytest.raises(ValueError, match="TRL has no option max_refill_rounds"):
        recipe_run.trl_config({"output_dir": "out", "max_refill_rounds": 2}, has_vllm=False)


def test_every_case_has_a_run_file_and_a_warm_start() -> None:
    assert {file.stem for file in DIRECTORY.glob("*.yaml")} == set(CASES)
    for recipe in CASES:
        options = read_file(DIRECTORY / f"{recipe}.yaml")
        assert options["output_dir"] == f"runs/{recipe}" and options["eval_on_start"]
        assert options["max_steps"] % options["eval_steps"] == 0, "the last evaluation is of the last step"
        assert warm_start_words(recipe)[0] == "examples/small_models/warm_start.py"


# ── The page ─────────────────────────────────────────────────────────────────────────────────────────────


def summary_of(hardware: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"recipes-{hardware}.json").read_text())


def check_what_is_said_of_the_runs(claims: dict[str, float]) -> None:
    said, text = "accuracy_after_addition_colocate_", " ".join(PAGE.split())
    after = {name.removeprefix(said): value for name, value in claims.items() if name.startswith(said)}
    assert max(after, key=after.get) == "dapo" and min(after, key=after.get) == "cispo"
    ours, theirs = after["grpo"], claims["accuracy_after_addition_trl_grpo"]
    assert f"{ours:.0%} with ours and {theirs:.0%} with TRL" in text
    assert f"TRL takes {claims['core_s_ratio_addition_trl']:.2f} times our seconds" in text
    for recipe in ("chain_sum", "calculator", "game"):
        means = [claims[f"accuracy_{when}_{recipe}_colocate_grpo"] for when in ("before", "after")]
        assert "`{}` from {:.0%} to {:.0%}".format(recipe, *means) in text


def test_the_page_has_the_seconds_of_the_first_steps() -> None:
    result = json.loads((RESULTS / "recipe-seconds-cpu.json").read_text())
    claims, text = result["claims"], " ".join(PAGE.split())
    assert claims == seconds.compute_claims(result["repetitions"])
    theirs, before = claims["core_s_ratio_trl"], claims["core_s_ratio_before"]
    said = f"TRL takes {theirs:.2f} times our seconds, and the commit before these changes {before:.2f} times"
    assert said in text


def test_seconds_are_compared_by_medians_and_an_earlier_commit_may_be_missing() -> None:
    def record(framework: str, commit: str, core_s: float) -> dict[str, Any]:
        return {"framework": framework, "commit": commit * 40, "core_s": core_s}

    now = [record("colocate", "b", core_s) for core_s in (2.0, 9.0, 1.0)] + [record("trl", "b", 3.0)]
    claims = seconds.compute_claims(now)
    assert (claims["core_s_colocate"], claims["core_s_ratio_trl"]) == (2.0, 1.5)
    assert claims["core_s_before"] is None and claims["core_s_ratio_before"] is None
    assert seconds.compute_claims([record("colocate", "a", 5.0), *now])["core_s_ratio_before"] == 2.5


@pytest.mark.parametrize("hardware", ["cpu"])
def test_the_page_has_the_published_runs(hardware: str) -> None:
    records = published_runs(hardware)
    assert "\n".join(recipes_table(records)) in PAGE
    assert "\n".join(expectations_table(records)) in PAGE
    for record in records:
        assert all(math.isfinite(reward) for reward in record["rollouts"]["reward"])
        assert record["evaluations"]["step"][-1] == record["options"]["max_steps"]
        assert record["evaluations"]["low"][-1] > record["evaluations"]["high"][0], "nothing was learnt"
    check_what_is_said_of_the_runs(summary_of(hardware)["claims"])
    drawn = picture(recipes_panels(records))
    assert drawn == (ROOT / f"docs/recipes-{hardware}.svg").read_text(), "the picture is of other runs"
    ElementTree.fromstring(drawn)
    assert f"](recipes-{hardware}.svg)" in PAGE
    summary = summary_of(hardware)
    assert summary["claims"] == compute_claims(records)
    assert [run_name(run) for run in summary["repetitions"]] == [run_name(run) for run in records]
    asked = {"-".join(map(str, run)) for name, case in CASES.items() for run in runs_of(name, case, 3)}
    assert {run_name(record) for record in records} <= asked


def test_the_page_has_the_run_on_a_gpu() -> None:
    records, claims = published_runs("h100"), summary_of("h100")["claims"]
    assert "\n".join(recipes_table(records)) in PAGE and claims == compute_claims(records)
    drawn = picture(recipes_panels(records))
    assert drawn == (ROOT / "docs/recipes-h100.svg").read_text(), "the picture is of other runs"
    assert "](recipes-h100.svg)" in PAGE
    ratio = claims["train_s_ratio_addition_30m_trl"]
    said = f"Of `addition_30m` TRL takes {ratio:.2f} times our seconds, the first step's compilation included"
    assert said in PAGE
    for record in records:
        if record["recipe"] != "addition_30m":
            continue
        accuracy, loss = record["evaluations"]["value"], record["imitation"]["loss"]
        assert f"{max(accuracy):.1f}" == "1.0" and max(accuracy) - accuracy[-1] == pytest.approx(
            0.1, abs=0.02
        )
        assert f"The warm start's last loss is {loss:.3f}." in PAGE


def check_the_hand_over(text: str) -> None:
    """Whether what a page says of the hand-over is so in the rollout that the picture shows."""
    run = read_run(HANDOVER)
    spans = [span for step in run.typical_steps() for span in run.spans[step]]
    peaks = {
        phase: max(span["peak_bytes"] for span in spans if span["phase"] == phase) / 2**30
        for phase in ("rollout", "score", "train")
    }
    (cache,) = (span["categories"]["kv_cache"] / 2**30 for span in spans if span["phase"] == "rollout")
    limit = run.limit_bytes / 2**30
    assert peaks["rollout"] + peaks["train"] - peaks["score"] > 1.6 * limit, "both at a time would not fit"
    figures = [limit, peaks["rollout"], cache, peaks["train"]]
    places = [text.index(f"{figure:.1f}") for figure in figures]
    assert places == sorted(places)
    fullest = max(
        max(curve.heights["activations"])
        for curve in (MemoryCurve(span) for span in spans if span["phase"] == "train")
    )
    assert fullest > 0.85 * peaks["train"], "it is activations that training holds"


def test_the_picture_of_the_hand_over_is_that_of_the_run() -> None:
    assert draw_picture(HANDOVER) == (ROOT / "docs/handover-h100.svg").read_text(), "it is of another run"
    (record,) = (run for run in published_runs("h100") if run["recipe"] == "handover")
    run, claims = read_run(HANDOVER), summary_of("h100")["claims"]
    assert run.info["commit"] == record["commit"] and run.info["num_parameters"] == record["num_parameters"]
    assert run.eval_metric("eval_reward")[1] == record["evaluations"]["value"]
    before, after = (claims[f"accuracy_{when}_handover_colocate_grpo"] for when in ("before", "after"))
    took = f"{claims['train_s_handover_colocate_grpo']:.0f} seconds"
    _, said = " ".join(PAGE.split()).split("(handover-h100.svg)")
    check_the_hand_over(said)
    assert f"Held-out accuracy goes from {before:.1%} to {after:.1%} in {took}." in said
    rewards = run.metric("reward")
    assert (run.x[12], run.x[13]) == (13, 14) and rewards[12] == rewards[13] == min(rewards[8:])
    fall = (
        f"the rollout of steps 13 and 14 falls to {rewards[12]:.0%}; the next one has {rewards[14]:.0%} again"
    )
    assert fall in said
    (between,) = {
        f"{span['peak_bytes'] / 2**30:.1f}"
        for step in run.typical_steps()
        for span in run.spans[step]
        if span["phase"] in ("score", "publish")
    }
    assert f"In between {between} GiB are in use" in said
    assert f"The warm start's last loss is {record['imitation']['loss']:.3f}." in said
    for name in ("README.md", "README.zh-Hant.md", "docs/index.md"):
        text = " ".join((ROOT / name).read_text().split())
        assert text.count("handover-h100.svg)") == 1
        _, caption = text.split("handover-h100.svg)")
        check_the_hand_over(caption.split("*")[1])
        assert caption.index(f"{before:.1%}") < caption.index(f"{after:.1%}")
        assert "103M" in caption and f"{rewards[12]:.0%}" in caption
        assert took in caption or f"{took.split()[0]} 秒" in caption


def test_commands_and_options_on_the_pages_are_those_of_the_run_files() -> None:
    (commands,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    head = (DIRECTORY / "addition.yaml").read_text()
    assert [line.removeprefix("#   ") for line in head.splitlines() if line.startswith("#   ")] == (
        commands.splitlines()
    )
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", PAGE, re.MULTILINE)
    assert rows == list(CASES)
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/turns.md").read_text(), re.DOTALL)
    for recipe, block in zip(("calculator", "game"), blocks[-2:], strict=True):
        assert block in (DIRECTORY / f"{recipe}.yaml").read_text()


def test_the_page_says_what_the_algorithms_are() -> None:
    for name, options in ALGORITHMS.items():
        (row,) = re.findall(rf"^\| .+ \| `{re.escape(name)}` \| (.+) \| .+ \|$", PAGE, re.MULTILINE)
        assert row == ", ".join(
            f"`{option}: {json.dumps(value)}`" for option, value in options.items()
        ).replace('"', "")


def test_engine_and_trainer_each_want_most_of_the_memory(
    warm_start: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the run file for one H100: together they would not fit, so memory is handed over."""
    tokenizer = warm_start.build_tokenizer(sys.modules["columns"].PHRASES)
    with torch.device("meta"):
        model = warm_start.build_model(tokenizer, **warm_start.SIZES["100m"])
    model.config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = DIRECTORY / "handover.yaml"
    asked = ["plan", str(file), "--model_name_or_path", str(tmp_path), "--gpu", "H100", "--json"]
    assert main(asked) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    device, rollout, train = (plan[f"{name}_bytes"] for name in ("device_memory", "rollout", "train"))
    assert min(rollout, train) > 0.7 * device and rollout + train > 1.5 * device
    said = re.search(r"up to (\d+) GiB in the rollout and (\d+) GiB in\s*(?:# )?training", file.read_text())
    expected = [round(size / 2**30) for size in (rollout, train)]
    assert expected == [int(words) for words in said.groups()]
    assert "`colocate plan` expects {} and {} GiB.".format(*expected) in " ".join(PAGE.split())
    measured = re.search(r"and ([\d.]+) and\s*(?:# )?([\d.]+) GiB were measured", file.read_text())
    peaks = [f"{max(sizes) / 2**30:.1f}" for sizes in _peaks_of("rollout", "train")]
    assert peaks == list(measured.groups())


def _peaks_of(*phases: str) -> list[list[float]]:
    spans = [span for spans in read_run(HANDOVER).spans for span in spans]
    return [[span["peak_bytes"] for span in spans if span["phase"] == phase] for phase in phases]
