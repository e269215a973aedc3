"""What the program says of its options, and of packages that are missing, is so."""

import ast
import inspect
import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import TrainingArguments

from colocate.algorithms.advantages import ADVANTAGES, AGGREGATIONS
from colocate.algorithms.losses import LOSSES
from colocate.algorithms.objective_params import IMPORTANCE_SAMPLING_MODES
from colocate.algorithms.ratios import RATIOS
from colocate.config.grpo_config import GRPOConfig
from colocate.config.help import option_help
from colocate.config.honoured import HONOURED_BY, REFUSED, UNNECESSARY, honoured
from colocate.config.run_config import RunConfig
from colocate.engines.vllm.environment import NEWEST, OLDEST
from colocate.options.names import ALIASES


def test_help_lists_every_option_with_its_default():
    """Against the classes themselves, which the help does not import."""
    listed = {
        match[1]: match[2]
        for match in re.finditer(r"^  --(\w+)(?: \(default: (.*)\))?$", option_help(), re.MULTILINE)
    }
    classes = [cls for cls in (RunConfig, *GRPOConfig.__mro__) if cls.__module__.startswith("colocate.")]
    own = {name for cls in classes for name in inspect.get_annotations(cls)}
    declared = {f.name: f.default for f in (*fields(RunConfig), *fields(GRPOConfig))}
    assert listed == {
        name: None if default is None or default is MISSING else str(getattr(default, "value", default))
        for name, default in declared.items()
        if name in listed
    }
    used = "output_dir max_steps per_device_train_batch_size save_steps report_to seed eval_strategy"
    assert not set(used.split()) - listed.keys()
    recipes = (Path(__file__).parents[2] / "recipes").glob("*.yaml")
    assert not {name for recipe in recipes for name in yaml.safe_load(recipe.read_text())} - listed.keys()
    honoured_by_vllm = frozenset().union(*HONOURED_BY.values())
    assert not (listed.keys() & REFUSED.keys()) - honoured_by_vllm
    unlisted = declared.keys() & own - listed.keys()
    assert unlisted <= {"use_vllm", "vllm_mode"} | ALIASES.keys() | UNNECESSARY.keys() | REFUSED.keys()


def test_help_lists_the_names_of_each_table():
    """The help reads them from the source; here they come from the tables themselves."""
    text = " ".join(option_help().split())
    for table in (LOSSES, RATIOS, ADVANTAGES, AGGREGATIONS, IMPORTANCE_SAMPLING_MODES):
        assert f"One of {', '.join(table)}." in text


def test_every_option_that_is_declared_is_read():
    """What colocate's classes declare counts as honoured: somewhere in the source its name must be read."""
    package = Path(__file__).parents[2] / "src" / "colocate"
    nodes = [n for file in package.rglob("*.py") for n in ast.walk(ast.parse(file.read_text()))]
    read = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    declared = {f.name for f in fields(GRPOConfig)} - {f.name for f in fields(TrainingArguments)}
    assert len(declared) > 80
    assert (honoured(GRPOConfig) & declared) - read == set()


def test_hints_to_install_name_what_the_extras_require():
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    required = {line.partition(";")[0].strip() for lines in extras.values() for line in lines}
    sources = [file.read_text() for file in (root / "src").rglob("*.py")]
    hinted = {name for text in sources for name in re.findall(r"pip install ['\"]([^'\"]+)['\"]", text)}
    assert len(hinted) >= 7
    assert hinted <= required
    (vllm,) = (Requirement(name) for name in hinted if name.startswith("vllm"))
    past = Version(f"{NEWEST.major}.{NEWEST.minor + 1}")
    assert OLDEST in vllm.specifier and NEWEST in vllm.specifier and past not in vllm.specifier
