"""The variables of Kubernetes' training operator: ranks, and an address where rank 0 listens.

PyTorchJob sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does, which adds
LOCAL_RANK; TrainJob sets PET_NODE_RANK, PET_NNODES, PET_MASTER_ADDR and PET_MASTER_PORT. TFJob sets
TF_CONFIG.
"""

from __future__ import annotations

from tfdist.cluster.record import Cluster, Environ, number
from tfdist.errors import ClusterError

_PORT = 29500


def read(environ: Environ) -> Cluster | None:
    """Returns the cluster of a training operator's pods.

    Raises:
        ClusterError: The variables are incomplete or contradict each other.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
        master = "MASTER_"
    elif "PET_NODE_RANK" in environ and environ.get("PET_NNODES", "").isdigit():
        rank, size = number(environ, "PET_NODE_RANK"), number(environ, "PET_NNODES")
        master = "PET_MASTER_"
    else:
        return None
    host, port = environ.get(f"{master}ADDR", ""), number(environ, f"{master}PORT", _PORT)
    if size > 1 and not host:
        raise ClusterError(
            f"{size} workers, but ${master}ADDR is not set: the workers need the address of rank 0."
        )
    return Cluster(
        "Kubernetes",
        rank,
        size,
        number(environ, "LOCAL_RANK", 0),
        number(environ, "LOCAL_WORLD_SIZE", 1),
        master=f"{host}:{port}" if host else "",
    )
