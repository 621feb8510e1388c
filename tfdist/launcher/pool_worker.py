"""A worker of a `WorkerPool`: `pool_worker.py ADDRESS` answers questions until nobody asks.

It is run as a file, and takes the asking process's path before it imports anything of it.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client


def main(address: str) -> None:
    """Makes what answers, tells its rank, and answers."""
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
