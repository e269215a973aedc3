"""The documentation's site, and the pages that users begin with: what they say is what the code has."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

import colocate
from colocate import cli
from colocate.config.help import option_sections
from colocate.config.run_config import parse_run
from colocate.options.run_file import read_overrides
from colocate.planning.hardware import find_gpu
from colocate.reporting.run_log import TRAINER_METRICS
from tiny import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text()
    for name in (
        "index", "install", "quickstart-gpu", "concepts", "configuration", "metrics", "report",
        "memory", "troubleshooting", "moving-from-unsloth", "moving-from-verl", "comparison", "api",
    )
}  # fmt: skip
NOT_RUN = re.compile(r"pip install |python -c |python3 -m venv ")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def of_all(language: str) -> list[Any]:
    return [pytest.param(text, id=page) for page in PAGES for text in blocks(page, language)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory


def test_every_page_of_the_documentation_is_in_the_site(site):
    pages = {page.with_suffix(".html").name for page in (ROOT / "docs").glob("*.md")}
    assert pages <= {page.name for page in site.glob("*.html")}


def test_the_site_has_every_option_with_its_default(site):
    text = (site / "configuration.html").read_text().replace("<wbr>", "")
    for options in option_sections().values():
        for option in options:
            assert f"<code>{option.name}</code>" in text
    assert "<!-- options -->" not in text and "<code>num_generations</code></td>\n<td><code>8</code>" in text


def test_the_site_loads_nothing_from_elsewhere(site):
    for page in site.glob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]* src="([^"]+)"|<link[^>]* href="([^"]+)"', page.read_text()
        )
        assert not [one for one in map("".join, loaded) if one.startswith(("http", "//"))], page.name


def test_the_home_page_has_the_figures_of_the_readme():
    """Which tests/integration/test_readme.py compares with the results."""
    told = re.search(r"On one H200 a whole GRPO step is .*? tool of 50 ms", " ".join(PAGES["index"].split()))
    assert told and told[0] in " ".join((ROOT / "README.md").read_text().split())


def test_long_names_may_break_and_chinese_pages_say_their_language(site):
    metrics = (site / "metrics.html").read_text()
    assert "<td><code>skipped_<wbr>updates</code></td>" in metrics and '<td class="sentence">' in metrics
    assert '<div lang="zh-Hant">' in (site / "zh-Hant" / "quickstart.html").read_text()
    assert 'lang="zh-Hant"' not in metrics


def test_no_row_of_a_table_stands_alone(site):
    """A blank line within a table makes text of the rows below it."""
    for page in site.rglob("*.html"):
        assert not re.search(r"<p>\s*\|", page.read_text()), page.name


def test_links_out_of_the_pages_lead_somewhere():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((\.\./[^)#]+)", text):
            assert (ROOT / "docs" / target).exists(), (page, target)


def test_the_extras_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| (`.*?`) \| ", PAGES["install"].split("## What runs where")[0], flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert named == set(project["optional-dependencies"]) - {"test", "browser", "lint", "docs"}
    low, high = re.search(r"Python (3\.\d+) to (3\.\d+)\.", PAGES["install"]).groups()
    assert project["requires-python"] == f">={low},<3.{int(high[2:]) + 1}"


def test_the_check_of_an_installation():
    (line,) = [line for line in blocks("install", "bash")[-1].splitlines() if line.startswith("python -c ")]
    words = [sys.executable, *shlex.split(line)[1:]]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"{colocate.__version__}\n"


def test_the_tables_of_other_projects_are_whole_and_dated():
    page = PAGES["comparison"]
    assert re.search(r"last gone through on \d{4}-\d\d-\d\d,", page)
    lines = [line[1:-1] for line in page.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    heads = [row for row in rows if row[-1] == "SkyRL"]
    assert [head[1:] for head in heads] == [["colocate", "TRL", "Unsloth", "verl", "prime-rl", "SkyRL"]] * 2
    for subject, *cells in (row for row in rows if row not in heads and row[0] != "languages"):
        assert len(cells) == 6, subject
        assert all(re.match(r"(Y|p|–|\[[Yp]\])", cell) for cell in cells), subject


def test_words_of_the_code_are_where_the_table_says():
    table = PAGES["concepts"].partition("## Words of the code")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \|.*\| (`.*`) \|$", table, flags=re.MULTILINE)
    assert len(rows) > 10
    for names, files in rows:
        text = "".join((ROOT / "src/colocate" / name).read_text() for name in re.findall(r"`(.*?)`", files))
        for name in re.findall(r"`(\w+)`", names):
            assert f"class {name}" in text, name


def test_every_metric_is_explained():
    rows = re.findall(r"^\| (`.*?) \|", PAGES["metrics"], flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(named) == len(set(named))
    assert {name for name in named if "NAME" not in name} == TRAINER_METRICS


@pytest.mark.parametrize("text", of_all("yaml"))
def test_run_files_hold_known_options(text):
    parse_run(yaml.safe_load(text))


@pytest.mark.parametrize("text", of_all("bash"))
def test_commands_are_known(text):
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if not words or NOT_RUN.match(line) or words == ["colocate", "train", "--help"]:
            continue
        if words[0] == "make":
            (target, variable), makefile = words[1:], (ROOT / "Makefile").read_text()
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
            assert re.search(rf"^{variable.partition('=')[0]} \?=", makefile, flags=re.MULTILINE)
            continue
        if words[0] == "accelerate":
            words = launch_command_parser().parse_args(words[2:]).training_script_args
        if words[0] == "torchrun":
            args = get_args_parser().parse_args(words[1:])
            words = [args.training_script, *args.training_script_args]
        if words[0] == "docker":  # no daemon is here; tests/integration/test_package.py looks into the files
            assert words[1] == "run" or (ROOT / words[words.index("--file") + 1]).is_file()
            words = ["colocate", *words[words.index("colocate:cuda") + 1 :]] if words[1] == "run" else []
        if not words:
            continue
        assert words[0] == "colocate", line
        known, rest = cli._build_parser().parse_known_args(words[1:])
        if known.command == "train":
            parse_run(read_overrides(rest[1:] if rest[0].endswith(".yaml") else rest))
        if gpu := getattr(known, "device_name", None):
            assert find_gpu(gpu) is not None


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """A tiny model and a tiny dataset under whatever name is asked for."""
    directory = tmp_path / "model"
    make_model(max_position_embeddings=1024).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)

    def load(method, name, **options):
        return method(directory, **options)

    for auto in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(auto, "from_pretrained", partial(load, auto.from_pretrained))
    rows = datasets.Dataset.from_dict({"prompt": [f"{i} plus {i} is" for i in range(4)]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    monkeypatch.chdir(tmp_path)
    return rows


SHORT = "max_steps=1, use_cpu=True, num_generations=4, max_completion_length=8, per_device_train_batch_size=4"


def executed(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(
        compile(re.sub(r"num_generations=8(, max_completion_length=512)?", SHORT, code), "page", "exec"),
        names,
    )
    return names


def test_the_quickstart_in_python(local_hub):
    trainer = executed(*blocks("quickstart-gpu", "python"))["trainer"]
    assert trainer.state.global_step == 1 and trainer.train_dataset is local_hub


def test_the_configuration_in_python():
    args = executed(blocks("configuration", "python")[0])["args"]
    assert (args.learning_rate, args.num_generations) == (2e-6, 4)


def test_the_example_for_users_of_unsloth(local_hub):
    trainer = executed(*blocks("moving-from-unsloth", "python"))["make_trainer"]("tiny", local_hub, False)
    trainer.train()
    assert trainer.state.global_step == 1


def test_the_reward_for_users_of_verl():
    right = executed(*blocks("moving-from-verl", "python"))["right"]
    assert right(["it is 12", "11"], answer=[12, 12]) == [1.0, 0.0]


def test_no_block_is_forgotten():
    count = {page: len(blocks(page, "python")) for page in PAGES if blocks(page, "python")}
    assert count == {"quickstart-gpu": 1, "configuration": 1, "moving-from-unsloth": 1, "moving-from-verl": 1}


@pytest.mark.parametrize(
    "page", ["moving-from-unsloth", "moving-from-verl", "memory", "troubleshooting", "concepts"]
)
def test_options_that_the_pages_name_exist(page):
    """Words in code that look like options are options; in tables, peers' names have the first column."""
    known = {option.name for options in option_sections().values() for option in options} | {
        "steps_per_generation", "peft_config", "quantization_config", "torchrun",
    }  # fmt: skip
    for line in PAGES[page].splitlines():
        told = line.split(" | ")[-1] if page.startswith("moving") and line.startswith("|") else line
        if page.startswith("moving") and not line.startswith("|"):
            continue
        for code in re.findall(r"`([a-z0-9_]+)(?:[:=][^`]*)?`", told):
            if "_" in code:
                assert code in known or code in TRAINER_METRICS or code in WORDS, (page, code)


WORDS = {"output_dir", "rollout_server"}
