"""Print constraints for pip that choose a build of PyTorch for CPUs, where pip's sources have one.

A `+cpu` build is gigabytes smaller than the package registry's, which brings CUDA along. It is looked for
where pip is configured to look, and in an index that is named as an argument. Nothing is printed if there is
none that the project takes: pip then installs whatever resolves.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

# A CPU build brings no Triton, in whose interpreter the kernels' tests run without a GPU. Other builds ask
# for one version of it, and the tests run with that.
TRITON_OF_THE_TESTS = "3.6.0"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def main(index: str = "") -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (lowest,) = re.findall(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    command += ["--extra-index-url", index] if index else []
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        sys.exit(found.stderr)
    builds = [
        build for build in re.findall(r"([\d.]+)\+cpu", found.stdout) if numbers(build) >= numbers(lowest)
    ]
    if builds:
        print(f"torch=={max(builds, key=numbers)}+cpu")
        print(f"triton=={TRITON_OF_THE_TESTS}")


if __name__ == "__main__":
    main(*sys.argv[1:])
