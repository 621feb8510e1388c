"""A worker of a `WorkerPool`: `pool_worker.py ADDRESS` handles requests until the pool ends.

It runs as a file, and receives the import path of the pool's process before it imports anything
from tfdist.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client


def main(address: str) -> None:
    """Creates the handler, sends this worker's rank, and handles requests."""
    with Client(address, "AF_UNIX") as connection:
        sys.path[:] = connection.recv()
        make_handler, arguments = connection.recv()
        handle = make_handler(*arguments)

        from tfdist import cluster

        connection.send((cluster.discover().rank, os.getpid()))
        while True:
            try:
                request = connection.recv()
            except EOFError:
                return
            connection.send(handle(*request))


if __name__ == "__main__":
    main(*sys.argv[1:])
