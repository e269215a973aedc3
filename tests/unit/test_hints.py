"""What the program says of its options, and of packages that are missing, is so."""

import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from colocate.config import GRPOConfig
from colocate.engines.vllm.environment import NEWEST, OLDEST
from colocate.option_help import option_help
from colocate.options import HONOURED_BY, REFUSED, RENAMED, UNNECESSARY
from colocate.run_config import RunConfig


def test_help_lists_every_option_with_its_default():
    """Against the classes themselves, which the help does not import."""
    listed = {
        match[1]: match[2]
        for match in re.finditer(r"^  --(\w+)(?: \(default: (.*)\))?$", option_help(), re.MULTILINE)
    }
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
    own = RunConfig.__annotations__ | GRPOConfig.__annotations__
    unlisted = declared.keys() & own.keys() - listed.keys()
    assert unlisted <= {"use_vllm", "vllm_mode"} | RENAMED.keys() | UNNECESSARY.keys() | REFUSED.keys()


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
