"""docs/tensorrt-llm.md: its table names what is there, its commands are read, and the quick start runs."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from transformers import AutoConfig

from colocate import cli
from colocate.commands.train import _ask
from colocate.config.run_config import parse_run
from colocate.options.run_file import read_overrides
from processes import SOURCE, TRTLLM_SOURCE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tensorrt-llm.md").read_text()
SOURCES = " ".join(
    re.sub(r'"\s*\n\s*f?"', "", path.read_text())
    for path in [*TRTLLM_SOURCE.rglob("*.py"), SOURCE / "colocate/options/distributions.py"]
)
COMMANDS = [
    line for text in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in text.splitlines() if line
]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## Every part")[2].partition("\n\nWhy no third")[0].splitlines()
    if line.startswith("| ")
][1:]


# ── The table ────────────────────────────────────────────────────────────────────────────────────────────


def test_every_file_and_test_of_the_table_is_there():
    assert len(ROWS) > 25
    for component, here, test in ROWS:
        paths = [path for path in re.findall(r"`([\w/.]+)`", here) if "/" in path or path.endswith(".py")]
        for path in paths:
            places = (SOURCE / "colocate", TRTLLM_SOURCE, ROOT)
            assert any((place / path).is_file() for place in places), (component, path)
        if component == "critic":
            assert (here, test) == ("none: GRPO has no critic", "")
            continue
        assert paths, component
        file, _, name = test.strip("`").partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
            component,
            test,
        )


@pytest.mark.parametrize(
    "component",
    [
        *("Server per replica", "Replica", "Server adapter", "HTTP client", "Agent loop", "Shares of a GPU"),
        *("Variables", "Quick start"),
    ],
)
def test_no_component_is_forgotten(component):
    assert any(row[0].startswith(f"*{component}*") for row in ROWS)


def test_the_files_that_the_page_says_were_run_are_there():
    told = PAGE.partition("## What was run")[2].partition("## Installing")[0]
    for path in re.findall(r"`(tests/[\w/.]+)`", told):
        assert (ROOT / path).is_file(), path


# ── Commands and messages ────────────────────────────────────────────────────────────────────────────────


def test_every_command_of_the_page_is_read_by_its_own_parser(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    kinds = []
    for command in COMMANDS:
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
        kinds.append(Path(words[0]).name)
        if words[0] == "colocate":
            known, (file, *rest) = cli._build_parser().parse_known_args(words[1:])
            _, options = parse_run(read_overrides(rest))
            ask = _ask(known, options.get("engine"))
            assert file == "run.yaml" and ask is not None and ask.ranks_per_node == 8
            assert ask.shares == (2 if options.get("engine") == "trtllm" else 1)
        elif words[0] == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert words[1] in targets
        elif words[0] == "bash":
            subprocess.run(["bash", "-n", str(ROOT / words[1])], check=True)
        else:
            assert words[1] == "install" and words[-1] in ("./distributions/trtllm", "ray>=2.40")
    assert kinds == ["bash", *["colocate"] * 3, "make", *["pip"] * 3, "colocate"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    own = tomllib.loads((ROOT / "distributions/trtllm/pyproject.toml").read_text())["project"]
    assert own["dependencies"] == ["colocate[ray]"] and extras["ray"] == ["ray>=2.40"]


def test_messages_are_those_of_the_code():
    messages = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## Messages")[2], re.MULTILINE)
    assert len(messages) == 7
    for message in messages:
        assert message in SOURCES, message


def test_the_options_are_those_of_the_engine():
    from colocate.config.honoured import HONOURED_BY

    told = PAGE.partition("| option | |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", told, re.MULTILINE)) == HONOURED_BY["trtllm"]


def test_without_the_older_form_a_base_of_rotary_embeddings_would_be_ten_thousand():
    """transformers' own default, which an older release takes where it does not find `rope_theta`."""
    assert AutoConfig.for_model("qwen2").rope_parameters["rope_theta"] == 10_000.0


# ── The quick start ──────────────────────────────────────────────────────────────────────────────────────


def quick_start(tmp_path: Path, packages: list[str], *options: str, **variables: str) -> list[str]:
    """What `examples/math_ray.sh` would run where these packages are installed."""
    for name in packages:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "colocate").mkdir()
    (tmp_path / "colocate" / "__init__.py").touch()
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    (tmp_path / "colocate" / "__main__.py").write_text(code)
    (tmp_path / "python").symlink_to(sys.executable)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path), **variables}
    words = ["bash", str(ROOT / "examples" / "math_ray.sh"), *options]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("packages", "variables", "expected"),
    [
        (["tensorrt_llm", "vllm"], {}, "--engine trtllm --trtllm_tensor_parallel_size 2"),
        (["vllm"], {}, "--engine vllm --vllm_tensor_parallel_size 2"),
        (
            ["vllm"],
            {"TRTLLM_PYTHON": "/opt/python"},
            "--engine trtllm --trtllm_tensor_parallel_size 2 --trtllm_python /opt/python",
        ),
        ([], {}, "--engine native --shard 2"),
    ],
)
def test_the_quick_start_takes_the_engine_that_is_installed(tmp_path, packages, variables, expected):
    words = quick_start(tmp_path, packages, "2", "--gpus_per_node", "8", "--max_steps", "3", **variables)
    assert expected in " ".join(words) and words[-4:] == ["--gpus_per_node", "8", "--max_steps", "3"]
    assert words.count("--gpus_per_node") == 1
    known, rest = cli._build_parser().parse_known_args(words)
    run, options = parse_run(read_overrides(rest))
    assert _ask(known, options["engine"]).ranks_per_node == 8
    assert (run.dataset_name, run.reward_funcs) == ("trl-lib/DeepMath-103K", ["accuracy_reward"])
    assert options["max_steps"] == 3


def test_the_quick_start_needs_a_size():
    words = ["bash", str(ROOT / "examples" / "math_ray.sh")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode != 0 and "the tensor-parallel size is missing" in done.stderr
