"""GPUs by name, and the nodes that they are in."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet describes it."""

    name: str
    capability: tuple[int, int]
    """Compute capability, major and minor."""
    tflops: float
    """10^12 operations a second in bfloat16 with float32 sums, without sparsity."""
    bandwidth_gb_s: float
    """10^9 bytes a second."""
    memory_gib: float
    """Memory in GiB as the driver shows it."""
    link_gb_s: float
    """10^9 bytes a second, each way, between one GPU and all others of its node: NVLink, else PCI Express."""


# More particular names before those that they contain.
GPUS = (
    Gpu("B200", (10, 0), 2250, 8000, 178.3, 900),
    Gpu("H200", (9, 0), 989, 4800, 139.8, 450),
    Gpu("H100 PCIe", (9, 0), 756, 2000, 79.1, 64),
    Gpu("H100", (9, 0), 989, 3350, 79.1, 450),
    Gpu("H20 3e", (9, 0), 148, 4800, 139.8, 450),
    Gpu("H20", (9, 0), 148, 4000, 95.0, 450),
    Gpu("RTX PRO 6000", (12, 0), 503, 1792, 94.9, 64),  # Blackwell; the driver names the edition behind it
    Gpu("A100 80GB PCIe", (8, 0), 312, 1935, 79.2, 32),
    Gpu("A100 80GB", (8, 0), 312, 2039, 79.2, 300),  # a driver says A100-SXM4-80GB
    Gpu("A100", (8, 0), 312, 1555, 39.4, 300),
    Gpu("L40S", (8, 9), 362, 864, 44.4, 32),
    Gpu("RTX 5090", (12, 0), 209, 1792, 31.3, 64),
    Gpu("RTX 4090", (8, 9), 165, 1008, 23.5, 32),
    Gpu("RTX 3090", (8, 6), 71, 936, 23.6, 32),
    Gpu("RTX 5080", (12, 0), 112, 960, 15.4, 64),
    Gpu("RTX 5070 Ti", (12, 0), 87, 896, 15.4, 64),
    Gpu("RTX 5070", (12, 0), 61, 672, 11.4, 64),
    Gpu("A10", (8, 6), 125, 600, 22.1, 32),
    Gpu("L4", (8, 9), 121, 300, 22.0, 32),
)
TOO_OLD = ("T4", "V100", "P100", "RTX 20")
"""GPUs older than compute capability 8.0: they have no bfloat16, and the kernels do not run on them."""


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a run: equal nodes of equal GPUs."""

    num_gpus: int = 1
    num_nodes: int = 1
    gpu: Gpu | None = None
    """The model of all GPUs; None: its speed is not known."""

    def __post_init__(self) -> None:
        if self.num_gpus % self.num_nodes:
            raise ValueError(
                f"{self.num_gpus} GPUs cannot be divided among {self.num_nodes} nodes equally: set "
                "--num_gpus, which counts those of all nodes, to a multiple of --num_nodes."
            )

    @property
    def gpus_per_node(self) -> int:
        return self.num_gpus // self.num_nodes


def find_gpu(name: str) -> Gpu | None:
    """The GPU of the table that `name`, from a driver or a user, means; None if there is none."""
    words = _words(name)
    if "LAPTOP" in words:
        return None  # a smaller chip under the name of a larger one

    def is_named(known: str) -> bool:
        return _words(known) <= words

    for known in TOO_OLD:
        if is_named(known):
            raise ValueError(
                f"{name} is older than compute capability 8.0 (Ampere), which the kernels need; choose one "
                f"of {', '.join(gpu.name for gpu in GPUS)}."
            )
    if gpu := next((gpu for gpu in GPUS if is_named(gpu.name)), None):
        return gpu
    # A part of a name, such as "4090", is enough if only one GPU has it.
    candidates = [gpu for gpu in GPUS if words and words <= _words(gpu.name)]
    return candidates[0] if len(candidates) == 1 else None


def _words(name: str) -> set[str]:
    return set(re.sub(r"[-_ ]|(?<=RTX)(?=[0-9])", " ", name.upper()).split())
