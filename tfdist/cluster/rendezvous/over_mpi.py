"""The addresses of workers that mpirun started: each tells all, over MPI itself."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from tfdist.cluster import gpus as gpus_of_workers
from tfdist.cluster import networks
from tfdist.cluster.ports import held_ports
from tfdist.cluster.record import Cluster
from tfdist.errors import ClusterError


def meet(
    cluster: Cluster, gpus: Sequence[str], share_gpus: bool
) -> tuple[tuple[str, ...], list[int]]:
    """Returns `"host:port"` of every worker, and the positions of the GPUs that this one uses.

    The ports were free a moment ago.

    Args:
        cluster: Of this process, without addresses.
        gpus: Identifiers of the GPUs that this worker sees or asks for.
        share_gpus: Whether several workers may use one GPU.

    Raises:
        ClusterError: mpi4py is missing, or belongs to another MPI than mpirun does; or the GPUs
            cannot be divided.
    """
    mpi = _library(cluster)
    begun = mpi.Is_initialized()
    if not begun:
        mpi.Init()
    everyone = mpi.COMM_WORLD
    if (everyone.rank, everyone.size) != (cluster.rank, cluster.size):
        raise ClusterError(
            f"{cluster.source} says rank {cluster.rank} of {cluster.size}, mpi4py's library says "
            f"{everyone.rank} of {everyone.size} ({mpi.get_vendor()[0]}): "
            "use the mpirun of the MPI that mpi4py loads."
        )
    with held_ports(1) as (port,):  # until all have one, so that no two of a host are equal
        seen = everyone.allgather((networks.this_host(), port, tuple(gpus)))
    if not begun:
        # Now, while everyone is here: at exit it would wait for ranks that an error keeps away.
        mpi.Finalize()
    hosts = networks.reachable([host for host, _, _ in seen])
    found = tuple(f"{host}:{port}" for host, (_, port, _) in zip(hosts, seen, strict=True))
    divided = gpus_of_workers.divide([claim for _, _, claim in seen], share_gpus)
    return found, divided[cluster.rank]


def _library(cluster: Cluster) -> ModuleType:
    """mpi4py's MPI, not initialized."""
    try:
        return load()
    except (ImportError, RuntimeError) as error:
        raise ClusterError(
            f"{cluster.source} tells the workers no addresses, and mpi4py, which exchanges them, "
            f"is not usable ({' '.join(str(error).split())[:100]}): pip install mpi4py, or set "
            "TF_CONFIG."
        ) from None


def load() -> ModuleType:
    """Returns mpi4py's MPI, not initialized.

    Raises:
        ImportError: It is not installed.
        RuntimeError: It finds no MPI to load.
    """
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI
