"""The package as people install it: built as a release is, looked into, installed and started."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from colocate.version import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


TRTLLM = ROOT / "distributions" / "trtllm"


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """What `python -m build` makes of a copy of this checkout, with the setuptools that is here."""
    checkout = tmp_path_factory.mktemp("build") / "checkout"
    checkout.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copyfile(path, checkout / path.name)
    left_behind = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (".ci", "distributions", "docker", "docs", "examples", "recipes", "src"):
        shutil.copytree(ROOT / name, checkout / name, ignore=left_behind, dirs_exist_ok=True)
    words = [sys.executable, "-m", "build", "--no-isolation", str(checkout)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return checkout / "dist"


def test_the_version_stands_in_one_place():
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docker").iterdir(), ROOT / "pyproject.toml"]
    written = re.compile(rf"(?<![\d.]){re.escape(__version__)}(?![\d.])")
    assert [p.name for p in sources if p.is_file() and written.search(p.read_text())] == ["version.py"]


def test_the_wheel_has_the_package_and_nothing_else(dist):
    (wheel,) = dist.glob("*.whl")
    assert wheel.name == f"colocate-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"colocate-{__version__}.dist-info/METADATA"))
        entries = archive.read(f"colocate-{__version__}.dist-info/entry_points.txt").decode()
    files = (path for path in (ROOT / "src/colocate").rglob("*") if path.is_file())
    package = {f"colocate/{p.relative_to(ROOT / 'src/colocate')}" for p in files if p.suffix != ".pyc"}
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == package and "colocate/py.typed" in package
    assert "colocate = colocate.cli:main" in entries
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert (metadata["Name"], metadata["Version"]) == ("colocate", __version__)
    assert metadata["Requires-Python"] == ",".join(sorted(PROJECT["requires-python"].split(",")))
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert (
        metadata["License-Expression"] == "Apache-2.0"
        and metadata["Description-Content-Type"] == "text/markdown"
    )
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(needed) == len(PROJECT["dependencies"])
    assert "GRPO for language models" in metadata.get_payload()


def test_the_source_package_has_what_a_newcomer_tries(dist):
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", ".ci/cpu_torch.py"),
        *("recipes/quickstart.yaml", "examples/quickstart/warm_start.py", "docs/using-the-model.md"),
        *("src/colocate/py.typed", "distributions/trtllm/pyproject.toml", "distributions/trtllm/LICENSE"),
    ):
        assert name in names, name
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", "runs/"))]


def test_the_installed_wheel_starts(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    target = tmp_path / "site"
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run([sys.executable, *install], check=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    words = [str(target / "bin" / "colocate"), "--version"]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"colocate {__version__}\n"


def test_the_wheel_of_tensorrt_llm_has_its_files_and_plugs_in(tmp_path):
    """Made offline of a copy, as `pip install ./distributions/trtllm` makes it."""
    copy, target = tmp_path / "trtllm", tmp_path / "site"
    shutil.copytree(TRTLLM, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([sys.executable, *words, "--target", str(target), str(copy)], check=True)
    source, inside = TRTLLM / "src", {path.relative_to(target) for path in target.rglob("*")}
    files = (path for path in source.rglob("*") if path.suffix in (".py", ".typed"))
    assert {path.relative_to(source) for path in files} == {
        path for path in inside if path.parts[0] == "colocate_trtllm" and path.suffix in (".py", ".typed")
    }
    assert any(str(path).endswith("licenses/LICENSE") for path in inside)
    code = (
        "from colocate.engines.registry import engines\n"
        "engine = engines()['trtllm']\n"
        "print(engine.record.__name__, __import__('colocate_trtllm').__file__)"
    )
    paths = [str(target), str(ROOT / "src")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"TRTLLMOptions {target / 'colocate_trtllm' / '__init__.py'}\n"


def test_every_extra_that_an_error_or_a_page_names_is_declared():
    extras = PROJECT["optional-dependencies"].keys()
    texts = [
        p.read_text()
        for p in (*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
    ]
    named = {
        name.strip()
        for text in texts
        for group in re.findall(r"(?:colocate|\"\.|'\.)\[([\w, -]+)\]", text)
        for name in group.split(",")
    }
    assert named <= extras


# ── PyTorch for CPUs ─────────────────────────────────────────────────────────────────────────────────────


def constraints(directory: Path, *versions: str) -> list[str]:
    """What is chosen where pip finds wheels of these versions of torch, and the one that is installed."""
    for number in versions:
        (directory / f"torch-{number}-py3-none-any.whl").touch()
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(directory)}
    words = [sys.executable, str(ROOT / ".ci/cpu_torch.py")]
    done = subprocess.run(words, env={**os.environ, **pip}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_newest_build_for_cpus_is_taken_where_there_is_one(tmp_path):
    torch, triton = constraints(
        tmp_path, "2.1.0+cpu", "99.9.0+cpu", "99.10.0+cpu", "99.11.0", "99.12.0+cu130"
    )
    assert torch == "torch==99.10.0+cpu"
    assert triton.startswith("triton==")  # it brings none


def test_nothing_is_chosen_where_the_registrys_pytorch_is_all_there_is(tmp_path):
    """The registry's build asks for one version of Triton: a pin of another would end in a conflict."""
    installed = [f"torch=={version('torch')}"] if version("torch").endswith("+cpu") else []
    assert constraints(tmp_path, "99.0.0", "2.1.0+cpu")[:1] == installed


# ── Images ───────────────────────────────────────────────────────────────────────────────────────────────

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile and what stands behind each, on one line."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def copied(file: Path, directory: Path) -> Path:
    """A directory with what the image copies from the build's context, which .dockerignore makes smaller."""
    allowed = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE)
    for what in (argument for name, argument in instructions(file) if name == "COPY"):
        *sources, _ = what.split()
        for source in sources:
            assert source in allowed, f"{source} is left out of the context"
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copyfile
            copy(ROOT / source, directory / source)
    return directory


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_installs_extras_that_there_are_and_starts_the_command_line(file):
    (installed,) = (argument for name, argument in instructions(file) if "pip install" in argument)
    (extras,) = re.findall(r'"\.\[(.*?)\]"', installed)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert ("cuda" in extras.split(",")) == (file.name == "cuda.Dockerfile")
    assert ("ENTRYPOINT", '["colocate"]') in instructions(file)
    assert "--constraint" not in installed  # what resolves is what the package registry has
    # `make resolve` resolves, and `make plain-test` installs, all that the image for CPUs installs.
    (tested,) = (line for line in PROJECT["optional-dependencies"]["test"] if line.startswith("colocate["))
    if file.name == "cpu.Dockerfile":
        assert set(extras.split(",")) <= set(re.findall(r"[\w-]+", tested))


def test_an_image_is_built_from_what_it_copies(tmp_path):
    """All that pip needs is copied; both images copy it alike."""
    context = copied(DOCKERFILES[0], tmp_path)
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    words += ["--wheel-dir", str(tmp_path / "wheels"), str(context)]
    subprocess.run([sys.executable, *words], check=True)
    assert [wheel.name for wheel in (tmp_path / "wheels").iterdir()] == [
        f"colocate-{__version__}-py3-none-any.whl"
    ]
    (tmp_path / "other").mkdir()
    assert (copied(DOCKERFILES[1], tmp_path / "other") / "pyproject.toml").is_file()
