"""The variables of mpirun and horovodrun: they tell ranks, and never addresses."""

from __future__ import annotations

from tfdist.cluster.record import Cluster, Environ, number

#: Launcher, then its variables for rank, size, local rank and local size. Open MPI, Hydra (MPICH,
#: Intel MPI) and MVAPICH, whose names begin with its second version's.
_VARIABLES = (
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MPICH / Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    (
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
)


def read(environ: Environ) -> Cluster | None:
    """Returns the cluster of an `mpirun`, or of a `horovodrun` without MPI.

    Raises:
        ClusterError: Its variables are incomplete or contradict each other.
    """
    for source, rank, size, local_rank, local_size in _VARIABLES:
        if rank in environ:
            return Cluster(
                source,
                number(environ, rank),
                number(environ, size),
                number(environ, local_rank, 0),
                number(environ, local_size, 1),
            )
    return None


def started_here(environ: Environ) -> bool:
    """Tells whether it was one of these itself that started this process.

    Slurm's srun sets PMI_RANK too, for programs that speak MPICH's protocol, but no local ranks.
    """
    return any(environ.get(names[3]) is not None for names in _VARIABLES)
