"""A worker of a `WorkerPool`: `pool_worker.py ADDRESS` answers questions until the pool ends.

It is run as a file, and takes over the import path of the pool's process before it imports
anything.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client


def main(address: str) -> None:
    """Creates the function that answers, sends this worker's rank, and answers."""
    with Client(address, "AF_UNIX") as connection:
        sys.path[:] = connection.recv()
        make_answer, arguments = connection.recv()
        answer = make_answer(*arguments)

        from tfdist import cluster

        connection.send((cluster.discover().rank, os.getpid()))
        while True:
            try:
                question = connection.recv()
            except EOFError:
                return
            connection.send(answer(*question))


if __name__ == "__main__":
    main(*sys.argv[1:])
