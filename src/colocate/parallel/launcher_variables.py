"""The variables by which launchers tell processes their ranks, which must not reach processes of others."""

from __future__ import annotations

from collections.abc import Mapping

OF_LAUNCHERS = (
    "SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_", "I_MPI_", "MPICH_", "MPIR_", "MV2_", "HYDRA_", "PRTE_",
    "ORTE_", "TORCHELASTIC_", "ROLE_", "GROUP_",
)  # fmt: skip
"""How variables begin by which other launchers tell processes their ranks; libraries would believe them."""


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what SLURM, PMI, PMIx, MPI and torchrun tell the processes that they start."""
    return {name: value for name, value in environment.items() if not name.startswith(OF_LAUNCHERS)}
