"""An engine plugs in by one entry: here by those of this package, and by another distribution's."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from accelerate import Accelerator
from engine_models import make_model, make_prompts

from colocate.config.declared_values import check_values
from colocate.config.grpo_config import GRPOConfig
from colocate.engines import registry
from colocate.engines.options import EngineOptions
from colocate.planning.run_options import planner_for, workload_of
from colocate.run.engine import build_engine, sampling_params
from colocate.types import SamplingParams

PLUGIN = """
from dataclasses import dataclass
from typing import Annotated

from colocate.engines.options import EngineOptions
from colocate.engines.registry import Engine
from colocate.options.requirements import FRACTION, OneOf


@dataclass
class EchoOptions(EngineOptions):
    echo_share: Annotated[float, FRACTION] = 1.0
    echo_mode: Annotated[str, OneOf(("prompt", "last"))] = "prompt"


ECHO = Engine("echo", build="echo_engine:build", options="echo_engine:EchoOptions", words="an echo")
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


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """A distribution that is installed, as pip would leave it."""
    (tmp_path / "echo_engine.py").write_text(PLUGIN)
    metadata = tmp_path / "echo_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[colocate.engines]\necho = echo_engine:ECHO\nvllm = echo_engine:WRONG\nwrong = echo_engine:WRONG\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    registry.plugged_in.cache_clear()
    yield tmp_path
    registry.plugged_in.cache_clear()
    sys.modules.pop("echo_engine", None)


@pytest.fixture
def make(tmp_path):
    return lambda **options: GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


def test_an_engine_of_another_distribution_gets_its_options_and_the_runs(echo, make):
    config = make(engine="echo", max_num_seqs="3", engine_kwargs={"echo_share": "0.5"})
    model = make_model("qwen3")
    engine = build_engine(model, config, Accelerator(cpu=True), sampling_params(config, ()))
    assert (engine.options.echo_share, engine.options.echo_mode, engine.options.max_num_seqs) == (
        0.5,
        "prompt",
        3,
    )
    prompts = make_prompts([3, 4])
    assert [c.token_ids for c in engine.generate(prompts, SamplingParams(4))] == [
        p.token_ids for p in prompts for _ in p.samples
    ]
    assert registry.engine_of("echo").words == "an echo"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"echo_shar": 1}, r"\['echo_shar'\]=1 is not read with engine='echo'.*did you mean 'echo_share'"),
        ({"echo_share": 2}, r"engine_kwargs\['echo_share'\]=2.0 must lie between 0 and 1"),
        ({"echo_share": "much"}, r"engine_kwargs\['echo_share'\]='much' is not a number"),
        ({"echo_mode": "lst"}, r"\['echo_mode'\]='lst' is unknown; it is one of prompt, last.*'last'"),
        ({"max_num_seqs": 2}, r"\['max_num_seqs'\]=2 is not read with .*: set max_num_seqs itself"),
    ],
)
def test_its_options_are_judged_as_the_runs_are(echo, make, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(engine="echo", engine_kwargs=kwargs)


def test_options_of_engines_here_are_options_of_the_run(make):
    for engine in ("auto", *registry.ENGINES):
        with pytest.raises(ValueError, match=rf"is not read with engine='{engine}': its options are options"):
            make(engine=engine, engine_kwargs={"echo_share": 1})


def test_names_are_known_early_and_none_here_is_taken(echo):
    check_values({"engine": "echo"})
    with pytest.raises(ValueError, match=r"engine='ech' is unknown.*transformers, echo.*Did you mean 'echo'"):
        check_values({"engine": "ech"})
    assert registry.engine_of("vllm") is registry.ENGINES["vllm"]
    with pytest.raises(TypeError, match=r"'wrong' .* is 'no engine', where .* named 'wrong' is needed"):
        registry.engine_of("wrong")


def test_an_engine_that_says_nothing_of_its_memory_is_not_planned(echo, make):
    config = make(engine="echo")
    assert planner_for(make_model("qwen3"), config) is None
    with pytest.raises(ValueError, match=r"engine='echo' is not planned"):
        workload_of(config, None, None, is_gpu=False)


def test_every_engine_here_can_be_made_and_has_words(make):
    for engine in registry.ENGINES.values():
        assert issubclass(engine.record, EngineOptions) and issubclass(GRPOConfig, engine.record)
        assert engine.words and engine.planned_as
        assert type(make().engine_options(engine.name)) is engine.record


def test_the_engines_are_known_by_name_before_anything_heavy_is_loaded():
    code = (
        "import sys, colocate.config.honoured, colocate.engines.registry as r\n"
        "records = [engine.record for engine in r.ENGINES.values()]\n"
        "print(*r.ENGINES, 'torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["native", "vllm", "rollout_server", "trtllm", "transformers", "False"]
