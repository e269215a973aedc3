"""An engine plugs in by one entry: here by those of this package, and by another distribution's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from colocate.config.grpo_config import GRPOConfig
from colocate.engines import registry
from colocate.engines.options import EngineOptions

PLUGIN = """
from dataclasses import dataclass
from typing import Annotated

from colocate.engines.options import EngineOptions
from colocate.engines.registry import Engine
from colocate.options.requirements import FRACTION, OneOf


@dataclass
class EchoOptions(EngineOptions):
    # ── An echo ──────────────────────────────────────────────────────────────────────────────────────────
    echo_share: Annotated[float, FRACTION] = 1.0
    \"\"\"How much of it.\"\"\"
    echo_mode: Annotated[str, OneOf(("prompt", "last"))] = "prompt"


ECHO = Engine("echo", build="echo_engine:build", options="echo_engine:EchoOptions", words="an echo")
FOREIGN = Engine("foreign", build=ECHO.build, options=ECHO.options, words="another's options")
WRONG = "no engine"


def build(parts):
    from colocate.engines.turns import TurnEngine
    from colocate.types import Completion

    class EchoEngine(TurnEngine):
        options, model = parts.options, parts.model
        shares_weights = True

        def generate(self, prompts, sampling):
            return [Completion(p.token_ids, None, "stop", 0) for p in prompts for _ in p.samples]

    return EchoEngine.__new__(EchoEngine)
"""


CASES = """
import dataclasses, json, sys

import echo_engine
from colocate.config.help import option_help
from colocate.config.run_config import parse_run, read_options
from colocate.engines import registry

before = "torch" in sys.modules
from accelerate import Accelerator
from engine_models import make_model, make_prompts

from colocate.config.grpo_config import GRPOConfig
from colocate.planning.run_options import planner_for, workload_of
from colocate.run.engine import build_engine, sampling_params
from colocate.types import SamplingParams


def make(**options):
    return GRPOConfig(output_dir=sys.argv[1], use_cpu=True, bf16=False, **options)


def early(**values):
    read_options(values)


def late(**values):
    return make(**parse_run(values)[1])


def engine():
    config = make(engine="echo", max_num_seqs="3", echo_share="0.5")
    engine = build_engine(make_model("qwen3"), config, Accelerator(cpu=True), sampling_params(config, ()))
    prompts = make_prompts([3, 4])
    drawn = [c.token_ids for c in engine.generate(prompts, SamplingParams(4))]
    assert drawn == [p.token_ids for p in prompts for _ in p.samples]
    return dataclasses.asdict(engine.options)


def told(call, *arguments, **options):
    try:
        return call(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


print(json.dumps({
    "is_light": not before,
    "engine": told(engine),
    "words": registry.engine_of("echo").words,
    "own": registry.engine_of("vllm").words,
    "wrong": told(registry.engine_of, "wrong"),
    "foreign": told(registry.engine_of, "foreign"),
    "help": option_help(),
    "planner": told(lambda: planner_for(make_model("qwen3"), make(engine="echo"))),
    "workload": told(workload_of, make(engine="echo"), None, None, is_gpu=False),
    "unread": told(lambda: [make(engine=name, echo_share=0.5) for name in ("native", "echo")] and None),
    "nearest": told(early, engine="ech"),
    "passes": told(early, engine="echo", echo_share="0.5"),
    **{
        f"{door.__name__} {name}={value}": told(lambda: repr(door(**{"engine": "echo", name: value})))
        for door in (make, early, late)
        for name, value in (("echo_share", 2), ("echo_share", "much"), ("echo_mode", "lst"), ("echo_shar", 1))
    },
}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a process says in which another distribution is installed, as pip would leave it."""
    site = tmp_path_factory.mktemp("site")
    (site / "echo_engine.py").write_text(PLUGIN)
    (site / "cases.py").write_text(CASES)
    metadata = site / "echo_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-engine\nVersion: 1.0\n")
    names = {"echo": "ECHO", "vllm": "WRONG", "wrong": "WRONG", "foreign": "FOREIGN"}
    entries = [f"{name} = echo_engine:{value}" for name, value in names.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[colocate.engines]", *entries]))
    paths = [str(site), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    words = [sys.executable, str(site / "cases.py"), str(site / "run")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


def test_an_engine_of_another_distribution_gets_its_options_and_the_runs(told):
    options = told["engine"]
    assert (options["echo_share"], options["echo_mode"], options["max_num_seqs"]) == (0.5, "prompt", 3)
    assert told["words"] == "an echo" and told["is_light"]


@pytest.mark.parametrize("door", ["make", "early", "late"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("echo_shar=1", "'?echo_shar.*"),
        ("echo_share=2", "echo_share=2(.0)? must lie between 0 and 1"),
        ("echo_share=much", "echo_share='much' is not a number"),
        ("echo_mode=lst", "echo_mode='lst' is unknown; it is one of prompt, last.*'last'"),
    ],
)
def test_its_options_are_judged_as_the_runs_are(told, door, given, message):
    assert re.search(f"Error: .*{message}", told[f"{door} {given}"]), told[f"{door} {given}"]


def test_its_options_are_in_the_help_and_unread_with_another_engine(told):
    assert re.search(r"An echo:\n  --echo_share \(default: 1.0\)\n +How much of it.", told["help"])
    assert told["passes"] is None and told["unread"] is None
    unread = "echo_share=0.5 is not needed: only that engine reads it; set engine='echo'"
    assert told["stderr"].count(unread) == 1


def test_names_are_known_early_and_none_here_is_taken(told):
    assert re.search(r"engine='ech' is unknown.*transformers, .*echo.*Did you mean 'echo'", told["nearest"])
    assert told["own"] == registry.ENGINES["vllm"].words


def test_what_is_no_engine_or_declares_options_of_others_is_refused(told):
    refused = {
        "wrong": "'wrong' .* is 'no engine', where .* named 'wrong' is needed",
        "foreign": "must begin with foreign_: echo_share, echo_mode would be other options of a run",
    }
    for name, message in refused.items():
        assert re.search(f"TypeError: .*{message}", told[name])
        assert re.search(f"engine='{name}' cannot be chosen: TypeError: .*{message}", told["stderr"])


def test_an_engine_that_says_nothing_of_its_memory_is_not_planned(told):
    assert told["planner"] is None
    assert "engine='echo' is not planned" in told["workload"]


MISSING = """
import importlib.metadata, json, sys

entry_points = importlib.metadata.entry_points
importlib.metadata.entry_points = (
    lambda group=None, **given: [] if group == "colocate.engines" else entry_points(group=group, **given)
)
from colocate.config.grpo_config import GRPOConfig
from colocate.config.run_config import parse_run, read_options


def make(**options):
    return GRPOConfig(output_dir=sys.argv[1], use_cpu=True, bf16=False, **options)


for name, value in (("engine", "trtllm"), ("trtllm_python", "python")):
    for door in (make, lambda **v: read_options(v), lambda **v: make(**parse_run(v)[1])):
        try:
            door(**{name: value})
        except (TypeError, ValueError) as error:
            print(name, error)
config = make()
config.trtllm_python = "python"
"""


def test_an_engine_that_is_not_installed_and_its_options_are_refused_with_what_to_install(tmp_path):
    words = [sys.executable, "-c", MISSING, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    hint = (
        "; colocate-trtllm brings it, which is not installed here: pip install colocate-trtllm, or in a "
        "checkout of colocate pip install ./distributions/trtllm."
    )
    assert [line.partition(" ")[0] for line in lines] == ["engine"] * 3 + ["trtllm_python"] * 3
    assert all(line.endswith(hint) for line in lines)
    assert f"trtllm_python is not an option, and nothing will read it{hint}" in done.stderr


@pytest.fixture
def make(tmp_path):
    return lambda **options: GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


def test_every_engine_here_can_be_made_and_has_words(make):
    for engine in registry.engines().values():
        assert issubclass(engine.record, EngineOptions) and issubclass(GRPOConfig, engine.record)
        assert engine.words and engine.planned_as
        assert type(make().engine_options(engine.name)) is engine.record


def test_the_engines_are_known_by_name_before_anything_heavy_is_loaded():
    code = (
        "import sys, colocate.config.honoured, colocate.engines.registry as r\n"
        "records = [engine.record for engine in r.engines().values()]\n"
        "print(*r.ENGINES, 'torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["native", "vllm", "rollout_server", "transformers", "False"]
