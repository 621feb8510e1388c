"""Launchers of MPI programs, and Horovod's. They give ranks, but no addresses."""

from __future__ import annotations

from tfdist.cluster.environments.base import Variables

_OPEN_MPI = "OMPI_COMM_WORLD_"
_HYDRA = ("PMI_RANK", "PMI_SIZE")
_MVAPICH = "MV2_COMM_WORLD_"

#: Launchers that give local ranks. Several of them set the variables of others, too.
LAUNCHERS = (
    Variables("Horovod", *(f"HOROVOD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Variables(
        "Open MPI", *(f"{_OPEN_MPI}{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    ),
    Variables(
        "MPICH / Hydra", *_HYDRA, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", required="MPI_LOCALRANKID"
    ),
    Variables("PALS", *_HYDRA, "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", required="PMI_LOCAL_RANK"),
    Variables("MVAPICH", *(f"{_MVAPICH}{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Variables(
        "jsrun", *(f"JSM_NAMESPACE_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    ),
)
FLUX = Variables("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE")
#: `srun`, Flux and others set these variables, too, for programs that use MPICH's protocol.
PMI = Variables("PMI", *_HYDRA, absent=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"))
