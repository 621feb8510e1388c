"""The cores that a launcher leaves to a worker."""

from __future__ import annotations

import os


def describe(local_size: int) -> dict[str, str]:
    """Returns a row for the start-up table where a launcher keeps cores of this host idle.

    By itself Open MPI binds each rank to one core where there are two ranks or fewer.

    Args:
        local_size: Workers on this host.
    """
    own = len(os.sched_getaffinity(0))
    try:
        host = len(os.sched_getaffinity(os.getppid()))  # of the launcher, which is not bound
    except OSError:
        return {}
    if own * local_size >= host:
        return {}
    return {
        "cores": f"{own} of {host}: the launcher binds each worker; mpirun --bind-to none frees it"
    }
