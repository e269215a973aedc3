"""Free ports and a clean environment for the processes that a run starts."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Mapping

PORTS = range(20_000, 32_768)
"""Ports that `free_port` chooses from, all below those that Linux gives to outgoing connections. A vLLM
server listens only after all its imports: until then an outgoing connection could take a free port above."""
NUM_TRIES = 100
"""Ports that `free_port` tries at most."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of this machine's address `host` that nothing listens on now."""
    choose = random.SystemRandom().choice  # not the generator that a training may have seeded
    for _ in range(NUM_TRIES):
        port = choose(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(
        errno.EADDRINUSE, f"{NUM_TRIES} ports of {host} between {PORTS[0]} and {PORTS[-1]} are taken"
    )


OF_LAUNCHERS = (
    "SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_", "I_MPI_", "MPICH_", "MPIR_", "MV2_", "HYDRA_", "PRTE_",
    "ORTE_", "TORCHELASTIC_", "ROLE_", "GROUP_",
)  # fmt: skip
"""Prefixes of variables by which other launchers tell processes their ranks; libraries would believe them."""


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that SLURM, PMI, PMIx, MPI and torchrun set."""
    return {name: value for name, value in environment.items() if not name.startswith(OF_LAUNCHERS)}
