"""Launchers of MPI programs, and Horovod's. They give ranks, but no addresses."""

from __future__ import annotations

from tfdist.cluster.environments.base import Variables


def _prefixed(name: str, prefix: str) -> Variables:
    """Returns an environment whose four variables have a common prefix."""
    return Variables(
        name,
        rank=f"{prefix}_RANK",
        size=f"{prefix}_SIZE",
        local_rank=f"{prefix}_LOCAL_RANK",
        local_size=f"{prefix}_LOCAL_SIZE",
    )


_PMI = ("PMI_RANK", "PMI_SIZE")
_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PALS = ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")

#: Launchers that give local ranks.
LAUNCHERS = (
    _prefixed("Horovod", "HOROVOD"),
    _prefixed("Open MPI", "OMPI_COMM_WORLD"),
    Variables("MPICH / Hydra", *_PMI, *_HYDRA, required=_HYDRA[0]),
    Variables("PALS", *_PMI, *_PALS, required=_PALS[0]),
    _prefixed("MVAPICH", "MV2_COMM_WORLD"),
    _prefixed("jsrun", "JSM_NAMESPACE"),
)
FLUX = Variables("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE")
#: `srun`, Flux and others set these variables, too, for programs that use MPICH's protocol.
PMI = Variables("PMI", *_PMI, absent=(_HYDRA[0], _PALS[0]))
