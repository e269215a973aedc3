"""What the tests of several processes share; they borrow the unit tests' tiny models."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_homes import environment_of_ray, home_of_ray
from ray_runs import write_run

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # engine_models


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    with home_of_ray() as directory:
        yield directory


@pytest.fixture(scope="session")
def environment(home) -> dict[str, str]:
    return environment_of_ray(home)


@pytest.fixture(scope="session")
def cluster(environment) -> Iterator[dict[str, str]]:
    """Two nodes, of two CPUs and of one, on this machine; yields the environment of their users."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    before, terminate = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ |= environment  # the nodes inherit it
    del os.environ["RAY_ADDRESS"]
    nodes = None
    try:
        nodes = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, include_dashboard=False))
        nodes.add_node(num_cpus=1)
        signal.signal(signal.SIGTERM, terminate)  # Ray has taken it
        os.environ.clear()
        os.environ |= before
        yield environment | {"RAY_ADDRESS": nodes.address}
    finally:
        os.environ.clear()
        os.environ |= before
        if nodes is not None:
            nodes.shutdown()


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Path]:
    """Makes the directory of a run; see `ray_runs`."""
    return lambda name, **options: write_run(tmp_path / name, **options)
