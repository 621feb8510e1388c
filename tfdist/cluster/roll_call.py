"""Who has come, before Horovod's Gloo waits for all.

Gloo gives up by aborting the process, in C++, without a word of who is missing. The server at which
its ranks find each other keeps any key: each rank leaves there first where it answers.
"""

from __future__ import annotations

import os
import time

from tfdist.cluster.signs_of_life import answering
from tfdist.errors import ClusterError

#: For which a rank waits for the others to be there.
SECONDS = 120.0
_RETRY_SECONDS = 0.1
_SCOPE = "tfdist-roll-call"


def roll_call(rank: int, size: int, seconds: float = SECONDS) -> dict[int, str]:
    """Returns where the other ranks give signs of life, when all have called it.

    Where no server of Horovod's was named, it returns nothing at once.

    Args:
        rank: Of this process.
        size: Number of processes.
        seconds: To wait at most.

    Raises:
        ClusterError: Ranks are missing after that time, which it names; or that server is.
    """
    if size == 1 or "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ:
        return {}
    deadline = time.monotonic() + seconds
    _tell(rank, f"{os.environ.get('HOROVOD_HOSTNAME', 'localhost')}:{answering()}")
    told: dict[int, str] = {}
    while missing := [other for other in range(size) if other not in told and other != rank]:
        told |= {other: place for other in missing if (place := _told(other))}
        if time.monotonic() > deadline and len(told) < size - 1:
            named = " and ".join(f"rank {other}" for other in missing if other not in told)
            raise ClusterError(
                f"Rank {rank} of {size} waited {seconds:.0f} s in start-up for {named}: see what "
                "became of that process, and whether its host reaches the one that launched it."
            )
        time.sleep(_RETRY_SECONDS)
    return told


def _server() -> tuple[str, str]:
    prefix = "HOROVOD_GLOO_RENDEZVOUS_"
    return os.environ[f"{prefix}ADDR"], os.environ[f"{prefix}PORT"]


def _tell(rank: int, place: str) -> None:
    from horovod.runner.http.http_client import put_data_into_kvstore

    try:
        put_data_into_kvstore(*_server(), _SCOPE, str(rank), place)
    except RuntimeError as error:
        raise ClusterError(
            f"Rank {rank} does not reach the launcher's server at {':'.join(_server())}: see "
            "whether the launcher still runs, and whether this host reaches that address."
        ) from error


def _told(rank: int) -> str:
    """What that rank has left; nothing where it has not come yet."""
    from horovod.runner.http.http_client import read_data_from_kvstore

    try:
        return read_data_from_kvstore(*_server(), _SCOPE, str(rank))
    except RuntimeError:
        return ""
